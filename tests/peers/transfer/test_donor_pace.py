"""The pace of donors, from the times that they take."""

from __future__ import annotations

import pytest

from peers.transfer.download import SILENT, _DonorPace, _Request

SIZE = 100  # bytes


def pace(seconds: float = 2.0) -> _DonorPace:
    """Donor "a" takes so long."""
    pace = _DonorPace()
    pace.answered(_Request("a", SIZE, 10.0), 10.0 + seconds)
    return pace


def test_what_a_donor_takes_is_known_once_it_has_given_something() -> None:
    known = pace(2.0)
    assert known.seconds("a", SIZE) == pytest.approx(2.0)
    assert known.seconds("a", 3 * SIZE) == pytest.approx(6.0)
    assert known.seconds("b", SIZE) == SILENT
    known.answered(_Request("a", SIZE, 20.0), 24.0)
    assert known.seconds("a", SIZE) == pytest.approx(3.0), "the latest counts as much as all before"


@pytest.mark.parametrize(("elapsed", "left"), [(0.5, 1.5), (2.0, 0.0), (3.9, 0.0), (4.1, 4.1), (100.0, 100.0)])
def test_a_donor_that_is_overdue_takes_as_long_again(elapsed: float, left: float) -> None:
    known = pace(2.0)
    assert known.seconds_left(_Request("a", SIZE, 50.0), 50.0 + elapsed) == pytest.approx(left)
    assert known.seconds_left(_Request("b", SIZE, 50.0), 50.0 + elapsed) == pytest.approx(elapsed), "not known"
