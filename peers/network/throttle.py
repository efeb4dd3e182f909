"""The rate of a link: its caps, the shares that give way, the rate measured, and the connections that reach it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from peers.values.system import now

PIECE = 1 << 18  # bytes that are let through at once
PIECE_SECONDS = 0.1  # that one piece takes at most, where a rate is given
READING_PIECE = 1 << 20  # bytes that are read at once where nothing limits it
BURST = 0.05  # seconds' worth that may be saved up
WINDOW = 0.5  # seconds over which a rate is taken, at least
IDLE = 1.0  # seconds without a chunk that do not count: the link had nothing to carry
WINDOWS = 128  # of a round at most: a long one has longer ones
PART, LONGEST_PART = 0.25, 2.0  # of a round, over which it is taken in a longer one; and seconds of that at most
KNOWN_FOR = 3600.0  # seconds for which a rate counts that was measured while there was no round
ROUNDS = 5  # rounds whose best rate counts: links get slower, too

FEWEST, MOST = 4, 64  # connections of a link: on a long one each lost packet halves the rate of a single one
IN_ALL = 8  # at least: with one other member alone, what few connections lose is not made up for by others'
FEWEST_WITH_BBR, MOST_WITH_BBR = 2, 8  # of many that share a slow link each sends more than its share, and most is lost
SETTLING = 1.0  # seconds in which connections find their pace: what passes then says nothing
GAIN = 1.2  # times the rate, for twice as many connections: else they are not worth it
LONGEST_WINDOW = 3.0  # seconds
ENOUGH = 2  # chunks of each connection that a rate is taken from
LASTS = 20  # rounds for which a number is kept before more are tried again


@dataclass(frozen=True)
class Caps:
    """Limits on what bulk data uses of the volunteer's link, in bytes a second each; None: all of it."""

    upload: float | None = None
    download: float | None = None

    @classmethod
    def of_megabits(cls, upload: float | None, download: float | None) -> Caps:
        """From what people know of their link: megabits a second."""
        return cls(*(None if limit is None else limit * 1e6 / 8 for limit in (upload, download)))

    def of_upload(self, rate: float) -> float:
        """Return what an uplink carries away that was seen to carry so much."""
        return rate if self.upload is None else min(rate, self.upload)

    def of_both(self, upload: float, download: float) -> float:
        """Return what a link carries each way that was seen to carry so much.

        What is confirmed comes in bursts, so that for a moment it may be more than the caps let through.
        """
        limits = [limit for limit in (self.upload, self.download) if limit is not None]
        return min(upload, download, *limits)


class Throttle:
    """A limit on the bytes that pass in a second. Waiting callers are served in turn."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self.passed = 0  # bytes that were let through until now
        self.piece = PIECE if rate is None else max(1024, min(PIECE, int(rate * PIECE_SECONDS)))
        """Bytes to let through at once: so few that no slow link looks dead, though many streams share it."""
        self.reading_piece = READING_PIECE if rate is None else self.piece  # bytes to read at once, of what is there

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        self.passed += count
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
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
    """The time of a link in which no round is under way, and the share of it for what gives way to rounds.

    That waits for a round to end, as long as rounds take less than half of the time. With several fragments, or a slow
    link, they may take all of it; then it gets a share, so that those who join do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.rate = 0.0  # bytes a second that the link carries in rounds; 0: not known
        self._clock = clock
        self._busy = 0.0
        self._seen = self._next = clock()
        super().set()

    def set(self) -> None:
        """There is no round."""
        self._look()
        super().set()

    def clear(self) -> None:
        """A round is under way."""
        self._look()
        super().clear()

    async def give_way(self, count: int) -> None:
        """Wait until there is no round, or for long enough for so many bytes."""
        with suppress(TimeoutError):
            if not self.is_set():
                async with asyncio.timeout(self.patience(count)):
                    await self.wait()

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


