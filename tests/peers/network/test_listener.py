"""The data port: strangers are let in, but never so many, and none stays for long without saying what it wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from peers.errors import RemoteProtocolError
from peers.network import data_port
from peers.network.data_port import (
    UNKNOWN_OF_ONE_NETWORK,
    Hello,
    Listener,
    Strangers,
    pack_opening,
)
from tests.peers.network.pairs import open_files

DEADLINE = 120.0  # seconds
OPENING = Hello(to="a" * 20, certificate=b"", is_yours=True)


class Door:
    """A listener that answers every greeting with "in"."""

    def __init__(self) -> None:
        self.openings: list[Hello] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.error: Exception | None = None
        self.listener = Listener(["127.0.0.1"], 0, self.accept, None)

    async def accept(self, sock: socket.socket, opening: Hello) -> None:
        with sock:
            self.openings.append(opening)
            if self.error:
                raise self.error
            await asyncio.get_running_loop().sock_sendall(sock, b"in")

    async def dial(self, sends: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        self.writers.append(writer)
        writer.write(sends)
        return reader

    async def says(self, sends: bytes) -> bytes:
        """All that comes after these bytes were sent, until the door closes the connection."""
        reader = await self.dial(sends)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def door() -> AsyncIterator[Door]:
    one = Door()
    try:
        async with asyncio.timeout(DEADLINE):
            yield one
    finally:
        await one.listener.close()
        for writer in one.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    before = open_files()
    asyncio.run(scenario)
    assert open_files() == before


def test_whoever_says_what_it_wants_is_let_in() -> None:
    async def scenario() -> None:
        async with door() as one:
            assert await one.says(pack_opening(OPENING)) == b"in"
            assert one.openings == [OPENING]

    run(scenario())


def test_nonsense_and_silence_are_sent_away_and_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "OPENING_TIMEOUT", 0.05)

    async def scenario() -> None:
        async with door() as one:
            assert await one.says(b"GET / HTTP/1.0\r\n\r\n") == b""
            assert await one.says(b"DLLK") == b""
            assert await one.says(b"") == b""
            assert await one.says(pack_opening(OPENING)) == b"in"
            assert one.openings == [OPENING]

    run(scenario())


@pytest.mark.parametrize("error", [RemoteProtocolError("a", "b"), OSError("broken"), ZeroDivisionError()], ids=repr)
def test_whatever_goes_wrong_with_one_the_next_is_let_in(error: Exception) -> None:
    async def scenario() -> None:
        async with door() as one:
            one.error = error
            assert await one.says(pack_opening(OPENING)) == b""
            one.error = None
            assert await one.says(pack_opening(OPENING)) == b"in"

    run(scenario())


def test_one_network_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "STRANGERS_OF_ONE_NETWORK", 3)

    async def scenario() -> None:
        async with door() as one:
            for _ in range(3):
                await one.dial()
            assert await one.says(pack_opening(OPENING)) == b"", "there is no place left"
            first = one.writers[0]
            first.write(pack_opening(OPENING))
            await first.drain()
            while len(one.listener._strangers) == 3:
                await asyncio.sleep(0)
            assert await one.says(pack_opening(OPENING)) == b"in"

    run(scenario())


def test_a_flood_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has been silent for longest has to go."""
    monkeypatch.setattr(data_port, "STRANGERS", 3)

    async def scenario() -> None:
        async with door() as one:
            silent = [await one.dial() for _ in range(3)]
            assert await one.says(pack_opening(OPENING)) == b"in"
            assert await silent[0].read() == b""

    run(scenario())


def test_closing_ends_those_who_have_not_said_anything() -> None:
    async def scenario() -> None:
        async with door() as one:
            silent = await one.dial()
            while not one.listener._strangers:
                await asyncio.sleep(0)
            await one.listener.close()
            assert await silent.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await one.dial()

    run(scenario())


def test_too_many_open_files_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "PAUSE", 0.0)

    async def scenario() -> None:
        accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 3

        def fail_at_first(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", fail_at_first)
        async with door() as one:
            assert await one.says(pack_opening(OPENING)) == b"in"

    run(scenario())


# Made-up peers --------------------------------------------------------------------------------------------------
def let_in(strangers: Strangers, network: str, count: int, now: float = 0.0) -> list[str]:
    """Return those of so many new peers of a network that are let in."""
    names = [f"{network}/{now:g}/{number}" for number in range(count)]
    return [name for name in names if strangers.come(name, network, now)]


def test_one_network_brings_few_peers_at_once_and_more_as_time_goes_on() -> None:
    ended: list[str] = []
    strangers = Strangers(1000, ended.append)
    first = let_in(strangers, "one", 400)
    assert len(first) == UNKNOWN_OF_ONE_NETWORK
    assert not ended
    assert len(let_in(strangers, "another", 128)) == 128, "a whole swarm"
    strangers.spoke(first[0])
    assert len(let_in(strangers, "one", 400, 6.0)) == 12
    assert ended == first[1:13], "those that were silent for longest"


def test_a_flood_from_few_networks_drives_out_only_its_own() -> None:
    ended: list[str] = []
    strangers = Strangers(10, ended.append)
    [volunteer] = let_in(strangers, "home", 1)
    assert len([*let_in(strangers, "one", 5), *let_in(strangers, "two", 20)]) == 25
    assert len(ended) == 16
    assert volunteer not in ended


def test_those_that_went_leave_their_place() -> None:
    ended: list[str] = []
    strangers = Strangers(2, ended.append)
    for number in range(100):
        [name] = let_in(strangers, f"network {number}", 1, 1000.0 * number)
        strangers.went(name)
    assert not ended
