"""Where this machine is, as far as it can tell by itself; and in which networks others are."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network

SOMEWHERE = ("1.1.1.1", "2606:4700:4700::1111")
"""Addresses on the internet, one of each version; any would do, and nothing is sent to them."""

HOST = re.compile(r"/ip[46]/(?P<host>[^/]+)/(?!.*/p2p-circuit)")
NETWORK_BITS = {4: 24, 6: 48}
"""Of an address, that one customer of a provider has in common with its own others, more or less."""


def network_at(address: str) -> str | None:
    """Return the network that a multiaddr is in; None where it does not say, or it is that of a relay."""
    match = HOST.match(address)
    return None if match is None else network_of(match["host"])


def network_of(host: str) -> str:
    """Return the network that an address is in: one owner can take many addresses from it."""
    address = ip_address(host)
    address = (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address
    if address.is_loopback:
        return "loopback"
    return str(ip_network((address, NETWORK_BITS[address.version]), strict=False))


def is_behind_nat() -> bool:
    """Return whether packets to the internet leave with addresses that nobody there can dial."""
    return not any(ip_address(address).is_global for address in _own_addresses())


def everywhere(port: int) -> tuple[str, ...]:
    """Return the multiaddrs of a port on all addresses of this machine, in each version of IP that it has."""
    found = (f"/ip4/0.0.0.0/tcp/{port}",)
    return (*found, f"/ip6/::/tcp/{port}") if _has_ipv6() else found


def _own_addresses() -> Sequence[str]:
    return [own for target in SOMEWHERE if (own := address_towards(target))]


def address_towards(target: str) -> str | None:
    """Return the address of ours by which packets to `target` would leave; None: there is no way there."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # of UDP: nothing is sent
        return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return True
    return False
