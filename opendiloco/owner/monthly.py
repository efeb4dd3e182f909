"""The bulk traffic of a calendar month (UTC): counted, kept across restarts, and held within the owner's limits."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.owner.conditions import Condition
from opendiloco.quantities import SECONDS_A_DAY, in_words
from peers.metrics import MONTH_BYTES, MONTH_LIMIT_BYTES
from peers.values.system import cancel_and_wait, start_task, write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "traffic.json"
KEEP_SECONDS = 30.0
"""Seconds between two writes of the file. A crash loses at most the count of this time."""
PACE_SECONDS = SECONDS_A_DAY
"""Seconds over which the pace is averaged. A whole day includes hours without training, and keeps one download of the
state from counting as a pace for the month."""
NEAR = 0.9
"""Share of a monthly limit. Once it is used, the volunteer warns, even at a pace that would stay within the limit. For
the upload limit, it then also sends smaller contributions."""
SPENT = 0.98
"""Share of a limit at which the volunteer pauses. The rest is for the round under way, which is finished first."""
KEPT_MONTHS = 4
"""Months in the file, those counted last. A clock that is wrong for a while adds another month."""
LEAST_SHARE = 1e-6
"""The smallest share of a contribution's bytes. It selects the thinnest format."""
DIRECTIONS, MEASURED_AS = ("up", "down"), ("sent", "received")  # the two directions, as named for people and in metrics


_Bytes = Annotated[int, Field(ge=0, le=1 << 63)]
_Rate = Annotated[float, Field(ge=0, le=1e15)]


class _Count(BaseModel):
    """The bytes that one volunteer has sent and received in each of the last months, its pace in bytes a second, and
    the time of the last count in seconds since the epoch.

    Several months are kept, so that a clock that was wrong for a while loses none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    at: float = 0.0
    months: Annotated[dict[str, tuple[_Bytes, _Bytes]], Field(max_length=KEPT_MONTHS)] = Field(default_factory=dict)
    pace: tuple[_Rate, _Rate] = (0.0, 0.0)

    def in_month(self, now: datetime) -> tuple[int, int]:
        """Return the bytes that the volunteer sent and received in the month of `now`."""
        return self.months.get(_name(now), (0, 0))

    def pace_at(self, now: datetime) -> tuple[float, float]:
        """Return the paces of sending and receiving at `now` in bytes a second, which decay without traffic."""
        decay = math.exp(-max(now.timestamp() - self.at, 0.0) / PACE_SECONDS)
        return self.pace[0] * decay, self.pace[1] * decay

    def and_more(self, more: Sequence[int], now: datetime) -> _Count:
        """Return this count after adding `more`, the bytes newly sent and received, at the time `now`."""
        moved = [before + new for before, new in zip(self.in_month(now), more, strict=True)]
        pace = [before + new / PACE_SECONDS for before, new in zip(self.pace_at(now), more, strict=True)]
        others = [each for each in self.months.items() if each[0] != _name(now)]
        months = dict([*others[1 - KEPT_MONTHS :], (_name(now), (moved[0], moved[1]))])
        return _Count(at=now.timestamp(), months=months, pace=(pace[0], pace[1]))


@dataclass(frozen=True)
class _Use:
    """The traffic of one direction in this month: bytes so far, bytes by the month's end at the present pace, and the
    owner's limit."""

    direction: str
    moved: int
    foreseen: float
    limit: float | None

    @property
    def is_nearly_spent(self) -> bool:
        """True if the share of the limit that has been used is at least `NEAR`."""
        return self.limit is not None and self.moved >= NEAR * self.limit

    @property
    def share(self) -> float:
        """The largest share of the present pace (above 0, at most 1) with which the traffic stays within the limit
        until the month's end; at most `NEAR` if the limit is nearly spent."""
        if self.limit is None:
            return 1.0
        left, to_come = self.limit - self.moved, self.foreseen - self.moved
        if left <= 0:
            return LEAST_SHARE
        share = left / to_come if to_come > left else 1.0
        return max(min(share, NEAR if self.is_nearly_spent else 1.0), LEAST_SHARE)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {in_words(round(self.limit))}"
        return f"{self.direction} {in_words(self.moved)}{limit}"


