"""The header of an entry, and positions in the log.

An entry is a header and a payload, the averaged pseudo-gradient. A header has everything that the next entry depends on
(roster, leases, sample pool, tokens so far, leader), so that a peer needs only the last header and a snapshot to go on.

An entry that closes a cycle may have an *annex*: faults of peers, each with the digest of its proof. The proof itself
is not in the entry; voters check it before they vote. For `rounds.exclusion` cycles after the entry, a peer with a
fault gets no lease and is in no roster, so that it neither votes nor leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from peers.values.leases import PIECE_LIMIT
from peers.values.manifest import AMENDMENTS_LIMIT, Amendment, LoggedAmendment
from peers.values.wire import DIGEST_BYTES, Count, Digest, PeerId, RunId, Samples, Value, digest_of, pack

MEMBER_LIMIT = 1000
"""Maximum number of peers in one entry. The cost of checking a header grows with the square of this."""
BYSTANDER_LIMIT = MEMBER_LIMIT - 2
"""Maximum number of bystanders in one header, so that a majority of members and bystanders is at most MEMBER_LIMIT."""
FREE_LIMIT = 4 * MEMBER_LIMIT
"""Maximum number of free ranges in one header: four for each peer that an entry may have. Beyond that the smallest are
given up."""


NO_PAYLOAD = digest_of(b"")
"""Stands for a payload's digest if no member has trained the fragment, so that it stays as it is."""

UNKNOWN_STATE = bytes(DIGEST_BYTES)
"""Stands for a state's digest while it is unknown."""
FAULT_LIMIT = 4
"""Maximum number of faults in one entry, since each proof is shown to all members."""
EXCLUSION_LIMIT = 4000
"""Maximum number of peers excluded at once. Beyond that, the earliest exclusions end."""
FAULT_AGE = 64
"""Cycles in which a lie may still be named, since all peers know the heads of that many last cycles."""


class Member(Value):
    """One peer in the roster of an entry.

    `tokens` is the number that counts: the tokens that it trained on these samples, less the share of the chunks from
    which its blocks are absent. If fewer than half of the samples' tokens count, the samples are trained again.
    `incarnation` is the one in which it votes: the next quorum counts it in that one only, since that one remembers its
    votes (R12). `wants` is the number of samples of its next lease, for a peer that is slower than others; 0 is a whole
    lease. `format` is the number of its blocks' format among those that the manifest allows; 0 is the run's own.
    """

    peer: PeerId
    tokens: Count
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    wants: Count = 0
    incarnation: Count = 0
    format: Count = 0

    def __hash__(self) -> int:
        """Hash the peer id only, since caches with whole rosters as keys hash all their members."""
        return hash(self.peer)


class Assignment(Value):
    """A lease: the samples that a peer trains next. `since` is the index of the entry that gave the lease, which is the
    last entry that has the peer in its roster.

    A peer that misses entries keeps its lease for as many entries as the manifest's staleness allows.
    """

    peer: PeerId
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    since: Count


class Tenure(Value):
    """The number of outer steps that have had a peer in their roster, counted up to the end of the peer's probation."""

    peer: PeerId
    served: Count


class Bystander(Value):
    """A voter outside an entry's roster that votes on the next entry, in the incarnation that the log last named."""

    peer: PeerId
    incarnation: Count


Kind: TypeAlias = Literal["averages", "commitments", "contribution", "votes"]
"""The kind of a lie: two averages of one chunk, two commitments for one training, two votes that contradict each other,
or a commitment to data that is no contribution (R9)."""


class Fault(Value):
    """A peer's proven lie: its kind, and the digest of its proof."""

    peer: PeerId
    kind: Kind
    proof: Digest


class Exclusion(Value):
    """A peer that is excluded from rosters and leases, and the index of the last cycle of its exclusion."""

    peer: PeerId
    until: Count


Faults = Annotated[tuple[Fault, ...], Field(max_length=FAULT_LIMIT)]


