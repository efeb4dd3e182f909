from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.config.data import MixturePhase
from opendiloco.data.sample_order import Mixture, Mixtures, Numbers, SampleOrder, Shuffled, Windows, _Permutation

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_permutation_meets_every_window_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(_Permutation(size, seed, epoch)(np.arange(size))) == list(range(size))


def test_permutations_are_the_same_on_every_machine_for_ever() -> None:
    assert _Permutation(1000, seed=5, epoch=0)(np.arange(6)).tolist() == [617, 742, 433, 154, 517, 150]


def test_seeds_and_epochs_give_unrelated_permutations() -> None:
    positions = np.arange(4096)
    orders = [_Permutation(4096, seed, epoch)(positions) for seed in (0, 1) for epoch in (0, 1)]
    for first in range(4):
        assert np.mean(orders[first] == positions) < 0.01
        assert abs(np.corrcoef(orders[first], positions)[0, 1]) < 0.06
        for second in range(first):
            assert np.mean(orders[first] == orders[second]) < 0.01


def windows_of(count: int, first: int = 0) -> Windows:
    """Windows of one token (and the one before), each with a number of its own."""
    return Windows(np.arange(first, first + count + 1, dtype=np.uint32), sequence_length=1)


def test_a_sample_depends_on_its_number_alone() -> None:
    order = Shuffled.whole(Windows(np.arange(101, dtype=np.uint16), sequence_length=5), seed=9)
    whole = order.read(np.arange(50))
    assert np.array_equal(whole[13:47], order.read(np.arange(13, 47)))
    assert sorted(whole[:20, 0]) == sorted(whole[20:40, 0]) == list(range(0, 100, 5))
    assert whole[:20, 0].tolist() != whole[20:40, 0].tolist()


@given(SHARES, st.integers(0, 10**15))
def test_a_mixture_is_exact_over_every_cycle_and_close_over_any_stretch(shares: list[int], start: int) -> None:
    mixture, cycle = Mixture(shares), sum(shares)
    sources, _ = mixture.assign(np.arange(start, start + 3 * cycle))
    assert np.bincount(sources[:cycle]).tolist() == shares
    for length in range(1, 3 * cycle, 1 + cycle // 7):
        counts = np.bincount(sources[:length], minlength=len(shares))
        assert np.all(np.abs(counts - length * np.array(shares) / cycle) <= len(shares))


@given(SHARES)
def test_each_source_counts_its_samples_through(shares: list[int]) -> None:
    sources, positions = Mixture(shares).assign(np.arange(4 * sum(shares)))
    for source, share in enumerate(shares):
        assert positions[sources == source].tolist() == list(range(4 * share))


def test_mixtures_are_the_same_on_every_machine_for_ever() -> None:
    sources, positions = Mixture([5, 3, 2]).assign(np.arange(12))
    assert sources.tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0, 0, 1]
    assert positions.tolist() == [0, 0, 0, 1, 2, 1, 3, 1, 2, 4, 5, 3]


def test_a_number_far_away_costs_no_more_than_a_near_one() -> None:
    """Regression-proof: nothing is counted up to it."""
    sources, positions = Mixture([1, 2]).assign(np.array([3 * 10**17, 3 * 10**17 + 1]))
    assert sources.tolist() == [1, 0]
    assert positions.tolist() == [2 * 10**17, 10**17]


