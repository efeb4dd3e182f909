"""When a volunteer pauses: each condition is a function of facts, held here to invented ones."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from opendiloco.owner import facts as owners_facts
from opendiloco.owner.conditions import parse_conditions, parse_hours, parse_until
from opendiloco.owner.facts import Facts, GpuState, Observer, Sensor


def facts(clock: str = "12:00", **values: Any) -> Facts:
    return Facts(datetime.fromisoformat(f"2026-11-24 {clock}"), **values)


@pytest.mark.parametrize(
    ("word", "true", "reason"),
    [
        ("battery", {"on_battery": True}, "on battery"),
        ("busy", {"others": 0.51}, "other programs use 51 % of the processor"),
        ("busy:20", {"others": 0.3}, "other programs use 30 % of the processor"),
        ("hot", {"celsius": 85.0}, "85 °C"),
        ("hot:60", {"celsius": 61.4}, "61 °C"),
        ("process:Game", {"programs": frozenset({"sh", "game"})}, "Game runs"),
    ],
)
def test_each_condition_says_why(word: str, true: dict[str, Any], reason: str) -> None:
    [condition] = parse_conditions(word)
    assert condition.reason(facts(**true)) == reason
    assert condition.reason(facts()) is None


@pytest.mark.parametrize(
    ("word", "false"), [("busy", {"others": 0.5}), ("hot", {"celsius": 84.9}), ("busy:20", {"others": 0.2})]
)
def test_what_is_not_above_a_limit_is_no_reason(word: str, false: dict[str, Any]) -> None:
    [condition] = parse_conditions(word)
    assert condition.reason(facts(**false)) is None


@pytest.mark.parametrize("text", ["batery", "process:", "battery:3", "hotter"])
def test_any_other_condition_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="give battery, busy"):
        parse_conditions(text)


@pytest.mark.parametrize("text", ["busy:much", "busy:0", "busy:100", "busy:²", "hot:0", "hot:29", "hot:999"])
def test_a_limit_that_would_hold_always_or_never_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a whole number of (percent from 1 to 99|degrees Celsius from 30 to 120)\."):
        parse_conditions(text)


@pytest.mark.parametrize("text", ["busy:10,busy:90", "battery,hot,battery", "process:sh,process:sh"])
def test_a_condition_that_is_said_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_conditions(text)


@pytest.mark.parametrize(
    ("hours", "begin", "within", "outside"),
    [
        ("22-07", "22:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9-17", "09:00", ["09:00", "16:59"], ["08:59", "17:00", "00:00"]),
        ("21:30-7:15", "21:30", ["21:30", "07:14"], ["21:29", "07:15"]),
        ("18-24", "18:00", ["18:00", "23:59"], ["00:00", "17:59"]),
    ],
)
def test_hours_may_go_past_midnight(hours: str, begin: str, within: list[str], outside: list[str]) -> None:
    condition = parse_hours(hours)
    assert [clock for clock in within if condition.reason(facts(clock))] == []
    assert {condition.reason(facts(clock)) for clock in outside} == {f"outside of the hours {hours}, until {begin}"}


@pytest.mark.parametrize("text", ["22", "22-25", "7-7", "a-b", "10:99-11"])
def test_no_hours(text: str) -> None:
    with pytest.raises(ValueError, match=r"a range of hours|two different times|minute must be"):
        parse_hours(text)


def test_the_whole_day_needs_no_hours() -> None:
    with pytest.raises(ValueError, match=r"for the whole day, leave out --hours"):
        parse_hours("00-24")


NOW = datetime(2026, 11, 24, 12, 0)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("12:30", datetime(2026, 11, 24, 12, 30)),
        ("12:00", datetime(2026, 11, 25, 12, 0)),
        ("7:05", datetime(2026, 11, 25, 7, 5)),
        ("2026-11-26 08:00", datetime(2026, 11, 26, 8, 0)),
    ],
)
def test_until_is_the_next_such_time_or_a_moment(text: str, moment: datetime) -> None:
    assert parse_until(text, NOW) == moment


@pytest.mark.parametrize("text", ["tomorrow", "25:00", "7"])
def test_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_until(text, NOW)


def test_a_past_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="'2026-11-24 07:30' is in the past: it is 2026-11-24 12:00 now"):
        parse_until("2026-11-24 07:30", NOW)


@pytest.mark.parametrize(
    ("seconds", "idle", "own", "share"), [(8, 8, 0, 0), (8, 2, 2, 0.5), (8, 0, 0, 1), (8, 6, 4, 0), (0, 0, 0, 0)]
)
def test_others_use_what_is_neither_idle_nor_ours(
    seconds: float, idle: float, own: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are those of all cores, between two looks."""
    clock, idle_clock, own_clock = iter([10, 10 + seconds]), iter([5, 5 + idle]), iter([1, 1 + own])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr("psutil.cpu_times", lambda: SimpleNamespace(idle=next(idle_clock)))
    monkeypatch.setattr("psutil.cpu_count", lambda: 1)
    monkeypatch.setattr(owners_facts, "_seconds_of_family", lambda: next(own_clock))
    observer = Observer(with_heat=False)
    assert observer.look().others == 0, "nothing to compare with"
    assert observer.look().others == share


def test_children_that_have_ended_are_ours() -> None:
    """What a short program of ours took counted as other programs' time."""
    before = owners_facts._seconds_of_family()
    program = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert owners_facts._seconds_of_family() - before > 0.25, "the clock has ticks of 10 ms"


@pytest.mark.parametrize("with_heat", [True, False])
def test_nobody_is_asked_for_heat_that_does_not_matter(with_heat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_facts, "read_gpus", lambda: (GpuState("H100", celsius=125.0),))
    assert Observer(with_heat).look().celsius == (125.0 if with_heat else None)


@pytest.mark.parametrize(
    ("processors", "gpus", "hottest"), [([40.0, 0.0, 60.5], [255.0], 60.5), ([], [71.0], 71.0), ([-273.0], [], None)]
)
def test_sensors_that_are_not_connected_do_not_count(
    processors: list[float], gpus: list[float], hottest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_facts, "read_sensors", lambda: [Sensor("coretemp", celsius) for celsius in processors])
    monkeypatch.setattr(owners_facts, "read_gpus", lambda: [GpuState("H100", celsius) for celsius in gpus])
    assert Observer().look().celsius == hottest
