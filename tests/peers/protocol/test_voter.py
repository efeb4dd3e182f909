"""Votes on their way: what is remembered, who is told, and how certificates come together (R6, R10, R11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.certificate import Ballot, Phase
from peers.log.header import Member
from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.messages.messages import Certified, Vote
from peers.presence.presence import Presence
from peers.protocol.replica import Replica
from peers.protocol.voter import FANOUT, OPEN_LIMIT, REMEMBERED, Voter, all_hear_votes, audience, forward_to
from peers.protocol.voting import Refusal
from tests.peers.builders import FIRST, certified, choice, context, propose, roster, vote
from tests.peers.heartbeats import beat
from tests.peers.logs import SETTINGS, STATE, first_log, next_header

LOG = first_log().in_state(STATE)
HEADER = next_header(LOG, roster(LOG))
PREPARE, COMMIT = choice(HEADER, Phase.PREPARE), choice(HEADER, Phase.COMMIT)


class Booth:
    """The voter of b at one position; a leads."""

    def __init__(self, log: LogState = LOG, incarnation: int = 0, live: str = "ac") -> None:
        self.context = context("b", incarnation=incarnation)
        presence = Presence("b", 10.0, 40.0, 0.0, self.context.is_farewell)
        presence.membership.observe([beat(name, log) for name in live], 0.0)
        replica = Replica(self.context, presence, Lineage(log), STATE)
        self.voter = Voter(self.context, presence, replica, log)

    def last(self, phase: Phase) -> Vote | None:
        """Return its last vote of a phase."""
        state = self.voter.state
        assert state is not None
        return state.prepare if phase is Phase.PREPARE else state.commit


# Our own votes -------------------------------------------------------------------------------------------------------
def test_r10_a_vote_is_in_the_record_and_given_once() -> None:
    booth = Booth()
    assert booth.voter.prepare(propose(HEADER), "a", None) is None
    kept = booth.last(Phase.PREPARE)
    assert kept == vote("b", LOG, PREPARE)
    assert booth.voter.prepare(propose(HEADER), "a", None) is None
    assert booth.last(Phase.PREPARE) is kept


def test_r12_a_peer_without_a_say_agrees_and_is_not_counted() -> None:
    """It has started again: no entry has it as it is."""
    booth = Booth(incarnation=7)
    assert booth.voter.prepare(propose(HEADER), "a", None) is None
    assert not booth.voter.has_voted


def test_r11_a_peer_that_has_said_farewell_votes_for_nothing() -> None:
    booth = Booth()
    booth.context.votes.leave(LOG.position)
    assert booth.voter.prepare(propose(HEADER), "a", None) is Refusal.LEFT
    assert not booth.voter.commit(certified(LOG, HEADER, Phase.PREPARE), "a")


def test_r6_vote_2_locks_what_is_prepared_and_an_older_certificate_does_not_replace_it() -> None:
    booth = Booth()
    second = Ballot(view=0, attempt=2)
    newer, older = (certified(LOG, HEADER, Phase.PREPARE, "ac", ballot) for ballot in (second, FIRST))
    assert booth.voter.commit(newer, "a")
    assert not booth.voter.commit(older, "a"), "it is too late for that"
    assert booth.voter.lock == booth.voter.prepared == newer
    assert booth.last(Phase.COMMIT) == vote("b", LOG, choice(HEADER, Phase.COMMIT, second))


# Others' votes -------------------------------------------------------------------------------------------------------
def test_r6_a_quorum_of_votes_is_a_certificate_whichever_comes_first() -> None:
    for proposed_first in (True, False):
        voter = Booth().voter
        if proposed_first:
            voter.prepare(propose(HEADER), "a", None)
        assert voter.hear("a", vote("a", LOG, PREPARE)) is None
        found = voter.hear("c", vote("c", LOG, PREPARE))
        if not proposed_first:
            assert found is None, "nobody knows what it is for"
            voter.prepare(propose(HEADER), "a", None)
            (found,) = voter.recount(PREPARE)
        assert isinstance(found, Certified)
        assert voter.is_prepared(found)


FORGED = {
    "another's signature": ("a", vote("c", LOG, PREPARE)),
    "another incarnation": ("a", vote("a", LOG, PREPARE, incarnation=3)),
    "another position": ("a", vote("a", first_log().append(HEADER), PREPARE)),
    "another choice": ("a", vote("a", LOG, COMMIT)),
    "a stranger": ("z", vote("z", LOG, PREPARE)),
}


@pytest.mark.parametrize("what", FORGED)
def test_r6_no_other_vote_counts(what: str) -> None:
    voter = Booth().voter
    voter.prepare(propose(HEADER), "a", None)
    sender, said = FORGED[what]
    assert voter.hear(sender, said) is None
    assert voter.hear("c", vote("c", LOG, PREPARE)) is None
    assert not voter.recount(PREPARE)


def test_headers_that_are_voted_on_are_remembered_within_bounds() -> None:
    voter = Booth().voter
    for place in range(3 * REMEMBERED):
        voter.prepare(propose(next_header(LOG, roster(LOG), bytes([place]) * 32)), "a", None)
    assert len(voter._proposed) == REMEMBERED


# Who is told ---------------------------------------------------------------------------------------------------------
def crowd(size: int) -> LogState:
    log = replace(SETTINGS, minimum_peers=1).empty_log
    names = [f"p{number:03}" for number in range(size)]
    members = [Member(peer=peer, tokens=100, samples=log.grants[place]) for place, peer in enumerate(names)]
    return log.append(next_header(log, members))


@pytest.mark.parametrize("size", [OPEN_LIMIT, OPEN_LIMIT + 1, 300])
def test_r6_among_few_all_hear_all_and_among_many_each_hears_of_a_certificate_once(size: int) -> None:
    log = crowd(size)
    header = next_header(log, [log.expected(peer) for peer in log.leases])
    told = audience(log, header, ())
    assert set(told) == set(log.leases)
    assert all_hear_votes(log, header, ()) is (size <= OPEN_LIMIT)
    leader = told[5]
    heard, reached = [to for peer in told for to in forward_to(peer, leader, told)], [leader]
    assert sorted([leader, *heard]) == sorted(told)
    for peer in reached:
        reached += forward_to(peer, leader, told)
    assert len(reached) == size, "the tree begins at the leader"
    assert max(len(forward_to(peer, leader, told)) for peer in told) <= FANOUT
    assert forward_to("stranger", leader, told) == ()
