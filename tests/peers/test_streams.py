"""Framing of bulk data, on socket pairs instead of libp2p."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers import streams
from peers.errors import RemoteProtocolError
from peers.streams import Buffer, Channel, PeerRefusedError, RefusalError

DEADLINE = 10.0  # seconds; nothing here waits for anything but the other end of a socket pair


async def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return (
        Channel("right", *await asyncio.open_unix_connection(sock=left)),
        Channel("left", *await asyncio.open_unix_connection(sock=right)),
    )


def converse(*ends: Callable[[Channel], Awaitable[Any]]) -> list[Any]:
    """Run one coroutine at each end of a stream; their results or exceptions."""

    async def end(run: Callable[[Channel], Awaitable[Any]], channel: Channel) -> Any:
        try:
            return await run(channel)
        finally:
            channel.close()

    async def both() -> list[Any]:
        pairs = zip(ends, await channels(), strict=True)
        async with asyncio.timeout(DEADLINE):
            return await asyncio.gather(*(end(run, channel) for run, channel in pairs), return_exceptions=True)

    return asyncio.run(both())


class Inbox:
    """Accepts pushes up to a size."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.received: list[tuple[str, bytes, bytes]] = []

    def accept(self, sender: str, header: bytes, length: int) -> bytearray | str:
        return bytearray(length) if length <= self.limit else "too much"

    def arrived(self, sender: str, header: bytes, buffer: bytearray | memoryview) -> None:
        if header == b"unwelcome":
            raise RefusalError("not like this")
        self.received.append((sender, header, bytes(buffer)))

    async def receive(self, channel: Channel) -> None:
        await streams.receive_push(channel, self.accept, self.arrived)


@pytest.mark.parametrize("size", [0, 1, streams.CHUNK, 3 * streams.CHUNK + 17])
def test_push_arrives_whole(size: int) -> None:
    data, inbox = os.urandom(size), Inbox()
    assert converse(lambda channel: streams.push(channel, b"header", data), inbox.receive) == [None, None]
    assert inbox.received == [("left", b"header", data)]


def test_refused_push_moves_no_data() -> None:
    inbox = Inbox(limit=10)
    refused, receiver = converse(lambda channel: streams.push(channel, b"", bytes(1 << 24)), inbox.receive)
    assert isinstance(refused, PeerRefusedError)
    assert refused.reason == "too much"
    assert receiver is None


def test_a_reason_cannot_draw_on_the_terminal() -> None:
    """Regression: peers' words reached terminals and logs as they were."""

    async def refuse(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.refuse("no\x1b[2J\r\nINFO all is well\u202e")

    refused, _ = converse(lambda channel: streams.push(channel, b"", b"data"), refuse)
    assert isinstance(refused, PeerRefusedError)
    assert refused.reason == "no [2J  INFO all is well "


def test_push_refused_on_arrival() -> None:
    inbox = Inbox()
    refused, receiver = converse(lambda channel: streams.push(channel, b"unwelcome", b"data"), inbox.receive)
    assert isinstance(refused, PeerRefusedError)
    assert (refused.reason, receiver, inbox.received) == ("not like this", None, [])


def test_push_that_breaks_off_never_arrives() -> None:
    async def break_off(channel: Channel) -> None:
        await channel.send_prelude(b"", 1000)
        await channel.read_verdict()
        await channel.send_data(bytes(999))

    inbox = Inbox()
    _, receiver = converse(break_off, inbox.receive)
    assert isinstance(receiver, EOFError)
    assert inbox.received == []


def test_push_confirmed_with_other_bytes_fails() -> None:
    async def confirm_wrongly(channel: Channel) -> None:
        _, length = await channel.read_prelude()
        await channel.accept()
        await channel.read_data(bytearray(length))
        await channel.accept()
        await channel.send_digest(bytes(32))

    sender, _ = converse(lambda channel: streams.push(channel, b"", b"data"), confirm_wrongly)
    assert isinstance(sender, RemoteProtocolError)


@asynccontextmanager
async def serve(sender: str, header: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
    if header == b"secret":
        raise RefusalError("no")
    yield b"answer to " + header, bytes(range(256)) * 10_000


def test_pull_arrives_whole() -> None:
    answer, server = converse(
        lambda channel: streams.pull(channel, b"question", 1 << 30), lambda channel: streams.serve_pull(channel, serve)
    )
    assert answer == (b"answer to question", bytes(range(256)) * 10_000)
    assert server is None


def test_pull_can_be_refused() -> None:
    refused, server = converse(
        lambda channel: streams.pull(channel, b"secret", 1 << 30), lambda channel: streams.serve_pull(channel, serve)
    )
    assert isinstance(refused, PeerRefusedError)
    assert server is None


def test_pull_takes_no_more_than_it_wants() -> None:
    refused, server = converse(
        lambda channel: streams.pull(channel, b"question", 1000), lambda channel: streams.serve_pull(channel, serve)
    )
    assert isinstance(refused, RemoteProtocolError)
    assert isinstance(server, EOFError | OSError)


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_both_handlers(garbage: bytes) -> None:
    async def babble(channel: Channel) -> None:
        channel._writer.write(garbage)

    inbox = Inbox()
    for handler in (inbox.receive, lambda channel: streams.serve_pull(channel, serve)):
        _, outcome = converse(babble, handler)
        assert isinstance(outcome, RemoteProtocolError | EOFError | OSError)
    assert inbox.received == []


@given(st.binary(min_size=1, max_size=200))
def test_garbage_as_an_answer_is_an_error(garbage: bytes) -> None:
    async def babble(channel: Channel) -> None:
        channel._writer.write(garbage)

    expected = RemoteProtocolError | EOFError | OSError | PeerRefusedError
    assert isinstance(converse(lambda channel: streams.push(channel, b"", b"data"), babble)[0], expected)
    assert isinstance(converse(lambda channel: streams.pull(channel, b"", 1000), babble)[0], expected)
