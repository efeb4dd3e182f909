"""Models and optimizers as torch.compile and accelerate wrap them: a loop trains them as if they were bare."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.library import DiLoCo, DiLoCoCallback
from opendiloco.model.build import build_model
from peers.values.leases import SampleRange
from tests.opendiloco.library.played_swarm import PlayedSwarm, playing

LEASES = [(SampleRange(0, 8),), (SampleRange(8, 16),)]
IDS = torch.arange(16 * 32).view(16, 2, 16) % 256
"""Two windows for each micro-batch."""
with_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not there")


def config_of(small_content: dict[str, Any]) -> RunConfig:
    return RunConfig.from_manifest_content(small_content | {"outer_steps": len(LEASES)})


def bare(config: RunConfig) -> tuple[Any, Any]:
    model = build_model(config, ByteTokenizer()).train()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(config: RunConfig, model: Any, optimizer: Any, step: Callable[[torch.Tensor], None]) -> PlayedSwarm:
    """Take a step on each micro-batch, until the run is over."""
    with (
        playing(config, LEASES) as played,
        DiLoCo(model, optimizer, run="diloco:small-1", evaluates=False) as diloco,
    ):
        for ids in IDS:
            if not diloco.finished:
                step(ids)
        assert diloco.finished
        [swarm] = played.swarms
    return swarm


def trained_bare(config: RunConfig, accumulated: int = 1) -> PlayedSwarm:
    model, optimizer = bare(config)
    passed = list[None]()

    def step(ids: torch.Tensor) -> None:
        (model(input_ids=ids, labels=ids).loss / accumulated).backward()
        passed.append(None)
        if len(passed) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()

    return train(config, model, optimizer, step)


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, backend="eager"), in_place])
def test_a_compiled_model_is_trained_as_one_that_is_not(
    small_content: dict[str, Any], compiled: Callable[[Any], Any]
) -> None:
    config = config_of(small_content)
    model, optimizer = bare(config)
    wrapped = compiled(model)

    def step(ids: torch.Tensor) -> None:
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    swarm, expected = train(config, wrapped, optimizer, step), trained_bare(config)
    assert [trained.tokens for trained in swarm.trained] == [trained.tokens for trained in expected.trained]
    assert swarm.digests == expected.digests


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """Accumulates gradients over two micro-batches."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = AcceleratorState, GradientState, PartialState
    for state in states:
        state._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in states:
        state._reset_state()


@with_accelerate
@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_accelerate_prepares_is_trained_as_it_is(
    small_content: dict[str, Any], accelerator: Any, is_compiled: bool
) -> None:
    """An inner step is one of the wrapped optimizer, after all of its micro-batches."""
    config = config_of(small_content)
    model, optimizer = bare(config)
    if is_compiled:
        model = torch.compile(model, backend="eager")
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(ids: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()

    swarm, expected = train(config, model, optimizer, step), trained_bare(config, accumulated=2)
    assert [each.inner_step for each in swarm.progress] == [1, 2, 3, 4] * 2
    assert {each.step_tokens for each in swarm.progress} == {64}
    assert [trained.tokens for trained in swarm.trained] == [128, 128], "at most the lease"
    assert swarm.digests == expected.digests


@with_accelerate
@pytest.mark.parametrize("how", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}], ids=str)
def test_a_trainer_that_computes_in_bf16_or_compiles_is_a_peer(
    small_content: dict[str, Any], tmp_path: Path, how: dict[str, Any]
) -> None:
    from transformers import Trainer, TrainingArguments

    config = config_of(small_content)
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1000, learning_rate=0.01, **quiet, **how
    )
    windows: Any = [{"input_ids": ids, "labels": ids} for ids in IDS.view(32, 16)]
    callback = DiLoCoCallback("diloco:small-1", evaluates=False)
    with playing(config, LEASES) as played:
        Trainer(bare(config)[0], arguments, train_dataset=windows, callbacks=[callback]).train()
        [swarm] = played.swarms
    assert [trained.tokens for trained in swarm.trained] == [128, 128]
    assert len(set(swarm.digests)) == 2, "it has learned something"
