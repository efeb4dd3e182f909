"""Proofs that a peer lies: statements that it has signed, and that no honest peer signs. `Statements` finds them among
the recent signed statements of peers.

A proof convinces every peer or no peer, since all it needs are its own bytes. Its statements name the place in the log
and the incarnation of their signer. A peer that lost its memory signs as another incarnation, so its earlier statements
do not convict it. There are four kinds (R9 in docs/protocol.md):

    votes         two votes of one ballot and phase; a vote 2, and a later vote 1 that ignores its lock; a vote after a
                  farewell
    averages      two averages of one chunk in one round
    commitments   two commitments for one training
    contribution  a commitment to a chunk that is no contribution, or has another norm than the commitment says
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from peers.log.certificate import Choice, Departure, Phase
from peers.log.header import FAULT_AGE, Fault, Kind, Position
from peers.log.lineage import Lineage
from peers.messages.averages import Averaged, Statement
from peers.messages.commitment import Author, Commitment, CommittedChunk
from peers.messages.messages import PROOF_LIMIT, Vote
from peers.messages.rounds import Round, RoundName
from peers.values.identity import Signature, Verify
from peers.values.wire import Count, Digest, PeerId, Value, WireError, digest_of, pack, unpack
from peers.values.workload import PayloadKind

VOTES_OF_ONE = 16
"""Remembered votes of one peer at one position, besides those in certificates. A liar could sign others until these are
dropped; an honest voter signs two in each of a few ballots."""
VOTES_OF_PEER = 1 << 12
"""Remembered votes of one peer at all positions, so that votes for many fragments do not displace those of others."""
VOTES = 1 << 16
"""Remembered votes in all: two phases of 128 voters in each of 64 cycles, four times. Some 200 bytes each."""
ROUNDS = 8
"""Rounds whose averages are remembered: those of the present cycle's fragments, and some earlier ones."""
COMMITMENTS = 4
"""Remembered commitments of one peer, which makes one for each training."""


@dataclass(frozen=True)
class Verifier:
    """The data that checks of proofs need: the run's id, the function that verifies signatures, and the payload kind of
    each fragment."""

    run: str
    verify: Verify
    payloads: Sequence[PayloadKind]


class Signed(NamedTuple):
    """A statement as bytes, and the signature of the peer that made it."""

    text: bytes
    signature: bytes


class FaultProof(Value):
    """A proof that one peer lies, made of statements that the peer has signed."""

    kind: ClassVar[Kind]

    @property
    @abstractmethod
    def accused(self) -> str:
        """The peer that has signed the statements."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """The place in the log that the statements are about; of two places, the later one."""

    @abstractmethod
    def convicts(self, verifier: Verifier) -> bool:
        """Return True if the statements show that the accused lies."""

    @property
    def fault(self) -> Fault:
        """The fault that an entry names for this proof: the accused, the kind, and the proof's digest."""
        return Fault(peer=self.accused, kind=self.kind, proof=digest_of(pack(self)))

    def _is_signed(self, verifier: Verifier, *statements: Signed) -> bool:
        return all(verifier.verify(self.accused, one.text, one.signature) for one in statements)


# Votes -----------------------------------------------------------------------------------------------------------
class TwoVotes(FaultProof):
    """A proof that a peer gave two votes, although no honest voter gives both."""

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
    """A proof that a peer voted after its farewell: in the same incarnation, at the farewell's index or later."""

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
        """Return True if the vote contradicts the farewell. A farewell to another run does not count."""
        departure, vote = self.departure, self.vote
        is_broken = vote.incarnation == departure.incarnation and vote.position.index >= departure.index
        statements = Signed(departure.text, self.signature), Signed(vote.text, vote.signature)
        return is_broken and departure.run == verifier.run and self._is_signed(verifier, *statements)


def contradict(first: Vote, second: Vote) -> bool:
    """Return True if no honest voter gives both votes. Their signatures are not checked by this function."""
    is_one_voter = (first.position, first.incarnation) == (second.position, second.incarnation)
    return is_one_voter and are_exclusive(first.choice, second.choice)


