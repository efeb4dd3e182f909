"""Framing of bulk data, on socket pairs instead of libp2p."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.network import channel as streams
from peers.network.channel import Channel, PeerRefusedError, RefusalError
from peers.network.throttle import PIECE, UNLIMITED, LinkTime, Throttle
from peers.values.wire import Buffer
from tests.peers.network.test_throttle import simulate

DEADLINE = 120.0  # seconds; nothing here waits for anything but the other end of a socket pair
BROKEN = RemoteProtocolError | EOFError | OSError
"""What reading from somebody who talks nonsense may raise; to a caller of the transport all are one."""


async def channels(upload: Throttle = UNLIMITED, download: Throttle = UNLIMITED) -> tuple[Channel, Channel]:
    """Both ends; the left one's upload and the right one's download have these caps."""
    left, right = socket.socketpair()
    return (
        Channel("right", *await asyncio.open_unix_connection(sock=left), upload=upload),
        Channel("left", *await asyncio.open_unix_connection(sock=right), download=download),
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


async def send_raw(channel: Channel, raw: bytes) -> None:
    """Bytes that no honest peer would send."""
    channel._writer.write(raw)
    await channel._writer.drain()


async def rest_of(channel: Channel) -> bytes:
    """What comes until the other end closes: less than this."""
    with pytest.raises(asyncio.IncompleteReadError) as end:
        await channel._reads.read(1 << 24, None)
    return end.value.partial


# Frames ---------------------------------------------------------------------------------------------------------
async def read_frames(channel: Channel) -> list[tuple[bytes, bytearray]]:
    """All that come, each answered yes."""
    frames = []
    while announced := await channel.read_frame_header():
        header, data = announced[0], bytearray(announced[1])
        await channel.read_data(data)
        frames.append((header, data))
        await channel.answer_frame(True)
    return frames


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 5 * PIECE + 17])
def test_frames_arrive_whole(size: int) -> None:
    data = os.urandom(size)

    async def send(channel: Channel) -> list[bool]:
        for header in (b"first", b"second"):
            await channel.send_frame(header, data)
        return [await channel.read_answer() for _ in range(2)]

    answers, frames = converse(send, read_frames)
    assert answers == [True, True]
    assert frames == [(b"first", data), (b"second", data)]


def test_every_view_of_bytes_can_be_sent() -> None:
    async def send(channel: Channel) -> None:
        for data in (b"abcd", bytearray(b"abcd"), memoryview(b"xabcdx")[1:5], memoryview(b"abcd").cast("H")):
            await channel.send_frame(b"", data)
            assert await channel.read_answer()

    sender, frames = converse(send, read_frames)
    assert sender is None
    assert frames == [(b"", b"abcd")] * 4


def test_a_stream_that_ends_between_frames_has_ended_well() -> None:
    async def nothing(channel: Channel) -> None: ...

    assert converse(nothing, read_frames) == [None, []]


def test_after_the_last_frame_something_else_may_follow() -> None:
    async def send(channel: Channel) -> None:
        await channel.send_frame(b"one", b"data")
        await channel.read_answer()
        await channel.send_last_frame()
        await channel.send_prelude(b"the next conversation", 7)

    async def read(channel: Channel) -> object:
        return await read_frames(channel), await channel.read_prelude()

    assert converse(send, read) == [None, ([(b"one", b"data")], (b"the next conversation", 7))]


def test_a_message_arrives_as_a_frame() -> None:
    async def send(channel: Channel) -> bool:
        await channel.send_message(b"header", b"data")
        return await channel.read_answer()

    assert converse(send, read_frames) == [True, [(b"header", b"data")]]


@pytest.mark.parametrize("sent", [1, streams.FRAME.size - 1, streams.FRAME.size, streams.FRAME.size + 3])
def test_a_stream_that_ends_within_a_frame_has_broken_off(sent: int) -> None:
    whole = streams.FRAME.pack(3, 5) + b"abc" + b"12345"
    _, outcome = converse(lambda channel: send_raw(channel, whole[:sent]), read_frames)
    assert isinstance(outcome, EOFError)


def test_data_that_breaks_off_says_how_much_came() -> None:
    _, outcome = converse(lambda channel: send_raw(channel, streams.FRAME.pack(0, 1000) + bytes(999)), read_frames)
    assert isinstance(outcome, EOFError)
    assert str(outcome) == "the stream ended after 999 of 1000 bytes"


def test_who_gives_a_frame_up_sends_no_more_of_it() -> None:
    """From Python 3.12 on, what is not sent yet is still the caller's memory, and may be something else by then."""

    async def scenario() -> None:
        left, right = await channels()
        memory = bytearray(10_000_000)
        sending = asyncio.create_task(left.send_frame(b"", memory))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sending, 1.0)
        unsent = left._writer.transport.get_write_buffer_size()
        assert unsent
        left.close()
        memory[:] = b"x" * len(memory)
        rest = await rest_of(right)
        assert (len(rest) + unsent - streams.FRAME.size) % PIECE == 0
        assert b"x" not in rest
        right.close()

    simulate(scenario())


