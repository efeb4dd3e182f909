"""The rate of a link: its caps, the share for less urgent data, its measurement, and the connections that reach it."""

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

PIECE = 1 << 18  # bytes that pass at once
PIECE_SECONDS = 0.1  # that one piece takes, at most, at a limited rate
READING_PIECE = 1 << 20  # bytes that are read at once without a limit
BURST = 0.05  # seconds of unused rate that may be saved up
WINDOW = 0.5  # seconds over which a rate is measured, at least
IDLE = 1.0  # seconds without a chunk from which on they do not count, since the link had nothing to carry
WINDOWS = 128  # of a round, at most; in a long round each is longer
PART, LONGEST_PART = 0.25, 2.0  # the part of a longer round that is measured: as a fraction, and at most in seconds
KNOWN_FOR = 3600.0  # seconds for which a rate counts that was measured without a round
ROUNDS = 5  # rounds whose best rate counts; older ones do not, since links may get slower

FEWEST, MOST = 4, 64  # connections to a member: at long distance each lost packet halves the rate of a single one
IN_ALL = 8  # connections to all members, at least: with one member, no others make up for losses on few connections
FEWEST_WITH_BBR, MOST_WITH_BBR = 2, 8  # with many on a slow link, each sends more than its share, and most gets lost
SETTLING = 1.0  # seconds in which connections find their pace; bytes that pass then do not count
GAIN = 1.2  # factor by which twice as many connections must raise the rate to be worth it
LONGEST_WINDOW = 3.0  # seconds over which a rate is measured, at most
ENOUGH = 2  # chunks of each connection that a measurement needs
LASTS = 20  # rounds for which a number of connections is kept before more are tried again


@dataclass(frozen=True)
class Caps:
    """Limits on the bulk data over the volunteer's link, in bytes a second each; None: no limit."""

    upload: float | None = None
    download: float | None = None

    @classmethod
    def of_megabits(cls, upload: float | None, download: float | None) -> Caps:
        """Return the caps for limits in megabits a second, as people know them of their link."""
        return cls(*(None if limit is None else limit * 1e6 / 8 for limit in (upload, download)))

    def of_upload(self, rate: float) -> float:
        """Return the usable upload rate of a link with this measured one."""
        return rate if self.upload is None else min(rate, self.upload)

    def of_both(self, upload: float, download: float) -> float:
        """Return the usable rate in both directions at once, for a link with these measured ones.

        A measured rate may briefly exceed the caps, since confirmations come in bursts.
        """
        limits = [limit for limit in (self.upload, self.download) if limit is not None]
        return min(upload, download, *limits)


class Throttle:
    """A limit on the bytes that pass in a second. Waiting callers are served in turn."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self.passed = 0  # bytes that have passed so far
        self.piece = PIECE if rate is None else max(1024, min(PIECE, int(rate * PIECE_SECONDS)))
        """Bytes to pass at once: few enough that a slow link shared by many streams does not look dead."""
        self.reading_piece = READING_PIECE if rate is None else self.piece  # bytes to read at once, if available

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
PATIENCE = 5.0  # seconds that one piece waits, at most, so that its reader does not take us for dead
MEMORY = 20.0  # seconds over which the fraction of the time in rounds is averaged
CROWDED = 0.5  # fraction of the time in rounds above which less urgent data gets a share of its own
SHARE = 0.2  # fraction of the link that all less urgent data gets then


class LinkTime(asyncio.Event):
    """The time of a link without a round, and the share of the link for data that gives way to rounds.

    Such data waits for a round to end, as long as rounds take less than half of the time. With several fragments, or on
    a slow link, rounds may take all of it. Then such data gets a share, so that joining peers do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.rate = 0.0  # bytes a second that the link carries in rounds; 0: not known
        self._clock = clock
        self._busy = 0.0
        self._seen = self._next = clock()
        super().set()

    def set(self) -> None:
        """Take in that no round is under way."""
        self._look()
        super().set()

    def clear(self) -> None:
        """Take in that a round is under way."""
        self._look()
        super().clear()

    async def give_way(self, count: int) -> None:
        """Wait until no round is under way, or long enough for so many bytes."""
        with suppress(TimeoutError):
            if not self.is_set():
                async with asyncio.timeout(self.patience(count)):
                    await self.wait()

    def patience(self, count: int) -> float:
        """Return the seconds that so many bytes must wait, at most."""
        self._look()
        if self._busy < CROWDED or not self.rate:
            return PATIENCE
        self._next = min(max(self._seen, self._next) + count / (SHARE * self.rate), self._seen + PATIENCE)
        return self._next - self._seen

    def _look(self) -> None:
        """Account for the time since the last call, in which nothing has changed."""
        now = self._clock()
        present = 0.0 if self.is_set() else 1.0
        self._busy = present + (self._busy - present) * math.exp((self._seen - now) / MEMORY)
        self._seen = now


