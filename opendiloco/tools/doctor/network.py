"""Checks of the network: libp2p's daemon, this machine's ports and link, the bootstrap nodes, and how others reach this
machine."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from opendiloco.quantities import bandwidth_in_words
from opendiloco.tools.doctor.findings import Finding, Value, failed, failed_with, passed, skipped, warned
from opendiloco.volunteer.volunteer import connected
from peers.errors import DilocoPeerError, LocalNetworkError, RemoteProtocolError
from peers.network.channel import PeerRefusedError, PeerUnreachableError
from peers.network.contacts import host_of, is_loopback, is_public
from peers.network.daemon import peer_id_of, require_free_port
from peers.network.data_port import LINK_INFO, PROBED_PORTS, LinkInfo, ProbeAnswer, probe
from peers.network.first_contact import endpoint, which_answer
from peers.network.own_network import SOMEWHERE, address_towards, is_behind_nat
from peers.network.rating import RATING, ask_rating
from peers.network.sockets import endpoint_of, listen, parse_endpoint
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.wire import Reach, unpack_from

logger = logging.getLogger(__name__)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ASKED_NODES = 4  # number of bootstrap nodes that are asked to dial this machine back
CLOCK_TRIES = 3  # number of requests for a bootstrap node's time; the fastest answer counts
CALL_SECONDS = 10.0  # limit in seconds for a bootstrap node's answer
MAPPING_SECONDS = 6.0  # limit in seconds for a router to open a port
LINK_SECONDS = 20.0  # limit in seconds for finding paths to the peers
RATING_SECONDS = 30.0  # limit in seconds for a measurement with one peer, including the wait until that peer is free
RATED = 3  # number of peers to try for a measurement, because some may be busy
BUSY_SECONDS, BUSY_PAUSE = 10.0, 0.5
"""Seconds for which a busy peer (mostly one in a round) is asked again and again, and seconds between two requests."""
LOOK = 0.5  # seconds between two checks for an open port, or for new paths to peers
CLOCK_WARNS = 1.0
"""Difference from a bootstrap node's clock, in seconds, above which `check_clock` warns. From 3 seconds on, the DHT
refuses a peer."""
SLOW_LINK = 5e6
"""Bits a second below which `check_bandwidth` warns: a round of a model of a hundred million parameters then takes more
than five minutes."""
OPEN_A_PORT = "Turn on UPnP or NAT-PMP in the router, open a TCP port in it and name it with --data-port, or use IPv6."


@dataclass(frozen=True)
class Node:
    """A bootstrap node. `seconds` is the round-trip time; `ahead` is the number of seconds by which its clock is ahead
    of this machine's, exact to half of the round trip. Both are None if unknown."""

    address: str
    answers: bool
    seconds: float | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class _DialledBack:
    """A bootstrap node's answer about this machine. `seen_at` is the machine's address as the node sees it, `port` a
    data port of the machine, `open_port` a data port that the node could dial, or None. `keeps_ports` is True if the
    router kept a connection's port number."""

    seen_at: str
    port: int
    open_port: int | None
    keeps_ports: bool


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth of this machine's link in bits a second. `measured_with` is "a peer" or "a bootstrap node"."""

    up: float
    down: float
    measured_with: str

    def within(self, upload: float | None, download: float | None) -> Bandwidth:
        """Return the bandwidth capped by the owner's limits, which are in megabits a second (None: no limit)."""
        up, down = (math.inf if limit is None else 1e6 * limit for limit in (upload, download))
        return replace(self, up=min(self.up, up), down=min(self.down, down))


async def check_p2pd() -> Finding:
    """Check that libp2p's daemon starts, and stop it again."""
    began = time.monotonic()
    try:
        async with connected(Identity.generate(), (), LOOPBACK, client_mode=True):
            seconds = time.monotonic() - began
    except DilocoPeerError as error:
        return failed_with("p2pd", error)
    return passed("p2pd", f"libp2p's daemon started in {seconds:.1f} s", seconds=seconds)


