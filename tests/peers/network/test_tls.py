"""TLS on a socket, read into memory of the caller's."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from contextlib import suppress

import pytest

from peers.network.connection import CIPHERTEXT, HIGH_WATER, TlsTransport, start_tls
from tests.peers.network.pairs import credentials_of, open_files, socket_pair
from tests.peers.network.test_throttle import simulate

ME, OTHER = (credentials_of(name) for name in ("me", "other"))
SOME = random.Random(7).randbytes(3 * CIPHERTEXT + 12_345)


class Reader(asyncio.BufferedProtocol):
    """Reads in pieces of `piece` bytes, `wanted` at most before it pauses."""

    def __init__(self, transport: TlsTransport, piece: int = 1 << 16, wanted: int = 1 << 40) -> None:
        self.transport = transport
        self.came = bytearray()
        self.wanted = wanted
        self.is_paused = self.has_ended = False
        self.pauses = 0
        self.error: Exception | None = None
        self.is_over = asyncio.Event()
        self.has_enough = asyncio.Event()
        self._memory = memoryview(bytearray(piece))
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.came += self._memory[:nbytes]
        if len(self.came) >= self.wanted:
            self.transport.pause_reading()
            self.has_enough.set()

    def eof_received(self) -> None:
        self.has_ended = True

    def pause_writing(self) -> None:
        self.is_paused = True
        self.pauses += 1

    def resume_writing(self) -> None:
        self.is_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.is_over.set()
        self.has_enough.set()


async def both_ends(near: socket.socket, far: socket.socket) -> tuple[TlsTransport, TlsTransport]:
    certificate = ME.certificate
    return await asyncio.gather(start_tls(near, ME.dialling, False), start_tls(far, OTHER.accepting(certificate), True))


async def send(writer: Reader, data: bytes) -> None:
    """Write it piece by piece, when there is room."""
    for start in range(0, len(data), 1 << 17):
        while writer.is_paused:
            await asyncio.sleep(0)
        writer.transport.write(data[start : start + (1 << 17)])


@pytest.mark.parametrize("piece", [1, 1000, 1 << 14, 1 << 20])
def test_what_is_written_arrives_both_ways_at_once(piece: int) -> None:
    data = SOME[: 20_000 if piece == 1 else len(SOME)]

    async def scenario() -> None:
        left, right = (Reader(end, piece, len(data)) for end in await both_ends(*socket_pair()))
        left.transport.resume_reading()
        right.transport.resume_reading()
        await asyncio.gather(send(left, data), send(right, data))
        await left.has_enough.wait()
        await right.has_enough.wait()
        assert bytes(left.came) == bytes(right.came) == data
        for end in (left, right):
            end.transport.abort()
            await end.is_over.wait()

    before = open_files()
    simulate(scenario())
    assert open_files() == before


def test_nothing_is_read_before_somebody_wants_it_nor_while_it_pauses() -> None:
    async def scenario() -> None:
        near, far = await both_ends(*socket_pair())
        writer, reader = Reader(near), Reader(far, piece=1000, wanted=1000)
        await send(writer, SOME[:50_000])
        await asyncio.sleep(1)
        assert not reader.came
        for count in range(1000, 6000, 1000):
            reader.wanted = count
            reader.has_enough.clear()
            reader.transport.resume_reading()
            await reader.has_enough.wait()
            await asyncio.sleep(1)
            assert len(reader.came) == count
        assert reader.came == SOME[:5000]
        near.abort()
        far.abort()
        await reader.is_over.wait()

    simulate(scenario())


def test_a_writer_pauses_while_too_much_waits_for_the_kernel() -> None:
    async def scenario() -> None:
        near, far = await both_ends(*socket_pair())
        writer, reader = Reader(near), Reader(far, wanted=len(SOME))
        near.write(SOME)
        assert writer.is_paused
        assert near.get_write_buffer_size() > HIGH_WATER
        far.resume_reading()
        await reader.has_enough.wait()
        assert not writer.is_paused
        assert writer.pauses == 1
        assert near.get_write_buffer_size() == 0
        near.abort()
        far.abort()
        await reader.is_over.wait()

    simulate(scenario())


def test_a_connection_that_is_ended_sends_nothing_more() -> None:
    async def scenario() -> None:
        near, far = await both_ends(*socket_pair())
        writer, reader = Reader(near), Reader(far)
        near.write(SOME)
        near.abort()
        near.write(b"too late")
        far.resume_reading()
        await reader.is_over.wait()
        await writer.is_over.wait()
        assert reader.has_ended
        assert reader.error is None
        assert reader.came != SOME
        assert SOME.startswith(reader.came)
        assert near.get_extra_info("socket").fileno() == -1

    simulate(scenario())


def test_bytes_that_are_no_tls_end_the_connection() -> None:
    async def scenario() -> None:
        near, far = socket_pair()
        ends = await both_ends(near, far)
        reader = Reader(ends[1])
        ends[1].resume_reading()
        ends[0].write(b"fine")
        await asyncio.sleep(1)
        near.send(b"not a record of TLS")
        await reader.is_over.wait()
        assert reader.came == b"fine"
        assert isinstance(reader.error, ssl.SSLError)
        ends[0].abort()

    simulate(scenario())


def test_a_connection_that_breaks_says_so_once() -> None:
    async def scenario() -> None:
        near, far = await both_ends(*socket_pair())
        writer = Reader(near)
        near.resume_reading()
        far.abort()
        await writer.is_over.wait()
        assert writer.has_ended
        near.write(SOME)
        near.abort()
        near.close()
        near.resume_reading()
        assert near.is_closing()

    simulate(scenario())


def test_who_hangs_up_during_the_handshake_is_an_error() -> None:
    async def scenario() -> None:
        near, far = socket_pair()
        far.close()
        with pytest.raises(OSError, match=r"TLS handshake|Broken pipe|reset"):
            await start_tls(near, ME.dialling, False)
        near.close()

    simulate(scenario())


def test_both_ends_learn_why_there_was_no_handshake() -> None:
    """It is not this certificate that the other side accepts."""

    async def scenario() -> None:
        near, far = socket_pair()
        accepting = OTHER.accepting(OTHER.certificate)
        dialled, accepted = await asyncio.gather(
            start_tls(near, ME.dialling, False), start_tls(far, accepting, True), return_exceptions=True
        )
        assert isinstance(accepted, ssl.SSLError)
        assert isinstance(dialled, TlsTransport)  # its part was over before anybody could object
        reader = Reader(dialled)
        dialled.resume_reading()
        await reader.is_over.wait()
        assert "alert" in str(reader.error)
        with suppress(OSError):
            far.close()

    simulate(scenario())