PHASES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)), max_size=4
)


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), PHASES)
def test_where_the_mixture_changes_each_source_goes_on_where_it_is(
    shares: list[int], later: list[tuple[int, list[int]]]
) -> None:
    """No sample is dealt twice, and none is left out; each phase has its proportions from its first number on."""
    phases = [MixturePhase(0, tuple(shares))]
    for length, other in later:
        phases.append(MixturePhase(phases[-1].first + length, tuple(other)))
    end = phases[-1].first + 3 * sum(phases[-1].shares)
    sources, positions = Mixtures(phases).assign(np.arange(end))
    for source in range(3):
        assert positions[sources == source].tolist() == list(range(int(np.sum(sources == source))))
    for phase, stop in zip(phases, [*(one.first for one in phases[1:]), end], strict=True):
        alone, _ = Mixture(phase.shares).assign(np.arange(stop - phase.first))
        assert np.array_equal(sources[phase.first : stop], alone)
    there = np.array([end - 1, 0, end // 2])
    found = Mixtures(phases).assign(there)
    assert [each.tolist() for each in found] == [sources[there].tolist(), positions[there].tolist()]


def test_a_mixture_that_follows_is_known_at_once_and_changes_nothing_that_came_before() -> None:
    sources = [Shuffled.whole(windows_of(20), 1), Shuffled.whole(windows_of(50, 1000), 2)]
    plain, changed = SampleOrder(sources, Mixture([2, 1])), SampleOrder(sources, Mixture([2, 1]))
    changed.mix([MixturePhase(31, (0, 1))])
    before = np.arange(31)
    assert np.array_equal(changed.read(before), plain.read(before))
    assert np.all(changed.read(np.arange(31, 60))[:, 0] >= 1000)
    changed.mix([MixturePhase(31, (0, 1)), MixturePhase(40, (1, 0))])
    assert np.all(changed.read(np.arange(40, 60))[:, 0] < 1000)
    changed.mix([])
    assert np.array_equal(changed.read(np.arange(60)), plain.read(np.arange(60)))


def test_every_source_of_a_mixture_has_epochs_of_its_own() -> None:
    order = SampleOrder([Shuffled.whole(windows_of(20), 1), Shuffled.whole(windows_of(50, 1000), 2)], Mixture([2, 1]))
    read = order.read(np.arange(150))[:, 0]
    small, large = read[read < 1000], read[read >= 1000] - 1000
    for epoch in range(5):
        assert sorted(small[20 * epoch : 20 * epoch + 20]) == list(range(20))
    assert sorted(large) == list(range(50))
    assert np.array_equal(order.read(np.arange(31, 99))[:, 0], read[31:99])
    shuffled = np.array([140, 3, 77, 4])
    assert np.array_equal(order.read(shuffled)[:, 0], read[shuffled])


class Shards:
    """Shard s has the windows 100 s …, and notes when it is read."""

    def __init__(self, count: int, windows_per_shard: int, short: dict[int, int]) -> None:
        self.count = count
        self.windows_per_shard = windows_per_shard
        self._short = short
        self.visits: list[int] = []
        self.wanted_soon: list[int] = []

    def soon(self, number: int) -> None:
        self.wanted_soon.append(number)

    def shard(self, number: int) -> Windows:
        self.visits.append(number)
        return windows_of(self._short.get(number, self.windows_per_shard), 100 * number)


def shuffled(shards: Shards) -> Shuffled:
    return Shuffled(shards.shard, shards.count, shards.windows_per_shard, 4, shards.soon)


def test_an_epoch_has_every_window_of_every_shard_once() -> None:
    order = shuffled(Shards(7, 10, {}))
    whole = order.read(np.arange(140))[:, 0]
    every = [100 * shard + window for shard in range(7) for window in range(10)]
    assert sorted(whole[:70]) == sorted(whole[70:]) == every
    assert whole[:70].tolist() != whole[70:].tolist()
    assert np.array_equal(order.read(np.arange(33, 101))[:, 0], whole[33:101])


@pytest.mark.parametrize(("start", "stop", "needed"), [(0, 10, 1), (20, 25, 1), (25, 35, 2), (65, 75, 2)])
def test_a_lease_needs_the_shards_that_it_lies_in_and_no_others(start: int, stop: int, needed: int) -> None:
    shards = Shards(7, 10, {})
    shuffled(shards).read(np.arange(start, stop))
    assert len(shards.visits) == needed


def test_a_shard_that_is_too_short_repeats_its_windows() -> None:
    read: Numbers = shuffled(Shards(3, 10, {1: 4})).read(np.arange(30))[:, 0]
    counts = Counter(read.tolist())
    assert {window: counts[window] for window in counts if 100 <= window < 200} == {100: 3, 101: 3, 102: 2, 103: 2}
    assert all(times == 1 for window, times in counts.items() if not 100 <= window < 200)


@pytest.mark.parametrize("start", [0, 20, 60])
def test_the_shard_that_follows_is_asked_for_while_one_is_read(start: int) -> None:
    shards = Shards(7, 10, {})
    order = shuffled(shards)
    order.read(np.arange(start, start + 2))
    asked = shards.wanted_soon
    order.read(np.arange(start + 10, start + 12))
    assert asked[0] == shards.visits[1] != shards.visits[0]


def test_what_is_leased_and_expected_after_it_is_asked_for_in_that_order() -> None:
    """Four peers take turns at leases of two shards and a half; this one has each fourth."""
    shards = Shards(40, 10, {})
    order = SampleOrder([shuffled(shards)], Mixture())
    for start in (0, 100, 200):
        lease = np.arange(start, start + 25)
        order.expect(lease)
        for number in lease:
            order.read(np.array([number]))
    needed = list(dict.fromkeys(shards.visits))
    asked = list(dict.fromkeys(shards.wanted_soon))
    assert asked[:2] == needed[1:3]
    assert asked[3:6] == needed[4:7], "the lease after the second was foreseen, the one after the first not"
    order.expect(np.empty(0, np.int64))
    order.expect(lease)  # trained again
    order.read(lease)
    assert shards.visits[-1] == needed[-1]