class MonthlyTraffic:
    """The bulk traffic of all volunteers on this machine in the present month, with the owner's limits. Each volunteer
    keeps its own count in its folder, and reads the counts of the others in the same state folder."""

    def __init__(
        self,
        folder: Path,
        limits: tuple[float | None, float | None] = (None, None),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Create the count of the volunteer whose folder is `folder`. `limits` are the most bytes a month to send and
        to receive; None: no limit."""
        self._file, self._limits, self._clock = folder / FILE_NAME, limits, clock
        self._own = _read(self._file)
        self._others = list(self._read_others())
        self._transport: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._seen = (0, 0)  # the transport's bytes sent and received at the last count
        self._can_write = True
        self._writing = Lock()
        for direction, limit in zip(MEASURED_AS, limits, strict=True):
            if limit is not None:
                MONTH_LIMIT_BYTES.labels(direction).set(limit)

    # Counting ---------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def counting(self, transport: Callable[[], tuple[int, int]]) -> AsyncIterator[None]:
        """Count a new transport's traffic until the context ends, and save the count. `transport` returns the bytes
        that the transport has sent and received so far."""
        self._transport, self._seen = transport, (0, 0)
        keeping = start_task(self._keep_on())
        try:
            yield
        finally:
            await cancel_and_wait(keeping)
            self.uses()
            self._transport = lambda: self._seen
            self._keep(self._own)

    async def _keep_on(self) -> None:
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            self.uses()
            await asyncio.to_thread(self._keep, self._own)
            self._others = await asyncio.to_thread(lambda: list(self._read_others()))

    def _count(self) -> None:
        """Add to this volunteer's count the bytes that the transport has sent and received since the last `_count`."""
        moved = self._transport()
        more = [after - before for after, before in zip(moved, self._seen, strict=True)]
        self._seen = moved
        if any(more):
            self._own = self._own.and_more(more, self._clock())

    def _keep(self, count: _Count) -> None:
        """Write `count` to the volunteer's file, unless the count has no months."""
        if not count.months:
            return
        try:
            with self._writing:  # a thread may still be writing when the session ends
                write_whole(self._file, [count.model_dump_json().encode()], is_durable=True)
            self._can_write = True
        except OSError as error:
            if self._can_write:
                reason = error.strerror or str(error)
                logger.warning(
                    "%s cannot be written, so a restart loses the month's traffic: %s. Free some space.",
                    *(self._file, reason),
                )
            self._can_write = False

    def _read_others(self) -> Iterator[_Count]:
        """Yield the counts of the other volunteers in the state folder, in any run."""
        state = self._file.parent.parent.parent
        paths = (path for path in sorted(state.glob(f"*/*/{FILE_NAME}")) if path != self._file)
        yield from (_read(path, logging.DEBUG) for path in paths)  # each volunteer warns of its own file

    # Limits -----------------------------------------------------------------------------------------------------------
    def uses(self) -> tuple[_Use, ...]:
        """Return the present month's traffic of all volunteers: the upload, then the download."""
        self._count()
        now, found = self._clock(), list[_Use]()
        seconds = (_end_of_month(now) - now).total_seconds()
        counts = [self._own, *self._others]
        for place, direction in enumerate(DIRECTIONS):
            moved = sum(count.in_month(now)[place] for count in counts)
            pace = sum(count.pace_at(now)[place] for count in counts)
            found.append(_Use(direction, moved, moved + pace * seconds, self._limits[place]))
            MONTH_BYTES.labels(MEASURED_AS[place]).set(moved)
        return tuple(found)

    def share(self) -> float:
        """Return the share of a full contribution's bytes that the upload limit allows, or 1 if there is no limit."""
        return self.uses()[0].share

    def lines(self) -> list[str]:
        """Return lines about the month's traffic, and about each limit that is near; no lines without limits."""
        if not any(self._limits):
            return []
        up, down = self.uses()
        lines = [f"this month (UTC): {up} · {down}"]
        for use in (up, down):
            # Warn of uploads early, if their pace exceeds the limit, but of downloads only once most of the limit is
            # used, because their pace is high only while this machine fetches a run's state.
            if use.is_nearly_spent or (use is up and up.share < 1):
                foreseen = f"{use.direction} {in_words(round(use.foreseen))}"
                end = f"{_end_of_month(self._clock()):%Y-%m-%d}"
                lines.append(f"near the limit: {foreseen} by {end} at this pace")
        return lines

    def conditions(self) -> tuple[Condition, ...]:
        """Return for each limit a condition that pauses the volunteer once the share `SPENT` of the limit is used."""

        def condition(place: int, limit: float) -> Condition:
            def reason(_: object) -> str | None:
                until = f"until {_end_of_month(self._clock()):%Y-%m-%d %H:%M} UTC"
                is_spent = self.uses()[place].moved >= SPENT * limit
                return f"the month's limit on {DIRECTIONS[place]}loads is spent, {until}" if is_spent else None

            return Condition(f"monthly-{DIRECTIONS[place]}load", reason, is_long=True)

        return tuple(condition(place, limit) for place, limit in enumerate(self._limits) if limit is not None)


def _read(path: Path, level: int = logging.WARNING) -> _Count:
    """Read the count of bytes sent and received from a volunteer's file, and return it. Return an empty count if the
    file is missing or unreadable."""
    try:
        return _Count.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValidationError) as error:
        logger.log(level, "%s cannot be read, so the month's traffic so far is not counted: %s", path, error)
    return _Count()


def _name(now: datetime) -> str:
    return f"{now:%Y-%m}"


def _end_of_month(now: datetime) -> datetime:
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1)
