"""Chunks of payloads and of states: their bounds, their digests, and the Merkle tree by which a peer commits to them.

A chunk of a payload is a run of consecutive blocks. Its bounds follow from the number of blocks alone, so the digest of
a payload, taken over the digests of its chunks, is the same everywhere, and each chunk can be checked by itself. The
same holds for the outer state, momentum and theta, whose chunks are cut by bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from blake3 import blake3

from peers.errors import RemoteProtocolError
from peers.values.wire import DIGEST_BYTES, Buffer, digest_of

CHUNK_BLOCKS = 128  # maximum blocks in a chunk: with int8 half a MiB, the size at which hivemind's streams are fastest
CHUNKS = 64  # minimum number of chunks of a payload, if it has enough blocks, so that small payloads can be pipelined
CONTEXT = b"diloco-peer sum\0"
NODE = struct.Struct(f"<{DIGEST_BYTES}sd")
MOST_LEVELS = 24  # maximum levels of the tree over a payload's chunks: enough for 8 TiB
KEPT_BYTES = 1 << 26  # maximum bytes of payloads kept in memory for peers that fell behind
KEPT_AT_LEAST = 3  # number of payloads always kept: the newest, the last applied, and one that a peer may be fetching
STATE_CHUNK = 1 << 20  # bytes of one chunk of a state
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Chunking:
    """The chunks of a payload of `block_count` blocks: all of equal size, except the last."""

    block_count: int

    @cached_property
    def size(self) -> int:
        """The number of blocks in a chunk."""
        return max(1, min(CHUNK_BLOCKS, self.block_count // CHUNKS))

    @property
    def count(self) -> int:
        return -(-self.block_count // self.size)

    def blocks(self, chunk: int) -> tuple[int, int]:
        """Return the range of blocks [first, last) of a chunk."""
        return chunk * self.size, min((chunk + 1) * self.size, self.block_count)


@dataclass(frozen=True)
class PayloadSize:
    """The size of a payload: its number of chunks, and its bytes in the format of averages. `thinner` has the bytes of
    a contribution in each other format, from the largest to the smallest."""

    chunks: int
    bytes: int
    thinner: tuple[int, ...] = ()

    @property
    def by_format(self) -> tuple[int, ...]:
        """The size in bytes of a contribution in each format, by the format's number."""
        return (self.bytes, *self.thinner)

    def has(self, format: int) -> bool:
        """Return True if there is a format with this number."""
        return format < len(self.by_format)

    def share(self, format: int) -> float:
        """Return the size of a contribution in a format, divided by the size of an average."""
        return self.by_format[format] / max(self.bytes, 1)