def test_a_frame_header_out_of_bounds_is_refused_before_it_is_read() -> None:
    size = streams.FRAME_HEADER_LIMIT + 1
    _, outcome = converse(lambda channel: send_raw(channel, streams.FRAME.pack(size, 1)), read_frames)
    assert isinstance(outcome, RemoteProtocolError)
    assert str(size) in str(outcome)
    assert "peer left" in str(outcome)


def test_a_stream_header_that_nobody_would_take_is_not_sent() -> None:
    async def nothing(channel: Channel) -> None: ...

    sender, _ = converse(lambda channel: channel.send_prelude(bytes(streams.HEADER_LIMIT + 1), 0), nothing)
    assert isinstance(sender, LocalProtocolError)


@pytest.mark.parametrize("answer", [b"\x02", b"y", b"\xff"])
def test_an_answer_to_a_frame_is_yes_or_no(answer: bytes) -> None:
    outcome, _ = converse(lambda channel: channel.read_answer(), lambda channel: send_raw(channel, answer))
    assert isinstance(outcome, RemoteProtocolError)
    assert "neither acceptance nor refusal" in str(outcome)


def test_who_falls_silent_within_a_frame_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_TIMEOUT", 0.01)

    async def stall(channel: Channel) -> None:
        await send_raw(channel, streams.FRAME.pack(0, 10) + bytes(9))
        await rest_of(channel)

    _, outcome = converse(stall, read_frames)
    assert isinstance(outcome, TimeoutError)


class Counted(Throttle):
    """Lets everything pass, and notes how much at once."""

    def __init__(self) -> None:
        super().__init__(None)
        self.taken: list[int] = []

    async def take(self, count: int) -> None:
        self.taken.append(count)


@pytest.mark.parametrize("gives_way", [False, True])
def test_both_ends_ask_their_throttles_for_every_byte(gives_way: bool) -> None:
    """Of frames and of what is pulled alike; headers and answers don't count."""
    size, into = 3 * PIECE + 5, bytearray(3 * PIECE + 5)

    async def read_frame(channel: Channel) -> None:
        announced = await channel.read_frame_header()
        assert announced is not None
        await channel.read_data(bytearray(announced[1]))

    async def both(send: Callable[[Channel], Awaitable[Any]], receive: Callable[[Channel], Awaitable[Any]]) -> None:
        upload, download = Counted(), Counted()
        left, right = await channels(upload, download)
        if gives_way:
            left.give_way(LinkTime())
        try:
            async with asyncio.timeout(DEADLINE):
                await asyncio.gather(send(left), receive(right))
        finally:
            left.close()
            right.close()
        assert upload.taken == [PIECE] * 3 + [5]
        assert sum(download.taken) == size

    asyncio.run(both(lambda channel: channel.send_frame(b"", bytes(size)), read_frame))
    asyncio.run(both(lambda channel: channel.send_data(bytes(size)), lambda channel: channel.read_data(into)))


# Pulls ----------------------------------------------------------------------------------------------------------
ANSWER = bytes(range(256)) * 10_000


