"""Shards as they are cut, copied and put together again, without processes: each test plays all workers in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, shard_rows

SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("even", (6, 4)),
    ("uneven", (7, 3)),
    ("few", (4,)),
    ("one", (1, 5)),
    ("deep", (3, 2, 2)),
]


def own_tensors(layout: Layout, rank: int, workers: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for place in layout:
        rows = shard_rows(place.shape[0], rank, workers)
        tensors[place.name] = torch.full((rows.stop - rows.start, *place.shape[1:]), -1.0)
    return tensors


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 259])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_rows_are_cut_as_torch_cuts_them(rows: int, workers: int) -> None:
    pieces = [chunk.tolist() for chunk in torch.arange(rows).chunk(workers)]
    pieces += [[]] * (workers - len(pieces))
    assert [list(range(rows))[shard_rows(rows, rank, workers)] for rank in range(workers)] == pieces


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("staged", [None, 1, 5, 1000])
def test_a_vector_survives_its_way_through_all_shards_to_the_last_bit(workers: int, staged: int | None) -> None:
    layout = Layout(SHAPES)
    bits = np.random.default_rng(1).integers(0, 2**32, layout.size, np.uint32)
    theta, local = bits.view(np.float32), np.zeros(layout.size, np.float32)  # NaNs of all kinds among them
    for rank in range(workers):
        shards = Shards(layout, rank, workers, None if staged is None else torch.empty(staged))
        tensors = own_tensors(layout, rank, workers)
        shards.load(theta, tensors)
        shards.store(tensors, local)
    assert np.array_equal(local.view(np.uint32), bits)


def test_a_worker_writes_only_what_is_its_own() -> None:
    layout = Layout(SHAPES)
    local = np.zeros(layout.size, np.float32)
    Shards(layout, 1, 3).store(own_tensors(layout, 1, 3), local)
    places = {place.name: local[place.slice].reshape(place.shape) for place in layout}
    assert places["even"].tolist() == [[0] * 4] * 2 + [[-1] * 4] * 2 + [[0] * 4] * 2
    assert places["uneven"][:, 0].tolist() == [0, 0, 0, -1, -1, -1, 0]
    assert places["few"].tolist() == [0, 0, -1, -1]  # and the third worker has none
    assert places["one"].tolist() == [[0] * 5]


def test_a_worker_alone_has_all_even_of_a_number() -> None:
    layout = Layout([("number", ()), ("vector", (2,))])
    tensors = {"number": torch.tensor(0.0), "vector": torch.zeros(2)}
    Shards(layout).load(np.array([1, 2, 3], np.float32), tensors)
    assert [tensor.tolist() for tensor in tensors.values()] == [1.0, [2.0, 3.0]]
