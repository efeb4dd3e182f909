"""Memory for payloads, while a round makes one and afterwards; used by every driver.

A round of n members needs two payloads and at most (n - 1) / n of a third: our own blocks, the average, and the others'
blocks for our part until they are averaged. The payloads that are kept for peers that fell behind come on top.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Self, TypeAlias

from peers.messages.commitment import ChunkProof
from peers.messages.rounds import RoundName
from peers.transfer.storage import empty
from peers.values.chunks import ChunkedPayload, Chunking, KeptPayloads, PayloadSize, Sum, SumTree
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocked, Blocks, Inspect

SPARE_BYTES = 1 << 25  # of chunk memory that is kept from one round to the next


@dataclass
class _RoundBuffers:
    """The blocks of one round."""

    name: RoundName
    average: memoryview
    is_kept: bool = False  # as a payload, so that it must not change any more
    digests: dict[int, bytes] = field(default_factory=dict)  # of the averaged chunks that are here
    contributions: defaultdict[int, dict[str, bytes | bytearray]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by chunk and sender


class PayloadBuffers:
    """One fragment's memory: the blocks of the present round, and the payloads that are kept."""

    def __init__(
        self,
        blocked: Blocked,
        budget: int = 0,
        older: Callable[[bytes], ChunkedPayload | None] = lambda digest: None,
        fragment: int = 0,
    ) -> None:
        """`older` finds payloads that are not in memory any more."""
        self.fragment = fragment
        self._byte_range = blocked.byte_range
        self.chunking = Chunking(blocked.block_count)
        whole, *thinner = (blocked.byte_range(0, blocked.block_count, each)[1] for each in range(blocked.format_count))
        self.size = PayloadSize(self.chunking.count, whole, tuple(thinner))
        self.kept = KeptPayloads(budget)
        self._older = older
        self._found = KeptPayloads(0)  # older ones, apart: others' requests must not push out payloads that we need
        self._finding = Lock()
        self.own: Blocks = b""  # our last contribution, for this round or a later one
        self.own_format = 0
        self.tree: SumTree | None = None  # over its chunks
        self._round: _RoundBuffers | None = None
        self._last: _RoundBuffers | None = None  # the round before, if its payload is kept
        self._spare: memoryview | None = None
        self._used: list[bytearray] = []

    @classmethod
    def of_each(
        cls,
        fragments: Sequence[Blocked],
        budget: int = 0,
        older: Callable[[bytes], ChunkedPayload | None] = lambda digest: None,
    ) -> tuple[Self, ...]:
        """Create the buffers of each fragment, which share the budget of bytes equally."""
        share = budget // len(fragments)
        return tuple(cls(blocked, share, older, fragment) for fragment, blocked in enumerate(fragments))

    def find(self, digest: bytes) -> ChunkedPayload | None:
        """Return a payload that is kept here. Call it in a thread, since it may read all of it from a disk."""
        if payload := self.kept.get(digest):
            return payload
        with self._finding:
            payload = self._found.get(digest) or self._older(digest)
            if payload:
                self._found.keep(payload)
            return payload

    def prepare(self) -> None:
        """Reserve the next round's memory now, since all other work of a round would wait for that."""
        if self._spare is None:
            spare = empty(self.size.bytes)
            for offset in range(0, self.size.bytes, mmap.PAGESIZE):
                spare[offset] = 0
            self._spare = spare

    def open(self, name: RoundName) -> None:
        self._round, self._last = _RoundBuffers(name, self.room_for_payload()), None

    def room_for_payload(self) -> memoryview:
        """Return memory for a whole payload: the prepared one, if it is unused."""
        spare, self._spare = self._spare, None
        return empty(self.size.bytes) if spare is None else spare

    def room_for_fetch(self) -> memoryview:
        """Return memory for a whole payload, with the averages of the open round in their places."""
        room = self.room_for_payload()
        if self._round is not None:
            room[:] = self._round.average
        return room

    def close(self) -> None:
        """End the round, and release its memory, except some chunks for later use. If all averages are here, they are
        served until the next round begins; if not, their memory is the next room for a payload."""
        current, self._round = self._round, None
        if current is not None and current.is_kept:
            current.contributions.clear()
            self._last = current
        elif current is not None and self._spare is None:
            self._spare = current.average
        del self._used[SPARE_BYTES // max(1, self.chunk_length(0)) :]

    def round(self, name: RoundName) -> _RoundBuffers | None:
        return self._round if self._round and self._round.name == name else None

    def last(self, name: RoundName) -> _RoundBuffers | None:
        """Return the round before, if all of its averages are here."""
        return self._last if self._last and self._last.name == name else None

    def room(self, length: int) -> bytearray:
        """Return memory for a chunk: used memory if possible, since the system is slow to give new memory."""
        if self._used and len(self._used[-1]) == length:
            return self._used.pop()
        return bytearray(length)

    def release(self, name: RoundName, chunk: int, room: Blocks) -> None:
        """Reuse the memory of a chunk's blocks, and the `room` in which its average was made. They must not be read any
        more."""
        size, contributions = self.chunk_length(0), self._open_round(name).contributions.pop(chunk, {})
        used = [room, *contributions.values()]
        self._used += [one for one in used if isinstance(one, bytearray) and len(one) == size]

    def chunk_bytes(self, chunk: int, format: int = 0) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of a chunk in a payload."""
        return self._byte_range(*self.chunking.blocks(chunk), format)

    def chunk_length(self, chunk: int, format: int = 0) -> int:
        """Return the length of a chunk in bytes."""
        start, stop = self.chunk_bytes(chunk, format)
        return stop - start

    def chunks_bytes(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of chunks [first, last) in a payload."""
        return self.chunk_bytes(first)[0], self.chunk_bytes(last - 1)[1]

    def own_chunk(self, chunk: int) -> memoryview:
        """Return a chunk of our last contribution."""
        start, stop = self.chunk_bytes(chunk, self.own_format)
        return memoryview(self.own)[start:stop]

    def proof(self, chunk: int) -> ChunkProof:
        """Return the proof that our own blocks of a chunk belong to our commitment. Raises: KeyError without any."""
        if self.tree is None:
            raise KeyError("this peer has committed to nothing yet")
        return ChunkProof(squares=self.tree.squares(chunk), path=self.tree.path(chunk))

    def contributions(
        self, name: RoundName, chunk: int, me: str, weights: Sequence[tuple[str, float]]
    ) -> list[tuple[Blocks, float]]:
        """Return the blocks of a chunk with their members' weights, in the order of `weights`. Raises: KeyError."""
        arrived = self._open_round(name).contributions[chunk]
        own_blocks = self.own_chunk(chunk)
        return [(own_blocks if peer == me else arrived[peer], weight) for peer, weight in weights]

    def store(self, name: RoundName, chunk: int, data: Blocks, digest: bytes | None = None) -> bytes:
        """Put an averaged chunk into its place; it replaces an earlier average. Return its digest.

        A payload that is kept already is copied first, as a vote may depend on it. Raises: KeyError.
        """
        current = self._open_round(name)
        if current.is_kept:
            copy = self.room_for_payload()
            copy[:] = current.average
            current.average, current.is_kept = copy, False
        start, stop = self.chunk_bytes(chunk)
        current.average[start:stop] = data
        current.digests[chunk] = digest or digest_of(data)
        return current.digests[chunk]

    def read(self, name: RoundName, chunk: int, is_averaged: bool) -> memoryview:
        """Return a chunk of the average, or of our own blocks. Raises: KeyError when it is not here any more."""
        current = (self.last(name) if is_averaged else None) or self._open_round(name)
        start, stop = self.chunk_bytes(chunk)
        return current.average[start:stop] if is_averaged else self.own_chunk(chunk)

    def assemble(self, name: RoundName) -> bytes:
        """Keep the payload of a round whose chunks are all here. Return its digest. Raises: KeyError."""
        current = self._open_round(name)
        digests = tuple(current.digests[chunk] for chunk in range(self.size.chunks))
        payload = ChunkedPayload(current.average, digests)
        self.kept.keep(payload)
        current.is_kept = True
        return payload.digest

    def _open_round(self, name: RoundName) -> _RoundBuffers:
        current = self.round(name)
        if current is None:
            raise KeyError(f"round {name} is over")
        return current


Measure: TypeAlias = Callable[[Blocks, int, int, int], float]
"""`Workload.squared_norm`."""


def inspection(measure: Measure, buffers: PayloadBuffers) -> Inspect:
    """Return a function that measures the squared norm of a chunk, and raises BadBlocksError on invalid bytes."""

    def inspect(chunk: int, data: Blocks, format: int = 0) -> float:
        if not buffers.size.has(format):
            raise BadBlocksError(f"this run has no format {format}")
        if len(data) != (length := buffers.chunk_length(chunk, format)):
            raise BadBlocksError(f"chunk {chunk} has {len(data)} bytes, not {length}")
        return measure(data, buffers.chunking.blocks(chunk)[0], buffers.fragment, format)

    return inspect


def offer(own: Blocks, buffers: PayloadBuffers, inspect: Inspect, format: int = 0) -> Sum:
    """Make this our own blocks from now on, in a format. Return the Merkle root over their digests and squared norms.

    Raises: BadBlocksError when they are no payload.
    """
    leaves = list[Sum]()
    for chunk in range(buffers.size.chunks):
        start, stop = buffers.chunk_bytes(chunk, format)
        blocks = memoryview(own)[start:stop]
        leaves.append(Sum(digest_of(blocks), inspect(chunk, blocks, format)))
    buffers.own, buffers.own_format, buffers.tree = own, format, SumTree(leaves)
    return buffers.tree.root
