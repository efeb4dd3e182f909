"""Passing bytes on between two peers that have no other way. They speak TLS with each other: a relay reads nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from peers import metrics
from peers.links.opening import TOKEN_BYTES, Splice
from peers.streams import RefusalError
from peers.throttle import Throttle

logger = logging.getLogger(__name__)

TOKEN_LIFETIME = 30.0  # seconds in which both must have come
TOKENS = 1024  # that are waited for at once
CONNECTIONS = 1024  # that are spliced at once
PIECE = 1 << 17  # bytes


@dataclass
class _Meeting:
    """Two peers that were told to come; of each pair of connections the one that came first waits here."""

    until: float
    waiting: dict[int, socket.socket] = field(default_factory=dict)


class Splicer:
    """A node's relaying. `limit` is in bytes a second, over all."""

    def __init__(self, limit: float) -> None:
        self._throttle = Throttle(limit)
        self._meetings: dict[bytes, _Meeting] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def expect(self) -> bytes:
        """Return the token with which two peers' connections find each other. Raises: RefusalError."""
        self._forget()
        if len(self._meetings) >= TOKENS or len(self._pumps) >= CONNECTIONS:
            raise RefusalError("this relay carries as much as it can")
        token = secrets.token_bytes(TOKEN_BYTES)
        self._meetings[token] = _Meeting(time.monotonic() + TOKEN_LIFETIME)
        return token

    def arrived(self, sock: socket.socket, opening: Splice) -> None:
        """Join this connection with the other one that names the same, when that is here. Takes the socket over."""
        self._forget()
        meeting = self._meetings.get(opening.token)
        if meeting is None:
            sock.close()
            return
        other = meeting.waiting.pop(opening.number, None)
        if other is None:
            meeting.waiting[opening.number] = sock
            return
        pump = asyncio.create_task(self._join(sock, other))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for meeting in self._meetings.values():
            meeting.until = 0.0
        self._forget()

    def _forget(self) -> None:
        now = time.monotonic()
        for token in [token for token, meeting in self._meetings.items() if meeting.until < now]:
            for sock in self._meetings.pop(token).waiting.values():
                sock.close()

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        metrics.RELAYED_CONNECTIONS.inc()
        pumps = [asyncio.create_task(self._pump(one, other)), asyncio.create_task(self._pump(other, one))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            one.close()
            other.close()
            metrics.RELAYED_CONNECTIONS.dec()

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        loop, piece = asyncio.get_running_loop(), memoryview(bytearray(PIECE))
        with suppress(OSError):
            while count := await loop.sock_recv_into(source, piece):
                await self._throttle.take(count)
                await loop.sock_sendall(sink, piece[:count])
                metrics.RELAYED_BYTES.inc(count)
