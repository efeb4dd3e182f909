"""The voting rules of one peer: the votes that it gives at a position of the log, and the record that it must first
write to the disk.

Two votes make an entry. In phase 1 a voter agrees to a proposal; a quorum of these votes is a *prepare certificate*. In
phase 2 a voter *locks* the header of a prepare certificate; a quorum of these votes commits the entry. Safety rests on
these rules alone (docs/protocol.md has the numbers), whatever leaders propose and whatever the network loses, delays or
reorders:

    R5   Vote 1 agrees to a proposal. The ballots that a voter votes in only go up, and it votes once in each phase of a
         ballot. A locked voter agrees only to a proposal that shows a prepare certificate no older than its lock.
    R6   Vote 2 needs a prepare certificate of the same ballot. The certificate's header becomes the voter's lock.
    R9   Two votes that no honest voter gives both convict their voter; so does a vote after a farewell. The proofs are
         in peers/audit/proofs.py.
    R10  A vote is on the disk before it is sent, so that a restarted peer is the same voter.
    R11  A voter does not vote at a position after its farewell, or if it has forgotten its votes there.

Any two quorums share a voter. So once A is committed in ballot a, no other header is ever prepared after a: the first
such certificate would include a voter that had locked A in a and was shown a newer certificate of the other header, but
there is none. A liar that breaks this has signed two votes that convict it.

Everything here is pure: no clock, no input or output. The driver writes a `VotingRecord` and then sends the vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from peers.log.certificate import (
    Ballot,
    Certificate,
    CertificateError,
    Choice,
    Departure,
    Group,
    Phase,
    certify,
    prove,
)
from peers.log.header import Header, Position
from peers.log.state import LogError, LogState
from peers.log.votes import RECORD_LIMIT
from peers.messages.messages import Certified, Propose, Vote
from peers.values.identity import Keys
from peers.values.wire import DIGEST_BYTES, Count, PeerId, RunId, Value, WireError, digest_of, pack, unpack

POSITIONS = 1 << 9
"""Maximum number of positions whose votes are remembered (R11): two cycles, with up to 256 fragments. A peer votes at
an older position only when it changes to another branch of the log."""
FIRST = Ballot(view=0, attempt=0)
"""The lower bound of all ballots: a leader's first attempt has the number 1."""


class Refusal(StrEnum):
    """The reason why a voter does not vote for a header. The comment beside each names the rule."""

    ELSEWHERE = "the proposal is for another position than this voter's"
    CLOSED = "a certified entry of this position is known"  # rule R11
    LEFT = "the voter has left the run"  # rule R11
    FORGOTTEN = "the voter may have voted here and does not remember it"  # rule R11
    OLD_BALLOT = "the voter has voted in a newer ballot"  # rules R5.1 and R6
    OTHER_VOTE = "the voter has voted for something else in this ballot"  # rules R5.1 and R6
    BAD_CERTIFICATE = "the certificate shown does not prepare this header in an older ballot"  # rule R5.2
    NO_PREPARE = "the certificate does not prepare this header"  # rule R6
    LOCKED = "the voter's lock is newer than the certificate shown"  # rule R5.3
    DOES_NOT_FOLLOW = "the header does not follow from the log"  # rules R5.4 and R5.10
    NO_PAYLOAD = "the voter does not have the payload"  # rule R5.5
    UNSIGNED_AVERAGE = "an average, or the absence of a member's blocks, is not signed by its reducer"  # rule R5.6
    MOST_ABSENT = "less than half of the round's tokens would count"  # rule R5.6
    NOT_GONE = "the voter hears a peer that the header says is gone"  # rule R5.7
    STRANGER = "the voter does not hear a member that would get a say"  # rule R5.7
    UNPROVEN_FAULT = "the voter has not seen the proof of a fault that the header names"  # rule R5.8
    HAS_WORK = "the voter has trained the fragment that the header skips"  # rule R5.9
    NOT_ALONE = "the voter hears a quorum, or its owner waits for one"  # rule R5.11
    NOT_FOLLOWED = "the voter cannot follow the amendment that the header takes in"  # rule R5.10


LASTING = frozenset({Refusal.NO_PAYLOAD, Refusal.NOT_ALONE})
"""Refusals that hold even if the proposal shows a prepare certificate. The other conditions were checked by the quorum
that prepared the header; if they were checked again, a locked header could become impossible to commit, such as one
that says a peer is gone that has come back since."""


@dataclass(frozen=True)
class VotingPlace:
    """A position as the voting rules see it: the log before the entry, and the voter's keys, but not its votes."""

    log: LogState
    keys: Keys

    def is_prepared(self, header: Header, certificate: Certificate) -> bool:
        """Return True if the certificate is a valid prepare certificate of the header."""
        try:
            prove(certificate, self.log, header, self.keys.verify, Phase.PREPARE)
        except CertificateError:
            return False
        return True

    def follows(self, header: Header) -> bool:
        """Return True if the log allows the header as the next entry."""
        try:
            self.log.check_next(header)
        except LogError:
            return False
        return True


