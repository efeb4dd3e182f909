"""The nodes between two peers that can't dial each other: how a peer finds them, and how a node passes bytes on.

The two speak TLS with each other: a relay reads nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError
from peers.network.contacts import host_of
from peers.network.data_port import TOKEN_BYTES, Splice, probe
from peers.network.sockets import endpoint_of, parse_endpoint
from peers.network.throttle import Throttle
from peers.values.system import cancel_and_wait
from peers.values.wire import Count, Value

logger = logging.getLogger(__name__)

LINK_INFO = "links"  # name of the call
KNOWN = 64  # nodes at most

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
class Relay:
    """A node that introduces peers. `endpoint` is its data port.

    `is_reached`: we have had a connection to that port, and not to another one of the node's.
    """

    peer: str
    address: str
    endpoint: str
    is_reached: bool = False
    seen: tuple[str, ...] | None = None
    """Endpoints at which it could dial our data port; None: it has not been asked, or has not answered."""


AskInfo = Callable[[str, str], Awaitable[LinkInfo]]
"""(peer id, multiaddr) -> what that node says of itself, over libp2p. Raises: PeerUnreachableError."""


class Relays:
    """Nodes by multiaddr: those of the invite, and others that peers are introduced by.

    Anybody can name a node of any id at any address, so a node's addresses have nothing to do with each other.
    """

    def __init__(self, ask: AskInfo) -> None:
        self._ask = ask
        self._known: dict[str, Relay] = {}

    async def find(self, address: str) -> Relay | None:
        """Return the node at a multiaddr; None when it does not answer, or has no data port."""
        if address in self._known:
            return self._known[address]
        host, peer = host_of(address), address.rstrip("/").rpartition("/")[2]
        try:
            info = await self._ask(peer, address)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s says nothing of its data port: %s", address, error)
            return None
        if not host or not 0 < info.port < 65536:
            return None
        if len(self._known) >= KNOWN:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(address, Relay(peer, address, endpoint_of(host, info.port)))

    def forget(self, relay: Relay) -> None:
        """Ask it again next time: it was not there."""
        self._known.pop(relay.address, None)

    def forget_reach(self) -> None:
        """Our network has changed: which endpoints we reach is to be found out anew."""
        for relay in self._known.values():
            relay.is_reached = False

    async def look_at_us(self, relay: Relay, port: int) -> None:
        """Find out whether the node can dial our data port."""
        try:
            seen = await probe(relay.endpoint, (port,))
        except (OSError, RemoteProtocolError) as error:
            logger.debug("%s does not say how it sees us: %s", relay.address, error)
            return
        host, _ = parse_endpoint(seen.endpoint)
        relay.seen = (endpoint_of(host, port),) if port in seen.open else ()


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
        await cancel_and_wait(*self._pumps)

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        with metrics.RELAYED_CONNECTIONS.track_inprogress(), one, other:
            pumps = [asyncio.create_task(self._pump(one, other)), asyncio.create_task(self._pump(other, one))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(*pumps)

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        loop, piece = asyncio.get_running_loop(), memoryview(bytearray(min(SPLICED_PIECE, self._throttle.piece)))
        with suppress(OSError):
            while count := await loop.sock_recv_into(source, piece):
                await self._throttle.take(count)
                await loop.sock_sendall(sink, piece[:count])
                metrics.RELAYED_BYTES.inc(count)
