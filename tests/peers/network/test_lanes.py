"""How many connections a round uses, on a clock of ours."""

from __future__ import annotations

from collections.abc import Callable

from peers.network.throttle import FEWEST, IN_ALL, LASTS, MOST, MOST_WITH_BBR, SETTLING, Lanes

CHUNK = 1 << 19  # bytes


class Link:
    """Carries `rate(lanes)` bytes a second over so many connections."""

    def __init__(self, rate: Callable[[int], float], most: int = MOST) -> None:
        self.now = 0.0
        self.rate = rate
        self.lanes = Lanes(FEWEST, most, lambda: self.now)
        self.widened: list[int] = []

    def round(self, chunks: int = 5_000, has_more: bool = True, others: int = 3) -> int:
        """Send so many chunks; returns how many connections are used in the end."""
        self.lanes.begin_round(others)
        for _ in range(chunks):
            self.now += CHUNK / self.rate(self.lanes.count)
            if self.lanes.passed(CHUNK, has_more):
                self.widened.append(self.lanes.count)
        return self.lanes.count


def test_each_connection_carries_as_much_as_the_others_so_all_are_used() -> None:
    link = Link(lambda lanes: 1e6 * lanes)
    assert link.round() == MOST
    assert link.widened == [8, 16, 32, 64]
    assert link.round() == MOST
    assert link.widened == [8, 16, 32, 64], "no more than that"


def test_a_link_that_is_full_anyway_keeps_the_fewest() -> None:
    link = Link(lambda lanes: 25e6)
    assert link.round() == FEWEST
    assert link.widened == [2 * FEWEST], "it was tried"


def test_a_sole_other_member_gets_as_many_as_several_together() -> None:
    link = Link(lambda lanes: 25e6)
    assert link.round(others=1) == IN_ALL
    assert link.widened == [2 * IN_ALL], "more were tried"
    assert Link(lambda lanes: 1e6 * lanes, MOST_WITH_BBR).round(others=1) == MOST_WITH_BBR


def test_what_was_found_lasts_and_is_tried_again_now_and_then() -> None:
    limit = 18
    link = Link(lambda lanes: 1e6 * min(lanes, limit))
    counts = [link.round() for _ in range(LASTS - 2)]
    assert set(counts) == {16}
    limit = 1000
    assert link.round() == 16
    assert link.round() == MOST, "the link has become better, and it is time to look"


def test_where_nothing_waits_connections_are_not_too_few() -> None:
    link = Link(lambda lanes: 1e6 * lanes)
    assert link.round(has_more=False) == FEWEST
    assert link.widened == []


def test_a_rate_is_taken_over_enough_chunks_or_a_long_time() -> None:
    fast = Link(lambda lanes: 1e12)
    assert fast.round(chunks=1000) == FEWEST, "less than half a second has passed"
    slow = Link(lambda lanes: CHUNK / 4.0)
    assert slow.round(chunks=3) == 2 * FEWEST, "four seconds have"


def test_a_slow_start_is_not_taken_for_too_few_connections() -> None:
    """Regression: what a round begins with was slower than what followed, and that was put down to more connections."""
    began = 0.0
    link = Link(lambda lanes: 5e6 if link.now - began < SETTLING else 25e6)
    for _ in range(5):
        began = link.now
        assert link.round(chunks=500) <= 2 * FEWEST
    assert link.lanes.count == FEWEST


def test_with_bbr_few_connections_are_enough() -> None:
    assert Link(lambda lanes: 1e6 * lanes, MOST_WITH_BBR).round() == MOST_WITH_BBR


def test_a_pause_does_not_count_as_slowness() -> None:
    link = Link(lambda lanes: 1e6 * lanes)
    link.lanes.begin_round(3)
    link.lanes.passed(CHUNK, True)
    link.now += 100.0
    link.lanes.passed(CHUNK, False)
    link.now += 100.0
    assert link.round() == MOST