def are_exclusive(one: Choice, other: Choice) -> bool:
    """Return True if no honest voter makes both choices at one position.

    These are two choices in one phase of a ballot; or one in phase 2, and in a later ballot another header in phase 1
    without a certificate that is newer than the lock.
    """
    if (one.ballot, one.phase) == (other.ballot, other.phase):
        return one != other
    return _breaks_lock(one, other) or _breaks_lock(other, one)


def _breaks_lock(commit: Choice, prepare: Choice) -> bool:
    """Return True if a voter that gave vote 2 to `commit` must not give vote 1 to `prepare`. A minority's votes forbid
    nothing, because they never certify an entry."""
    if (commit.phase, prepare.phase) != (Phase.COMMIT, Phase.PREPARE) or commit.alone or prepare.alone:
        return False
    is_later = commit.ballot < prepare.ballot and commit.header != prepare.header
    return is_later and (prepare.justify is None or prepare.justify <= commit.ballot)


# The exchange ----------------------------------------------------------------------------------------------------
class TwoAverages(FaultProof):
    """A proof that a reducer signed two different averages of one chunk in one round."""

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
    """A proof that a peer signed two different commitments for one training, which `author` identifies. An honest peer
    signs only one."""

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
    """A proof that a peer committed to a chunk that no encoder makes, or to a norm that the chunk does not have."""

    kind: ClassVar[Kind] = "contribution"
    author: Author
    evidence: CommittedChunk

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
    """Unpack a proof of this kind from `data`, and return it. Raises: WireError if `data` is no such proof."""
    reason = f"there are no proofs of the kind {kind!r:.40}"
    for proof in PROOFS:
        if proof.kind == kind:
            try:
                return unpack(proof, data, PROOF_LIMIT)
            except WireError as error:
                reason = str(error)
    raise WireError(reason)


# Statements -----------------------------------------------------------------------------------------------------
class SignedChoice(NamedTuple):
    """A vote's choice and signature, without the vote's position and incarnation."""

    choice: Choice
    signature: bytes


class SignedDeparture(NamedTuple):
    """A farewell and its signature."""

    departure: Departure
    signature: bytes


