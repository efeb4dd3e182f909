"""Chunks on one stream: what was confirmed and what was not is known, however it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.network.channel import (
    ACCEPTED,
    FRAME,
    FRAMES_UNDER_WAY,
    REFUSED,
    STALL_TIMEOUT,
    Channel,
    ChunkSender,
    Frame,
    PeerRefusedError,
    PeerUnreachableError,
    RefusalError,
    receive_chunks,
)
from peers.network.throttle import PIECE, Throttle
from tests.peers.network.test_channel import BROKEN, channels, converse, rest_of, send_raw
from tests.peers.network.test_throttle import simulate

SIZE_LIMIT = 4 * PIECE


class Outbox:
    """The sending end: frames numbered from 0 on, and what is said of them. Stops once all are answered."""

    def __init__(self, data: Iterable[bytes], header: bytes = b"round 1") -> None:
        self.frames = list(data)
        self.header = header
        self.given = 0
        self.answers: list[tuple[int, bool]] = []
        self.sender: ChunkSender[int] | None = None
        self._all_answered = asyncio.Event()

    async def run(self, channel: Channel) -> None:
        """Raises whatever ends the stream before all frames are answered."""
        self.sender = ChunkSender(channel)
        sending = asyncio.ensure_future(self.sender.run(self.header, self._following, self._answered))
        answered = asyncio.ensure_future(self._all_answered.wait())
        await asyncio.wait((sending, answered), return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        if not self._all_answered.is_set():
            await sending
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending

    @property
    def pending(self) -> list[int]:
        assert self.sender is not None
        return list(self.sender.pending)

    async def _following(self) -> Frame[int]:
        if self.given == len(self.frames):
            await asyncio.Event().wait()
        number = self.given
        self.given += 1
        return number, b"chunk %d" % number, self.frames[number]

    def _answered(self, number: int, is_taken: bool, seconds: float) -> None:
        self.answers.append((number, is_taken))
        if len(self.answers) == len(self.frames):
            self._all_answered.set()


class Inbox:
    """The receiving end: lets in who is in round 1, and frames up to a size; keeps what it has no use for apart."""

    def __init__(self, useless: Iterable[int] = ()) -> None:
        self.useless = {b"chunk %d" % number for number in useless}
        self.received: list[tuple[str, bytes, bytes, bytes]] = []

    async def admit(self, sender: str, header: bytes) -> StreamInbox:
        if header != b"round 1":
            raise RefusalError("not in that round with you")
        return StreamInbox(self, sender, header)

    def arrived(self, sender: str, header: bytes, frame: bytes, data: bytearray) -> bool:
        self.received.append((sender, header, frame, bytes(data)))
        return frame not in self.useless

    async def receive(self, channel: Channel) -> None:
        await receive_chunks(channel, self.admit)


class StreamInbox:
    """What comes to an inbox on one stream."""

    def __init__(self, inbox: Inbox, sender: str, header: bytes) -> None:
        self._inbox = inbox
        self._sender = sender
        self._header = header

    def expect(self, header: bytes, length: int) -> bytearray:
        if length > SIZE_LIMIT:
            raise RemoteProtocolError(self._sender, f"a chunk of {length} bytes")
        self._frame, self._data = header, bytearray(length)
        return self._data

    def arrived(self) -> bool:
        return self._inbox.arrived(self._sender, self._header, self._frame, self._data)


def exchange(outbox: Outbox, other: Callable[[Channel], Awaitable[Any]]) -> list[Any]:
    return converse(outbox.run, other)


def test_chunks_arrive_whole_and_in_order() -> None:
    data = [os.urandom(size) for size in (0, 1, PIECE, 3 * PIECE + 17, *([100] * (3 * FRAMES_UNDER_WAY)))]
    outbox, inbox = Outbox(data), Inbox()
    assert exchange(outbox, inbox.receive) == [None, None]
    assert outbox.answers == [(number, True) for number in range(len(data))]
    assert inbox.received == [("left", b"round 1", b"chunk %d" % number, sent) for number, sent in enumerate(data)]
    assert outbox.pending == []


def test_a_stream_that_was_ended_properly_is_finished_and_another_can_follow() -> None:
    async def scenario() -> None:
        left, right = await channels()
        inbox = Inbox()
        for number in range(3):
            frames: list[Frame[int] | None] = [(0, b"chunk %d" % number, b"data"), None]

            async def following(frames: list[Frame[int] | None] = frames) -> Frame[int] | None:
                return frames.pop(0)

            left.is_finished = False
            sending = ChunkSender[int](left).run(b"round 1", following, lambda number, is_taken, seconds: None)
            await asyncio.gather(sending, inbox.receive(right))
            assert left.is_finished
        assert [frame for _, _, frame, _ in inbox.received] == [b"chunk 0", b"chunk 1", b"chunk 2"]
        left.close()
        right.close()

    simulate(scenario())


def test_frames_answered_no_are_told_apart() -> None:
    outbox, inbox = Outbox([b"data"] * 5), Inbox(useless=[1, 3])
    assert exchange(outbox, inbox.receive) == [None, None]
    assert outbox.answers == [(0, True), (1, False), (2, True), (3, False), (4, True)]


def test_a_refused_streams_data_is_not_read() -> None:
    outbox = Outbox([bytes(1 << 24)])

    class Busy(Inbox):
        async def admit(self, sender: str, header: bytes) -> StreamInbox:
            raise RefusalError("not now")

    inbox = Busy()
    refused, receiver = exchange(outbox, inbox.receive)
    assert isinstance(refused, PeerUnreachableError)
    assert not isinstance(refused, PeerRefusedError), "the connection has frames on it that nobody reads"
    assert refused.reason == "not now"
    assert isinstance(receiver, EOFError), "nothing else can follow on this connection"
    assert inbox.received == []


def test_a_stream_that_breaks_off_says_what_was_confirmed_and_what_was_not() -> None:
    outbox = Outbox([b"data"] * 100)

    async def break_off(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.accept()
        for answer in (True, False):
            announced = await channel.read_frame_header()
            assert announced is not None
            await channel.read_data(bytearray(announced[1]))
            await channel.answer_frame(answer)

    broken, _ = exchange(outbox, break_off)
    assert isinstance(broken, EOFError | OSError)
    assert outbox.answers == [(0, True), (1, False)]
    assert outbox.pending == list(range(2, outbox.given)), "everything else that was given is known to be lost"


def test_only_so_many_chunks_are_under_way_without_an_answer() -> None:
    outbox = Outbox([b"data"] * 100)

    async def read_without_answers(channel: Channel) -> int:
        await channel.read_prelude()
        await channel.accept()
        for _ in range(FRAMES_UNDER_WAY):
            announced = await channel.read_frame_header()
            assert announced is not None
            await channel.read_data(bytearray(announced[1]))
        for _ in range(100):
            await asyncio.sleep(0)
        return outbox.given

    _, given = exchange(outbox, read_without_answers)
    assert given == FRAMES_UNDER_WAY
    assert outbox.answers == []


@pytest.mark.parametrize(("most", "frames"), [(10, 3), (1, 2)])
def test_a_slow_link_has_fewer_bytes_under_way(most: int, frames: int) -> None:
    async def read_without_answers(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.accept()
        for _ in range(100):
            await asyncio.sleep(0)

    async def send(channel: Channel) -> int:
        given = 0

        async def following() -> Frame[int]:
            nonlocal given
            given += 1
            return given, b"", b"data"

        sending = asyncio.create_task(ChunkSender[int](channel, lambda: most).run(b"", following, lambda *_: None))
        for _ in range(100):
            await asyncio.sleep(0)
        sending.cancel()
        return given

    given, _ = converse(send, read_without_answers)
    assert given == frames


def test_a_chunk_that_breaks_off_never_arrives() -> None:
    async def break_off(channel: Channel) -> None:
        await channel.send_prelude(b"round 1", 0)
        await channel.read_verdict()
        await channel.send_frame(b"chunk 0", b"whole")
        await channel.read_answer()
        await send_raw(channel, FRAME.pack(7, 1000) + b"chunk 1" + bytes(999))

    inbox = Inbox()
    _, outcome = converse(break_off, inbox.receive)
    assert isinstance(outcome, EOFError)
    assert [frame for _, _, frame, _ in inbox.received] == [b"chunk 0"]


@pytest.mark.parametrize("length", [SIZE_LIMIT + 1, 2**40, 2**64 - 1], ids=["one byte more", "a terabyte", "all bits"])
def test_memory_is_not_allocated_for_what_nobody_asked_for(length: int) -> None:
    """A terabyte would be refused by the machine; a MemoryError is no answer to a peer."""

    async def announce(channel: Channel) -> bytes:
        await channel.send_prelude(b"round 1", 0)
        await channel.read_verdict()
        await send_raw(channel, FRAME.pack(7, length) + b"chunk 0")
        return await rest_of(channel)

    inbox = Inbox()
    answers, outcome = converse(announce, inbox.receive)
    assert isinstance(outcome, RemoteProtocolError)
    assert "peer left" in str(outcome), "who sends garbage is named"
    assert (answers, inbox.received) == (b"", [])


def test_a_sender_that_is_stopped_leaves_nothing_running() -> None:
    outbox, inbox = Outbox([b"data"] * 2), Inbox()

    async def run(channel: Channel) -> int:
        await outbox.run(channel)
        return len(asyncio.all_tasks())

    async def receive(channel: Channel) -> int:
        await inbox.receive(channel)
        return len(asyncio.all_tasks())

    before, after = converse(run, receive)
    assert before <= 3, "this, the other end, and the test"
    assert after <= 2


@pytest.mark.parametrize("failure", [KeyError("the round is over"), ZeroDivisionError()], ids=repr)
def test_what_fails_while_a_chunk_is_fetched_ends_the_stream(failure: Exception) -> None:
    async def following() -> Frame[int]:
        raise failure

    def ignore(number: int, is_taken: bool, seconds: float) -> None: ...

    async def send(channel: Channel) -> None:
        sender: ChunkSender[int] = ChunkSender(channel)
        await sender.run(b"round 1", following, ignore)

    outcome, receiver = converse(send, Inbox().receive)
    assert outcome is failure
    assert receiver is None


@given(st.binary(max_size=200))
def test_garbage_in_place_of_a_stream_is_refused(garbage: bytes) -> None:
    inbox = Inbox()
    _, outcome = converse(lambda channel: send_raw(channel, garbage), inbox.receive)
    assert isinstance(outcome, BROKEN)
    assert inbox.received == []


@given(st.binary(min_size=1, max_size=200))
def test_garbage_in_place_of_frames_is_refused_or_unfinished(garbage: bytes) -> None:
    """No frame of 200 bytes is whole unless its lengths say so."""

    async def babble(channel: Channel) -> None:
        await channel.send_prelude(b"round 1", 0)
        await channel.read_verdict()
        await send_raw(channel, garbage)

    inbox = Inbox()
    _, outcome = converse(babble, inbox.receive)
    assert outcome is None or isinstance(outcome, BROKEN)
    assert sum(FRAME.size + len(frame) + len(data) for _, _, frame, data in inbox.received) <= len(garbage)


@given(st.binary(max_size=200))
def test_garbage_in_place_of_a_verdict_is_an_error(garbage: bytes) -> None:
    outbox = Outbox([b"data"] * 1000)
    outcome, _ = exchange(outbox, lambda channel: send_raw(channel, garbage))
    assert isinstance(outcome, BROKEN | PeerRefusedError)


@given(st.binary(max_size=200))
def test_garbage_in_place_of_answers_is_an_error(garbage: bytes) -> None:
    outbox = Outbox([b"data"] * 1000)

    async def babble(channel: Channel) -> None:
        await channel.accept()
        await send_raw(channel, garbage)

    outcome, _ = exchange(outbox, babble)
    assert isinstance(outcome, BROKEN)
    clear = next(
        (place for place, byte in enumerate(garbage) if bytes([byte]) not in (ACCEPTED, REFUSED)), len(garbage)
    )
    assert len(outbox.answers) <= clear
    assert [number for number, _ in outbox.answers] + outbox.pending == list(range(outbox.given))


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_chunk_that_takes_long_under_a_cap_is_not_a_stall(pieces: int) -> None:
    """Regression: bytes move all the time; the whole chunk takes longer than silence may last."""

    async def scenario() -> None:
        rate = pieces * PIECE / (1.5 * STALL_TIMEOUT)
        left, right = await channels(upload=Throttle(rate))
        outbox, inbox = Outbox([bytes(pieces * PIECE)] * 2), Inbox()
        receiving = asyncio.create_task(inbox.receive(right))
        try:
            async with asyncio.timeout(1000):
                await outbox.run(left)
        finally:
            left.close()
            right.close()
            await asyncio.gather(receiving, return_exceptions=True)
        assert outbox.answers == [(0, True), (1, True)]

    simulate(scenario())


def test_many_streams_share_one_cap_and_none_breaks() -> None:
    """Regression: 5 members with 4 streams each, and 2 Mbit/s for all of them."""

    async def scenario() -> None:
        throttle = Throttle(250_000)

        async def one() -> list[tuple[int, bool]]:
            left, right = await channels(upload=throttle)
            outbox, inbox = Outbox([bytes(2 * PIECE)]), Inbox()
            receiving = asyncio.create_task(inbox.receive(right))
            try:
                await outbox.run(left)
            finally:
                left.close()
                right.close()
                await asyncio.gather(receiving, return_exceptions=True)
            return outbox.answers

        async with asyncio.timeout(1000):
            assert await asyncio.gather(*(one() for _ in range(20))) == [[(0, True)]] * 20

    simulate(scenario())
