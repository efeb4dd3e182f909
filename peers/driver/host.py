"""What the parts of a driver may ask of the whole, and of the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from peers.network.channel import Channel
from peers.network.throttle import Caps, LinkTime
from peers.presence.heartbeat import Heartbeat
from peers.presence.life_signs import LifeSign
from peers.presence.voice import Pace
from peers.protocol.events import Event
from peers.protocol.peer import Peer
from peers.transfer.download import PullTransport
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHeads
from peers.values.wire import Reach


class Host(Protocol):
    """The driver of `peer`, as its parts know it."""

    peer: Peer

    def handle(self, event: Event) -> None:
        """Let the protocol take in an event, and begin what it wants done."""

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run this beside everything else, until it ends or the driver does."""

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        """Wait until something is true of the protocol's state."""


class Transport(PullTransport, Protocol):
    """The network, as `peers.network.transport` provides it: calls, streams and pulls, and what it knows of peers."""

    caps: Caps
    no_round: LinkTime

    @property
    def addresses(self) -> tuple[str, ...]: ...

    @property
    def endpoints(self) -> tuple[str, ...]: ...
    @property
    def relays(self) -> tuple[str, ...]: ...
    def expect_answers_within(self, seconds: float) -> None: ...
    async def refresh_addresses(self) -> tuple[str, ...]: ...
    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool: ...
    def pace(self, run_id: str) -> Pace: ...
    def credentials(self, run_id: str) -> tuple[bytes, int]: ...
    def signed_heads_of(self, run_id: str) -> SignedHeads: ...
    def amendment_of(self, run_id: str) -> Amendment | None: ...
    async def publish(self, heartbeat: bytes | None, run_id: str, sign: LifeSign | None = None) -> bool: ...
    async def heartbeats(self, run_id: str) -> list[Heartbeat]: ...
    def silences(self, run_id: str) -> dict[str, float]: ...
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes: ...
    async def on_call(self, name: str, handler: Callable[[str, bytes], Coroutine[None, None, bytes]]) -> None: ...
    def stream(self, peer_id: str, protocol: str) -> AbstractAsyncContextManager[Channel]: ...
    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None: ...
    def reach(self) -> dict[str, Reach]: ...
    def sought(self) -> frozenset[str]: ...
