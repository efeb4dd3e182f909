"""Checks of the network: how this machine finds others, and how they reach it. Each takes facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from opendiloco.doctor.facts import Addresses, Bandwidth, DialledBack, Node
from opendiloco.doctor.findings import Finding, Value, failed, failed_with, passed, skipped, warned
from opendiloco.quantities import bandwidth_in_words
from peers.errors import DilocoPeerError
from peers.links.contacts import is_public
from peers.values.reach import Reach

CLOCK_WARNS = 1.0
"""Seconds. From 3 on, the DHT lets nobody in."""
SLOW_LINK = 5e6
"""Bits a second. A model of a hundred million parameters takes more than five minutes for each round with it."""
OPEN_A_PORT = (
    "Turn on UPnP or NAT-PMP in the router, or open a TCP port in it and name it with --data-port; IPv6 would do, too."
)


def check_p2pd(seconds: float | None, error: DilocoPeerError | None) -> Finding:
    if error is not None:
        return failed_with("p2pd", error)
    return passed("p2pd", f"libp2p's daemon started in {seconds or 0:.1f} s", seconds=seconds)


def check_ports(asked: Sequence[int], error: DilocoPeerError | None, may_be_ours: bool = False) -> Finding:
    """`asked` are the ports that the owner has chosen, other than any free one. `may_be_ours`: what is in use may be so
    by a volunteer that runs here."""
    if error is not None and may_be_ours:
        found = f"{error.message.rstrip('.')}, by the volunteer that runs on this machine, it seems"
        return warned("ports", found, f"If it is not: {error.remedy}")
    if error is not None:
        return failed_with("ports", error)
    if not asked:
        return passed("ports", "any free ones will do: none was chosen")
    return passed("ports", f"free: {', '.join(map(str, asked))}")


def check_ipv6(addresses: Addresses) -> Finding:
    """IPv6 helps a machine that nobody can dial over IPv4; whether anybody can is for `check_reach` to say."""
    has_ipv4 = addresses.ipv4 is not None and is_public(addresses.ipv4)
    has_ipv6 = addresses.ipv6 is not None and is_public(addresses.ipv6)
    values = {"ipv4": addresses.ipv4, "ipv6": addresses.ipv6, "is_public_ipv4": has_ipv4, "is_public_ipv6": has_ipv6}
    if addresses.ipv4 is None and addresses.ipv6 is None:
        return warned("ipv6", "this machine has no way to the internet", "Check cable, Wi-Fi and routes.", **values)
    if has_ipv6:
        also = ", and one of IPv4" if has_ipv4 else "; over IPv4 it is behind a router"
        return passed("ipv6", f"it has an address of its own of IPv6{also}", **values)
    where = "it has an address of its own of IPv4" if has_ipv4 else "over IPv4 it is behind a router"
    return passed("ipv6", f"no IPv6; {where}", **values)


def check_bootstrap(nodes: Sequence[Node], error: DilocoPeerError | None) -> Finding:
    """`error` is what kept us from the swarm, though a node may answer."""
    silent = [node.address for node in nodes if not node.answers]
    values = {"nodes": len(nodes), "answering": len(nodes) - len(silent)}
    if error is not None:
        return failed("bootstrap", error.message, error.remedy, **values)
    times = [node.seconds for node in nodes if node.seconds is not None]
    found = f"{len(nodes) - len(silent)} of {len(nodes)} answer" + (f", in {1e3 * min(times):.0f} ms" if times else "")
    if silent:
        remedy = "Ask the organiser whether these nodes still run; one that answers is enough."
        return warned("bootstrap", f"{found}; silent: {', '.join(silent)}", remedy, **values)
    return passed("bootstrap", found, **values)


def check_clock(nodes: Sequence[Node]) -> Finding:
    """By the node whose answer came fastest, which says it best."""
    told = [(node.seconds, node.ahead) for node in nodes if node.seconds is not None and node.ahead is not None]
    if not told:
        return skipped("clock", "no bootstrap node says what time it is")
    seconds, ahead = min(told)
    said = f"{abs(ahead):.2f} s {'behind' if ahead > 0 else 'ahead of'} the bootstrap node's, ± {seconds / 2:.2f} s"
    values = {"offset_seconds": -ahead, "uncertainty_seconds": seconds / 2}
    if abs(ahead) - seconds / 2 > CLOCK_WARNS:
        remedy = "Switch on time synchronisation (NTP); peers more than 3 seconds apart do not find each other."
        return warned("clock", f"this clock is {said}", remedy, **values)
    return passed("clock", f"this clock is {said}", **values)


def check_reach(seen: Sequence[DialledBack], answering: int) -> Finding:
    """How others reach this machine, as far as bootstrap nodes can tell by dialling it back."""
    if not seen:
        if not answering:
            return skipped("reach", "no bootstrap node answers")
        remedy = (
            "Let TCP out to the node's data port; or a node that listens on 443 and 80 is needed (docs/network.md)."
        )
        return warned("reach", "no bootstrap node could be asked at its data port", remedy, reach=None)
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
    """How we reach each peer of a run. Of those that are `there`, no way was found in time to those still `sought`; in
    a large run none is looked for beforehand."""
    counts = Counter(way for way in ways.values() if way is not Reach.NONE)
    lost = sum(way is Reach.NONE for way in ways.values()) + sought
    values = {way.value: counts[way] for way in Reach if way is not Reach.NONE} | {"none": lost}
    if not ways and not sought:
        return skipped(
            "peers", f"{there} are there: ways are looked for when needed" if there else "nobody is there now"
        )
    found = ", ".join(f"{count} {way}" for way, count in counts.items()) or "none of them"
    if not counts:
        remedy = f"Without a way to any peer it trains in vain. {OPEN_A_PORT}"
        return failed("peers", f"{lost} there, and no way to any of them", remedy, **values)
    if lost:
        return warned("peers", f"{found}; no way to {lost}", OPEN_A_PORT, **values)
    return passed("peers", f"reached: {found}", **values)


def check_bandwidth(bandwidth: Bandwidth | None, why_not: str = "") -> Finding:
    if bandwidth is None:
        return skipped("bandwidth", why_not or "there is nobody to measure it with")
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
