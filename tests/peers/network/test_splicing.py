"""A relay passes bytes on between those who show the same token, within its limits, and reads none of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peers.network import data_port
from peers.network.data_port import TOKEN_LIFETIME, Splice, Splicer
from tests.peers.network.pairs import open_files, socket_pair
from tests.peers.network.test_throttle import now, simulate

DEADLINE = 100.0  # simulated seconds


@asynccontextmanager
async def splicer(limit: float = 1e12, connections: int = 100) -> AsyncIterator[Splicer]:
    one = Splicer(limit, connections)
    before = open_files()
    try:
        async with asyncio.timeout(DEADLINE):
            yield one
    finally:
        await one.close()
    assert open_files() == before


def comes(relay: Splicer, token: bytes, number: int = 0) -> socket.socket:
    """A peer's end of a connection to the relay that shows this token."""
    near, far = socket_pair()
    relay.arrived(far, Splice(token=token, number=number))
    return near


async def has_ended(sock: socket.socket) -> bool:
    """Whether the relay has closed the connection. Closes our end, too."""
    with sock:
        try:
            async with asyncio.timeout(0.001):
                return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


def token_of(relay: Splicer, asker: str = "a") -> bytes:
    token = relay.expect(asker)
    assert token is not None
    return token


def test_bytes_pass_both_ways_and_an_end_is_passed_on() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            loop, token = asyncio.get_running_loop(), token_of(relay)
            one = comes(relay, token)
            await loop.sock_sendall(one, b"said before the other one came")
            with comes(relay, token) as other:
                assert await loop.sock_recv(other, 100) == b"said before the other one came"
                await loop.sock_sendall(other, b"an answer")
                assert await loop.sock_recv(one, 100) == b"an answer"
                one.close()
                assert await loop.sock_recv(other, 100) == b""

    simulate(scenario())


def test_connections_are_told_apart_by_their_numbers() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            loop, token = asyncio.get_running_loop(), token_of(relay)
            ones = [comes(relay, token, number) for number in (0, 1, 2)]
            others = [comes(relay, token, number) for number in (2, 0, 1)]
            for place, one in enumerate(ones):
                await loop.sock_sendall(one, b"%d" % place)
            assert [await loop.sock_recv(other, 10) for other in others] == [b"2", b"0", b"1"]
            for sock in (*ones, *others):
                sock.close()

    simulate(scenario())


def test_a_token_that_nobody_gave_opens_nothing() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            assert await has_ended(comes(relay, bytes(16)))

    simulate(scenario())


def test_who_waits_in_vain_is_sent_away_though_nobody_else_comes() -> None:
    """Regression: they stayed until somebody else wanted something."""

    async def scenario() -> None:
        async with splicer() as relay:
            token = token_of(relay)
            early = comes(relay, token)
            began = now()
            assert await asyncio.get_running_loop().sock_recv(early, 1) == b""
            assert now() - began == pytest.approx(TOKEN_LIFETIME)
            early.close()
            assert await has_ended(comes(relay, token)), "it is too late"

    simulate(scenario())


def test_a_meeting_that_is_called_off_sends_away_who_waits() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            token = token_of(relay)
            early = comes(relay, token)
            relay.cancel(token)
            assert await has_ended(early)
            relay.cancel(token)

    simulate(scenario())


def test_connections_that_are_joined_outlive_their_token() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            loop, token = asyncio.get_running_loop(), token_of(relay)
            with comes(relay, token) as one, comes(relay, token) as other:
                await asyncio.sleep(2 * TOKEN_LIFETIME)
                await loop.sock_sendall(one, b"still there")
                assert await loop.sock_recv(other, 100) == b"still there"

    simulate(scenario())


def test_a_token_joins_so_many_connections_and_no_more() -> None:
    async def scenario() -> None:
        async with splicer() as relay:
            token = token_of(relay)
            pairs = [(comes(relay, token), comes(relay, token)) for _ in range(data_port.MEETING_CONNECTIONS)]
            assert await has_ended(comes(relay, token))
            for one, other in pairs:
                assert not await has_ended(one)
                other.close()

    simulate(scenario())


def test_one_peer_cannot_use_up_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "TOKENS_OF_ONE_PEER", 3)
    monkeypatch.setattr(data_port, "TOKENS", 5)

    async def scenario() -> None:
        async with splicer() as relay:
            of_a = [relay.expect("a") for _ in range(4)]
            assert [token is None for token in of_a] == [False, False, False, True]
            assert [relay.expect("b") is None for _ in range(3)] == [False, False, True]
            await asyncio.sleep(TOKEN_LIFETIME)
            assert relay.expect("a")

    simulate(scenario())


def test_a_full_relay_takes_nobody_in() -> None:
    async def scenario() -> None:
        async with splicer(connections=2) as relay:
            first, second = token_of(relay), token_of(relay)
            pair = comes(relay, first), comes(relay, first)
            waiting = comes(relay, second)
            assert relay.expect("c") is None
            assert await has_ended(comes(relay, second, 1))
            assert not await has_ended(waiting)
            for sock in pair:
                sock.close()

    simulate(scenario())


def test_all_together_pass_no_more_than_the_limit() -> None:
    async def scenario() -> None:
        size, rate = 1 << 17, 100_000.0
        async with splicer(rate) as relay:
            loop, began = asyncio.get_running_loop(), now()

            async def one(token: bytes) -> None:
                with comes(relay, token) as sender, comes(relay, token) as receiver:
                    sending = asyncio.ensure_future(loop.sock_sendall(sender, bytes(size)))
                    received = 0
                    while received < size:
                        received += len(await loop.sock_recv(receiver, size))
                    await sending

            await asyncio.gather(*(one(token_of(relay)) for _ in range(3)))
            assert now() - began >= 0.9 * 3 * size / rate

    simulate(scenario())
