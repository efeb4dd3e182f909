"""Who is excluded from a run for a proven lie, as follows from the log alone.

An entry that closes a cycle may have an *annex*: faults of peers, each with the digest of what proves it. The proof
itself is not in the entry. Whoever signs the entry has seen it. For so many cycles after the entry as the manifest says
its peer gets no lease and is in no roster, so that it neither votes nor leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from peers.values.wire import Count, Digest, PeerId, Value

FAULT_LIMIT = 4
"""Faults in one entry: each is shown to all of its members."""
EXCLUSION_LIMIT = 4000
"""Peers that are excluded at once. Beyond that those go first that were excluded first."""

FAULT_AGE = 64
"""Cycles in which a lie may still be named: for so long all peers know what their log was called."""

Kind: TypeAlias = Literal["averages", "commitments", "contribution", "votes"]
"""What a peer did: signed two averages of a chunk, two commitments for a round, or two entries in an attempt; or
committed to what is no contribution."""


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
Exclusions = Annotated[tuple[Exclusion, ...], Field(max_length=EXCLUSION_LIMIT)]


def fault_in_annex(faults: Sequence[Fault], known: Collection[str], roster: Collection[str]) -> str | None:
    """Return what is wrong with an entry's annex; None: nothing.

    Only peers with a lease can be excluded, so that nobody fills the log with peers that it has made up. Nobody who is
    in the entry is: a peer that is needed for it is excluded later.
    """
    peers = [fault.peer for fault in faults]
    if len(set(peers)) < len(peers):
        return "a peer is named twice in its annex"
    for peer in peers:
        if peer not in known:
            return f"{peer}: its annex names a peer without a lease"
        if peer in roster:
            return f"{peer}: its annex names a member"
    return None


def may_be_named(told_at: int, index: int, exclusion: int) -> bool:
    """Return whether a lie told for entry `told_at` may be named in entry `index`: so lately that nobody can have been
    excluded for it before, since whoever was is still so. What was signed for the first entry excludes nobody."""
    return 0 < told_at <= index < told_at + min(FAULT_AGE, exclusion)


def exclusions_after(
    before: Iterable[Exclusion], faults: Iterable[Fault], index: int, cycles: int
) -> tuple[Exclusion, ...]:
    """Return who is excluded from the cycle after entry `index`, and until when: for so many cycles."""
    still = (exclusion for exclusion in before if exclusion.until > index)
    new = (Exclusion(peer=fault.peer, until=index + cycles) for fault in faults)
    return (*still, *new)[-EXCLUSION_LIMIT:]
