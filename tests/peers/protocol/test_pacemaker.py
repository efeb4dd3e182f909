"""The view timer: when the next leader's turn comes, and when it does not (R1, R2)."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from peers.protocol.pacemaker import LONGEST, MARGIN, Pacemaker, RoundTimes, death, named_by_quorum
from tests.peers.logs import TIMING

RING = "abcd"
GRACE = 30.0
USUAL = 10.0


class Clock:
    """A pacemaker among four voters, all of whom are heard unless a test says otherwise."""

    def __init__(self, usual: float | None = USUAL) -> None:
        times = RoundTimes()
        if usual is not None:
            times.note(usual)
        self.now, self.heard, self.named = 0.0, set(RING), 0
        self.pacemaker = Pacemaker(TIMING, times, 0.0)
        self.look()

    def look(self, seconds: float = 0.0, is_running: bool = True) -> Clock:
        """Let so much time pass, a second each time."""
        for _ in range(int(seconds) or 1):
            self.now += min(seconds, 1.0)
            self.pacemaker.look(
                self.now,
                lambda view: RING[view % len(RING)],
                self.heard.__contains__,
                len(RING),
                is_running,
                GRACE,
                self.named,
            )
        return self

    @property
    def at(self) -> tuple[int, str | None, int]:
        return self.pacemaker.view, self.pacemaker.leader, self.pacemaker.reached


LIMIT = GRACE + MARGIN * USUAL


def test_a_timer_that_ends_is_told_and_the_leader_stays_until_a_quorum_turns() -> None:
    clock = Clock().look(LIMIT)
    assert clock.at == (0, "a", 0)
    assert clock.look(1).at == (0, "a", 1)
    assert clock.look(3 * LIMIT).at == (0, "a", 1), "others need more time, or do not hear what we hear"
    clock.named = 1
    assert clock.look(1).at == (1, "b", 1)


def test_a_timer_runs_only_while_a_quorum_is_ready() -> None:
    assert Clock().look(10 * LIMIT, is_running=False).at == (0, "a", 0)


def test_before_any_round_was_measured_a_view_lasts_as_long_as_a_round_may() -> None:
    clock = Clock(usual=None)
    assert clock.look(GRACE + TIMING.round_timeout).at == (0, "a", 0)
    assert clock.look(1).at == (0, "a", 1)


def test_a_dead_leader_is_passed_over_at_once_and_comes_back() -> None:
    clock = Clock()
    clock.heard = set("bcd")
    assert clock.look().at == (1, "b", 1)
    clock.heard = set("cd")
    assert clock.look().at == (2, "c", 2)
    clock.heard = set(RING)
    assert clock.look().at == (0, "a", 2), "no quorum has turned"


def test_where_none_is_heard_the_leader_stays() -> None:
    clock = Clock()
    clock.heard = set()
    assert clock.look().at == (0, "a", 0)


def test_a_quorum_takes_along() -> None:
    clock = Clock()
    clock.named = 6
    assert clock.look().at == (6, "c", 6)


def test_after_a_vote_no_lower_view_comes_to_anything() -> None:
    clock = Clock()
    clock.pacemaker.voted(2)
    assert clock.look().at == (2, "c", 2)


def test_a_leader_that_has_begun_gets_time_for_its_exchange_once() -> None:
    clock = Clock().look(LIMIT - 1)
    clock.pacemaker.begun(5.0)
    with_exchange = clock.pacemaker.limit(GRACE)
    assert with_exchange == LIMIT + MARGIN * 5.0
    clock.pacemaker.begun(5.0)
    assert clock.look(with_exchange).at == (0, "a", 0)
    assert clock.look(2).at == (0, "a", 1)


def test_an_exchange_gets_no_more_time_than_rounds_usually_need() -> None:
    clock = Clock(usual=1.0)
    clock.pacemaker.begun(10_000.0)
    assert clock.pacemaker.limit(GRACE) == GRACE + MARGIN * (1.0 + death(TIMING))


def test_only_an_exchange_gets_more_time_and_only_after_a_view_that_was_too_short_for_one() -> None:
    silent, slow = Clock().look(LIMIT + 2), Clock()
    slow.pacemaker.begun(1000.0)
    slow.look(slow.pacemaker.limit(GRACE) + 2)
    for clock in (silent, slow):
        assert clock.at[2] == 1
        clock.named = 1
        clock.look()
        assert clock.pacemaker.limit(GRACE) == LIMIT, "until a leader begins"
        clock.pacemaker.begun(1000.0)
    usual = MARGIN * max(MARGIN * USUAL, death(TIMING))
    assert silent.pacemaker.limit(GRACE) == LIMIT + usual
    assert slow.pacemaker.limit(GRACE) == LIMIT + 2 * usual


def test_a_view_that_begins_and_stalls_costs_no_more_however_many_did_before() -> None:
    clock, seconds = Clock(), 20.0
    for view in range(8):
        before = clock.now
        clock.pacemaker.begun(seconds)
        clock.look(2 * LIMIT + MARGIN * seconds + 2)
        assert (clock.at[2], clock.now - before <= 2 * LIMIT + MARGIN * seconds + 2) == (view + 1, True)
        clock.named = view + 1
        clock.look()


def test_a_leader_has_no_longer_to_begin_than_the_longest_and_as_long_as_a_death_takes_to_be_noticed() -> None:
    assert Clock(usual=0.0).pacemaker.limit(0.0) == death(TIMING)
    clock = Clock(usual=10_000.0)
    assert clock.pacemaker.limit(GRACE) == GRACE + LONGEST * TIMING.round_timeout


def test_a_peer_that_slept_does_not_take_that_for_its_leaders_silence() -> None:
    clock = Clock()
    clock.now += 10 * LIMIT
    assert clock.look().at == (0, "a", 0)


def test_what_is_usual_is_a_median_of_the_last_rounds() -> None:
    times = RoundTimes()
    assert times.usual is None
    for seconds in (1.0, 1.0, 1.0, 100.0, 2.0, 3.0):
        times.note(seconds)
    assert times.usual == 2.0


@pytest.mark.parametrize(
    ("views", "named"),
    [
        ({}, 0),
        ({"a": 3}, 0),
        ({"a": 3, "b": 2}, 0),
        ({"a": 3, "b": 2, "c": 1}, 1),
        ({"a": 3, "b": 3, "c": 3, "d": 0}, 3),
        ({"a": 2**61, "b": 1, "c": 1}, 1),
    ],
)
def test_only_a_quorum_names_a_view(views: dict[str, int], named: int) -> None:
    def is_quorum(peers: Collection[str]) -> bool:
        return len(peers) >= 3

    assert named_by_quorum(views, is_quorum) == named
