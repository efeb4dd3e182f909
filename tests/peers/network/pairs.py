"""TLS connections on socket pairs, between peers that exist only here."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from functools import lru_cache

from peers.network.connection import Connection, Credentials, greet, welcome
from peers.network.data_port import Hello, read_opening
from peers.network.link import Link
from peers.values.identity import Identity
from peers.values.wire import Reach


@lru_cache
def credentials_of(name: str) -> Credentials:
    """Return the same for each name."""
    return Credentials(Identity.generate())


def sorted_identities(count: int) -> list[Identity]:
    """Return new identities, the smallest peer id first."""
    return sorted((Identity.generate() for _ in range(count)), key=lambda identity: identity.peer_id)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right


async def answer_greeting(sock: socket.socket, credentials: Credentials, reach: Reach = Reach.OPEN) -> Connection:
    hello = await read_opening(sock, "somebody")
    assert isinstance(hello, Hello)
    return await welcome(sock, credentials, hello, reach)


async def connected(
    left: Credentials, right: Credentials, is_lefts: bool = True, reach: Reach = Reach.OPEN
) -> tuple[Connection, Connection]:
    """Return both ends of a connection on which `left` opens conversations, or else `right`."""
    near, far = socket_pair()
    greeting = greet(near, left, right.peer_id, is_lefts, reach)
    return await asyncio.gather(greeting, answer_greeting(far, right, reach))


def opened_by_them(link: Link) -> int:
    """Return the number of connections on which the other side opens conversations."""
    return len(link.connections) - link.ours


def open_files() -> int:
    """Return how many there are besides what only garbage holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
