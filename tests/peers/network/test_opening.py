"""Whatever a stranger sends first, it is an opening or an error that the listener knows."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.network.data_port import (
    BODY_BYTES,
    KINDS,
    MAGIC,
    START,
    VERSION,
    Hello,
    Opening,
    Splice,
    _Probe,
    pack_opening,
    read_opening,
)
from tests.peers.network.pairs import socket_pair
from tests.peers.network.test_throttle import simulate

OPENINGS: list[Opening] = [
    Hello(to="a" * 52, certificate=b"certificate", is_yours=True),
    Splice(token=bytes(16), number=3),
    _Probe(ports=(1, 65535)),
]


async def read(sent: bytes) -> tuple[object, bytes]:
    """What is read of these bytes, before the other end closes, and the rest."""
    near, far = socket_pair()
    with near, far:
        await asyncio.get_running_loop().sock_sendall(near, sent)
        near.shutdown(1)
        try:
            opening: object = await read_opening(far, "a stranger")
        except (RemoteProtocolError, OSError) as error:
            opening = error
        return opening, await asyncio.get_running_loop().sock_recv(far, 1 << 16)


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda opening: type(opening).__name__)
def test_an_opening_is_read_and_nothing_of_what_follows(opening: Opening) -> None:
    assert simulate(read(pack_opening(opening) + b"what follows")) == (opening, b"what follows")


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda opening: type(opening).__name__)
def test_an_opening_that_breaks_off_is_an_error(opening: Opening) -> None:
    packed = pack_opening(opening)
    for length in range(len(packed)):
        outcome, _ = simulate(read(packed[:length]))
        assert isinstance(outcome, ConnectionResetError)


@given(st.binary(max_size=200))
def test_garbage_is_an_error(garbage: bytes) -> None:
    outcome, _ = simulate(read(garbage))
    assert isinstance(outcome, RemoteProtocolError | OSError)


@given(st.integers(0, len(KINDS) - 1), st.binary(max_size=200))
def test_garbage_in_the_body_is_an_error(kind: int, body: bytes) -> None:
    outcome, _ = simulate(read(START.pack(MAGIC, VERSION, kind, len(body)) + body))
    assert isinstance(outcome, RemoteProtocolError)


@pytest.mark.parametrize(
    "start",
    [
        (b"HTTP", VERSION, 0, 0),
        (MAGIC, VERSION + 1, 0, 0),
        (MAGIC, VERSION, len(KINDS), 0),
        (MAGIC, VERSION, 0, BODY_BYTES + 1),
    ],
    ids=["magic", "version", "kind", "length"],
)
def test_the_start_is_checked_field_by_field(start: tuple[bytes, int, int, int]) -> None:
    outcome, rest = simulate(read(START.pack(*start) + b"body"))
    assert isinstance(outcome, RemoteProtocolError)
    assert rest == b"body", "nothing more is read"
