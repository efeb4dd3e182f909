"""A state's chunks: where they lie, and digests that do not depend on how the bytes are held."""

from __future__ import annotations

import random

import numpy as np
import pytest

from peers.values import chunks as state_chunks
from peers.values.chunks import STATE_CHUNK, StateChunking, chunk_digests, digest_of_chunks, digest_of_state
from peers.values.wire import digest_of


@pytest.mark.parametrize("size", [0, 1, STATE_CHUNK - 1, STATE_CHUNK, STATE_CHUNK + 1, 5 * STATE_CHUNK, 10**12 + 7])
def test_chunks_lie_side_by_side_and_cover_all(size: int) -> None:
    chunking = StateChunking(size)
    assert STATE_CHUNK * (chunking.count - 1) < size <= STATE_CHUNK * chunking.count or size == chunking.count == 0
    if chunking.count <= 10:
        bounds = [chunking.bounds(chunk, chunk + 1) for chunk in range(chunking.count)]
        assert [start for start, _ in bounds] + [size] == [0] + [stop for _, stop in bounds]
    assert chunking.bounds(0, chunking.count) == (0, size)


@pytest.mark.parametrize("threads", [1, 8], ids=["few chunks for the threads", "more chunks than threads"])
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1234])
def test_digests_are_those_of_the_chunks_however_the_state_is_split(
    monkeypatch: pytest.MonkeyPatch, size: int, threads: int
) -> None:
    monkeypatch.setattr(state_chunks, "STATE_CHUNK", 100)
    monkeypatch.setattr(state_chunks, "THREADS", threads)
    state = random.Random(0).randbytes(size)
    expected = tuple(digest_of(state[start : start + 100]) for start in range(0, size, 100))
    for split in (0, 1, size // 2, size // 3, size):
        assert chunk_digests((state[:split], state[split:])) == expected
        assert chunk_digests([memoryview(state)[:split], b"", bytearray(state[split:])]) == expected
    assert chunk_digests([memoryview(state)]) == expected
    assert digest_of_state([state]) == digest_of_chunks(expected) == digest_of(b"".join(expected))


def test_vectors_of_other_types_count_by_their_bytes() -> None:
    momentum, theta = np.arange(500, dtype=np.float32), np.ones(500, np.float32)
    whole = momentum.tobytes() + theta.tobytes()
    assert digest_of_state([momentum.data, theta.data]) == digest_of_state([whole])


def test_each_byte_counts_and_so_does_where_it_is() -> None:
    state = bytes(range(256)) * 4
    others = [state[:-1], state + b"\0", state[1:] + state[:1], bytes([1]) + state[1:]]
    assert len({digest_of_state([one]) for one in (state, *others)}) == 5