def check_ports(addresses: Sequence[str], data_port: int, has_volunteer: bool) -> Finding:
    """Check that `join` can listen on these addresses and on the data port. With `has_volunteer`, a port in use is only
    a warning, because this machine's volunteer may hold it."""
    asked = [int(parts[4]) for address in addresses if len(parts := address.split("/")) > 4 and parts[4].isdigit()]
    chosen = [port for port in dict.fromkeys([*asked, data_port]) if port]
    try:
        for address in addresses:
            require_free_port(address)
        for listener in listen([host for address in addresses if (host := host_of(address))], data_port):
            listener.close()
    except LocalNetworkError as error:
        if has_volunteer and getattr(error.__cause__, "errno", None) == errno.EADDRINUSE:
            found = f"{error.message.rstrip('.')}, probably by the volunteer that runs on this machine"
            return warned("ports", found, f"If it is not: {error.remedy}")
        return failed_with("ports", error)
    if not chosen:
        return passed("ports", "no port is chosen: any free ones will be used")
    return passed("ports", f"free: {', '.join(map(str, chosen))}")


def check_ipv6() -> Finding:
    """Check if this machine has public IPv4 and IPv6 addresses. Public IPv6 helps if others cannot dial the machine
    over IPv4."""
    ipv4, ipv6 = map(address_towards, SOMEWHERE)
    has_ipv4, has_ipv6 = (address is not None and is_public(address) for address in (ipv4, ipv6))
    values = {"ipv4": ipv4, "ipv6": ipv6, "is_public_ipv4": has_ipv4, "is_public_ipv6": has_ipv6}
    if ipv4 is None and ipv6 is None:
        return warned("ipv6", "this machine has no route to the internet", "Check cable, Wi-Fi and routes.", **values)
    if has_ipv6:
        also = ", and a public IPv4 address" if has_ipv4 else "; over IPv4 it is behind a router"
        return passed("ipv6", f"it has a public IPv6 address{also}", **values)
    where = "it has a public IPv4 address" if has_ipv4 else "over IPv4 it is behind a router"
    return passed("ipv6", f"no IPv6; {where}", **values)


def check_bootstrap(nodes: Sequence[Node], error: DilocoPeerError | None) -> Finding:
    """Return the finding on the bootstrap nodes. `error` is the reason why this machine could not enter the swarm, or
    None if it could. Nodes may answer in both cases."""
    silent = [node.address for node in nodes if not node.answers]
    values = {"nodes": len(nodes), "answering": len(nodes) - len(silent)}
    if error is not None:
        return failed("bootstrap", error.message, error.remedy, **values)
    times = [node.seconds for node in nodes if node.seconds is not None]
    found = f"{len(nodes) - len(silent)} of {len(nodes)} answer" + (f", in {1e3 * min(times):.0f} ms" if times else "")
    if silent:
        remedy = "One answering node is enough; ask the organiser whether the silent ones still run."
        return warned("bootstrap", f"{found}; silent: {', '.join(silent)}", remedy, **values)
    return passed("bootstrap", found, **values)


def check_clock(nodes: Sequence[Node]) -> Finding:
    """Compare this machine's clock with a bootstrap node's. The node that answered fastest is chosen, because its time
    is the most exact."""
    measured = [(node.seconds, node.ahead) for node in nodes if node.seconds is not None and node.ahead is not None]
    if not measured:
        return skipped("clock", "no bootstrap node has given its time")
    seconds, ahead = min(measured)
    side = "behind" if ahead > 0 else "ahead of"
    found = f"this clock is {abs(ahead):.2f} s {side} the bootstrap node's, ± {seconds / 2:.2f} s"
    values = {"offset_seconds": -ahead, "uncertainty_seconds": seconds / 2}
    if abs(ahead) - seconds / 2 > CLOCK_WARNS:
        remedy = "Switch on time synchronisation (NTP); peers more than 3 seconds apart do not find each other."
        return warned("clock", found, remedy, **values)
    return passed("clock", found, **values)


