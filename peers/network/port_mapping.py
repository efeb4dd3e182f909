"""A port of the home router kept open for this peer, in the background, where the router offers it.

The router is asked by PCP (RFC 6887), by NAT-PMP (RFC 6886) where it speaks only that, or by UPnP. PCP is the successor
of NAT-PMP and shares its port; a router that knows only one of the two refuses the other's version. A reader of
messages returns the protocol's result code for a refusal, which is not 0, and None for everything that is not a
well-formed answer to our request.
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
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from peers.network.own_network import default_gateway
from peers.network.sockets import endpoint_of

if TYPE_CHECKING:
    from peers.network.upnp import Upnp

logger = logging.getLogger(__name__)

LIFETIME = 3600.0  # seconds that we ask for: what a router keeps when we die
RENEWAL = 600.0  # seconds after which we ask again at the latest: a router that restarts has forgotten us
SHORTEST_RENEWAL = 30.0  # seconds, whatever lifetime a router grants
LOOK_AGAIN = 1800.0  # seconds between looks for a router that maps ports
CLOSING_SECONDS = 2.0  # in which a router must take the mapping back: its lifetime ends it otherwise


class PortMapper:
    """A TCP port of ours, mapped while `run` goes on. `endpoint` is the external one; None: there is none now."""

    def __init__(self, port: int, routers: Sequence[Gateway | Upnp]) -> None:
        """`routers` are ways of asking the router; each remembers what it was given, so that asking again renews it."""
        self._port = port
        self._routers = routers
        self._router: Gateway | Upnp | None = None
        self._again = asyncio.Event()
        self.endpoint: str | None = None

    def look_again(self) -> None:
        """Ask the router now: this machine has slept, or is in another network."""
        self._again.set()

    async def run(self) -> None:
        """Map the port, renew the mapping until cancelled, then end it. Nothing that a router does is an error."""
        try:
            while True:
                self._again.clear()
                mapping = await self._map()
                self.endpoint = None if mapping is None else mapping.endpoint
                with suppress(TimeoutError):
                    async with asyncio.timeout(_renewal_after(mapping)):
                        await self._again.wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._unmap()

    async def _map(self) -> Mapping | None:
        """Return the first mapping that we can use. The router that we have one from is asked first."""
        for router in sorted(self._routers, key=lambda router: router is not self._router):
            try:
                mapping = await router.open(self._port, LIFETIME)
            except OSError as error:
                logger.debug("no port by %s: %r", router.name, error)
                continue
            if mapping is None:
                continue
            if router is not self._router:
                await self._unmap()
                self._router = router
            if mapping.address.is_global:
                logger.debug("%s maps %s to port %d", router.name, mapping.endpoint, self._port)
                return mapping
            logger.debug("%s maps a port of %s, which is behind another NAT", router.name, mapping.address)
            await self._unmap()
        return None

    async def _unmap(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            try:
                await router.close(self._port)
            except OSError as error:
                logger.debug("the mapping by %s is not ended: %r", router.name, error)


def _renewal_after(mapping: Mapping | None) -> float:
    """Return the seconds after which the router is asked again: half a mapping's lifetime, within limits."""
    if mapping is None:
        return LOOK_AGAIN
    return min(RENEWAL, max(SHORTEST_RENEWAL, mapping.lifetime / 2))


# PCP and NAT-PMP ------------------------------------------------------------------------------------------------------
Address: TypeAlias = IPv4Address | IPv6Address
Where: TypeAlias = tuple[str, int]  # host and port
Answer = TypeVar("Answer")

WAITS = (0.25, 0.5, 1.0, 2.0)
"""Seconds to wait for an answer before the request is sent again; the protocols' first four."""
DATAGRAM_LIMIT = 64  # datagrams that we look at for one request

PORT = 5351  # UDP, on the router
PCP_VERSION, NAT_PMP_VERSION = 2, 0  # the first byte of a message
PCP_MAP = 1  # an operation of PCP
EXTERNAL_ADDRESS, MAP_TCP = 0, 2  # operations of NAT-PMP
IS_ANSWER = 0x80  # this bit of an operation marks an answer
SUCCESS, UNSUPPORTED_VERSION = 0, 1  # result codes, the same in both protocols
TCP = 6  # its number in the Internet Protocol
PCP_LIMIT = 1100  # bytes of a message at most

PCP_REQUEST = struct.Struct("!BBxxI16s 12sB3xHH16s")
PCP_ANSWER = struct.Struct("!BBxBII12x 12sB3xHH16s")
PCP_ANSWER_START = struct.Struct("!BBxBII12x")
NAT_PMP_MAP_REQUEST = struct.Struct("!BBxxHHI")
NAT_PMP_MAP_ANSWER = struct.Struct("!BBHIHHI")
NAT_PMP_ADDRESS_REQUEST = bytes((NAT_PMP_VERSION, EXTERNAL_ADDRESS))
NAT_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")


