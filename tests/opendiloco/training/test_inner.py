from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendiloco.config.overrides import NO_OVERRIDES, Decay, Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.errors import WorkerError
from opendiloco.model import loss as losses
from opendiloco.model.build import build_model
from opendiloco.model.loss import window_loss
from opendiloco.shared_memory import Vector
from opendiloco.training import inner, optimizers
from opendiloco.training.inner import InnerStep, LossScale, ModelReplica, _on_device
from opendiloco.training.team import Team
from opendiloco.workers.assembly import checkpoint_activations
from peers.values.leases import SampleRange

CPU = torch.device("cpu")


def make_replica(config: RunConfig) -> tuple[ModelReplica, Vector]:
    tokenizer = ByteTokenizer()
    model = build_model(config, tokenizer)
    replica = ModelReplica(config, model, load_data(config, tokenizer).samples)
    theta = np.empty(replica.layout.size, np.float32)
    replica.store(theta)
    return replica, theta


def after_training(
    config: RunConfig, lease: tuple[SampleRange, ...], steps: int
) -> tuple[tuple[SampleRange, ...], int, Vector]:
    replica, theta = make_replica(config)
    trained = replica.train(theta, 0, lease, steps)
    replica.store(theta)
    return trained.samples, trained.tokens, theta


def test_a_short_lease_is_trained_whole_and_a_long_one_as_far_as_the_steps_go(small_config: RunConfig) -> None:
    samples, tokens, _ = after_training(small_config, (SampleRange(4, 9),), 4)
    assert (samples, tokens) == ((SampleRange(4, 9),), 5 * 16)
    samples, tokens, _ = after_training(small_config, (SampleRange(4, 7), SampleRange(20, 40)), 4)
    assert (samples, tokens) == ((SampleRange(4, 7), SampleRange(20, 25)), 8 * 16)
    assert after_training(small_config, (), 4)[:2] == ((), 0)


def test_batches_run_across_the_pieces_of_a_lease(small_config: RunConfig) -> None:
    _, _, whole = after_training(small_config, (SampleRange(0, 6),), 4)
    _, _, pieces = after_training(small_config, (SampleRange(0, 1), SampleRange(1, 4), SampleRange(4, 6)), 4)
    assert np.array_equal(whole, pieces)


def test_adamw_goes_on_where_it_was_while_theta_starts_afresh(small_config: RunConfig) -> None:
    lease = (SampleRange(0, 8),)
    replica, theta = make_replica(small_config)
    first, second = np.empty_like(theta), np.empty_like(theta)
    losses = [replica.train(theta, 0, lease, 4).loss]
    replica.store(first)
    losses.append(replica.train(theta, 0, lease, 4).loss)
    replica.store(second)
    assert not np.array_equal(first, second)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_who_joins_in_the_middle_begins_with_small_steps(small_config: RunConfig) -> None:
    """AdamW's first step is as large as its learning rate, whatever the gradient."""
    lease, moved = (SampleRange(0, 2),), []
    rewarmup_steps = small_config.inner_optimizer.rewarmup_steps
    for index, past in ((0, 0), (5, 0), (5, rewarmup_steps)):
        replica, theta = make_replica(small_config)
        for _ in range(past):
            replica.train(theta, 5, lease, 1)
        after = np.empty_like(theta)
        replica.train(theta, index, lease, 1)
        replica.store(after)
        moved.append(float(np.abs(after - theta).max()))
    from_the_start, fresh, warmed_up = moved
    assert fresh < from_the_start / 2
    assert warmed_up > 3 * fresh


def test_the_rewarmup_takes_as_many_inner_steps_as_it_says(small_config: RunConfig) -> None:
    """Regression: each of the optimizer's groups counted as a step."""
    replica, theta = make_replica(small_config)
    rates = []
    for _ in replica.inner_steps(theta, 1, (SampleRange(0, 24),), 12):
        rates.append([group["lr"] for group in replica._optimizer.param_groups])
    expected = [0.01 * min(1.0, done / 10) for done in range(1, 13)]
    assert rates == [[pytest.approx(rate)] * 2 for rate in expected]


