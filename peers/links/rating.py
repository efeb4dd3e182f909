"""How much a link carries, measured before any round depends on it.

    asker     prelude ──►   ◄── verdict    frame … ──► ◄── answer …  last frame ──►    ◄── frame …  answer … ──►

First the asker sends more and more, then the other side does, until one transfer takes long enough to tell a rate from.
"""

from __future__ import annotations

import asyncio
import time

from peers.errors import RemoteProtocolError
from peers.streams.channel import Channel

RATING = "rating"
FIRST, MOST = 1 << 16, 1 << 23  # bytes of one transfer
LONG_ENOUGH = 0.3  # seconds: less is mostly the way there and back
PIECE = bytes(1 << 16)
AT_ONCE = 2  # that are answered; others ask somebody else


async def ask_rating(channel: Channel) -> tuple[float, float]:
    """Return what the link to a peer carries, there and back, in bytes a second."""
    await channel.send_prelude(b"", 0)
    await channel.read_verdict()
    upload = await _send(channel)
    download = await _receive(channel)
    channel.is_finished = True
    return upload, download


class Rater:
    """The other end. It refuses while more important data is under way."""

    def __init__(self, is_free: asyncio.Event) -> None:
        self._is_free = is_free
        self._asking = 0

    async def answer(self, channel: Channel) -> None:
        await channel.read_prelude()
        if self._asking >= AT_ONCE or not self._is_free.is_set():
            await channel.refuse("busy now")
            return
        self._asking += 1
        try:
            await channel.accept()
            await _receive(channel)
            await _send(channel)
        finally:
            self._asking -= 1


async def _send(channel: Channel) -> float:
    """Send twice as much each time; returns the rate of the last."""
    size, rate = FIRST, 0.0
    while True:
        began = time.monotonic()
        for _ in range(0, size, len(PIECE)):
            await channel.send_frame(b"", PIECE)
        for _ in range(0, size, len(PIECE)):
            await channel.read_answer()
        seconds = time.monotonic() - began
        rate = max(rate, size / max(seconds, 1e-6))
        if seconds >= LONG_ENOUGH or size >= MOST:
            await channel.send_last_frame()
            return rate
        size *= 2


async def _receive(channel: Channel) -> float:
    """Confirm what comes; returns the rate at which it came, over the second half of it."""
    came, passed = 0, list[tuple[float, int]]()
    data = bytearray(len(PIECE))
    while frame := await channel.read_frame_header():
        if frame[1] != len(PIECE) or came > 2 * MOST:
            raise RemoteProtocolError(channel.peer, "it measures with something else than agreed")
        await channel.read_frame_data(data)
        await channel.answer_frame(is_taken=True)
        came += len(data)
        passed.append((time.monotonic(), came))
    half = next((place for place, (_, count) in enumerate(passed) if count > came / 2), 0)
    if len(passed) - half < 2:
        return 0.0
    (began, before), (ended, after) = passed[half], passed[-1]
    return (after - before) / max(ended - began, 1e-6)
