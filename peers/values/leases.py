"""The samples that each peer trains. Sample numbers count along the run's endless deterministic order of samples;
ranges are half open.

The pool is a pure function of the log. Samples below the cursor that are neither trained nor leased are free, and are
dealt again before any fresh ones, so that other peers train a dead peer's samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import StrictInt


class SampleRange(NamedTuple):
    """The samples with the numbers start, start + 1, … stop - 1."""

    start: StrictInt
    stop: StrictInt

    @property
    def size(self) -> int:
        return self.stop - self.start


Lease = tuple[SampleRange, ...]
"""Ranges given to one peer for one outer step, trained in this order."""

PIECE_LIMIT = 16
"""Maximum number of ranges in one lease. If the free samples are more scattered, the rest is fresh. This keeps headers
small."""


def sample_count(ranges: Iterable[SampleRange]) -> int:
    return sum(piece.size for piece in ranges)


def _merge(ranges: Iterable[SampleRange]) -> Lease:
    """Return the ranges sorted by sample number, without empty ones, and with adjacent ones joined."""
    joined: list[SampleRange] = []
    for piece in sorted(piece for piece in ranges if piece.size > 0):
        if joined and piece.start <= joined[-1].stop:
            joined[-1] = SampleRange(joined[-1].start, max(joined[-1].stop, piece.stop))
        else:
            joined.append(piece)
    return tuple(joined)


def prefix(lease: Sequence[SampleRange], count: int) -> Lease:
    """Return the first `count` samples of a lease, in its order."""
    taken: list[SampleRange] = []
    for piece in lease:
        if count <= 0:
            break
        taken.append(SampleRange(piece.start, min(piece.stop, piece.start + count)))
        count -= taken[-1].size
    return tuple(taken)


@dataclass(frozen=True)
class SamplePool:
    """The samples that no peer has trained or leased: the `free` ranges below `cursor`, and all from `cursor` on."""

    cursor: int = 0
    free: Lease = ()

    def deal(self, counts: Iterable[int]) -> tuple[list[Lease], SamplePool]:
        """Return leases with the numbers of samples in `counts`, in at most PIECE_LIMIT ranges each, and the pool
        without these leases."""
        free, cursor = list(reversed(self.free)), self.cursor
        dealt: list[Lease] = []
        for count in counts:
            if not free and count > 0:  # the usual case, since the first few leases use up the free ranges
                dealt.append((SampleRange(cursor, cursor + count),))
                cursor += count
                continue
            pieces, missing = list[SampleRange](), count
            while free and missing > 0 and len(pieces) < PIECE_LIMIT - 1:
                whole = free.pop()
                piece = SampleRange(whole.start, min(whole.stop, whole.start + missing))
                if piece.stop < whole.stop:
                    free.append(SampleRange(piece.stop, whole.stop))
                pieces.append(piece)
                missing -= piece.size
            if missing > 0:
                pieces.append(SampleRange(cursor, cursor + missing))
                cursor += missing
            dealt.append(_merge(pieces) if len(pieces) > 1 else tuple(pieces))
        return dealt, SamplePool(cursor, tuple(reversed(free)))

    def claim(self, lease: Iterable[SampleRange]) -> SamplePool:
        """Return the pool without the ranges of `lease`, which peers have trained or leased.

        Raises:
            ValueError: a range is not in the pool, because another peer trained or holds it, or is claimed twice.
        """
        wanted = deque(sorted(lease))
        cursor = max([self.cursor, *(piece.stop for piece in wanted)])
        left: list[SampleRange] = []
        for whole in _merge((*self.free, SampleRange(self.cursor, cursor))):
            start = whole.start
            while wanted and start <= wanted[0].start < wanted[0].stop <= whole.stop:
                piece = wanted.popleft()
                left.append(SampleRange(start, piece.start))
                start = piece.stop
            left.append(SampleRange(start, whole.stop))
        if wanted:
            raise ValueError(f"samples {wanted[0].start}..{wanted[0].stop} are trained or leased already")
        return SamplePool(cursor, _merge(left))

    def bounded(self, limit: int) -> SamplePool:
        """Return the pool with only its `limit` largest free ranges. Of equally large ranges, earlier ones are kept.

        The dropped ranges are below the cursor, and no peer has them, so they are never trained.
        """
        if len(self.free) <= limit:
            return self
        largest = sorted(self.free, key=lambda piece: (-piece.size, piece.start))[:limit]
        return SamplePool(self.cursor, tuple(sorted(largest)))

    def release(self, returned: Iterable[SampleRange]) -> SamplePool:
        """Return the pool with these ranges added, for later leases."""
        return SamplePool(self.cursor, _merge((*self.free, *returned)))
