"""A loop of one's own in a run that streams does what a worker does, after the same inner steps: it ends with the bits
of the reference."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.config.overrides import NO_OVERRIDES
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.errors import LoopError
from opendiloco.library import DiLoCo
from opendiloco.library.swarm import LoopWorker
from opendiloco.model.build import build_model, with_sizes_named
from opendiloco.model.layout import Layout
from opendiloco.run import Run
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.inner import ModelReplica
from opendiloco.training.reference import Reference, Work
from peers.values.leases import SampleRange, sample_count
from peers.values.workload import InnerLoop, Trained
from tests.opendiloco.library.played_swarm import PlayedSwarm, playing

OUTER_STEPS = 4
LEASES = [
    (SampleRange(0, 8),),
    (SampleRange(8, 16),),
    (SampleRange(16, 18), SampleRange(30, 33)),
    (SampleRange(40, 48),),
]


def config_of(small_content: dict[str, Any], streaming: dict[str, Any], **changes: Any) -> RunConfig:
    content = copy.deepcopy(small_content) | {"streaming": streaming, "outer_steps": len(LEASES)} | changes
    content["model"]["config"]["num_hidden_layers"] = 4
    return with_sizes_named(RunConfig.from_manifest_content(content))


def loop_in(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, watch: Callable[[DiLoCo], None] = lambda diloco: None
) -> PlayedSwarm:
    """Train a whole run with a worker's arithmetic, and return the swarm."""
    replica = ModelReplica(config, build_model(config, ByteTokenizer()), load_data(config, ByteTokenizer()).samples)
    replica._warmed_up = config.inner_optimizer.rewarmup_steps
    replica.model.train()
    monkeypatch.setattr(Run, "with_data", lambda run, folders: run)
    with (
        playing(config, LEASES) as played,
        DiLoCo(replica.model, replica._optimizer, run="diloco:small-1", evaluates=False) as diloco,
    ):
        for batch in diloco.batches():
            watch(diloco)
            step = diloco.outer_step * config.training.inner_steps + diloco.inner_step
            factor = diloco.learning_rate_factor
            replica._inner_step(lambda: False, NO_OVERRIDES, batch.numpy(), step, 0)
            assert replica.learning_rate == pytest.approx(factor * replica._optimizer.param_groups[0]["initial_lr"])
        assert diloco.finished
        assert (diloco.learning_rate_factor, diloco.outer_step) == (0, len(LEASES))
        [swarm] = played.swarms
        final = np.zeros_like(diloco._worker.vectors.theta)
        replica.store(final)
        assert np.array_equal(final, diloco._worker.vectors.theta)
    return swarm


def test_weights_that_are_not_finite_end_the_loop_before_they_are_averaged(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the swarm's thread raised a WorkerError, below a traceback of asyncio."""

    config = config_of(small_content, {})
    model: torch.nn.Module = build_model(config, ByteTokenizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Run, "with_data", lambda run, folders: run)

    def train() -> None:
        with DiLoCo(model, optimizer, run="diloco:small-1", evaluates=False) as diloco:
            for _ in diloco.batches():
                diloco.report(torch.nan)
                next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.nan)
                optimizer.step()

    problem = r"weights hold NaN or infinity in inner step \d of outer step 0\. Lower the"
    with playing(config, LEASES), pytest.raises(LoopError, match=problem):
        train()


LOOP = InnerLoop(0, LEASES[0], 4, 0)
STREAMS = [
    {},
    {"overlap": 2},
    {"layers_per_fragment": 2},
    {"layers_per_fragment": 1, "embeddings": "ends", "overlap": 1, "alpha": 0.25},
    {"layers_per_fragment": 2, "overlap": 3},
]


