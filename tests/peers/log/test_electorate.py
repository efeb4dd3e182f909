"""Who has a say in the next entry: the roster, and all that had one before and are not gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from peers.log.certificate import electorate
from peers.log.chain import follow, outcome_of
from peers.log.header import BYSTANDER_LIMIT, MEMBER_LIMIT, Fault, Header, Member
from peers.log.state import COMMITTEE, TERM, LogError, LogState, Quorum, take_order
from peers.values.wire import pack, unpack
from tests.peers.logs import LOG, PAYLOAD, member, newcomer, next_header


def founded(empty: LogState = LOG) -> LogState:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcde")]
    return empty.append(next_header(empty, roster, PAYLOAD))


FOUNDED = founded()


def entry(log: LogState, names: str, gone: Sequence[str] = (), faults: Sequence[Fault] = ()) -> Header:
    roster = [log.expected(name) if name in log.leases else newcomer(log, name) for name in names]
    return next_header(log, roster, PAYLOAD, faults, gone)


def idle(name: str) -> Member:
    return Member(peer=name, tokens=0, samples=())


def test_whoever_has_a_say_keeps_it_until_it_is_gone() -> None:
    log = FOUNDED.append(entry(FOUNDED, "abc", "e"))
    assert log.roster == ("a", "b", "c")
    assert log.voters == ("a", "b", "c", "d"), "e is gone"
    assert electorate(log, entry(log, "ab")).voters == (("a", 0), ("b", 0), ("c", 0), ("d", 0))
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


def test_more_than_half_of_the_voters_are_a_quorum_whether_they_are_in_the_entry_or_not() -> None:
    log = FOUNDED.append(entry(FOUNDED, "ab"))
    assert log.is_quorum([("c", 0), ("d", 0), ("e", 0)])
    assert not log.is_quorum([("a", 0), ("b", 0)])
    assert not log.is_quorum([("c", 0), ("d", 0), ("e", 1)]), "one has forgotten what it was"
    assert not log.is_quorum([("a", 0), ("b", 0), ("x", 0)]), "one is a stranger"
    assert not log.is_quorum([("a", 0), ("a", 0), ("b", 0)]), "one is named twice"
    assert not LOG.is_quorum([("a", 0)]), "before the first entry nobody votes"


@pytest.mark.parametrize(("quorum", "least"), [(Quorum.MAJORITY, 3), (Quorum.TWO_THIRDS, 4)])
def test_how_many_voters_are_a_quorum_is_the_runs_rule(quorum: Quorum, least: int) -> None:
    log = replace(FOUNDED, quorum=quorum)
    incarnations = list(log.voter_incarnations.items())
    assert [log.is_quorum(incarnations[:count]) for count in range(6)] == [count >= least for count in range(6)]


def test_of_many_voters_a_committee_decides() -> None:
    names = [f"peer{number:03}" for number in range(COMMITTEE + 50)]
    log = LOG.append(next_header(LOG, [member(names[0], 0, 20), *map(idle, names[1:])]))
    chosen = electorate(log, next_header(log, [log.expected(names[0])])).voters
    assert (chosen, len(chosen)) == (log.electors, COMMITTEE)
    assert log.is_quorum(chosen[: COMMITTEE // 2 + 1])
    assert not log.is_quorum(list(set(log.voter_incarnations.items()) - set(chosen[COMMITTEE // 2 :])))


@pytest.mark.parametrize(
    ("names", "gone", "reason"),
    [("abc", "z", "not voters"), ("abc", "ed", "order"), ("abc", "dd", "order"), ("abc", "c", "a member")],
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
    with pytest.raises(LogError, match="not voters"):
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
    assert outcome.gone == ("e",), "nothing is said of d"
    assert follow(FOUNDED, outcome).last == header
    assert unpack(Header, pack(header)) == header
    with pytest.raises(LogError, match="are not voters"):
        follow(FOUNDED, outcome.model_copy(update={"gone": ("z",)}))


def test_of_too_many_bystanders_those_stay_that_were_in_an_entry_last() -> None:
    names = [f"peer{number:04}" for number in range(1, MEMBER_LIMIT)]
    crowd = LOG.append(next_header(LOG, [*map(idle, names), member("q", 0, 20)], PAYLOAD))
    crowd = crowd.append(next_header(crowd, [newcomer(crowd, "z")], PAYLOAD))
    assert len(crowd.voters) == BYSTANDER_LIMIT + 1
    assert crowd.voters[:2] == ("z", "peer0001")
    header = next_header(crowd, [crowd.expected("z")], PAYLOAD)
    assert follow(crowd, outcome_of(crowd, header)).last == header


# Who leads ------------------------------------------------------------------------------------------------------
def led(leader: str, index: int = 7, names: str = "bcde") -> LogState:
    """The log after an entry of these, with a as a bystander, that this peer has led."""
    last = FOUNDED.append(entry(FOUNDED, names)).last
    assert last is not None
    return replace(FOUNDED, last=last.model_copy(update={"index": index, "leader": leader}))


@pytest.mark.parametrize(
    ("leader", "index", "ring"),
    [
        ("b", 7, "bcdea"),
        ("d", 7, "deabc"),
        ("a", 7, "abcde"),
        ("b", TERM, "cdeab"),
        ("e", TERM, "abcde"),
        ("a", TERM, "bcdea"),
        ("b", TERM + 1, "bcdea"),
        ("z", 7, "bcdea"),
        ("z", TERM, "bcdea"),
    ],
)
def test_r1_the_last_leader_leads_on_until_its_term_is_over(leader: str, index: int, ring: str) -> None:
    """Regression: a leader that left somebody out, or gave newcomers no samples, did so for as long as it was there."""
    log = led(leader, index)
    assert log.ring == tuple(ring)
    assert [log.leader_of(view) for view in range(7)] == [ring[view % 5] for view in range(7)]


def test_r1_a_failed_view_moves_the_turn_on_for_good() -> None:
    log = FOUNDED.append(next_header(FOUNDED, [FOUNDED.expected("b")], leader=FOUNDED.leader_of(3)))
    assert log.ring[0] == FOUNDED.ring[3]


def test_r1_whoever_joins_or_leaves_moves_no_turn_but_its_own() -> None:
    """Regression: with each member that came or went somebody else led, so that liars could choose the moment."""
    log, leader = FOUNDED, FOUNDED.leader_of(0)
    for names in ("abcde", "abcdez", "bcdez", "bcdexyz", "cdez"):
        members = take_order(log.roster, names)
        grants = iter(range(len(members)))
        brought = [log.expected(one) if one in log.leases else newcomer(log, one, next(grants)) for one in members]
        log = log.append(next_header(log, brought))
        assert log.leader_of(0) == leader


@pytest.mark.parametrize("incarnation", [0, 7])
def test_r12_a_peer_that_brings_no_tokens_gets_no_say(incarnation: int) -> None:
    """A leader can't make up voters: the entry counts what all members have signed, and these have signed nothing."""
    members = [FOUNDED.expected(name) for name in "abcd"]
    made_up = Member(peer="z" if incarnation == 0 else "e", tokens=0, samples=(), incarnation=incarnation)
    with pytest.raises(LogError, match="without tokens"):
        next_header(FOUNDED, [*members, made_up])
    waits = Member(peer="e", tokens=0, samples=(), incarnation=FOUNDED.incarnations["e"])
    assert "e" in FOUNDED.append(next_header(FOUNDED, [*members, waits])).voters


