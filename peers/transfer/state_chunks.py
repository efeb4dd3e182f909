"""How a run's outer state is cut up, so that it can be fetched from many peers at once and each piece be checked.

The state is a sequence of bytes, momentum's and then theta's: what a safetensors file with these two tensors holds. Its
digest, which heartbeats and snapshots carry, is that of the digests of its chunks in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from blake3 import blake3

from peers.errors import RemoteProtocolError
from peers.values.wire import DIGEST_BYTES, digest_of

Buffer: TypeAlias = bytes | bytearray | memoryview

STATE_CHUNK = 1 << 20  # bytes
THREADS = min(8, os.cpu_count() or 1)


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


def digest_of_chunks(digests: Sequence[bytes]) -> bytes:
    """The digest of a state, from those of its chunks."""
    return digest_of(b"".join(digests))


def chunks_of(peer: str, what: str, digests: Buffer, size: int, digest: bytes) -> tuple[bytes, ...]:
    """The digests of the chunks, as `peer` sent them, of what has `size` bytes and this digest.

    Raises: RemoteProtocolError when they are others.
    """
    chunks = tuple(bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES))
    if len(chunks) != StateChunking(size).count or digest_of_chunks(chunks) != digest:
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
