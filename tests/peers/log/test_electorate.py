"""Who has a say in the next entry: the roster, and all that had one before and are not gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from peers.log.certificate import electorate
from peers.log.chain import follow, outcome_of
from peers.log.header import BYSTANDER_LIMIT, MEMBER_LIMIT, Fault, Header, Member
from peers.log.state import TERM, LogError, LogState, _place_of_turn
from peers.values.wire import pack, unpack
from tests.peers.logs import LOG, PAYLOAD, member, next_header


def founded(empty: LogState = LOG) -> LogState:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcde")]
    return empty.append(next_header(empty, roster, PAYLOAD))


FOUNDED = founded()


def entry(log: LogState, names: str, gone: Sequence[str] = (), faults: Sequence[Fault] = ()) -> Header:
    roster = [log.expected(name, None if name in log.known else 0) for name in names]
    return next_header(log, roster, PAYLOAD, faults, gone)


def test_whoever_has_a_say_keeps_it_until_it_is_gone() -> None:
    log = FOUNDED.append(entry(FOUNDED, "abc", "e"))
    assert log.roster == ("a", "b", "c")
    assert log.voters == ("a", "b", "c", "d"), "e is gone"
    assert electorate(log, entry(log, "ab")) == (("a", 0), ("b", 0), ("c", 0), ("d", 0))
    log = log.append(entry(log, "ab"))
    assert log.voters == ("a", "b", "c", "d")
    assert log.append(entry(log, "abd")).voters == ("a", "b", "d", "c")
    assert log.append(entry(log, "abcde"[:2], "cd")).voters == ("a", "b")


def test_a_voter_counts_as_the_start_that_was_in_an_entry_last() -> None:
    log = FOUNDED.append(entry(FOUNDED, "abc"))
    assert log.counts("d", 0)
    assert not log.counts("d", 1), "it has started again"
    again = log.expected("d").model_copy(update={"incarnation": 1})
    log = log.append(next_header(log, [log.expected("a"), again], PAYLOAD))
    assert log.counts("d", 1)
    assert not log.counts("d", 0)


def test_more_than_half_of_the_voters_are_most_whether_they_are_in_the_entry_or_not() -> None:
    log = FOUNDED.append(entry(FOUNDED, "ab"))
    assert log.is_majority([("c", 0), ("d", 0), ("e", 0)])
    assert not log.is_majority([("a", 0), ("b", 0)])
    assert not log.is_majority([("c", 0), ("d", 0), ("e", 1)]), "one has forgotten what it was"
    assert not log.is_majority([("a", 0), ("b", 0), ("x", 0)]), "one is a stranger"


@pytest.mark.parametrize(
    ("names", "gone", "reason"),
    [("abc", "z", "no voter"), ("abc", "ed", "order"), ("abc", "dd", "order"), ("abc", "c", "a member")],
)
def test_an_entry_names_each_voter_once_that_is_gone(names: str, gone: str, reason: str) -> None:
    with pytest.raises(LogError, match=reason):
        entry(FOUNDED, names, gone)


def test_whoever_an_annex_names_has_no_say_any_more() -> None:
    fault = [Fault(peer="e", kind="averages", proof=bytes(32))]
    assert FOUNDED.append(entry(FOUNDED, "abc", (), fault)).voters == ("a", "b", "c", "d")
    with pytest.raises(LogError, match="named in its annex"):
        entry(FOUNDED, "abc", "e", fault)


def test_nobody_is_gone_before_the_first_entry() -> None:
    with pytest.raises(LogError, match="no voter"):
        next_header(LOG, [member("a", 0, 20)], PAYLOAD, (), "b")


def test_only_the_entry_that_closes_a_cycle_says_who_is_gone() -> None:
    log, without_samples = replace(LOG, fragments=2), [member("a", 0, 20).model_copy(update={"samples": ()})]
    log = log.append(next_header(log, without_samples, PAYLOAD))
    log = log.append(next_header(log.of(1), [member("a", 0, 20), member("b", 20, 40)], PAYLOAD))
    with pytest.raises(LogError, match="closes"):
        next_header(log, without_samples, PAYLOAD, (), "b")
    log = log.append(next_header(log, without_samples, PAYLOAD))
    assert log.voters == ("a", "b")
    assert log.append(next_header(log.of(1), [log.of(1).expected("a")], PAYLOAD, (), "b")).voters == ("a",)


def test_who_is_gone_is_told_in_brief_and_bystanders_are_kept() -> None:
    header = entry(FOUNDED, "abc", "e")
    outcome = outcome_of(FOUNDED, header)
    assert outcome.gone == (4,), "by its place; nothing is said of d"
    assert follow(FOUNDED, outcome).last == header
    assert unpack(Header, pack(header)) == header
    with pytest.raises(LogError, match="no place 5"):
        follow(FOUNDED, outcome.model_copy(update={"gone": (5,)}))


def test_of_too_many_bystanders_those_stay_that_were_in_an_entry_last() -> None:
    names = [f"peer{number:04}" for number in range(1, MEMBER_LIMIT)]
    idle = [Member(peer=name, tokens=0, samples=()) for name in names]
    crowd = LOG.append(next_header(LOG, [*idle, member("q", 0, 20)], PAYLOAD))
    crowd = crowd.append(next_header(crowd, [crowd.expected("z", 0)], PAYLOAD))
    assert len(crowd.voters) == BYSTANDER_LIMIT + 1
    assert crowd.voters[:2] == ("z", "peer0001")
    header = next_header(crowd, [crowd.expected("z")], PAYLOAD)
    assert follow(crowd, outcome_of(crowd, header)).last == header


@pytest.mark.parametrize(("terms", "leaders"), [(0, "bcdea"), (1, "cdeba"), (3, "ebcda"), (4, "bcdea")])
def test_each_member_leads_for_a_term_before_bystanders(terms: int, leaders: str) -> None:
    """Regression: a leader that left somebody out, or gave newcomers no samples, did so for as long as it was there."""
    last = FOUNDED.append(entry(FOUNDED, "bcde")).last
    assert last is not None
    for index in (terms * TERM, terms * TERM + TERM - 1):
        log = replace(FOUNDED, last=last.model_copy(update={"index": index}))
        assert log.leaders == tuple(leaders)


def test_whoever_comes_last_moves_no_turn_but_its_own() -> None:
    """Regression: with each member that came or went somebody else led, so that liars could choose the moment."""
    for members in range(1, 40):
        for turn in range(200):
            before, after = _place_of_turn(turn, members), _place_of_turn(turn, members + 1)
            assert after in (before, members)
        turns = range(100, 100 + 2 * members)
        assert {_place_of_turn(turn, members) for turn in turns} == set(range(members)), "each leads soon"


def test_whoever_leads_does_not_choose_the_rosters_order() -> None:
    """Regression: a liar put itself in each entry's roster where the next leader stands, and led for ever."""
    roster = [FOUNDED.expected(name) for name in "bacde"]
    with pytest.raises(LogError, match="out of order"):
        next_header(FOUNDED, roster, PAYLOAD)


def test_those_on_probation_do_not_vote_and_lead_last() -> None:
    log = founded(replace(LOG, probation=2))
    roster = log.weighed([log.expected("a"), log.expected("z", 0)])
    log = log.append(next_header(log, roster, PAYLOAD, (), "cde"))
    assert log.voters == ("a", "b")
    assert log.leaders[-1] == "z"
    assert not log.counts("z", 0)
