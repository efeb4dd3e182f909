"""The head and the softmax piece by piece: the same loss and gradient as of whole logits, which are never there."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import HostMemory
from opendiloco.kernels import INT8
from opendiloco.model import loss as losses
from opendiloco.model.build import build_model, initial_theta
from opendiloco.model.loss import window_loss
from opendiloco.stages import watched_by
from opendiloco.training import trials
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import fitting_micro_batch, peak_while, trying
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from tests.opendiloco.training.all_shards import only_one

CPU, END, VOCABULARY, POSITIONS = torch.device("cpu"), ByteTokenizer.end, 5000, 20
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "gemma2": {"final_logit_softcapping": 5.0, "num_key_value_heads": 1, "head_dim": 8},
    "cohere": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25},
    "phi": {"tie_word_embeddings": False},  # a head with a bias
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.25},
}


def config_of(content: dict[str, Any], family: str = "llama", **training: Any) -> RunConfig:
    content = copy.deepcopy(content)
    if family == "gpt2":
        content["model"]["config"] = {}
    content["model"]["config"] |= {"model_type": family, "vocab_size": VOCABULARY} | FAMILIES[family]
    content["training"] |= training
    return RunConfig.from_manifest_content(content)


def model_of(content: dict[str, Any], family: str = "llama") -> Any:
    model = build_model(config_of(content, family), ByteTokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # or else all logits would be small
    return model.eval()  # without dropout


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", VOCABULARY * POSITIONS)


def windows_of(number: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(60, END + 1, (number, 17)))


def learnt(model: Any, mask: bool = False, z_loss: float = 0.0, router: float = 0.0) -> tuple[float, list[Any], int]:
    """Return a loss, half its gradients, and what that takes."""
    losses = list[float]()

    def go() -> None:
        loss = window_loss(model, windows_of(), END if mask else None, z_loss, router)
        losses.append(loss.item())
        (loss / 2).backward()

    model.zero_grad()
    peak = peak_while(go, CPU)
    return losses[0], [parameter.grad for parameter in model.parameters()], peak


def assert_same(one: list[Any], other: list[Any]) -> None:
    for gradient, others in zip(one, other, strict=True):
        assert (gradient is None) == (others is None)
        if gradient is not None:
            assert (gradient - others).abs().max() < 1e-5 * gradient.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mask", "z_loss"), [(False, 0.0), (True, 1e-2)])
def test_loss_and_gradient_are_those_of_whole_logits_and_take_less_than_these(
    small_content: dict[str, Any], family: str, mask: bool, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, router = model_of(small_content, family), 0.25 * (family == "mixtral")
    loss, gradients, most = learnt(model, mask, z_loss, router)
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", VOCABULARY * POSITIONS)
    by_pieces, others, less = learnt(model, mask, z_loss, router)
    assert by_pieces == pytest.approx(loss, rel=1e-6)
    assert_same(gradients, others)
    whole_logits = 4 * VOCABULARY * windows_of()[:, 1:].numel()
    assert less < whole_logits < most / 2
    with torch.no_grad():
        evaluated = window_loss(model, windows_of(), END if mask else None, z_loss, router)
    assert evaluated.item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("frozen", ["lm_head", "model.layers", ""])
def test_what_is_frozen_gets_no_gradient_and_all_else_the_same(
    small_content: dict[str, Any], frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(small_content, "phi")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else name.startswith("lm_head"))
    _, gradients, _ = learnt(model)
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", VOCABULARY * POSITIONS)
    assert_same(gradients, learnt(model)[1])
    assert any(gradient is None for gradient in gradients)


def test_bf16_differs_from_fp32_no_more_by_pieces_than_whole(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the head's weight the gradient adds up in fp32, whatever the number of pieces."""
    model = model_of(small_content)
    _, exact, _ = learnt(model)
    found = []
    for logits in (1 << 24, VOCABULARY * 4):
        monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", logits)
        with torch.autocast("cpu", torch.bfloat16):
            loss, gradients, _ = learnt(model)
        pairs = zip(gradients, exact, strict=True)
        found.append((loss, sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5))
    (whole, off), (by_pieces, others_off) = found
    assert by_pieces == pytest.approx(whole, rel=1e-5)
    assert others_off < 1.05 * off


