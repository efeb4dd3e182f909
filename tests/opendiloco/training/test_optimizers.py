from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from opendiloco.cli.run import _check
from opendiloco.config.optimizers import AdamWSection, InnerOptimizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.model.loss import window_loss
from opendiloco.model.parameters import Shards
from opendiloco.training import optimizers as inner_optimizers
from opendiloco.training.optimizers import build_inner_optimizer, check_inner_optimizer, write_state
from peers.errors import ManifestError
from peers.values.workload import SnapshotError


@pytest.mark.parametrize("value", [torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), 7])
def test_what_a_file_of_fp32_cannot_hold_is_not_kept(value: object, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["kept"] = value
    shards = Shards(Layout([("weight", (3,))]))
    with pytest.raises(SnapshotError, match=r"^its inner optimizer's kept is a (Tensor|int), which no file can hold"):
        write_state(tmp_path / "moments", optimizer, {"weight": parameter}, shards, {})


class HandWrittenAdamW:
    """Loshchilov and Hutter's Algorithm 2 (arXiv 1711.05101), in float64."""

    def __init__(self, section: AdamWSection, decay: float, shape: tuple[int, ...]) -> None:
        self.section, self.decay, self.time = section, decay, 0
        self.first, self.second = np.zeros(shape), np.zeros(shape)

    def step(self, weights: NDArray[np.float64], gradient: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
        self.time += 1
        beta1, beta2 = self.section.betas
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        first = self.first / (1 - beta1**self.time)
        second = self.second / (1 - beta2**self.time)
        return weights - rate * (first / (np.sqrt(second) + self.section.epsilon) + self.decay * weights)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decays", ["matrices", "all"])
def test_adamw_steps_as_written_by_hand_and_spares_vectors_the_decay_unless_told_otherwise(
    decays: Literal["matrices", "all"], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizers, "FUSED_ON", {"cpu"} if fused else set())
    torch.manual_seed(0)
    settings = AdamWSection(learning_rate=0.02, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.3, decays=decays)
    layer = torch.nn.Linear(5, 3)
    optimizer = build_inner_optimizer(layer, settings)
    by_hand = [HandWrittenAdamW(settings, 0.3, (3, 5)), HandWrittenAdamW(settings, 0.3 * (decays == "all"), (3,))]
    expected = [parameter.detach().numpy().astype(np.float64) for parameter in (layer.weight, layer.bias)]
    for rate in (0.02, 0.01, 0.005):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        layer(torch.randn(7, 5)).square().sum().backward()
        for position, parameter in enumerate((layer.weight, layer.bias)):
            assert parameter.grad is not None
            gradient = parameter.grad.numpy().astype(np.float64)
            expected[position] = by_hand[position].step(expected[position], gradient, rate)
        optimizer.step()
    for parameter, values in zip((layer.weight, layer.bias), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), values, rtol=2e-6, atol=1e-7)


def section(**values: Any) -> InnerOptimizerSection:
    adapter: TypeAdapter[InnerOptimizerSection] = TypeAdapter(InnerOptimizerSection)
    return adapter.validate_python({"learning_rate": 0.01} | values)


KINDS: list[dict[str, Any]] = [
    {"kind": "adamw"},
    {"kind": "muon", "learning_rate": 0.02, "adamw": {"learning_rate": 0.01}},
    {"kind": "adafactor", "learning_rate": 0.3},
    {"kind": "torch", "name": "SGD", "learning_rate": 0.3, "options": {"momentum": 0.9, "nesterov": True}},
    {"kind": "torch", "name": "NAdam", "options": {"betas": [0.9, 0.99], "weight_decay": 0.1}},
]


@pytest.mark.parametrize("values", KINDS, ids=lambda values: values.get("name", values["kind"]))
def test_every_kind_learns_and_goes_on_where_its_state_says(values: dict[str, Any], small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    windows = torch.from_numpy(load_data(small_config, ByteTokenizer()).samples.read(np.arange(4)))

    def step(optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = window_loss(model, windows)
        loss.backward()
        optimizer.step()
        return loss.item()

    optimizer = build_inner_optimizer(model, section(**values))
    losses = [step(optimizer) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.2
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(optimizer)
    after = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(weights)
    restored = build_inner_optimizer(model, section(**values))
    restored.load_state_dict(state)
    step(restored)
    assert all(torch.equal(one, other) for one, other in zip(after, model.parameters(), strict=True))


def test_muon_has_the_hidden_layers_matrices_and_adamw_the_rest(small_content: dict[str, Any]) -> None:
    content = copy.deepcopy(small_content)
    content["model"]["config"]["tie_word_embeddings"] = False
    model = build_model(RunConfig.from_manifest_content(content), ByteTokenizer())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = section(kind="muon", learning_rate=0.02, weight_decay=0.2, adamw={"learning_rate": 0.003})
    muon, matrices, vectors = build_inner_optimizer(model, chosen).param_groups
    named = [[names[id(parameter)] for parameter in group["params"]] for group in (muon, matrices, vectors)]
    assert len(named[0]) == 7  # q, k, v, o, gate, up, down
    assert all(".self_attn." in name or ".mlp." in name for name in named[0])
    assert sorted(named[1]) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert sorted(name for group in named for name in group) == sorted(names.values())
    assert [group["initial_lr"] for group in (muon, matrices, vectors)] == [0.02, 0.003, 0.003]
    assert [group["weight_decay"] for group in (muon, matrices, vectors)] == [0.2, 0.1, 0.0]


def test_a_joint_optimizer_steps_as_its_parts_would_alone() -> None:
    torch.manual_seed(0)
    together, alone = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    alone.load_state_dict(together.state_dict())
    values = {"kind": "muon", "learning_rate": 0.02, "adamw": {"learning_rate": 0.01, "weight_decay": 0.0}}
    optimizer = build_inner_optimizer(together, section(**values))
    parts = [
        torch.optim.Muon([alone.weight], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([alone.bias], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    inputs = torch.randn(6, 4)
    for _ in range(3):
        for model, optimizers in ((together, [optimizer]), (alone, parts)):
            model.zero_grad()
            model(inputs).square().sum().backward()
            for each in optimizers:
                each.step()
    assert torch.equal(together.weight, alone.weight)
    assert torch.equal(together.bias, alone.bias)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"name": "Adamm"},
            "inner_optimizer.name = 'Adamm' is no optimizer of torch.optim that a run can use. Use one of",
        ),
        ({"name": "LBFGS"}, "inner_optimizer.name = 'LBFGS' is no optimizer of torch.optim that a run can use."),
        ({"name": "Optimizer"}, "inner_optimizer.name = 'Optimizer' is no optimizer of torch.optim"),
        ({"name": "lr_scheduler"}, "inner_optimizer.name = 'lr_scheduler' is no optimizer of torch.optim"),
        ({"name": "os.system"}, "inner_optimizer.name = 'os.system' is no optimizer of torch.optim"),
        (
            {"name": "SGD", "options": {"momentun": 0.9}},
            "inner_optimizer.options.momentun = 0.9: torch.optim.SGD has no such option for a run. It has: momentum, d",
        ),
        (
            {"name": "SGD", "options": {"lr": 0.9}},
            "inner_optimizer.options.lr = 0.9: torch.optim.SGD has no such option",
        ),
        ({"name": "Adam", "options": {"fused": True}}, "inner_optimizer.options.fused = True: torch.optim.Adam has no"),
        (
            {"name": "SGD", "options": {"nesterov": 1}},
            "inner_optimizer.options.nesterov = 1 has the wrong type. Use the type of its default, False.",
        ),
        (
            {"name": "Adam", "options": {"betas": 0.9}},
            "inner_optimizer.options.betas = 0.9 has the wrong type. Use the type of its default, (0.9, 0.999).",
        ),
        ({"name": "Adam", "options": {"betas": [0.9, "x"]}}, "inner_optimizer.options.betas = [0.9, 'x'] has the"),
        (
            {"name": "SGD", "options": {"momentum": -1.0}},
            "inner_optimizer: torch.optim.SGD refuses it: Invalid momentum value: -1.0. Correct that value.",
        ),
    ],
)
def test_what_torch_does_not_have_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        check_inner_optimizer(section(kind="torch", **values))
    assert str(caught.value).startswith(said)


def test_no_run_is_created_with_what_torch_does_not_have(small_content: dict[str, Any]) -> None:
    optimizer = {"kind": "torch", "name": "Adamm", "learning_rate": 1.0}
    with pytest.raises(ManifestError, match=r"inner_optimizer.name = 'Adamm'"):
        _check(RunConfig.from_manifest_content(small_content | {"inner_optimizer": optimizer}))


@pytest.mark.parametrize("values", KINDS, ids=lambda values: values.get("name", values["kind"]))
def test_what_torch_has_passes(values: dict[str, Any]) -> None:
    check_inner_optimizer(section(**values))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"kind": "adam"}, "inner_optimizer.kind = 'adam': not known here. Use 'adamw', 'muon', 'adafactor', 'torch'."),
        ({"kind": "muon", "learning_rate": 1.0}, "inner_optimizer.adamw: is missing. Add it."),
        (
            {"kind": "muon", "learning_rate": 1.0, "adamw": {"learning_rate": 1.0, "beta": 1}},
            "inner_optimizer.adamw.beta = 1: unknown key. Did you mean betas?",
        ),
        (
            {"kind": "adafactor", "learning_rate": 1.0, "betas": [0.9, 0.9]},
            "inner_optimizer.betas = [0.9, 0.9]: unknown key.",
        ),
        ({"kind": "torch", "learning_rate": 1.0}, "inner_optimizer.name: is missing. Add it."),
        (
            {"kind": "torch", "learning_rate": 1.0, "name": "SGD", "options": {"momentum": math.nan}},
            "inner_optimizer.options.momentum",
        ),
        (3, "inner_optimizer = 3: not a table. Write its keys below a line [inner_optimizer]."),
    ],
)
def test_a_table_that_is_wrong_is_refused(small_content: dict[str, Any], optimizer: object, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(small_content | {"inner_optimizer": optimizer})
    assert str(caught.value).startswith(f"manifest: {said}")


@pytest.mark.parametrize("values", KINDS, ids=lambda values: values.get("name", values["kind"]))
def test_every_kind_survives_the_way_through_a_manifest(small_content: dict[str, Any], values: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(small_content | {"inner_optimizer": {"learning_rate": 0.01} | values})
    carried = json.loads(json.dumps(config.to_manifest_content()))
    assert RunConfig.from_manifest_content(carried) == config
