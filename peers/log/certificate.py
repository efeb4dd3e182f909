"""Certificates of entries: ballots, choices, and the signatures of enough voters for one choice.

A vote is for a *choice*: one header, in one ballot, in one of two phases. All votes for one choice are signatures of
the same fields, so a certificate is the choice with the signatures, and every peer that has the log before the entry
can check it. A certificate of phase 1 (*prepare*) is a lock that proves itself; one of phase 2 (*commit*) goes into the
log.

A choice of phase 1 names the ballot of the prepare certificate that its proposal showed. This makes a broken lock
provable: a voter that voted in phase 2, and later for another header, must have been shown a newer certificate. All
votes for one choice name the same certificate, so a certificate can be judged without a chain of earlier ones.

A signature names the voter's incarnation, since a peer that has lost its votes must not vote again as the same voter. A
peer that leaves signs that it has not voted from some index on, and will not. It is then not counted, so that a few
remaining voters can be enough. Any two certificates of one place share a signer (docs/protocol.md).
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
# prefix of the signed bytes, so that no other signature is valid as a farewell
FAREWELL_CONTEXT = b"diloco-peer farewell\0"


class CertificateError(LogError):
    """An invalid certificate: a signature is false or not of a voter, or there are too few signatures."""


# Signed data ----------------------------------------------------------------------------------------------------
class Phase(IntEnum):
    PREPARE = 1
    COMMIT = 2


class Ballot(Value):
    """The number of one proposal for an entry: view, and attempt of the view's leader. Later ballots are greater."""

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
"""The peers of a minority, all that are here, and their incarnations. Empty if the whole run's voters decide."""


def _phase(plain: object) -> Phase:
    """Check that a value from the network is a phase, 1 or 2, and return it. pydantic alone would also accept 1.0 and
    "1". Raises: ValueError."""
    if type(plain) not in (int, Phase) or plain not in (1, 2):
        raise ValueError("a phase is 1 or 2")
    return Phase(plain)


class Choice(Value):
    """The object of a vote: a header, named by its digest, in one ballot and phase.

    `justify` is the ballot of the prepare certificate that the proposal showed; None without one, and in phase 2.
    `group` is the digest of the peers of a minority that votes alone; None if the whole run votes.
    """

    ballot: Ballot
    phase: Annotated[Phase, PlainValidator(_phase)]
    header: Digest
    group: Digest | None
    justify: Ballot | None

    @property
    def alone(self) -> bool:
        """True if a minority votes alone (R8), so that the entry does not count as certified."""
        return self.group is not None

    @property
    def weight(self) -> tuple[bool, int, int]:
        """The sort key of locks: the whole run's choices come after a minority's, later ballots after earlier ones."""
        return not self.alone, *self.ballot.order

    def text(self, position: Position, incarnation: int) -> bytes:
        """Return the bytes that a voter signs to vote for this choice, at a position and in an incarnation."""
        choice = [self.ballot, int(self.phase), self.header, self.group, self.justify]
        return VOTE_CONTEXT + pack_plain([position, incarnation, choice])


class Departure(Value):
    """A leaving peer's signed statement: in this incarnation it has not voted from entry `index` on, and will not."""

    run: RunId
    peer: PeerId
    incarnation: Count
    index: Count

    @property
    def text(self) -> bytes:
        return FAREWELL_CONTEXT + pack(self)


def digest_of_group(group: Group) -> bytes | None:
    """Return the digest of a minority's peers, for `Choice.group`. Return None if `group` is empty, because then the
    whole run votes."""
    return digest_of(pack_plain(group)) if group else None


def position_of(header: Header) -> Position:
    """Return the position of the entry that a header describes."""
    return Position(index=header.index, head=header.previous, fragment=header.fragment)


# Voters --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Electorate:
    """The voters on one choice, as (peer, incarnation), and the quorum that decides among them."""

    voters: tuple[tuple[str, int], ...]
    quorum: Quorum

    def is_enough(self, signers: int, farewells: int = 0) -> bool:
        """Return True if `signers` votes are a quorum when `farewells` of the voters have left and do not count."""
        return self.quorum.is_enough(signers, len(self.voters) - farewells)


