"""The messages by which a machine asks its router to let connections in: PCP (RFC 6887) and NAT-PMP (RFC 6886).

Bytes only, no sockets. PCP is the successor of NAT-PMP and shares its port; a router that knows only one of the two
refuses the other's version. A reader returns None for everything that is not a well-formed answer to our request.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

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
