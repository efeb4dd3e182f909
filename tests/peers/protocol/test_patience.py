"""For how long a member waits for its leader, alone."""

from __future__ import annotations

import pytest

from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.patience import ATTEMPTS, Patience
from tests.peers.builders import PAYLOADS, SETTINGS, attempt, first_log
from tests.simulator.simulated_keys import SimulatedKeys


def patience() -> tuple[Patience, Presence]:
    presence = Presence("b", 10.0, 40.0, bar=20.0, now=0.0)
    desk = Desk("b", SETTINGS, PAYLOADS, 0.0, incarnation=0, keys=SimulatedKeys("b"))
    return Patience(desk, presence, first_log()), presence


@pytest.mark.parametrize(("is_mute", "attempts"), [(False, ATTEMPTS), (True, 2)])
def test_a_leader_that_ends_attempt_after_attempt_is_given_up(is_mute: bool, attempts: int) -> None:
    """Sooner if it gave us nothing that it owed; and then at once when it comes back."""
    one, presence = patience()
    for _ in range(attempts - 1):
        one.attempt_ended("a", is_mute)
        assert "a" not in presence.distrusted
    one.attempt_ended("a", is_mute)
    assert "a" in presence.distrusted
    presence.now += 40.0  # until it is trusted again
    for _ in range(1 if is_mute else ATTEMPTS):
        assert "a" not in presence.distrusted
        one.attempt_ended("a", is_mute)
    assert "a" in presence.distrusted


def test_whoever_is_given_up_stays_so_until_another_one_is_asked() -> None:
    """As long as most others stay with it, so do we, though our vote is for another one."""
    one, presence = patience()
    one.give_up("a")
    presence.now += 40.0
    assert not presence.distrusted
    assert one.is_over("a")
    one.give_up("a")
    assert "a" in presence.distrusted
    one.begin()
    assert not one.is_over("c")


def test_a_leader_that_hands_on_what_is_declined_in_attempt_after_attempt_is_left() -> None:
    desk = Desk("b", SETTINGS, PAYLOADS, 0.0, incarnation=0, keys=SimulatedKeys("b"))
    one, log = Patience(desk, patience()[1], first_log()), first_log()
    assert one.decline(attempt(log, 1))
    assert not one.decline(attempt(log, 1)), "it is said once"
    assert not one.is_over("a"), "it may have seen fewer than we do for a moment"
    desk.now = desk.schedule.death + 1
    one.decline(attempt(log, 2))
    assert one.is_over("a")
    one.join("a", 1.0)
    assert not one.is_over("a"), "it has seen more, and begins an attempt that we take part in"


def test_nobody_gives_up_on_itself() -> None:
    one, presence = patience()
    for _ in range(2 * ATTEMPTS):
        one.attempt_ended("b", is_mute=False)
    assert not presence.distrusted


def test_the_time_in_which_a_leader_waits_for_others_is_no_time_of_its_attempts() -> None:
    """Regression: a leader that had to wait for the partition grace after its first attempt was given up in the moment
    in which it began the second one."""
    one, presence = patience()
    desk, schedule = one._desk, one._desk.schedule
    longest = schedule.given_up(schedule.longest_attempt)
    one.join("a", 1.0)
    desk.now = presence.now = 1.0
    one.leave()
    desk.now = presence.now = 3 * longest
    assert one.join("a", 10 * longest) == 4 * longest - 1.0


def test_all_attempts_of_a_leader_together_get_the_time_of_the_longest() -> None:
    """Regression: a leader that began one attempt after another, and ended none, led for ever."""
    one, presence = patience()
    desk, schedule = one._desk, one._desk.schedule
    longest = schedule.given_up(schedule.longest_attempt)
    assert one.join("a", 1.0) == schedule.given_up(1.0)
    assert one.join("a", 10 * longest) == longest, "whatever it says"
    desk.now = presence.now = longest - 1
    assert one.join("a", 100.0) == longest
    one.give_up("a")
    assert one.join("a", 100.0) == longest, "whoever has given it up may be drawn in by it, but not for long"
    presence.now += longest
    desk.now = presence.now
    assert "a" not in presence.distrusted
    assert one.join("a", 1.0) == desk.now + schedule.given_up(1.0), "later it has another chance"


def test_whoever_comes_to_nothing_as_its_own_leader_trusts_others_again() -> None:
    """Else all would distrust each other for longer and longer, where only the network was to blame."""
    one, presence = patience()
    one.give_up("a")
    one.give_up("b")
    assert not presence.distrusted
