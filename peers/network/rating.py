"""Measurements of what a link carries, while no round is under way.

    asker     prelude ──►   ◄── verdict    frame … ──► ◄── answer …  last frame ──►    ◄── frame …  answer … ──►

First the asker sends more and more, then the other side does, until one transfer takes long enough to tell a rate from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, PeerRefusedError

RATING = "rating"
FIRST, MOST = 1 << 16, 1 << 23  # bytes of one transfer
LONG_ENOUGH = 0.3  # seconds: less is mostly the way there and back
PIECE = bytes(1 << 16)
LIMIT = 30.0  # seconds that a measurement may take: meanwhile nobody else can measure with us, nor we with anybody
PAUSE = 30.0  # seconds after it, in which the same peer can have no other one


async def ask_rating(channel: Channel) -> tuple[float, float]:
    """Return what the link to a peer carries, there and back, in bytes a second."""
    await channel.send_prelude(b"", 0)
    await channel.read_verdict()
    upload = await _send(channel)
    download = await _receive(channel)
    channel.is_finished = True
    return upload, download


class Rater:
    """Measures our link with one other peer at a time, whichever of the two asks: two measurements would share it."""

    def __init__(self, is_free: asyncio.Event) -> None:
        """It refuses unless `is_free`: more important data is under way."""
        self._is_free = is_free
        self._measuring = asyncio.Lock()
        self._ended_at: dict[str, float] = {}  # by peer, of measurements that others have asked for lately

    @property
    def is_idle(self) -> bool:
        """Whether nothing else is on the link, as far as we know."""
        return self._is_free.is_set() and not self._measuring.locked()

    async def ask(self, channel: Channel) -> tuple[float, float]:
        """Return what `ask_rating` does. Raises also: TimeoutError; PeerRefusedError when we have become busy."""
        if not self.is_idle:
            raise PeerRefusedError(channel.peer, "we are busy now")
        async with self._measuring, asyncio.timeout(LIMIT):
            return await ask_rating(channel)

    async def answer(self, channel: Channel) -> None:
        """Be the other end. Raises: TimeoutError, and what breaks the stream."""
        await channel.read_prelude()
        now = time.monotonic()
        self._ended_at = {other: at for other, at in self._ended_at.items() if now - at < PAUSE}
        if not self.is_idle or channel.peer in self._ended_at:  # a peer that came again would keep all others out
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
    """Send twice as much each time, and twice at least: from one piece the other end can tell no rate.

    Returns the rate of the last, which takes long enough: answers to a few pieces may come all at once.
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
    """Return when each answer came. Where little waits for the link, most have come before all is sent."""
    passed_at = []
    for _ in range(count):
        await channel.read_answer()
        passed_at.append(time.monotonic())
    return passed_at


async def _receive(channel: Channel) -> float:
    """Confirm what comes; returns the rate at which it came."""
    passed_at = list[float]()
    data = bytearray(len(PIECE))
    while frame := await channel.read_frame_header():
        if frame[1] != len(PIECE) or len(passed_at) * len(PIECE) > 2 * MOST:
            raise RemoteProtocolError(channel.peer, "it measures with something else than agreed")
        await channel.read_data(data)
        metrics.MEASURING_BYTES.labels("received").inc(len(PIECE))
        await channel.answer_frame(is_taken=True)
        passed_at.append(time.monotonic())
    return _rate(passed_at)


def _rate(passed_at: Sequence[float]) -> float:
    """Return the bytes a second of the second half of these pieces; 0: too few to tell."""
    half = passed_at[len(passed_at) // 2 :]
    return (len(half) - 1) * len(PIECE) / max(half[-1] - half[0], 1e-6) if half else 0.0
