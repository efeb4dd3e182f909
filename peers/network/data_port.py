"""The data port: the first bytes on a TCP connection of ours, who may send them, and the answer to a probe.

They say who dials whom and what for, in the clear:

Hello    TLS follows, with the certificate that the opening shows, and then conversations (link.py)
Splice   bytes follow that are passed on to whoever shows the same token (relays.py)
Probe    an answer follows (length, Seen): the address we are seen at, and which of our ports can be reached there
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
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
from peers.presence.allowances import Allowances
from peers.presence.heartbeat import Endpoint
from peers.values.wire import PeerId, Value, WireError, pack, unpack

logger = logging.getLogger(__name__)

MAGIC = b"DLLK"
VERSION = 1
START = struct.Struct(">4sBBH")  # magic, version, kind, length of the body
BODY_BYTES = 2048
TOKEN_BYTES = 16
CERTIFICATE_BYTES = 1024  # at most; ours have about 200
PROBED_PORTS = 4
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Token = Annotated[bytes, Field(strict=True, min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]

LENGTH = struct.Struct(">H")
ANSWER_BYTES = 1024
PROBE_TIMEOUT = 8.0  # seconds

OPENING_TIMEOUT = 10.0  # seconds
STRANGERS = 256  # connections at once that have not said who they are
STRANGERS_OF_ONE_NETWORK = 80  # a peer may widen its link to 64, and many may live behind one address
PAUSE = 1.0  # seconds, when there are too many open files
UNKNOWN_OF_ONE_NETWORK = 160  # peers without a heartbeat: a swarm of 128 on one machine, or a lab behind one NAT
NEWCOMERS_PER_SECOND = 2.0  # of one network, once so many have come
ALL_NETWORKS = 10**6  # times that: there is no limit on all of them together


class Hello(Value):
    """I am the peer of this certificate, and dial the peer `to`.

    Each connection is used by one of the two to open conversations on; `is_yours`: by you.
    """

    to: PeerId
    certificate: Annotated[bytes, Field(strict=True, max_length=CERTIFICATE_BYTES)]
    is_yours: Annotated[bool, Field(strict=True)]


class Splice(Value):
    """Join this connection with the one of the other peer that has the token; `number` tells several apart."""

    token: Token
    number: Annotated[int, Field(strict=True, ge=0, lt=64)]


class _Probe(Value):
    """Tell me where I am seen, and dial these ports of mine there."""

    ports: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


Opening = Hello | Splice | _Probe
Accept = Callable[[socket.socket, Opening], Awaitable[None]]
"""Takes the socket over. Raises: OSError, RemoteProtocolError."""
KINDS: tuple[type[Opening], ...] = (Hello, Splice, _Probe)


def pack_opening(opening: Opening) -> bytes:
    body = pack(opening)
    return START.pack(MAGIC, VERSION, KINDS.index(type(opening)), len(body)) + body


async def read_opening(sock: socket.socket, who: str) -> Opening:
    """Read exactly an opening, and nothing of what follows. Raises: RemoteProtocolError, OSError."""
    magic, version, kind, length = START.unpack(await _read_exactly(sock, START.size))
    if magic != MAGIC or version != VERSION or kind >= len(KINDS) or length > BODY_BYTES:
        raise RemoteProtocolError(who, "its connection does not begin as one of ours")
    wanted: type[Any] = KINDS[kind]
    try:
        opening: Opening = unpack(wanted, await _read_exactly(sock, length))
    except WireError as error:
        raise RemoteProtocolError(who, str(error)) from error
    return opening


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    """Raises: OSError, also when the other end closes the connection before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data


class Seen(Value):
    """`endpoint` is where the probing connection came from, `open` which of the ports it named answered there."""

    endpoint: Endpoint
    open: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


