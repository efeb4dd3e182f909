"""Conditions under which a volunteer pauses. Each checks `Facts` of the machine and states its reason in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendiloco.owner.facts import Facts

BUSY_PERCENT, HOT_CELSIUS = 50, 85  # default limits of the conditions "busy" (percent) and "hot" (°C)
PERCENTS, DEGREES = range(1, 100), range(30, 121)
"""Values that the owner may give to busy and hot. With other values the condition would hold always or never."""


@dataclass(frozen=True)
class Condition:
    """A condition under which the volunteer pauses.

    `name` is the owner's word for it. `reason` returns in words why to pause, or None while the condition does not
    hold. `is_long`: a pause for it outlasts the grace that other peers give, so the volunteer leaves the run at once.
    """

    name: str
    reason: Callable[[Facts], str | None]
    is_long: bool = False


def parse_hours(text: str) -> Condition:
    """Return the condition that pauses training outside of hours such as 22-07 or 21:30-7:15. Raises: ValueError."""
    hours = text.strip()
    found = re.fullmatch(r"(\d\d?)(?::(\d\d))?-(\d\d?)(?::(\d\d))?", hours)
    if found is None:
        raise ValueError(f"{text!r} is not a range of hours: give one such as 22-07 or 21:30-07:15.")
    hour, minute, last_hour, last_minute = (int(part or 0) for part in found.groups())
    begin, end = time(hour % 24, minute), time(last_hour % 24, last_minute)
    if max(hour, last_hour) > 24 or begin == end:
        remedy = "give two different times of day, 00:00 to 24:00; for the whole day, leave out --hours"
        raise ValueError(f"{text!r}: {remedy}.")

    def reason(facts: Facts) -> str | None:
        now = facts.now.time()
        is_within = begin <= now < end if begin < end else now >= begin or now < end
        return None if is_within else f"outside of the hours {hours}, until {begin:%H:%M}"

    return Condition("hours", reason)


def _parse_condition(text: str) -> Condition:
    """Return the condition that one word of --pause-when names. Raises: ValueError."""
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
    raise ValueError(
        f"{text!r} is unknown: give battery, busy, busy:PERCENT, hot, hot:CELSIUS or process:NAME, separated by commas."
    )


def _number(text: str, value: str, allowed: range, unit: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 4 and int(value) in allowed):
        raise ValueError(f"{text!r}: {value!r} must be a whole number of {unit} from {allowed[0]} to {allowed[-1]}.")
    return int(value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions that --pause-when names, separated by commas. Raises: ValueError."""
    found = tuple(_parse_condition(word) for word in text.split(",") if word.strip())
    names = [condition.name for condition in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{text!r} names {twice} twice: remove one.")
    return found


def parse_until(text: str, now: datetime) -> datetime:
    """Return the local time that a text names. 07:30 names the next such time after `now`, 2026-11-24 07:30 that
    moment. Raises: ValueError."""
    try:
        if re.fullmatch(r"\d\d?:\d\d", text.strip()):
            moment = datetime.combine(now, datetime.strptime(text.strip(), "%H:%M").time())
            return moment if moment > now else moment + timedelta(days=1)
        moment = datetime.fromisoformat(text.strip()).astimezone().replace(tzinfo=None)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a time: give one such as 07:30 or 2026-11-24 07:30.") from error
    if moment <= now:
        raise ValueError(f"{text!r} is in the past: it is {now:%Y-%m-%d %H:%M} now.")
    return moment
