"""Memory for the payloads of a round, during the round and afterwards.

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

SPARE_BYTES = 1 << 25  # maximum bytes of chunk memory kept from one round to the next


@dataclass
class _RoundBuffers:
    name: RoundName
    average: memoryview
    is_kept: bool = False  # True once the average is kept as a payload, so that it must not change
    digests: dict[int, bytes] = field(default_factory=dict)  # digests of the chunks averaged so far, by chunk number
    contributions: defaultdict[int, dict[str, bytes | bytearray]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # members' blocks, by chunk number and sender


class PayloadBuffers:
    """The memory of one fragment's rounds. It stores the present round's blocks, and keeps earlier rounds' payloads."""

    def __init__(
        self,
        blocked: Blocked,
        budget: int = 0,
        older: Callable[[bytes], ChunkedPayload | None] = lambda digest: None,
        fragment: int = 0,
    ) -> None:
        """Create buffers that keep `budget` bytes of payloads. `older` returns a payload that is no longer in memory,
        given its digest."""
        self.fragment = fragment
        self._byte_range = blocked.byte_range
        self.chunking = Chunking(blocked.block_count)
        whole, *thinner = (blocked.byte_range(0, blocked.block_count, each)[1] for each in range(blocked.format_count))
        self.size = PayloadSize(self.chunking.count, whole, tuple(thinner))
        self.kept = KeptPayloads(budget)
        self._older = older
        # payloads that `older` found, kept apart so that they push no newer payloads out of memory
        self._found = KeptPayloads(0)
        self._finding = Lock()
        self.own: Blocks = b""  # this peer's latest contribution; its round may not have begun yet
        self.own_format = 0
        self.tree: SumTree | None = None  # Merkle tree over the chunks of `own`
        self._round: _RoundBuffers | None = None
        self._last: _RoundBuffers | None = None  # the last round that was closed, if its payload is kept
        self._spare: memoryview | None = None
        self._used: list[bytearray] = []

    @classmethod
    def of_each(
        cls,
        fragments: Sequence[Blocked],
        budget: int = 0,
        older: Callable[[bytes], ChunkedPayload | None] = lambda digest: None,
    ) -> tuple[Self, ...]:
        """Create the buffers of all fragments. Each keeps an equal share of `budget` bytes of payloads."""
        share = budget // len(fragments)
        return tuple(cls(blocked, share, older, fragment) for fragment, blocked in enumerate(fragments))

    def find(self, digest: bytes) -> ChunkedPayload | None:
        """Return the payload with this digest, from memory or the disk; None if it is in neither. Call this in a
        thread, since reading from a disk takes time."""
        if payload := self.kept.get(digest):
            return payload
        with self._finding:
            payload = self._found.get(digest) or self._older(digest)
            if payload:
                self._found.keep(payload)
            return payload

    def prepare(self) -> None:
        """Reserve memory for the next round's average now, because the operating system is slow to provide memory."""
        if self._spare is None:
            spare = empty(self.size.bytes)
            for offset in range(0, self.size.bytes, mmap.PAGESIZE):
                spare[offset] = 0
            self._spare = spare

    def open(self, name: RoundName) -> None:
        self._round, self._last = _RoundBuffers(name, self.room_for_payload()), None

    def room_for_payload(self) -> memoryview:
        """Return memory for a whole payload: what `prepare` reserved, if it is still unused, or else new memory."""
        spare, self._spare = self._spare, None
        return empty(self.size.bytes) if spare is None else spare

    def room_for_fetch(self) -> memoryview:
        """Return memory for a payload that this peer will fetch. If a round is open, the memory is filled
        with the round's averages, so that correct chunks need not be fetched."""
        room = self.room_for_payload()
        if self._round is not None:
            room[:] = self._round.average
        return room

    def close(self) -> None:
        """End the round, and release its memory except a few chunks for reuse. A complete average can be read until the
        next round begins; the memory of an incomplete average is reused for the next payload."""
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
        """Return the last round that was closed if it has this name and its payload is kept; otherwise None."""
        return self._last if self._last and self._last.name == name else None

    def room(self, length: int) -> bytearray:
        """Return memory for a chunk of `length` bytes, an earlier chunk's if possible: new memory is slow to get."""
        if self._used and len(self._used[-1]) == length:
            return self._used.pop()
        return bytearray(length)

    def release(self, name: RoundName, chunk: int, room: Blocks) -> None:
        """Mark the memory of a chunk's blocks as reusable, and also `room`, in which their average was computed.
        Callers must not read either of them any more."""
        size, contributions = self.chunk_length(0), self._open_round(name).contributions.pop(chunk, {})
        used = [room, *contributions.values()]
        self._used += [one for one in used if isinstance(one, bytearray) and len(one) == size]

    def chunk_bytes(self, chunk: int, format: int = 0) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of a chunk in a payload of this format."""
        return self._byte_range(*self.chunking.blocks(chunk), format)

    def chunk_length(self, chunk: int, format: int = 0) -> int:
        """Return the length in bytes of a chunk in a payload of this format."""
        start, stop = self.chunk_bytes(chunk, format)
        return stop - start

    def chunks_bytes(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of chunks [first, last) in a payload."""
        return self.chunk_bytes(first)[0], self.chunk_bytes(last - 1)[1]

    def own_chunk(self, chunk: int) -> memoryview:
        """Return a chunk of this peer's last contribution."""
        start, stop = self.chunk_bytes(chunk, self.own_format)
        return memoryview(self.own)[start:stop]

    def proof(self, chunk: int) -> ChunkProof:
        """Return the proof that this peer's blocks of a chunk belong to its commitment. Raises: KeyError if this peer
        has not committed to anything yet."""
        if self.tree is None:
            raise KeyError("this peer has committed to nothing yet")
        return ChunkProof(squares=self.tree.squares(chunk), path=self.tree.path(chunk))

    def contributions(
        self, name: RoundName, chunk: int, me: str, weights: Sequence[tuple[str, float]]
    ) -> list[tuple[Blocks, float]]:
        """Return the members' blocks of a chunk, each with its weight, in the order of `weights`. Raises: KeyError when
        the round is over, or a member's blocks are missing."""
        arrived = self._open_round(name).contributions[chunk]
        own_blocks = self.own_chunk(chunk)
        return [(own_blocks if peer == me else arrived[peer], weight) for peer, weight in weights]

    def store(self, name: RoundName, chunk: int, data: Blocks, digest: bytes | None = None) -> bytes:
        """Store the average of a chunk in the round's payload, replacing an earlier average of this chunk. Return the
        average's digest.

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
        """Return a chunk of the round's average (if `is_averaged`), or of this peer's own contribution. Raises:
        KeyError when the round is over."""
        current = (self.last(name) if is_averaged else None) or self._open_round(name)
        start, stop = self.chunk_bytes(chunk)
        return current.average[start:stop] if is_averaged else self.own_chunk(chunk)

    def assemble(self, name: RoundName) -> bytes:
        """Add the round's average to the kept payloads, and return the payload's digest. Raises: KeyError when the
        round is over, or a chunk of the average is missing."""
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
    """Return a function that computes a chunk's squared norm, and raises BadBlocksError on invalid bytes."""

    def inspect(chunk: int, data: Blocks, format: int = 0) -> float:
        if not buffers.size.has(format):
            raise BadBlocksError(f"this run has no format {format}")
        if len(data) != (length := buffers.chunk_length(chunk, format)):
            raise BadBlocksError(f"chunk {chunk} has {len(data)} bytes, not {length}")
        return measure(data, buffers.chunking.blocks(chunk)[0], buffers.fragment, format)

    return inspect


def offer(own: Blocks, buffers: PayloadBuffers, inspect: Inspect, format: int = 0) -> Sum:
    """Make `own`, a payload in this format, the contribution that this peer sends from now on. Return the root of the
    Merkle tree over its chunks' digests and squared norms.

    Raises: BadBlocksError when `own` is not a valid payload.
    """
    leaves = list[Sum]()
    for chunk in range(buffers.size.chunks):
        start, stop = buffers.chunk_bytes(chunk, format)
        blocks = memoryview(own)[start:stop]
        leaves.append(Sum(digest_of(blocks), inspect(chunk, blocks, format)))
    buffers.own, buffers.own_format, buffers.tree = own, format, SumTree(leaves)
    return buffers.tree.root
