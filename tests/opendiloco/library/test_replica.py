"""A loop's model as a replica of the run's: of weights in half precision, only what was trained counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.library import DiLoCo
from opendiloco.library.model import LoopReplica
from opendiloco.library.ranks import Ranks
from opendiloco.model.build import build_model, initial_theta
from opendiloco.model.parameters import layout_of
from opendiloco.shared_memory import Vector
from peers.values.leases import SampleRange
from tests.opendiloco.library.played_swarm import playing

HALF = [torch.bfloat16, torch.float16]


def theta_of(size: int) -> Vector:
    return np.random.default_rng(1).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_what_is_loaded_is_stored_to_the_bit_where_nothing_was_trained(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(5, 7).to(dtype)
    replica = LoopReplica(model, layout_of(model), Ranks())
    theta = theta_of(42)
    local = np.zeros_like(theta)
    replica.load(theta)
    replica.store(local, 0)
    assert np.array_equal(local, theta)
    assert replica.rounds == (dtype in HALF)
    assert torch.equal(model.weight.flatten(), torch.from_numpy(theta[:35]).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_what_training_changed_counts_on_top_of_theta(dtype: torch.dtype) -> None:
    """Also of a model with some of its weights in fp32."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False).to(dtype), torch.nn.Linear(4, 2, bias=False))
    replica = LoopReplica(model, layout_of(model), Ranks())
    theta = theta_of(24)
    local = np.zeros_like(theta)
    replica.load(theta)
    begun = [parameter.detach().float().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    replica.store(local, 0)
    changed = [(now.detach().float() - then).flatten() for now, then in zip(model.parameters(), begun, strict=True)]
    expected = torch.from_numpy(theta) + torch.cat(changed)
    np.testing.assert_allclose(local, expected.numpy(), rtol=0, atol=1e-7)
    assert np.abs(local - theta - 0.125).max() < 2.0**-7
    replica.store(again := np.zeros_like(theta), 0)
    assert np.array_equal(again, local), "to store changes nothing"


@pytest.mark.parametrize("learning_rate", [0.0, 0.5])
def test_a_loop_in_bfloat16_contributes_what_it_trained_and_no_rounding(
    small_content: dict[str, Any], learning_rate: float
) -> None:
    config = RunConfig.from_manifest_content(small_content | {"outer_steps": 2})
    model = build_model(config, ByteTokenizer()).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    ids = torch.arange(32).view(2, 16)
    with (
        playing(config, [(SampleRange(0, 8),), (SampleRange(8, 16),)]) as played,
        DiLoCo(model, optimizer, run="diloco:small-1") as diloco,
    ):
        assert diloco._text.evaluate(diloco.run, diloco._worker, diloco._replica) is None, (
            "the loss of a rounded theta is not theta's"
        )
        while not diloco.finished:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        [swarm] = played.swarms
        theta = diloco._worker.vectors.theta.copy()
    assert np.array_equal(theta, initial_theta(config)) == (learning_rate == 0)
    assert len(set(swarm.digests)) == (1 if learning_rate == 0 else 2)
