"""Who leads, who is enough, who holds an attempt up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.state import take_order
from peers.presence.election import culprits, elect, quorum

NAMES = st.sets(st.sampled_from("abcdefg"))


@pytest.mark.parametrize(
    ("roster", "able", "candidates", "leader"),
    [
        ("bac", "abc", "", "b"),
        ("bac", "ac", "b", "a"),
        ("bac", "xy", "b", "x"),
        ("", "cb", "a", "b"),
        ("bac", "", "ca", "a"),
        ("bac", "", "", None),
    ],
)
def test_succession_is_roster_order(roster: str, able: str, candidates: str, leader: str | None) -> None:
    assert elect(roster, set(able), set(candidates)) == leader


@pytest.mark.parametrize(
    ("roster", "left", "ready", "enough"),
    [
        ("abc", "", "ab", True),
        ("abc", "", "a", False),
        ("ab", "", "a", False),
        ("abcd", "", "ab", False),
        ("abc", "", "axyz", False),
        ("abc", "c", "a", False),
        ("abc", "bc", "a", True),
        ("abc", "abc", "", True),
        ("", "", "", True),
        ("abc", "a", "a", False),
    ],
)
def test_more_than_half_of_those_who_have_not_left(roster: str, left: str, ready: str, enough: bool) -> None:
    assert quorum(roster, set(left), set(ready)) is enough


@given(st.permutations("abcdefg"), NAMES, NAMES)
def test_two_quorums_share_a_member(roster: list[str], first: set[str], second: set[str]) -> None:
    if quorum(roster, (), first) and quorum(roster, (), second):
        assert first & second


def test_old_members_keep_their_order_and_newcomers_follow() -> None:
    assert take_order("cab", "zabyc") == list("cabyz")


@pytest.mark.parametrize(
    ("complete", "waiting", "who"),
    [
        ("", {}, "abc"),
        ("a", {"b": "c"}, "c"),
        ("ac", {"b": "a"}, "a"),
        ("", {"a": "c", "b": "c", "c": ""}, "c"),
        ("", {"a": "bc", "b": "c", "c": "a"}, "c"),
        ("abc", {}, ""),
        ("ab", {"c": "z"}, ""),
    ],
)
def test_culprits(complete: str, waiting: dict[str, str], who: str) -> None:
    missing = {peer: tuple(names) for peer, names in waiting.items()}
    assert culprits("abc", set(complete), missing) == tuple(who)
