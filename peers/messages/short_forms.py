"""Short forms of peers, rosters and entries in messages, relative to the log at the message's position.

A peer is its place in the log, a roster is a turnout, and an entry is an outcome. Only a peer at that position can read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from peers.log.certificate import Ballot, Certificate, Group
from peers.log.chain import Outcome, Turnout, header_of, outcome_of
from peers.log.header import MEMBER_LIMIT, Header
from peers.log.state import LogError, LogState, take_order
from peers.messages.averages import Averaged, Origin
from peers.messages.chunk_sets import chunk_set, chunks_in
from peers.messages.messages import Certified, Heirs, Peers, Rates, Signed
from peers.messages.rounds import Round, RoundName, Share
from peers.values.identity import Signature
from peers.values.wire import Count, Digest, PeerId, Value, from_plain

PeerSet = Annotated[bytes, Field(strict=True, max_length=MEMBER_LIMIT // 4)]
"""Places of peers with a lease, as a little-endian bit mask."""
Named = Count | PeerId
"""A peer by its place if it has a lease, otherwise by its id."""


class _ShortName(Value):
    """The short form of the name of a round at the message's position."""

    ballot: Ballot
    leader: Named


class _ShortRound(Value):
    """The short form of a round at the message's position. `chunks` has the number of chunks that each member
    averages."""

    name: _ShortName
    turnout: Turnout
    chunks: Annotated[tuple[Count, ...], Field(max_length=MEMBER_LIMIT)]
    committed: Digest
    group: Annotated[tuple[tuple[Named, Count], ...], Field(max_length=MEMBER_LIMIT)]


class _ShortLock(Value):
    """The short form of a lock: the outcome of a prepared header at the message's position, and its certificate."""

    outcome: Outcome
    certificate: Certificate


class _ShortPeers(Value):
    """The short form of a set of peers: those with a lease by place in `LogState.lease_holders`, the others by id."""

    places: PeerSet
    others: Peers


class _ShortCounts(Value):
    """The short form of a sequence of peers, each with a count."""

    counts: Annotated[tuple[tuple[Named, Count], ...], Field(max_length=MEMBER_LIMIT)]


class _ShortPairs(Value):
    pairs: Annotated[tuple[tuple[Named, Named], ...], Field(max_length=MEMBER_LIMIT)]


class _ShortAverage(Value):
    chunk: Count
    digest: Digest
    absent: _ShortPeers | None
    reducer: Named
    signature: Signature


class _ShortAverages(Value):
    averages: Annotated[tuple[_ShortAverage, ...], Field(max_length=1 << 16)]


class Form(NamedTuple):
    """The two functions of a short form: `shorten` makes it from a value and the log, `lengthen` restores the value."""

    shorten: Callable[[Any, LogState], Value | None]
    lengthen: Callable[[object, LogState], object]


# Peers ------------------------------------------------------------------------------------------------------------
def _place(peer: str, log: LogState) -> int | str:
    return log.lease_places.get(peer, peer)


def _named(peer: int | str, log: LogState) -> str:
    """Return the id of a peer, given its place in `log.lease_holders` or its id. Raises: LogError for no such place."""
    if isinstance(peer, str):
        return peer
    if peer >= len(log.lease_holders):
        raise LogError(f"there is no place {peer} among {len(log.lease_holders)} peers")
    return log.lease_holders[peer]


def _short_peers(peers: Iterable[str], log: LogState) -> _ShortPeers:
    others = set(peers) - log.leases.keys()
    return _ShortPeers(
        places=chunk_set(log.lease_places[peer] for peer in peers if peer not in others), others=tuple(sorted(others))
    )


def _peers(plain: object, log: LogState) -> tuple[str, ...]:
    """Return the ids of the peers in a packed _ShortPeers. They are sorted, because the packed set has no order."""
    short = from_plain(_ShortPeers, plain)
    return tuple(sorted({*_at(log.lease_holders, short.places), *short.others}))


def _at(peers: Sequence[str], places: bytes) -> list[str]:
    """Return the peers at the places in a bit mask. Raises: LogError when a place is beyond the last peer."""
    chosen = chunks_in(places)
    if chosen and chosen[-1] >= len(peers):
        raise LogError(f"there is no place {chosen[-1]} among {len(peers)} peers")
    return [peers[place] for place in chosen]


def _short_counts(counts: Iterable[tuple[str, int]], log: LogState) -> _ShortCounts:
    return _ShortCounts(counts=tuple((_place(peer, log), count) for peer, count in counts))


def _counts(plain: object, log: LogState) -> tuple[tuple[str, int], ...]:
    return tuple((_named(peer, log), count) for peer, count in from_plain(_ShortCounts, plain).counts)


def _short_heirs(heirs: Iterable[tuple[str, str]], log: LogState) -> _ShortPairs:
    return _ShortPairs(pairs=tuple((_place(one, log), _place(other, log)) for one, other in heirs))


