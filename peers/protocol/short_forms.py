"""What messages say of members, rosters and entries, told relative to the log at the message's position.

A peer is told by its place in the log, a roster as a turnout, an entry as an outcome. Only a peer at that position can
read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from peers.log.chain import Outcome, Places, Turnout, header_of, outcome_of, places_of, turnout_of, voters_at
from peers.log.header import MEMBER_LIMIT, Faults, Header, Position
from peers.log.state import LogError, LogState
from peers.protocol.chunk_sets import chunk_set, chunks_in
from peers.protocol.messages import Disclaimers, Holders, Missed, Peers, Rates
from peers.protocol.rounds import Attempt, Disclaimer, Held, Holder, Round, Share
from peers.values.identity import Signature
from peers.values.manifest import Amendment
from peers.values.wire import Count, Digest, PeerId, Value, from_plain

PeerSet = Annotated[bytes, Field(strict=True, max_length=MEMBER_LIMIT // 4)]
"""Places as a bit mask, little-endian: of peers with a lease, or of members of a round."""


class _ShortAttempt(Value):
    """An attempt at the message's position."""

    number: Count
    leader: PeerId
    alone: Annotated[bool, Field(strict=True)]


class _ShortHeld(Value):
    """An entry that is held at the message's position."""

    attempt: _ShortAttempt
    outcome: Outcome
    signature: Signature


class _ShortHolders(Value):
    """Who holds an entry, by its place if it has a lease; the attempt in which it said so, and the signature."""

    holders: Annotated[tuple[tuple[Count | PeerId, _ShortAttempt, Signature], ...], Field(max_length=MEMBER_LIMIT)]


class _ShortDisclaimers(Value):
    """Who was ready with which entry, by its place if it has a lease, and the signature of that."""

    disclaimers: Annotated[
        tuple[tuple[Count | PeerId, Count, Digest | None, Signature], ...], Field(max_length=MEMBER_LIMIT)
    ]


class _ShortRound(Value):
    """A round at the message's position: the chunks that each member reduces, and the places of the lost. Those of
    the voters that are gone are among the log's voters."""

    name: _ShortAttempt
    turnout: Turnout
    chunks: Annotated[tuple[Count, ...], Field(max_length=MEMBER_LIMIT)]
    lost: PeerSet
    faults: Faults
    gone: Places
    amendment: Amendment | None
    committed: Digest


class _ShortPeers(Value):
    """Some peers: the places of those with a lease, and the names of the others."""

    places: PeerSet
    others: Peers


class _ShortCounts(Value):
    """Numbers by peer, which is named by its place if it has a lease."""

    counts: Annotated[tuple[tuple[Count | PeerId, Count], ...], Field(max_length=MEMBER_LIMIT)]


class Form(NamedTuple):
    """How values of one type are packed: to plain lists and back, at a position of the log."""

    shorten: Callable[[Any, LogState], Value | None]
    lengthen: Callable[[object, LogState], object]


# Attempts need no more of the log than its position ---------------------------------------------------------------
def shorten_attempt(attempt: Attempt, position: Position) -> _ShortAttempt:
    if attempt.position != position:
        raise LogError(f"an attempt at {attempt.position} in a message about {position}")
    return _ShortAttempt(number=attempt.number, leader=attempt.leader, alone=attempt.alone)


def lengthen_attempt(plain: object, position: Position) -> Attempt:
    """Return an attempt at the position. Raises: WireError."""
    return _attempt(from_plain(_ShortAttempt, plain), position)


def _attempt(short: _ShortAttempt, position: Position) -> Attempt:
    return Attempt(position=position, number=short.number, leader=short.leader, alone=short.alone)


# Peers ------------------------------------------------------------------------------------------------------------
def _short_peers(peers: Iterable[str], log: LogState) -> _ShortPeers:
    others = set(peers) - log.known.keys()
    return _ShortPeers(
        places=chunk_set(log.known[peer] for peer in peers if peer not in others), others=tuple(sorted(others))
    )


def _peers(plain: object, log: LogState) -> tuple[str, ...]:
    """The names in their order: what messages name is a set."""
    short = from_plain(_ShortPeers, plain)
    return tuple(sorted({*_at(log.names, short.places), *short.others}))


def _at(peers: Sequence[str], places: bytes) -> list[str]:
    """The peers at these places. Raises: LogError when there are not so many."""
    chosen = chunks_in(places)
    if chosen and chosen[-1] >= len(peers):
        raise LogError(f"there is no place {chosen[-1]} among {len(peers)} peers")
    return [peers[place] for place in chosen]


def _short_counts(counts: Iterable[tuple[str, int]], log: LogState) -> _ShortCounts:
    return _ShortCounts(counts=tuple((log.known.get(peer, peer), count) for peer, count in counts))


def _counts(plain: object, log: LogState) -> tuple[tuple[str, int], ...]:
    return tuple((_named(peer, log), count) for peer, count in from_plain(_ShortCounts, plain).counts)


