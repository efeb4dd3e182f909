"""What becomes of an owner's wishes: pauses that are held, long ones, overruled ones, finishing, and a machine's sleep.
All clocks here are invented."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from opendiloco.owner.conditions import parse_conditions
from opendiloco.owner.controls import Request
from opendiloco.owner.facts import Facts
from opendiloco.owner.sleep import SleepWatch
from opendiloco.owner.watch import LONGEST_HOLD, OwnersWatch
from opendiloco.owner.wishes import CALM_SECONDS, Wishes

GRACE = 10.0
NOON = datetime(2026, 11, 24, 12, 0)


class Volunteer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.outer_step = 3
        self.is_at_work = True
        self.is_held = False
        self.has_left = False

    def hold(self, held: bool) -> None:
        self.is_held = held

    def leave(self) -> None:
        self.has_left = True


class Machine:
    """A volunteer under its owner's watch, on a machine whose clocks and facts the test moves."""

    def __init__(self, conditions: str = "", until: datetime | None = None, grace: float = GRACE) -> None:
        self.said: list[str] = []
        self.watch = OwnersWatch(Wishes(), parse_conditions(conditions), until, say=self.said.append)
        self.volunteer = Volunteer()
        self.watch.begin(self.volunteer, grace)
        self.awake = self.since_start = 1000.0
        self.look()

    def look(self, after: float = 0.0, asleep: float = 0.0, **facts: Any) -> None:
        self.awake += after
        self.since_start += after + asleep
        now = NOON + timedelta(seconds=self.since_start - 1000)
        self.watch.observe(Facts(now, **facts), self.awake, self.since_start)

    def ask(self, do: Any, anyway: bool = False) -> str:
        return self.watch.answer(Request(do=do, anyway=anyway)).says


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands come at the same time as the last look."""
    monkeypatch.setattr("opendiloco.owner.watch.awake", lambda: 1000.0)


def test_a_condition_holds_the_training_at_once_and_until_it_has_been_gone_for_a_while() -> None:
    machine = Machine("battery", grace=1000)
    machine.look(after=2, on_battery=True)
    assert machine.volunteer.is_held
    assert machine.said == ["paused: on battery"]
    machine.look(after=CALM_SECONDS - 1)
    assert machine.volunteer.is_held
    machine.look(after=1)
    assert not machine.volunteer.is_held
    assert machine.said[1:] == ["the pause is over"]
    assert not machine.volunteer.has_left


def test_a_pause_for_longer_than_others_wait_leaves_and_comes_back() -> None:
    machine = Machine("battery")
    machine.look(on_battery=True)
    machine.look(after=GRACE - 0.1, on_battery=True)
    assert not machine.volunteer.has_left
    machine.look(after=0.1, on_battery=True)
    assert machine.volunteer.has_left
    assert machine.watch.comes_back


def test_no_pause_is_held_for_longer_than_a_minute() -> None:
    machine = Machine("battery", grace=600)
    machine.look(on_battery=True)
    machine.look(after=LONGEST_HOLD, on_battery=True)
    assert machine.volunteer.has_left


def test_where_it_cannot_come_back_a_long_pause_is_the_end() -> None:
    machine = Machine("battery")
    machine.watch.begin(machine.volunteer, GRACE, may_come_back=False)
    machine.look(on_battery=True)
    machine.look(after=GRACE, on_battery=True)
    assert machine.volunteer.has_left
    assert not machine.watch.comes_back


@pytest.mark.usefixtures("clock")
def test_the_owner_pauses_and_resumes() -> None:
    machine = Machine()
    assert machine.ask("pause") == "pausing"
    assert machine.volunteer.is_held
    assert machine.watch.answer(Request(do="look")).reasons == ("you asked for it",)
    assert machine.ask("resume") == "training goes on"
    assert not machine.volunteer.is_held


@pytest.mark.usefixtures("clock")
def test_conditions_that_hold_are_only_overruled_on_purpose_and_until_they_have_ended() -> None:
    machine = Machine("battery", grace=1000)
    machine.look(on_battery=True)
    assert "still paused: on battery" in machine.ask("resume")
    assert machine.volunteer.is_held
    machine.ask("resume", anyway=True)
    assert not machine.volunteer.is_held
    machine.look(after=1, on_battery=True)
    assert not machine.volunteer.is_held
    machine.look(after=CALM_SECONDS)
    machine.look(after=1, on_battery=True)  # a new time counts again
    assert machine.volunteer.is_held


@pytest.mark.usefixtures("clock")
def test_the_signal_pauses_and_goes_on_whatever_holds() -> None:
    machine = Machine("battery", grace=1000)
    machine.watch.toggle()
    assert machine.volunteer.is_held
    machine.look(on_battery=True)
    machine.watch.toggle()
    assert not machine.volunteer.is_held


@pytest.mark.usefixtures("clock")
def test_finish_waits_for_the_outer_step_under_way() -> None:
    machine = Machine()
    assert machine.ask("finish") == "leaving after this outer step"
    machine.look(after=5)
    assert not machine.volunteer.has_left
    machine.volunteer.outer_step += 1
    machine.look(after=1)
    assert machine.volunteer.has_left
    assert not machine.watch.comes_back


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("is_at_work", [True, False])
def test_finish_leaves_at_once_where_nothing_is_under_way(is_at_work: bool) -> None:
    machine = Machine()
    machine.volunteer.is_at_work = is_at_work
    if is_at_work:
        machine.ask("pause")
    machine.ask("finish")
    assert machine.volunteer.has_left


def test_it_leaves_when_the_owner_needs_the_machine() -> None:
    machine = Machine(until=NOON + timedelta(minutes=5))
    machine.look(after=299)
    assert not machine.volunteer.has_left
    machine.look(after=1)
    assert machine.volunteer.has_left
    assert machine.said == ["it is 12:05: leaving the run"]


# Sleep ----------------------------------------------------------------------------------------------------------------
def test_a_machine_that_has_slept_says_so_and_joins_again() -> None:
    machine = Machine()
    machine.look(after=2, asleep=7200)
    assert machine.said[0] == "this machine has slept for 2.0 h"
    assert machine.volunteer.has_left
    assert machine.watch.comes_back


def test_a_nap_that_others_wait_for_is_only_told_of() -> None:
    machine = Machine()
    machine.look(after=2, asleep=5)
    assert machine.said == ["this machine has slept for 5 s"]
    assert not machine.volunteer.has_left


def test_only_the_difference_of_the_clocks_is_sleep() -> None:
    watch = SleepWatch()
    assert watch.tick(10.0, 500.0) == 0  # it may have slept before we began
    assert watch.tick(4000.0, 4490.0) == 0  # a process that was stopped: both clocks went on
    assert watch.tick(4001.0, 4492.5) == 0  # clocks are read one after the other
    assert watch.tick(4002.0, 4593.5) == 100.0
