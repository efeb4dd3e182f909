"""How many windows go through the model at once, where nobody has said it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.inner import micro_batch
from opendiloco.inner.micro_batch import bytes_kept, fitting_micro_batch
from opendiloco.inner.replica import Replica
from opendiloco.inner.team import Team
from opendiloco.model.build import build_model

TEAM = Team(torch.device("cpu"))


@pytest.fixture
def replica(small_config: RunConfig) -> Replica:
    return replica_of(small_config)


def replica_of(config: RunConfig) -> Replica:
    return Replica(config, build_model(config, ByteTokenizer()), load_data(config, ByteTokenizer()).samples)


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def test_what_is_kept_grows_with_the_windows_and_weights_do_not_count(replica: Replica) -> None:
    one = bytes_kept(replica, TEAM)
    length, config = replica.window_length - 1, replica.model.config
    assert one > 4 * length * (config.vocab_size + config.num_hidden_layers * config.hidden_size)
    assert bytes_kept(replica, TEAM, windows=7) == pytest.approx(7 * one, rel=0.05)  # not so the sines of positions


def test_what_is_kept_is_less_where_blocks_are_computed_again(replica: Replica) -> None:
    one = bytes_kept(replica, TEAM)
    replica.model.gradient_checkpointing_enable({"use_reentrant": False})
    replica.model.train()
    again = bytes_kept(replica, TEAM)
    config = replica.model.config
    assert 4 * (replica.window_length - 1) * config.num_hidden_layers * config.hidden_size < again < one


@pytest.mark.parametrize("changes", [{"document_mask": True}, {"precision": "bf16"}, {"z_loss": 1e-4}])
def test_it_is_found_however_the_run_trains(small_config: RunConfig, changes: dict[str, Any]) -> None:
    assert bytes_kept(replica_of(with_training(small_config, **changes)), TEAM) > 0


def test_the_replica_stays_as_it_is(replica: Replica) -> None:
    before, random = [tensor.clone() for tensor in replica.model.state_dict().values()], torch.get_rng_state()
    bytes_kept(replica, TEAM)
    after = replica.model.state_dict().values()
    assert all(torch.equal(tensor, as_before) for tensor, as_before in zip(after, before, strict=True))
    assert all(parameter.grad is None for parameter in replica.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("windows", "expected"), [(100, 8), (8, 8), (5, 5), (1, 1), (0, 1), (-9, 1)])
def test_as_many_as_fit_into_half_of_what_is_left(
    replica: Replica, windows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = 20 * replica.layout.size  # gradient, moments, momentum, payloads
    free = later + 2 * windows * bytes_kept(replica, TEAM)
    monkeypatch.setattr(micro_batch, "available_memory", lambda: free)
    assert fitting_micro_batch(replica, 8, TEAM) == expected


def test_the_machines_memory_is_shared_and_who_has_least_decides(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(Team):
        def smallest(self, value: int) -> int:
            return min(value, 3)

    monkeypatch.setattr(micro_batch, "available_memory", lambda: 2**40)
    two = Two(torch.device("cpu"), rank=0, size=2)
    assert micro_batch.free_memory(two) == 2**39
    assert fitting_micro_batch(replica, 8, two) == 3
