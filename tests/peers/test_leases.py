"""Leases: whatever is taken, claimed and given back, every sample is in exactly one place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.leases import Lease, SamplePool, SampleRange, merge, prefix, sample_count, subtract

RANGES = st.builds(lambda start, size: SampleRange(start, start + size), st.integers(0, 60), st.integers(0, 20))
LISTS = st.lists(RANGES, max_size=6)


def numbers(ranges: Lease | list[SampleRange]) -> list[int]:
    return [number for piece in ranges for number in range(piece.start, piece.stop)]


@given(LISTS, RANGES)
def test_subtract_leaves_the_rest(ranges: list[SampleRange], taken: SampleRange) -> None:
    left = subtract(ranges, taken)
    assert numbers(left) == [number for number in numbers(ranges) if not taken.start <= number < taken.stop]
    assert all(piece.size > 0 for piece in left)


@given(LISTS)
def test_merge_is_canonical(ranges: list[SampleRange]) -> None:
    joined = merge(ranges)
    assert numbers(joined) == sorted(set(numbers(ranges)))
    assert all(first.stop < second.start for first, second in pairwise(joined))
    assert merge(reversed(joined)) == joined


@given(LISTS, st.integers(0, 80))
def test_prefix_keeps_the_order(ranges: list[SampleRange], count: int) -> None:
    assert numbers(prefix(ranges, count)) == numbers(ranges)[:count]


@given(st.data())
def test_samples_are_conserved(data: st.DataObject) -> None:
    """Taken leases, free samples and the fresh ones beyond the cursor never overlap and leave nothing out."""
    pool, taken = SamplePool(), list[SampleRange]()
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["take", "claim", "release"]))
        if action == "take":
            count = data.draw(st.integers(0, 15))
            lease, pool = pool.take(count)
            assert sample_count(lease) == count
            taken += lease
        elif action == "claim":
            wanted = data.draw(RANGES)
            overlaps = set(numbers(taken)) & set(numbers([wanted]))
            if overlaps or wanted.size == 0:
                with pytest.raises(ValueError, match="trained or leased"):
                    pool.claim([wanted])
            else:
                pool = pool.claim([wanted])
                taken.append(wanted)
        elif taken:
            pool = pool.release([taken.pop(data.draw(st.integers(0, len(taken) - 1)))])
        held, free = numbers(taken), numbers(pool.free)
        assert sorted(held + free) == list(range(pool.cursor)), "a sample is lost, or in two places"
        assert pool.free == merge(pool.free)


def test_free_samples_are_handed_out_before_fresh_ones() -> None:
    lease, pool = SamplePool(100, (SampleRange(3, 5), SampleRange(50, 51))).take(10)
    assert lease == (SampleRange(3, 5), SampleRange(50, 51), SampleRange(100, 107))
    assert pool == SamplePool(107)


def test_samples_skipped_by_a_claim_become_free() -> None:
    assert SamplePool(10).claim([SampleRange(20, 30)]) == SamplePool(30, (SampleRange(10, 20),))


def test_one_range_cannot_be_claimed_twice_in_one_lease() -> None:
    with pytest.raises(ValueError, match=r"5\.\.8"):
        SamplePool().claim([SampleRange(0, 10), SampleRange(5, 8)])
