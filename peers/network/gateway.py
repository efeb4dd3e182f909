"""The default gateway (home router), asked to map a port by PCP (RFC 6887), or by the older NAT-PMP (RFC 6886).

PCP is the successor of NAT-PMP and shares its port; a router that knows only one of the two refuses the other's
version. The functions that read messages return the protocol's result code (not 0) for a refusal, and None for bytes
that are no valid answer to our request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeAlias, TypeVar

from peers.network.sockets import endpoint_of

logger = logging.getLogger(__name__)

Address: TypeAlias = IPv4Address | IPv6Address
Where: TypeAlias = tuple[str, int]  # host and port
Answer = TypeVar("Answer")

ROUTES = Path("/proc/net/route")
ROUTE_IS_UP, ROUTE_HAS_GATEWAY = 1, 2  # Linux's flags of a route: RTF_UP and RTF_GATEWAY
WAITS = (0.25, 0.5, 1.0, 2.0)
"""Seconds to wait for an answer before the request is sent again: the first four waits that both protocols name."""
DATAGRAM_LIMIT = 64  # datagrams that are read for one request, at most

PORT = 5351  # UDP port of PCP and NAT-PMP on the router
PCP_VERSION, NAT_PMP_VERSION = 2, 0  # versions of the two protocols, the first byte of each message
PCP_MAP = 1  # PCP's code for the operation that maps a port
EXTERNAL_ADDRESS, MAP_TCP = 0, 2  # NAT-PMP's codes for operations: report the external address, map a TCP port
IS_ANSWER = 0x80  # the bit of an operation's code that marks an answer
SUCCESS, UNSUPPORTED_VERSION = 0, 1  # result codes, the same in PCP and NAT-PMP
TCP = 6  # the number that stands for TCP in IP packets
PCP_LIMIT = 1100  # bytes of a PCP message, at most

PCP_REQUEST = struct.Struct("!BBxxI16s 12sB3xHH16s")
PCP_ANSWER = struct.Struct("!BBxBII12x 12sB3xHH16s")
PCP_ANSWER_START = struct.Struct("!BBxBII12x")
NAT_PMP_MAP_REQUEST = struct.Struct("!BBxxHHI")
NAT_PMP_MAP_ANSWER = struct.Struct("!BBHIHHI")
NAT_PMP_ADDRESS_REQUEST = bytes((NAT_PMP_VERSION, EXTERNAL_ADDRESS))
NAT_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")


@dataclass(frozen=True)
class Mapping:
    """A mapping of a TCP port at a router's external address to a port of this machine, for `lifetime` seconds."""

    address: Address
    port: int
    lifetime: float

    @property
    def endpoint(self) -> str:
        return endpoint_of(str(self.address), self.port)