class RateMeter:
    """The rate that a link was seen to carry in the best part of one of the last rounds: some seconds, since for the
    rest of a round it may wait for a slower one.

    A chunk is counted when all of it is there, over the time that it took: chunks of many streams, which share the
    link, end together. The best moment of a long round shows how late this process has read, and not the link. Where
    a round waits, for members that are late, its time does not count: else it would seem to have slow links, and the
    next one would wait for longer.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        """By default the time counts in which the machine slept: it may have another link when it wakes."""
        self._clock = clock
        self._best: deque[float] = deque(maxlen=ROUNDS - 1)  # of the rounds before
        self._known, self._known_at = 0.0, 0.0
        self._began: float | None = None
        self._first = math.inf  # when the first chunk of the round was begun
        self._last = 0.0  # when a chunk was there last
        self._window = WINDOW
        self._windows = list[float]()  # the bytes of each since the round began

    def begin_round(self) -> None:
        if self._began is not None:
            self._best.append(self._present)
        self._began = self._last = self._clock()
        self._window, self._first = WINDOW, math.inf
        self._windows.clear()

    def passed(self, count: int, seconds: float = 0.0) -> None:
        """Count so many bytes that have arrived, here or there, in the last `seconds`."""
        if self._began is None:
            return
        self._first = min(self._first, self._clock() - seconds)
        idle = self._clock() - seconds - self._last
        if idle > IDLE:
            self._began += idle
        self._last = self._clock()
        ended = self._clock() - self._began
        while ended >= WINDOWS * self._window:
            self._windows = [sum(self._windows[place : place + 2]) for place in range(0, len(self._windows), 2)]
            self._window *= 2
        window, began = self._window, max(ended - seconds, 0.0)
        last = int(ended / window)
        self._windows += [0.0] * (last + 1 - len(self._windows))
        for place in range(int(began / window), last + 1):
            share = 1.0
            if seconds > 0:
                share = (min(ended, (place + 1) * window) - max(began, place * window)) / seconds
            self._windows[place] += count * share

    def knows(self, rate: float) -> None:
        """Take in a rate that was measured while there was no round."""
        self._known, self._known_at = rate, self._clock()

    @property
    def known_for(self) -> float:
        """Return how many seconds ago that was; infinity if it never was."""
        return self._clock() - self._known_at if self._known else math.inf

    @property
    def rate(self) -> float:
        """Return bytes a second; 0: nothing measured.

        A measurement without a round counts for more than the best of the last rounds, which may have been a chance;
        but a link carries no less than it usually did.
        """
        rounds = sorted([*self._best, self._present])
        return max(self._known, rounds[len(rounds) // 2]) if self.known_for < KNOWN_FOR else rounds[-1]

    @property
    def last(self) -> float:
        """Return bytes a second of the last round, or of a measurement since then; 0: nothing measured. A few bytes
        count over the time that they took, not over a window."""
        if self._known_at > (self._began or 0.0):
            return self._known
        if not any(self._windows):
            return self._best[-1] if self._best else 0.0
        busy = self._last - self._first
        return sum(self._windows) / busy if 0 < busy < self._window else self._present

    @property
    def _present(self) -> float:
        """Return the rate of the present round."""
        length = max(1, int(min(PART * len(self._windows), LONGEST_PART / self._window)))
        until = [0.0, *accumulate(self._windows)]
        best = max((after - before for before, after in zip(until, until[length:], strict=False)), default=0.0)
        return best / (length * self._window)


class Lanes:
    """The number of connections that a round uses to each member (`count`): as many as carry more than fewer do.

    Where packets get lost, most machines' TCP (CUBIC) leaves a long link nearly empty, and many connections carry many
    times as much. So the number is doubled for as long as that helps, and what was found lasts for the next rounds. BBR
    takes no loss for a full link: where the kernel gives it to us, few connections do.
    """

    def __init__(self, fewest: int = FEWEST, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._most = fewest, most
        self._clock = clock
        self.count = self._fewest = fewest
        self._rate = 0.0  # with half as many
        self._is_settled = False
        self._rounds = 0
        self._settled_at: float | None = None
        self._began: float | None = None
        self._bytes = self._chunks = 0

    def begin_round(self, others: int) -> None:
        """Use as many connections as before to each of so many members."""
        self._fewest = max(self._least, IN_ALL // max(others, 1))
        self.count = max(self.count, self._fewest)
        self._rounds += 1
        if self._rounds % LASTS == 0:
            self._is_settled, self._rate = False, 0.0
        self._began = self._settled_at = None

    def passed(self, count: int, has_more: bool) -> bool:
        """A chunk of so many bytes has arrived there. Returns whether more connections are to be used from now on.

        `has_more`: others wait to be sent; else it is not the connections that are too few.
        """
        now = self._clock()
        if self._is_settled or not has_more:
            self._began = None
            return False
        if self._settled_at is None:
            self._settled_at = now + SETTLING
        if self._began is None:
            if now >= self._settled_at:
                self._began, self._bytes, self._chunks = now, 0, 0
            return False
        self._bytes += count
        self._chunks += 1
        seconds = now - self._began
        if seconds < WINDOW or (self._chunks < ENOUGH * self.count and seconds < LONGEST_WINDOW):
            return False
        rate = self._bytes / seconds
        self._began = self._settled_at = None
        if rate < GAIN * self._rate:
            self.count, self._is_settled = max(self._fewest, self.count // 2), True
        elif self.count == self._most:
            self._is_settled = True
        else:
            self._rate, self.count = rate, self.count * 2
        return not self._is_settled
