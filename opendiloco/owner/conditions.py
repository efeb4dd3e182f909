"""When an owner wants a volunteer to pause: conditions on facts, each with its reason in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendiloco.owner.facts import Facts

BUSY_PERCENT, HOT_CELSIUS = 50, 85  # where the owner names no limit
PERCENTS, DEGREES = range(1, 100), range(30, 121)
"""What these conditions may be said with: others would hold always, or never."""


@dataclass(frozen=True)
class Condition:
    """When to pause. `name` is what the owner calls it; `reason` says why to pause, None while there is no reason. One
    that `is_long` lasts longer than others wait, so the volunteer leaves at once."""

    name: str
    reason: Callable[[Facts], str | None]
    is_long: bool = False


def parse_hours(text: str) -> Condition:
    """Read 22-07 or 21:30-7:15: the condition that it is not in these hours. Raises: ValueError."""
    hours = text.strip()
    found = re.fullmatch(r"(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?", hours)
    if found is None:
        raise ValueError(f"{text!r} is no range of hours such as 22-07 or 21:30-07:15.")
    hour, minute, last_hour, last_minute = (int(part or 0) for part in found.groups())
    begin, end = time(hour % 24, minute), time(last_hour % 24, last_minute)
    if max(hour, last_hour) > 24 or begin == end:
        raise ValueError(f"{text!r}: begin and end are two times of one day, 00:00 to 24:00.")

    def reason(facts: Facts) -> str | None:
        now = facts.now.time()
        is_within = begin <= now < end if begin < end else now >= begin or now < end
        return None if is_within else f"outside of the hours {hours}, until {begin:%H:%M}"

    return Condition("hours", reason)


def _parse_condition(text: str) -> Condition:
    """Read one word of --pause-when. Raises: ValueError."""
    kind, _, value = text.strip().partition(":")
    if kind == "process" and value:
        name = value.casefold()
        return Condition(text.strip(), lambda facts: f"{value} runs" if name in facts.programs else None)
    if kind == "battery" and not value:
        return Condition(kind, lambda facts: "on battery" if facts.on_battery else None)
    if kind == "busy":
        percent = _number(text, value, PERCENTS, "percent") if value else BUSY_PERCENT

        def busy(facts: Facts) -> str | None:
            used = round(100 * facts.others)
            return f"other programs use {used} % of the processor" if used > percent else None

        return Condition(kind, busy)
    if kind == "hot":
        limit = _number(text, value, DEGREES, "degrees Celsius") if value else HOT_CELSIUS
        return Condition(kind, lambda facts: f"{facts.celsius:.0f} °C" if (facts.celsius or 0.0) >= limit else None)
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
