"""The rate of a peer's link: caps, the share for less urgent data, measurement, and the number of connections."""

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

PIECE = 1 << 18  # bytes that a stream sends at once, at most
PIECE_SECONDS = 0.1  # seconds that one piece takes, at most, at a limited rate
READING_PIECE = 1 << 20  # bytes that are read at once if the rate is not limited
BURST = 0.05  # after an idle time, the bytes of this many seconds may pass at once, above the rate
INTERVAL = 0.5  # minimum seconds of an interval in which a round's bytes are counted together
IDLE = 1.0  # seconds; longer times without a chunk are left out when a round's rate is measured
INTERVALS = 128  # maximum number of intervals in a round; a longer round doubles the length of all its intervals
# A RateMeter's rate in a round is the mean rate in the round's fastest part. PART is the length of that part as a
# fraction of the round; LONGEST_PART is its maximum length in seconds.
PART, LONGEST_PART = 0.25, 2.0
KNOWN_FOR = 3600.0  # seconds for which a rate that was measured outside a round is used
ROUNDS = 5  # last rounds whose best rate counts; not more, since links may get slower

FEWEST, MOST = 4, 64  # connections to a member, at least and at most: a lost packet halves the rate of a single one
IN_ALL = 8  # connections to all members together, at least: a few would not fill the link when packets get lost
FEWEST_WITH_BBR, MOST_WITH_BBR = 2, 8  # connections to a member with BBR, fewest and most: more overfill a slow link
SETTLING = 1.0  # seconds in which new connections reach their rate; bytes in that time do not count
GAIN = 1.2  # factor by which twice as many connections must raise the rate to be kept
SHORTEST_TRIAL, LONGEST_TRIAL = 0.5, 3.0  # seconds for which the rate with a number of connections is measured
TRIAL_CHUNKS = 2  # chunks per connection after which the trial of a number of connections may end before LONGEST_TRIAL
LASTS = 20  # rounds for which a number of connections is kept before more are tried again


@dataclass(frozen=True)
class Caps:
    """Limits on the bulk data over the volunteer's link, in bytes a second for each direction; None: no limit."""

    upload: float | None = None
    download: float | None = None

    @classmethod
    def of_megabits(cls, upload: float | None, download: float | None) -> Caps:
        """Return the caps for limits in megabits a second, the unit in which links are sold."""
        return cls(*(None if limit is None else limit * 1e6 / 8 for limit in (upload, download)))

    def of_upload(self, rate: float) -> float:
        """Return the usable upload rate in bytes a second: the measured `rate`, at most the upload cap."""
        return rate if self.upload is None else min(rate, self.upload)

    def of_both(self, upload: float, download: float) -> float:
        """Return the rate in bytes a second usable in both directions at once, given the two measured rates.

        A measured rate may briefly exceed the caps, since confirmations come in bursts.
        """
        limits = [limit for limit in (self.upload, self.download) if limit is not None]
        return min(upload, download, *limits)


class Throttle:
    """A limit, in bytes a second, on data that is sent or received. Waiting callers are served in turn."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self.passed = 0  # bytes that have passed since the start
        self.piece = PIECE if rate is None else max(1024, min(PIECE, int(rate * PIECE_SECONDS)))
        """Bytes to pass at once: few enough that a slow link shared by many streams does not look dead."""
        self.reading_piece = READING_PIECE if rate is None else self.piece  # bytes to read at once, at most

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass without exceeding the rate."""
        self.passed += count
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._free_at, now - BURST)
        self._free_at = start + count / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


UNLIMITED = Throttle(None)
PATIENCE = 5.0
"""Maximum seconds for which each piece of less urgent data, such as a snapshot, waits for a round to end. A receiver
that gets nothing for much longer breaks off the stream."""
MEMORY = 20.0  # seconds over which the fraction of time spent in rounds is averaged
CROWDED = 0.5
"""Fraction of time spent in rounds, from which on less urgent data is sent during rounds, too, at a limited rate. Below
it, such data waits for the round's end."""
SHARE = 0.2
"""Fraction of the link's rate for all less urgent data together, during rounds, if rounds take at least CROWDED of the
time. Otherwise such data waits for the round's end, but each piece waits for PATIENCE seconds at most."""


