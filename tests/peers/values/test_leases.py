"""Leases: whatever is taken, claimed and given back, every sample is in exactly one place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.values.leases import PIECE_LIMIT, Lease, SamplePool, SampleRange, _merge, prefix, sample_count

RANGES = st.builds(lambda start, size: SampleRange(start, start + size), st.integers(0, 60), st.integers(0, 20))
LISTS = st.lists(RANGES, max_size=6)


def numbers(ranges: Lease | list[SampleRange]) -> list[int]:
    return [number for piece in ranges for number in range(piece.start, piece.stop)]


@given(LISTS)
def test_merge_is_canonical(ranges: list[SampleRange]) -> None:
    joined = _merge(ranges)
    assert numbers(joined) == sorted(set(numbers(ranges)))
    assert all(first.stop < second.start for first, second in pairwise(joined))
    assert _merge(reversed(joined)) == joined


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
            (lease,), pool = pool.deal([count])
            assert sample_count(lease) == count
            taken += lease
        elif action == "claim":
            wanted = data.draw(LISTS)
            twice = len(set(numbers(wanted))) < len(numbers(wanted))
            overlaps = set(numbers(taken)) & set(numbers(wanted))
            if overlaps or twice or any(piece.size == 0 for piece in wanted):
                with pytest.raises(ValueError, match="trained or leased"):
                    pool.claim(wanted)
            else:
                pool = pool.claim(wanted)
                taken += wanted
        elif taken:
            pool = pool.release([taken.pop(data.draw(st.integers(0, len(taken) - 1)))])
        held, free = numbers(taken), numbers(pool.free)
        assert sorted(held + free) == list(range(pool.cursor)), "a sample is lost, or in two places"
        assert pool.free == _merge(pool.free)


def test_free_samples_are_handed_out_before_fresh_ones() -> None:
    (lease,), pool = SamplePool(100, (SampleRange(3, 5), SampleRange(50, 51))).deal([10])
    assert lease == (SampleRange(3, 5), SampleRange(50, 51), SampleRange(100, 107))
    assert pool == SamplePool(107)


def test_samples_skipped_by_a_claim_become_free() -> None:
    assert SamplePool(10).claim([SampleRange(20, 30)]) == SamplePool(30, (SampleRange(10, 20),))


def test_one_range_cannot_be_claimed_twice_in_one_lease() -> None:
    with pytest.raises(ValueError, match=r"5\.\.8"):
        SamplePool().claim([SampleRange(0, 10), SampleRange(5, 8)])


@given(LISTS, st.lists(st.integers(0, 15), max_size=5))
def test_dealing_is_taking_again_and_again(free: list[SampleRange], counts: list[int]) -> None:
    pool = SamplePool(100, _merge(free))
    dealt, after = pool.deal(counts)
    for lease, count in zip(dealt, counts, strict=True):
        (taken,), pool = pool.deal([count])
        assert lease == taken
    assert after == pool


def scattered(pieces: int) -> SamplePool:
    """Every other sample is free."""
    return SamplePool(2 * pieces, tuple(SampleRange(2 * n, 2 * n + 1) for n in range(pieces)))


def test_a_lease_has_few_pieces_however_scattered_the_pool_is() -> None:
    (lease,), pool = scattered(100).deal([40])
    assert len(lease) == PIECE_LIMIT
    assert sample_count(lease) == 40
    assert sample_count(pool.free) == 100 - (PIECE_LIMIT - 1)


class Counted(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return super().__lt__(other)


def test_a_claim_costs_no_more_than_the_pool_and_itself() -> None:
    """Regression: each piece claimed cost a walk through the whole pool; 800 pieces took seconds."""
    pieces = 2000
    counted = tuple(SampleRange(Counted(piece.start), Counted(piece.stop)) for piece in scattered(pieces).free)
    Counted.comparisons = 0
    assert SamplePool(2 * pieces, counted).claim(counted[::2]).free == tuple(counted[1::2])
    assert Counted.comparisons < 20 * pieces


@given(LISTS, st.integers(0, 6))
def test_of_too_many_free_ranges_the_smallest_are_given_up(ranges: list[SampleRange], limit: int) -> None:
    pool = SamplePool(100, _merge(ranges))
    kept = pool.bounded(limit)
    assert (kept.cursor, len(kept.free)) == (100, min(limit, len(pool.free)))
    given_up = [piece for piece in pool.free if piece not in kept.free]
    assert list(kept.free) == [piece for piece in pool.free if piece not in given_up]
    for lost in given_up:
        for piece in kept.free:
            assert (piece.size, -piece.start) > (lost.size, -lost.start), "of equal ones the later"


def test_leases_of_scattered_samples_have_few_ranges() -> None:
    free = tuple(SampleRange(2 * place, 2 * place + 1) for place in range(100))
    dealt, _ = SamplePool(200, free).deal([20] * 50)
    assert max(len(lease) for lease in dealt) == PIECE_LIMIT
