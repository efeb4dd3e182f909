"""One entry's header, and places in the log.

An entry is a header and a payload, the averaged pseudo-gradient. A header carries everything that the next entry
depends on (roster, leases, sample pool, tokens so far, leader), so that a peer needs only the last header and a
snapshot to go on.

An entry that closes a cycle may have an *annex*: faults of peers, each with the digest of what proves it. The proof
itself is not in the entry. Voters have seen it before they vote for the entry. For so many cycles after the entry as
the manifest says its peer gets no lease and is in no roster, so that it neither votes nor leads.
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
"""Peers in one entry; what a header costs to check grows with the square of it."""
BYSTANDER_LIMIT = MEMBER_LIMIT - 2
"""Voters besides them that one header may name, so that more than half of all are no more than an entry's members."""
FREE_LIMIT = 4 * MEMBER_LIMIT
"""Free ranges in one header: four for each peer that may be in an entry. Beyond that the smallest are given up."""


NO_PAYLOAD = digest_of(b"")
"""In place of a payload's digest: nobody had trained the fragment, and it stays as it is."""

UNKNOWN_STATE = bytes(DIGEST_BYTES)
"""In place of a state's digest, where it is not known yet which state an entry is for."""
FAULT_LIMIT = 4
"""Faults in one entry: each is shown to all of its members."""
EXCLUSION_LIMIT = 4000
"""Peers that are excluded at once. Beyond that those go first that were excluded first."""
FAULT_AGE = 64
"""Cycles in which a lie may still be named: for so long all peers know what their log was called."""


class Member(Value):
    """A peer's share in one entry.

    `tokens` is what counts: the tokens that it trained on these samples, less the share of the chunks from which its
    blocks are absent. If fewer than half of the samples' tokens count, the samples are trained again. `incarnation` is
    the one that it votes in: the next quorum counts it in that alone, since it then remembers its votes (R12). A peer
    that is slower than others `wants` a next lease of fewer samples than a whole one; 0: a whole one. Its blocks came
    in a `format` of those that the manifest allows; 0: the run's own.
    """

    peer: PeerId
    tokens: Count
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    wants: Count = 0
    incarnation: Count = 0
    format: Count = 0

    def __hash__(self) -> int:
        """A roster is looked up by its members, which are many."""
        return hash(self.peer)


class Assignment(Value):
    """The samples that a peer trains on next, as entry `since` gave them, which was the last that the peer was in.

    A peer that misses an entry keeps its lease for as many entries as the manifest lets it be behind.
    """

    peer: PeerId
    samples: Annotated[tuple[Samples, ...], Field(max_length=PIECE_LIMIT)]
    since: Count


class Tenure(Value):
    """In how many outer steps' rosters a peer has been, as far as that matters for its probation."""

    peer: PeerId
    served: Count


class Bystander(Value):
    """A voter that is not in an entry, and has a say in the next one, in the incarnation that an entry had last."""

    peer: PeerId
    incarnation: Count


Kind: TypeAlias = Literal["averages", "commitments", "contribution", "votes"]
"""The kind of a lie: two averages of a chunk, two commitments for one training, or two votes that contradict each
other; or a commitment to what is no contribution (R9)."""


class Fault(Value):
    """A peer's lie, of this kind, and the digest of what proves it."""

    peer: PeerId
    kind: Kind
    proof: Digest


class Exclusion(Value):
    """A peer, and the last cycle from which it is excluded."""

    peer: PeerId
    until: Count


Faults = Annotated[tuple[Fault, ...], Field(max_length=FAULT_LIMIT)]


Index = Annotated[int, Field(strict=True, ge=0, lt=2**62 - 1)]
"""A count that another one follows: a header may be taken on trust, and the place after it is asked for."""


class Header(Value):
    """One link of the chain. `state` is the digest of theta and momentum when its cycle began: voters vouch for it.

    Only entries that close a cycle say the following. `leader` led the view in which the header was first proposed.
    `tenures` are those of the roster and of some who were in rosters before; none where the run has no
    probation. `faults` is its annex: the lies that were proven since the entry before; `excluded` are the peers that
    are excluded from the next cycle for these and earlier ones. `bystanders` have a say in the next entry, as the
    roster has. `amendments` are all that the log has taken in, the last one perhaps by this entry: it is in force from
    the next cycle on. None: there are none.
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
        """The amendment in force from the next cycle on; None: there is none, or the entry closes no cycle."""
        return self.amendments[-1].amendment if self.amendments else None

    def tokens_of(self, peer: str) -> int:
        """Return the peer's tokens that count in this entry."""
        return sum(member.tokens for member in self.roster if member.peer == peer)

    @cached_property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer for member in self.roster)


class Position(Value):
    """A place in the log: `index` cycles are over, and the log up to there is named by `head` (before any: the
    manifest's digest). What is to be made there is the entry of one `fragment`."""

    index: Count
    head: Digest
    fragment: Count = 0

    def __hash__(self) -> int:
        """Messages and attempts are looked up by their position all the time."""
        return hash((self.index, self.head, self.fragment))

    def __str__(self) -> str:
        fragment = f"/{self.fragment}" if self.fragment else ""
        return f"{self.index}{fragment}:{self.head.hex()[:8]}"

    def is_in_cycle_of(self, other: Position) -> bool:
        """Return whether both are about entries of one cycle of one lineage."""
        return self is other or (self.index, self.head) == (other.index, other.head)


def cycle_head(entries: Sequence[bytes]) -> bytes:
    """Return the head of a lineage after a cycle with these entries, one for each fragment, in order."""
    return entries[0] if len(entries) == 1 else digest_of(b"".join(entries))


def may_be_named(told_at: int, index: int, exclusion: int) -> bool:
    """Return whether a lie told for entry `told_at` may be named in entry `index`: so lately that a peer
    that was excluded for it before still is. What was signed for the first entry excludes no peer (R9)."""
    return 0 < told_at <= index < told_at + min(FAULT_AGE, exclusion)
