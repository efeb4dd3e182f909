"""Who reduces, by who reaches whom; and what a peer's word about its link is worth."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.presence.reachability import DOUBT, SEEN_LIMIT, Reachability
from peers.presence.standing import FORGIVEN, REPLANS, Pairs, Standing
from peers.protocol.planning import MOST_PAYLOADS, SLACK, Plan, credible_rates, deal, evened_out, foreseen, plan
from peers.values.chunks import payloads_moved
from peers.values.wire import Reach

NAMES = "abcdef"
PAIRS = st.sets(st.sampled_from(list(combinations(NAMES, 2))))


def pairs(broken: set[tuple[str, str]] | str = "", relayed: set[tuple[str, str]] | str = "") -> Pairs:
    """From pairs, or from words of two letters."""
    standing = Standing(1.0)
    for one in NAMES:
        standing.said(one, _others(one, relayed), _others(one, broken))
    return standing.pairs(NAMES)


def _others(one: str, given_pairs: set[tuple[str, str]] | str) -> set[str]:
    words = given_pairs.split() if isinstance(given_pairs, str) else given_pairs
    return {pair[1] for pair in words if pair[0] == one}


@pytest.mark.parametrize(
    ("broken", "relayed", "reducers", "left_out"),
    [
        ("", "", "abcdef", ""),
        ("bc", "", "adef", ""),
        ("bc de", "", "af", ""),
        ("", "bc", "adef", ""),
        ("", "ab ac ad ae af", "bcdef", ""),
        ("de", "ab", "cf", ""),
        ("ab ac ad ae af", "", "a", "bcdef"),
        ("bc de fa", "", "a", "f"),
        ("fa fb fc fd fe", "", "abcde", "f"),
    ],
    ids=[
        "all reach all",
        "a pair can't talk",
        "two pairs can't",
        "one pair is relayed",
        "one is relayed to all",
        "one pair of each kind",
        "the leader reaches nobody",
        "all are in a broken pair",
        "one reaches nobody",
    ],
)
def test_who_reduces(broken: str, relayed: str, reducers: str, left_out: str) -> None:
    planned = plan("a", NAMES, NAMES, pairs(broken, relayed))
    assert "".join(sorted(planned.left_out)) == left_out
    assert "".join(planned.reducers) == reducers


@given(PAIRS, PAIRS)
def test_all_who_remain_reach_all_who_reduce(broken: set[tuple[str, str]], relayed: set[tuple[str, str]]) -> None:
    known = pairs(broken, relayed)
    planned = plan("a", NAMES, NAMES, known)
    remaining = set(NAMES) - planned.left_out
    assert "a" in remaining
    assert planned.reducers
    for peer in planned.reducers:
        assert peer in remaining
        assert not known.broken_with(peer) & remaining


@given(PAIRS)
def test_nobody_is_left_out_without_need(broken: set[tuple[str, str]]) -> None:
    """Whoever else were the one whom all reach, no fewer could stay."""
    known = pairs(broken)
    planned = plan("a", NAMES, NAMES, known)
    able = [peer for peer in NAMES if "a" not in known.broken_with(peer)]
    assert len(planned.left_out) == min(len(known.broken_with(peer)) for peer in able)


MANY = [f"peer{number:03}" for number in range(100)]


def said_by_one(relayed: list[str], unreached: list[str]) -> Pairs:
    standing = Standing(1.0)
    standing.said(MANY[-1], relayed, unreached)
    return standing.pairs(MANY)


def test_one_member_cannot_have_another_reduce_for_all() -> None:
    """Regression: whoever named all but one made that one carry as many payloads as there are members."""
    planned = plan(MANY[0], MANY, MANY, said_by_one(MANY[1:-1], []))
    assert planned == Plan(tuple(MANY[:-1]), frozenset())
    planned = plan(MANY[0], MANY, MANY, said_by_one([], MANY[1:-1]))
    assert planned == Plan(tuple(MANY[:-1]), frozenset({MANY[-1]}))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_many_relayed_pairs_leave_enough_reducers(share: float) -> None:
    draw = Random(1)
    standing = Standing(1.0)
    for one in MANY:
        standing.said(one, [other for other in MANY if other != one and draw.random() < share], [])
    planned = plan(MANY[0], MANY, MANY, standing.pairs(MANY))
    assert payloads_moved(len(MANY), 1 / len(planned.reducers)) <= MOST_PAYLOADS
    assert not planned.left_out


def test_many_broken_pairs_leave_nobody_out_whom_somebody_reaches() -> None:
    draw = Random(1)
    standing = Standing(1.0)
    for one in MANY[1:]:
        standing.said(one, [], [other for other in MANY[1:] if other != one and draw.random() < 0.3])
    assert plan(MANY[0], MANY, MANY, standing.pairs(MANY)) == Plan((MANY[0],), frozenset())


def test_only_who_has_trained_reduces() -> None:
    assert plan("a", NAMES, "bd", pairs()).reducers == ("b", "d")
    assert plan("a", NAMES, "bd", pairs("bc")).reducers == ("d",)


def test_there_is_no_plan_for_a_leader_that_reaches_nobody_who_has_trained() -> None:
    planned = plan("a", NAMES, "bc", pairs("ab ac"))
    assert (planned.reducers, planned.left_out) == ((), frozenset())


def test_either_of_a_pair_speaks_for_both() -> None:
    standing = Standing(1.0)
    standing.said("a", ["b"], ["c", "stranger"])
    known = standing.pairs("abc")
    assert known.broken_with("c") == {"a"}
    assert known.broken_with("a") == {"c"}
    assert known.relayed_with("b") == {"a"}
    standing.said("a", [], [])
    assert standing.pairs("abc") == Pairs({}, {})


def test_what_fails_in_a_round_is_avoided_until_the_peer_says_otherwise() -> None:
    standing = Standing(1.0)
    standing.said("a", ["b"], [])
    standing.failed("a", ["c"])
    assert standing.pairs("abc").relayed_with("a") == {"b", "c"}
    standing.said("a", [], [])
    assert standing.pairs("abc").relayed_with("a") == frozenset()


# What a claim is worth -----------------------------------------------------------------------------------------
def test_nobody_is_much_faster_than_others_saw() -> None:
    claimed = {"a": 100, "b": 100, "c": 10**9}
    seen = {"a": {"b": 40, "c": 30}, "b": {"a": 50, "c": 40}, "c": {"a": 50, "b": 60}}
    assert credible_rates(claimed, seen) == {"a": 100.0, "b": 100.0, "c": SLACK * 70}


def test_nobody_is_taken_for_slower_than_the_slowest() -> None:
    seen = {"a": {"c": 1}, "b": {"c": 1}, "c": {"a": 1}}
    assert credible_rates({"a": 100, "b": 300, "c": 500}, seen)["c"] == 100.0


@pytest.mark.parametrize("seen", [{}, {"a": {}, "b": {}}, {"d": {"c": 5}}], ids=["nothing", "nobody", "too few"])
def test_too_few_witnesses_are_none(seen: dict[str, dict[str, int]]) -> None:
    claimed = {"a": 100, "b": 100, "c": 500, "d": 100}
    assert credible_rates(claimed, seen)["c"] == 500.0


def test_what_a_peer_saw_of_itself_counts_nothing() -> None:
    seen: dict[str, dict[str, int]] = {"a": {"c": 60}, "b": {"c": 60}, "c": {"c": 10**9}}
    assert credible_rates({"a": 100, "b": 100, "c": 10**9}, seen)["c"] == SLACK * 120


def test_who_was_never_measured_is_as_slow_as_the_slowest() -> None:
    assert credible_rates({"a": 100, "b": 0, "c": 300}, {}) == {"a": 100.0, "b": 100.0, "c": 300.0}
    assert credible_rates({"a": 0, "b": 0}, {}) == {"a": 0.0, "b": 0.0}


def test_shares_are_for_those_who_reduce() -> None:
    rates = dict.fromkeys(NAMES, 10.0)
    assert deal(60, 6, ("a", "b", "c"), rates) == {"a": 20, "b": 20, "c": 20}
    assert deal(60, 6, ("a",), rates) == {"a": 60}


def test_links_that_are_about_alike_are_dealt_as_much() -> None:
    """Regression: each tenth that a measurement was off by made a part a third larger, and all waited for that."""
    rates = {"a": 2.7, "b": 3.0, "c": 3.2, "d": 2.9}
    assert deal(60, 4, tuple(rates), rates) == dict.fromkeys(rates, 15)


def test_three_reduce_however_slow_their_links_are_unless_a_chunk_is_more_than_a_payload() -> None:
    """Regression: one of two reducers sent nothing, and both were left out, since each waited for the other."""
    rates = {"a": 400.0, "b": 20.0, "c": 1.0, "d": 10.0}
    assert deal(60, 4, tuple(rates), rates) == {"a": 58, "b": 1, "c": 0, "d": 1}
    assert deal(60, 4, ("a", "c"), rates) == {"a": 59, "c": 1}
    assert deal(2, 4, tuple(rates), rates) == {"a": 2, "b": 0, "c": 0, "d": 0}
    assert evened_out([10.0, 3.0, 9.0, 2.5, 8.0]) == [9.0, 2.75, 9.0, 2.75, 9.0]
    assert evened_out([1.0, 0.79]) == [1.0, 0.79]
    assert evened_out([0.0, 1.0]) == [0.0, 1.0]
    assert evened_out([]) == []


def test_who_alone_reduces_is_busy_for_longest() -> None:
    """Of six members it gets the blocks of five and sends the average to five."""
    rates = dict.fromkeys(NAMES, 10.0)
    seconds = foreseen({"a": 60}, NAMES, rates, 100)
    assert seconds == [50.0, 20.0, 20.0, 20.0, 20.0, 20.0]
    assert foreseen({"a": 60}, "ab", {"a": 10.0}, 100) == [20.0, 0.0]


# Strikes outlive positions -------------------------------------------------------------------------------------
def test_each_strike_leaves_out_for_longer_until_it_is_forgiven() -> None:
    standing = Standing(10.0)
    standing.bar("a", 0.0)
    assert standing.barred(9.9) == {"a"}
    assert standing.barred(10.0) == frozenset()
    standing.bar("a", 20.0)
    assert standing.barred(39.9) == {"a"}
    standing.bar("a", 41.0 + FORGIVEN)
    assert standing.barred(41.0 + FORGIVEN + 10.0) == frozenset()


def test_a_peer_may_have_few_rounds_planned_anew() -> None:
    standing = Standing(10.0)
    assert [standing.may_replan("a") for _ in range(REPLANS + 1)] == [True] * REPLANS + [False]
    standing.entry_made(["a"])
    assert not standing.may_replan("a"), "it had this very entry planned anew"
    for _ in range(REPLANS + 2):
        standing.entry_made(["a"])
    assert standing.may_replan("a")


def test_who_has_every_entry_planned_anew_is_soon_left_out() -> None:
    """Regression: each entry forgave everything, so that one member could cost all others each round twice more."""
    standing = Standing(10.0)
    believed = 0
    for _ in range(10):
        believed += standing.may_replan("a")
        standing.entry_made(["a", "b"])
    assert believed == REPLANS
    assert standing.may_replan("b")


# How one peer reaches others -----------------------------------------------------------------------------------
def test_links_say_who_is_reached_how() -> None:
    reachability = Reachability(10.0)
    reach = {"a": Reach.OPEN, "b": Reach.PUNCHED, "c": Reach.RELAYED, "d": Reach.NONE}
    assert reachability.observe(reach, {"a": 5, "b": 0})
    assert not reachability.observe(reach, {"a": 7})
    assert reachability.unreached == {"d"}
    assert reachability.detours(0.0) == {"c"}
    assert reachability.seen("z") == (("a", 7),)


def test_a_peer_that_no_chunk_reaches_is_doubted_for_a_while() -> None:
    reachability = Reachability(10.0)
    for now in (0.0, 5.0, 9.0):
        reachability.failed("a", now)
    assert reachability.doubted(9.0) == frozenset()
    reachability.failed("a", 10.0)
    assert reachability.doubted(10.0) == reachability.detours(10.0) == {"a"}
    assert reachability.unreached == frozenset(), "nobody is left out for that"
    assert reachability.doubted(10.0 + DOUBT) == frozenset()


@pytest.mark.parametrize("news", ["a chunk arrived", "another round", "the link changed"])
def test_doubts_end(news: str) -> None:
    reachability = Reachability(10.0)
    reachability.failed("a", 0.0)
    match news:
        case "a chunk arrived":
            reachability.passed("a")
        case "another round":
            reachability.round_begins()
        case _:
            reachability.observe({"a": Reach.PUNCHED}, {})
    reachability.failed("a", 10.0)
    assert reachability.doubted(10.0) == frozenset()


def test_another_fragments_round_is_no_reason_to_doubt_less() -> None:
    """Regression: of several fragments a round begins so often that nobody was ever doubted."""
    reachability = Reachability(10.0)
    reachability.failed("a", 0.0, fragment=1)
    reachability.round_begins(fragment=0)
    reachability.failed("a", 10.0, fragment=1)
    assert reachability.doubted(10.0) == {"a"}


def test_in_a_large_swarm_as_many_speak_of_each() -> None:
    names = [f"{number:04}" for number in range(300)]
    told: dict[str, int] = dict.fromkeys(names, 0)
    for name in names:
        reachability = Reachability(10.0)
        reachability.observe({}, dict.fromkeys(names, 1))
        for peer, _ in reachability.seen(name):
            told[peer] += 1
    assert set(told.values()) == {SEEN_LIMIT}