@pytest.mark.parametrize("streaming", STREAMS, ids=str)
def test_a_loop_agrees_with_the_reference_bit_for_bit(
    small_content: dict[str, Any], streaming: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_content, streaming)
    roster = [[Work("a", lease, config.training.inner_steps)] for lease in LEASES]
    expected = list(Reference(config).run(roster))
    swarm = loop_in(config, monkeypatch)
    assert swarm.digests == expected
    assert [trained.samples for trained in swarm.trained] == LEASES
    assert [trained.tokens for trained in swarm.trained] == [16 * sample_count(lease) for lease in LEASES]


def test_theta_is_evaluated_in_the_midst_of_a_stream(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the loop goes on from its own weights."""
    config = config_of(small_content, {"layers_per_fragment": 2, "overlap": 2})
    roster = [[Work("a", lease, config.training.inner_steps)] for lease in LEASES]
    expected = list(Reference(config).run(roster))
    begin, losses = DiLoCo._begin_outer_step, list[float]()

    def evaluate_and_begin(diloco: DiLoCo) -> None:
        diloco._text.evaluates = True
        found = diloco._text.evaluate(diloco.run, diloco._worker, diloco._replica)
        assert found is not None
        losses.append(found.loss)
        begin(diloco)

    monkeypatch.setattr(Run, "with_data", lambda run, folders: run)
    monkeypatch.setattr(DiLoCo, "_begin_outer_step", evaluate_and_begin)
    assert loop_in(config, monkeypatch).digests == expected
    assert len(losses) == 1 + len(LEASES)


def test_a_loop_with_small_batches_claims_what_it_will_have_trained(small_content: dict[str, Any]) -> None:
    """The last fragment is stored before the overlap's inner steps: they are foreseen as those before."""
    config = config_of(small_content, {"overlap": 2})
    model = build_model(config, ByteTokenizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.arange(10).view(1, 10)
    with (
        playing(config, LEASES) as played,
        DiLoCo(model, optimizer, run="diloco:small-1", evaluates=False) as diloco,
    ):
        while not diloco.finished:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        [swarm] = played.swarms
    assert [trained.tokens for trained in swarm.trained] == [40, 40, 30, 40]
    assert [sample_count(trained.samples) for trained in swarm.trained] == [3, 3, 2, 3]
    assert {progress.step_tokens for progress in swarm.progress} == {10}
    assert [progress.inner_step for progress in swarm.progress][4:8] == [1, 2, 0, 0]


def stream_of_one() -> LoopWorker:
    return LoopWorker(SharedVectors.create(4), Layout([("weight", (4,))]), 10, torch.device("cpu"))


@pytest.mark.parametrize("how", ["the run goes on without us", "the network is gone"])
def test_a_loop_that_waits_for_an_average_is_told_that_none_comes(how: str) -> None:
    worker = stream_of_one()

    async def scenario() -> bool:
        loop = asyncio.get_running_loop()
        training = asyncio.create_task(worker.run_inner_loop(LOOP, lambda progress: None))
        await asyncio.sleep(0)
        outer_step = worker.next_outer_step()
        assert outer_step is not None
        with worker.storing(outer_step, 0, Trained((), 0, 0.0)):
            pass
        await training
        waiting = loop.run_in_executor(None, worker.is_changed, outer_step, 0)
        if how == "the network is gone":
            worker.end(RuntimeError("the network is gone"))
        else:
            worker.end_rest()
        async with asyncio.timeout(60):
            return await waiting

    assert not asyncio.run(scenario())
    if how == "the network is gone":
        with pytest.raises(RuntimeError, match="the network is gone"):
            worker.next_outer_step()


def test_nothing_is_written_for_a_training_that_was_stopped() -> None:
    """The swarm may have put other weights there already."""
    worker = stream_of_one()

    async def scenario() -> None:
        stopped = asyncio.create_task(worker.run_inner_loop(LOOP, lambda progress: None))
        await asyncio.sleep(0)
        outer_step = worker.next_outer_step()
        assert outer_step is not None
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        with worker.storing(outer_step, 0, Trained((), 0, 0.0)) as local:
            assert local is None

    asyncio.run(scenario())
