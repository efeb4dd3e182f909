"""The beginning of a connection: whatever goes wrong, both sockets are closed and one kind of error is raised."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.network.connection import HANDSHAKE_TIMEOUT, Connection, greet, welcome
from peers.network.data_port import Hello
from peers.values.wire import Reach
from tests.peers.network.pairs import answer_greeting, connected, credentials_of, open_files, socket_pair
from tests.peers.network.test_throttle import now, simulate

LEFT, RIGHT = credentials_of("left"), credentials_of("right")


@pytest.mark.parametrize("is_lefts", [False, True])
def test_both_ends_know_who_opens_conversations(is_lefts: bool) -> None:
    async def scenario() -> None:
        left, right = await connected(LEFT, RIGHT, is_lefts, Reach.PUNCHED)
        assert (left.is_ours, right.is_ours) == (is_lefts, not is_lefts)
        assert left.reach is right.reach is Reach.PUNCHED
        assert left.is_open
        left.writer.write(b"to the right")
        right.writer.write(b"to the left")
        assert await right.reads.read(12, 1.0) == b"to the right"
        assert await left.reads.read(11, 1.0) == b"to the left"
        lost = asyncio.Event()
        right.reads.on_lost = lost.set
        left.close()
        assert not left.is_open
        await lost.wait()
        assert not right.is_open

    simulate(scenario())


@pytest.mark.parametrize("end", ["greets", "welcomes"])
def test_silence_ends_a_handshake(end: str) -> None:
    async def scenario() -> None:
        near, far = socket_pair()
        hello = Hello(to=LEFT.peer_id, certificate=RIGHT.certificate, is_yours=True)
        begins = (
            greet(near, LEFT, RIGHT.peer_id, True, Reach.OPEN)
            if end == "greets"
            else welcome(near, LEFT, hello, Reach.OPEN)
        )
        began = now()
        with pytest.raises(OSError, match="no TLS handshake in time"):
            await begins
        assert now() - began == pytest.approx(HANDSHAKE_TIMEOUT)
        assert near.fileno() == -1
        far.close()

    simulate(scenario())


@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_garbage_instead_of_a_handshake_is_an_error(garbage: bytes, greets: bool) -> None:
    async def scenario() -> None:
        near, far = socket_pair()
        hello = Hello(to=LEFT.peer_id, certificate=RIGHT.certificate, is_yours=True)
        begins = (
            greet(near, LEFT, RIGHT.peer_id, True, Reach.OPEN) if greets else welcome(near, LEFT, hello, Reach.OPEN)
        )
        await asyncio.get_running_loop().sock_sendall(far, garbage)
        far.shutdown(1)
        with pytest.raises((OSError, RemoteProtocolError)):
            await begins
        assert near.fileno() == -1
        far.close()

    simulate(scenario())


@pytest.mark.parametrize("is_greeting_cancelled", [False, True])
def test_who_is_cancelled_at_any_moment_leaves_nothing_open(is_greeting_cancelled: bool) -> None:
    """Also in the turn in which the handshake ends."""

    async def cancelled_after(turns: int) -> bool:
        near, far = socket_pair()
        tasks = [
            asyncio.create_task(greet(near, LEFT, RIGHT.peer_id, True, Reach.OPEN)),
            asyncio.create_task(answer_greeting(far, RIGHT)),
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        victim = tasks[0 if is_greeting_cancelled else 1]
        was_over = victim.done()
        victim.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, Connection | OSError | RemoteProtocolError | asyncio.CancelledError)
            if isinstance(outcome, Connection):
                outcome.close()
        for _ in range(5):
            await asyncio.sleep(0)
        return was_over

    async def scenario() -> None:
        await cancelled_after(100)  # whatever the loop keeps is open from now on
        before = open_files()
        turns = 1  # before that it has not got its socket
        while not await cancelled_after(turns):
            assert open_files() == before
            turns += 1
        assert turns > 3

    simulate(scenario())


def test_an_end_that_is_lost_early_is_seen_later() -> None:
    """Between the handshake and its use nobody is told."""

    async def scenario() -> None:
        left, right = await connected(LEFT, RIGHT)
        right.close()
        with suppress(asyncio.IncompleteReadError):
            await left.reads.read(1, None)
        assert not left.is_open

    simulate(scenario())