class RateMeter:
    """The rate that a link carries, measured in the best part of one of the last rounds. The part has some seconds,
    since in the rest of a round the link may wait for a slower one.

    A chunk is counted when it is complete, over the time that it took, since chunks of many streams share the link and
    end together. A very short best part would show how late this process has read, and not the link. Time in which a
    round waits for late members does not count: otherwise links would seem slow, and the next round would wait longer.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        """The default clock includes sleep of the machine, which may have another link when it wakes."""
        self._clock = clock
        self._best: deque[float] = deque(maxlen=ROUNDS - 1)  # of the rounds before
        self._known, self._known_at = 0.0, 0.0
        self._began: float | None = None
        self._first = math.inf  # when the round's first chunk was begun
        self._last = 0.0  # when the last chunk was complete
        self._window = WINDOW
        self._windows = list[float]()  # bytes in each window since the round began

    def begin_round(self) -> None:
        if self._began is not None:
            self._best.append(self._present)
        self._began = self._last = self._clock()
        self._window, self._first = WINDOW, math.inf
        self._windows.clear()

    def passed(self, count: int, seconds: float = 0.0) -> None:
        """Count so many bytes that have arrived, at either end, in the last `seconds`."""
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
        """Take in a rate that was measured while no round was under way."""
        self._known, self._known_at = rate, self._clock()

    @property
    def known_for(self) -> float:
        """The seconds since such a measurement; infinity without one."""
        return self._clock() - self._known_at if self._known else math.inf

    @property
    def rate(self) -> float:
        """The rate in bytes a second; 0: nothing measured.

        A measurement without a round counts for more than the best of the last rounds, which may be luck. But a link
        carries no less than in most rounds.
        """
        rounds = sorted([*self._best, self._present])
        return max(self._known, rounds[len(rounds) // 2]) if self.known_for < KNOWN_FOR else rounds[-1]

    @property
    def last(self) -> float:
        """The rate of the last round, or of a measurement since then, in bytes a second; 0: nothing measured. A few
        bytes count over the time that they took, not over a window."""
        if self._known_at > (self._began or 0.0):
            return self._known
        if not any(self._windows):
            return self._best[-1] if self._best else 0.0
        busy = self._last - self._first
        return sum(self._windows) / busy if 0 < busy < self._window else self._present

    @property
    def _present(self) -> float:
        """The rate of the present round in bytes a second: the highest mean over a part of its time."""
        length = max(1, int(min(PART * len(self._windows), LONGEST_PART / self._window)))
        until = [0.0, *accumulate(self._windows)]
        best = max((after - before for before, after in zip(until, until[length:], strict=False)), default=0.0)
        return best / (length * self._window)


class Lanes:
    """The number of connections that a round uses to each member (`count`): more only while they raise the rate.

    If packets get lost, most machines' TCP (CUBIC) leaves a long-distance link nearly empty, and many connections carry
    many times as much. So the number is doubled as long as that helps, and the result is used for the next rounds. BBR
    does not take loss for a full link, so a few connections are enough with it.
    """

    def __init__(self, fewest: int = FEWEST, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._most = fewest, most
        self._clock = clock
        self.count = self._fewest = fewest
        self._rate = 0.0  # bytes a second with half as many connections; 0: not measured
        self._is_settled = False
        self._rounds = 0
        self._settled_at: float | None = None
        self._began: float | None = None
        self._bytes = self._chunks = 0

    def begin_round(self, others: int) -> None:
        """Begin a round with so many other members, with as many connections to each as before."""
        self._fewest = max(self._least, IN_ALL // max(others, 1))
        self.count = max(self.count, self._fewest)
        self._rounds += 1
        if self._rounds % LASTS == 0:
            self._is_settled, self._rate = False, 0.0
        self._began = self._settled_at = None

    def passed(self, count: int, has_more: bool) -> bool:
        """Count a chunk of so many bytes that has arrived. Return whether to use more connections from now on.

        `has_more`: further chunks wait to be sent. If none does, more connections would not help.
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
