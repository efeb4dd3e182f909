"""The payload of an entry, and the last ones that are kept for who fell behind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from peers.values.chunks import Chunking, payload_digest
from peers.values.wire import digest_of

KEPT_AT_LEAST = 3  # the one held, the last one applied, and one more that somebody may be fetching


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
    """The last payloads, within a budget in bytes, oldest dropped first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._payloads: OrderedDict[bytes, Payload] = OrderedDict()

    def keep(self, payload: Payload) -> None:
        self._payloads[payload.digest] = payload
        self._payloads.move_to_end(payload.digest)
        while len(self._payloads) > KEPT_AT_LEAST and self._bytes() > self._budget:
            self._payloads.popitem(last=False)

    def get(self, digest: bytes) -> Payload | None:
        return self._payloads.get(digest)

    def _bytes(self) -> int:
        return sum(len(payload.data) for payload in self._payloads.values())
