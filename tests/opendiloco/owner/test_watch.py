"""What becomes of an owner's wishes: pauses that are held, long ones, overruled ones, finishing, and a machine's sleep.
All clocks here are invented."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from opendiloco.owner import watch as owners_watch
from opendiloco.owner.conditions import Condition, parse_conditions
from opendiloco.owner.controls import OwnerRequest
from opendiloco.owner.facts import Facts
from opendiloco.owner.watch import CALM_SECONDS, LONGEST_HOLD, LOOK_SECONDS, SHORTEST_HOLD, OwnersWatch

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
        self.watch = OwnersWatch(parse_conditions(conditions), until, say=self.said.append)
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
        return self.watch.answer(OwnerRequest(do=do, anyway=anyway)).says


def paused(grace: float = GRACE) -> Machine:
    """A machine that has just begun to run on its battery."""
    machine = Machine("battery", grace=grace)
    machine.look(on_battery=True)
    machine.look(on_battery=True)
    assert machine.volunteer.is_held
    return machine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands come at the same time as the last look, and the machine does not sleep meanwhile."""
    monkeypatch.setattr("opendiloco.owner.watch._awake", lambda: 1000.0)
    monkeypatch.setattr("opendiloco.owner.watch._since_start", lambda: 1000.0)


def test_a_condition_holds_the_training_from_the_second_look_on_and_until_it_has_been_gone_for_a_while() -> None:
    machine = Machine("battery", grace=1000)
    machine.look(after=2, on_battery=True)
    assert not machine.volunteer.is_held
    machine.look(after=2, on_battery=True)
    assert machine.volunteer.is_held
    assert machine.said == ["paused: on battery; `diloco-peer resume --anyway` continues"]
    machine.look(after=CALM_SECONDS - 1)
    assert machine.volunteer.is_held
    machine.look(after=1)
    assert not machine.volunteer.is_held
    assert machine.said[1:] == ["the pause is over"]
    assert not machine.volunteer.has_left


def test_a_pause_is_shown_again_only_when_another_condition_holds() -> None:
    """Regression: each changed percentage was a line of its own, ten in a minute."""
    machine = Machine("busy,battery")
    for others in (0.9, 0.9, 0.8, 1.0):
        machine.look(after=LOOK_SECONDS, others=others)
    assert len(machine.said) == 1
    assert machine.watch.reasons == ("other programs use 100 % of the processor",), "status shows the present number"
    for _ in range(3):
        machine.look(after=LOOK_SECONDS, others=0.7, on_battery=True)
    assert len(machine.said) == 2
    assert "70 % of the processor, on battery" in machine.said[1]


def test_a_moment_in_which_a_condition_holds_is_no_pause() -> None:
    machine = Machine("busy")
    for others in (0.0, 0.9, 0.0, 0.9, 0.0):
        machine.look(after=LOOK_SECONDS, others=others)
    assert machine.said == []


def test_whoever_pauses_for_two_looks_does_not_leave_the_run_for_them() -> None:
    """It left at the grace's end, and began again, though the condition was long gone."""
    machine = Machine("busy")
    machine.look(after=LOOK_SECONDS, others=0.9)
    machine.look(after=LOOK_SECONDS, others=0.9)
    assert machine.volunteer.is_held
    for _ in range(int(SHORTEST_HOLD / LOOK_SECONDS)):
        machine.look(after=LOOK_SECONDS)
    assert not machine.volunteer.is_held
    assert not machine.volunteer.has_left


@pytest.mark.usefixtures("clock")
def test_a_pause_for_longer_than_others_wait_leaves_and_comes_back() -> None:
    machine = Machine()
    machine.ask("pause")
    machine.look(after=GRACE - 0.1)
    assert not machine.volunteer.has_left
    machine.look(after=0.1)
    assert machine.volunteer.has_left
    assert machine.watch.comes_back
    machine.watch.say_farewell("left the run")
    assert machine.said[-1] == "paused: you asked for it; `diloco-peer resume` continues"
    assert machine.watch.answer(OwnerRequest(do="look")).phase == "starting", (
        "that of the volunteer, which still leaves"
    )
    machine.watch.end()
    assert machine.watch.answer(OwnerRequest(do="look")).phase == "away"
    machine.watch.stop()
    machine.watch.say_farewell("left the run")
    assert machine.said[-1] == "left the run"