def _heirs(plain: object, log: LogState) -> tuple[tuple[str, str], ...]:
    return tuple((_named(one, log), _named(other, log)) for one, other in from_plain(_ShortPairs, plain).pairs)


# Entries ----------------------------------------------------------------------------------------------------------
def _header(plain: object, log: LogState) -> Header:
    return _header_of(from_plain(Outcome, plain), log)


def _header_of(outcome: Outcome, log: LogState) -> Header:
    """Return the full header of an entry that a message holds in brief, as an `Outcome`. Raises: LogError if the
    outcome is not of `log.fragment`, the fragment that the message is about."""
    if outcome.fragment != log.fragment:
        raise LogError(f"an entry of fragment {outcome.fragment} in a message about {log.position}")
    return header_of(log, outcome)


def _short_lock(lock: Certified, log: LogState) -> _ShortLock:
    if lock.certificate is None:
        raise LogError("a lock without a certificate")
    return _ShortLock(outcome=outcome_of(log, lock.header), certificate=lock.certificate)


def _lock(plain: object, log: LogState) -> Certified:
    short = from_plain(_ShortLock, plain)
    return Certified(header=_header_of(short.outcome, log), certificate=short.certificate)


# Rounds -----------------------------------------------------------------------------------------------------------
def _short_name(name: RoundName, log: LogState) -> _ShortName:
    if name.position != log.position:
        raise LogError(f"a round at {name.position} in a message about {log.position}")
    return _ShortName(ballot=name.ballot, leader=_place(name.leader, log))


def _name(plain: object, log: LogState) -> RoundName:
    return _name_of(from_plain(_ShortName, plain), log)


def _name_of(short: _ShortName, log: LogState) -> RoundName:
    return RoundName(position=log.position, ballot=short.ballot, leader=_named(short.leader, log))


@lru_cache(maxsize=8)
def _short_round(round: Round, log: LogState) -> _ShortRound:
    return _ShortRound(
        name=_short_name(round.name, log),
        turnout=Turnout.of(log, round.roster),
        chunks=tuple(share.chunks for share in round.shares),
        committed=round.committed,
        group=tuple((_place(peer, log), start) for peer, start in round.group),
    )


def _round(plain: object, log: LogState) -> Round:
    short = from_plain(_ShortRound, plain)
    roster = short.turnout.roster(log)
    if len(roster) != len(short.chunks):
        raise LogError(f"{len(short.chunks)} parts for {len(roster)} members")
    shares = tuple(Share(member=member, chunks=chunks) for member, chunks in zip(roster, short.chunks, strict=True))
    group = tuple((_named(peer, log), start) for peer, start in short.group)
    name = _name_of(short.name, log)
    return from_plain(Round, {"name": name, "shares": shares, "committed": short.committed, "group": group})


def _short_averages(averages: Iterable[Averaged], log: LogState) -> _ShortAverages:
    return _ShortAverages(
        averages=tuple(
            _ShortAverage(
                chunk=one.chunk,
                digest=one.digest,
                absent=_short_peers(one.absent, log) if one.absent else None,
                reducer=_place(one.reducer, log),
                signature=one.origin.signature,
            )
            for one in averages
        )
    )


def _averages(plain: object, log: LogState) -> tuple[Averaged, ...]:
    return tuple(_average(short, log) for short in from_plain(_ShortAverages, plain).averages)


def _average(short: _ShortAverage, log: LogState) -> Averaged:
    absent: set[str] = set()
    if short.absent is not None:
        absent = {*_at(log.lease_holders, short.absent.places), *short.absent.others}
    origin = Origin(reducer=_named(short.reducer, log), signature=short.signature)
    in_order = tuple(take_order(log.roster, absent))
    return Averaged(chunk=short.chunk, digest=short.digest, absent=in_order, origin=origin)


def _optional(form: Form, empty: object) -> Form:
    """Return a form like `form`, except that it packs an empty value as None, and unpacks None as `empty`."""
    return Form(
        lambda value, log: form.shorten(value, log) if value else None,
        lambda plain, log: empty if plain is None else form.lengthen(plain, log),
    )


LOCK, NAME = Form(_short_lock, _lock), Form(_short_name, _name)
FORMS: tuple[tuple[object, Form], ...] = (
    (Peers, _optional(Form(_short_peers, _peers), ())),
    (Rates, _optional(Form(_short_counts, _counts), ())),
    (Group, _optional(Form(_short_counts, _counts), ())),
    (Heirs, _optional(Form(_short_heirs, _heirs), ())),
    (Certified | None, _optional(LOCK, None)),
    (RoundName, NAME),
    (RoundName | None, _optional(NAME, None)),
    (Round, Form(_short_round, _round)),
    (Signed, Form(_short_averages, _averages)),
    (Header, Form(lambda header, log: outcome_of(log, header), _header)),
)
"""The short form of each type of field. Fields of other types are packed as they are."""
