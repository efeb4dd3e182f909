"""The head and the softmax piece by piece: the same loss and gradient as of whole logits, which are never there."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import HostMemory
from opendiloco.kernels import INT8
from opendiloco.model import loss as losses
from opendiloco.model.build import build_model, initial_theta
from opendiloco.model.loss import CompiledLoss, window_loss
from opendiloco.model.parameters import transformer_blocks
from opendiloco.stages import watched_by
from opendiloco.training import trials
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import fitting_micro_batch, peak_while, trying
from opendiloco.workers.assembly import _cast_embeddings, assemble_model
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


def learn(
    model: Any,
    mask: bool = False,
    z_loss: float = 0.0,
    router: float = 0.0,
    slope: float | None = None,
    compiled: CompiledLoss | None = None,
) -> tuple[float, list[Any]]:
    """Return a loss, and half its gradients."""
    model.zero_grad()
    loss = window_loss(model, windows_of(), END if mask else None, z_loss, router, slope, compiled)
    (loss / 2).backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def learnt(model: Any, mask: bool = False, z_loss: float = 0.0, router: float = 0.0) -> tuple[float, list[Any], int]:
    """Return a loss, half its gradients, and what that takes."""
    found = list[tuple[float, list[Any]]]()
    model.zero_grad()
    peak = peak_while(lambda: found.append(learn(model, mask, z_loss, router)), CPU)
    return *found[0], peak


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


def by_hand(model: Any, mask: bool, z_loss: float) -> tuple[float, list[Any]]:
    """Return the loss of whole logits, and half its gradients, as their formulas have it."""
    windows = windows_of()
    inputs, targets = windows[:, :-1], windows[:, 1:]
    positions = {"position_ids": losses._document_positions(inputs, END)} if mask else {}
    log_z = (logits := model(input_ids=inputs, use_cache=False, **positions).logits).logsumexp(-1)
    each = log_z - logits.gather(-1, targets[..., None])[..., 0] + z_loss * log_z.square()
    loss = each[inputs != END].mean() if mask else each.mean()
    model.zero_grad()
    (loss / 2).backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("family", "backend", "mask", "z_loss"),
    [
        pytest.param("llama", "inductor", False, 0.0, marks=pytest.mark.thorough),
        pytest.param("llama", "inductor", True, 1e-2, marks=pytest.mark.thorough),
        ("llama", "aot_eager", False, 0.0),
        ("llama", "aot_eager", True, 1e-2),
        ("gemma2", "aot_eager", True, 1e-2),
        ("cohere", "aot_eager", True, 1e-2),
        ("phi", "eager", True, 1e-2),
    ],
)
def test_a_compiled_loss_is_that_of_whole_logits(
    small_content: dict[str, Any],
    family: str,
    backend: str,
    mask: bool,
    z_loss: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 256 positions the last piece has 16, the others 20: that takes two graphs, and no others come later."""
    graphs, model = list[Any](), model_of(small_content, family)
    loss, gradients = by_hand(model, mask, z_loss)
    eager, others = learn(model, mask, z_loss)
    torch.compiler.reset()
    made = lookup_backend(backend)

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return made(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    compiled = CompiledLoss()
    for _ in range(2):
        found, learned = learn(model, mask, z_loss, slope=0.5, compiled=compiled)
        assert compiled.error is None
        assert len(graphs) == 2
        assert [found, eager] == pytest.approx([loss, loss], rel=1e-6)
        assert_same(gradients, learned)
        assert_same(others, learned)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_loss_that_cannot_be_compiled_is_computed_without_and_says_so_once(
    small_content: dict[str, Any], fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = model_of(small_content), list[str]()
    _, gradients = learn(model)

    def fail(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here\nand more")

    def forward(graph: Any, inputs: Any) -> Any:
        return graph.forward

    backend = fail if fails_in == "forward" else aot_autograd(fw_compiler=forward, bw_compiler=fail)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled = CompiledLoss()
    with watched_by(lambda stage, share: said.append(stage)):
        for _ in range(2):
            assert_same(gradients, learn(model, compiled=compiled)[1])
    assert len(said) == 1
    assert "not compiling the loss, which would be faster" in said[0]
    assert "no compiler here" in said[0]


def test_a_compiled_loss_that_runs_out_of_memory_is_not_given_up(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda function: run_out)
    compiled = CompiledLoss()
    with pytest.raises(torch.OutOfMemoryError):
        learn(model_of(small_content), compiled=compiled)
    assert compiled.error is None


@pytest.mark.usefixtures("small_pieces")
def test_a_loss_that_knows_its_slope_has_the_same_gradient_and_refuses_another(small_content: dict[str, Any]) -> None:
    model = model_of(small_content)
    loss, gradients = learn(model)
    known, others = learn(model, slope=0.5)
    assert known == loss
    assert_same(gradients, others)
    with pytest.raises(RuntimeError, match="another slope"):
        learn(model, slope=0.25)


@pytest.mark.parametrize("has_mixed", [False, True])
def test_products_of_bf16_are_summed_without_rounding_them(has_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch multiplies into fp32, one call does both; a GPU's is played here."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 300), (300, 32)))
    total, asked = torch.ones(64, 32), list[Any]()

    def addmm(beginning: Any, one: Any, other: Any, *, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        assert beginning is out
        asked.append((one.dtype, other.dtype, out_dtype))
        out += one.to(out_dtype) @ other.to(out_dtype)

    losses._multiplies_into_fp32.cache_clear()
    if has_mixed:
        monkeypatch.setattr(torch, "addmm", addmm)
    losses._add_product(total, left.T.contiguous().T, right)
    losses._multiplies_into_fp32.cache_clear()
    assert asked == [(torch.bfloat16, torch.bfloat16, torch.float32)] * (2 * has_mixed)
    torch.testing.assert_close(total.double(), 1 + left.double() @ right.double(), rtol=1e-5, atol=1e-4)
    assert (1 + left @ right - total).abs().max() > 0.01  # what rounding would have done


def test_what_blocks_add_to_is_in_bf16_where_autocast_is_on(small_content: dict[str, Any]) -> None:
    seen = list[torch.dtype]()
    for family in ("llama", "gpt2"):  # the latter has embeddings of positions, too
        model = model_of(small_content, family)
        exact = window_loss(model, windows_of())
        _cast_embeddings(model)
        for block in transformer_blocks(model):
            block.register_forward_hook(lambda block, inputs, output: seen.append(inputs[0].dtype))
        assert torch.equal(window_loss(model, windows_of()), exact)
        assert set(seen) == {torch.float32}
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert window_loss(model, windows_of()).item() == pytest.approx(exact.item(), rel=0.02)
        assert set(seen) == {torch.bfloat16}
        seen.clear()


@pytest.mark.usefixtures("_process_group_ends")
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma2", "mixtral"))]
)
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


@pytest.mark.parametrize(
    ("room", "logits"),
    [(0, 1 << 24), (12 << 24, 1 << 24), (12 << 25, 1 << 25), ((12 << 26) - 1, 1 << 25), (1 << 40, 1 << 26)],
)
def test_a_gpu_with_little_room_has_smaller_pieces(room: int, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", dict(losses.LOGITS_AT_ONCE))
    losses.limit_logits(gpu, losses.fitting_logits(gpu, room))
    assert losses.positions_at_once(32_000, gpu) == logits // 32_000
    assert losses.positions_at_once(32_000, CPU) == 524


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
