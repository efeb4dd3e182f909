"""Asking the default gateway for a port with PCP or NAT-PMP, the two protocols of a few bytes each."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import TypeAlias, TypeVar

from peers.network.mappings import Address, Mapping
from peers.network.port_control import (
    NONCE_BYTES,
    PORT,
    Granted,
    Refused,
    pack_nat_pmp_address,
    pack_nat_pmp_map,
    pack_pcp_map,
    read_nat_pmp_address,
    read_nat_pmp_map,
    read_pcp_map,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Where: TypeAlias = tuple[str, int]  # host and port

ROUTES = Path("/proc/net/route")
ROUTE_IS_UP, ROUTE_HAS_GATEWAY = 1, 2
WAITS = (0.25, 0.5, 1.0, 2.0)
"""Seconds to wait for an answer before the request is sent again; the protocols' first four."""
DATAGRAM_LIMIT = 64  # datagrams that we look at for one request


def default_gateway() -> Where | None:
    """Return where the default gateway answers; None on a machine without one."""
    try:
        address = read_default_gateway(ROUTES.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return None if address is None else (str(address), PORT)


def read_default_gateway(table: str) -> IPv4Address | None:
    """Return the gateway with the lowest metric in the kernel's table of routes (the text of /proc/net/route)."""
    found = []
    for line in table.splitlines()[1:]:
        try:
            _, destination, gateway, flags, _, _, metric, mask, *_ = line.split()
            is_default = int(destination, 16) == int(mask, 16) == 0
            packed = bytes.fromhex(gateway)[::-1]  # written as a number of a little-endian machine
            if is_default and int(flags, 16) & ROUTE_HAS_GATEWAY and int(flags, 16) & ROUTE_IS_UP:
                found.append((int(metric), IPv4Address(packed)))
        except ValueError:
            continue
    return min(found)[1] if found else None


class Pcp:
    """The router as one that speaks PCP. `where` finds it anew for every request: a machine changes its network."""

    name = "PCP"

    def __init__(self, where: Callable[[], Where | None] = default_gateway, waits: Sequence[float] = WAITS) -> None:
        self._where = where
        self._waits = waits
        self._nonce = os.urandom(NONCE_BYTES)
        self._external_port = 0

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a port; None when the gateway does not offer it. Raises: OSError."""
        where = self._where()
        if where is None:
            return None

        def request(client: Address) -> bytes:
            return pack_pcp_map(self._nonce, client, port, int(lifetime), self._external_port or port)

        answer = await ask(where, request, lambda data: read_pcp_map(data, self._nonce, port), self._waits)
        if not isinstance(answer, Granted) or answer.address is None:
            logger.debug("PCP at %s: %s", where, answer)
            return None
        self._external_port = answer.port
        return Mapping(answer.address, answer.port, answer.lifetime)

    async def close(self, port: int) -> None:
        """End the mapping, if there is one. Raises: OSError."""
        where = self._where()
        if where and self._external_port:
            self._external_port = 0
            await ask(where, lambda client: pack_pcp_map(self._nonce, client, port, 0, 0), bool, self._waits)


class NatPmp:
    """The router as one that speaks NAT-PMP, the older one. `where` finds it anew for every request."""

    name = "NAT-PMP"

    def __init__(self, where: Callable[[], Where | None] = default_gateway, waits: Sequence[float] = WAITS) -> None:
        self._where = where
        self._waits = waits
        self._external_port = 0

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a port; None when the gateway does not offer it. Raises: OSError."""
        where = self._where()
        if where is None:
            return None
        address: IPv4Address | Refused | None = await ask(
            where, lambda client: pack_nat_pmp_address(), read_nat_pmp_address, self._waits
        )
        if address is None or isinstance(address, Refused):
            logger.debug("NAT-PMP at %s: %s", where, address)
            return None
        request = pack_nat_pmp_map(port, int(lifetime), self._external_port or port)
        answer = await ask(where, lambda client: request, lambda data: read_nat_pmp_map(data, port), self._waits)
        if not isinstance(answer, Granted):
            logger.debug("NAT-PMP at %s: %s", where, answer)
            return None
        self._external_port = answer.port
        return Mapping(address, answer.port, answer.lifetime)

    async def close(self, port: int) -> None:
        """End the mapping, if there is one. Raises: OSError."""
        where = self._where()
        if where and self._external_port:
            self._external_port = 0
            await ask(where, lambda client: pack_nat_pmp_map(port, 0, 0), bool, self._waits)


async def ask(
    where: Where, request: Callable[[Address], bytes], read: Callable[[bytes], Answer | None], waits: Sequence[float]
) -> Answer | None:
    """Return what `read` makes of the first datagram that it makes anything of; None when no such datagram comes.

    `request` gets our own address as the other side sees it where there is no NAT between us. Raises: OSError.
    """
    arrived: asyncio.Queue[bytes | None] = asyncio.Queue(DATAGRAM_LIMIT)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Arrivals(arrived), remote_addr=where
    )
    try:
        packed = request(ip_address(transport.get_extra_info("sockname")[0]))
        for wait in waits:
            transport.sendto(packed)
            try:
                async with asyncio.timeout(wait):
                    while (data := await arrived.get()) is not None:
                        answer = read(data)
                        if answer:
                            return answer
                return None  # nobody listens there
            except TimeoutError:
                continue
        return None
    finally:
        transport.abort()


class _Arrivals(asyncio.DatagramProtocol):
    """Puts what arrives on a connected socket into a queue; None when nobody has that port on the other side."""

    def __init__(self, arrived: asyncio.Queue[bytes | None]) -> None:
        self._arrived = arrived

    def datagram_received(self, data: bytes, address: object) -> None:
        if not self._arrived.full():
            self._arrived.put_nowait(data)

    def error_received(self, error: Exception) -> None:
        if not self._arrived.full():
            self._arrived.put_nowait(None)
