"""How much peers of different speeds train, and how long those who are ready wait."""

from __future__ import annotations

import math

import pytest

from peers.log.settings import Timing
from peers.protocol.pace import Pace, ReadyTimes

FASTEST = 1000.0
TIMING = Timing(heartbeat=2.0, grace=10.0, partition_grace=60.0)


def pace(training: float, inner_steps: int = 100, smallest_share: float = 0.125) -> Pace:
    """Of a run whose fastest peer trains for so many seconds."""
    return Pace(inner_steps, round(training * FASTEST), smallest_share, TIMING)


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


def test_nobody_makes_more_than_all_of_them() -> None:
    assert pace(300.0).steps(2 * FASTEST, FASTEST) == 100
    assert pace(300.0).steps(FASTEST, 0.0) == 100, "nobody else has said how fast it is"
    assert pace(300.0, inner_steps=3, smallest_share=1.0).steps(0.1 * FASTEST, FASTEST) == 3


@pytest.mark.parametrize(("training", "grace"), [(1.0, 6.0), (32.0, 8.0), (300.0, 10.0), (3600.0, 10.0)])
def test_whoever_is_late_each_time_is_not_waited_for_longer_in_long_training(training: float, grace: float) -> None:
    assert pace(training).shortest_grace(training) == grace


def test_the_grace_begins_when_most_voters_are_ready() -> None:
    times, everybody = ReadyTimes(), {"a", "b", "late", "stranger"}
    assert not times
    assert times.of_most({"a"}, everybody) == math.inf
    times.note("late", 10.0)
    times.note("stranger", 11.0)
    assert times.of_most({"a", "b", "late"}, everybody) == math.inf
    times.note("a", 300.0)
    times.note("a", 310.0)
    assert times.of_most({"a", "b", "late"}, everybody) == 300.0
    assert times.of_most({"a", "b", "late"}, everybody - {"late"}) == math.inf, "one took it back"
    assert times.of_most({"a", "late"}, everybody) == 300.0, "both of two"
    assert times.of_most(set(), everybody) == times.first == 10.0
    times.restart(400.0)
    assert times.of_most({"a", "b", "late"}, everybody) == 400.0
