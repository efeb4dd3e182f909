"""The data port, a TCP port for links: each connection's opening message, limits on connections, probes, and relaying.

An opening is sent in the clear, and shows the purpose of the connection:

Hello    TLS follows, with the certificate that the opening shows, and then conversations (link.py)
Splice   the bytes that follow are passed on to the connection that shows the same token (`Splicer`)
Probe    the answer (length, ProbeAnswer) shows the caller's address as seen here, and its ports that are reachable
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Annotated, Any

from pydantic import Field

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.own_network import network_of
from peers.network.sockets import (
    can_dial,
    closed_on_failure,
    dial,
    endpoint_of,
    endpoint_of_peer,
    listen,
    parse_endpoint,
    tune,
)
from peers.network.throttle import Throttle
from peers.presence.allowances import Allowances
from peers.presence.heartbeat import Endpoint
from peers.values.system import cancel_and_wait, start_task
from peers.values.wire import Count, PeerId, Value, pack, unpack_from

logger = logging.getLogger(__name__)

LINK_INFO = "links"  # name of the call that returns a node's LinkInfo
MAGIC = b"DLLK"
VERSION = 1  # version of the opening messages; increased when their fields change
START = struct.Struct(">4sBBH")  # magic, version, kind, body length in bytes
BODY_BYTES = 2048  # bytes in a connection's first message after START, at most; a Hello has up to 1,100
TOKEN_BYTES = 16  # bytes of a relay's random token, too many for a peer to guess a valid token
CERTIFICATE_BYTES = 1024  # bytes of a peer's TLS certificate, at most; those that peers make have about 200
PROBED_PORTS = 4  # ports that a node dials for one probe, at most: a node must not scan ports for others
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Token = Annotated[bytes, Field(strict=True, min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]

LENGTH = struct.Struct(">H")
ANSWER_BYTES = 1024  # bytes of the answer to a probe, at most: an address and a few ports
PROBE_TIMEOUT = 8.0  # seconds for one probe and its answer, at most

OPENING_TIMEOUT = 10.0  # seconds to wait for the first message (the opening) of a new connection
STRANGERS = 256  # connections at once that have not sent their first message yet, at most
STRANGERS_OF_ONE_NETWORK = 80  # connections of one network without a first message yet, at most; one link may open 64
PAUSE = 1.0  # seconds without accepting connections, after too many files were open
UNKNOWN_OF_ONE_NETWORK = 160  # linked peers of one network whose heartbeats are unknown, at most; one NAT may hide many
NEWCOMERS_PER_SECOND = 2.0
"""Links per second that peers of one network may make with us while their heartbeats are unknown. The first
UNKNOWN_OF_ONE_NETWORK links may be made at once."""
ALL_NETWORKS = 10**6  # all IP networks together may make this many times as many links as one: in effect no limit

TOKEN_LIFETIME = 30.0  # seconds for which a relay's token is valid; both peers must connect to the relay within them
TOKENS = 1024  # a relay's valid tokens, at most; the relay joins the connections of two peers that show the same token
TOKENS_OF_ONE_PEER = 128
"""A relay's valid tokens for one peer, at most. The relay joins connections of two peers that show the same token."""
MEETING_CONNECTIONS = 16  # pairs of connections that a relay joins each time it connects two peers, at most
SPLICED_CONNECTIONS = 2048  # joined pairs of connections plus waiting connections of a relay, at most
SPLICED_PIECE = 1 << 16  # bytes that a relay reads from a connection at once, at most


class LinkInfo(Value):
    """The TCP port of a node's data port; 0 if the node accepts no connections."""

    port: Count


class Hello(Value):
    """The first message with which the owner of `certificate` (DER) asks the peer `to` for a TLS connection. With
    `is_yours`, only the peer `to` opens conversations on it; otherwise only the owner of `certificate` does."""

    to: PeerId
    certificate: Annotated[bytes, Field(strict=True, max_length=CERTIFICATE_BYTES)]
    is_yours: Annotated[bool, Field(strict=True)]


class Splice(Value):
    """The first message that asks a relay to join this connection with the other peer's connection of the same token
    and `number`. Two peers use one token for several such pairs of connections, which they number from 0."""

    token: Token
    number: Annotated[int, Field(strict=True, ge=0, lt=64)]


class _Probe(Value):
    """The first message that asks a node for the sender's endpoint, and to dial these ports at the sender's address."""

    ports: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


Accept = Callable[[socket.socket, Hello], Awaitable[None]]
"""Takes over the socket of a peer that sent a Hello. Raises: OSError, RemoteProtocolError."""
Opening = Hello | Splice | _Probe
KINDS: tuple[type[Opening], ...] = (Hello, Splice, _Probe)


