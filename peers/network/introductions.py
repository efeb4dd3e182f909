"""How two peers meet that can't dial each other: a node that both can dial tells each where the other is seen.

    A ── Introduce(B, where I am seen) ──► node ── Meeting(A, where it is seen) ──► B
    A ◄──── Introduced(where B is seen) ── node ◄── where I am seen ─────────────── B

Then both dial at once, each from the ports at which the node saw it: to their routers it looks as if they had asked for
what comes in. Where a router gives every connection another port, that fails, and the node joins two connections that
they dial out to it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.network.connection import Connection, greet, welcome
from peers.network.credentials import Credentials
from peers.network.opening import Hello, Splice, Token, pack_opening, read_opening, send
from peers.network.probing import probe
from peers.network.sockets import closed_on_failure, dial
from peers.presence.heartbeat import Endpoint
from peers.values.wire import Count, PeerId, Reach, Value

logger = logging.getLogger(__name__)

CONNECTIONS = 2  # that two peers make when they meet, one for either; more by meeting again
MOST = 16
PUNCH_TIMEOUT = 4.0  # seconds
ATTEMPT_TIMEOUT = 1.5  # seconds of one dial of those: a SYN that came too early is lost
SPLICE_TIMEOUT = 10.0  # seconds
HELLO_TIMEOUT = 10.0  # seconds
REFUSED_PAUSE = 0.25  # seconds before a port that nobody opens yet is dialled again
NO_ROUTE = (errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as IPv6 where there is none

Add = Callable[[Connection], None]

Places = Annotated[tuple[Endpoint, ...], Field(max_length=MOST)]


class Introduce(Value):
    """Asked of a node: bring me together with this peer."""

    to: PeerId
    endpoints: Places
    connections: Count


class Meeting(Value):
    """Told by a node: this peer wants to meet you, and is seen there. The answer is `Seats`."""

    peer: PeerId
    endpoints: Places
    connections: Count
    token: Token | None


class Seats(Value):
    """Where who answers is seen."""

    endpoints: Places


class Introduced(Value):
    """The node's answer: where the other one is seen, and the token to be spliced with, if the node relays."""

    endpoints: Places
    token: Token | None


@dataclass(frozen=True)
class Ports:
    """Local ports, and where a node sees them."""

    local: Sequence[int]
    seen: tuple[str, ...]


NOWHERE = Ports((), ())
"""Of who wants to be relayed at once: nothing is to be dialled."""


async def look(node: str, count: int) -> Ports:
    """Find out where the node at this endpoint sees `count` new ports of ours. Raises: OSError, RemoteProtocolError."""
    ports = _free_ports(min(count, MOST))
    seen = await asyncio.gather(*(probe(node, local_port=port) for port in ports))
    return Ports(ports, tuple(one.endpoint for one in seen))


async def meet(
    credentials: Credentials,
    add: Add,
    peer: str,
    mine: Ports,
    theirs: Sequence[str],
    node: str,
    token: bytes | None,
    count: int,
) -> None:
    """Make connections with a peer that does the same now, and `add` each as soon as it is there.

    `node` is the endpoint of the one that introduced us.
    """
    pairs = zip(mine.local, theirs, strict=False)
    tries = (
        _dial_at_once(credentials, add, peer, port, endpoint, place) for place, (port, endpoint) in enumerate(pairs)
    )
    if not any(await asyncio.gather(*tries)) and token is not None:
        numbers = range(min(count, MOST))
        await asyncio.gather(*(_splice(credentials, add, peer, node, Splice(token=token, number=n)) for n in numbers))


async def _dial_at_once(credentials: Credentials, add: Add, peer: str, port: int, endpoint: str, place: int) -> bool:
    """Dial from a port that the other side dials at the same time, again and again until both are let through."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PUNCH_TIMEOUT
    while loop.time() < end:
        try:
            sock = await dial(endpoint, ATTEMPT_TIMEOUT, port)
        except OSError as error:
            logger.debug("no way yet from port %d to %s at %s: %s", port, peer, endpoint, error)
            if error.errno in NO_ROUTE:
                return False
            if "no answer" not in str(error):  # refused at once: not before the other side dials, too
                await asyncio.sleep(REFUSED_PAUSE)
            continue
        return await _begin(sock, credentials, add, peer, place, Reach.PUNCHED)
    return False


async def _splice(credentials: Credentials, add: Add, peer: str, node: str, opening: Splice) -> bool:
    try:
        sock = await dial(node, SPLICE_TIMEOUT)
        with closed_on_failure(sock):
            await send(sock, pack_opening(opening))
    except OSError as error:
        logger.debug("no relay to %s at %s: %s", peer, node, error)
        return False
    return await _begin(sock, credentials, add, peer, opening.number, Reach.RELAYED)


async def _begin(sock: socket.socket, credentials: Credentials, add: Add, peer: str, place: int, reach: Reach) -> bool:
    """Begin a connection of which neither end is the one that dialled: the smaller id speaks first."""
    try:
        if credentials.peer_id < peer:
            add(await greet(sock, credentials, peer, is_ours=place % 2 == 0, reach=reach))
            return True
        with closed_on_failure(sock):
            async with asyncio.timeout(HELLO_TIMEOUT):
                opening = await read_opening(sock, peer)
            if not isinstance(opening, Hello):
                raise RemoteProtocolError(peer, "its connection does not begin with a greeting")
        connection = await welcome(sock, credentials, opening, reach)
        if connection.peer != peer:
            connection.close()
            raise RemoteProtocolError(connection.peer, f"it came in the place of {peer}")
        add(connection)
        return True
    except (OSError, TimeoutError, RemoteProtocolError) as error:
        logger.debug("no %s connection with %s: %r", reach, peer, error)
        return False


def _free_ports(count: int) -> list[int]:
    """Return different ports, each free a moment ago. Raises: OSError."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in socks]
