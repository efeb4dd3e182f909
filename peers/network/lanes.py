"""How many connections a round uses to each member: as many as carry more than fewer do.

Where packets get lost, most machines' TCP (CUBIC) leaves a long link nearly empty, and many connections carry many
times as much. So the number is doubled for as long as that helps, and what was found lasts for the next rounds. BBR
takes no loss for a full link: where the kernel gives it to us, few connections do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FEWEST, MOST = 4, 64
IN_ALL = 8  # at least: with one other member alone, what few connections lose is not made up for by others'
FEWEST_WITH_BBR, MOST_WITH_BBR = 2, 8  # of many that share a slow link each sends more than its share, and most is lost
SETTLING = 1.0  # seconds in which connections find their pace: what passes then says nothing
GAIN = 1.2  # times the rate, for twice as many connections: else they are not worth it
WINDOW = 0.5  # seconds at least over which a rate is taken
LONGEST_WINDOW = 3.0  # seconds
ENOUGH = 2  # chunks of each connection that a rate is taken from
LASTS = 20  # rounds for which a number is kept before more are tried again


class Lanes:
    """Told what passes; `count` is how many connections to use."""

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
        return self._judge(rate)

    def _judge(self, rate: float) -> bool:
        if rate < GAIN * self._rate:
            self.count, self._is_settled = max(self._fewest, self.count // 2), True
            return False
        if self.count == self._most:
            self._is_settled = True
            return False
        self._rate, self.count = rate, self.count * 2
        return True