def test_the_learning_rate_goes_by_the_runs_tokens_if_the_schedule_does(small_content: dict[str, Any]) -> None:
    schedule = {"warmup_tokens": 320, "stable_tokens": 96, "decay_tokens": 64}
    config = RunConfig.from_manifest_content(small_content | {"schedule": schedule, "outer_steps": 9})
    rates = []
    for tokens in (0, 160, 352):
        replica, theta = make_replica(config)
        for _ in replica.inner_steps(theta, 0, (SampleRange(0, 8),), 4, tokens):
            rates.append(replica.learning_rate)
    expected = [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1, 1, 0.5, 0]
    assert rates == pytest.approx([0.01 * factor for factor in expected])


def test_an_amendment_lowers_the_learning_rate_and_begins_its_decay(small_config: RunConfig) -> None:
    def rates(overrides: Overrides) -> list[float]:
        replica, theta = make_replica(small_config)
        steps = replica.inner_steps(theta, 1, (SampleRange(0, 8),), 4, overrides=overrides)
        return [replica.learning_rate for _ in steps]

    assert rates(Overrides(inner_learning_rate_factor=0.25)) == [0.25 * rate for rate in rates(NO_OVERRIDES)]
    assert rates(Overrides(inner_learning_rate_factor=1.0)) == rates(NO_OVERRIDES)
    decayed = rates(Overrides(inner_learning_rate_factor=0.5, decay=Decay(after=1, outer_steps=2)))
    shares = (0.875, 0.75, 0.625, 0.5)
    assert decayed == pytest.approx(
        [0.5 * share * rate for share, rate in zip(shares, rates(NO_OVERRIDES), strict=True)]
    )


def test_the_z_loss_is_added_where_it_is_wanted() -> None:
    logits = torch.tensor([[[2.0, 0.0, 1.0], [0.5, 0.5, -1.0]]])

    class Fixed:
        logits: torch.Tensor

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Fixed:
            self.logits = logits
            return self

    windows = torch.tensor([[0, 2, 1]])
    log_z = [math.log(sum(math.exp(value) for value in row)) for row in logits[0].tolist()]
    entropy = (log_z[0] - 1.0 + log_z[1] - 0.5) / 2
    assert window_loss(Fixed(), windows).item() == pytest.approx(entropy)
    wanted = entropy + 0.1 * (log_z[0] ** 2 + log_z[1] ** 2) / 2
    assert window_loss(Fixed(), windows, z_loss=0.1).item() == pytest.approx(wanted)


def test_training_learns_and_can_be_stopped_after_any_step(small_config: RunConfig) -> None:
    replica, theta = make_replica(small_config)
    seen: list[InnerStep] = []
    inner_steps = replica.inner_steps(theta, 0, (SampleRange(0, 20),), 10, stop_wanted=lambda: len(seen) == 2)
    for step in inner_steps:
        seen.append(step)
    trained = inner_steps.trained
    assert trained.samples == (SampleRange(0, 6),)
    assert [(step.number, step.samples) for step in seen] == [(1, 2), (2, 4), (3, 6)]
    assert seen[2].loss < seen[0].loss
    assert trained.loss == pytest.approx(sum(step.loss for step in seen) / 3)
    norms = [step.gradient_norm for step in seen]
    assert len(set(norms)) == 3
    assert trained.gradient_norm == pytest.approx(sum(norms) / 3)
    assert trained.inner_steps == 3
    assert trained.waited_seconds > 0


