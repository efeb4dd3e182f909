"""The chunks of payloads and of states: where they are cut, how they are digested, and how a peer commits to them.

A chunk of a payload is a run of consecutive blocks. Where the cuts lie follows from the number of blocks alone, so that
the digest of a payload, taken over the digests of its chunks, is the same everywhere and each chunk can be checked by
itself. So it is with the outer state, momentum and theta, whose chunks are cut by bytes.
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

CHUNK_BLOCKS = 128  # blocks at most: half a MiB of int8, the size at which hivemind's streams are fastest
CHUNKS = 64  # at least, if there are as many blocks, so that small payloads can be pipelined, too
CONTEXT = b"diloco-peer sum\0"
NODE = struct.Struct(f"<{DIGEST_BYTES}sd")
MOST_LEVELS = 24  # of the tree over a payload's chunks: enough for 8 TiB of them
KEPT_BYTES = 1 << 26  # of payloads in memory, for peers that fell behind
KEPT_AT_LEAST = 3  # that are nowhere else: the one held, the last one applied, and one that somebody may be fetching
STATE_CHUNK = 1 << 20  # bytes
THREADS = min(8, os.cpu_count() or 1)


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
    """A whole payload, as far as the protocol needs to know it. `thinner` are its bytes in each other format in which
    a member may contribute, from the largest to the smallest."""

    chunks: int
    bytes: int
    thinner: tuple[int, ...] = ()

    @property
    def by_format(self) -> tuple[int, ...]:
        """The bytes of a contribution in each format."""
        return (self.bytes, *self.thinner)

    def has(self, format: int) -> bool:
        """Return whether a member may contribute in a format of this number."""
        return format < len(self.by_format)

    def share(self, format: int) -> float:
        """Return the bytes of a contribution in a format, as a share of an average's."""
        return self.by_format[format] / max(self.bytes, 1)


def digest_of_chunks(digests: Iterable[bytes]) -> bytes:
    """Return the digest that names a payload or a state, from those of its chunks in order."""
    return digest_of(b"".join(digests))


def parts_of(shares: Sequence[int]) -> list[range]:
    """The chunks of each part: consecutive, `shares` of them each."""
    return [range(start, stop) for start, stop in pairwise(accumulate(shares, initial=0))]


def payloads_moved(members: int, share: float) -> float:
    """Payloads that a link carries each way in a round of so many members, if its owner reduces this share of one.

    The owner sends its blocks of the others' parts and the average of its own part to all: (1 - x) + (n - 1) x.
    """
    return 1 + max(members - 2, 0) * share


def split_by_rate(chunk_count: int, rates: Sequence[float], members: int) -> list[int]:
    """Chunks per reducer, such that the slowest link of all is done as early as can be; as equal as can be where that
    makes no difference, or no rate is known.

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
        places = range(reducers)
        return [chunk_count * (place + 1) // reducers - chunk_count * place // reducers for place in places]
    rates = [(rate or known[0]) / known[-1] for rate in rates]
    shares = [0.0] * reducers
    fastest = sorted(rates, reverse=True)
    for count in range(1, reducers + 1):  # the fastest `count` reduce something
        time = (members - 2 + count) / sum(fastest[:count])
        if count == reducers or time * fastest[count] <= 1:
            shares = [max(0.0, (time * rate - 1) / (members - 2)) for rate in rates]
            break
    whole = max(sum(shares), 1e-9)
    # Rounded are the sums, so that the parts add up and none is more than one chunk off.
    bounds = [min(chunk_count, round(chunk_count * total / whole)) for total in accumulate(shares, initial=0.0)]
    return [after - before for before, after in pairwise(bounds)]


@dataclass(frozen=True)
class Sum:
    """A node: the digest of all chunks below it, and the sum of their squared norms. A leaf has its chunk's digest."""

    digest: bytes
    squares: float

    @property
    def packed(self) -> bytes:
        return NODE.pack(self.digest, self.squares)


class SumTree:
    """Over the chunks of one payload, in order."""

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
        """Return the nodes beside the way from a chunk to the root, packed, from the lowest on."""
        beside, place = list[Sum](), chunk
        for level in self._levels:
            beside += level[place ^ 1 : (place ^ 1) + 1]
            place //= 2
        return b"".join([node.packed for node in beside])


def root_of(chunk: int, count: int, leaf: Sum, path: bytes) -> Sum | None:
    """Return the root to which a leaf of a tree with `count` leaves leads; None if that is no path in such a tree."""
    if len(path) % NODE.size:
        return None
    nodes = [Sum(*fields) for fields in NODE.iter_unpack(path)]
    if any(not 0 <= node.squares < math.inf for node in nodes):  # not so for NaN, either
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
        """From bytes alone, which are digested now. All blocks have `block_bytes` bytes, but for the last."""
        chunking = Chunking(-(-len(data) // block_bytes))
        size = chunking.size * block_bytes
        return cls(data, tuple(digest_of(data[start : start + size]) for start in range(0, len(data), size)))

    @property
    def digest(self) -> bytes:
        return digest_of_chunks(self.chunk_digests)


class KeptPayloads:
    """The last payloads, within a budget in bytes. Those that lie on a disk, too, are dropped first, then the oldest;
    but of those that lie nowhere else a few are always kept."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._payloads: OrderedDict[bytes, ChunkedPayload] = OrderedDict()
        self._on_disk: set[bytes] = set()

    def keep(self, payload: ChunkedPayload) -> None:
        """Keep a payload that is needed: it counts as the newest, and as lying nowhere else."""
        self._payloads[payload.digest] = payload
        self._payloads.move_to_end(payload.digest)
        self._on_disk.discard(payload.digest)
        self._drop_what_is_too_much()

    def lies_on_disk(self, digest: bytes) -> None:
        """Keep a payload only as long as there is room: it can be had from the disk."""
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
    """The chunks of a state of `bytes` bytes: all of STATE_CHUNK, but for the last."""

    bytes: int

    @property
    def count(self) -> int:
        return -(-self.bytes // STATE_CHUNK)

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Byte offsets [start, stop) of chunks [first, last)."""
        return first * STATE_CHUNK, min(last * STATE_CHUNK, self.bytes)


def chunk_digests(vectors: Sequence[Buffer]) -> tuple[bytes, ...]:
    """Of the state that these buffers make one after another, on all cores: training waits for it."""
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
    """Return the digests of the chunks, as `peer` sent them, of what has so many chunks and this digest.

    Raises: RemoteProtocolError when they are others.
    """
    chunks = tuple(bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES))
    if len(chunks) != count or digest_of_chunks(chunks) != digest:
        raise RemoteProtocolError(peer, f"its {what} has other chunks than its digest says")
    return chunks


def digest_of_state(vectors: Sequence[Buffer]) -> bytes:
    """The digest (32 bytes) of the state that these buffers make one after another."""
    return digest_of_chunks(chunk_digests(vectors))


def _pieces(views: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of the views one after another."""
    for view in views:
        if start < view.nbytes and stop > 0:
            yield view[max(start, 0) : stop]
        start, stop = start - view.nbytes, stop - view.nbytes
