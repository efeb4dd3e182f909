"""What our link carries away in all rounds together, and which of them goes first."""

from __future__ import annotations

import asyncio
import math
from itertools import takewhile
from typing import Protocol

from peers import metrics
from peers.network.channel import BYTES_UNDER_WAY
from peers.network.sockets import has_bbr
from peers.network.throttle import FEWEST_WITH_BBR, MOST_WITH_BBR, Lanes, RateMeter

LATE = 1.5  # times as long as a chunk should take: then it is sent on another stream, too
LEAST_PATIENCE = 1.0  # seconds before that
PATIENCE = 5.0  # seconds for which a chunk waits for those of earlier rounds
SECONDS_UNDER_WAY = 0.5  # of what our link carries


class Sending(Protocol):
    """The chunks of one fragment's round, on their way out."""

    hangs_at: set[str]

    def has_more(self, to: str) -> bool: ...


class Uplink:
    """Rounds of several fragments may be under way. They take their turns in the order in which they began: if they
    shared the link, each of them would be late. `meter` measures what is confirmed.
    """

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.lanes = Lanes(FEWEST_WITH_BBR, MOST_WITH_BBR) if has_bbr() else Lanes()
        self.sent_bytes = 0
        self._rounds: dict[Sending, None] = {}  # in the order in which they began
        self._news = asyncio.Event()

    def begin_round(self, sending: Sending, others: int) -> None:
        """A round begins, with so many other members."""
        self.end_round(sending)
        self._rounds[sending] = None
        self.lanes.begin_round(others)
        self.meter.begin_round()

    def end_round(self, sending: Sending) -> None:
        """A round is over, if there is one."""
        self._rounds.pop(sending, None)
        self.moved()

    def passed(self, count: int, seconds: float) -> None:
        """So many bytes of a chunk are confirmed, which took so many seconds."""
        self.meter.passed(count, seconds)
        self.sent_bytes += count
        metrics.ROUND_BYTES.labels("sent").inc(count)

    def under_way(self, streams: int) -> int:
        """Return the bytes that each of so many streams has under way at most: what lies in buffers when another chunk
        becomes more urgent, or another stream runs dry, is out of our hands."""
        rate = self.meter.rate
        return int(min(BYTES_UNDER_WAY, SECONDS_UNDER_WAY * rate / max(streams, 1))) if rate else BYTES_UNDER_WAY

    def patience(self, streams: int, chunk: int) -> float:
        """Return the seconds after which a chunk of so many bytes, on one of so many streams, should be there."""
        rate = self.meter.rate
        return max(LEAST_PATIENCE, LATE * (SECONDS_UNDER_WAY + streams * chunk / rate)) if rate else math.inf

    async def turn(self, sending: Sending, to: str) -> None:
        """Wait until no round that began earlier has anything to send to a member; but not for one that hangs."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._earlier(sending, to):
                    await self._news.wait()
        except TimeoutError:
            for other in self._earlier(sending, to):
                other.hangs_at.add(to)

    def _earlier(self, sending: Sending, to: str) -> list[Sending]:
        """Return the rounds that began earlier and go on sending to a member."""
        earlier = takewhile(lambda one: one is not sending, self._rounds)
        return [other for other in earlier if other.has_more(to) and to not in other.hangs_at]

    def moved(self) -> None:
        """A round has nothing left to send to a member, or has ended."""
        self._news.set()
        self._news = asyncio.Event()