def _named(peer: int | str, log: LogState) -> str:
    """The peer, told by its place or by its name. Raises: LogError when there is no such place."""
    if isinstance(peer, str):
        return peer
    if peer >= len(log.names):
        raise LogError(f"there is no place {peer} among {len(log.names)} peers")
    return log.names[peer]


def _short_holders(holders: Iterable[Holder], log: LogState) -> _ShortHolders:
    short = (
        (log.known.get(holder.peer, holder.peer), shorten_attempt(holder.attempt, log.position), holder.signature)
        for holder in holders
    )
    return _ShortHolders(holders=tuple(short))


def _holders(plain: object, log: LogState) -> tuple[Holder, ...]:
    return tuple(
        Holder(peer=_named(peer, log), attempt=_attempt(attempt, log.position), signature=signature)
        for peer, attempt, signature in from_plain(_ShortHolders, plain).holders
    )


# Entries ----------------------------------------------------------------------------------------------------------
def _header(plain: object, log: LogState) -> Header:
    return _told(from_plain(Outcome, plain), log)


def _told(outcome: Outcome, log: LogState) -> Header:
    """Raises: LogError when it is an entry of another fragment than the message."""
    if outcome.fragment != log.fragment:
        raise LogError(f"an entry of fragment {outcome.fragment} in a message about {log.position}")
    return header_of(log, outcome)


def _short_disclaimers(disclaimers: Iterable[Disclaimer], log: LogState) -> _ShortDisclaimers:
    short = ((log.known.get(one.peer, one.peer), one.last_attempt, one.held, one.signature) for one in disclaimers)
    return _ShortDisclaimers(disclaimers=tuple(short))


def _disclaimers(plain: object, log: LogState) -> tuple[Disclaimer, ...]:
    return tuple(
        Disclaimer(peer=_named(peer, log), last_attempt=last_attempt, held=held, signature=signature)
        for peer, last_attempt, held, signature in from_plain(_ShortDisclaimers, plain).disclaimers
    )


def _short_held(held: Held, log: LogState) -> _ShortHeld:
    return _ShortHeld(
        attempt=shorten_attempt(held.attempt, log.position),
        outcome=outcome_of(log, held.header),
        signature=held.signature,
    )


def _held(plain: object, log: LogState) -> Held:
    short = from_plain(_ShortHeld, plain)
    return Held(
        attempt=_attempt(short.attempt, log.position), header=_told(short.outcome, log), signature=short.signature
    )


# Rounds -----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def _short_round(round: Round, log: LogState) -> _ShortRound:
    places = {peer: place for place, peer in enumerate(round.peers)}
    return _ShortRound(
        name=shorten_attempt(round.name, log.position),
        turnout=turnout_of(log, round.roster),
        chunks=tuple(share.chunks for share in round.shares),
        lost=chunk_set(places[peer] for peer in round.lost),
        faults=round.faults,
        gone=places_of(round.gone, log),
        amendment=round.amendment,
        committed=round.committed,
    )


def _round(plain: object, log: LogState) -> Round:
    return _in_full(from_plain(_ShortRound, plain), log)


@lru_cache(maxsize=8)
def _in_full(short: _ShortRound, log: LogState) -> Round:
    """A new leader is told of one round by all members that are in it."""
    roster = short.turnout.roster(log)
    if len(roster) != len(short.chunks):
        raise LogError(f"{len(short.chunks)} parts for {len(roster)} members")
    shares = tuple(Share(member=member, chunks=chunks) for member, chunks in zip(roster, short.chunks, strict=True))
    lost = tuple(_at([member.peer for member in roster], short.lost))
    name = _attempt(short.name, log.position)
    besides = {"faults": short.faults, "gone": voters_at(short.gone, log), "amendment": short.amendment}
    return from_plain(Round, {"name": name, "shares": shares, "lost": lost, "committed": short.committed, **besides})


def _optional(form: Form, empty: object) -> Form:
    """The same for values that are often empty."""
    return Form(
        lambda value, log: form.shorten(value, log) if value else None,
        lambda plain, log: empty if plain is None else form.lengthen(plain, log),
    )


PEERS = _optional(Form(_short_peers, _peers), ())
COUNTS = _optional(Form(_short_counts, _counts), ())
HELD, ROUND = Form(_short_held, _held), Form(_short_round, _round)
FORMS: tuple[tuple[object, Form], ...] = (
    (Peers, PEERS),
    (Holders, _optional(Form(_short_holders, _holders), ())),
    (Disclaimers, _optional(Form(_short_disclaimers, _disclaimers), ())),
    (Rates, COUNTS),
    (Missed, COUNTS),
    (Held, HELD),
    (Held | None, _optional(HELD, None)),
    (Round, ROUND),
    (Round | None, _optional(ROUND, None)),
    (Header, Form(lambda header, log: outcome_of(log, header), _header)),
)
"""By type of a message's fields. Those that are not here are packed as they are."""