def test_a_condition_that_goes_on_leaves_later_than_it_would_be_known_to_be_over() -> None:
    machine = paused()
    machine.look(after=SHORTEST_HOLD - 0.1, on_battery=True)
    assert not machine.volunteer.has_left
    machine.look(after=0.1, on_battery=True)
    assert machine.volunteer.has_left
    assert machine.watch.comes_back


@pytest.mark.usefixtures("clock")
def test_a_pause_that_is_known_to_be_long_leaves_at_once_unless_it_is_overruled() -> None:
    """It would move data that the owner's limit does not allow any more."""
    machine = Machine()
    machine.watch._requests.conditions = [Condition("monthly-upload", lambda facts: "spent", is_long=True)]
    machine.look()
    assert not machine.volunteer.has_left
    machine.look()
    assert machine.volunteer.has_left
    assert machine.watch.comes_back
    machine.watch.end()
    assert machine.ask("resume", anyway=True) == "joining the run"
    machine.volunteer = Volunteer()
    machine.watch._is_leaving = False  # as another stay begins
    machine.watch.begin(machine.volunteer, GRACE)
    machine.look()
    assert not machine.volunteer.has_left


def test_no_pause_is_held_for_longer_than_a_minute() -> None:
    machine = paused(grace=600)
    machine.look(after=LONGEST_HOLD, on_battery=True)
    assert machine.volunteer.has_left


@pytest.mark.usefixtures("clock")
def test_after_a_long_pause_another_stay_begins_as_the_first_one_did() -> None:
    machine = Machine()
    machine.ask("pause")
    machine.look(after=GRACE)
    assert machine.volunteer.has_left
    assert machine.watch.answer(OwnerRequest(do="look")).reasons == ("you asked for it",), (
        "it forgets that it is paused"
    )
    assert machine.ask("resume") == "joining the run", "it still leaves"
    machine.ask("pause")
    machine.watch.end()
    assert machine.ask("resume") == "joining the run"
    assert asyncio.run(machine.watch.wait_until_wanted())
    machine.volunteer = Volunteer()
    machine.watch.begin(machine.volunteer, GRACE)
    machine.look(after=GRACE)
    assert not machine.volunteer.is_held
    assert not machine.volunteer.has_left
    assert not machine.watch.comes_back
    machine.ask("pause")
    machine.look(after=GRACE)
    assert machine.volunteer.has_left
    assert machine.watch.comes_back


# Leaving for good, whatever the stay ends for -------------------------------------------------------------------------
def test_whoever_interrupts_a_stay_that_ends_to_join_again_is_heard() -> None:
    machine = paused()
    machine.look(after=SHORTEST_HOLD, on_battery=True)
    machine.watch.stop()
    assert not machine.watch.comes_back


@pytest.mark.usefixtures("clock")
def test_finish_is_heard_in_a_stay_that_ends_to_join_again() -> None:
    machine = paused()
    machine.look(after=SHORTEST_HOLD, on_battery=True)
    machine.ask("finish")
    assert not machine.watch.comes_back


@pytest.mark.usefixtures("clock")
def test_the_moment_to_leave_may_come_in_a_long_pause() -> None:
    """One that had slept past 07:30 trained until the next day's."""
    machine = Machine(until=NOON + timedelta(hours=1))
    machine.ask("pause")
    machine.look(after=GRACE)
    assert machine.watch.comes_back
    machine.watch.until = datetime(2020, 1, 1)  # before the true time, at which it looks while it waits
    machine.ask("resume")
    assert not asyncio.run(machine.watch.wait_until_wanted())


def test_after_an_interrupt_nothing_joins_again() -> None:
    machine = Machine()
    machine.watch.stop()
    machine.look(after=2, asleep=7200)
    assert not machine.watch.comes_back


