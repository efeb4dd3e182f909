"""How many windows go through the model at once, where nobody has said it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import HostMemory
from opendiloco.kernels import INT8
from opendiloco.model import loss as losses
from opendiloco.model.build import build_model
from opendiloco.training import optimizers, trials
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import fitting_micro_batch, fixed_and_each, peak_while, trying
from opendiloco.workers import needs
from opendiloco.workers.needs import worker_memory
from peers.values.leases import SampleRange

TEAM = Team(torch.device("cpu"))


@pytest.fixture
def replica(small_config: RunConfig) -> ModelReplica:
    return replica_of(small_config)


def replica_of(config: RunConfig) -> ModelReplica:
    return ModelReplica(config, build_model(config, ByteTokenizer()), load_data(config, ByteTokenizer()).samples)


def taken(replica: ModelReplica, windows: int = 1, trains: bool = True) -> int:
    with trying(replica, TEAM, trains) as memory_of_windows:
        return memory_of_windows(windows)


def window_memory(replica: ModelReplica, trains: bool = True) -> tuple[int, int]:
    with trying(replica, TEAM, trains) as memory_of_windows:
        return fixed_and_each(memory_of_windows(1), memory_of_windows(2))


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return config.changed({"training": changes})


def test_more_windows_take_more(replica: ModelReplica) -> None:
    """By what none of them can do without: logits, and what blocks keep."""
    two, eight = taken(replica, 2), taken(replica, 8)
    length, config = replica.window_length - 1, replica.model.config
    assert eight - two > 6 * 4 * length * (2 * config.vocab_size + 10 * config.num_hidden_layers * config.hidden_size)
    assert eight / 8 < taken(replica) < eight  # some of it does not grow
    fixed, each = window_memory(replica)
    assert fixed + 8 * each == pytest.approx(eight, rel=0.05)


def test_less_where_blocks_are_computed_again(small_content: dict[str, Any]) -> None:
    model = small_content["model"]["config"] | {"num_hidden_layers": 8}
    replica = replica_of(RunConfig.from_manifest_content(small_content | {"model": {"config": model, "init_seed": 3}}))
    replica.model.train()
    whole = taken(replica, 8)
    replica.model.gradient_checkpointing_enable({"use_reentrant": False})
    replica.model.train()
    assert taken(replica, 8) < whole / 2


@pytest.mark.parametrize("changes", [{"document_mask": True}, {"precision": "bf16"}, {"z_loss": 1e-4}])
def test_it_is_found_however_the_run_trains(small_config: RunConfig, changes: dict[str, Any]) -> None:
    assert window_memory(replica_of(with_training(small_config, **changes)))[1] > 1000


def test_the_replica_stays_as_it_is(replica: ModelReplica) -> None:
    before, random = [tensor.clone() for tensor in replica.model.state_dict().values()], torch.get_rng_state()
    window_memory(replica)
    after = replica.model.state_dict().values()
    assert all(torch.equal(tensor, as_before) for tensor, as_before in zip(after, before, strict=True))
    assert all(parameter.grad is None for parameter in replica.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("windows", "expected"), [(100, 8), (8, 8), (5, 5), (1, 1), (0, 1), (-9, 1)])
def test_as_many_as_fit_into_a_quarter_of_what_is_left(
    replica: ModelReplica, windows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = HostMemory(replica.layout.size, INT8).most  # moments, where theta and local have been taken
    fixed, each = window_memory(replica)
    free = later + fixed + 4 * windows * each
    monkeypatch.setattr(trials, "available_memory", lambda: free)
    assert fitting_micro_batch(replica, 8, TEAM) == expected


def test_evaluation_puts_no_more_through_at_once_than_fits(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the run's batches are: at 150 million parameters 256 windows would take 64 GiB."""
    model = small_content["model"]["config"] | {"num_hidden_layers": 4}
    replica = replica_of(RunConfig.from_manifest_content(small_content | {"model": {"config": model, "init_seed": 3}}))
    (fixed, window), (_, trained) = window_memory(replica, trains=False), window_memory(replica)
    assert 0 < window < trained / 2
    later = HostMemory(replica.layout.size, INT8)
    room = fixed + 4 * 7 * window
    monkeypatch.setattr(trials, "available_memory", lambda: later.evaluating - later.shared + room)
    assert fitting_micro_batch(replica, 512, TEAM, trains=False) == 7
    assert taken(replica, 7, trains=False) == pytest.approx(fixed + 7 * window, rel=0.05)
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_the_machines_memory_is_shared_and_who_has_least_decides(
    replica: ModelReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(Team):
        def smallest(self, value: int) -> int:
            return min(value, 3)

    monkeypatch.setattr(trials, "available_memory", lambda: 2**40)
    two = Two(torch.device("cpu"), rank=0, size=2)
    assert trials._free_memory(two) == 2**39
    assert fitting_micro_batch(replica, 8, two) == 3


def test_nothing_is_tried_where_there_is_no_choice(replica: ModelReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "trying", lambda *arguments, **options: pytest.fail("a window was tried"))
    assert fitting_micro_batch(replica, 1, TEAM) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_and_the_copy_in_bf16_count_once_and_not_with_each_window(
    small_content: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where weights are large beside a window, a tenth of the windows was put through that fit."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = small_content["model"]["config"] | sizes
    training = small_content["training"] | {"sequence_length": 16, "precision": precision}
    replica = replica_of(
        RunConfig.from_manifest_content(
            small_content | {"model": {"config": model, "init_seed": 3}, "training": training}
        )
    )
    weights = 4 * replica.layout.size
    (fixed, each), whole = window_memory(replica), taken(replica, 16)
    assert each < weights / 9
    assert (fixed > weights / 3) == (precision == "bf16")
    assert fixed + 16 * each == pytest.approx(whole, rel=0.1)
    later = HostMemory(replica.layout.size, INT8).most
    monkeypatch.setattr(trials, "available_memory", lambda: later + fixed + 4 * 16 * each)
    assert fitting_micro_batch(replica, 64, TEAM) in (15, 16)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", [1, 2])
def test_what_training_takes_is_what_the_formula_says(
    small_content: dict[str, Any],
    precision: str,
    fused: bool,
    tied: bool,
    positions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a twentieth, with AdamW's step as a GPU makes it, and as a CPU does, with whole logits and piece by piece,
    tied and untied; windows are too short to matter."""
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", positions * 3000)
    monkeypatch.setattr(optimizers, "FUSED_ON", {"cpu"} if fused else set())
    monkeypatch.setattr(needs, "FUSED_ON", optimizers.FUSED_ON)
    sizes = {"vocab_size": 3000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    model = small_content["model"]["config"] | sizes | {"tie_word_embeddings": tied}
    training = small_content["training"] | {"sequence_length": 2, "precision": precision}
    config = RunConfig.from_manifest_content(
        small_content | {"model": {"config": model, "init_seed": 3}, "training": training}
    )
    replica = replica_of(config)
    replica.micro_batch = 1
    memory = worker_memory(replica.model, config.training, "cpu", 1)
    assert (memory.is_fused, memory.copied > 0) == (fused, precision == "bf16")
    theta = np.empty(replica.layout.size, np.float32)
    replica.store(theta)

    def train() -> None:
        replica.train(theta, 0, (SampleRange(0, 4),), 2)

    peak = peak_while(train, TEAM.device) + memory.evaluating
    assert peak == pytest.approx(memory.training, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_logits_of_a_piece_take_is_what_the_formula_says(
    small_content: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are most of what training takes, in windows of two pieces."""
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", 128 * 4000)
    sizes = {"vocab_size": 4000, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = small_content["model"]["config"] | sizes | {"max_position_embeddings": 256}
    training = small_content["training"] | {"sequence_length": 256, "precision": precision, "batch_size": 2}
    changed = {"model": {"config": model, "init_seed": 3}, "training": training}
    replica = replica_of(config := RunConfig.from_manifest_content(small_content | changed))
    replica.micro_batch = 1
    memory = worker_memory(replica.model, config.training, "cpu", 1)
    assert memory.logits == 128 * 4000
    theta = np.empty(replica.layout.size, np.float32)
    replica.store(theta)

    def train() -> None:
        replica.train(theta, 0, (SampleRange(0, 4),), 2)

    peak = peak_while(train, TEAM.device) + memory.evaluating
    assert peak > 2 * memory.kept
    assert peak == pytest.approx(memory.training, rel=0.1)


# By what training takes -----------------------------------------------------------------------------------------------
class Device:
    """Memory that windows fill as they train: `fixed` bytes whatever their number, and `each`. Beyond `limit` windows
    there is none."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, replica: ModelReplica, fixed: int, each: int, limit: int
    ) -> None:
        self.gradients, self.tried = 4 * replica.layout.size, list[int | None]()
        add_gradient = replica.add_gradient

        def limited(batch: NDArray[np.int64]) -> torch.Tensor:
            self.tried.append(replica.micro_batch)
            assert len(batch) in (2 * (replica.micro_batch or 0), 24)
            if (replica.micro_batch or 0) > limit:
                raise torch.OutOfMemoryError("full")
            return add_gradient(batch)

        def peak_of(work: Callable[[], None], device: torch.device) -> int:
            work()
            return self.gradients + fixed + each * (replica.micro_batch or 0)

        monkeypatch.setattr(trials, "MEASURED_ON", {"cpu"})
        monkeypatch.setattr(trials, "peak_while", peak_of)
        monkeypatch.setattr(trials, "_taken_later", lambda replica, team, trains: 7)
        monkeypatch.setattr(replica, "add_gradient", limited)
        self._monkeypatch = monkeypatch

    def has_room_for(self, byte_count: int) -> None:
        """Beside gradients, moments and what is kept free."""
        free = 7 + self.gradients + round(byte_count / trials.MEASURED_SHARE) + 1
        self._monkeypatch.setattr(trials, "_free_memory", lambda team: free)


@pytest.mark.parametrize(
    ("room", "expected", "tried"),
    [
        (100 + 2 * 1000, 2, [2]),
        (100 + 3 * 1000, 2, [2]),  # 2.9 by the first look
        (100 + 4 * 1000, 3, [2, 3]),
        (100 + 8 * 1000, 6, [2, 6]),  # 7 would be four parts, too
        (100 + 24 * 1000, 12, [2, 12]),  # 22 would be two parts, too
        (10**9, 24, [2, 24]),
    ],
)
def test_more_windows_go_through_at_once_where_training_shows_that_they_fit(
    small_config: RunConfig, room: int, expected: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_training(small_config, batch_size=24)
    replica = replica_of(config)
    replica.micro_batch = 2
    device = Device(monkeypatch, replica, fixed=100, each=1000, limit=24)
    device.has_room_for(room)
    before = [tensor.clone() for tensor in replica.model.state_dict().values()]
    assert trials.enlarge_micro_batch(replica, 24, TEAM)
    assert (replica.micro_batch, replica.uncompiled_micro_batch) == (expected, 2)
    assert device.tried == [size for size in tried for _ in range(2)]
    after = replica.model.state_dict().values()
    assert all(torch.equal(tensor, as_before) for tensor, as_before in zip(after, before, strict=True))
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_what_does_not_grow_with_the_windows_is_told_from_them_by_a_second_look(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replica_of(with_training(small_config, batch_size=24))
    replica.micro_batch = 1
    device = Device(monkeypatch, replica, fixed=3000, each=1000, limit=24)
    device.has_room_for(3000 + 13 * 1000)
    assert trials.enlarge_micro_batch(replica, 24, TEAM)
    assert replica.micro_batch == 8  # as 12 would be, in 2 parts: 1 → 4 → 8 of 13
    assert device.tried == [1, 1, 4, 4, 8, 8]


def test_more_windows_that_do_not_fit_after_all_are_given_up(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replica_of(with_training(small_config, batch_size=24))
    replica.micro_batch = 2
    device = Device(monkeypatch, replica, fixed=0, each=1000, limit=11)
    device.has_room_for(24 * 1000)
    assert not trials.enlarge_micro_batch(replica, 24, TEAM)
    assert replica.micro_batch == 2
    assert device.tried == [2, 2, 24]
    assert all(parameter.grad is None for parameter in replica.model.parameters())
    replica.micro_batch = 12
    assert trials.enlarge_micro_batch(replica, 24, TEAM), "not even as many as before, which training finds"
    assert replica.micro_batch == 12


def test_more_windows_with_which_a_block_fails_are_given_up(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replica_of(with_training(small_config, batch_size=24))
    replica.micro_batch = 2
    device = Device(monkeypatch, replica, fixed=0, each=1000, limit=24)
    device.has_room_for(24 * 1000)
    block = replica.model.model.layers[0]
    forward = block.forward

    def failing(states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if len(states) > 2:
            raise RuntimeError("this kernel takes no more than two")
        return forward(states, *arguments, **options)

    block.forward = failing
    assert not trials.enlarge_micro_batch(replica, 24, TEAM)
    assert replica.micro_batch == 2
    assert device.tried == [2, 2, 24]


def test_a_worker_that_shares_its_model_tries_no_more_windows(replica: ModelReplica) -> None:
    """One that ran out of memory would leave the others waiting."""
    replica.micro_batch = 1
    assert trials.enlarge_micro_batch(replica, 8, Team(torch.device("cuda"), size=2))
    assert (replica.micro_batch, replica.uncompiled_micro_batch) == (1, None)


def test_a_cpu_keeps_the_windows_that_its_trial_has_found(replica: ModelReplica) -> None:
    replica.micro_batch = 1
    assert trials.enlarge_micro_batch(replica, 8, TEAM)
    assert (replica.micro_batch, replica.uncompiled_micro_batch) == (1, None)


@pytest.mark.parametrize("trained", ["fresh", "recalled"])
def test_moments_of_a_fused_step_are_those_of_any_other(
    small_config: RunConfig, tmp_path: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine can go on with them on its CPU where it has used a GPU, and the other way round."""
    files = [tmp_path / "fused", tmp_path / "other"]
    for file, devices in zip(files, ({"cpu"}, set[str]()), strict=True):
        monkeypatch.setattr(optimizers, "FUSED_ON", devices)
        replica = replica_of(small_config)
        theta = np.empty(replica.layout.size, np.float32)
        replica.store(theta)
        if trained == "recalled" and not devices:
            replica.recall_moments(files[0], "run")
        else:
            replica.train(theta, 1, (SampleRange(0, 4),), 2)
        replica.keep_moments(file, "run", 2)()
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert np.abs(values).max() > 0
        assert np.allclose(values, second[name], rtol=1e-4, atol=1e-9)
