"""Shards as they are cut, copied and put together again, without processes: each test plays all workers in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opendiloco.model import parameters
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, pin, shard_rows

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


@pytest.mark.parametrize("workers", [1, 3])
def test_values_of_pinned_memory_go_straight_and_are_there_in_the_end(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies them when it comes to it, which is waited for once."""
    layout, staging, waits = Layout(SHAPES), torch.full((5,), np.nan), list[str]()
    bits = np.random.default_rng(1).integers(0, 2**32, layout.size, np.uint32)
    theta, local = bits.view(np.float32), np.zeros(layout.size, np.float32)
    monkeypatch.setattr(parameters, "_is_pinned", lambda flat: flat is not local)
    monkeypatch.setattr(parameters, "_wait_for_gpu", lambda: waits.append("waited"))
    for rank in range(workers):
        shards, tensors = Shards(layout, rank, workers, staging), own_tensors(layout, rank, workers)
        shards.load(theta, tensors)
        merged = own_tensors(layout, rank, workers)
        shards.merge(theta, merged, 0.0)
        assert staging.isnan().all()
        assert waits == ["waited"] * 2
        assert all(torch.equal(merged[name].view(torch.int32), own.view(torch.int32)) for name, own in tensors.items())
        shards.store(tensors, local)  # which is not pinned
        shards.store(tensors, theta)
        assert waits == ["waited"] * 3
        waits.clear()
        staging.fill_(np.nan)
    assert np.array_equal(local.view(np.uint32), bits)
    assert np.array_equal(theta.view(np.uint32), bits)


@pytest.mark.parametrize("works", [True, False])
def test_a_driver_that_pins_no_shared_memory_is_left_alone(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has noted of that is taken off it, or the next kernel would fail."""
    calls, launched, memory = list[object](), list[torch.device](), np.zeros(3, np.float32)

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            calls.append((address, size, flags))
            return 0 if works else 801

    def check(error: int) -> None:
        if error:
            raise RuntimeError("operation not supported")

    def zeros(count: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch, "zeros", zeros)
    pin(memory, torch.device("cpu"))
    assert calls == []
    pin(memory, gpu := torch.device("cuda"))
    assert calls == [(memory.ctypes.data, 12, 0)]
    assert launched == ([] if works else [gpu])


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
