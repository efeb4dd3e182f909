"""Ports of a router that lead to this machine, whatever way the router was asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Mapping:
    """A TCP port on a router's external address that leads to one of ours, for `lifetime` seconds."""

    address: Address
    port: int
    lifetime: float

    @property
    def endpoint(self) -> str:
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


class Router(Protocol):
    """One way of asking the router. It remembers what it was given, so that asking again renews that."""

    name: str

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a port; None when the router does not offer it. Raises: OSError when the network fails."""

    async def close(self, port: int) -> None:
        """End the mapping, if there is one. Raises: OSError when the network fails."""