# One voter at one position -------------------------------------------------------------------------------------
class VoterState(Value):
    """The votes of one voter at one position: its lock, and its last vote in each phase.

    The voter votes in no ballot below `promised`. Only a vote raises `promised`: safety needs no more, and a voter
    whose view timer has ended may still help the earlier leader.
    """

    position: Position
    incarnation: Count
    lock: Certified | None = None
    prepare: Vote | None = None
    commit: Vote | None = None
    is_closed: Annotated[bool, Field(strict=True)] = False

    @property
    def promised(self) -> Ballot:
        """The newest ballot in which this voter has voted at the position; FIRST if it has not voted."""
        return max((vote.choice.ballot for vote in (self.prepare, self.commit) if vote), default=FIRST)


@dataclass(frozen=True)
class Cast:
    """A vote, and the voter's state that must be on the disk before the vote is sent."""

    state: VoterState
    vote: Vote


def vote_prepare(
    state: VoterState, propose: Propose, place: VotingPlace, objection: Refusal | None = None
) -> Cast | Refusal:
    """Return vote 1, which agrees to a proposal, or the voter's refusal. A voter that has agreed to the proposal before
    returns the same vote again.

    `objection` is the round's reason against the proposal (R5.5 to R5.11).
    """
    choice, justify = propose.choice, propose.justify
    if propose.position != state.position:
        return Refusal.ELSEWHERE
    if state.prepare and state.prepare.choice == choice:
        return Cast(state, state.prepare)
    if refusal := _why_not_in(state, choice.ballot, state.prepare):
        return refusal
    if justify is not None:
        is_older = justify.choice.ballot < choice.ballot and (choice.alone or not justify.choice.alone)
        if not is_older or not place.is_prepared(propose.header, justify):
            return Refusal.BAD_CERTIFICATE
    if _is_bound(state.lock, propose):
        return Refusal.LOCKED
    if not place.follows(propose.header):
        return Refusal.DOES_NOT_FOLLOW
    if objection is not None and (justify is None or objection in LASTING):
        return objection
    vote = _sign(state, choice, place)
    return Cast(state.model_copy(update={"prepare": vote}), vote)


def vote_commit(state: VoterState, prepared: Certified, place: VotingPlace) -> Cast | Refusal:
    """Return vote 2, which locks the header of a prepare certificate, or the voter's refusal. The voter needs neither
    vote 1 nor the payload, because it can fetch the payload from voters that gave vote 1."""
    header, certificate = prepared.header, prepared.certificate
    if certificate is None:
        return Refusal.NO_PREPARE
    shown = certificate.choice
    choice = shown.model_copy(update={"phase": Phase.COMMIT, "justify": None})
    if prepared.position != state.position:
        return Refusal.ELSEWHERE
    if state.commit and state.commit.choice == choice:
        return Cast(state, state.commit)
    if refusal := _why_not_in(state, choice.ballot, state.commit):
        return refusal
    if not place.is_prepared(header, certificate):
        return Refusal.NO_PREPARE
    if not place.follows(header):
        return Refusal.DOES_NOT_FOLLOW
    is_lighter = state.lock is not None and shown.weight < _choice_of(state.lock).weight
    vote = _sign(state, choice, place)
    return Cast(state.model_copy(update={"commit": vote, "lock": state.lock if is_lighter else prepared}), vote)


def _why_not_in(state: VoterState, ballot: Ballot, last: Vote | None) -> Refusal | None:
    """Return the reason why a voter may give no new vote in a ballot; None if it may. `last` is its last vote of the
    same phase."""
    if state.is_closed:
        return Refusal.CLOSED
    if ballot < state.promised or ballot <= FIRST:
        return Refusal.OLD_BALLOT
    return Refusal.OTHER_VOTE if last and last.choice.ballot == ballot else None


def _is_bound(lock: Certified | None, propose: Propose) -> bool:
    """Return True if the voter's lock forbids its vote 1 for the proposal (R5.3)."""
    if lock is None:
        return False
    locked = _choice_of(lock)
    if locked.alone and not propose.choice.alone:
        return False
    if propose.justify is None:
        return True
    shown = propose.justify.choice
    if shown.weight == locked.weight:
        return shown.header != locked.header
    return shown.weight < locked.weight


def _choice_of(lock: Certified) -> Choice:
    assert lock.certificate is not None, "a lock has its prepare certificate"
    return lock.certificate.choice


def _sign(state: VoterState, choice: Choice, place: VotingPlace) -> Vote:
    signature = place.keys.sign(choice.text(state.position, state.incarnation))
    return Vote(position=state.position, incarnation=state.incarnation, choice=choice, signature=signature)


# Record on the disk --------------------------------------------------------------------------------------------
class RecordError(ValueError):
    """A damaged voting record, or one of another version, run or peer. The peer becomes another incarnation."""


