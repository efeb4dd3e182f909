"""The first bytes on a TCP connection of ours: who dials whom and what for. They are sent in the clear.

Hello    TLS follows, with the certificate that the opening shows, and then conversations (link.py)
Splice   bytes follow that are passed on to whoever shows the same token (splicing.py)
Probe    an answer follows: which address we are seen at, and which of our ports can be reached there (probing.py)
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Annotated, Any

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.network.credentials import CERTIFICATE_BYTES
from peers.values.wire import PeerId, Value, WireError, pack, unpack

MAGIC = b"DLLK"
VERSION = 1
START = struct.Struct(">4sBBH")  # magic, version, kind, length of the body
BODY_BYTES = 2048
TOKEN_BYTES = 16
PROBED_PORTS = 4

Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Token = Annotated[bytes, Field(strict=True, min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Hello(Value):
    """I am the peer of this certificate, and dial the peer `to`.

    Each connection is used by one of the two to open conversations on; `is_yours`: by you.
    """

    to: PeerId
    certificate: Annotated[bytes, Field(strict=True, max_length=CERTIFICATE_BYTES)]
    is_yours: Annotated[bool, Field(strict=True)]


class Splice(Value):
    """Join this connection with the one of the other peer that has the token; `number` tells several apart."""

    token: Token
    number: Annotated[int, Field(strict=True, ge=0, lt=64)]


class Probe(Value):
    """Tell me where I am seen, and dial these ports of mine there."""

    ports: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


Opening = Hello | Splice | Probe
KINDS: tuple[type[Opening], ...] = (Hello, Splice, Probe)


def pack_opening(opening: Opening) -> bytes:
    body = pack(opening)
    return START.pack(MAGIC, VERSION, KINDS.index(type(opening)), len(body)) + body


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def read_opening(sock: socket.socket, who: str) -> Opening:
    """Read exactly an opening, and nothing of what follows. Raises: RemoteProtocolError, OSError."""
    magic, version, kind, length = START.unpack(await read_exactly(sock, START.size))
    if magic != MAGIC or version != VERSION or kind >= len(KINDS) or length > BODY_BYTES:
        raise RemoteProtocolError(who, "its connection does not begin as one of ours")
    wanted: type[Any] = KINDS[kind]
    try:
        opening: Opening = unpack(wanted, await read_exactly(sock, length))
    except WireError as error:
        raise RemoteProtocolError(who, str(error)) from error
    return opening


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Raises: OSError, also when the other end closes the connection before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data
