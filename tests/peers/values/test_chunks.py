"""Where a payload is cut, and how its chunks are shared out among links of different speed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.values.chunks import CHUNK_BLOCKS, CHUNKS, Chunking, digest_of_chunks, parts_of, split_by_rate
from peers.values.wire import digest_of

CHUNK_COUNTS = st.integers(1, 2000)
RATES = st.lists(st.floats(0, 1e9), min_size=1, max_size=12)


def busiest(shares: list[int], rates: list[float]) -> float:
    """Seconds, in payloads, until the slowest link is done."""
    whole, members = sum(shares), len(shares)
    return max((1 + (members - 2) * share / whole) / rate for share, rate in zip(shares, rates, strict=True))


@given(st.integers(1, 1_000_000))
def test_chunks_cover_every_block_once(block_count: int) -> None:
    chunking = Chunking(block_count)
    ranges = [chunking.blocks(chunk) for chunk in range(chunking.count)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == block_count
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [last - first for first, last in ranges]
    assert set(sizes[:-1]) <= {chunking.size}
    assert 0 < sizes[-1] <= chunking.size <= CHUNK_BLOCKS


@pytest.mark.parametrize(
    ("block_count", "size", "count"),
    [(1, 1, 1), (7, 1, 7), (CHUNKS, 1, CHUNKS), (CHUNKS * CHUNK_BLOCKS, CHUNK_BLOCKS, CHUNKS), (200_000, 128, 1563)],
)
def test_small_payloads_have_small_chunks_and_large_ones_many(block_count: int, size: int, count: int) -> None:
    chunking = Chunking(block_count)
    assert (chunking.size, chunking.count) == (size, count)


def test_a_payload_is_named_by_its_chunks_in_order() -> None:
    one, two = digest_of(b"one"), digest_of(b"two")
    assert digest_of_chunks([one, two]) == digest_of(one + two)
    assert digest_of_chunks([one, two]) != digest_of_chunks([two, one])


@given(st.lists(st.integers(0, 50), max_size=10))
def test_parts_are_consecutive_and_as_large_as_said(shares: list[int]) -> None:
    parts = parts_of(shares)
    assert [len(part) for part in parts] == shares
    assert [chunk for part in parts for chunk in part] == list(range(sum(shares)))


@given(CHUNK_COUNTS, st.integers(1, 40))
def test_an_even_split_differs_by_one_chunk_at_most(chunk_count: int, reducers: int) -> None:
    shares = split_by_rate(chunk_count, [0.0] * reducers, reducers)
    assert sum(shares) == chunk_count
    assert max(shares) - min(shares) <= 1


@given(CHUNK_COUNTS, RATES)
def test_every_chunk_is_somebodys_whatever_the_rates(chunk_count: int, rates: list[float]) -> None:
    shares = split_by_rate(chunk_count, rates, len(rates))
    assert len(shares) == len(rates)
    assert sum(shares) == chunk_count
    assert min(shares) >= 0


@given(CHUNK_COUNTS, st.lists(st.floats(1, 1e9), min_size=3, max_size=12))
def test_a_faster_link_carries_no_less(chunk_count: int, rates: list[float]) -> None:
    """But for one chunk, as chunks are whole."""
    by_rate = [share for _, share in sorted(zip(rates, split_by_rate(chunk_count, rates, len(rates)), strict=True))]
    assert all(slower <= faster + 1 for slower, faster in pairwise(by_rate))


@given(st.lists(st.floats(1, 100), min_size=3, max_size=8))
def test_no_link_is_busy_for_longer_than_in_an_even_split(rates: list[float]) -> None:
    chunks = 10_000  # so many that rounding to whole ones is nothing
    assert busiest(split_by_rate(chunks, rates, len(rates)), rates) <= 1.01 * busiest(
        split_by_rate(chunks, [0.0] * len(rates), len(rates)), rates
    )


def test_all_links_that_reduce_are_done_together() -> None:
    rates = [1.0, 2.0, 4.0]
    shares = split_by_rate(7000, rates, 3)
    times = [(1 + share / 7000) / rate for share, rate in zip(shares, rates, strict=True) if share]
    assert shares[0] == 0, "its link is busy enough with its own blocks and the average"
    assert max(times) == pytest.approx(min(times), rel=1e-3)


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ([], []),
        ([5.0, 1.0], [50, 50]),
        ([0.0, 0.0, 0.0, 0.0], [25, 25, 25, 25]),
        ([3.0, 0.0, 3.0, 3.0], [25, 25, 25, 25]),
        ([7.0], [100]),
    ],
    ids=[
        "nobody reduces",
        "two send the same whatever they reduce",
        "nothing measured",
        "one not measured: as the slowest",
        "alone",
    ],
)
def test_where_rates_say_nothing_the_split_is_even(rates: list[float], shares: list[int]) -> None:
    assert split_by_rate(100, rates, len(rates)) == shares
