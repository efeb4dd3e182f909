"""What this machine's operating system says about the network that it is in, without libp2p."""

from __future__ import annotations

import socket
from ipaddress import ip_address

ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # never dialled


def outgoing_addresses() -> frozenset[str]:
    """Return the addresses that the default routes lead out from; none while this machine is offline. Sends nothing."""
    return frozenset(address for family, target in ELSEWHERE if (address := _source(family, target)))


def is_own(address: str) -> bool:
    """Return whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_behind_nat() -> bool:
    """Return whether this machine has only addresses that nobody on the internet can dial."""
    return not any(ip_address(address).is_global for address in outgoing_addresses())


def _source(family: socket.AddressFamily, target: str) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