def electorate(log: LogState, header: Header, group: Group = ()) -> Electorate:
    """Return the voters on a header that follows `log`: a minority's `group`, which decides by majority; otherwise the
    voters that the log names, or, for the run's first entry, that entry's members."""
    if group:
        return Electorate(committee(group, header.previous), Quorum.MAJORITY)
    if log.last is not None:
        return Electorate(log.electors, log.quorum)
    members = tuple((member.peer, member.incarnation) for member in header.roster)
    return Electorate(committee(members, header.previous), log.quorum)


# Certificates ----------------------------------------------------------------------------------------------------
class Signer(Value):
    """One voter's signature of a choice, with the voter's place in the electorate."""

    place: Count
    signature: Signature


class Farewell(Value):
    """The farewell of a voter that has left: its place in the electorate, its `Departure.index`, and its signature."""

    place: Count
    index: Count
    signature: Signature


class Certificate(Value):
    """The signatures of enough voters for one choice. It has farewells only if the votes alone are not enough."""

    choice: Choice
    group: Group
    signers: Annotated[tuple[Signer, ...], Field(max_length=MEMBER_LIMIT)]
    farewells: Annotated[tuple[Farewell, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()


@dataclass(frozen=True, order=True)
class Support:
    """The strength of an entry's certificate, to compare entries at one position. An entry that a quorum has signed is
    stronger than others; otherwise the entry with more signatures of the log's voters is stronger."""

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
    """Return the certificate of a choice; None while too few voters have signed the choice.

    Args:
        group: the peers whose digest the choice names.
        signatures: checked signatures of the choice, by peer and incarnation.
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
    """Return the certificate with only as many signatures as a quorum needs, to save space. A minority's certificate
    keeps all signatures, since their number decides between two minorities."""
    voters = electorate(log, header, certificate.group)
    enough = voters.quorum.least(len(voters.voters))
    if certificate.choice.alone or len(certificate.signers) < enough:
        return certificate
    return certificate.model_copy(update={"signers": certificate.signers[:enough], "farewells": ()})


def prove(
    certificate: Certificate, log: LogState, header: Header, verify: Verify, phase: Phase = Phase.COMMIT
) -> Support:
    """Check a certificate for this header and phase. Return its `Support`: the number of signers, and True if they are
    a quorum. `log` ends before the header's entry.

    Raises:
        CertificateError: it is of another header or phase, a signature is false, or there are too few.
    """
    choice, position, name = certificate.choice, position_of(header), f"entry {header.index}"
    if (choice.header, choice.group) != (header.digest, digest_of_group(certificate.group)):
        raise CertificateError(f"{name}: the certificate is for another entry or group")
    if position != log.of(header.fragment).position:
        raise CertificateError(f"{name}: the certificate is for another position")
    if choice.phase is not phase:
        raise CertificateError(f"{name}: the certificate is of phase {choice.phase}, not {phase}")
    voters = electorate(log, header, certificate.group)
    places = [one.place for one in certificate.signers] + [one.place for one in certificate.farewells]
    if len(set(places)) != len(places) or any(place >= len(voters.voters) for place in places):
        raise CertificateError(f"{name}: the certificate names a voter twice, or an unknown one")
    if not voters.is_enough(len(certificate.signers), len(certificate.farewells)):
        raise CertificateError(f"{name}: {len(certificate.signers)} signers of {len(voters.voters)} voters are too few")
    if certificate.farewells and log.last is None:
        raise CertificateError(f"{name}: no farewell counts before the first entry")
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
    """Return the `Support` of a certificate for this header: the number of signers, and True if they are a quorum.
    `log` ends before the header's entry. The caller must have checked the signatures."""
    voters = electorate(log, header, certificate.group).voters
    signed = [voters[signer.place] for signer in certificate.signers]
    counted = [voter for voter in signed if log.last is None or log.counts(*voter)]
    return Support(is_certified=not certificate.choice.alone, signers=len(counted))