class LinkTime(asyncio.Event):
    """An event that is set while no round is under way. It also limits the rate of less urgent data during rounds.

    Such data waits for a round to end, as long as rounds take less than half of the time. With several fragments, or on
    a slow link, rounds may take all of it. Then such data gets a share, so that joining peers do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.rate = 0.0  # bytes a second that the link carries in rounds; 0: not known
        self._clock = clock
        self._in_rounds = 0.0
        self._updated_at = self._next = clock()
        super().set()

    def set(self) -> None:
        """Record that no round is under way any more, and wake the tasks that wait for that."""
        self._update_in_rounds()
        super().set()

    def clear(self) -> None:
        """Record that a round begins. From now on `give_way` makes the senders of less urgent data wait."""
        self._update_in_rounds()
        super().clear()

    async def give_way(self, count: int) -> None:
        """Wait until no round is under way, or until `count` bytes of less urgent data may be sent during the round."""
        with suppress(TimeoutError):
            if not self.is_set():
                async with asyncio.timeout(self.patience(count)):
                    await self.wait()

    def patience(self, count: int) -> float:
        """Return the seconds, at most, for which `count` bytes of less urgent data must wait for a round to end."""
        self._update_in_rounds()
        if self._in_rounds < CROWDED or not self.rate:
            return PATIENCE
        self._next = min(max(self._updated_at, self._next) + count / (SHARE * self.rate), self._updated_at + PATIENCE)
        return self._next - self._updated_at

    def _update_in_rounds(self) -> None:
        """Include the time since the last update in the average fraction of time spent in rounds. No round has begun or
        ended in that time."""
        now = self._clock()
        present = 0.0 if self.is_set() else 1.0
        self._in_rounds = present + (self._in_rounds - present) * math.exp((self._updated_at - now) / MEMORY)
        self._updated_at = now


class RateMeter:
    """A meter of the rate that a link carries: the highest mean rate over a part of one of the last rounds. In the rest
    of a round, the link may wait for another member's slower link.

    A chunk is counted when it is complete, over the time that it took, since chunks of many streams share the link and
    end together. A very short best part would show how late this process has read, and not the link. Time in which a
    round waits for late members does not count: otherwise links would seem slow, and the next round would wait longer.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        """Create a meter; `clock` is in seconds. The default also counts sleep, after which the link may differ."""
        self._clock = clock
        self._best: deque[float] = deque(maxlen=ROUNDS - 1)  # bytes a second in earlier rounds
        self._known, self._known_at = 0.0, 0.0
        self._began: float | None = None
        self._first = math.inf  # the time at which the round's first chunk began
        self._last = 0.0  # the time at which the last chunk was complete
        self._interval = INTERVAL
        self._intervals = list[float]()  # bytes in each `_interval` seconds since the round began

    def begin_round(self) -> None:
        if self._began is not None:
            self._best.append(self._present)
        self._began = self._last = self._clock()
        self._interval, self._first = INTERVAL, math.inf
        self._intervals.clear()

    def passed(self, count: int, seconds: float = 0.0) -> None:
        """Count `count` bytes of a chunk that has passed, in either direction, during the last `seconds`."""
        if self._began is None:
            return
        self._first = min(self._first, self._clock() - seconds)
        idle = self._clock() - seconds - self._last
        if idle > IDLE:
            self._began += idle
        self._last = self._clock()
        ended = self._clock() - self._began
        while ended >= INTERVALS * self._interval:
            self._intervals = [sum(self._intervals[place : place + 2]) for place in range(0, len(self._intervals), 2)]
            self._interval *= 2
        interval, began = self._interval, max(ended - seconds, 0.0)
        last = int(ended / interval)
        self._intervals += [0.0] * (last + 1 - len(self._intervals))
        for place in range(int(began / interval), last + 1):
            share = 1.0
            if seconds > 0:
                share = (min(ended, (place + 1) * interval) - max(began, place * interval)) / seconds
            self._intervals[place] += count * share

    def knows(self, rate: float) -> None:
        """Store a rate, in bytes a second, that was measured while no round was under way."""
        self._known, self._known_at = rate, self._clock()

    @property
    def known_for(self) -> float:
        """The seconds since the last measurement outside a round; infinity without one."""
        return self._clock() - self._known_at if self._known else math.inf

    @property
    def rate(self) -> float:
        """The link's measured rate in bytes a second; 0: nothing measured yet.

        A measurement without a round counts for more than the best of the last rounds, which may be luck. But a link
        carries no less than in most rounds.
        """
        rounds = sorted([*self._best, self._present])
        return max(self._known, rounds[len(rounds) // 2]) if self.known_for < KNOWN_FOR else rounds[-1]

    @property
    def last(self) -> float:
        """The link's rate in the last round, or in a later measurement, in bytes a second; 0: nothing measured yet. A
        round's rate is the mean of its fastest part, or of the whole round if its chunks took less than 0.5 seconds."""
        if self._known_at > (self._began or 0.0):
            return self._known
        if not any(self._intervals):
            return self._best[-1] if self._best else 0.0
        busy = self._last - self._first
        return sum(self._intervals) / busy if 0 < busy < self._interval else self._present

    @property
    def _present(self) -> float:
        """The link's rate in the latest round, in bytes a second: the highest mean rate over a part of the round."""
        length = max(1, int(min(PART * len(self._intervals), LONGEST_PART / self._interval)))
        until = [0.0, *accumulate(self._intervals)]
        best = max((after - before for before, after in zip(until, until[length:], strict=False)), default=0.0)
        return best / (length * self._interval)


class Lanes:
    """The number of connections to each member of a round (`count`), doubled as long as that raises the rate.

    If packets get lost, most machines' TCP (CUBIC) leaves a long-distance link nearly empty, and many connections carry
    many times as much. So the number is doubled as long as that helps, and the result is used for the next rounds. BBR
    does not take loss for a full link, so a few connections are enough with it.
    """

    def __init__(self, fewest: int = FEWEST, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._most = fewest, most
        self._clock = clock
        self.count = self._fewest = fewest
        self._rate_before_doubling = 0.0  # bytes a second to all members together; 0: not measured
        self._is_settled = False
        self._rounds = 0
        self._settled_at: float | None = None
        self._began: float | None = None
        self._bytes = self._chunks = 0

    def begin_round(self, others: int) -> None:
        """Begin a round with `others` other members. The number of connections to each member (`count`) stays as in the
        last round, unless it is below the minimum for this number of members."""
        self._fewest = max(self._least, IN_ALL // max(others, 1))
        self.count = max(self.count, self._fewest)
        self._rounds += 1
        if self._rounds % LASTS == 0:
            self._is_settled, self._rate_before_doubling = False, 0.0
        self._began = self._settled_at = None

    def passed(self, count: int, has_more: bool) -> bool:
        """Count a chunk of `count` bytes that has arrived. Return True if this doubles the connections to each member.

        `has_more`: further chunks wait to be sent. If it is false, more connections would not help.
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
        if seconds < SHORTEST_TRIAL or (self._chunks < TRIAL_CHUNKS * self.count and seconds < LONGEST_TRIAL):
            return False
        rate = self._bytes / seconds
        self._began = self._settled_at = None
        if rate < GAIN * self._rate_before_doubling:
            self.count, self._is_settled = max(self._fewest, self.count // 2), True
        elif self.count == self._most:
            self._is_settled = True
        else:
            self._rate_before_doubling, self.count = rate, self.count * 2
        return not self._is_settled
