"""What proves an entry: signatures of more than half of the roster before it, all given in one attempt.

A member signs an entry when it holds its whole payload. The signature names the attempt, since two entries can each be
held by more than half of a roster if one counts across attempts; and the incarnation, since a peer that started again
has forgotten what it signed. Who leaves signs that it has signed nothing from some entry on, and will not: it is taken
out of the roster there, so that few who remain are enough. Two certificates of one place share a signer
(docs/protocol.md, "Why no certified fork can happen").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.log.header import MEMBER_LIMIT, Header, Position
from peers.log.state import LogError, LogState
from peers.values.identity import Signature, Verify
from peers.values.wire import Count, Digest, PeerId, RunId, Value, pack

VOTE_CONTEXT = b"diloco-peer vote\0"
FAREWELL_CONTEXT = b"diloco-peer farewell\0"  # a signature made for anything else is worth nothing here

AttemptName: TypeAlias = tuple[int, str, bool]
"""An attempt's number and leader, and whether it was a minority's, which goes on alone."""


class CertificateError(LogError):
    """A certificate that is none: a signature in it is false, or of nobody whom the roster names."""


class Ballot(Value):
    """What a member signs: this header is the entry at this position, in the attempt with this number and leader. Of a
    minority's, which goes on `alone`, it says so. In one attempt it signs nothing else."""

    position: Position
    header: Digest
    number: Count
    leader: PeerId
    alone: Annotated[bool, Field(strict=True)]
    incarnation: Count

    @property
    def text(self) -> bytes:
        return VOTE_CONTEXT + pack(self)


class Departure(Value):
    """What who leaves signs: in this incarnation I have signed no entry from `index` on, and will sign none."""

    run: RunId
    peer: PeerId
    incarnation: Count
    index: Count

    @property
    def text(self) -> bytes:
        return FAREWELL_CONTEXT + pack(self)


class Vote(Value):
    """One member's signature of an entry, by its place in the roster before."""

    place: Count
    signature: Signature


class Farewell(Value):
    """A member of the roster before that has left, by its place there, and its signature of the departure."""

    place: Count
    index: Count
    signature: Signature


class Certificate(Value):
    """Signatures of one entry, in one attempt. A minority's entry stays one, whoever turns out to have left."""

    number: Count
    leader: PeerId
    alone: Annotated[bool, Field(strict=True)]
    votes: Annotated[tuple[Vote, ...], Field(max_length=MEMBER_LIMIT)]
    farewells: Annotated[tuple[Farewell, ...], Field(max_length=2 * MEMBER_LIMIT)]

    @property
    def attempt(self) -> AttemptName:
        return self.number, self.leader, self.alone


@dataclass(frozen=True, order=True)
class Proof:
    """How much speaks for an entry against another at its place: a certified one goes before all others, and of those
    that are not the one with more signatures."""

    is_certified: bool
    signers: int


def ballot(header: Header, attempt: AttemptName, incarnation: int) -> Ballot:
    """What a peer signs of an entry, as the start that it is."""
    number, leader, alone = attempt
    return Ballot(
        position=Position(index=header.index, head=header.previous, fragment=header.fragment),
        header=header.digest,
        number=number,
        leader=leader,
        alone=alone,
        incarnation=incarnation,
    )


def electorate(log: LogState, header: Header) -> tuple[tuple[str, int], ...]:
    """Return who may sign an entry, as (peer, incarnation): the roster before, without those on probation; of the first
    entry its own."""
    if log.last is None:
        return tuple((member.peer, member.incarnation) for member in header.roster)
    return tuple((peer, log.incarnations[peer]) for peer in log.voters)


def certify(
    log: LogState,
    header: Header,
    attempt: AttemptName,
    signatures: Mapping[str, bytes],
    farewells: Mapping[str, tuple[int, bytes]],
) -> Certificate:
    """Put together a certificate of those signatures that count; of farewells, if too few have signed without them.

    Args:
        signatures: by member, all of this header in this attempt, and of the incarnations that the roster names.
        farewells: by peer that left, the index of its departure and its signature.
    """
    voters = electorate(log, header)
    votes = [
        Vote(place=place, signature=signatures[peer]) for place, (peer, _) in enumerate(voters) if peer in signatures
    ]
    needs_farewells = log.last and 2 * len(votes) <= len(voters)
    gone = [
        Farewell(place=place, index=farewells[peer][0], signature=farewells[peer][1])
        for place, (peer, _) in enumerate(voters)
        if needs_farewells and peer in farewells and peer not in signatures and farewells[peer][0] <= header.index
    ]
    number, leader, alone = attempt
    return Certificate(number=number, leader=leader, alone=alone, votes=tuple(votes), farewells=tuple(gone))


def shortened(certificate: Certificate, log: LogState, header: Header) -> Certificate:
    """Return the same with no more signatures than are enough, since they are long and are kept for ever."""
    enough = len(electorate(log, header)) // 2 + 1
    if len(certificate.votes) < enough:
        return certificate
    return certificate.model_copy(update={"votes": certificate.votes[:enough], "farewells": ()})


def prove(certificate: Certificate, log: LogState, header: Header, verify: Verify) -> Proof:
    """Check all signatures, and say what they prove. `log` is that before the entry.

    Where all have left nobody is there to certify what follows. The first entry is founded by its own members, and
    nothing but an archive's signature tells one founding from another.

    Raises: CertificateError.
    """
    voters = electorate(log, header)
    places = [vote.place for vote in certificate.votes] + [farewell.place for farewell in certificate.farewells]
    if len(set(places)) != len(places) or any(place >= len(voters) for place in places):
        raise CertificateError(f"entry {header.index}: its certificate names places that the roster does not have")
    if certificate.farewells and not log.last:
        raise CertificateError(f"entry {header.index}: nobody can have left before the first entry")
    for vote in certificate.votes:
        peer, incarnation = voters[vote.place]
        if not verify(peer, ballot(header, certificate.attempt, incarnation).text, vote.signature):
            raise CertificateError(f"entry {header.index}: the signature of {peer} is not its own")
    for farewell in certificate.farewells:
        peer, incarnation = voters[farewell.place]
        if farewell.index > header.index:
            raise CertificateError(f"entry {header.index}: {peer} left later, at {farewell.index}")
        departure = Departure(run=header.run, peer=peer, incarnation=incarnation, index=farewell.index)
        if not verify(peer, departure.text, farewell.signature):
            raise CertificateError(f"entry {header.index}: the farewell of {peer} is not its own")
    return weigh(certificate, log, header)


def weigh(certificate: Certificate, log: LogState, header: Header) -> Proof:
    """Say what a certificate proves whose signatures have been checked."""
    signers, remaining = len(certificate.votes), len(electorate(log, header)) - len(certificate.farewells)
    return Proof(2 * signers > remaining > 0 and not certificate.alone, signers)
