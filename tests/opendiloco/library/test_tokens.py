"""What a loop trains counts as what it trained: neither more than passed through its model nor more than its lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.errors import LoopError
from opendiloco.library import DiLoCo
from opendiloco.library.model import TokenCounter
from opendiloco.model.build import build_model
from opendiloco.run import Run
from peers.values.leases import SampleRange
from tests.opendiloco.library.played_swarm import PlayedSwarm, playing

LEASE = (SampleRange(0, 5), SampleRange(20, 23))  # of 4 inner steps of 2 samples of 16 tokens


class Calls(torch.nn.Module):
    """Takes what models of transformers take."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2)

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.table.weight.sum() if input_ids is None else self.table(input_ids)


IDS = torch.zeros(2, 6, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize("compiled", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_tokens_that_pass_through_the_model_in_training_are_counted(compiled: Callable[[Any], Any]) -> None:
    model, counter = compiled(Calls()), TokenCounter()
    watching = counter.watch(model)
    model(IDS)
    model(input_ids=IDS)  # two micro-batches
    assert counter.take() == 24
    model(input_ids=IDS, attention_mask=PADDED)
    assert counter.take() == 8
    model(input_ids=IDS, attention_mask=torch.ones(2, 1, 6, 6))  # of another kind
    assert counter.take() == 12
    with torch.no_grad():
        model(IDS)
    model.eval()
    model(IDS)
    model.train()
    model()
    assert counter.take() == 0
    watching.remove()
    model(IDS)
    assert counter.take() == 0


def test_what_the_loop_says_counts_more_than_what_passes() -> None:
    model, counter = Calls(), TokenCounter()
    counter.watch(model)
    counter.say(3)
    model(IDS)
    counter.say(5)
    assert counter.take() == 5
    assert counter.take() == 0


def config_of(content: dict[str, Any], outer_steps: int = 1) -> RunConfig:
    return RunConfig.from_manifest_content(content | {"outer_steps": outer_steps})


def train(config: RunConfig, step: Callable[[DiLoCo, Any], None]) -> PlayedSwarm:
    """Train one outer step, each inner step by a call. Return the swarm."""
    model = build_model(config, ByteTokenizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with playing(config, [LEASE]) as played, DiLoCo(model, optimizer, run="diloco:small-1", evaluates=False) as diloco:
        while not diloco.finished:
            step(diloco, model)
            optimizer.step()
            optimizer.zero_grad()
    [swarm] = played.swarms
    return swarm


@pytest.mark.parametrize(
    ("windows", "length", "samples", "tokens"),
    [
        (2, 16, LEASE, 128),
        (1, 16, (SampleRange(0, 4),), 64),
        (2, 10, (SampleRange(0, 5),), 80),
        (3, 7, (SampleRange(0, 5), SampleRange(20, 21)), 84),
        (5, 16, LEASE, 128),
        (1, 32, LEASE, 128),
    ],
    ids=["the run's batch", "half", "shorter windows", "a part of a sample", "more than the lease", "longer windows"],
)
def test_a_loop_claims_what_it_trained_and_at_most_its_lease(
    small_content: dict[str, Any], windows: int, length: int, samples: tuple[SampleRange, ...], tokens: int
) -> None:
    """After as many inner steps as every peer takes."""
    ids = torch.randint(0, 256, (windows, length))

    def step(diloco: DiLoCo, model: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    swarm = train(config_of(small_content), step)
    [trained] = swarm.trained
    assert (trained.samples, trained.tokens) == (samples, tokens)
    assert [each.inner_step for each in swarm.progress] == [1, 2, 3, 4]


def test_accumulated_windows_and_said_tokens_count(small_content: dict[str, Any]) -> None:
    ids = torch.randint(0, 256, (1, 8))

    def accumulate(diloco: DiLoCo, model: Any) -> None:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()

    def say(diloco: DiLoCo, model: Any) -> None:
        loss = model(inputs_embeds=torch.ones(1, 9, 16), labels=torch.zeros(1, 9, dtype=torch.long)).loss
        loss.backward()
        diloco.report(loss, tokens=9)

    assert [each.tokens for each in train(config_of(small_content), accumulate).trained] == [4 * 3 * 8]
    assert [each.tokens for each in train(config_of(small_content), say).trained] == [4 * 9]


def test_a_loop_that_shows_no_tokens_ends_with_what_to_do(small_content: dict[str, Any]) -> None:
    def step(diloco: DiLoCo, model: Any) -> None:
        model(inputs_embeds=torch.ones(1, 9, 16), labels=torch.zeros(1, 9, dtype=torch.long)).loss.backward()

    with pytest.raises(LoopError, match="inner step 1 of outer step 0 has trained 0 tokens") as caught:
        train(config_of(small_content), step)
    assert "diloco.report(loss, tokens=" in caught.value.remedy


def test_a_loss_that_is_not_finite_is_not_told(small_content: dict[str, Any]) -> None:
    """Heartbeats hold finite losses alone; a gradient scaler may skip the step."""
    ids = torch.randint(0, 256, (2, 16))

    def step(diloco: DiLoCo, model: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        diloco.report(float("nan"))

    swarm = train(config_of(small_content), step)
    assert [each.loss for each in swarm.progress] == [None] * 4
    assert [each.loss for each in swarm.trained] == [0.0]


def test_a_loop_that_never_steps_ends_with_what_to_do(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_content)
    model = build_model(config, ByteTokenizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monkeypatch.setattr(Run, "with_data", lambda run, folders: run)
    drawn = list[torch.Tensor]()
    with (
        pytest.raises(LoopError, match="yielded 20 batches for inner step 1 of outer step 0") as caught,
        playing(config, [LEASE]),
        DiLoCo(model, optimizer, run="diloco:small-1", evaluates=False) as diloco,
    ):
        drawn.extend(diloco.batches())
    assert len(drawn) == 20
    assert "Each batch is for one step" in caught.value.remedy
