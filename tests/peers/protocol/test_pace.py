"""How much peers of different speeds train, and how long those who are ready wait (R7, R16)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peers.log.settings import Timing
from peers.protocol.awaited import ReadyTimes
from peers.protocol.pace import Pace

FASTEST = 1000.0
TIMING = Timing(heartbeat=2.0, grace=10.0, partition_grace=60.0)


def pace(training: float, inner_steps: int = 100, smallest_share: float = 0.125) -> Pace:
    """Of a run whose fastest peer trains for so many seconds."""
    return Pace(inner_steps, round(training * FASTEST), smallest_share, TIMING)


@pytest.mark.parametrize("own", [5e-324, 0.01, FASTEST])
def test_r16_no_speed_that_others_claim_is_too_high_to_reckon_with(own: float) -> None:
    """A quotient that is infinite has no whole number."""
    lasting = replace(pace(300.0), contributions=0.5)
    assert lasting.steps_beside(own, [1.7e308]) == lasting.least_steps


@pytest.mark.parametrize(
    ("training", "grace"),
    [
        (1.0, 6.0),  # three heartbeats
        (32.0, 8.0),  # a quarter of it
        (100.0, 10.0),  # the manifest's
        (200.0, 10.0),
        (300.0, 15.0),  # one twentieth
        (3600.0, 60.0),  # the partition grace
    ],
)
def test_the_grace_grows_with_the_training(training: float, grace: float) -> None:
    assert pace(training).grace(training) == grace


@pytest.mark.parametrize(
    ("training", "speed", "steps"),
    [
        (20.0, 1.0, 100),
        (20.0, 0.88, 100),  # 2.7 seconds later
        (20.0, 0.85, 85),
        (12.0, 0.79, 79),  # 3.2 seconds later, for which everybody would wait each time
        (300.0, 0.98, 100),  # 6.1 seconds later than all others, who wait for 15
        (300.0, 0.95, 95),
        (300.0, 0.85, 85),
        (300.0, 0.01, 13),  # the smallest share
        (3600.0, 0.99, 99),
        (3600.0, 0.995, 100),
    ],
)
def test_a_peer_makes_as_many_inner_steps_as_it_makes_in_time(training: float, speed: float, steps: int) -> None:
    assert pace(training).steps(speed * FASTEST, FASTEST) == steps


@pytest.mark.parametrize(
    ("speed", "steps"),
    [
        (0.95, 95),
        (0.99, 100),
        (0.2, 20),
        (0.12, 22),  # two cycles of 12, less 5 %; the smallest share, 13, would idle for most of the second
        (1 / 16, 17),  # three cycles of 6.25, less 5 %
        (0.04, 13),  # more cycles than it may be late
    ],
)
def test_whoever_is_late_in_an_asynchronous_run_fills_whole_cycles(speed: float, steps: int) -> None:
    lasting = replace(pace(300.0), contributions=0.5, staleness=2)
    assert lasting.steps(speed * FASTEST, FASTEST) == steps


@pytest.mark.parametrize(
    ("training", "overlap", "round", "slack"),
    [
        (300.0, 0, 0.0, 15.0),  # what speeds are off by
        (20.0, 0, 0.0, 2.0),  # a heartbeat
        (100.0, 9, 0.0, 9.0),  # nobody idles before
        (100.0, 9, 3.0, 6.0),
        (100.0, 9, 30.0, 5.0),
        (100.0, 50, 0.0, 10.0),  # as long as in a synchronous run
    ],
)
def test_the_slack_is_what_costs_nobody_anything(training: float, overlap: int, round: float, slack: float) -> None:
    lasting = replace(pace(training), contributions=0.5, overlap=overlap)
    assert lasting.slack(training, round) == slack


def test_fragments_come_so_much_more_often() -> None:
    assert replace(pace(300.0), contributions=0.5, fragments=3).slack(300.0) == 5.0


def test_nobody_makes_more_than_all_of_them() -> None:
    assert pace(300.0).steps(2 * FASTEST, FASTEST) == 100
    assert pace(300.0).steps(FASTEST, 0.0) == 100, "nobody else has said how fast it is"
    assert pace(300.0, inner_steps=3, smallest_share=1.0).steps(0.1 * FASTEST, FASTEST) == 3


@pytest.mark.parametrize(("speed", "steps"), [(0.0, 100), (1.0, 100), (0.8, 100), (0.5, 50), (0.001, 10)])
def test_a_slower_peer_trains_less_and_a_newcomer_a_whole_lease(speed: float, steps: int) -> None:
    lasting = replace(pace(8.0), smallest_share=0.1)
    assert lasting.steps_beside(speed * FASTEST, [FASTEST]) == steps


@pytest.mark.parametrize(("speed", "is_too_slow"), [(0.06, False), (0.04, True), (0.0, False)])
def test_a_peer_is_too_slow_that_trains_no_lease_in_time(speed: float, is_too_slow: bool) -> None:
    """Its lease lasts for two entries (staleness 1). A newcomer's speed is not known."""
    assert replace(pace(8.0), smallest_share=0.1).is_too_slow(speed * FASTEST, FASTEST) == is_too_slow


