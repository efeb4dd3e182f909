"""How a payload is cut up: into chunks to move, to count and to be digested, and into parts, one per reducer.

A chunk is a run of consecutive blocks. Where the cuts lie follows from the number of blocks alone, so that the digest
of a payload, taken over the digests of its chunks, is the same everywhere and each chunk can be checked by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from peers.values.wire import digest_of

CHUNK_BLOCKS = 512  # blocks at most: half a MiB of int8, the size at which hivemind's streams are fastest
CHUNKS = 64  # at least, if there are as many blocks, so that small payloads can be pipelined, too


@dataclass(frozen=True)
class Chunking:
    """The chunks of a payload of `block_count` blocks: all of equal size, but for the last."""

    block_count: int

    @cached_property
    def size(self) -> int:
        """Blocks in a chunk."""
        return max(1, min(CHUNK_BLOCKS, self.block_count // CHUNKS))

    @property
    def count(self) -> int:
        return -(-self.block_count // self.size)

    def blocks(self, chunk: int) -> tuple[int, int]:
        """Blocks [first, last) of a chunk."""
        return chunk * self.size, min((chunk + 1) * self.size, self.block_count)


@dataclass(frozen=True)
class PayloadSize:
    """A whole payload, as far as the protocol needs to know it."""

    chunks: int
    bytes: int


def payload_digest(chunk_digests: Iterable[bytes]) -> bytes:
    """The digest that names a payload, from those of its chunks in order."""
    return digest_of(b"".join(chunk_digests))


def parts_of(shares: Sequence[int]) -> list[range]:
    """The chunks of each part: consecutive, `shares` of them each."""
    parts, start = list[range](), 0
    for share in shares:
        parts.append(range(start, start + share))
        start += share
    return parts


def split_evenly(chunk_count: int, reducers: int) -> list[int]:
    """Chunks per part, as equal as can be."""
    return [chunk_count * (place + 1) // reducers - chunk_count * place // reducers for place in range(reducers)]


def payloads_moved(members: int, share: float) -> float:
    """Payloads that a link carries each way in a round of so many members, if its owner reduces this share of one.

    The owner sends its blocks of the others' parts and the average of its own part to all: (1 - x) + (n - 1) x.
    """
    return 1 + max(members - 2, 0) * share


def split_by_rate(chunk_count: int, rates: Sequence[float], members: int) -> list[int]:
    """Chunks per reducer, such that the slowest link of all is done as early as can be.

    With n members, one that reduces a share x of the payload sends and receives 1 + (n - 2) x payloads; one that
    reduces nothing sends and receives one, however the others share. So the time T that all reducers need is the one at
    which the shares x = (T * rate - 1) / (n - 2), where positive, add up to the whole.

    Args:
        rates: payloads a second, in any unit, that each reducer's link carries; 0: not known, taken for the slowest.
        members: in the round, with those that reduce nothing.
    """
    reducers = len(rates)
    known = sorted(rate for rate in rates if rate > 0)
    if members < 3 or not known:
        return split_evenly(chunk_count, reducers)
    rates = [(rate or known[0]) / known[-1] for rate in rates]
    shares = [0.0] * reducers
    fastest = sorted(rates, reverse=True)
    for count in range(1, reducers + 1):  # the fastest `count` reduce something
        time = (members - 2 + count) / sum(fastest[:count])
        if count == reducers or time * fastest[count] <= 1:
            shares = [max(0.0, (time * rate - 1) / (members - 2)) for rate in rates]
            break
    return _round(chunk_count, shares)


def _round(chunk_count: int, shares: Sequence[float]) -> list[int]:
    """Whole chunks that add up; cumulative, so that no part is more than one chunk off."""
    bounds, total = [0], 0.0
    for share in shares:
        total += share
        bounds.append(min(chunk_count, round(chunk_count * total / max(sum(shares), 1e-9))))
    return [after - before for before, after in pairwise(bounds)]
