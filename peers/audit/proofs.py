"""Proofs that a peer lies: statements that it has signed, and that an honest peer does not sign.

A proof convinces everybody or nobody, since it needs nothing but its own bytes. Its statements name the place in the
log and the incarnation of the peer that signed them: what a peer forgets when it loses its memory, it has signed as
another incarnation. There are four kinds (R9 in docs/protocol.md):

    votes         two votes of one ballot and phase; a vote 2, and a later vote 1 that forgets the lock; a vote after a
                  farewell
    averages      two averages of one chunk in one round
    commitments   two commitments for one training
    contribution  a commitment to a chunk that is no contribution, or has another norm than it says
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from peers.log.certificate import Choice, Departure, Phase
from peers.log.header import Fault, Kind, Position
from peers.protocol.commitment import Author, Commitment, Evidence
from peers.protocol.messages import PROOF_LIMIT, Vote
from peers.protocol.parts import Averaged, Statement
from peers.protocol.rounds import RoundName
from peers.values.identity import Signature, Verify
from peers.values.wire import Count, Digest, PeerId, Value, WireError, digest_of, pack, unpack
from peers.values.workload import PayloadKind


@dataclass(frozen=True)
class Verifier:
    """What proofs are checked with: the run that they must be about, signatures, and the kind of each fragment's
    payloads."""

    run: str
    verify: Verify
    payloads: Sequence[PayloadKind]


class Signed(NamedTuple):
    """A statement as the bytes that its peer has signed."""

    text: bytes
    signature: bytes


class FaultProof(Value):
    """Statements of one peer."""

    kind: ClassVar[Kind]

    @property
    @abstractmethod
    def accused(self) -> str:
        """Return the peer that has signed them."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """Return the place in the log that they are about. If they are about two, it is the later one."""

    @abstractmethod
    def convicts(self, verifier: Verifier) -> bool:
        """Return whether they show that the accused lies."""

    @property
    def fault(self) -> Fault:
        """Return what an entry says of it."""
        return Fault(peer=self.accused, kind=self.kind, proof=digest_of(pack(self)))

    def _is_signed(self, verifier: Verifier, *statements: Signed) -> bool:
        return all(verifier.verify(self.accused, one.text, one.signature) for one in statements)


# Votes -----------------------------------------------------------------------------------------------------------
class TwoVotes(FaultProof):
    """Two votes of one peer that no honest voter gives both."""

    kind: ClassVar[Kind] = "votes"
    peer: PeerId
    first: Vote
    second: Vote

    @property
    def accused(self) -> str:
        return self.peer

    @property
    def position(self) -> Position:
        return self.first.position

    def convicts(self, verifier: Verifier) -> bool:
        votes = self.first, self.second
        return contradict(*votes) and self._is_signed(verifier, *(Signed(vote.text, vote.signature) for vote in votes))


class VoteAfterFarewell(FaultProof):
    """A farewell from an index on, and a vote of the same incarnation from there on."""

    kind: ClassVar[Kind] = "votes"
    departure: Departure
    signature: Signature
    vote: Vote

    @property
    def accused(self) -> str:
        return self.departure.peer

    @property
    def position(self) -> Position:
        return self.vote.position

    def convicts(self, verifier: Verifier) -> bool:
        """A farewell of another run says nothing of this one."""
        gone, vote = self.departure, self.vote
        is_broken = vote.incarnation == gone.incarnation and vote.position.index >= gone.index
        statements = Signed(gone.text, self.signature), Signed(vote.text, vote.signature)
        return is_broken and gone.run == verifier.run and self._is_signed(verifier, *statements)


def contradict(first: Vote, second: Vote) -> bool:
    """Return whether no honest voter gives both votes, whoever signed them."""
    is_one_voter = (first.position, first.incarnation) == (second.position, second.incarnation)
    return is_one_voter and are_exclusive(first.choice, second.choice)


def are_exclusive(one: Choice, other: Choice) -> bool:
    """Return whether no honest voter votes for both at one position: two choices in one phase of a ballot; or one in
    phase 2, and in a later ballot another header in phase 1 without a certificate that is newer than the lock."""
    if (one.ballot, one.phase) == (other.ballot, other.phase):
        return one != other
    return _breaks_lock(one, other) or _breaks_lock(other, one)


def _breaks_lock(commit: Choice, prepare: Choice) -> bool:
    """Return whether a vote 2 forbids a vote 1. A minority's votes are for what is never certified, and break none."""
    if (commit.phase, prepare.phase) != (Phase.COMMIT, Phase.PREPARE) or commit.alone or prepare.alone:
        return False
    is_later = commit.ballot < prepare.ballot and commit.header != prepare.header
    return is_later and (prepare.justify is None or prepare.justify <= commit.ballot)


# The exchange ----------------------------------------------------------------------------------------------------
class TwoAverages(FaultProof):
    """Two averages of one chunk in one round, by one reducer."""

    kind: ClassVar[Kind] = "averages"
    round: RoundName
    terms: Digest
    incarnation: Count
    first: Averaged
    second: Averaged

    @property
    def accused(self) -> str:
        return self.first.origin.reducer

    @property
    def position(self) -> Position:
        return self.round.position

    def convicts(self, verifier: Verifier) -> bool:
        first, second = self._signed(self.first), self._signed(self.second)
        is_one_chunk = self.first.chunk == self.second.chunk
        return is_one_chunk and first.text != second.text and self._is_signed(verifier, first, second)

    def _signed(self, average: Averaged) -> Signed:
        statement = Statement(
            round_name=self.round,
            terms=self.terms,
            reducer=self.accused,
            incarnation=self.incarnation,
            chunk=average.chunk,
            digest=average.digest,
            absent=average.absent,
        )
        return Signed(statement.text, average.origin.signature)


class TwoCommitments(FaultProof):
    """Two commitments to what one peer contributes of one training."""

    kind: ClassVar[Kind] = "commitments"
    author: Author
    first: Commitment
    second: Commitment

    @property
    def accused(self) -> str:
        return self.author.peer

    @property
    def position(self) -> Position:
        return self.author.position

    def convicts(self, verifier: Verifier) -> bool:
        first, second = (Signed(one.text(self.author), one.signature) for one in (self.first, self.second))
        is_of_author = self.first.number == self.second.number == self.author.number
        return is_of_author and first.text != second.text and self._is_signed(verifier, first, second)


class BadContribution(FaultProof):
    """A chunk that is no contribution, or has another norm than its owner has committed to."""

    kind: ClassVar[Kind] = "contribution"
    author: Author
    evidence: Evidence

    @property
    def accused(self) -> str:
        return self.author.peer

    @property
    def position(self) -> Position:
        return self.author.position

    def convicts(self, verifier: Verifier) -> bool:
        is_of_author = self.evidence.commitment.number == self.author.number
        if not is_of_author or self.position.fragment >= len(verifier.payloads):
            return False
        kind = verifier.payloads[self.position.fragment]
        return self.evidence.convicts(self.author, kind.size.chunks, verifier.verify, kind.inspect)


# Bytes -----------------------------------------------------------------------------------------------------------
PROOFS: tuple[type[FaultProof], ...] = (TwoVotes, VoteAfterFarewell, TwoAverages, TwoCommitments, BadContribution)


def read_proof(kind: str, data: bytes) -> FaultProof:
    """Return the proof in some bytes. Raises: WireError unless they are one of this kind."""
    reason = f"there are no proofs of the kind {kind!r:.40}"
    for proof in PROOFS:
        if proof.kind == kind:
            try:
                return unpack(proof, data, PROOF_LIMIT)
            except WireError as error:
                reason = str(error)
    raise WireError(reason)