def default_gateway() -> Where | None:
    """Return the default gateway's host, and its UDP port for PCP and NAT-PMP; None if there is no gateway."""
    try:
        address = _read_default_gateway(ROUTES.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return None if address is None else (str(address), PORT)


def _read_default_gateway(table: str) -> IPv4Address | None:
    """Return the gateway with the lowest metric in `table`, the text of /proc/net/route; None without a gateway."""
    found = []
    for line in table.splitlines()[1:]:
        try:
            _, destination, gateway, flags, _, _, metric, mask, *_ = line.split()
            is_default = int(destination, 16) == int(mask, 16) == 0
            packed = bytes.fromhex(gateway)[::-1]  # the kernel writes an address as a little-endian number
            if is_default and int(flags, 16) & ROUTE_HAS_GATEWAY and int(flags, 16) & ROUTE_IS_UP:
                found.append((int(metric), IPv4Address(packed)))
        except ValueError:
            continue
    return min(found)[1] if found else None


class Gateway:
    """A client of the default gateway. It remembers the mapped external port, so that a repeated request renews it.

    `where` finds the gateway again for every request, since a machine may change its network.
    """

    name = "PCP or NAT-PMP"

    def __init__(self, where: Callable[[], Where | None] = default_gateway, waits: Sequence[float] = WAITS) -> None:
        self._where = where
        self._waits = waits
        self._nonce = os.urandom(12)  # 12 bytes that identify our mapping in PCP (RFC 6887)
        self._external_port = 0
        self._speaks_pcp = False

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a TCP port for `lifetime` seconds. Return the mapping; None if there is no gateway, or it refuses or does
        not answer. Raises: OSError."""
        where = self._where()
        if where is None:
            return None
        suggested = self._external_port or port
        answer = await self._ask(
            where,
            lambda client: _pack_pcp_map(self._nonce, client, port, int(lifetime), suggested),
            lambda data: _read_pcp_map(data, self._nonce, port),
        )
        self._speaks_pcp = isinstance(answer, Mapping)
        if not self._speaks_pcp:
            logger.debug("PCP at %s: %s", where, answer)
            answer = await self._open_by_nat_pmp(where, port, int(lifetime), suggested)
        if not isinstance(answer, Mapping):
            logger.debug("NAT-PMP at %s: %s", where, answer)
            return None
        self._external_port = answer.port
        return answer

    async def _open_by_nat_pmp(self, where: Where, port: int, lifetime: int, suggested: int) -> Mapping | int | None:
        """Map a TCP port by NAT-PMP. Return the mapping, an error code, or None without an answer. Raises: OSError."""
        address: IPv4Address | int | None = await self._ask(
            where, lambda client: NAT_PMP_ADDRESS_REQUEST, _read_nat_pmp_address
        )
        if not isinstance(address, IPv4Address):
            return address
        request, external = _pack_nat_pmp_map(port, lifetime, suggested), address
        return await self._ask(where, lambda client: request, lambda data: _read_nat_pmp_map(data, port, external))

    async def close(self, port: int) -> None:
        """End the mapping of a TCP port, if there is one. Raises: OSError."""
        where = self._where()
        if where is None or not self._external_port:
            return
        self._external_port = 0

        def request(client: Address) -> bytes:
            return _pack_pcp_map(self._nonce, client, port, 0, 0) if self._speaks_pcp else _pack_nat_pmp_map(port, 0, 0)

        await self._ask(where, request, bool)

    async def _ask(
        self, where: Where, request: Callable[[Address], bytes], read: Callable[[bytes], Answer | None]
    ) -> Answer | None:
        """Send a request, repeatedly if needed. Return the first true result of `read` on a received datagram, or None.

        `request` is called with our own address, which the router also sees, as no NAT is in between. Raises: OSError.
        """
        transport, arrivals = await asyncio.get_running_loop().create_datagram_endpoint(Arrivals, remote_addr=where)
        try:
            packed = request(ip_address(transport.get_extra_info("sockname")[0]))
            for wait in self._waits:
                transport.sendto(packed)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        while (datagram := await arrivals.queue.get()) is not None:
                            if answer := read(datagram[0]):
                                return answer
                    return None  # no program listens on the gateway's port
            return None
        finally:
            transport.abort()


class Arrivals(asyncio.DatagramProtocol):
    """A queue of received datagrams with their senders' hosts. A None means that nothing listens at the other end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[bytes, str] | None] = asyncio.Queue(DATAGRAM_LIMIT)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if not self.queue.full():
            self.queue.put_nowait((data, address[0]))

    def error_received(self, error: Exception) -> None:
        if not self.queue.full():
            self.queue.put_nowait(None)


# Messages -----------------------------------------------------------------------------------------------------
def _pack_pcp_map(nonce: bytes, client: Address, port: int, lifetime: int, suggested_port: int) -> bytes:
    """Return a PCP request to map TCP `port` of the host `client` for `lifetime` seconds; 0 ends the mapping."""
    any_address = _pack_address(IPv4Address(0) if client.version == 4 else IPv6Address(0))
    start = (PCP_VERSION, PCP_MAP, lifetime, _pack_address(client))
    return PCP_REQUEST.pack(*start, nonce, TCP, port, suggested_port, any_address)


def _read_pcp_map(data: bytes, nonce: bytes, port: int) -> Mapping | int | None:
    """Return the mapping in a PCP answer for this nonce and port, or its error code; None for any other datagram."""
    if not 4 <= len(data) <= PCP_LIMIT:
        return None
    if data[0] == NAT_PMP_VERSION and data[1] & IS_ANSWER and data[2:4] == bytes((0, UNSUPPORTED_VERSION)):
        return UNSUPPORTED_VERSION  # a router that knows only NAT-PMP answers in that protocol
    if len(data) < PCP_ANSWER_START.size:
        return None
    code: int
    version, operation, code, lifetime, _ = PCP_ANSWER_START.unpack_from(data)
    if operation != PCP_MAP | IS_ANSWER:
        return None
    if code == UNSUPPORTED_VERSION:
        return code  # the router does not support our PCP version, and may answer in another
    if version != PCP_VERSION or len(data) < PCP_ANSWER.size:
        return None
    *_, its_nonce, protocol, its_port, external_port, address = PCP_ANSWER.unpack_from(data)
    if (its_nonce, protocol, its_port) != (nonce, TCP, port):
        return None
    if code != SUCCESS:
        return code
    external = IPv6Address(address)
    return Mapping(external.ipv4_mapped or external, external_port, lifetime) if external_port else None


def _read_nat_pmp_address(data: bytes) -> IPv4Address | int | None:
    code = _nat_pmp_code(data, EXTERNAL_ADDRESS)
    if code != SUCCESS or len(data) != NAT_PMP_ADDRESS_ANSWER.size:
        return code or None
    return IPv4Address(NAT_PMP_ADDRESS_ANSWER.unpack(data)[-1])


def _pack_nat_pmp_map(port: int, lifetime: int, suggested_port: int) -> bytes:
    """Return a NAT-PMP request to map TCP `port` for `lifetime` seconds; 0 seconds end the mapping."""
    return NAT_PMP_MAP_REQUEST.pack(NAT_PMP_VERSION, MAP_TCP, port, suggested_port, lifetime)


def _read_nat_pmp_map(data: bytes, port: int, address: IPv4Address) -> Mapping | int | None:
    """Return this port's mapping at `address` in a NAT-PMP answer, or its error code; None for any other datagram."""
    code = _nat_pmp_code(data, MAP_TCP)
    if code != SUCCESS or len(data) != NAT_PMP_MAP_ANSWER.size:
        return code or None
    *_, its_port, external_port, lifetime = NAT_PMP_MAP_ANSWER.unpack(data)
    return Mapping(address, external_port, lifetime) if its_port == port and external_port else None


def _nat_pmp_code(data: bytes, operation: int) -> int | None:
    """Return the result code of a NAT-PMP answer to this operation; None for any other datagram."""
    if not 8 <= len(data) <= NAT_PMP_MAP_ANSWER.size or data[:2] != bytes((NAT_PMP_VERSION, operation | IS_ANSWER)):
        return None
    return int.from_bytes(data[2:4], "big")


def _pack_address(address: Address) -> bytes:
    """Return an IP address as 16 bytes, an IPv4 address as ::ffff:a.b.c.d."""
    return bytes(10) + b"\xff\xff" + address.packed if isinstance(address, IPv4Address) else address.packed
