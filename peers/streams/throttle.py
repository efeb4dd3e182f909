"""How much a link carries: at most (a volunteer's caps), and as measured."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

PIECE = 1 << 18  # bytes that are let through at once
PIECE_SECONDS = 0.1  # that one piece takes at most, where a rate is given
READING_PIECE = 1 << 20  # bytes that are read at once where nothing limits it
BURST = 0.05  # seconds' worth that may be saved up
WINDOW = 0.5  # seconds over which a rate is taken
PASSAGES = 16  # chunks over which a rate is taken at least
ROUNDS = 5  # rounds whose best rate counts: links get slower, too


@dataclass(frozen=True)
class Caps:
    """What bulk data may use of the volunteer's link, in bytes a second each; None: all of it."""

    upload: float | None = None
    download: float | None = None

    @classmethod
    def of_megabits(cls, upload: float | None, download: float | None) -> Caps:
        """From what people know of their link: megabits a second."""
        up, down = (None if limit is None else limit * 1e6 / 8 for limit in (upload, download))
        return cls(up, down)

    def of_both(self, upload: float, download: float) -> float:
        """Return what a link carries each way that was seen to carry so much.

        What is confirmed comes in bursts, so that for a moment it may be more than the caps let through.
        """
        limits = [limit for limit in (self.upload, self.download) if limit is not None]
        return min(upload, download, *limits)


class Throttle:
    """Lets bytes through at no more than a rate. Waiting callers are served in turn."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._free_at = 0.0
        self.passed = 0
        """Bytes that were let through until now."""
        self.piece = PIECE if rate is None else max(1024, min(PIECE, int(rate * PIECE_SECONDS)))
        """Bytes to let through at once: so few that no slow link looks dead, though many streams share it."""
        self.reading_piece = READING_PIECE if rate is None else self.piece
        """Bytes to read at once, of what is there."""

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        self.passed += count
        if self._rate is None:
            return
        now = self._clock()
        start = max(self._free_at, now - BURST)
        self._free_at = start + count / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


UNLIMITED = Throttle(None)
PATIENCE = 5.0  # seconds for which one piece gives way: its reader must not take us for dead
MEMORY = 20.0  # seconds over which the share of the time is taken in which rounds are under way
CROWDED = 0.5  # of the time: with more, what gives way would hardly come to anything
SHARE = 0.2  # of the link, for all that gives way on a crowded one


class LinkTime(asyncio.Event):
    """Whether a link is free of rounds, and how much of it is for what gives way to them.

    That waits for a round to end, as long as rounds take less than half of the time. With several fragments, or a slow
    link, they may take all of it; then it gets a share, so that those who join do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.rate = 0.0
        """Bytes a second that the link carries in rounds; 0: not known."""
        self._clock = clock
        self._busy = 0.0
        self._seen = clock()
        self._next = self._seen
        super().set()

    def set(self) -> None:
        """There is no round."""
        self._look()
        super().set()

    def clear(self) -> None:
        """A round is under way."""
        self._look()
        super().clear()

    def patience(self, count: int) -> float:
        """Return for how many seconds so many bytes are to give way, at most."""
        self._look()
        if self._busy < CROWDED or not self.rate:
            return PATIENCE
        self._next = min(max(self._seen, self._next) + count / (SHARE * self.rate), self._seen + PATIENCE)
        return self._next - self._seen

    def _look(self) -> None:
        """Take in the time since the last look, in which nothing has changed."""
        now = self._clock()
        present = 0.0 if self.is_set() else 1.0
        self._busy = present + (self._busy - present) * math.exp((self._seen - now) / MEMORY)
        self._seen = now


class GivingWay(Throttle):
    """Lets bytes through when nothing more important is under way, or after waiting long for that."""

    def __init__(self, throttle: Throttle, link: LinkTime) -> None:
        self.piece, self.reading_piece = throttle.piece, throttle.reading_piece
        self._throttle = throttle
        self._link = link

    async def take(self, count: int) -> None:
        with suppress(TimeoutError):
            if not self._link.is_set():
                async with asyncio.timeout(self._link.patience(count)):
                    await self._link.wait()
        await self._throttle.take(count)


class RateMeter:
    """The best rate that a link was seen to carry in any half second of the last rounds.

    What passes is counted when all of a chunk is there. On a slow link that is seldom, so a rate is taken over several
    of them at least, however long that takes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._best: deque[float] = deque(maxlen=ROUNDS)
        self._passed: deque[tuple[float, int]] = deque()
        self._in_window = 0

    def begin_round(self) -> None:
        self._best.append(0.0)
        self._passed.clear()
        self._passed.append((self._clock(), 0))
        self._in_window = 0

    def passed(self, count: int) -> None:
        """Count so many bytes that have arrived, here or there."""
        if not self._best:
            return
        now = self._clock()
        self._passed.append((now, count))
        self._in_window += count
        while len(self._passed) > PASSAGES and self._passed[1][0] <= now - WINDOW:
            self._in_window -= self._passed.popleft()[1]
        began, first = self._passed[0]  # when the window begins, the first chunk has come: it does not count
        self._best[-1] = max(self._best[-1], (self._in_window - first) / max(now - began, WINDOW))

    def knows(self, rate: float) -> None:
        """Take a rate that was measured otherwise for that of a round."""
        self._best.append(rate)

    @property
    def rate(self) -> float:
        """Bytes a second; 0: nothing measured."""
        return max(self._best, default=0.0)
