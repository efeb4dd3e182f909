"""Asking other peers for what they say they have and this node lacks: one at a time, and nobody again and again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError

logger = logging.getLogger(__name__)

ASK_TIMEOUT = 10.0  # seconds
PAUSE = 30.0  # seconds for which a peer is not asked again
ASKED_LIMIT = 1000


class AskingNetwork(Protocol):
    peer_id: str

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes: ...


class Asking:
    """Remembers whom it has asked, so that a peer that has nothing to give is left alone for a while."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, peers: Iterable[str], exchange: Callable[[str], Coroutine[None, None, None]]) -> None:
        """Begin to ask one of these peers, unless another is being asked. `exchange` raises PeerUnreachableError and
        RemoteProtocolError."""
        if self._task is not None and not self._task.done():
            return
        now = time.monotonic()
        if len(self._asked) > ASKED_LIMIT:
            self._asked = {peer: at for peer, at in self._asked.items() if now - at < PAUSE}
        due = [peer for peer in peers if now - self._asked.get(peer, -PAUSE) >= PAUSE]
        if due:
            peer = random.choice(due)
            self._asked[peer] = now
            self._task = asyncio.create_task(_ask(peer, exchange))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _ask(peer: str, exchange: Callable[[str], Coroutine[None, None, None]]) -> None:
    try:
        await exchange(peer)
    except PeerUnreachableError as error:
        logger.debug("%s", error)
    except RemoteProtocolError as error:
        metrics.DROPPED.labels("message").inc()
        logger.warning("dropped %s", error)
