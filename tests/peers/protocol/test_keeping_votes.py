"""Votes and the disk (R10): nothing leaves before the record is kept, and what is not kept was never voted."""

from __future__ import annotations

from peers.log.certificate import Ballot
from peers.messages.messages import Leaving, Vote
from peers.protocol.context import Context
from peers.protocol.effects import Effect, KeepVotes, Note, Trouble
from peers.protocol.events import Event, LeaveRequested, PayloadAssembled, VotesKept, VotesNotKept
from peers.protocol.voting import VoterState, VotingRecord
from tests.peers.builders import FIRST, PAYLOADS, Rig, of, propose, sends
from tests.peers.logs import SETTINGS
from tests.simulator.simulated_keys import SimulatedKeys

START = 7000
SECOND = Ballot(view=0, attempt=2)
FULL = "no space is left"


class SlowDisk(Rig):
    """A peer whose disk says nothing of itself, once it is slow."""

    is_slow = False

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        if not self.is_slow:
            return super().do(event, after)
        self.now += after
        self.effects = self.peer.handle(event, self.now)
        return self.effects


def asked() -> SlowDisk:
    """c is asked for vote 1, and has all that it needs; its disk is slow."""
    rig = SlowDisk("c", "ab")
    rig.joined().trained().exchanging().whole().applying().applied().trained().exchanging().whole()
    rig.is_slow = True
    assert rig.peer.exchange is not None
    rig.hear("b", propose(rig.next_header(), round=rig.peer.exchange.round, marks=rig.marks))
    return rig


def context(record: VotingRecord | None = None) -> Context:
    return Context("c", SETTINGS, PAYLOADS, 0.0, START, SimulatedKeys("c"), record)


# Before a vote ---------------------------------------------------------------------------------------------------
def test_r10_a_vote_is_sent_when_the_record_that_has_it_is_on_the_disk() -> None:
    rig = asked()
    (keep,) = of(rig.effects, KeepVotes)
    assert keep.record.states[-1].prepare is not None
    assert not sends(rig.effects, Vote)
    assert not sends(rig.tick() + rig.tick(), Vote), "nor is it repeated"
    said = sends(rig.do(VotesKept()), Vote)
    assert {to for to, _ in said} == {"a", "b"}
    assert {vote for _, vote in said} == {keep.record.states[-1].prepare}


def test_r10_a_vote_that_is_not_kept_was_not_given_and_is_given_when_there_is_room() -> None:
    rig = asked()
    before = rig.peer.record
    rig.do(VotesNotKept(FULL))
    assert rig.peer.record != before
    state = rig.peer.record.at(rig.log.position)
    assert isinstance(state, VoterState)
    assert state.prepare is None
    (again,) = of(rig.tick(), KeepVotes)
    assert again.record == before, "the same vote"
    assert sends(rig.do(VotesKept()), Vote)


def test_r10_a_disk_that_takes_no_votes_is_told_once_when_it_lasts() -> None:
    """The log and the votes give reasons of their own, in turns."""
    rig, told = asked(), list[Effect]()
    for second in range(40):
        failed = VotesNotKept(f"{FULL} for {'votes' if second % 2 else 'the log'}")
        for effects in (rig.do(failed), rig.see(), rig.tick()):
            told += [effect for effect in effects if isinstance(effect, Trouble | Note)]
    (trouble,) = told
    assert isinstance(trouble, Trouble)
    assert trouble.level == "warning"
    assert f"does not vote, since the disk does not take its votes or payloads: {FULL}" in trouble.reason


def test_r10_there_is_no_vote_1_without_the_payload_on_the_disk() -> None:
    rig = SlowDisk("c", "ab")
    rig.joined().trained().exchanging().whole().applying().applied().trained().exchanging().whole()
    exchange = rig.peer.exchange
    assert exchange is not None
    assert exchange.payload is not None
    rig.do(PayloadAssembled(exchange.name, exchange.payload, FULL))
    rig.hear("b", propose(rig.next_header(), round=exchange.round, marks=rig.marks))
    assert not of(rig.effects, KeepVotes)
    rig.do(PayloadAssembled(exchange.name, exchange.payload))
    assert sends(rig.effects, Vote)


# Starts ----------------------------------------------------------------------------------------------------------
def test_r10_with_its_record_it_is_the_same_incarnation_and_its_trainings_have_other_numbers() -> None:
    record = VotingRecord(run=SETTINGS.run, peer="c", incarnation=5)
    assert context(record).incarnation == 5
    assert context(record).new_training_number() > START


def test_r10_without_a_record_or_after_a_farewell_it_is_another_incarnation() -> None:
    record, _ = VotingRecord(run=SETTINGS.run, peer="c", incarnation=5).farewell()
    assert context().incarnation == context(record).incarnation == START


def test_r10_what_a_given_up_incarnation_has_under_way_is_not_sent() -> None:
    rig = asked()
    rig.peer._context.votes.begin_anew()
    assert not sends(rig.do(VotesKept()), Vote)
    rig.peer._context.votes.begin_anew()
    assert rig.peer.record.states == ()


# Farewells -------------------------------------------------------------------------------------------------------
def test_r10_a_round_is_entered_once_though_the_peer_begins_anew_at_its_position() -> None:
    """It would average anew what it has signed, and convict itself."""
    votes, here = context().votes, Rig().log.position
    assert votes.enter(here, FIRST)
    assert not votes.enter(here, FIRST)
    assert votes.enter(here, SECOND)
    assert not votes.enter(here, FIRST), "nor an older one"
    assert votes.enter(here.model_copy(update={"fragment": 1}), FIRST), "each position has its own"


def test_r11_who_leaves_others_that_train_signs_a_farewell_and_has_it_in_its_record() -> None:
    rig = asked()
    rig.do(LeaveRequested(at_once=True))
    assert isinstance(rig.peer.goodbye, Leaving)
    assert rig.peer.record.left == rig.peer.goodbye.departure


def test_r11_who_leaves_alone_signs_none() -> None:
    rig = Rig("c", "")
    rig.do(LeaveRequested(at_once=True))
    assert rig.peer.goodbye is None
    assert rig.peer.record.left is None
