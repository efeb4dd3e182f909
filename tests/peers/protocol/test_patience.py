"""For how long a member waits for its leader, alone."""

from __future__ import annotations

import pytest

from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.patience import ATTEMPTS, Patience
from peers.simulator.simulated_keys import SimulatedKeys
from tests.peers.builders import SETTINGS, SIZE, attempt, first_log, inspect


def patience() -> tuple[Patience, Presence]:
    presence = Presence("b", 10.0, 40.0, bar=20.0, now=0.0)
    desk = Desk("b", SETTINGS, SIZE, 0.0, incarnation=0, keys=SimulatedKeys("b"), inspect=inspect)
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
    desk = Desk("b", SETTINGS, SIZE, 0.0, incarnation=0, keys=SimulatedKeys("b"), inspect=inspect)
    one, log = Patience(desk, patience()[1], first_log()), first_log()
    assert one.decline(attempt(log, 1))
    assert not one.decline(attempt(log, 1)), "it is said once"
    assert not one.is_over("a"), "it may have seen fewer than we do for a moment"
    desk.now = desk.schedule.death + 1
    one.decline(attempt(log, 2))
    assert one.is_over("a")
    one.join()
    assert not one.is_over("a"), "it has seen more, and begins an attempt that we take part in"


def test_nobody_gives_up_on_itself() -> None:
    one, presence = patience()
    for _ in range(2 * ATTEMPTS):
        one.attempt_ended("b", is_mute=False)
    assert not presence.distrusted