async def check_reach(transport: HivemindTransport, nodes: Sequence[Node]) -> Finding:
    """Find out how other peers can reach this machine, by asking bootstrap nodes to dial it."""
    addresses = [node.address for node in nodes]
    places = [place for address in addresses[:ASKED_NODES] if (place := await _data_place(transport, address))]
    seen = await _dialled_back(transport, addresses, places)
    if not seen:
        if not any(node.answers for node in nodes):
            return skipped("reach", "no bootstrap node answers")
        remedy = (
            "Allow outgoing TCP to it here, and incoming TCP at the node, or use a node that listens on 443 and 80 "
            "(docs/network.md)."
        )
        named = f": {', '.join(places)}" if places else ""
        return warned("reach", f"no bootstrap node's data port answers{named}", remedy, reach=None)
    best = max(seen, key=lambda one: (bool(one.open_port), one.keeps_ports))
    values: dict[str, Value] = {"seen_at": best.seen_at, "port": best.open_port or best.port}
    if best.open_port:
        found = f"open: a bootstrap node has dialled {best.seen_at}, port {best.open_port}"
        return passed("reach", found, reach=Reach.OPEN.value, **values)
    if best.keeps_ports:
        found = f"punched: port {best.port} at {best.seen_at} cannot be dialled, but the router keeps port numbers"
        return passed("reach", f"{found}, so that two peers can dial at once", reach=Reach.PUNCHED.value, **values)
    found = f"relayed: port {best.port} at {best.seen_at} cannot be dialled, and the router changes port numbers"
    found = f"{found}: only peers that are open are reached directly"
    return warned("reach", found, OPEN_A_PORT, reach=Reach.RELAYED.value, **values)


def check_peers(ways: Mapping[str, Reach], sought: int, there: int) -> Finding:
    """Return the finding on the paths to a run's peers: skipped in a large run, in which paths are sought only when
    needed. `sought` is the number of peers whose path is still unknown, and `there` the number of all peers."""
    counts = Counter(way for way in ways.values() if way is not Reach.NONE)
    lost = sum(way is Reach.NONE for way in ways.values()) + sought
    values = {way.value: counts[way] for way in Reach if way is not Reach.NONE} | {"none": lost}
    if not ways and not sought:
        return skipped(
            "peers", f"{there} are live: paths are looked for when needed" if there else "the run has no live peer now"
        )
    found = ", ".join(f"{count} {way}" for way, count in counts.items()) or "none of them"
    if not counts:
        remedy = f"Without a path to a peer, this machine's work does not count. {OPEN_A_PORT}"
        return failed("peers", f"{lost} live, and no path to any of them", remedy, **values)
    if lost:
        return warned("peers", f"{found}; no path to {lost}", OPEN_A_PORT, **values)
    return passed("peers", f"reached: {found}", **values)


def check_bandwidth(bandwidth: Bandwidth | None) -> Finding:
    if bandwidth is None:
        return skipped("bandwidth", "no peer or bootstrap node is free to measure it now")
    up, down = bandwidth.up, bandwidth.down
    found = f"{bandwidth_in_words(up)} up, {bandwidth_in_words(down)} down, measured with {bandwidth.measured_with}"
    values: dict[str, Value] = {
        "up_bits_per_second": up,
        "down_bits_per_second": down,
        "measured_with": bandwidth.measured_with,
    }
    if min(up, down) < SLOW_LINK:
        return warned("bandwidth", f"{found}: slow", "Use a cable; stop other transfers.", **values)
    return passed("bandwidth", found, **values)


# Bootstrap nodes and peers --------------------------------------------------------------------------------------------
async def answering_nodes(addresses: Sequence[str]) -> list[Node]:
    """Return a Node for each address, with `answers` True if the node answers there. An address that is not plain TCP
    cannot be tested, and counts as answering."""
    answering = await which_answer(addresses)
    return [Node(address, address in answering or endpoint(address) is None) for address in addresses]


async def with_clock(transport: HivemindTransport, node: Node) -> Node:
    """Return the node with its measured round-trip time and clock, or unchanged if it does not answer."""
    measured = []
    with suppress(PeerUnreachableError):
        for _ in range(CLOCK_TRIES if node.answers else 0):
            ahead, seconds = await transport.dht.clock_of(peer_id_of(node.address))
            measured.append((seconds, ahead))
    return Node(node.address, node.answers, *min(measured)) if measured else node


