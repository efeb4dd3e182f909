"""What proves that a peer has lied: statements that it has signed, and that contradict each other or what they are of.

A proof convinces everybody or nobody. Its statements name the place in the log, the round or attempt, and the start of
the peer that signed them. No honest peer signs two of one kind that differ; what it forgets when it starts again, it
has said as another start.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from peers.log.certificate import Ballot
from peers.log.header import MEMBER_LIMIT, Fault, Kind, Position
from peers.protocol.commitment import Author, Commitment, Evidence
from peers.protocol.parts import Statement
from peers.protocol.rounds import Attempt
from peers.values.identity import Signature, Verify
from peers.values.wire import MESSAGE_LIMIT, Count, Digest, PeerId, Value, WireError, digest_of, pack, unpack
from peers.values.workload import PayloadKind

PROOF_LIMIT = MESSAGE_LIMIT - (1 << 13)
"""Bytes of a proof: one fits into a message."""


@dataclass(frozen=True)
class Court:
    """What proofs are judged by: signatures, and the codec of each fragment's payloads."""

    verify: Verify
    payloads: Sequence[PayloadKind]


class Signed(NamedTuple):
    """What a peer has said, as the bytes that it has signed."""

    text: bytes
    signature: bytes


class FaultProof(Value):
    """Statements of one peer."""

    kind: ClassVar[Kind]

    @property
    @abstractmethod
    def accused(self) -> str:
        """Return who has signed them."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """Return the place in the log that they are about."""

    @abstractmethod
    def convicts(self, court: Court) -> bool:
        """Return whether they show that the accused has lied."""

    @property
    def fault(self) -> Fault:
        """Return what an entry's annex says of it."""
        return Fault(peer=self.accused, kind=self.kind, proof=digest_of(pack(self)))


class TwoStatements(FaultProof):
    """Two statements of one kind that differ, where no honest peer signs more than one."""

    @property
    @abstractmethod
    def said(self) -> tuple[Signed, Signed]:
        """Return both of them."""

    def convicts(self, court: Court) -> bool:
        first, second = self.said
        is_other = first.text != second.text
        return is_other and all(court.verify(self.accused, said.text, said.signature) for said in (first, second))


class SignedAverage(Value):
    """What a reducer has signed that the average of a chunk is."""

    digest: Digest
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
    signature: Signature


class TwoAverages(TwoStatements):
    """Two averages of one chunk in one round, by one reducer."""

    kind: ClassVar[Kind] = "averages"
    round_name: Attempt
    terms: Digest
    reducer: PeerId
    incarnation: Count
    chunk: Count
    first: SignedAverage
    second: SignedAverage

    @property
    def accused(self) -> str:
        return self.reducer

    @property
    def position(self) -> Position:
        return self.round_name.position

    @property
    def said(self) -> tuple[Signed, Signed]:
        return self._signed(self.first), self._signed(self.second)

    def _signed(self, average: SignedAverage) -> Signed:
        statement = Statement(
            round_name=self.round_name,
            terms=self.terms,
            reducer=self.reducer,
            incarnation=self.incarnation,
            chunk=self.chunk,
            digest=average.digest,
            absent=average.absent,
        )
        return Signed(statement.text, average.signature)


class TwoCommitments(TwoStatements):
    """Two commitments to what one peer contributes to one round."""

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

    @property
    def said(self) -> tuple[Signed, Signed]:
        first, second = self.first, self.second
        return Signed(first.text(self.author), first.signature), Signed(second.text(self.author), second.signature)


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

    def convicts(self, court: Court) -> bool:
        if self.position.fragment >= len(court.payloads):
            return False
        kind = court.payloads[self.position.fragment]
        return self.evidence.convicts(self.author, kind.size.chunks, court.verify, kind.inspect)


class SignedEntry(Value):
    """What a member has signed that the entry is."""

    header: Digest
    signature: Signature


class TwoVotes(TwoStatements):
    """Two entries that one member has signed in one attempt."""

    kind: ClassVar[Kind] = "votes"
    attempt: Attempt
    member: PeerId
    incarnation: Count
    first: SignedEntry
    second: SignedEntry

    @property
    def accused(self) -> str:
        return self.member

    @property
    def position(self) -> Position:
        return self.attempt.position

    @property
    def said(self) -> tuple[Signed, Signed]:
        return self._signed(self.first), self._signed(self.second)

    def _signed(self, entry: SignedEntry) -> Signed:
        number, leader, alone = self.attempt.name
        ballot = Ballot(
            position=self.position,
            header=entry.header,
            number=number,
            leader=leader,
            alone=alone,
            incarnation=self.incarnation,
        )
        return Signed(ballot.text, entry.signature)


PROOFS = (TwoAverages, TwoCommitments, BadContribution, TwoVotes)
KINDS: dict[str, type[FaultProof]] = {kind.kind: kind for kind in PROOFS}


def read_proof(kind: str, data: bytes) -> FaultProof:
    """Return the proof in some bytes. Raises: WireError where they are none of this kind."""
    if kind not in KINDS:
        raise WireError(f"there are no proofs of the kind {kind!r:.40}")
    return unpack(KINDS[kind], data, PROOF_LIMIT)
