"""What is made of the times that donors take, and of what they give."""

from __future__ import annotations

import pytest

from peers.transfer.download import LEAST, SLOWER, UNKNOWN, _DonorPace

SIZE = 100  # bytes
ENOUGH = SLOWER * 4 * SIZE  # bytes


def pace(seconds: float = 2.0) -> _DonorPace:
    """Donor "a" takes so long."""
    pace = _DonorPace(at_once=4)
    pace.answered(pace.ask("a", SIZE, 10.0), 10.0 + seconds)
    return pace


def test_what_a_donor_takes_is_known_once_it_has_given_something() -> None:
    known = pace(2.0)
    assert known.seconds("a", SIZE) == pytest.approx(2.0)
    assert known.seconds("a", 3 * SIZE) == pytest.approx(6.0)
    assert known.seconds("b", SIZE) == UNKNOWN
    known.answered(known.ask("a", SIZE, 20.0), 24.0)
    assert known.seconds("a", SIZE) == pytest.approx(3.0), "the latest counts as much as all before"


@pytest.mark.parametrize(("elapsed", "left"), [(0.5, 1.5), (2.0, 0.0), (3.9, 0.0), (4.1, 4.1), (100.0, 100.0)])
def test_a_donor_that_is_overdue_takes_as_long_again(elapsed: float, left: float) -> None:
    known = pace(2.0)
    assert known.seconds_left(known.ask("a", SIZE, 50.0), 50.0 + elapsed) == pytest.approx(left)
    assert known.seconds_left(known.ask("b", SIZE, 50.0), 50.0 + elapsed) == pytest.approx(elapsed), "not known"


@pytest.mark.parametrize(
    ("given", "elapsed", "is_too_slow"),
    [
        ({"b": ENOUGH}, LEAST, True),
        ({"b": ENOUGH}, LEAST - 1, False),
        ({"b": ENOUGH - 1}, LEAST, False),
        ({"b": ENOUGH, "c": ENOUGH - 2}, LEAST, False),
        ({"b": ENOUGH, "c": ENOUGH}, LEAST, True),
        ({"a": 10 * ENOUGH}, LEAST, False),
        ({}, 10 * LEAST, False),
    ],
)
def test_too_slow_is_who_gives_a_fraction_of_what_others_give_meanwhile(
    given: dict[str, int], elapsed: float, is_too_slow: bool
) -> None:
    one = pace()
    one.given.update(b=10 * ENOUGH)  # before: that does not count
    request = one.ask("a", SIZE, 50.0)
    one.given.update(given)
    assert one.is_too_slow(request, 50.0 + elapsed) is is_too_slow