@asynccontextmanager
async def serve(sender: str, header: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
    if header == b"secret":
        raise RefusalError("no")
    yield b"answer to " + header, ANSWER


async def serve_one(channel: Channel) -> None:
    await streams.serve_pull(channel, serve)


def test_pull_arrives_whole() -> None:
    answer, server = converse(lambda channel: streams.pull(channel, b"question", 1 << 30), serve_one)
    assert answer == (b"answer to question", ANSWER)
    assert server is None


def test_pull_can_be_refused() -> None:
    refused, server = converse(lambda channel: streams.pull(channel, b"secret", 1 << 30), serve_one)
    assert isinstance(refused, PeerRefusedError)
    assert refused.reason == "no"
    assert server is None


def test_a_reason_cannot_draw_on_the_terminal() -> None:
    """Regression: peers' words reached terminals and logs as they were."""

    async def refuse(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.refuse("no\x1b[2J\r\nINFO all is well\u202e")

    refused, _ = converse(lambda channel: streams.pull(channel, b"", 1000), refuse)
    assert isinstance(refused, PeerRefusedError)
    assert refused.reason == "no [2J  INFO all is well "


@pytest.mark.parametrize("length", [0, streams.REASON_BYTES, streams.REASON_BYTES + 1])
def test_a_refusal_is_read_to_its_end_or_it_is_none(length: int) -> None:
    """Where another conversation follows on the connection, nothing of this one may be left."""

    async def refused(channel: Channel) -> tuple[type, bool, bytes]:
        outcome = (await asyncio.gather(channel.read_verdict(), return_exceptions=True))[0]
        return type(outcome), channel.is_finished, await rest_of(channel)

    raw = streams.REFUSED + streams.REASON_LENGTH.pack(length) + b"x" * length
    outcome, _ = converse(refused, lambda channel: send_raw(channel, raw))
    if length <= streams.REASON_BYTES:
        assert outcome == (PeerRefusedError, True, b"")
    else:
        assert outcome[:2] == (RemoteProtocolError, False)


def test_where_a_connection_stays_open_nobody_waits_for_its_end() -> None:
    async def scenario() -> None:
        left, right = await channels()
        for end in (left, right):
            end._stays_open = True
        for header in (b"secret", b"question", b"secret"):
            _, outcome = await asyncio.gather(
                serve_one(right), streams.pull(left, header, 1 << 30), return_exceptions=True
            )
            assert isinstance(outcome, PeerRefusedError) == (header == b"secret")
        left.close()
        assert left._writer.is_closing()
        left.close()
        right.close()

    simulate(scenario())


def test_pull_takes_no_more_than_it_wants() -> None:
    refused, server = converse(lambda channel: streams.pull(channel, b"question", 1000), serve_one)
    assert isinstance(refused, RemoteProtocolError)
    assert isinstance(server, EOFError | OSError)


def test_pull_that_breaks_off_never_arrives() -> None:
    async def break_off(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.accept()
        await channel.send_prelude(b"", 1000)
        await channel.send_data(bytes(999))

    outcome, _ = converse(lambda channel: streams.pull(channel, b"", 1000), break_off)
    assert isinstance(outcome, EOFError)


def test_pull_confirmed_with_other_bytes_fails() -> None:
    async def confirm_wrongly(channel: Channel) -> None:
        await channel.send_prelude(b"question", 0)
        await channel.read_verdict()
        _, length = await channel.read_prelude()
        await channel.read_data(bytearray(length))
        await channel.send_digest(bytes(32))

    _, server = converse(confirm_wrongly, serve_one)
    assert isinstance(server, RemoteProtocolError)


def test_a_request_with_data_is_refused() -> None:
    _, server = converse(lambda channel: channel.send_prelude(b"question", 1), serve_one)
    assert isinstance(server, RemoteProtocolError)
    assert "1 bytes of data with a request" in str(server)


@given(st.binary(max_size=200))
def test_garbage_as_a_request_is_refused(garbage: bytes) -> None:
    _, outcome = converse(lambda channel: send_raw(channel, garbage), serve_one)
    assert isinstance(outcome, BROKEN)


@given(st.binary(min_size=1, max_size=200))
def test_garbage_as_an_answer_is_an_error(garbage: bytes) -> None:
    outcome, _ = converse(lambda channel: streams.pull(channel, b"", 1000), lambda channel: send_raw(channel, garbage))
    assert isinstance(outcome, BROKEN | PeerRefusedError)


@pytest.mark.parametrize(
    "prelude",
    [
        struct.pack(">4sBIQ", b"HTTP", streams.VERSION, 0, 0),
        struct.pack(">4sBIQ", streams.MAGIC, streams.VERSION, streams.HEADER_LIMIT + 1, 0),
    ],
    ids=["magic", "header length"],
)
def test_a_prelude_is_checked_field_by_field(prelude: bytes) -> None:
    _, outcome = converse(lambda channel: send_raw(channel, prelude), lambda channel: channel.read_prelude())
    assert isinstance(outcome, RemoteProtocolError)


def test_another_version_is_refused_and_both_are_named() -> None:
    prelude = struct.pack(">4sBIQ", streams.MAGIC, 9, 0, 0)
    _, outcome = converse(lambda channel: send_raw(channel, prelude), lambda channel: channel.read_prelude())
    assert isinstance(outcome, RemoteProtocolError)
    assert "version 9;" in str(outcome)
    assert str(outcome).endswith(f"version {streams.VERSION}")