def test_a_loss_that_is_no_number_ends_training(small_content: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(small_content | {"inner_optimizer": {"learning_rate": 1e30}})
    replica, theta = make_replica(config)
    with pytest.raises(WorkerError, match=r"inner step \d: .* norm nan") as caught:
        replica.train(theta, 0, (SampleRange(0, 8),), 4)
    assert caught.value.exit_code == 8
    assert "learning_rate" in caught.value.remedy


def test_what_documents_of_a_window_know_of_one_another_is_the_manifests_choice(small_content: dict[str, Any]) -> None:
    losses = []
    for mask in (False, True):
        training = small_content["training"] | {"document_mask": mask, "batch_size": 64, "sequence_length": 32}
        config = RunConfig.from_manifest_content(small_content | {"training": training})
        replica, theta = make_replica(config)
        windows = torch.from_numpy(load_data(config, ByteTokenizer()).samples.read(np.arange(64)))
        assert (windows == ByteTokenizer.end).any()
        with torch.no_grad():
            expected = window_loss(replica.model, windows, ByteTokenizer.end if mask else None).item()
        losses.append(replica.train(theta, 0, (SampleRange(0, 64),), 1).loss)
        assert losses[-1] == expected
    assert losses[0] != losses[1]


class Stumbling:
    """A model whose loss is no number at some of its calls, counted from 1."""

    def __init__(self, model: Any, *calls: int) -> None:
        self.model, self.calls, self.count = model, calls, 0
        model.register_forward_hook(self)

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        self.count += 1
        if self.count in self.calls:
            output.logits = output.logits * math.nan


def test_an_inner_step_whose_loss_is_no_number_changes_nothing_and_is_counted(small_config: RunConfig) -> None:
    lease = (SampleRange(0, 8),)
    replica, theta = make_replica(small_config)
    Stumbling(replica.model, 2, 4)
    inner_steps = replica.inner_steps(theta, 0, lease, 4)
    seen = list(inner_steps)
    trained = inner_steps.trained
    assert (trained.samples, trained.tokens, trained.inner_steps, trained.skipped) == (lease, 8 * 16, 4, 2)
    assert [step.number for step in seen] == [1, 3]
    assert trained.loss == pytest.approx(sum(step.loss for step in seen) / 2)
    replica.store(theta)
    assert np.isfinite(theta).all()


def test_training_that_skips_more_than_half_of_its_steps_has_failed(small_config: RunConfig) -> None:
    replica, theta = make_replica(small_config)
    Stumbling(replica.model, 1, 2, 4)
    with pytest.raises(WorkerError, match=r"inner step 3: the loss is nan.* 3 inner steps, more than half"):
        replica.train(theta, 0, (SampleRange(0, 8),), 4)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 100])
def test_a_batch_in_parts_is_the_batch_up_to_rounding(small_content: dict[str, Any], micro_batch: int) -> None:
    training = small_content["training"] | {"batch_size": 5}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    locals_, losses = [], []
    for size in (None, micro_batch):
        whole, theta = make_replica(config)
        replica = ModelReplica(config, whole.model, load_data(config, ByteTokenizer()).samples, micro_batch=size)
        losses.append(replica.train(theta, 0, (SampleRange(0, 12),), 4).loss)  # the last batch has two windows
        locals_.append(np.empty_like(theta))
        replica.store(locals_[-1])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert np.abs(locals_[1] - locals_[0]).max() < 1e-6
    if micro_batch >= 5:
        assert np.array_equal(locals_[0], locals_[1])


