"""Reading from one end of a socket pair into one's own memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peers.network.connection import LOW_WATER, READ_AHEAD, DirectReads
from tests.peers.network.test_throttle import now, simulate

LIMIT = 1 << 16  # bytes that a StreamReader takes in before it has enough, by half


class Pair:
    """Whoever writes, and whoever reads once it takes over."""

    def __init__(
        self,
        far_reader: asyncio.StreamReader,
        far: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.far_reader = far_reader
        self.far = far
        self.reader = reader
        self.writer = writer

    def take_over(self) -> DirectReads:
        return DirectReads(self.reader, self.writer)

    def taken_in_of(self, sent: int) -> int:
        """Bytes that are neither with the far end nor with the kernel any more."""
        near = self.writer.get_extra_info("socket").fileno()
        waiting = int.from_bytes(fcntl.ioctl(near, termios.FIONREAD, bytes(4)), sys.byteorder)
        return sent - self.far.transport.get_write_buffer_size() - waiting


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    left, right = socket.socketpair()
    both = Pair(*await asyncio.open_unix_connection(sock=left), *await asyncio.open_unix_connection(sock=right))
    try:
        yield both
    finally:
        both.far.close()
        both.writer.close()


async def settle() -> None:
    """Whatever is in the kernel's hands gets to who reads: the clock moves on only when there is nothing else to do."""
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("early", [0, 1, READ_AHEAD - 1, READ_AHEAD, READ_AHEAD + 1, 4 * LIMIT])
def test_every_byte_comes_in_order_whatever_was_there_before(early: int, is_late: bool) -> None:
    """Also what the StreamReader had taken in, and when that had stopped because it was too much."""
    data = os.urandom(early + 500_000)
    chance = random.Random(early)

    async def scenario() -> None:
        async with pair() as both:
            both.far.write(data[:early])
            await settle()
            reads = both.take_over()
            both.far.write(data[early:])
            if is_late:
                await settle()
            got = bytearray()
            while len(got) < len(data):
                size = min(chance.choice([0, 1, 12, 100, READ_AHEAD, READ_AHEAD + 1, 50_000]), len(data) - len(got))
                if chance.random() < 0.5:
                    got += await reads.read(size, 1.0)
                else:
                    memory = bytearray(size)
                    await reads.fill(memoryview(memory), 1.0)
                    got += memory
                if chance.random() < 0.1:
                    await settle()
            assert got == data

    simulate(scenario())


def test_what_nobody_waits_for_stays_with_the_kernel() -> None:
    async def scenario() -> None:
        async with pair() as both:
            reads = both.take_over()
            both.far.write(bytes(10_000_000))
            await settle()
            assert both.taken_in_of(10_000_000) == READ_AHEAD
            await reads.fill(memoryview(bytearray(5_000_000)), None)
            await settle()
            assert both.taken_in_of(10_000_000) == 5_000_000 + READ_AHEAD

    simulate(scenario())


@pytest.mark.parametrize("count", [5, READ_AHEAD + 5])
def test_an_end_before_that_says_what_came(count: int) -> None:
    async def scenario() -> None:
        async with pair() as both:
            reads = both.take_over()
            both.far.write(b"abc")
            both.far.write_eof()
            for _ in range(2):  # the second time it has ended before
                with pytest.raises(asyncio.IncompleteReadError) as caught:
                    await reads.read(count, None)
                assert caught.value.expected == count
            both.writer.write(b"still heard")
            await both.writer.drain()

    simulate(scenario())


def test_an_end_before_the_reader_was_taken_over() -> None:
    async def scenario() -> None:
        async with pair() as both:
            both.far.write(b"abc")
            both.far.close()
            await settle()
            reads = both.take_over()
            assert await reads.read(3, None) == b"abc"
            with pytest.raises(asyncio.IncompleteReadError):
                await reads.read(1, None)

    simulate(scenario())


def test_a_connection_that_is_closed_ends_the_read_that_waits() -> None:
    async def scenario() -> None:
        async with pair() as both:
            reading = asyncio.create_task(both.take_over().read(1, None))
            await settle()
            both.writer.close()
            with pytest.raises(asyncio.IncompleteReadError):
                await reading
            await both.writer.wait_closed()

    simulate(scenario())


def test_a_connection_that_broke_while_nobody_read_is_no_clean_end() -> None:
    async def scenario() -> None:
        async with pair() as both:
            reads = both.take_over()
            both.writer.transport.get_protocol().connection_lost(ConnectionResetError("by somebody"))
            with pytest.raises(ConnectionResetError):
                await reads.read(1, None)

    simulate(scenario())


def test_silence_ends_a_read_and_slowness_does_not() -> None:
    async def scenario() -> None:
        async with pair() as both:
            reads = both.take_over()

            async def trickle() -> None:
                for _ in range(20):
                    await asyncio.sleep(0.9)
                    both.far.write(b"x")

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(trickle())
                assert await reads.read(10, 1.0) == b"x" * 10
                memory = bytearray(10)
                await reads.fill(memoryview(memory), 1.0)
            assert memory == b"x" * 10
            silent_since = now()
            with pytest.raises(TimeoutError):
                await reads.read(1, 7.0)
            assert now() - silent_since == pytest.approx(7.0)
            both.far.write(b"x")
            silent_since = now()
            with pytest.raises(TimeoutError):
                await reads.read(2, 7.0)
            assert now() - silent_since == pytest.approx(7.0), "from the last byte on"

    simulate(scenario())


class Marks:
    """In the place of a socket: the low-water marks that were set."""

    def __init__(self) -> None:
        self.set: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert option == socket.SO_RCVLOWAT
        self.set.append(value)


def test_silence_where_few_bytes_wake_nobody_is_looked_into_before_it_ends_a_read() -> None:
    """Regression: of a stream that gave less than the low-water mark in that time it was said that no byte came."""

    async def scenario() -> None:
        async with pair() as both:
            reads, marks = both.take_over(), Marks()
            reads._is_tls = True  # as over TCP
            reads._transport._extra["socket"] = marks  # type: ignore[attr-defined]
            began = now()
            with pytest.raises(TimeoutError):
                await reads.fill(memoryview(bytearray(5 * LOW_WATER)), 7.0)
            assert now() - began == pytest.approx(14.0)
            assert marks.set == [LOW_WATER, 1]

    simulate(scenario())


def test_who_stops_waiting_loses_nothing_that_comes_later() -> None:
    async def scenario() -> None:
        async with pair() as both:
            reads = both.take_over()
            for wait in (reads.read(10, 5.0), reads.fill(memoryview(bytearray(10)), None)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(wait, 1.0)
            both.far.write(b"later")
            assert await reads.read(5, 1.0) == b"later"

    simulate(scenario())


def test_writing_waits_for_room_as_before() -> None:
    async def scenario() -> None:
        async with pair() as both:
            both.take_over()
            both.writer.write(bytes(10_000_000))
            draining = asyncio.create_task(both.writer.drain())
            await settle()
            assert not draining.done()
            await both.far_reader.readexactly(10_000_000)
            await draining

    simulate(scenario())