class Statements:
    """The store of the recent signed statements of peers. Each method except `forget` stores a statement. It returns a
    proof if the statement and an earlier one together prove a lie; otherwise None.

    The votes in certificates are remembered for 64 cycles. So after a fork with two commits, a peer that has seen the
    prepare certificates of the later ballot still has the votes that broke a lock.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._votes: OrderedDict[Position, dict[str, dict[tuple[object, ...], SignedChoice]]] = OrderedDict()
        self._votes_of = Counter[str]()
        self._farewells: dict[str, SignedDeparture] = {}
        self._averages: OrderedDict[bytes, dict[tuple[str, int], Averaged]] = OrderedDict()
        self._commitments: dict[str, dict[Author, Commitment]] = {}

    def vote(
        self, peer: str, position: Position, incarnation: int, vote: SignedChoice, is_checked: bool = False
    ) -> FaultProof | None:
        """Store a vote. Return a proof if it and an earlier statement show that the peer lies, otherwise None.

        With `is_checked` the vote is from a certificate with verified signatures. It is then stored beyond the limits,
        except a minority's vote, because a single peer can make a minority's certificate.
        """
        choice, text = vote.choice, vote.choice.text
        votes = self._votes.get(position, {}).get(peer, {})
        key = incarnation, choice.ballot.order, choice.phase
        known = votes.get(key)
        if known is not None and known.choice == choice:
            return None
        if not (is_checked or self._verifier.verify(peer, text(position, incarnation), vote.signature)):
            return None
        others = (one for (other, *_), one in votes.items() if other == incarnation)
        broken = next((one for one in others if are_exclusive(one.choice, choice)), None)
        has_room = len(votes) < VOTES_OF_ONE and self._votes_of[peer] < VOTES_OF_PEER
        if known is None and (has_room or (is_checked and not choice.alone)):
            self._keep(peer, position, key, vote)
        second = _vote(position, incarnation, vote)
        if broken is not None:
            return TwoVotes(peer=peer, first=_vote(position, incarnation, broken), second=second)
        farewell = self._farewells.get(peer)
        if farewell and farewell.departure.incarnation == incarnation and farewell.departure.index <= position.index:
            return VoteAfterFarewell(departure=farewell.departure, signature=farewell.signature, vote=second)
        return None

    def _keep(self, peer: str, position: Position, key: tuple[object, ...], vote: SignedChoice) -> None:
        self._votes.setdefault(position, {}).setdefault(peer, {})[key] = vote
        self._votes_of[peer] += 1
        while self._votes_of.total() > VOTES and len(self._votes) > 1:
            self._drop(next(iter(self._votes)))

    def farewell(self, farewell: SignedDeparture) -> FaultProof | None:
        """Store a farewell. Return a proof if it and a stored vote show that the peer lies, otherwise None. If an
        incarnation has several farewells, only the one with the lowest index is stored."""
        departure, peer = farewell.departure, farewell.departure.peer
        known = self._farewells.get(peer)
        if known and known.departure.incarnation == departure.incarnation and known.departure.index <= departure.index:
            return None
        if not self._verifier.verify(peer, departure.text, farewell.signature):
            return None
        self._farewells[peer] = farewell
        for position, voters in self._votes.items():
            for (incarnation, *_), vote in voters.get(peer, {}).items():
                if incarnation == departure.incarnation and departure.index <= position.index:
                    shown = _vote(position, departure.incarnation, vote)
                    return VoteAfterFarewell(departure=departure, signature=farewell.signature, vote=shown)
        return None

    def average(self, round: Round, average: Averaged) -> FaultProof | None:
        """Store an average whose signature the caller has verified. Return a proof if it and another average show that
        the reducer lies, otherwise None."""
        reducer = average.origin.reducer
        incarnation = round.incarnations.get(reducer)
        if incarnation is None or average.chunk >= round.chunks:
            return None
        if round.terms not in self._averages and len(self._averages) == ROUNDS:
            self._averages.popitem(last=False)
        first = self._averages.setdefault(round.terms, {}).setdefault((reducer, average.chunk), average)
        if first == average:
            return None
        return TwoAverages(round=round.name, terms=round.terms, incarnation=incarnation, first=first, second=average)

    def commitment(self, author: Author, commitment: Commitment) -> FaultProof | None:
        """Store a commitment. Return a proof if it and another commitment show that the author lies, otherwise None.
        Peers repeat commitments each second, so a signature is verified only if the commitment is new."""
        known = self._commitments.get(author.peer, {})
        first = known.get(author)
        if first is not None:
            is_other = first.contribution != commitment.contribution
            return TwoCommitments(author=author, first=first, second=commitment) if is_other else None
        if commitment.is_of(author, self._verifier.verify):
            known = self._commitments.setdefault(author.peer, known)
            known[author] = commitment
            if len(known) > COMMITMENTS:
                del known[next(iter(known))]
        return None

    def forget(self, lineage: Lineage) -> None:
        """Drop statements that no entry can name any more."""
        oldest, known = lineage.log.position.index - FAULT_AGE, lineage.log.accountable
        for position in [position for position in self._votes if position.index < oldest]:
            self._drop(position)
        self._farewells = {peer: farewell for peer, farewell in self._farewells.items() if peer in known}
        self._commitments = {peer: made for peer, made in self._commitments.items() if peer in known}

    def _drop(self, position: Position) -> None:
        self._votes_of -= Counter({peer: len(votes) for peer, votes in self._votes.pop(position).items()})


def _vote(position: Position, incarnation: int, vote: SignedChoice) -> Vote:
    return Vote(position=position, incarnation=incarnation, choice=vote.choice, signature=vote.signature)
