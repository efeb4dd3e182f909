"""Entries in brief: whoever is at their position reads the header from them, and nobody else anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.log.chain import Outcome, Turnout, follow, header_of, outcome_of
from peers.log.header import MEMBER_LIMIT, Header, Member
from peers.log.state import LogError, LogState, take_order
from peers.values.leases import prefix, sample_count
from peers.values.wire import digest_of, pack, unpack
from tests.peers.logs import LOG, PAYLOAD, STATE, first_log, member, next_header

STRANGERS = tuple("vwxyz")
WITH_LATE = replace(LOG, staleness=2)


def rosters(log: LogState) -> st.SearchStrategy[tuple[Member, ...]]:
    """Rosters that may follow: some of those with a lease, and newcomers, in any order."""

    @st.composite
    def draw_roster(draw: st.DrawFn) -> tuple[Member, ...]:
        known = draw(st.lists(st.sampled_from(sorted(log.leases)), unique=True)) if log.leases else []
        strangers = draw(
            st.lists(st.sampled_from(STRANGERS), unique=True).map(lambda drawn: set(drawn) - log.leases.keys())
        )
        roster = []
        for peer in take_order(log.roster, [*known, *strangers]):
            lease = log.leases[peer] if peer in log.leases else log.grants[STRANGERS.index(peer)]
            samples = prefix(lease, draw(st.just(sample_count(lease)) | st.integers(0, sample_count(lease))))
            whole = sample_count(samples) * log.tokens_per_sample
            tokens = draw(st.just(whole) | st.integers(0, whole))
            wants = draw(st.sampled_from((0, 0, 5, log.samples_per_lease)))
            incarnation = draw(st.sampled_from((log.incarnations.get(peer, 0), 0, 2**61)))
            roster.append(Member(peer=peer, tokens=tokens, samples=samples, wants=wants, incarnation=incarnation))
        return tuple(one for one in roster if one.tokens or log.is_known(one))

    return draw_roster().filter(lambda roster: any(one.tokens for one in roster))


@given(st.data())
def test_from_an_outcome_the_header_is_read(data: st.DataObject) -> None:
    log = WITH_LATE
    for index in range(data.draw(st.integers(1, 4))):
        leader = data.draw(st.sampled_from((*STRANGERS, *log.ring)))
        header = next_header(log, data.draw(rosters(log)), digest_of(b"%d" % index), leader=leader)
        outcome = unpack(Outcome, pack(outcome_of(log, header)))
        assert follow(log, outcome) == log.append(header)
        log = log.append(header)


def numbers(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, limit) | st.sampled_from((2**31, 2**62 - 1))


RUNS = st.tuples(numbers(6), numbers(40))
MEMBERS = st.builds(
    Member,
    peer=st.sampled_from("abcxyz"),
    tokens=numbers(100),
    samples=st.just(()) | st.sampled_from([((60, 80),), ((80, 85),), ((120, 140),), ((125, 140),), ((0, 2**62 - 1),)]),
    wants=numbers(20),
    incarnation=numbers(3),
)


@given(st.lists(RUNS | MEMBERS, max_size=5).map(tuple), st.booleans())
def test_whatever_is_said_leads_to_an_entry_or_to_none(members: Any, is_first: bool) -> None:
    log = LOG if is_first else first_log()
    turnout = Turnout(members=members)
    with suppress(LogError):
        after = follow(
            log, Outcome(previous=log.position.head, fragment=0, state=STATE, turnout=turnout, payload=PAYLOAD)
        )
        assert after.last is not None
        assert log.append(unpack(Header, pack(after.last))) == after
        assert follow(log, outcome_of(log, after.last)) == after


@pytest.mark.parametrize(
    "members",
    [
        ((0, 4),),
        ((2, 2),),
        ((2, 1),),
        ((0, 2**61),),
        ((0, 3),) * (MEMBER_LIMIT // 3 + 1),
        (member("x", 125, 140),),
        (member("a", 0, 20),),
        (member("a", 60, 80, tokens=101),),
        (Member(peer="a", tokens=0, samples=(), wants=21),),
    ],
)
def test_members_that_cannot_be_there(members: Any) -> None:
    with pytest.raises(LogError):
        Turnout(members=members).roster(first_log())


def test_another_position_is_not_the_one_that_an_outcome_is_meant_for() -> None:
    log = first_log()
    outcome = outcome_of(LOG, log.last or pytest.fail("no entry"))
    with pytest.raises(LogError, match="does not follow"):
        follow(log, outcome)


def test_what_does_not_follow_cannot_be_told() -> None:
    log = first_log()
    roster = [Member(peer=peer, tokens=100, samples=lease) for peer, lease in log.leases.items()]
    header = next_header(log, roster, PAYLOAD)
    with pytest.raises(LogError, match="lineage_tokens"):
        outcome_of(log, header.model_copy(update={"lineage_tokens": 1}))
    for not_its_own in (member("a", 0, 20), member("x", 205, 210)):
        with pytest.raises(LogError, match="begin neither its lease nor a grant"):
            Turnout.of(log, [not_its_own])


def crowd(size: int) -> LogState:
    """A log in which so many peers have made an entry."""
    names = [f"{number:052}" for number in range(size)]
    shares = zip(names, LOG.grants, strict=False)
    roster = [
        Member(peer=peer, tokens=sample_count(grant) * LOG.tokens_per_sample, samples=grant) for peer, grant in shares
    ]
    return LOG.append(next_header(LOG, roster, PAYLOAD))


def test_an_outcome_is_as_large_as_what_happened() -> None:
    sizes = []
    for size in (10, MEMBER_LIMIT):
        log = crowd(size)
        present = [peer for place, peer in enumerate(log.leases) if place not in (3, 7)]
        whole = sample_count(log.grants[0]) * LOG.tokens_per_sample
        roster = [Member(peer=peer, tokens=whole, samples=log.leases[peer]) for peer in present]
        sizes.append(len(pack(outcome_of(log, next_header(log, roster, PAYLOAD)))))
    assert max(sizes) < 155


def test_who_wants_as_many_samples_as_last_time_is_not_named_again() -> None:
    log = first_log()
    for _ in range(2):
        leases = log.leases
        roster = [Member(peer=p, tokens=sample_count(leases[p]) * 5, samples=leases[p], wants=5) for p in "abc"]
        header = next_header(log, roster, PAYLOAD)
        outcome = outcome_of(log, header)
        log = log.append(header)
    assert outcome.turnout == Turnout(members=((0, 3),))


def test_entries_of_all_fragments_are_told() -> None:
    """Those that close no cycle say nothing of samples; each is read whether the others are made or not."""
    log = replace(LOG, run="cycles", fragments=3)
    for cycle in range(3):
        leases = log.leases or dict(zip("abc", log.grants, strict=False))
        begins, told = log, list[Outcome]()
        for fragment in (1, 2, 0):
            closes = fragment == 2
            offers = {peer: leases[peer] for peer in "abc"} | ({"x": ()} if cycle == 1 and not closes else {})
            roster = [
                Member(peer=peer, tokens=sample_count(lease) * log.tokens_per_sample, samples=lease if closes else ())
                for peer, lease in offers.items()
            ]
            header = next_header(log.of(fragment), roster, digest_of(b"%d" % fragment))
            told.append(outcome_of(log, header))
            log = log.append(header)
            assert header_of(log if log.made else begins, told[-1]) == header_of(begins, told[-1]) == header
        if cycle:
            assert all(
                not isinstance(one, Member) or one.peer == "x" for outcome in told for one in outcome.turnout.members
            )
        followed = begins
        for outcome in told:
            followed = follow(followed, outcome)
        assert followed == log
        with pytest.raises(LogError, match="does not follow"):
            header_of(begins, told[0].model_copy(update={"fragment": 3}))