async def _dialled_back(
    transport: HivemindTransport, addresses: Sequence[str], places: Sequence[str]
) -> list[_DialledBack]:
    """Ask the bootstrap nodes whose data ports are at `places` to dial this machine's data ports, and return their
    views of this machine. Wait up to `MAPPING_SECONDS` for the router to open a port."""
    waits = is_behind_nat() and not all(map(is_loopback, map(host_of, addresses)))
    end = time.monotonic() + (MAPPING_SECONDS if waits else 0.0)
    while True:
        ports = [parse_endpoint(own)[1] for own in transport.endpoints]
        seen = [found for place in places if (found := await _ask(place, ports))]
        if time.monotonic() >= end or not seen or any(one.open_port for one in seen):
            return seen
        await asyncio.sleep(LOOK)


async def _data_place(transport: HivemindTransport, address: str) -> str | None:
    """Return the endpoint of a bootstrap node's data port; None if the node has no data port or does not answer."""
    peer, host = peer_id_of(address), host_of(address)
    try:
        info = unpack_from(peer, LinkInfo, await transport.call(peer, LINK_INFO, b"", CALL_SECONDS))
    except (PeerUnreachableError, RemoteProtocolError) as error:
        logger.debug("%s does not report its data port: %s", address, error)
        return None
    return endpoint_of(host, info.port) if host and 0 < info.port < 1 << 16 else None


async def _ask(place: str, ports: Sequence[int]) -> _DialledBack | None:
    asked = tuple(dict.fromkeys(port for port in ports if port))[:PROBED_PORTS]
    try:
        with socket.socket() as sock:
            sock.bind(("", 0))
            own = int(sock.getsockname()[1])
        seen: ProbeAnswer = await probe(place, asked, own)
    except (OSError, RemoteProtocolError) as error:
        logger.debug("%s does not report how it sees this machine: %s", place, error)
        return None
    host, port = parse_endpoint(seen.endpoint)
    return _DialledBack(host, asked[0] if asked else 0, seen.open[0] if seen.open else None, port == own)


async def ways_to_peers(transport: HivemindTransport, peers: set[str]) -> tuple[dict[str, Reach], int]:
    """Wait up to `LINK_SECONDS` until the paths to these peers are known. Return the known paths, and the number of
    peers whose path is still sought: 0 in a large run, in which paths are sought only when they are needed."""
    end = time.monotonic() + LINK_SECONDS
    while (sought := transport.links.sought() & peers) and time.monotonic() < end:
        await asyncio.sleep(LOOK)
    return {peer: way for peer, way in transport.links.reach().items() if peer in peers}, len(sought)


async def _rating(transport: HivemindTransport, peer: str) -> tuple[float, float]:
    """Measure the link to `peer`, and return the rates up and down, in bytes a second. Raises: PeerUnreachableError if
    the peer cannot be reached, or stays busy for `BUSY_SECONDS`."""
    deadline = asyncio.get_running_loop().time() + BUSY_SECONDS
    while True:
        try:
            async with transport.stream(peer, RATING) as channel:
                return await ask_rating(channel)
        except PeerRefusedError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(BUSY_PAUSE)


async def measured_bandwidth(
    transport: HivemindTransport, ways: dict[str, Reach], nodes: Sequence[Node]
) -> Bandwidth | None:
    """Measure the link with a directly reachable peer, or else with a bootstrap node. Return None if no measurement
    succeeds."""
    direct = [(peer, "a peer") for peer, way in ways.items() if way.is_direct]
    direct = random.sample(direct, min(RATED, len(direct)))
    for peer, name in [*direct, *((peer_id_of(node.address), "a bootstrap node") for node in nodes if node.answers)]:
        try:
            async with asyncio.timeout(RATING_SECONDS):
                up, down = await _rating(transport, peer)
        except (PeerUnreachableError, TimeoutError) as error:
            logger.debug("no measurement with %s: %s", peer, error)
            continue
        return Bandwidth(8 * up, 8 * down, name)
    return None