@pytest.mark.parametrize(
    ("contributions", "speed", "steps"), [(None, 20.0, 2), (0.5, 20.0, 1), (0.5, 500.0, 4), (0.5, 0.0, 8)]
)
def test_a_grant_is_trained_in_time_where_nobody_waits(contributions: float | None, speed: float, steps: int) -> None:
    """Regression: the pool keeps no grants, so a peer that trained the smallest share of one came too late each time,
    and was never let in."""
    lasting = replace(pace(8.0, inner_steps=10, smallest_share=0.2), contributions=contributions)
    assert lasting.steps_of_grant(8, speed, [FASTEST]) == steps


@pytest.mark.parametrize("others", [[1e300, 100.0], [1e-300, 100.0], [1e300, 1e300, 100.0, 100.0]])
@pytest.mark.parametrize("contributions", [None, 0.5])
def test_a_minority_of_liars_lets_others_train_at_least_the_smallest_lease(
    contributions: float | None, others: list[float]
) -> None:
    """Regression: in an asynchronous run one false speed had each newcomer make one inner step of its grant."""
    lasting = replace(pace(8.0, inner_steps=10, smallest_share=0.2), contributions=contributions)
    least = lasting.steps_of_grant(10, 100.0, others)
    assert least >= 2
    assert lasting.steps_beside(100.0, others) in (10, least)
    assert lasting.steps_of_grant(10, 50.0, [1e-300, 100.0, 100.0]) == 5, "nor more than others"


def test_the_slack_counts_no_more_training_than_most_others_need() -> None:
    lasting = replace(pace(50.0), contributions=0.5, overlap=20)
    assert lasting.slack(None) == lasting.grace(None) == TIMING.grace, "no training was measured"
    assert lasting.slack(40.0) == 8.0
    assert lasting.slack(200.0, median_speed=2 * FASTEST) == 5.0, "most others need 25 seconds"


def test_the_grace_begins_when_most_voters_are_ready() -> None:
    times, everybody = ReadyTimes(), {"a", "b", "late", "stranger"}
    assert times.of_most({"a"}, everybody) == math.inf
    times.note("late", 10.0)
    times.note("stranger", 11.0)
    assert times.of_most({"a", "b", "late"}, everybody) == math.inf
    times.note("a", 300.0)
    times.note("a", 310.0)
    assert times.of_most({"a", "b", "late"}, everybody) == 300.0
    assert times.of_most({"a", "b", "late"}, everybody - {"late"}) == math.inf, "one took it back"
    assert times.of_most({"a", "late"}, everybody) == 300.0, "both of two"
    assert times.of_most(set(), everybody) == 10.0


def test_enough_contribute_when_a_share_of_those_who_can_is_ready() -> None:
    times, able = ReadyTimes(), {"a", "b", "c", "d"}
    for now, peer in enumerate("abz"):
        times.note(peer, float(now))
    assert times.of_share(0.25, able, {"a", "b"}) == 0.0
    assert times.of_share(0.5, able, {"a", "b"}) == 1.0
    assert times.of_share(0.51, able, {"a", "b"}) == math.inf, "it takes three"
    assert times.of_share(0.5, able, {"b"}) == math.inf, "a has taken it back"
    assert times.of_share(0.1, set(), {"b"}) == 1.0, "at least one"