@pytest.mark.usefixtures("clock")
def test_the_owner_pauses_and_resumes() -> None:
    machine = Machine()
    assert machine.ask("pause") == "pausing"
    assert machine.volunteer.is_held
    assert machine.watch.answer(OwnerRequest(do="look")).reasons == ("you asked for it",)
    assert machine.ask("resume") == "training goes on"
    assert not machine.volunteer.is_held


@pytest.mark.usefixtures("clock")
def test_conditions_that_hold_are_only_overruled_on_purpose_and_until_they_have_ended() -> None:
    machine = paused(grace=1000)
    assert "still paused: on battery" in machine.ask("resume")
    assert machine.volunteer.is_held
    machine.ask("resume", anyway=True)
    assert not machine.volunteer.is_held
    machine.look(after=1, on_battery=True)
    assert not machine.volunteer.is_held
    machine.look(after=CALM_SECONDS)
    machine.look(after=1, on_battery=True)
    machine.look(after=1, on_battery=True)  # a new time counts again
    assert machine.volunteer.is_held


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


# Looks that fail ------------------------------------------------------------------------------------------------------
def test_a_look_that_fails_is_told_once_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def look() -> Facts:
        nonlocal looks
        looks += 1
        if 2 < looks < 5:
            raise OSError("a sensor is gone")
        return Facts(NOON, on_battery=looks <= 2)

    watch, volunteer = OwnersWatch(parse_conditions("battery"), look=look), Volunteer()
    watch.begin(volunteer, GRACE)

    async def scenario() -> None:
        watching = asyncio.create_task(watch.watch())
        async with asyncio.timeout(20):
            while looks < 6:
                await asyncio.sleep(0)
        watching.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners_watch, "LOOK_SECONDS", 0.0)
        asyncio.run(scenario())
    assert volunteer.is_held
    assert caplog.text.count("a sensor is gone") == 1


@pytest.mark.parametrize(("conditions", "looks"), [("", 1), ("battery", 2)])
def test_training_begins_when_no_condition_can_be_missed(conditions: str, looks: int) -> None:
    seen: list[Facts] = []

    def look() -> Facts:
        seen.append(Facts(NOON))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners_watch, "LOOK_SECONDS", 0.0)
        assert asyncio.run(OwnersWatch(parse_conditions(conditions), look=look).wait_until_wanted())
    assert len(seen) == looks


# Sleep ----------------------------------------------------------------------------------------------------------------
def test_a_machine_that_has_slept_says_so_and_joins_again() -> None:
    machine = Machine()
    machine.look(after=2, asleep=7200)
    assert machine.said[0] == "this machine has slept for 2.0 h"
    assert machine.volunteer.has_left
    assert machine.watch.comes_back


def test_a_machine_that_has_slept_past_the_moment_to_leave_does_not_come_back() -> None:
    """It began again, and trained for another day."""
    machine = Machine(until=NOON + timedelta(minutes=5))
    machine.look(after=2, asleep=7200)
    assert machine.said[1:] == ["it is 12:05: leaving the run"]
    assert machine.volunteer.has_left
    assert not machine.watch.comes_back


def test_a_nap_that_others_wait_for_is_only_told_of() -> None:
    machine = Machine()
    machine.look(after=2, asleep=5)
    assert machine.said == ["this machine has slept for 5 s"]
    assert not machine.volunteer.has_left


def test_only_the_difference_of_the_clocks_is_sleep() -> None:
    said: list[str] = []
    watch = OwnersWatch(say=said.append)
    for awake, since_start in (
        (10.0, 500.0),  # it may have slept before we began
        (4000.0, 4490.0),  # a process that was stopped: both clocks went on
        (4001.0, 4492.5),  # clocks are read one after the other
    ):
        watch.observe(Facts(NOON), awake, since_start)
    assert said == []
    watch.observe(Facts(NOON), 4002.0, 4593.5)
    assert said == ["this machine has slept for 2 min"]