@pytest.mark.parametrize("fused", [False, True])
def test_an_inner_step_waits_for_the_device_once(
    small_config: RunConfig, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and norm stay there until all numbers are read together, however many micro-batches there are. A fused
    AdamW is told to step before that, and has been when they are read."""
    monkeypatch.setattr(optimizers, "FUSED_ON", {"cpu"} if fused else set())
    done = list[object]()

    def noting_read(numbers: torch.Tensor) -> Callable[[], list[float]]:
        def read() -> list[float]:
            done.append("read")
            return numbers.tolist()

        done.append(len(numbers))
        return read

    monkeypatch.setattr(inner, "read_later", noting_read)
    whole, theta = make_replica(small_config)
    samples = load_data(small_config, ByteTokenizer()).samples
    replica = ModelReplica(small_config, whole.model, samples, micro_batch=1)
    replica._optimizer.register_step_pre_hook(lambda *arguments: done.append("step"))
    replica.load(theta)
    for step in range(2):
        replica._inner_step(lambda: False, NO_OVERRIDES, samples.read(np.arange(2)), step, 0)
    assert done == [3, *(["step", "read"] if fused else ["read", "step"])] * 2
    if fused:
        monkeypatch.setattr(inner, "read_later", lambda numbers: lambda: [1.0, 1.0, 0.0])
        batch = samples.read(np.arange(2))
        with Unwaiting():  # type: ignore[no-untyped-call]
            replica._inner_step(lambda: False, NO_OVERRIDES, batch, 2, 0)


def of_optimizer(replica: ModelReplica) -> list[torch.Tensor]:
    return [value.clone() for values in replica._optimizer.state.values() for value in values.values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_step_that_waits_for_no_loss_is_the_step_that_waits(
    small_content: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also where a loss or a gradient is no number and the step is left out."""
    training = small_content["training"] | {"precision": precision}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    monkeypatch.setattr(optimizers, "FUSED_ON", {"cpu"})
    weights, states = list[Vector](), list[list[torch.Tensor]]()
    for waits in (False, True):
        if waits:
            monkeypatch.setattr(inner, "steps_without_waiting", lambda optimizer: False)
        replica, theta = make_replica(config)
        Stumbling(replica.model, 2, 4)
        assert replica.train(theta, 0, (SampleRange(0, 16),), 8).skipped == 2
        weights.append(np.empty_like(theta))
        replica.store(weights[-1])
        states.append(of_optimizer(replica))
    assert np.array_equal(weights[0], weights[1])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("no_number", ["loss", "gradient"])
def test_a_fused_step_that_is_left_out_changes_nothing(
    small_config: RunConfig, no_number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights nor moments, nor how often the optimizer has stepped."""
    monkeypatch.setattr(optimizers, "FUSED_ON", {"cpu"})
    replica, theta = make_replica(small_config)
    replica.train(theta, 0, (SampleRange(0, 4),), 2)
    before, moments, after = np.empty_like(theta), of_optimizer(replica), np.empty_like(theta)
    replica.store(before)
    if no_number == "loss":
        Stumbling(replica.model, 1)
    else:
        replica.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    batch = replica._samples.read(np.arange(2))
    loss, norm, _ = replica._inner_step(lambda: False, NO_OVERRIDES, batch, 2, 0)
    assert math.isfinite(loss) == (no_number == "gradient")
    assert not math.isfinite(norm)
    replica.store(after)
    assert np.array_equal(before, after)
    assert all(torch.equal(one, other) for one, other in zip(moments, of_optimizer(replica), strict=True))
    assert {float(values["step"]) for values in replica._optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_the_sizes_that_are_tried_are_those_of_a_batchs_first_and_last_windows(
    small_content: dict[str, Any], shares: int
) -> None:
    whole, _ = make_replica(RunConfig.from_manifest_content(small_content))
    for batch_size, micro_batch, rank in product((1, 2, 7, 8), (None, 1, 2, 3, 8, 9), range(shares)):
        training = small_content["training"] | {"batch_size": batch_size}
        config = RunConfig.from_manifest_content(small_content | {"training": training})
        replica = ModelReplica(config, whole.model, whole._samples, Team(CPU, rank, shares), micro_batch)
        parts = [max(1, len(part)) for part, _ in replica._micro_batches(np.empty((batch_size, 0), np.int64))]
        assert replica.tried_sizes == (tuple(parts) if len(parts) == 1 else (parts[0], parts[-1]))


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_windows_of_which_no_such_number_was_tried_are_no_more_than_fit_uncompiled(
    small_content: dict[str, Any], shares: int
) -> None:
    training = small_content["training"] | {"batch_size": 24}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    whole, _ = make_replica(config)
    for count, micro_batch, few in product((24, 23, 19, 13, 7, 1), (8, 5, 4), (1, 2, 3)):
        counts, own = set[int](), 0
        for rank in range(shares):
            replica = ModelReplica(config, whole.model, whole._samples, Team(CPU, rank, shares), micro_batch)
            replica.uncompiled_micro_batch = few
            parts = list(replica._micro_batches(np.arange(count)[:, None]))
            sizes = [len(part) for part, _ in parts]
            assert all(size <= few or size in replica.tried_sizes for size in sizes), (count, sizes)
            assert np.concatenate([part for part, _ in parts]).ravel().tolist() == [*range(own, own + sum(sizes))]
            assert [is_last for _, is_last in parts] == [False] * (len(parts) - 1) + [True]
            counts.add(len(parts))
            own += sum(sizes)
        assert (own, len(counts)) == (count, 1), "all windows, and as many parts on each worker"


@pytest.mark.parametrize("checkpoints", [False, True])
def test_weights_are_cast_once_for_all_micro_batches_with_the_same_result(
    small_content: dict[str, Any], checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where autocast begins anew with each of them, it casts each weight again."""
    training = small_content["training"] | {"batch_size": 4, "precision": "bf16"}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    gradients, casts = list[list[torch.Tensor]](), list[int]()
    for together in (True, False):
        whole, _ = make_replica(config)
        if checkpoints:
            checkpoint_activations(whole.model.train())
        replica = ModelReplica(config, whole.model, whole._samples, micro_batch=1)
        if not together:
            alone = torch.autocast
            monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
            monkeypatch.setattr(replica, "precision", lambda alone=alone: alone("cpu", torch.bfloat16))
        with Casting(whole.model.lm_head.weight.shape) as casting:
            replica.add_gradient(whole._samples.read(np.arange(4)))
        monkeypatch.undo()
        gradients.append([parameter.grad for parameter in whole.model.parameters()])
        casts.append(casting.count)
    assert casts[0] < casts[1] / 3
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Casting(TorchDispatchMode):
    """Counts how often something of this shape is cast to bf16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = operation is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        self.count += is_cast and args[0].shape == self.shape
        return operation(*args, **(kwargs or {}))


class Unwaiting(TorchDispatchMode):
    """Refuses what makes the host wait for a device: to ask for a tensor's numbers, or for as many as there happen to
    be."""

    WAITING: ClassVar = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    }

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation not in self.WAITING, f"{operation} waits"
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("positions", [16, 5])
def test_gradients_of_all_micro_batches_are_asked_for_without_waiting(
    small_content: dict[str, Any], mask: bool, model_type: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers looks for documents in positions, and waits for what it finds; we know what we give it. Nor does
    anything wait between pieces of the logits."""
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", 259 * positions)
    training = small_content["training"] | {"document_mask": mask, "batch_size": 4}
    gpt2 = {"model_type": "gpt2", "vocab_size": 259, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    model = small_content["model"]["config"] if model_type == "llama" else gpt2
    config = RunConfig.from_manifest_content(small_content | {"training": training, "model": {"config": model}})
    whole, _ = make_replica(config)
    samples = load_data(config, ByteTokenizer()).samples
    replica, batch = ModelReplica(config, whole.model, samples, micro_batch=1), samples.read(np.arange(64))[:4]
    if mask:
        batch[1, 5] = ByteTokenizer.end  # others may have one or not
    with Unwaiting():  # type: ignore[no-untyped-call]
        replica.add_gradient(batch)
    with pytest.raises(AssertionError, match="waits"), Unwaiting():  # type: ignore[no-untyped-call]
        window_loss(replica.model, torch.from_numpy(batch), ByteTokenizer.end)  # nobody says what it is given


def test_windows_go_to_a_gpu_by_pinned_memory() -> None:
    """Played by a tensor that notes what is asked of it."""
    asked = list[object]()

    class Noting:
        def pin_memory(self) -> Noting:
            asked.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> Noting:
            asked.append((device.type, non_blocking))
            return self

    windows: Any = Noting()
    _on_device(windows, torch.device("cuda"))
    _on_device(windows, torch.device("cpu"))
    assert asked == ["pinned", ("cuda", True), ("cpu", False)]


# fp16 -----------------------------------------------------------------------------------------------------------------
def half_replica(config: RunConfig, half: torch.dtype) -> tuple[ModelReplica, Vector]:
    """Return a replica of a run in bf16 that computes in this half precision, and its theta."""
    team, tokenizer = Team(CPU), ByteTokenizer()
    team.half = half
    replica = ModelReplica(config, build_model(config, tokenizer), load_data(config, tokenizer).samples, team)
    theta = np.empty(replica.layout.size, np.float32)
    replica.store(theta)
    return replica, theta


def in_bf16(small_content: dict[str, Any]) -> RunConfig:
    return RunConfig.from_manifest_content(
        small_content | {"training": small_content["training"] | {"precision": "bf16"}}
    )


def test_fp16_with_a_loss_scale_trains_as_fp32_does(small_content: dict[str, Any]) -> None:
    losses = []
    for config in (RunConfig.from_manifest_content(small_content), in_bf16(small_content)):
        replica, theta = half_replica(config, torch.float16)
        assert (replica._loss_scale is None) == (config.training.precision == "fp32")
        losses.append(replica.train(theta, 0, (SampleRange(0, 40),), 20).loss)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_gradients_in_fp16_that_would_be_zero_are_there_with_a_loss_scale(small_content: dict[str, Any]) -> None:
    """The loss of a batch is made so small that most gradients by logits are below what fp16 has."""
    gradients = []
    for factor in (1.0, 2.0**16):
        replica, _ = half_replica(in_bf16(small_content), torch.float16)
        windows = torch.from_numpy(replica._samples.read(np.arange(4)))
        (replica.loss(windows) * 1e-6 * factor).backward()
        gradients.append(replica.model.model.layers[0].mlp.up_proj.weight.grad / factor)
    without, with_scale = gradients
    assert float((without != 0).float().mean()) < 0.1
    assert float((with_scale != 0).float().mean()) > 0.9


@pytest.mark.parametrize("fused", [False, True])
def test_what_overflows_is_computed_again_with_a_smaller_factor_and_no_step_is_lost(
    small_content: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "FUSED_ON", {"cpu"} if fused else set())
    weights = []
    for factor in (2.0**16, 2.0**21):
        replica, theta = half_replica(in_bf16(small_content), torch.float16)
        replica._loss_scale = LossScale(factor)
        trained = replica.train(theta, 0, (SampleRange(0, 8),), 4)
        assert (trained.skipped, trained.inner_steps, trained.tokens) == (0, 4, 8 * 16)
        assert 2.0**16 <= replica._loss_scale.factor < 2.0**21
        weights.append(np.empty_like(theta))
        replica.store(weights[-1])
    assert np.abs(weights[0] - weights[1]).max() < 1e-3


def test_the_loss_scale_falls_with_an_overflow_and_rises_after_steady_steps() -> None:
    scale = LossScale(4.0)
    assert [scale.overflows(1.0, math.inf) for _ in range(3)] == [True, True, False]
    assert scale.factor == 1.0
    assert not scale.overflows(math.nan, math.nan), "a loss that is not finite is not the factor's fault"
    for _ in range(2 * LossScale.STEADY):
        scale.overflows(1.0, 1.0)
    assert scale.factor == 4.0


def test_a_batch_that_no_factor_helps_is_skipped_after_a_few_attempts() -> None:
    scale = LossScale()
    assert [scale.overflows(1.0, math.nan) for _ in range(5)] == [True, True, True, True, False]
    assert scale.factor == 2.0**12
    assert scale.overflows(1.0, math.inf), "the next batch has attempts of its own"