@dataclass(frozen=True)
class Mapping:
    """A TCP port on a router's external address that leads to one of ours, for `lifetime` seconds."""

    address: Address
    port: int
    lifetime: float

    @property
    def endpoint(self) -> str:
        return endpoint_of(str(self.address), self.port)


def _default_place() -> Where | None:
    """Return where the default gateway answers; None on a machine without one."""
    gateway = default_gateway()
    return None if gateway is None else (str(gateway), PORT)


class Gateway:
    """The default gateway as a router to ask for ports. It remembers the last one, so that asking again renews that.

    `where` finds the gateway anew for every request: a machine changes its network.
    """

    name = "PCP or NAT-PMP"

    def __init__(self, where: Callable[[], Where | None] = _default_place, waits: Sequence[float] = WAITS) -> None:
        self._where = where
        self._waits = waits
        self._nonce = os.urandom(12)  # bytes, as PCP has it (RFC 6887)
        self._external_port = 0
        self._speaks_pcp = False

    async def open(self, port: int, lifetime: float) -> Mapping | None:
        """Map a port; None when the gateway does not offer it. Raises: OSError."""
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
        """Raises: OSError."""
        address: IPv4Address | int | None = await self._ask(
            where, lambda client: NAT_PMP_ADDRESS_REQUEST, _read_nat_pmp_address
        )
        if not isinstance(address, IPv4Address):
            return address
        request, external = _pack_nat_pmp_map(port, lifetime, suggested), address
        return await self._ask(where, lambda client: request, lambda data: _read_nat_pmp_map(data, port, external))

    async def close(self, port: int) -> None:
        """End the mapping, if there is one. Raises: OSError."""
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
        """Return what `read` makes of the first datagram that it makes anything of; None when no such datagram comes.

        `request` gets our own address as the other side sees it where there is no NAT between us. Raises: OSError.
        """
        transport, arrivals = await asyncio.get_running_loop().create_datagram_endpoint(Arrivals, remote_addr=where)
        try:
            packed = request(ip_address(transport.get_extra_info("sockname")[0]))
            for wait in self._waits:
                transport.sendto(packed)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        while (arrived := await arrivals.queue.get()) is not None:
                            if answer := read(arrived[0]):
                                return answer
                    return None  # no program listens there
            return None
        finally:
            transport.abort()


class Arrivals(asyncio.DatagramProtocol):
    """A queue of the datagrams that arrive, with their senders' hosts; None when the other side has no such port."""

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
    """Return a PCP request to map TCP `port` of `client`; a lifetime of 0 ends the mapping with that nonce."""
    any_address = _pack_address(IPv4Address(0) if client.version == 4 else IPv6Address(0))
    start = (PCP_VERSION, PCP_MAP, lifetime, _pack_address(client))
    return PCP_REQUEST.pack(*start, nonce, TCP, port, suggested_port, any_address)


def _read_pcp_map(data: bytes, nonce: bytes, port: int) -> Mapping | int | None:
    """Return what a PCP router answers to the request with this nonce and port."""
    if not 4 <= len(data) <= PCP_LIMIT:
        return None
    if data[0] == NAT_PMP_VERSION and data[1] & IS_ANSWER and data[2:4] == bytes((0, UNSUPPORTED_VERSION)):
        return UNSUPPORTED_VERSION  # a router that knows only NAT-PMP answers as NAT-PMP does
    if len(data) < PCP_ANSWER_START.size:
        return None
    code: int
    version, operation, code, lifetime, _ = PCP_ANSWER_START.unpack_from(data)
    if operation != PCP_MAP | IS_ANSWER:
        return None
    if code == UNSUPPORTED_VERSION:
        return code  # whatever its version is
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
    """Return a NAT-PMP request to map TCP `port`; a lifetime of 0 ends the mapping."""
    return NAT_PMP_MAP_REQUEST.pack(NAT_PMP_VERSION, MAP_TCP, port, suggested_port, lifetime)


def _read_nat_pmp_map(data: bytes, port: int, address: IPv4Address) -> Mapping | int | None:
    """Return what a NAT-PMP router with this external address answers to a request to map this port."""
    code = _nat_pmp_code(data, MAP_TCP)
    if code != SUCCESS or len(data) != NAT_PMP_MAP_ANSWER.size:
        return code or None
    *_, its_port, external_port, lifetime = NAT_PMP_MAP_ANSWER.unpack(data)
    return Mapping(address, external_port, lifetime) if its_port == port and external_port else None


def _nat_pmp_code(data: bytes, operation: int) -> int | None:
    """Return the result code of an answer to this operation. A refusal may end after its first eight bytes."""
    if not 8 <= len(data) <= NAT_PMP_MAP_ANSWER.size or data[:2] != bytes((NAT_PMP_VERSION, operation | IS_ANSWER)):
        return None
    return int.from_bytes(data[2:4], "big")


def _pack_address(address: Address) -> bytes:
    """Return 16 bytes; an IPv4 address becomes ::ffff:a.b.c.d."""
    return bytes(10) + b"\xff\xff" + address.packed if isinstance(address, IPv4Address) else address.packed
