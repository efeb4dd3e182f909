"""Measurements of the rate of a link with one peer, made while no round is under way.

    asker     prelude ──►   ◄── verdict    frame … ──► ◄── answer …  last frame ──►    ◄── frame …  answer … ──►

First the asker sends more and more, then the other side does, until one transfer takes long enough to measure a rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, PeerRefusedError

RATING = "rating"
FIRST, MOST = 1 << 16, 1 << 23  # bytes of a measurement's first transfer, and of its last one at most
LONG_ENOUGH = 0.3  # seconds that a transfer must take to count; a shorter one mostly measures the round trip
PIECE = bytes(1 << 16)
LIMIT = 30.0  # seconds that a measurement may take, since this peer can make no other one meanwhile
PAUSE = 30.0  # seconds after a bandwidth measurement, in which we refuse another one to the peer that asked for it


async def ask_rating(channel: Channel) -> tuple[float, float]:
    """Measure the link with the channel's peer. Return the upload and the download rate in bytes a second."""
    await channel.send_prelude(b"", 0)
    await channel.read_verdict()
    upload = await _send(channel)
    download = await _receive(channel)
    channel.is_finished = True
    return upload, download


class Rater:
    """Measurements of our link with one other peer at a time, no matter which side asks. Two measurements at once would
    share the link, and find too low rates."""

    def __init__(self, is_free: asyncio.Event) -> None:
        """Create a rater, which refuses measurements while `is_free` is not set: other data is then more important."""
        self._is_free = is_free
        self._measuring = asyncio.Lock()
        self._ended_at: dict[str, float] = {}  # time at which the last measurement for each peer ended, by peer id

    @property
    def is_idle(self) -> bool:
        """True if a measurement may begin: `is_free` is set, and no measurement is under way."""
        return self._is_free.is_set() and not self._measuring.locked()

    async def ask(self, channel: Channel) -> tuple[float, float]:
        """Measure the link with the channel's peer. Return the upload and the download rate in bytes a second.

        Raises: TimeoutError; PeerRefusedError if this peer is busy; the channel's errors.
        """
        if not self.is_idle:
            raise PeerRefusedError(channel.peer, "this peer is busy now; measure again later")
        async with self._measuring, asyncio.timeout(LIMIT):
            return await ask_rating(channel)

    async def answer(self, channel: Channel) -> None:
        """Make or refuse the measurement that a peer asks for. Raises: TimeoutError, and the channel's errors."""
        await channel.read_prelude()
        now = time.monotonic()
        self._ended_at = {other: at for other, at in self._ended_at.items() if now - at < PAUSE}
        # Refuse a peer that was just measured: asking again and again, it would keep others from being measured.
        if not self.is_idle or channel.peer in self._ended_at:
            await channel.refuse("busy now")
            return
        try:
            async with self._measuring, asyncio.timeout(LIMIT):
                await channel.accept()
                await _receive(channel)
                await _send(channel)
        finally:
            self._ended_at[channel.peer] = time.monotonic()


async def _send(channel: Channel) -> float:
    """Send transfers, each twice as large as the one before, until one takes LONG_ENOUGH seconds. Return its rate in
    bytes a second.

    At least two transfers are made, since the other end cannot measure a rate on one piece. Short ones do not count,
    since answers to a few pieces may come all at once.
    """
    count = FIRST // len(PIECE)
    while True:
        began = time.monotonic()
        _, passed_at = await asyncio.gather(_send_pieces(channel, count), _read_answers(channel, count))
        seconds = time.monotonic() - began
        size = count * len(PIECE)
        if (seconds >= LONG_ENOUGH and size > FIRST) or size >= MOST:
            await channel.send_last_frame()
            return _rate(passed_at) or size / max(seconds, 1e-6)
        count *= 2


async def _send_pieces(channel: Channel, count: int) -> None:
    for _ in range(count):
        await channel.send_frame(b"", PIECE)
        metrics.MEASURING_BYTES.labels("sent").inc(len(PIECE))


async def _read_answers(channel: Channel, count: int) -> list[float]:
    """Return the monotonic clock's time, in seconds, at each of the peer's `count` confirmations of pieces."""
    passed_at = []
    for _ in range(count):
        await channel.read_answer()
        passed_at.append(time.monotonic())
    return passed_at


async def _receive(channel: Channel) -> float:
    """Read and confirm the peer's pieces. Return the rate at which the pieces arrived, in bytes a second."""
    passed_at = list[float]()
    data = bytearray(len(PIECE))
    while frame := await channel.read_frame_header():
        if frame[1] != len(PIECE) or len(passed_at) * len(PIECE) > 2 * MOST:
            raise RemoteProtocolError(channel.peer, f"its pieces are too many, or not of {len(PIECE)} bytes")
        await channel.read_data(data)
        metrics.MEASURING_BYTES.labels("received").inc(len(PIECE))
        await channel.answer_frame(is_taken=True)
        passed_at.append(time.monotonic())
    return _rate(passed_at)


def _rate(passed_at: Sequence[float]) -> float:
    """Return the rate in bytes a second over the second half of a transfer, given the time at which each piece passed;
    0 for fewer than three pieces."""
    half = passed_at[len(passed_at) // 2 :]
    return (len(half) - 1) * len(PIECE) / max(half[-1] - half[0], 1e-6) if half else 0.0
