"""The facts of the network: what starts here, who answers, and what others see of this machine."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from opendiloco.doctor.facts import Addresses, Bandwidth, DialledBack, Node
from opendiloco.volunteer import connected
from peers.errors import DilocoPeerError, LocalNetworkError, RemoteProtocolError
from peers.links.contacts import host_of
from peers.links.opening import PROBED_PORTS
from peers.links.own_network import SOMEWHERE, address_towards, is_behind_nat
from peers.links.probing import Seen, probe
from peers.links.rating import RATING, ask_rating
from peers.links.relays import LINK_INFO, LinkInfo
from peers.links.sockets import endpoint_of, listen, parse_endpoint
from peers.net.daemon import is_loopback, peer_id_of, require_free_port
from peers.net.first_contact import endpoint, which_answer
from peers.net.transport import HivemindTransport
from peers.streams.channel import PeerUnreachableError
from peers.values.identity import Identity
from peers.values.reach import Reach
from peers.values.wire import unpack_from

logger = logging.getLogger(__name__)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ASKED_NODES = 4  # bootstrap nodes that are asked how they see us
CLOCK_TRIES = 3  # of which the fastest counts
CALL_SECONDS = 10.0
MAPPING_SECONDS = 6.0  # that a router may take to open a port
LINK_SECONDS = 20.0  # that it may take to find out how peers are reached
RATING_SECONDS = 30.0
RATED = 3  # others that are asked to measure with us: they may be busy
LOOK = 0.5  # seconds between two looks at what goes on


async def start_p2pd() -> tuple[float, DilocoPeerError | None]:
    """Start libp2p's daemon and end it again. Returns the seconds of its start, and what went wrong."""
    began = time.monotonic()
    try:
        async with connected(Identity.generate(), (), LOOPBACK, client_mode=True):
            return time.monotonic() - began, None
    except DilocoPeerError as error:
        return 0.0, error


def chosen_ports(addresses: Sequence[str], data_port: int) -> list[int]:
    """Return the ports that the owner has chosen, of libp2p's addresses and for data."""
    ports = [int(parts[4]) for address in addresses if len(parts := address.split("/")) > 4 and parts[4].isdigit()]
    return [port for port in dict.fromkeys([*ports, data_port]) if port]


def try_ports(addresses: Sequence[str], data_port: int) -> DilocoPeerError | None:
    """Return what keeps `join` from listening there; None: nothing."""
    try:
        for address in addresses:
            require_free_port(address)
        for listener in listen([host for address in addresses if (host := host_of(address))], data_port):
            listener.close()
    except LocalNetworkError as error:
        return error
    return None


def is_in_use(error: DilocoPeerError) -> bool:
    """Whether what `try_ports` found is that another program listens there."""
    return getattr(error.__cause__, "errno", None) == errno.EADDRINUSE


def own_addresses() -> Addresses:
    ipv4, ipv6 = map(address_towards, SOMEWHERE)
    return Addresses(ipv4, ipv6)


async def answering_nodes(addresses: Sequence[str]) -> list[Node]:
    """Return each of these nodes, and whether it answers. What is not plain TCP cannot be asked, and is taken to."""
    answering = await which_answer(addresses)
    return [Node(address, address in answering or endpoint(address) is None) for address in addresses]


async def with_clocks(transport: HivemindTransport, nodes: Iterable[Node]) -> list[Node]:
    """Return the same nodes with the time that an answer takes, and what time it is there."""
    return await asyncio.gather(*(_with_clock(transport, node) for node in nodes))


async def _with_clock(transport: HivemindTransport, node: Node) -> Node:
    told = []
    with suppress(PeerUnreachableError):
        for _ in range(CLOCK_TRIES if node.answers else 0):
            ahead, seconds = await transport.clock_of(peer_id_of(node.address))
            told.append((seconds, ahead))
    return Node(node.address, node.answers, *min(told)) if told else node


async def dialled_back(transport: HivemindTransport, addresses: Sequence[str]) -> list[DialledBack]:
    """Ask bootstrap nodes to dial our data ports. Waits a while for the router to open one, if it may."""
    ports = [parse_endpoint(own)[1] for own in transport.endpoints]
    places = [place for address in addresses[:ASKED_NODES] if (place := await _data_place(transport, address))]
    end = time.monotonic() + (0.0 if all(map(is_loopback, addresses)) or not is_behind_nat() else MAPPING_SECONDS)
    while True:
        seen = [found for place in places if (found := await _ask(place, ports))]
        if time.monotonic() >= end or not seen or any(one.open_port for one in seen):
            return seen
        await asyncio.sleep(LOOK)
        ports = [parse_endpoint(own)[1] for own in transport.endpoints]


async def _data_place(transport: HivemindTransport, address: str) -> str | None:
    """Return the endpoint of a node's data port; None if it has none, or does not say."""
    peer, host = peer_id_of(address), host_of(address)
    try:
        info = unpack_from(peer, LinkInfo, await transport.call(peer, LINK_INFO, b"", CALL_SECONDS))
    except (PeerUnreachableError, RemoteProtocolError) as error:
        logger.debug("%s says nothing of its data port: %s", address, error)
        return None
    return endpoint_of(host, info.port) if host and 0 < info.port < 1 << 16 else None


async def _ask(place: str, ports: Sequence[int]) -> DialledBack | None:
    asked = tuple(dict.fromkeys(port for port in ports if port))[:PROBED_PORTS]
    try:
        own = _free_port()
        seen: Seen = await probe(place, asked, own)
    except (OSError, RemoteProtocolError) as error:
        logger.debug("%s does not say how it sees us: %s", place, error)
        return None
    host, port = parse_endpoint(seen.endpoint)
    return DialledBack(host, asked[0] if asked else 0, seen.open[0] if seen.open else None, port == own)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


async def ways_to_peers(transport: HivemindTransport, peers: set[str]) -> tuple[dict[str, Reach], int]:
    """Wait until it is known how these peers are reached. Returns that, and to how many no way was found in time.

    The transport makes links with all peers that it has heard of, unless there are too many.
    """
    end = time.monotonic() + LINK_SECONDS
    while (sought := transport.sought() & peers) and time.monotonic() < end:
        await asyncio.sleep(LOOK)
    return {peer: way for peer, way in transport.reach().items() if peer in peers}, len(sought)


async def measured_bandwidth(
    transport: HivemindTransport, ways: dict[str, Reach], nodes: Sequence[Node]
) -> Bandwidth | None:
    """Measure the link with a peer that is reached directly; without one, with a bootstrap node."""
    direct = [(peer, "a peer") for peer, way in ways.items() if way.is_direct]
    direct = random.sample(direct, min(RATED, len(direct)))
    for peer, name in [*direct, *((peer_id_of(node.address), "a bootstrap node") for node in nodes if node.answers)]:
        try:
            async with asyncio.timeout(RATING_SECONDS), transport.stream(peer, RATING) as channel:
                up, down = await ask_rating(channel)
        except (PeerUnreachableError, TimeoutError) as error:
            logger.debug("no measurement with %s: %s", peer, error)
            continue
        return Bandwidth(8 * up, 8 * down, name)
    return None
