"""Which samples are whose. Sample numbers count along the run's endless deterministic order; ranges are half open.

The pool is a pure function of the log: what lies below the cursor and is neither trained nor leased is free, and is
handed out again before anything fresh, so that a dead peer's samples are trained by somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import StrictInt


class SampleRange(NamedTuple):
    """Samples start, start + 1, … stop - 1."""

    start: StrictInt
    stop: StrictInt

    @property
    def size(self) -> int:
        return self.stop - self.start

    def contains(self, other: SampleRange) -> bool:
        return self.start <= other.start and other.stop <= self.stop


Lease = tuple[SampleRange, ...]
"""Ranges given to one peer for one outer step, trained in this order."""


def sample_count(ranges: Iterable[SampleRange]) -> int:
    return sum(piece.size for piece in ranges)


def subtract(ranges: Iterable[SampleRange], taken: SampleRange) -> Lease:
    """The parts of `ranges` outside `taken`, in order, without empty ranges."""
    left: list[SampleRange] = []
    for piece in ranges:
        before = SampleRange(piece.start, min(piece.stop, taken.start))
        after = SampleRange(max(piece.start, taken.stop), piece.stop)
        left += [part for part in (before, after) if part.size > 0]
    return tuple(left)


def merge(ranges: Iterable[SampleRange]) -> Lease:
    """Sorted, non-empty, adjacent ranges joined."""
    joined: list[SampleRange] = []
    for piece in sorted(piece for piece in ranges if piece.size > 0):
        if joined and piece.start <= joined[-1].stop:
            joined[-1] = SampleRange(joined[-1].start, max(joined[-1].stop, piece.stop))
        else:
            joined.append(piece)
    return tuple(joined)


def prefix(lease: Sequence[SampleRange], count: int) -> Lease:
    """The first `count` samples of a lease, in its order."""
    taken: list[SampleRange] = []
    for piece in lease:
        if count <= 0:
            break
        taken.append(SampleRange(piece.start, min(piece.stop, piece.start + count)))
        count -= taken[-1].size
    return tuple(taken)


@dataclass(frozen=True)
class SamplePool:
    """Samples nobody holds: the `free` ranges below `cursor`, and everything from `cursor` on."""

    cursor: int = 0
    free: Lease = ()

    def take(self, count: int) -> tuple[Lease, SamplePool]:
        """Exactly `count` samples: free ones first, the rest fresh."""
        taken = prefix(self.free, count)
        left: Lease = self.free
        for piece in taken:
            left = subtract(left, piece)
        missing = count - sample_count(taken)
        if missing > 0:
            taken = (*taken, SampleRange(self.cursor, self.cursor + missing))
        return merge(taken), SamplePool(self.cursor + max(0, missing), left)

    def claim(self, lease: Iterable[SampleRange]) -> SamplePool:
        """Remove ranges that a peer holds; samples skipped over on the way become free.

        Raises: ValueError when any of it is not in the pool (somebody trained or holds it).
        """
        pool = self
        for piece in lease:
            cursor = max(pool.cursor, piece.stop)
            available = merge((*pool.free, SampleRange(pool.cursor, cursor)))
            if piece.size <= 0 or not any(whole.contains(piece) for whole in available):
                raise ValueError(f"samples {piece.start}..{piece.stop} are trained or leased already")
            pool = SamplePool(cursor, subtract(available, piece))
        return pool

    def release(self, returned: Iterable[SampleRange]) -> SamplePool:
        """Put ranges back; they will be handed out again."""
        return SamplePool(self.cursor, merge((*self.free, *returned)))
