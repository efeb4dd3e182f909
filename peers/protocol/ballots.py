"""Ballots, votes and certificates at one position of the log: the texts that are signed, who counts, and how many are
enough.

A vote is for a *choice*: one header, in one ballot, in one of two phases. All votes of one choice are signed over the
same fields, so a certificate is the choice once and the signatures beside it, and anybody who has the log before the
entry can check it. A certificate of phase 1 (*prepare*) is a lock that proves itself; one of phase 2 (*commit*) goes
into the log.

A choice of phase 1 names the ballot of the prepare certificate that its proposal showed. That is what makes a broken
lock provable: who has voted in phase 2, and later for another header, must have been shown a newer certificate. Because
all votes of one choice name the same one, a certificate needs no chain of earlier certificates to be judged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator

from peers.log.certificate import CertificateError, Departure, Farewell, Proof
from peers.log.header import MEMBER_LIMIT, Header, Position
from peers.log.state import LogState
from peers.values.identity import Signature, Verify
from peers.values.wire import Count, Digest, PeerId, Value, digest_of, pack_plain

VOTE_CONTEXT = b"diloco-peer two votes\0"  # a signature made for anything else is worth nothing here
COMMITTEE_CONTEXT = b"diloco-peer committee\0"
COMMITTEE = 128
"""Voters at most. Certificates of more would be most of what a large swarm sends."""


class Quorum(StrEnum):
    """The share of the voters that is enough, as the manifest's `rounds.quorum` says."""

    MAJORITY = "majority"
    TWO_THIRDS = "two-thirds"


class Phase(IntEnum):
    PREPARE = 1
    COMMIT = 2


class Ballot(Value):
    """The number of one proposal: the view, and the attempt that the view's leader makes in it. Ordered."""

    view: Count
    attempt: Count

    @property
    def order(self) -> tuple[int, int]:
        return self.view, self.attempt

    def __lt__(self, other: Ballot) -> bool:
        return self.order < other.order

    def __le__(self, other: Ballot) -> bool:
        return self.order <= other.order

    def __str__(self) -> str:
        return f"{self.view}.{self.attempt}"


Group = Annotated[tuple[tuple[PeerId, Count], ...], Field(max_length=MEMBER_LIMIT)]
"""The peers of a minority and their incarnations, all that are here. Empty: the whole run's voters decide."""


def _phase(plain: object) -> Phase:
    """Check a phase. By itself pydantic would take 1.0 and "1" for one, too."""
    if type(plain) not in (int, Phase) or plain not in (1, 2):
        raise ValueError("a phase is 1 or 2")
    return Phase(plain)


class Choice(Value):
    """A header (by its digest) in one ballot and phase. `justify` is the ballot of the prepare certificate that the
    proposal showed; None: it showed none, or this is phase 2. A minority's choice names the digest of its `group`."""

    ballot: Ballot
    phase: Annotated[Phase, PlainValidator(_phase)]
    header: Digest
    group: Digest | None
    justify: Ballot | None

    @property
    def alone(self) -> bool:
        """Whether a minority goes on without the others: what it decides is never certified."""
        return self.group is not None

    @property
    def weight(self) -> tuple[bool, int, int]:
        """The order of locks: the later one counts, and any of the whole run's before those of minorities."""
        return not self.alone, *self.ballot.order

    def text(self, position: Position, incarnation: int) -> bytes:
        """Return the bytes that a voter signs."""
        choice = [self.ballot, int(self.phase), self.header, self.group, self.justify]
        return VOTE_CONTEXT + pack_plain([position, incarnation, choice])


class Vote(Value):
    """Voter → leader (of up to 16 members: → all): I vote for this choice, as this incarnation."""

    kind: ClassVar[Literal["vote"]] = "vote"
    position: Position
    incarnation: Count
    choice: Choice
    signature: Signature

    @property
    def text(self) -> bytes:
        return self.choice.text(self.position, self.incarnation)


class Signer(Value):
    """One voter's signature, by the voter's place in the electorate."""

    place: Count
    signature: Signature


