"""Who can exchange nothing with whom, and who of them is the one to be left out."""

from __future__ import annotations

from peers.log.settings import Timing
from peers.protocol.disputes import Disputes

TIMING = Timing(heartbeat=2.0, heartbeat_expiry=10.0)


def test_what_passes_soon_is_no_dispute() -> None:
    disputes = Disputes(TIMING)
    disputes.says("a", ["b"], 0.0)
    disputes.heard("b", 9.0)
    assert not disputes.has_lasted("a", "b", 9.9)
    assert disputes.has_lasted("a", "b", 10.0)
    disputes.says("a", [], 10.5)
    disputes.says("a", ["b"], 11.0)
    disputes.heard("b", 20.0)
    assert not disputes.has_lasted("a", "b", 20.5), "it began anew"


def test_who_says_nothing_may_be_dead() -> None:
    disputes = Disputes(TIMING)
    disputes.says("a", ["b"], 0.0)
    assert not disputes.has_lasted("a", "b", 50.0)


def test_one_that_most_are_at_odds_with_is_the_one_to_leave_out() -> None:
    disputes = Disputes(TIMING)
    for member in "abc":
        disputes.says(member, ["f"], 0.0)
    assert disputes.outcasts("abcdef") == {"f"}
    assert disputes.outcasts("abcdefgh") == set(), "not most of them"


def test_so_is_one_that_says_it_of_most_others() -> None:
    disputes = Disputes(TIMING)
    disputes.says("f", "abcde", 0.0)
    assert disputes.outcasts("abcdef") == {"f"}


def test_of_a_pair_nobody_knows_which() -> None:
    disputes = Disputes(TIMING)
    disputes.says("a", ["b"], 0.0)
    disputes.says("b", ["a"], 0.0)
    for members in ("ab", "abc", "abcd"):
        assert disputes.outcasts(members) == set()
    disputes.says("a", [], 0.0)
    disputes.says("b", [], 0.0)
    assert disputes.outcasts("ab") == set()
