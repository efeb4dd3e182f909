"""Sets of chunks as bit masks: the same set, the same bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peers.messages.chunk_sets import CHUNK_SET_BYTES, chunk_set, chunks_in


@given(st.sets(st.integers(0, 8 * CHUNK_SET_BYTES - 1), max_size=50))
def test_a_set_comes_back_in_order_and_its_mask_is_no_longer_than_it_must_be(chunks: set[int]) -> None:
    mask = chunk_set(chunks)
    assert chunks_in(mask) == sorted(chunks)
    assert len(mask) == (max(chunks) // 8 + 1 if chunks else 0)


@given(st.binary(max_size=40))
def test_any_mask_is_a_set(mask: bytes) -> None:
    assert chunk_set(chunks_in(mask)) == mask.rstrip(b"\0")
