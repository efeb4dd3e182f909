"""Who averages how much, by who reaches whom; what claims about links are worth; how long a round may take (R3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.settings import Timing
from peers.log.state import TERM
from peers.presence.reachability import DOUBT, SEEN_LIMIT, Reachability
from peers.protocol.planning import (
    FAIR,
    SLACK,
    ForATerm,
    MemberLink,
    credible_rates,
    deadline,
    deal,
    evened_out,
    foreseen,
    format_for,
    heirs_of,
    reducers,
    seconds_for,
    seconds_to_send,
    shares,
)
from peers.values.chunks import PayloadSize, payloads_moved
from peers.values.wire import Reach
from tests.peers.rounds import round_among, round_with

NAMES = "abcdef"
CHUNKS = 1200
ONE_WAY = st.sets(st.sampled_from([(one, other) for one in NAMES for other in NAMES if one != other]))


def links_of(unreached: str = "", relayed: str = "") -> dict[str, MemberLink]:
    """From words of two letters, the first of which names the other; a `*` names all others."""
    return {
        one: MemberLink(relayed=frozenset(_named(one, relayed)), unreached=frozenset(_named(one, unreached)))
        for one in NAMES
    }


def _named(one: str, words: str) -> set[str]:
    named = {word[1] for word in words.split() if word[0] == one}
    return set(NAMES) - {one} if "*" in named else named


def mutual(*pairs: str) -> str:
    return " ".join(word for pair in pairs for word in (pair, pair[::-1]))


@pytest.mark.parametrize(
    ("unreached", "relayed", "chosen"),
    [
        ("", "", "abcdef"),
        (mutual("bc"), "", "adef"),
        ("bc", "", "abcdef"),
        (mutual("bc", "bd"), "", "aef"),
        ("b*", "", "acdef"),
        ("b* c*", "", "adef"),
        ("ab cb db eb fb", "", "acdef"),
        ("", mutual("bc"), "adef"),
        ("", "bc", "abcdef"),
        ("", "b*", "acdef"),
        ("", "a* b* c* d* e* f*", "abcdef"),
        ("a* b* c* d* e* f*", "", "abcdef"),
        ("b*", "c*", "adef"),
    ],
    ids=[
        "all reach all",
        "a pair without a link",
        "a pair of which one says so",
        "two pairs of one member",
        "one names all",
        "two name all",
        "all others name one",
        "one relayed pair",
        "a relayed pair of which one says so",
        "one is relayed to all",
        "all are relayed to all",
        "no member reaches any",
        "one of each kind",
    ],
)
def test_who_averages(unreached: str, relayed: str, chosen: str) -> None:
    assert "".join(reducers(NAMES, NAMES, links_of(unreached, relayed))) == chosen


def test_in_a_small_swarm_a_pair_without_a_link_averages_nothing() -> None:
    """A third or a half of their work would be absent. The others are reached by all."""
    links = links_of(mutual("ab"))
    assert reducers("abc", "abc", links) == ("c",)
    assert reducers("abcd", "abcd", links) == ("c", "d")
    assert reducers("ab", "ab", links) == ("a", "b"), "there is no other"


@pytest.mark.parametrize("size", range(2, 7))
def test_in_a_small_swarm_a_claim_that_only_one_makes_costs_the_claimant(size: int) -> None:
    names = NAMES[:size]
    few = "".join(name for name in names if name != "b")
    assert "".join(reducers(names, names, links_of("b*"))) == few
    assert "".join(reducers(names, names, links_of("ba"))) in (few, names)


def test_only_members_that_have_trained_average() -> None:
    assert reducers(NAMES, "bd", links_of()) == ("b", "d")
    assert reducers(NAMES, "bd", links_of("b*")) == ("d",)
    dealt = shares(round_among("abc", idle="b").roster, {}, 6)
    assert [(share.member.peer, share.chunks) for share in dealt] == [("a", 3), ("b", 0), ("c", 3)]
    assert [share.chunks for share in shares(round_among("ab", idle="ab").roster, {}, 6)] == [0, 0]


def test_r3_a_leader_deals_nothing_for_a_term_to_a_reducer_that_did_badly() -> None:
    undealt = ForATerm()
    undealt.note("ab", 3)
    undealt.note("b", 5)
    assert undealt.at(3) == {"a"}
    assert undealt.at(5) == {"a", "b"}
    assert undealt.at(2 + TERM) == {"a", "b"}
    assert undealt.at(3 + TERM) == {"b"}


def test_r3_members_that_did_badly_average_nothing_if_others_can() -> None:
    """One with a slow link, or that gives nothing, would else hold up each round."""
    roster = round_among("abcdef").roster
    dealt = {share.member.peer: share.chunks for share in shares(roster, {}, 60, failed="f")}
    assert dealt == {"a": 12, "b": 12, "c": 12, "d": 12, "e": 12, "f": 0}
    for failed in ("abcdef", "bcdef", "xyz"):
        assert {share.chunks for share in shares(roster, {}, 60, failed)} == {10}, "too much for one link"


@given(ONE_WAY, ONE_WAY)
def test_some_member_averages_whatever_they_say(unreached: set[tuple[str, str]], relayed: set[tuple[str, str]]) -> None:
    words = [" ".join(one + other for one, other in sorted(pairs)) for pairs in (unreached, relayed)]
    assert set(reducers(NAMES, "bcd", links_of(*words))) <= set("bcd")
    assert reducers(NAMES, "bcd", links_of(*words))


# Large swarms ---------------------------------------------------------------------------------------------------------
def many(size: int) -> list[str]:
    return [f"peer{number:03}" for number in range(size)]


def broken(names: Sequence[str], share: float, seed: int) -> dict[str, MemberLink]:
    """Links of honest members, this share of whose pairs is broken."""
    draw, pairs = Random(seed), {name: set[str]() for name in names}
    for one, other in combinations(names, 2):
        if draw.random() < share:
            pairs[one].add(other)
            pairs[other].add(one)
    return {name: MemberLink(rate=1000, unreached=frozenset(others)) for name, others in pairs.items()}


def busiest(names: Sequence[str], links: Mapping[str, MemberLink]) -> float:
    """Fair shares that the busiest link carries."""
    dealt = [share.chunks for share in shares(round_among(names).roster, links, CHUNKS)]
    assert sum(dealt) == CHUNKS
    fair = payloads_moved(len(names), 1 / len(names))
    return max(payloads_moved(len(names), chunks / CHUNKS) for chunks in dealt) / fair


@pytest.mark.parametrize(("size", "share"), [(100, 0.05), (300, 0.02), (30, 0.1), (128, 0.2), (12, 0.1)])
@pytest.mark.parametrize("seed", range(5))
def test_no_link_carries_more_than_two_fair_shares(size: int, share: float, seed: int) -> None:
    """Regression: one member that all others reached averaged for all, and its link carried 98 payloads."""
    names = many(size)
    assert busiest(names, broken(names, share, seed)) <= FAIR


@pytest.mark.parametrize("size", [3, 10, 100])
@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_names_all_others_takes_averaging_from_none_of_them(size: int, seed: int) -> None:
    names = many(size)
    honest = broken(names, 0.0 if size < 100 else 0.05, seed)
    liar = names[seed]
    for claim in (
        MemberLink(rate=1000, unreached=frozenset(names) - {liar}),
        MemberLink(rate=1000, relayed=frozenset(names) - {liar}),
        MemberLink(rate=1000, unreached=frozenset(names) - {liar}, relayed=frozenset(names)),
    ):
        before = reducers(names, names, honest)
        after = reducers(names, names, honest | {liar: claim})
        assert set(before) - set(after) <= {liar}
        assert busiest(names, honest | {liar: claim}) <= FAIR


@given(st.integers(0, 99), st.sets(st.integers(0, 99)), st.integers(0, 3))
def test_whatever_one_member_says_costs_one_place_at_most_besides_its_own(
    liar: int, named: set[int], seed: int
) -> None:
    names = many(100)
    honest = broken(names, 0.03, seed)
    claim = MemberLink(rate=1000, unreached=frozenset(names[place] for place in named - {liar}))
    before, after = set(reducers(names, names, honest)), set(reducers(names, names, honest | {names[liar]: claim}))
    assert len(before - after - {names[liar]}) <= 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_many_relayed_pairs_leave_enough_reducers(share: float) -> None:
    draw, names = Random(1), many(100)
    links = {
        one: MemberLink(relayed=frozenset(other for other in names if other != one and draw.random() < share))
        for one in names
    }
    assert busiest(names, links) <= FAIR


def test_most_pairs_without_a_link_leave_some_reducers() -> None:
    names = many(100)
    assert len(reducers(names, names, broken(names, 0.6, 1))) > 10


# Heirs ----------------------------------------------------------------------------------------------------------------
def test_heirs_take_turns() -> None:
    assert heirs_of("xyz", "abc") == (("x", "a"), ("y", "b"), ("z", "c"))
    assert heirs_of("xy", "a") == (("x", "a"), ("y", "a"))
    assert heirs_of("xy", "ab", before=[("x", "a"), ("y", "a")]) == (("x", "b"), ("y", "b"))
    assert heirs_of("x", "a", before=[("x", "a")]) == ()
    assert heirs_of("x", "x") == heirs_of("x", "") == heirs_of("", "a") == ()


# How long an exchange may take ----------------------------------------------------------------------------------------
TIMING = Timing(heartbeat_expiry=10.0, round_timeout=120.0)


@pytest.mark.parametrize(
    ("links", "seconds"),
    [
        ([], 120.0),
        ([0.0, 0.0], 120.0),
        ([1.0, 1.0, 1.0, 1.0], 10.0),
        ([8.0, 8.0, 8.0, 8.0], 24.0),
        ([8.0, 8.0, 8.0, 1000.0], 24.0),
        ([8.0, 8.0, 1000.0], 120.0),
        ([8.0, 0.0], 30.0),
        ([20.0, 0.0], 60.0),
        ([500.0] * 4, 120.0),
    ],
    ids=["none", "none measured", "fast", "alike", "one slow", "a third slow", "one new", "slow and new", "too slow"],
)
def test_an_exchange_has_time_for_most_links(links: list[float], seconds: float) -> None:
    assert deadline(links, TIMING) == seconds


SIZE = PayloadSize(6, 1000, thinner=(500, 30))


def test_links_of_a_round_say_how_long_it_may_take() -> None:
    round = round_with({"a": 3, "b": 3, "c": 0})
    links = {name: MemberLink(rate=100) for name in "abc"}
    assert seconds_for(round, links, SIZE, TIMING) == 3 * 1000 * 2.0 / 100
    assert seconds_for(round, {}, SIZE, TIMING) == TIMING.round_timeout
    assert seconds_for(round, {"a": MemberLink(rate=1000)}, SIZE, TIMING) == 0.25 * TIMING.round_timeout


def test_an_exchange_lasts_for_as_long_as_members_train_on() -> None:
    round, links = round_with({"a": 3, "b": 3, "c": 0}), {name: MemberLink(rate=100) for name in "abc"}
    assert seconds_for(round, links, SIZE, TIMING, overlap=90.0) == 90.0
    assert seconds_for(round, links, SIZE, TIMING, overlap=10.0) == 60.0
    assert seconds_for(round, links, SIZE, TIMING, overlap=1e6) == TIMING.round_timeout


@pytest.mark.parametrize(
    ("uplink", "seconds", "format"),
    [(0.0, 1.0, 0), (100.0, 10.0, 0), (99.0, 10.0, 1), (50.0, 10.0, 1), (49.0, 10.0, 2), (0.1, 10.0, 2)],
    ids=["not measured", "carries all", "nearly", "half", "less", "next to nothing"],
)
def test_r3_a_member_sends_the_first_format_that_its_uplink_carries_in_time(
    uplink: float, seconds: float, format: int
) -> None:
    assert format_for(SIZE, uplink, seconds) == format
    assert format_for(PayloadSize(6, 1000), uplink, seconds) == 0, "there is no other"


@pytest.mark.parametrize(
    ("allowed", "overlap", "seconds"),
    [(None, 0.0, 10.0), (60.0, 0.0, 20.0), (60.0, 30.0, 20.0), (60.0, 50.0, 25.0), (60.0, 500.0, 30.0)],
    ids=["no exchange yet", "as most need", "a short overlap", "half of an overlap", "a long overlap"],
)
def test_r3_blocks_are_out_when_most_members_are_done(allowed: float | None, overlap: float, seconds: float) -> None:
    assert seconds_to_send(allowed, TIMING, overlap) == seconds


@pytest.mark.parametrize(
    ("thin", "reducing"),
    [("d", "abc"), ("cd", "ab"), ("bcd", "a"), ("abcd", "abcd")],
    ids=["one", "half", "all but one", "all"],
)
def test_r3_members_that_send_a_thinner_format_average_nothing_if_others_can(thin: str, reducing: str) -> None:
    roster = round_among("abcd").roster
    members = [one.model_copy(update={"format": int(one.peer in thin)}) for one in roster]
    dealt = {share.member.peer: share.chunks for share in shares(members, {}, CHUNKS)}
    assert "".join(name for name, chunks in dealt.items() if chunks) == reducing


# What a claim is worth ------------------------------------------------------------------------------------------------
def test_nobody_is_much_faster_than_others_saw() -> None:
    claimed = {"a": 100, "b": 100, "c": 10**9}
    seen = {"a": {"b": 40, "c": 30}, "b": {"a": 50, "c": 40}, "c": {"a": 50, "b": 60}}
    assert credible_rates(claimed, seen) == {"a": 100.0, "b": 100.0, "c": SLACK * 70}


def test_nobody_is_taken_for_slower_than_the_slowest() -> None:
    seen = {"a": {"c": 1}, "b": {"c": 1}, "c": {"a": 1}}
    assert credible_rates({"a": 100, "b": 300, "c": 500}, seen)["c"] == 100.0


@pytest.mark.parametrize("seen", [{}, {"a": {}, "b": {}}, {"d": {"c": 5}}], ids=["nothing", "none", "too few"])
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


def test_rates_that_are_about_alike_are_made_the_same() -> None:
    assert evened_out([10.0, 3.0, 9.0, 2.5, 8.0]) == [9.0, 2.75, 9.0, 2.75, 9.0]
    assert evened_out([1.0, 0.79]) == [1.0, 0.79]
    assert evened_out([0.0, 1.0]) == [0.0, 1.0]
    assert evened_out([]) == []


def test_what_a_chunk_costs_decides_whether_a_slow_link_has_any() -> None:
    rates = {"a": 400.0, "b": 20.0, "c": 1.0, "d": 10.0}
    assert deal(60, 4, tuple(rates), rates) == {"a": 60, "b": 0, "c": 0, "d": 0}
    assert deal(2, 4, ("a", "c"), {"a": 1.0, "c": 1.0}) == {"a": 1, "c": 1}


def test_a_lone_reducer_is_busy_for_longest() -> None:
    """Of six members it gets the blocks of five and sends the average to five."""
    rates = dict.fromkeys(NAMES, 10.0)
    seconds = foreseen({"a": 60}, NAMES, rates, 100)
    assert seconds == [50.0, 20.0, 20.0, 20.0, 20.0, 20.0]
    assert foreseen({"a": 60}, "ab", {"a": 10.0}, 100) == [20.0, 0.0]


# How one peer reaches others ------------------------------------------------------------------------------------------
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
