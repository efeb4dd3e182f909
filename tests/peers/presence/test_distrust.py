"""For how long a peer is not taken for a leader again."""

from __future__ import annotations

import pytest

from peers.presence.distrust import DOUBLINGS, Distrust
from peers.presence.standing import FORGIVEN

FIRST = 40.0


def test_each_failure_counts_for_twice_as_long_until_it_is_forgotten() -> None:
    distrust, now = Distrust(FIRST), 0.0
    for times in [*range(DOUBLINGS + 1), DOUBLINGS]:
        distrust.failed("a", now)
        now += FIRST * 2**times
        assert distrust.of(now - 0.1) == {"a"}
        assert distrust.of(now) == set()
    now += FORGIVEN
    distrust.failed("a", now)
    assert distrust.of(now + FIRST) == set()


def test_who_fails_while_it_is_distrusted_has_failed_once() -> None:
    """Several may say so, of one and the same failure."""
    distrust = Distrust(FIRST)
    for now in (0.0, 1.0, 2.0):
        distrust.failed("a", now)
    assert distrust.of(2.0 + FIRST) == set()
    distrust.failed("a", 2.0 + FIRST)
    assert distrust.of(2.0 + 2 * FIRST) == {"a"}


@pytest.mark.parametrize("cost", [10.0, 600.0])
def test_a_failure_counts_for_no_less_than_it_cost(cost: float) -> None:
    distrust = Distrust(FIRST)
    distrust.failed("a", 0.0, cost)
    assert distrust.is_on("a", max(cost, FIRST) - 0.1)
    assert not distrust.is_on("a", max(cost, FIRST))


def test_what_is_lifted_is_not_forgotten() -> None:
    distrust = Distrust(FIRST)
    distrust.failed("a", 0.0)
    distrust.failed("b", 0.0)
    distrust.lift("a")
    assert distrust.of(0.0) == {"b"}
    distrust.lift()
    assert distrust.of(0.0) == set()
    distrust.failed("a", 0.0)
    assert distrust.is_on("a", 2 * FIRST - 0.1)
