"""Asking a node on the public internet how it sees us: at which address, and which of our ports it can dial there.

who asks     opening (Probe) ──►     ◄── length, Seen     the node closes
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Annotated

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.network.opening import PROBED_PORTS, Port, Probe, pack_opening, read_exactly, send
from peers.network.sockets import can_dial, dial, endpoint_of, endpoint_of_peer, parse_endpoint
from peers.presence.heartbeat import Endpoint
from peers.values.wire import Value, WireError, pack, unpack

LENGTH = struct.Struct(">H")
ANSWER_BYTES = 1024
PROBE_TIMEOUT = 8.0  # seconds


class Seen(Value):
    """`endpoint` is where the probing connection came from, `open` which of the ports it named answered there."""

    endpoint: Endpoint
    open: Annotated[tuple[Port, ...], Field(max_length=PROBED_PORTS)]


async def probe(endpoint: str, ports: tuple[int, ...] = (), local_port: int = 0) -> Seen:
    """Ask the node at `endpoint`. Raises: OSError; RemoteProtocolError for an answer that is none."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            with await dial(endpoint, PROBE_TIMEOUT, local_port) as sock:
                await send(sock, pack_opening(Probe(ports=ports)))
                (length,) = LENGTH.unpack(await read_exactly(sock, LENGTH.size))
                return unpack(Seen, await read_exactly(sock, min(length, ANSWER_BYTES)), ANSWER_BYTES)
    except TimeoutError as error:
        raise OSError(f"no answer from {endpoint}") from error
    except WireError as error:
        raise RemoteProtocolError(endpoint, str(error)) from error


async def answer_probe(sock: socket.socket, asked: Probe) -> None:
    """Answer, and close the connection. Only the address that asks is dialled. Raises: OSError."""
    with sock:
        host, _ = parse_endpoint(endpoint_of_peer(sock))
        answers = await asyncio.gather(*(can_dial(endpoint_of(host, port)) for port in set(asked.ports)))
        found = tuple(port for port, answered in zip(set(asked.ports), answers, strict=True) if answered)
        answer = pack(Seen(endpoint=endpoint_of_peer(sock), open=found))
        await send(sock, LENGTH.pack(len(answer)) + answer)