async def probe(endpoint: str, ports: tuple[int, ...] = (), local_port: int = 0) -> Seen:
    """Ask the node at `endpoint`. Raises: OSError; RemoteProtocolError for an answer that is none."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            with await dial(endpoint, PROBE_TIMEOUT, local_port) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, pack_opening(_Probe(ports=ports)))
                (length,) = LENGTH.unpack(await _read_exactly(sock, LENGTH.size))
                return unpack(Seen, await _read_exactly(sock, min(length, ANSWER_BYTES)), ANSWER_BYTES)
    except TimeoutError as error:
        raise OSError(f"no answer from {endpoint}") from error
    except WireError as error:
        raise RemoteProtocolError(endpoint, str(error)) from error


async def answer_probe(sock: socket.socket, asked: _Probe) -> None:
    """Answer, and close the connection. Only the address that asks is dialled. Raises: OSError."""
    with sock:
        here, ports = endpoint_of_peer(sock), set(asked.ports)
        host, _ = parse_endpoint(here)
        answers = await asyncio.gather(*(can_dial(endpoint_of(host, port)) for port in ports))
        answer = pack(Seen(endpoint=here, open=tuple(compress(ports, answers))))
        await asyncio.get_running_loop().sock_sendall(sock, LENGTH.pack(len(answer)) + answer)


class Listener:
    """The data port, on all of these addresses."""

    def __init__(self, hosts: Sequence[str], port: int, accept: Accept) -> None:
        """Raises: LocalNetworkError when the port can't be used."""
        self._listeners = listen(hosts, port)
        self._accept = accept
        self._strangers: dict[asyncio.Task[None], str] = {}  # the oldest first, with their networks
        self.port: int = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            self._watch(listener)

    async def close(self) -> None:
        while self._listeners:
            listener = self._listeners.pop()
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        strangers = list(self._strangers)
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        # Not by sock_accept: what that has accepted in the moment when it is cancelled stays open.
        if listener in self._listeners:  # not closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept_one, listener)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, (host, port, *_) = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is gone already
            return
        except OSError as error:  # too many open files
            logger.warning("cannot accept a connection: %s", error)
            asyncio.get_running_loop().remove_reader(listener)
            asyncio.get_running_loop().call_later(PAUSE, self._watch, listener)
            return
        host = host.partition("%")[0]
        network = network_of(host)
        if list(self._strangers.values()).count(network) >= STRANGERS_OF_ONE_NETWORK:
            sock.close()
            return
        if len(self._strangers) >= STRANGERS:  # the oldest has to go, so that a flood shuts nobody out
            next(iter(self._strangers)).cancel()
        task = asyncio.create_task(self._welcome(sock, endpoint_of(host, port)))
        self._strangers[task] = network
        task.add_done_callback(self._strangers.pop)

    async def _welcome(self, sock: socket.socket, who: str) -> None:
        try:
            with closed_on_failure(sock):
                tune(sock)
                async with asyncio.timeout(OPENING_TIMEOUT):
                    opening = await read_opening(sock, who)
            await self._accept(sock, opening)
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("connection").inc()
            logger.debug("dropped a connection of %s: %s", who, error)
        except OSError as error:  # also a TimeoutError: it does not say what it wants
            logger.debug("a connection of %s broke: %r", who, error)
        except Exception:
            logger.exception("cannot welcome %s", who)
            sock.close()


class Strangers:
    """The peers with a link here of which no heartbeat is known: anybody can make identities.

    One network brings few of them, and few at once. Of too many, the one that was silent for longest has to go, of the
    network that has most of them.
    """

    def __init__(self, most: int, end: Callable[[str], None]) -> None:
        """`end` closes the link with a peer."""
        self._most = most
        self._end = end
        self._networks: dict[str, str] = {}  # by peer, the longest silent first
        self._newcomers = Allowances(UNKNOWN_OF_ONE_NETWORK, NEWCOMERS_PER_SECOND, together=ALL_NETWORKS)

    def come(self, peer: str, network: str, now: float) -> bool:
        """Count one more. Return whether it may stay."""
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
        """Count a peer no more: its link is down, or a heartbeat is known."""
        self._networks.pop(peer, None)

    def _make_room(self, network: str) -> None:
        peer = next(peer for peer, one in self._networks.items() if one == network)
        self.went(peer)
        self._end(peer)