def pack_opening(opening: Opening) -> bytes:
    body = pack(opening)
    return START.pack(MAGIC, VERSION, KINDS.index(type(opening)), len(body)) + body


async def read_opening(sock: socket.socket, sender: str) -> Opening:
    """Read a connection's first message, and not a byte more, and return it. Raises: RemoteProtocolError, OSError."""
    magic, version, kind, length = START.unpack(await _read_exactly(sock, START.size))
    if magic != MAGIC or version != VERSION or kind >= len(KINDS) or length > BODY_BYTES:
        raise RemoteProtocolError(sender, "its connection does not begin with a valid opening")
    wanted: type[Any] = KINDS[kind]
    opening: Opening = unpack_from(sender, wanted, await _read_exactly(sock, length))
    return opening


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    """Read and return `count` bytes. Raises: OSError, also if the other end closes the connection first."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data


class ProbeAnswer(Value):
    """A node's answer to a probe: the `endpoint` from which the probe came, and the requested ports at which the node
    could connect to the prober (`open`)."""

    endpoint: Endpoint
    open: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


async def probe(endpoint: str, ports: tuple[int, ...] = (), local_port: int = 0) -> ProbeAnswer:
    """Ask the node at `endpoint` for our endpoint as it sees it, and to dial `ports` at our address. Return its answer.

    The request is sent from `local_port` (0: any). Raises: OSError; RemoteProtocolError if the answer is invalid.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            with await dial(endpoint, PROBE_TIMEOUT, local_port) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, pack_opening(_Probe(ports=ports)))
                (length,) = LENGTH.unpack(await _read_exactly(sock, LENGTH.size))
                return unpack_from(
                    endpoint, ProbeAnswer, await _read_exactly(sock, min(length, ANSWER_BYTES)), ANSWER_BYTES
                )
    except TimeoutError as error:
        raise OSError(f"no answer from {endpoint}") from error


async def _answer_probe(sock: socket.socket, request: _Probe) -> None:
    """Dial the requested ports at the sender's own address, send the result, and close `sock`. Raises: OSError."""
    with sock:
        endpoint, ports = endpoint_of_peer(sock), set(request.ports)
        host, _ = parse_endpoint(endpoint)
        answers = await asyncio.gather(*(can_dial(endpoint_of(host, port)) for port in ports))
        answer = pack(ProbeAnswer(endpoint=endpoint, open=tuple(compress(ports, answers))))
        await asyncio.get_running_loop().sock_sendall(sock, LENGTH.pack(len(answer)) + answer)


class Listener:
    """The data port: accepts connections at several addresses, and acts on the first message of each connection."""

    def __init__(self, hosts: Sequence[str], port: int, accept: Accept, splicer: Splicer | None) -> None:
        """Listen at `hosts`. Call `accept` with each socket that sent a Hello. Without a `splicer`, do not relay.

        Raises: LocalNetworkError if the port is in use.
        """
        self._listeners = listen(hosts, port)
        self._accept = accept
        self._splicer = splicer
        self._strangers: dict[asyncio.Task[None], str] = {}  # IP network of the connecting host, by task; oldest first
        self.port: int = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            self._watch(listener)

    async def close(self) -> None:
        while self._listeners:
            listener = self._listeners.pop()
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await cancel_and_wait(*self._strangers)
        if self._splicer:
            await self._splicer.close()

    def _watch(self, listener: socket.socket) -> None:
        # loop.sock_accept is not used: if cancelled at the wrong moment, it leaves an accepted socket open.
        if listener in self._listeners:  # False if the listener was closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept_one, listener)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, (host, port, *_) = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the connection is closed already
            return
        except OSError as error:  # for example, too many open files
            logger.warning("cannot accept a connection: %s", error)
            asyncio.get_running_loop().remove_reader(listener)
            asyncio.get_running_loop().call_later(PAUSE, self._watch, listener)
            return
        host = host.partition("%")[0]
        network = network_of(host)
        if list(self._strangers.values()).count(network) >= STRANGERS_OF_ONE_NETWORK:
            sock.close()
            return
        if len(self._strangers) >= STRANGERS:  # drop the oldest connection, so that a flood cannot lock out other peers
            next(iter(self._strangers)).cancel()
        task = start_task(self._welcome(sock, endpoint_of(host, port)))
        self._strangers[task] = network
        task.add_done_callback(self._strangers.pop)

    async def _welcome(self, sock: socket.socket, sender: str) -> None:
        try:
            with closed_on_failure(sock):
                tune(sock)
                async with asyncio.timeout(OPENING_TIMEOUT):
                    opening = await read_opening(sock, sender)
            match opening:
                case Hello():
                    await self._accept(sock, opening)
                case Splice() if self._splicer:
                    self._splicer.arrived(sock, opening)
                case Splice():
                    sock.close()
                case _:
                    await _answer_probe(sock, opening)
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("connection").inc()
            logger.debug("dropped a connection of %s: %s", sender, error)
        except OSError as error:  # includes TimeoutError, if the connection's first message is missing
            logger.debug("a connection of %s broke: %r", sender, error)
        except Exception:
            logger.exception("cannot handle a connection of %s", sender)
            sock.close()