class VotingRecord(Value):
    """A peer's votes in one run, as stored on its disk. Immutable: each change returns a new record to write.

    `incarnation` numbers this unbroken memory of votes: a peer that restarts with its record is the same voter, and one
    that has lost it takes another number. From index `left` on the peer has promised not to vote. Below index
    `forgotten` it may have voted at positions that are not in `states`.
    """

    version: Literal[1] = 1
    run: RunId
    peer: PeerId
    incarnation: Count
    left: Count | None = None
    forgotten: Count = 0
    states: Annotated[tuple[VoterState, ...], Field(max_length=POSITIONS)] = ()

    def at(self, position: Position) -> VoterState | Refusal:
        """Return the peer's votes at a position, or the refusal if the peer must not vote at the position."""
        if self.left is not None and position.index >= self.left:
            return Refusal.LEFT
        there = (state for state in self.states if state.position.index == position.index)  # a cheap filter, for speed
        known = next((state for state in there if state.position == position), None)
        if known is not None:
            return known
        if position.index < self.forgotten:
            return Refusal.FORGOTTEN
        return VoterState(position=position, incarnation=self.incarnation)

    def after(self, state: VoterState) -> VotingRecord:
        """Return the record with this state. Beyond POSITIONS states those of the oldest positions are dropped."""
        others = [known for known in self.states if known.position != state.position]
        states = sorted([*others, state], key=lambda one: (one.position.index, one.position.fragment))
        dropped = states[: max(0, len(states) - POSITIONS)]
        forgotten = max([self.forgotten, *(one.position.index + 1 for one in dropped)])
        return self.model_copy(update={"states": tuple(states[len(dropped) :]), "forgotten": forgotten})

    def closed(self, position: Position) -> VotingRecord:
        """Return the record with the position marked as closed, because its certified entry is known. The votes there
        are dropped, and no more are given."""
        return self.after(VoterState(position=position, incarnation=self.incarnation, is_closed=True))

    @property
    def departure(self) -> int:
        """The index after the highest one at which the peer may have voted."""
        return max([self.forgotten, *(state.position.index + 1 for state in self.states)])

    def farewell(self) -> tuple[VotingRecord, Departure]:
        """Return the record of a peer that leaves the run, and the farewell, which the peer must sign."""
        left = self.departure if self.left is None else self.left
        departure = Departure(run=self.run, peer=self.peer, incarnation=self.incarnation, index=left)
        return self.model_copy(update={"left": left}), departure

    def renewed(self, incarnation: int) -> VotingRecord:
        """Return an empty record of another incarnation, for a peer that returns after a farewell or gives up its
        vote."""
        return VotingRecord(run=self.run, peer=self.peer, incarnation=incarnation)

    def pack(self) -> bytes:
        """Return the record as the bytes of a file: a digest that reveals damage, then the packed record."""
        packed = pack(self)
        return digest_of(packed) + packed

    @classmethod
    def load(cls, data: bytes, run: str, peer: str) -> VotingRecord:
        """Return the record packed in `data`. Raises: RecordError if it is damaged, or not of this peer and run."""
        digest, packed = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if digest_of(packed) != digest:
            raise RecordError("the voting record is damaged: its digest does not match")
        try:
            record = unpack(cls, packed, RECORD_LIMIT)
        except WireError as error:
            raise RecordError(f"the voting record is damaged or of another version: {error}") from error
        if (record.run, record.peer) != (run, peer):
            raise RecordError(f"the voting record is of peer {record.peer} in run {record.run}, not of {peer} in {run}")
        return record


# Counting votes ------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """The newest vote of each peer in each phase, at one position."""

    place: VotingPlace
    _votes: dict[tuple[str, Phase], Vote] = field(default_factory=dict)

    def hear(self, peer: str, vote: Vote) -> bool:
        """Store a vote if its signature is valid, and its ballot is newer than that of the peer's last vote in this
        phase. Return True if the vote is stored."""
        key = peer, vote.choice.phase
        before = self._votes.get(key)
        is_new = before is None or before.choice.ballot < vote.choice.ballot
        if not is_new or vote.position != self.place.log.position:
            return False
        if not self.place.keys.verify(peer, vote.text, vote.signature):
            return False
        self._votes[key] = vote
        return True

    def ballot_of(self, peer: str, phase: Phase) -> Ballot | None:
        """Return the ballot of a peer's newest vote in a phase; None if the peer has not voted."""
        vote = self._votes.get((peer, phase))
        return vote.choice.ballot if vote else None

    def certificate(
        self, header: Header, choice: Choice, farewells: Mapping[str, tuple[int, bytes]], group: Group = ()
    ) -> Certificate | None:
        """Return the header's certificate, made of the votes for `choice`, which is the header in one ballot and phase;
        None while there are too few. `group` are the voters of a minority; empty if the whole run votes."""
        signatures = {
            (peer, vote.incarnation): vote.signature for (peer, _), vote in self._votes.items() if vote.choice == choice
        }
        return certify(self.place.log, header, choice, group, signatures, farewells)
