"""When an owner wants a volunteer to pause: conditions on facts, each with its reason in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from opendiloco.owner.facts import Facts

BUSY_PERCENT, HOT_CELSIUS = 50, 85
PERCENTS, DEGREES = range(1, 100), range(30, 121)
"""What these conditions may be said with: others would hold always, or never."""


class Condition(Protocol):
    """Says why to pause, if it holds. `name` is what the owner calls it."""

    @property
    def name(self) -> str: ...
    def reason(self, facts: Facts) -> str | None:
        """Return why to pause; None while there is no reason."""


@dataclass(frozen=True)
class OnBattery:
    """The machine runs on its battery."""

    name: str = "battery"

    def reason(self, facts: Facts) -> str | None:
        return "on battery" if facts.on_battery else None


@dataclass(frozen=True)
class Busy:
    """Other programs use more than so many percent of the cores."""

    percent: int = BUSY_PERCENT
    name: str = "busy"

    def reason(self, facts: Facts) -> str | None:
        used = round(100 * facts.others)
        return f"other programs use {used} % of the processor" if used > self.percent else None


@dataclass(frozen=True)
class Hot:
    """A processor or GPU has at least so many degrees Celsius."""

    celsius: int = HOT_CELSIUS
    name: str = "hot"

    def reason(self, facts: Facts) -> str | None:
        is_hot = facts.celsius is not None and facts.celsius >= self.celsius
        return f"{facts.celsius:.0f} °C" if is_hot else None


@dataclass(frozen=True)
class Program:
    """A program of this name runs."""

    program: str

    @property
    def name(self) -> str:
        return f"process:{self.program}"

    def reason(self, facts: Facts) -> str | None:
        names = {name.casefold() for name in facts.programs}
        return f"{self.program} runs" if self.program.casefold() in names else None


@dataclass(frozen=True)
class Hours:
    """The time of day is outside of these hours."""

    begin: time
    end: time
    text: str
    name: str = "hours"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 22-07 or 21:30-7:15. Raises: ValueError."""
        found = re.fullmatch(r"(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?", text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no range of hours such as 22-07 or 21:30-07:15.")
        hour, minute, last_hour, last_minute = (int(part or 0) for part in found.groups())
        begin, end = time(hour % 24, minute), time(last_hour % 24, last_minute)
        if max(hour, last_hour) > 24 or begin == end:
            raise ValueError(f"{text!r}: begin and end are two times of one day, 00:00 to 24:00.")
        return cls(begin, end, text.strip())

    def reason(self, facts: Facts) -> str | None:
        now = facts.now.time()
        is_within = self.begin <= now < self.end if self.begin < self.end else now >= self.begin or now < self.end
        return None if is_within else f"outside of the hours {self.text}"


def _parse_condition(text: str) -> Condition:
    """Read one word of --pause-when. Raises: ValueError."""
    kind, _, value = text.strip().partition(":")
    if kind == "process" and value:
        return Program(value)
    if kind == "battery" and not value:
        return OnBattery()
    if kind == "busy":
        return Busy(_number(text, value, PERCENTS, "percent")) if value else Busy()
    if kind == "hot":
        return Hot(_number(text, value, DEGREES, "degrees Celsius")) if value else Hot()
    raise ValueError(f"{text!r} is none of battery, busy, busy:PERCENT, hot, hot:CELSIUS and process:NAME.")


def _number(text: str, value: str, allowed: range, unit: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 4 and int(value) in allowed):
        raise ValueError(f"{text!r}: {value!r} is no number of {unit} from {allowed[0]} to {allowed[-1]}.")
    return int(value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Read what --pause-when says, separated by commas. Raises: ValueError."""
    found = tuple(_parse_condition(word) for word in text.split(",") if word.strip())
    names = [condition.name for condition in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{text!r} has {twice} twice: leave one out.")
    return found


def parse_until(text: str, now: datetime) -> datetime:
    """Return the next 07:30 after `now`, or the moment 2026-11-24 07:30. Local time. Raises: ValueError."""
    try:
        if re.fullmatch(r"\d\d?:\d\d", text.strip()):
            moment = datetime.combine(now, datetime.strptime(text.strip(), "%H:%M").time())
            return moment if moment > now else moment + timedelta(days=1)
        return datetime.fromisoformat(text.strip()).astimezone().replace(tzinfo=None)
    except ValueError as error:
        raise ValueError(f"{text!r} is no time such as 07:30 or 2026-11-24 07:30.") from error
