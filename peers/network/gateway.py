"""The default gateway asked for a port by PCP (RFC 6887) or NAT-PMP (RFC 6886).

PCP is the successor of NAT-PMP and shares its port; a router that knows only one of the two refuses the other's
version. A reader of messages returns None for everything that is not a well-formed answer to our request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

logger = logging.getLogger(__name__)

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


PORT = 5351  # UDP, on the router
ANSWER_LIMIT = 1100  # bytes of a PCP message at most
NONCE_BYTES = 12
MAP_TCP = 2  # NAT-PMP's operation
EXTERNAL_ADDRESS = 0  # NAT-PMP's operation

PCP_VERSION, NAT_PMP_VERSION = 2, 0
PCP_MAP = 1  # PCP's operation
TCP = 6  # its number in the Internet Protocol
IS_ANSWER = 0x80  # this bit of an operation marks an answer
SUCCESS, UNSUPPORTED_VERSION = 0, 1

PCP_REQUEST = struct.Struct("!BBxxI16s 12sB3xHH16s")
PCP_ANSWER = struct.Struct("!BBxBII12x 12sB3xHH16s")
PCP_ANSWER_START = struct.Struct("!BBxBII12x")
NAT_PMP_MAP_REQUEST = struct.Struct("!BBxxHHI")
NAT_PMP_MAP_ANSWER = struct.Struct("!BBHIHHI")
NAT_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")


@dataclass(frozen=True)
class Refused:
    """A well-formed answer that says no, with the protocol's own result code."""

    code: int


@dataclass(frozen=True)
class Granted:
    """A mapping that a router has made. `lifetime` is in seconds. NAT-PMP tells the address apart: None."""

    port: int
    lifetime: int
    address: IPv4Address | IPv6Address | None = None


def pack_pcp_map(
    nonce: bytes, client: IPv4Address | IPv6Address, port: int, lifetime: int, suggested_port: int
) -> bytes:
    """Return a PCP request to map TCP `port` of `client`; a lifetime of 0 ends the mapping with that nonce."""
    unspecified = IPv4Address(0) if client.version == 4 else IPv6Address(0)
    return PCP_REQUEST.pack(
        PCP_VERSION,
        PCP_MAP,
        lifetime,
        _pack_address(client),
        nonce,
        TCP,
        port,
        suggested_port,
        _pack_address(unspecified),
    )


def read_pcp_map(data: bytes, nonce: bytes, port: int) -> Granted | Refused | None:
    """Return what a PCP router answers to the request with this nonce and port."""
    if not 4 <= len(data) <= ANSWER_LIMIT:
        return None
    if data[0] == NAT_PMP_VERSION and data[1] & IS_ANSWER and data[2:4] == bytes((0, UNSUPPORTED_VERSION)):
        return Refused(UNSUPPORTED_VERSION)  # a router that knows only NAT-PMP answers as NAT-PMP does
    if len(data) < PCP_ANSWER_START.size:
        return None
    version, operation, code, lifetime, _ = PCP_ANSWER_START.unpack_from(data)
    if operation != PCP_MAP | IS_ANSWER:
        return None
    if code == UNSUPPORTED_VERSION:
        return Refused(code)  # whatever its version is
    if version != PCP_VERSION or len(data) < PCP_ANSWER.size:
        return None
    *_, its_nonce, protocol, its_port, external_port, address = PCP_ANSWER.unpack_from(data)
    if (its_nonce, protocol, its_port) != (nonce, TCP, port):
        return None
    if code != SUCCESS:
        return Refused(code)
    return Granted(external_port, lifetime, _unpack_address(address)) if external_port else None


def pack_nat_pmp_address() -> bytes:
    """Return a NAT-PMP request for the router's external address."""
    return bytes((NAT_PMP_VERSION, EXTERNAL_ADDRESS))


def read_nat_pmp_address(data: bytes) -> IPv4Address | Refused | None:
    """Return the router's external address."""
    code = _nat_pmp_code(data, EXTERNAL_ADDRESS)
    if code:
        return Refused(code)
    if code is None or len(data) != NAT_PMP_ADDRESS_ANSWER.size:
        return None
    return IPv4Address(NAT_PMP_ADDRESS_ANSWER.unpack(data)[-1])


def pack_nat_pmp_map(port: int, lifetime: int, suggested_port: int) -> bytes:
    """Return a NAT-PMP request to map TCP `port`; a lifetime of 0 ends the mapping."""
    return NAT_PMP_MAP_REQUEST.pack(NAT_PMP_VERSION, MAP_TCP, port, suggested_port, lifetime)


def read_nat_pmp_map(data: bytes, port: int) -> Granted | Refused | None:
    """Return what a NAT-PMP router answers to a request to map this port."""
    code = _nat_pmp_code(data, MAP_TCP)
    if code:
        return Refused(code)
    if code is None or len(data) != NAT_PMP_MAP_ANSWER.size:
        return None
    *_, its_port, external_port, lifetime = NAT_PMP_MAP_ANSWER.unpack(data)
    return Granted(external_port, lifetime) if its_port == port and external_port else None


def _nat_pmp_code(data: bytes, operation: int) -> int | None:
    """Return the result code of an answer to this operation. A refusal may end after its first eight bytes."""
    if not 8 <= len(data) <= NAT_PMP_MAP_ANSWER.size or data[:2] != bytes((NAT_PMP_VERSION, operation | IS_ANSWER)):
        return None
    return int.from_bytes(data[2:4], "big")


def _pack_address(address: IPv4Address | IPv6Address) -> bytes:
    """Return 16 bytes; an IPv4 address becomes ::ffff:a.b.c.d."""
    return bytes(10) + b"\xff\xff" + address.packed if isinstance(address, IPv4Address) else address.packed


def _unpack_address(packed: bytes) -> IPv4Address | IPv6Address:
    address = ip_address(packed)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


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
