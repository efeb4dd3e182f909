"""This machine's place in the network: its addresses, and the detection of sleep, network loss and network changes.

A sleeping machine's CLOCK_MONOTONIC stands still, and asyncio's with it; CLOCK_BOOTTIME goes on. A machine's networks
are known by the source addresses that its packets to the internet would have. The kernel reports these without sending
any.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Interface, ip_address, ip_network

from peers.network.gateway import default_gateway

logger = logging.getLogger(__name__)

SOMEWHERE = ("1.1.1.1", "2606:4700:4700::1111")
"""Addresses on the internet, one of each version. Any would do, and nothing is sent to them."""
HOST = re.compile(r"/ip[46]/(?P<host>[^/]+)/(?!.*/p2p-circuit)")
NETWORK_BITS = {4: 24, 6: 48}  # by IP version: leading bits that the addresses of one owner usually share

INTERVAL = 1.0  # seconds between two looks at this machine's clock and networks
LONG_SLEEP = 30.0  # seconds of sleep or suspension, after which other peers have closed their connections with us
CLOCK_JUMP = 2.0  # the wall clock counts as set if it jumps by these seconds between two checks; NTP moves it by less
LONG_OFFLINE = 10.0  # seconds without a network after which TCP waits long before it repeats lost packets


def network_at(address: str) -> str | None:
    """Return the network of a multiaddr, such as 203.0.113.0/24; None if it has no IP address, or is relayed."""
    match = HOST.match(address)
    return None if match is None else _network_around(_unmapped(match["host"]))


def network_of(host: str) -> str:
    """Return the network around an IP address, such as 203.0.113.0/24. Its addresses probably have one owner."""
    address = _unmapped(host)
    return "loopback" if address.is_loopback else _network_around(address)


def _unmapped(host: str) -> IPv4Address | IPv6Address:
    address = ip_address(host)
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _network_around(address: IPv4Address | IPv6Address) -> str:
    return str(ip_network((address, NETWORK_BITS[address.version]), strict=False))


def is_behind_nat() -> bool:
    """Return True if this machine's packets to the internet have source addresses that the internet cannot dial."""
    return not any((own := address_towards(target)) and ip_address(own).is_global for target in SOMEWHERE)


def everywhere(port: int) -> tuple[str, ...]:
    """Return the multiaddrs for listening at a TCP port of all our addresses: 0.0.0.0, and :: if there is IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"
    return (f"/ip4/0.0.0.0/tcp/{port}",)


def address_towards(target: str) -> str | None:
    """Return the source address that packets to `target` would have; None if there is no route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # connecting a UDP socket sends nothing
        return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _changes(looks: Iterator[tuple[float, frozenset[str]]]) -> Iterator[str]:
    """Yield one text for each of the `looks`: the events since the last look that break connections; "" if none.

    A look has the seconds of a clock that also counts sleep, and the machine's networks. While there is no network, the
    text is empty, since nothing could be done.
    """
    last, known = next(looks)
    slept, offline_since = 0.0, math.inf
    yield ""
    for clock, networks in looks:
        gap, last = clock - last - INTERVAL, clock
        slept += gap if gap >= LONG_SLEEP else 0.0
        if not networks:
            offline_since = min(offline_since, clock)
            yield ""
            continue
        changes = [f"it slept for {slept:.0f} s"] if slept else []
        if (offline := clock - offline_since) >= LONG_OFFLINE:
            changes.append(f"it had no network for {offline:.0f} s")
        if known - networks:
            changes.append("it is in another network")
        known, slept, offline_since = networks, 0.0, math.inf
        yield ", ".join(changes)


def _observe() -> tuple[float, frozenset[str]]:
    """Return the boot-time clock in seconds, and the names of the networks that this machine is in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), frozenset(filter(None, map(_network_towards, SOMEWHERE)))


async def watch_network(
    on_change: Callable[[], None], look: Callable[[], tuple[float, frozenset[str]]] = _observe
) -> None:
    """Check this machine's networks every second until cancelled; call `on_change` after an event that breaks
    connections: sleep, network loss, or another network."""
    for change in _changes(iter(look, None)):
        if change:
            logger.info("the network of this machine has changed: %s", change)
            on_change()
        await asyncio.sleep(INTERVAL)


def _clock_offset() -> float:
    """Return the seconds by which the wall clock is ahead of the boot-time clock, which nothing can set."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


async def watch_clock(look: Callable[[], float] = _clock_offset) -> None:
    """Log a warning whenever this machine's wall clock is set, until cancelled. The DHT needs a correct clock."""
    first = before = look()
    while True:
        await asyncio.sleep(INTERVAL)
        offset = look()
        if abs(offset - before) >= CLOCK_JUMP:
            wrong = offset - first
            if abs(wrong) >= CLOCK_JUMP:
                logger.warning(
                    "this machine's clock was set %s by %.0f s. Peers whose clocks are more than 3 seconds apart do not"
                    " find each other: set it right, and switch on time synchronisation (NTP)",
                    "forward" if wrong > 0 else "back",
                    abs(wrong),
                )
            else:
                logger.info("this machine's clock is right again")
        before = offset


def _network_towards(target: str) -> str | None:
    """Return a name of the network by which packets to `target` would leave; None if there is no route.

    It consists of our address and the gateway's; for IPv6 of the first half of our address, as the other half changes
    from day to day.
    """
    own = address_towards(target)
    if own is None:
        return None
    if ":" in own:
        return None if IPv6Address(own).is_loopback else str(IPv6Interface(f"{own}/64").network)
    gateway = default_gateway()
    return f"{own} by {gateway[0]}" if gateway else own