class Strangers:
    """A register of linked peers whose heartbeats are unknown. It limits their number, since new peer ids cost nothing.

    Each network may have a few of them, and add a few at once. If there are too many, the network that has most loses
    the one that was silent for longest.
    """

    def __init__(self, most: int, end: Callable[[str], None]) -> None:
        """Create a register of at most `most` peers. `end` closes the link with a peer."""
        self._most = most
        self._end = end
        self._networks: dict[str, str] = {}  # network of each peer, by peer id; the longest silent peer first
        self._newcomers = Allowances(UNKNOWN_OF_ONE_NETWORK, NEWCOMERS_PER_SECOND, together=ALL_NETWORKS)

    def come(self, peer: str, network: str, now: float) -> bool:
        """Register a new peer. Return False if its network adds peers too fast: the caller must close the link then."""
        if not self._newcomers.has_some(network, now):
            return False
        self._newcomers.spend(network, 1.0)
        counts = Counter(self._networks.values())
        if counts[network] >= UNKNOWN_OF_ONE_NETWORK:
            self._make_room(network)
        elif len(self._networks) >= self._most:
            self._make_room(max(counts, key=counts.__getitem__))
        self._networks[peer] = network
        return True

    def spoke(self, peer: str) -> None:
        if peer in self._networks:
            self._networks[peer] = self._networks.pop(peer)

    def went(self, peer: str) -> None:
        """Remove a peer, because its link is down or its heartbeat is known."""
        self._networks.pop(peer, None)

    def _make_room(self, network: str) -> None:
        peer = next(peer for peer, one in self._networks.items() if one == network)
        self.went(peer)
        self._end(peer)


# Relaying -----------------------------------------------------------------------------------------------------------
@dataclass
class _Meeting:
    """Connections of two peers that showed this relay the same token. The first of each pair waits for the second."""

    asker: str
    waiting: dict[int, socket.socket] = field(default_factory=dict)
    joined: int = 0


class Splicer:
    """A relay of bytes between peers that cannot dial each other. `limit` is in bytes a second, for all peers together.

    The two speak TLS with each other, so the relay cannot read their data.
    """

    def __init__(self, limit: float, connections: int = SPLICED_CONNECTIONS) -> None:
        self._throttle = Throttle(limit)
        self._connections = min(connections, SPLICED_CONNECTIONS)
        self._meetings: dict[bytes, _Meeting] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def expect(self, asker: str) -> bytes | None:
        """Return a new token for connections to this relay by `asker` and another peer; None if the relay is full."""
        of_asker = sum(meeting.asker == asker for meeting in self._meetings.values())
        if len(self._meetings) >= TOKENS or of_asker >= TOKENS_OF_ONE_PEER or self._load >= self._connections:
            logger.warning("cannot relay for another pair of peers: the limit of pairs or connections is reached")
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._meetings[token] = _Meeting(asker)
        asyncio.get_running_loop().call_later(TOKEN_LIFETIME, self.cancel, token)
        return token

    def cancel(self, token: bytes) -> None:
        """Make a token invalid, and close the connections that wait with this token."""
        meeting = self._meetings.pop(token, None)
        for sock in meeting.waiting.values() if meeting else ():
            sock.close()

    def arrived(self, sock: socket.socket, opening: Splice) -> None:
        """Join a new socket with the waiting one of the same token and number. If none waits, let the new one wait.
        Close the new one if its token is invalid, or too many sockets wait or are joined."""
        meeting = self._meetings.get(opening.token)
        if meeting is None or meeting.joined >= MEETING_CONNECTIONS:
            sock.close()
            return
        other = meeting.waiting.pop(opening.number, None)
        if other is not None:
            meeting.joined += 1
            pump = start_task(self._join(sock, other))
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
            pumps = [start_task(self._pump(one, other)), start_task(self._pump(other, one))]
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
