"""Certificates of entries: ballots, choices, and the signatures of enough voters for one of them.

A vote is for a *choice*: one header, in one ballot, in one of two phases. All votes of one choice are signed over the
same fields, so a certificate is the choice once and the signatures beside it, and anybody who has the log before the
entry can check it. A certificate of phase 1 (*prepare*) is a lock that proves itself; one of phase 2 (*commit*) goes
into the log.

A choice of phase 1 names the ballot of the prepare certificate that its proposal showed. That is what makes a broken
lock provable: who has voted in phase 2, and later for another header, must have been shown a newer certificate. Because
all votes of one choice name the same one, a certificate needs no chain of earlier certificates to be judged.

A signature names the voter's incarnation, since a peer that has lost its votes must not vote again as the same voter. A
peer that leaves signs that it has voted nowhere from some index on, and will not: it is counted out there, so that few
who remain are enough. Any two certificates of one place share a signer (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from pydantic import Field, PlainValidator

from peers.log.header import MEMBER_LIMIT, Header, Position
from peers.log.state import LogError, LogState, Quorum, committee
from peers.values.identity import Signature, Verify
from peers.values.wire import Count, Digest, PeerId, RunId, Value, digest_of, pack, pack_plain

VOTE_CONTEXT = b"diloco-peer vote\0"
FAREWELL_CONTEXT = b"diloco-peer farewell\0"  # a signature made for anything else is worth nothing here


class CertificateError(LogError):
    """A certificate that proves nothing: a signature in it is false, or no voter's, or there are too few."""


# What is signed -------------------------------------------------------------------------------------------------
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


class Departure(Value):
    """What a peer signs that leaves: in this incarnation I have voted nowhere from `index` on, and will not."""

    run: RunId
    peer: PeerId
    incarnation: Count
    index: Count

    @property
    def text(self) -> bytes:
        return FAREWELL_CONTEXT + pack(self)


def digest_of_group(group: Group) -> bytes | None:
    """Return what a choice names a minority by; None for the whole run."""
    return digest_of(pack_plain(group)) if group else None


def position_of(header: Header) -> Position:
    """Return the place that a header is the entry of."""
    return Position(index=header.index, head=header.previous, fragment=header.fragment)


# Who counts ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Electorate:
    """The voters of one choice, as (peer, incarnation), and how many of them are enough."""

    voters: tuple[tuple[str, int], ...]
    quorum: Quorum

    def is_enough(self, signers: int, farewells: int = 0) -> bool:
        """Return whether so many votes are enough, when so many other voters have said farewell."""
        return self.quorum.is_enough(signers, len(self.voters) - farewells)


def electorate(log: LogState, header: Header, group: Group = ()) -> Electorate:
    """Return the voters of a header that follows this log: those that the log names; of a founding the header's own
    members, since nobody else has a say in what follows. A minority decides among its group, always by majority: the
    members of a header that it takes over may be gone."""
    if group:
        return Electorate(committee(group, header.previous), Quorum.MAJORITY)
    if log.last is not None:
        return Electorate(log.electors, log.quorum)
    members = tuple((member.peer, member.incarnation) for member in header.roster)
    return Electorate(committee(members, header.previous), log.quorum)


# Certificates ----------------------------------------------------------------------------------------------------
class Signer(Value):
    """One voter's signature, by the voter's place in the electorate."""

    place: Count
    signature: Signature


class Farewell(Value):
    """A voter that has left, by its place in the electorate, and its signature of the departure."""

    place: Count
    index: Count
    signature: Signature


class Certificate(Value):
    """Signatures of enough voters for one choice. Farewells are there only if the votes would not be enough without."""

    choice: Choice
    group: Group
    signers: Annotated[tuple[Signer, ...], Field(max_length=MEMBER_LIMIT)]
    farewells: Annotated[tuple[Farewell, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()


@dataclass(frozen=True, order=True)
class Support:
    """The support of an entry, against another one at its place: a certified one goes before all others, and of those
    that are not the one with more signatures of the log's voters."""

    is_certified: bool
    signers: int


def certify(
    log: LogState,
    header: Header,
    choice: Choice,
    group: Group,
    signatures: Mapping[tuple[str, int], bytes],
    farewells: Mapping[str, tuple[int, bytes]],
) -> Certificate | None:
    """Return the certificate of a choice, or None while too few have voted for it.

    Args:
        group: those of whom the choice names the digest.
        signatures: of the choice, by peer and incarnation; they have been checked.
        farewells: by peer that left, the index of its departure and its signature.
    """
    voters = electorate(log, header, group)
    signers = [
        Signer(place=place, signature=signatures[voter])
        for place, voter in enumerate(voters.voters)
        if voter in signatures
    ]
    gone: list[Farewell] = []
    if log.last is not None and not voters.is_enough(len(signers)):
        gone = [
            Farewell(place=place, index=farewells[voter[0]][0], signature=farewells[voter[0]][1])
            for place, voter in enumerate(voters.voters)
            if voter[0] in farewells and voter not in signatures and farewells[voter[0]][0] <= header.index
        ]
    if not voters.is_enough(len(signers), len(gone)):
        return None
    return Certificate(choice=choice, group=group, signers=tuple(signers), farewells=tuple(gone))


def shortened(certificate: Certificate, log: LogState, header: Header) -> Certificate:
    """Return the same with no more signatures than are enough, since they are long and are kept for ever. A minority's
    keeps all of them: between two minorities their number decides."""
    voters = electorate(log, header, certificate.group)
    enough = voters.quorum.least(len(voters.voters))
    if certificate.choice.alone or len(certificate.signers) < enough:
        return certificate
    return certificate.model_copy(update={"signers": certificate.signers[:enough], "farewells": ()})


def prove(
    certificate: Certificate, log: LogState, header: Header, verify: Verify, phase: Phase = Phase.COMMIT
) -> Support:
    """Check that a certificate is one of this header in this phase, and return its support. `log` is that before the
    entry.

    Raises: CertificateError when it is of something else, when a signature is false, or when there are too few.
    """
    choice, position, name = certificate.choice, position_of(header), f"entry {header.index}"
    if (choice.header, choice.group) != (header.digest, digest_of_group(certificate.group)):
        raise CertificateError(f"{name}: the certificate is of another entry, or of another group")
    if position != log.of(header.fragment).position:
        raise CertificateError(f"{name}: the certificate is of another entry")
    if choice.phase is not phase:
        raise CertificateError(f"{name}: the certificate is of phase {choice.phase}, not {phase}")
    voters = electorate(log, header, certificate.group)
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
    return weigh(certificate, log, header)


def weigh(certificate: Certificate, log: LogState, header: Header) -> Support:
    """Return the support that a certificate gives, whose signatures have been checked."""
    voters = electorate(log, header, certificate.group).voters
    signed = [voters[signer.place] for signer in certificate.signers]
    counted = [voter for voter in signed if log.last is None or log.counts(*voter)]
    return Support(is_certified=not certificate.choice.alone, signers=len(counted))