def test_r1_before_the_first_entry_no_leader_follows_from_the_log() -> None:
    assert (LOG.ring, LOG.leader_of(0)) == ((), None)


def test_a_leader_is_told_in_brief_where_it_is_not_the_one_whose_turn_it_was() -> None:
    first, second = FOUNDED.leader_of(0), FOUNDED.leader_of(1)
    for leader, told in ((first, None), (second, second), ("z", "z")):
        header = next_header(FOUNDED, [FOUNDED.expected("a")], leader=leader)
        assert outcome_of(FOUNDED, header).leader == told
        assert follow(FOUNDED, outcome_of(FOUNDED, header)).last == header


def test_whoever_leads_does_not_choose_the_rosters_order() -> None:
    """Regression: a liar put itself in each entry's roster where the next leader stands, and led for ever."""
    roster = [FOUNDED.expected(name) for name in "bacde"]
    with pytest.raises(LogError, match="out of order"):
        next_header(FOUNDED, roster, PAYLOAD)


def test_those_on_probation_do_not_vote_and_lead_last() -> None:
    log = founded(replace(LOG, probation=2))
    roster = log.without_unproven([log.expected("a"), newcomer(log, "z")])
    log = log.append(next_header(log, roster, PAYLOAD, (), "cde"))
    assert log.voters == ("a", "b")
    assert log.ring == ("b", "a", "z")
    assert not log.counts("z", 0)
