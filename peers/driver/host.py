"""The whole of a driver, as its parts know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from peers.protocol.events import Event
from peers.protocol.peer import Peer


class Host(Protocol):
    """The driver of `peer`, as its parts know it."""

    peer: Peer

    def handle(self, event: Event) -> None:
        """Let the protocol take in an event, and begin what it wants done."""

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run this beside everything else, until it ends or the driver does."""

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        """Wait until something is true of the protocol's state."""
