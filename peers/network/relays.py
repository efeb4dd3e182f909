"""The relay between two peers that can't dial each other: it passes bytes on, of connections that both dial to it.

The two speak TLS with each other: a relay reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from peers import metrics
from peers.network.data_port import TOKEN_BYTES, Splice
from peers.network.throttle import Throttle
from peers.values.wire import Count, Value

logger = logging.getLogger(__name__)

LINK_INFO = "links"  # name of the call

TOKEN_LIFETIME = 30.0  # seconds in which both must have come
TOKENS = 1024  # that are waited for at once
TOKENS_OF_ONE_PEER = 128  # as many as a newcomer meets others at once
JOINED_OF_ONE_TOKEN = 16
SPLICED_CONNECTIONS = 2048  # that are joined, or wait for it, at once
SPLICED_PIECE = 1 << 16  # bytes


class LinkInfo(Value):
    """The port at which a node accepts connections; 0: it accepts none."""

    port: Count


@dataclass
class _Meeting:
    """Two peers that were told to come; of each pair of connections the one that came first waits here."""

    asker: str
    waiting: dict[int, socket.socket] = field(default_factory=dict)
    joined: int = 0


class Splicer:
    """A node's relaying. `limit` is in bytes a second, over all."""

    def __init__(self, limit: float, connections: int = SPLICED_CONNECTIONS) -> None:
        self._throttle = Throttle(limit)
        self._connections = min(connections, SPLICED_CONNECTIONS)
        self._meetings: dict[bytes, _Meeting] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def expect(self, asker: str) -> bytes | None:
        """Return the token with which two peers' connections find each other; None when there is no room for them."""
        of_asker = sum(meeting.asker == asker for meeting in self._meetings.values())
        if len(self._meetings) >= TOKENS or of_asker >= TOKENS_OF_ONE_PEER or self._load >= self._connections:
            logger.warning("this relay carries as much as it can")
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._meetings[token] = _Meeting(asker)
        asyncio.get_running_loop().call_later(TOKEN_LIFETIME, self.cancel, token)
        return token

    def cancel(self, token: bytes) -> None:
        """Wait for nobody with this token any more."""
        meeting = self._meetings.pop(token, None)
        for sock in meeting.waiting.values() if meeting else ():
            sock.close()

    def arrived(self, sock: socket.socket, opening: Splice) -> None:
        """Join this connection with the other one that names the same, when that is here. Takes the socket over."""
        meeting = self._meetings.get(opening.token)
        if meeting is None or meeting.joined >= JOINED_OF_ONE_TOKEN:
            sock.close()
            return
        other = meeting.waiting.pop(opening.number, None)
        if other is not None:
            meeting.joined += 1
            pump = asyncio.create_task(self._join(sock, other))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        elif self._load < self._connections:
            meeting.waiting[opening.number] = sock
        else:
            sock.close()

    @property
    def _load(self) -> int:
        return len(self._pumps) + sum(len(meeting.waiting) for meeting in self._meetings.values())

    async def close(self) -> None:
        for token in list(self._meetings):
            self.cancel(token)
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        with metrics.RELAYED_CONNECTIONS.track_inprogress(), one, other:
            pumps = [asyncio.create_task(self._pump(one, other)), asyncio.create_task(self._pump(other, one))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        loop, piece = asyncio.get_running_loop(), memoryview(bytearray(min(SPLICED_PIECE, self._throttle.piece)))
        with suppress(OSError):
            while count := await loop.sock_recv_into(source, piece):
                await self._throttle.take(count)
                await loop.sock_sendall(sink, piece[:count])
                metrics.RELAYED_BYTES.inc(count)
