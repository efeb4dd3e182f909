"""Attention within documents alone: the same loss where it works, and the model's own attention where it does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_model
from opendiloco.stages import watched_by
from opendiloco.training import trials
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import FLEX, attending_by, document_attention
from peers.values.leases import SampleRange

TEAM = Team(torch.device("cpu"))
END = ByteTokenizer.end


@pytest.fixture
def replica(small_content: dict[str, Any]) -> ModelReplica:
    training = small_content["training"] | {"document_mask": True}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    model = build_model(config, ByteTokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # or else attention, and what it changes, would be small
    return ModelReplica(config, model, load_data(config, ByteTokenizer()).samples)


@pytest.fixture(autouse=True)
def _compiled_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch traces flex attention, and computes it itself. With what Inductor makes of it for CPUs nobody trains, and
    it keeps a C++ compiler busy for a quarter of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)  # which keeps what was compiled before


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said while flex attention is tried on the CPU, where it has no backward pass."""
    monkeypatch.setattr(trials, "FLEX_ON", {"cpu"})
    monkeypatch.setattr(trials, "compiling_lacks", lambda device: None)
    return []


def tried(replica: ModelReplica, said: list[str]) -> str | None:
    with watched_by(lambda stage, share: said.append(stage)):
        return document_attention(replica, TEAM, END)


@torch.no_grad()
def test_flex_attention_keeps_documents_apart_as_the_mask_does(replica: ModelReplica) -> None:
    windows = torch.randint(0, 255, (3, replica.window_length), generator=torch.Generator().manual_seed(1))
    windows[0, 5] = windows[1, 2] = windows[1, 11] = END
    expected = replica.loss(windows)
    with attending_by(replica.model, FLEX):
        assert torch.allclose(replica.loss(windows), expected, rtol=1e-4)
    together = windows.clone()
    together[windows == END] = 7
    assert not torch.allclose(replica.loss(together), expected, rtol=1e-4)


def test_where_it_cannot_be_trained_the_model_goes_on_as_before(replica: ModelReplica, said: list[str]) -> None:
    own = replica.model.config._attn_implementation
    assert tried(replica, said) is None
    assert "FlexAttention does not support backward on CPU" in said[-1]
    assert replica.model.config._attn_implementation == own
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_what_does_not_work_at_all_is_not_asked_again(
    replica: ModelReplica, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass goes on to its end with the model's own attention, as other workers may be in it, too."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLEX, refuse)
    assert tried(replica, said) is None
    assert said[-1].endswith("slower: no such kernel.")


def test_another_loss_is_not_taken(replica: ModelReplica, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([torch.tensor(2.0), torch.tensor(2.5, requires_grad=True)])
    monkeypatch.setattr(replica, "loss", lambda windows: next(losses))
    assert tried(replica, said) is None
    assert "gives a loss of 2.5000 instead of 2.0000." in said[-1]


def test_what_works_is_taken(replica: ModelReplica, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "FLEX", "eager")
    assert tried(replica, said) == "eager"
    assert all(parameter.grad is None for parameter in replica.model.parameters())


def test_nothing_is_tried_on_the_cpu(replica: ModelReplica) -> None:
    said: list[str] = []
    assert tried(replica, said) is None
    assert said == []


def test_training_alone_attends_so(replica: ModelReplica) -> None:
    """Evaluation and generation have other shapes, and other masks."""
    seen: list[str] = []
    config = replica.model.config
    own = config._attn_implementation
    replica.model.register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    replica.attention = "eager"
    theta = np.empty(replica.layout.size, np.float32)
    replica.store(theta)
    replica.train(theta, 0, (SampleRange(0, 2),), 1)
    replica.loss(torch.zeros(1, replica.window_length, dtype=torch.long))
    assert seen == ["eager", own]