def digest_of_chunks(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a payload or a state, given the digests of its chunks in order."""
    return digest_of(b"".join(digests))


def parts_of(shares: Sequence[int]) -> list[range]:
    """Return the range of chunks that each reducer averages. `shares` has the number of chunks of each reducer."""
    return [range(start, stop) for start, stop in pairwise(accumulate(shares, initial=0))]


def payloads_moved(members: int, share: float) -> float:
    """Return the number of payloads that a link carries in each direction in a round of `members` members. `share` is
    the part of the payload, from 0 to 1, that the link's owner reduces.

    The owner sends its blocks of the others' parts, and the average of its own part to all: (1 - x) + (n - 1) x.
    """
    return 1 + max(members - 2, 0) * share


def split_by_rate(chunk_count: int, rates: Sequence[float], members: int) -> list[int]:
    """Return the number of chunks for each reducer, so that the slowest link is done as early as possible. If no rate
    is known, or rates make no difference, the numbers are as equal as possible.

    With n members, one that reduces a share x of the payload sends and receives 1 + (n - 2) x payloads; one that
    reduces nothing sends and receives one, however the others share. So the time T that all reducers need is the one at
    which the shares x = (T * rate - 1) / (n - 2), where positive, add up to the whole.

    Args:
        rates: each reducer's link rate in payloads a second, in any unit; 0 (unknown) counts as the slowest.
        members: number of members in the round, with those that reduce nothing.
    """
    reducers = len(rates)
    known = sorted(rate for rate in rates if rate > 0)
    if members < 3 or not known:
        places = range(reducers)
        return [chunk_count * (place + 1) // reducers - chunk_count * place // reducers for place in places]
    rates = [(rate or known[0]) / known[-1] for rate in rates]
    shares = [0.0] * reducers
    fastest = sorted(rates, reverse=True)
    for count in range(1, reducers + 1):  # assume that only the fastest `count` reducers get chunks
        time = (members - 2 + count) / sum(fastest[:count])
        if count == reducers or time * fastest[count] <= 1:
            shares = [max(0.0, (time * rate - 1) / (members - 2)) for rate in rates]
            break
    whole = max(sum(shares), 1e-9)
    # Rounding the running sums, not the parts, makes the parts add up; each part is at most one chunk off.
    bounds = [min(chunk_count, round(chunk_count * total / whole)) for total in accumulate(shares, initial=0.0)]
    return [after - before for before, after in pairwise(bounds)]


@dataclass(frozen=True)
class Sum:
    """A node of a SumTree: a digest of all chunks below the node, and the sum of their squared norms. A leaf has its
    chunk's digest."""

    digest: bytes
    squares: float

    @property
    def packed(self) -> bytes:
        return NODE.pack(self.digest, self.squares)


class SumTree:
    """A Merkle tree over the chunks of one payload, in order, whose nodes also sum the chunks' squared norms."""

    def __init__(self, leaves: Sequence[Sum]) -> None:
        self._levels = [list(leaves)]
        while len(level := self._levels[-1]) > 1:
            pairs = [_above(level[place], level[place + 1]) for place in range(0, len(level) - 1, 2)]
            self._levels.append(pairs + level[2 * len(pairs) :])

    @property
    def root(self) -> Sum:
        return self._levels[-1][0]

    def squares(self, chunk: int) -> float:
        """Return the squared norm of one chunk."""
        return self._levels[0][chunk].squares

    def path(self, chunk: int) -> bytes:
        """Return the sibling nodes on the path from a chunk up to the root as bytes, the lowest node first."""
        beside, place = list[Sum](), chunk
        for level in self._levels:
            beside += level[place ^ 1 : (place ^ 1) + 1]
            place //= 2
        return b"".join([node.packed for node in beside])


def root_of(chunk: int, count: int, leaf: Sum, path: bytes) -> Sum | None:
    """Return the root that follows from a leaf and its path in a tree with `count` leaves; None if the path does not
    fit such a tree."""
    if len(path) % NODE.size:
        return None
    nodes = [Sum(*fields) for fields in NODE.iter_unpack(path)]
    if any(not 0 <= node.squares < math.inf for node in nodes):  # also true for NaN
        return None
    node, place, left = leaf, chunk, count
    while left > 1:
        if place ^ 1 < left:
            if not nodes:
                return None
            beside = nodes.pop(0)
            node = _above(beside, node) if place % 2 else _above(node, beside)
        place, left = place // 2, (left + 1) // 2
    return None if nodes else node


def _above(left: Sum, right: Sum) -> Sum:
    return Sum(digest_of(CONTEXT + left.packed + right.packed), left.squares + right.squares)


@dataclass(frozen=True)
class ChunkedPayload:
    """A whole payload, and the digests of its chunks."""

    data: memoryview
    chunk_digests: tuple[bytes, ...]

    @classmethod
    def cut(cls, data: memoryview, block_bytes: int) -> ChunkedPayload:
        """Create a payload from its bytes, and digest its chunks. Each block but the last has `block_bytes` bytes."""
        chunking = Chunking(-(-len(data) // block_bytes))
        size = chunking.size * block_bytes
        return cls(data, tuple(digest_of(data[start : start + size]) for start in range(0, len(data), size)))

    @property
    def digest(self) -> bytes:
        return digest_of_chunks(self.chunk_digests)


class KeptPayloads:
    """The store of the newest payloads, within a budget of bytes. Payloads that are also on a disk are dropped first,
    then the oldest; but the newest KEPT_AT_LEAST payloads that are not on a disk are always kept."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._payloads: OrderedDict[bytes, ChunkedPayload] = OrderedDict()
        self._on_disk: set[bytes] = set()

    def keep(self, payload: ChunkedPayload) -> None:
        """Store a payload as the newest one, and mark it as not on a disk."""
        self._payloads[payload.digest] = payload
        self._payloads.move_to_end(payload.digest)
        self._on_disk.discard(payload.digest)
        self._drop_what_is_too_much()

    def lies_on_disk(self, digest: bytes) -> None:
        """Mark a payload as also on a disk, so that it may be dropped when room is needed."""
        if digest in self._payloads:
            self._on_disk.add(digest)
            self._drop_what_is_too_much()

    def get(self, digest: bytes) -> ChunkedPayload | None:
        return self._payloads.get(digest)

    def _drop_what_is_too_much(self) -> None:
        payloads = self._payloads
        while self._on_disk or len(payloads) > KEPT_AT_LEAST:
            if sum(len(payload.data) for payload in payloads.values()) <= self._budget:
                return
            dropped = next(digest for digest in payloads if not self._on_disk or digest in self._on_disk)
            del payloads[dropped]
            self._on_disk.discard(dropped)


@dataclass(frozen=True)
class StateChunking:
    """The chunks of a state of `bytes` bytes: all of STATE_CHUNK bytes, except the last."""

    bytes: int

    @property
    def count(self) -> int:
        return -(-self.bytes // STATE_CHUNK)

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of the chunks [first, last)."""
        return first * STATE_CHUNK, min(last * STATE_CHUNK, self.bytes)


def chunk_digests(vectors: Sequence[Buffer]) -> tuple[bytes, ...]:
    """Return the digests of all chunks of the state in these buffers, on up to 8 cores, as training waits for them."""
    views = [memoryview(vector).cast("B") for vector in vectors]
    chunking = StateChunking(sum(view.nbytes for view in views))

    def digest(chunk: int) -> bytes:
        hasher = blake3()
        for piece in _pieces(views, *chunking.bounds(chunk, chunk + 1)):
            hasher.update(piece)
        return hasher.digest()

    if chunking.count < THREADS:
        return tuple(map(digest, range(chunking.count)))
    with ThreadPoolExecutor(THREADS) as pool:
        return tuple(pool.map(digest, range(chunking.count)))


def chunks_of(peer: str, what: str, digests: Buffer, count: int, digest: bytes) -> tuple[bytes, ...]:
    """Split the bytes `digests`, which `peer` sent, into the digests of `count` chunks, and check them against
    `digest`, the digest of all chunks. `what` names the data in the error.

    Raises:
        RemoteProtocolError: they do not have this number or this digest.
    """
    chunks = tuple(bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES))
    if len(chunks) != count or digest_of_chunks(chunks) != digest:
        raise RemoteProtocolError(peer, f"the chunks of its {what} do not match the digest")
    return chunks


def digest_of_state(vectors: Sequence[Buffer]) -> bytes:
    """Return the digest (32 bytes) of the state in these buffers, one after another."""
    return digest_of_chunks(chunk_digests(vectors))


def _pieces(views: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Yield the parts of the views that form the bytes [start, stop) of their concatenation."""
    for view in views:
        if start < view.nbytes and stop > 0:
            yield view[max(start, 0) : stop]
        start, stop = start - view.nbytes, stop - view.nbytes