@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharing_workers_train_by_pieces_whatever_else_is_chosen(
    small_content: dict[str, Any], family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_content, family, precision=precision, document_mask=family == "llama")
    theta, samples = initial_theta(config), load_data(config, ByteTokenizer()).samples
    team = only_one()

    def trained(options: WorkerOptions) -> float:
        model = assemble_model(config, ByteTokenizer(), team, options, None)
        replica = ModelReplica(config, model, samples, team, 1, reduces_once=options.reduces_once)
        return replica.train(theta, 0, (SampleRange(0, 8),), 4).loss

    expected = trained(WorkerOptions())
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", VOCABULARY * 3)
    for whole_layers, checkpointed in product((False, True), (False, True)):
        options = WorkerOptions(whole_layers=whole_layers, activation_checkpointing=checkpointed)
        assert trained(options) == pytest.approx(expected, abs=1e-6 if precision == "fp32" else 1e-3)


class Slicing(torch.nn.Module):
    """A model that leaves out a part of the vocabulary after its head, or overwrites it."""

    def __init__(self, model: Any, in_place: bool) -> None:
        super().__init__()
        self.model, self.in_place, self.calls = model, in_place, 0
        self.get_output_embeddings = model.get_output_embeddings

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        output = self.model(**inputs)
        if self.in_place:
            output.logits[..., 8:] = -50.0
        else:
            output.logits = output.logits[..., :300]
        return output


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_does_more_with_its_logits_has_them_whole_and_says_so(
    small_content: dict[str, Any], in_place: bool
) -> None:
    model = Slicing(model_of(small_content), in_place)
    windows, said = windows_of(), list[str]()
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
    with watched_by(lambda stage, share: said.append(stage)):
        for calls in (3, 4):  # that it is so is found out once
            loss = window_loss(model, windows)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            assert model.calls == calls
    assert "all logits are computed at once" in said[0]
    loss.backward()
    by_pieces = model.model.lm_head.weight.grad.clone()
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(by_pieces, model.model.lm_head.weight.grad, rtol=1e-4, atol=1e-7)


class Flattened(torch.nn.Linear):
    """A head of its own kind."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) ** 3


@pytest.mark.usefixtures("small_pieces")
def test_a_head_of_another_kind_is_left_alone(small_content: dict[str, Any]) -> None:
    model = model_of(small_content)
    assert losses._linear_head(model) is model.lm_head
    model.lm_head.__class__ = Flattened
    assert losses._linear_head(model) is None
    windows = windows_of()
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
    assert window_loss(model, windows).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_piece_has_one_position_at_least_and_any_device_has_pieces() -> None:
    sizes = [losses.positions_at_once(32_000, torch.device(kind)) for kind in ("cpu", "cuda", "meta")]
    assert sizes == [524, 2097, 524]
    assert losses.positions_at_once(1 << 30, CPU) == 1


def test_windows_are_counted_by_what_they_take_beyond_one_piece(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where logits are most of what a window takes, many more fit than if each had all of its own at a time."""
    config = config_of(small_content)
    replica, team = ModelReplica(config, model_of(small_content), load_data(config, ByteTokenizer()).samples), Team(CPU)
    monkeypatch.setitem(losses.LOGITS_AT_ONCE, "cpu", VOCABULARY * 2 * (replica.window_length - 1))
    with trying(replica, team) as taken:
        one, two = taken(1), taken(2)
        wanted = taken(40)
    later = HostMemory(replica.layout.size, INT8).most
    fixed = one - (two - one)
    monkeypatch.setattr(trials, "available_memory", lambda: later + fixed + 4 * (wanted - fixed))
    assert 35 <= fitting_micro_batch(replica, 100, team) <= 42
    assert (wanted - fixed) / (two - one) < 12  # windows, if each took as much as the first