Index = Annotated[int, Field(strict=True, ge=0, lt=2**62 - 1)]
"""A count that can be increased by one: a header may be trusted without a check, and the index after it is used."""


class Header(Value):
    """One link of the log's hash chain. `state` is the digest of theta and momentum when the header's cycle began;
    voters vouch for `state`.

    Only entries that close a cycle have the following. `leader` led the view in which the header was first proposed.
    `tenures` are those of the roster and of some earlier members; none in a run without probation. `faults` is the
    annex: the lies proven since the entry before. `excluded` are the peers that are excluded from the next cycle for
    these and earlier lies. `bystanders` vote on the next entry, like the roster. `amendments` are all that the log has
    taken in, in order; the last one is in force from the next cycle on. None if there are none.
    """

    run: RunId
    index: Index
    fragment: Count
    previous: Digest
    state: Digest
    roster: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MEMBER_LIMIT)]
    leases: Annotated[tuple[Assignment, ...], Field(max_length=2 * MEMBER_LIMIT)]
    cursor: Count
    free: Annotated[tuple[Samples, ...], Field(max_length=FREE_LIMIT)]
    lineage_tokens: Count
    payload: Digest
    leader: PeerId | None = None
    tenures: Annotated[tuple[Tenure, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()
    faults: Faults = ()
    excluded: Annotated[tuple[Exclusion, ...], Field(max_length=EXCLUSION_LIMIT)] = ()
    bystanders: Annotated[tuple[Bystander, ...], Field(max_length=BYSTANDER_LIMIT)] = ()
    amendments: Annotated[tuple[LoggedAmendment, ...], Field(min_length=1, max_length=AMENDMENTS_LIMIT)] | None = None

    @model_validator(mode="after")
    def _amendments_are_in_order(self) -> Self:
        logged = self.amendments or ()
        ordered = all(one.amendment.number < other.amendment.number for one, other in pairwise(logged))
        cursors = [*(one.cursor for one in logged), self.cursor]
        if not ordered or cursors != sorted(cursors):
            raise ValueError("amendments: numbers or cursors are out of order")
        return self

    @cached_property
    def digest(self) -> bytes:
        return digest_of(pack(self))

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force from the next cycle on; None without one, and in an entry that closes no cycle."""
        return self.amendments[-1].amendment if self.amendments else None

    def tokens_of(self, peer: str) -> int:
        """Return the number of the peer's tokens that count in this entry."""
        return sum(member.tokens for member in self.roster if member.peer == peer)

    @cached_property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer for member in self.roster)


class Position(Value):
    """A place in the log for the next entry of a `fragment`. `index` is the number of closed cycles, and `head` is the
    digest of the log at this place (before the first entry: the manifest's digest)."""

    index: Count
    head: Digest
    fragment: Count = 0

    def __hash__(self) -> int:
        """Hash the three fields directly, which is faster than pydantic's way, since positions are often looked up."""
        return hash((self.index, self.head, self.fragment))

    def __str__(self) -> str:
        fragment = f"/{self.fragment}" if self.fragment else ""
        return f"{self.index}{fragment}:{self.head.hex()[:8]}"

    def is_in_cycle_of(self, other: Position) -> bool:
        """Return True if both positions are in the same cycle of the same log."""
        return self is other or (self.index, self.head) == (other.index, other.head)


def cycle_head(entries: Sequence[bytes]) -> bytes:
    """Return the log's head after a cycle, given the digests of the cycle's entries in fragment order."""
    return entries[0] if len(entries) == 1 else digest_of(b"".join(entries))


def may_be_named(lied_at: int, index: int, exclusion: int) -> bool:
    """Return True if entry `index` may name a lie about entry `lied_at`. The lie must be less than FAULT_AGE cycles
    old, and less than `exclusion`, the number of cycles for which a liar is excluded. Lies about the first entry are
    never named (R9)."""
    return 0 < lied_at <= index < lied_at + min(FAULT_AGE, exclusion)