class Certificate(Value):
    """Signatures of enough voters for one choice. Farewells are there only if the votes would not be enough without."""

    choice: Choice
    group: Group
    signers: Annotated[tuple[Signer, ...], Field(max_length=MEMBER_LIMIT)]
    farewells: Annotated[tuple[Farewell, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()


class Certified(Value):
    """Leader → all: this header is prepared, or committed, as the certificate proves. Of phase 1 it is a lock."""

    kind: ClassVar[Literal["certified"]] = "certified"
    header: Header
    certificate: Certificate

    @property
    def position(self) -> Position:
        return position_of(self.header)

    @property
    def choice(self) -> Choice:
        return self.certificate.choice


class Propose(Value):
    """Leader → members: vote for this header. `justify` is the prepare certificate of this header that the leader knows
    of, if it knows of one. What the round came to is in the header; members have it with the chunks."""

    kind: ClassVar[Literal["propose"]] = "propose"
    ballot: Ballot
    header: Header
    group: Group
    justify: Certificate | None

    @property
    def position(self) -> Position:
        return position_of(self.header)

    @cached_property
    def choice(self) -> Choice:
        """What a voter votes for in phase 1 if it agrees."""
        return Choice(
            ballot=self.ballot,
            phase=Phase.PREPARE,
            header=self.header.digest,
            group=digest_of_group(self.group),
            justify=self.justify.choice.ballot if self.justify else None,
        )


def digest_of_group(group: Group) -> bytes | None:
    """Return what a choice names a minority by; None for the whole run."""
    return digest_of(pack_plain(group)) if group else None


def position_of(header: Header) -> Position:
    return Position(index=header.index, head=header.previous, fragment=header.fragment)


# Who counts ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Electorate:
    """The voters of one choice, as (peer, incarnation), and how many of them are enough."""

    voters: tuple[tuple[str, int], ...]
    quorum: Quorum

    def is_enough(self, signers: int, farewells: int = 0) -> bool:
        """Return whether so many votes are enough, when so many other voters have said farewell."""
        remaining = len(self.voters) - farewells
        if self.quorum is Quorum.TWO_THIRDS:
            return 3 * signers > 2 * remaining > 0
        return 2 * signers > remaining > 0


def electorate(log: LogState, header: Header, group: Group, quorum: Quorum) -> Electorate:
    """Return the voters of a header that follows this log: those that the log names; of a founding the header's own
    members, since nobody else has a say in what follows. A minority decides among its group, always by majority: the
    members of a header that it takes over may be gone."""
    if group:
        return Electorate(committee(group, header.previous), Quorum.MAJORITY)
    if log.last is not None:
        return Electorate(committee(tuple(log.starts.items()), log.last.previous), quorum)
    return Electorate(committee(tuple((one.peer, one.incarnation) for one in header.roster), header.previous), quorum)


def committee(voters: tuple[tuple[str, int], ...], seed: bytes) -> tuple[tuple[str, int], ...]:
    """Return the voters, or if they are more than `COMMITTEE` those whose hash with the seed is lowest, in the voters'
    order. The seed is the head of two cycles ago, which no leader of the last cycle could choose."""
    if len(voters) <= COMMITTEE:
        return voters
    ranked = sorted(voters, key=lambda voter: digest_of(COMMITTEE_CONTEXT + seed + voter[0].encode()))
    chosen = set(ranked[:COMMITTEE])
    return tuple(voter for voter in voters if voter in chosen)


# Certificates ----------------------------------------------------------------------------------------------------
def certify(
    voters: Electorate,
    choice: Choice,
    group: Group,
    votes: Collection[tuple[str, Vote]],
    farewells: Mapping[str, tuple[int, bytes]],
) -> Certificate | None:
    """Return the certificate of a choice, or None while too few have voted for it.

    Args:
        group: those of whom the choice names the digest.
        votes: by peer, with signatures that have been checked.
        farewells: by peer that left before this position, the index of its departure and its signature.
    """
    signatures = {(peer, vote.incarnation): vote.signature for peer, vote in votes if vote.choice == choice}
    signers = [
        Signer(place=place, signature=signatures[voter])
        for place, voter in enumerate(voters.voters)
        if voter in signatures
    ]
    gone: list[Farewell] = []
    if not voters.is_enough(len(signers)):
        gone = [
            Farewell(place=place, index=farewells[voter[0]][0], signature=farewells[voter[0]][1])
            for place, voter in enumerate(voters.voters)
            if voter[0] in farewells and voter not in signatures
        ]
    if not voters.is_enough(len(signers), len(gone)):
        return None
    return Certificate(choice=choice, group=group, signers=tuple(signers), farewells=tuple(gone))


def prove(certificate: Certificate, log: LogState, header: Header, quorum: Quorum, verify: Verify) -> Proof:
    """Check that a certificate is one of this header, and say what it proves. `log` is that before the entry.

    Raises: CertificateError when a signature is false, or when there are too few.
    """
    choice, position, name = certificate.choice, position_of(header), f"entry {header.index}"
    if (choice.header, choice.group) != (header.digest, digest_of_group(certificate.group)):
        raise CertificateError(f"{name}: the certificate is of another entry, or of another group")
    if position != log.of(header.fragment).position:
        raise CertificateError(f"{name}: the certificate is of another entry")
    voters = electorate(log, header, certificate.group, quorum)
    places = [one.place for one in certificate.signers] + [one.place for one in certificate.farewells]
    if len(set(places)) != len(places) or any(place >= len(voters.voters) for place in places):
        raise CertificateError(f"{name}: the certificate names places that the electorate does not have")
    if not voters.is_enough(len(certificate.signers), len(certificate.farewells)):
        raise CertificateError(f"{name}: {len(certificate.signers)} of {len(voters.voters)} voters are too few")
    if certificate.farewells and log.last is None:
        raise CertificateError(f"{name}: nobody can have left before the first entry")
    for signer in certificate.signers:
        peer, incarnation = voters.voters[signer.place]
        if not verify(peer, choice.text(position, incarnation), signer.signature):
            raise CertificateError(f"{name}: the signature of {peer} is not its own")
    for farewell in certificate.farewells:
        peer, incarnation = voters.voters[farewell.place]
        departure = Departure(run=header.run, peer=peer, incarnation=incarnation, index=farewell.index)
        if farewell.index > header.index or not verify(peer, departure.text, farewell.signature):
            raise CertificateError(f"{name}: the farewell of {peer} is not its own, or of a later index")
    signed = [voters.voters[signer.place] for signer in certificate.signers]
    counted = [voter for voter in signed if log.last is None or log.counts(*voter)]
    return Proof(is_certified=not choice.alone, signers=len(counted))
