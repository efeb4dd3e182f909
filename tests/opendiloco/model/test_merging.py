from __future__ import annotations

import numpy as np
import pytest
import torch

from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, merge
from opendiloco.shared_memory import Vector


def vectors(size: int) -> tuple[Vector, Vector]:
    """Values of all magnitudes, zeros of both signs and subnormals among them."""
    source = np.random.default_rng(0)
    bits = source.integers(0, 2**32, (2, size), np.uint64).astype(np.uint32).view(np.float32)
    bits[~(np.abs(bits) < 1e37)] = -0.0
    bits[:, :4] = [[0.0, -0.0, 1e-42, -1e-42], [-0.0, 0.0, 1e-45, 3.0]]
    return bits[0].copy(), bits[1].copy()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.5, 2 / 3, 1.0])
def test_numpy_and_torch_merge_to_the_same_bits(alpha: float) -> None:
    for size in (1, 7, 16, 100_003):  # of whole vector registers, and what is left of them
        local, theta = vectors(max(size, 4))
        by_torch = torch.from_numpy(local.copy())
        merge(by_torch, torch.from_numpy(theta), alpha)
        expected = local.copy()
        for place, (mine, others) in enumerate(zip(local, theta, strict=True)):
            if 0 < alpha < 1 and place < 1000:
                expected[place] = np.float32(np.float32(alpha) * mine) + np.float32(np.float32(1 - alpha) * others)
        merge(local, theta, alpha)
        assert np.array_equal(by_torch.numpy().view(np.uint32), local.view(np.uint32))
        if 0 < alpha < 1:
            assert np.array_equal(local[:1000].view(np.uint32), expected[:1000].view(np.uint32))


def test_the_limits_are_exact_also_where_arithmetic_would_not_be() -> None:
    theta = np.array([-0.0, 1.0, 2.0], np.float32)
    local = np.array([1.0, np.inf, np.nan], np.float32)
    merge(local, theta, 0.0)
    assert np.array_equal(local.view(np.uint32), theta.view(np.uint32))
    kept = np.array([3.0, -0.0, 1e-45], np.float32)
    before = kept.copy()
    merge(kept, np.full(3, np.nan, np.float32), 1.0)
    assert np.array_equal(kept.view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("staged", [False, True])
def test_workers_merge_their_own_parts_of_a_fragment_alone(staged: bool) -> None:
    layout = Layout([("a", (5, 3)), ("b", (4,)), ("c", (7, 2))], [1, 0, 1])
    local, theta = vectors(layout.size)
    expected = local.copy()
    part = layout.fragments[1]
    merge(expected[part], theta[part], 0.3)
    merged = np.full_like(local, np.nan)
    merged[layout.fragments[0]] = local[layout.fragments[0]]
    for rank in range(3):
        staging = torch.empty(2) if staged else None
        shards = Shards(layout, rank, 3, staging)
        own = {
            each.name: torch.from_numpy(local[shards.slice_of(each)].reshape(-1, *each.shape[1:]).copy())
            for each in layout
        }
        shards.of(layout.fragment(1)).merge(theta, own, 0.3)
        shards.store(own, merged)
    for fragment in layout.fragments:
        assert np.array_equal(merged[fragment].view(np.uint32), expected[fragment].view(np.uint32))
