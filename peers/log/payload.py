"""The payload of an entry, and the last ones that are kept for who fell behind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from peers.values.chunks import Chunking, payload_digest
from peers.values.wire import digest_of

KEPT_BYTES = 1 << 26  # of payloads in memory, for peers that fell behind
KEPT_AT_LEAST = 3  # that are nowhere else: the one held, the last one applied, and one that somebody may be fetching


@dataclass(frozen=True)
class Payload:
    """A whole payload, and the digests of its chunks."""

    data: memoryview
    chunk_digests: tuple[bytes, ...]

    @classmethod
    def cut(cls, data: memoryview, block_bytes: int) -> Payload:
        """From bytes alone, which are digested now. All blocks have `block_bytes` bytes, but for the last."""
        chunking = Chunking(-(-len(data) // block_bytes))
        size = chunking.size * block_bytes
        return cls(data, tuple(digest_of(data[start : start + size]) for start in range(0, len(data), size)))

    @property
    def digest(self) -> bytes:
        return payload_digest(self.chunk_digests)


class KeptPayloads:
    """The last payloads, within a budget in bytes. Those that lie on a disk, too, are dropped first, then the oldest;
    but of those that lie nowhere else a few are always kept."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._payloads: OrderedDict[bytes, Payload] = OrderedDict()
        self._on_disk: set[bytes] = set()

    def keep(self, payload: Payload) -> None:
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

    def get(self, digest: bytes) -> Payload | None:
        return self._payloads.get(digest)

    def _drop_what_is_too_much(self) -> None:
        while self._bytes() > self._budget and (self._on_disk or len(self._payloads) > KEPT_AT_LEAST):
            dropped = next(digest for digest in self._payloads if not self._on_disk or digest in self._on_disk)
            del self._payloads[dropped]
            self._on_disk.discard(dropped)

    def _bytes(self) -> int:
        return sum(len(payload.data) for payload in self._payloads.values())
