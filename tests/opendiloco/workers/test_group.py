"""Real workers that share a model: up to three groups, each started once, as a worker takes seconds to import."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.errors import WorkerError
from opendiloco.model.build import build_model, initial_theta
from opendiloco.model.export import RunFacts
from opendiloco.model.layout import Layout
from opendiloco.shared_memory import Vector
from opendiloco.training.evaluation import held_out_loss
from opendiloco.training.inner import ModelReplica
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.control import EndInnerLoop, MoveMoments, RecallMoments
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Progress, SnapshotError
from tests.child_processes import child_processes

pytestmark = pytest.mark.swarm
START_SECONDS = 300.0  # four imports of torch and transformers, on a machine that is doing much else
PROMPT_SECONDS = 120.0  # for what takes milliseconds
LEASE = (SampleRange(3, 20), SampleRange(30, 54))  # 41 samples: the last batch has one, so that most workers have none
ENDLESS = (SampleRange(0, 10**6),)
FACTS = RunFacts(run_id="small-1", manifest_digest="00" * 32, outer_steps=3, tokens=640, peers=2, held_out_loss=5.0)
OPTIONS = {
    2: WorkerOptions(device="cpu", cpu_workers=2, micro_batch=2, whole_layers=True, optimizer_state="host"),
    3: WorkerOptions(device="cpu", cpu_workers=3, micro_batch=1, activation_checkpointing=True),
    4: WorkerOptions(device="cpu", cpu_workers=4, replicas=2, optimizer_state="host"),
}


@dataclass
class Groups:
    """The groups that tests have asked for, in one event loop, with their processes."""

    config: RunConfig
    runner: asyncio.Runner
    stack: ExitStack
    members: dict[int, WorkerGroup] = field(default_factory=dict)
    processes: dict[int, list[int]] = field(default_factory=dict)

    def start(self, workers: int) -> None:
        if workers not in self.members:
            before = child_processes().keys()
            starting = WorkerGroup.start(self.config, OPTIONS[workers])
            group = self.members[workers] = self.runner.run(asyncio.wait_for(starting, START_SECONDS))
            self.stack.callback(close, self.runner, group)
            self.processes[workers] = sorted(child_processes().keys() - before)


@pytest.fixture(scope="module")
def config(small_content: dict[str, Any]) -> RunConfig:
    """Matrices of 4, 16 and 259 rows: with three workers one has none of the first, and less of the others."""
    model = small_content["model"]["config"] | {"intermediate_size": 4, "num_hidden_layers": 2}
    training = {"inner_steps": 10, "batch_size": 5, "sequence_length": 16}
    optimizer = {"learning_rate": 0.003}
    changes = {"model": {"config": model, "init_seed": 3}, "training": training, "inner_optimizer": optimizer}
    return RunConfig.from_manifest_content(small_content | changes)


def close(runner: asyncio.Runner, group: WorkerGroup) -> None:
    runner.run(group.close())


@pytest.fixture(scope="module")
def groups(config: RunConfig) -> Iterator[Groups]:
    with asyncio.Runner() as runner, ExitStack() as stack:
        yield Groups(config, runner, stack)


@pytest.fixture(params=[2, *(pytest.param(number, marks=pytest.mark.thorough) for number in (3, 4))])
def workers(request: pytest.FixtureRequest, groups: Groups) -> int:
    number: int = request.param
    groups.start(number)
    return number


@pytest.fixture
def all_sizes(groups: Groups) -> None:
    for number in OPTIONS:
        groups.start(number)


@dataclass
class Alone:
    """What one process makes of the same samples."""

    losses: list[float]
    theta: Vector
    local: Vector
    held_out: float


@pytest.fixture(scope="module")
def alone(config: RunConfig) -> Alone:
    data: TrainingData = load_data(config, ByteTokenizer())
    model = build_model(config, ByteTokenizer())
    held_out = held_out_loss(model, data.held_out, 8, 5)[0]
    replica = ModelReplica(config, model, data.samples)
    theta, local = np.empty((2, replica.layout.size), np.float32)
    replica.store(theta)
    losses = [step.loss for step in replica.inner_steps(theta, 0, LEASE, 100)]
    replica.store(local)
    return Alone(losses, theta, local, held_out)


def test_workers_together_train_as_one_process_does(groups: Groups, alone: Alone, workers: int) -> None:
    group, seen = groups.members[workers], list[Progress]()
    trained = groups.runner.run(group.run_inner_loop(InnerLoop(0, LEASE, 100, 0), seen.append))
    assert len(groups.processes[workers]) == workers
    assert group.device == f"{workers} x cpu"
    assert (trained.samples, trained.tokens) == (LEASE, 41 * 16)
    assert [progress.inner_step for progress in seen] == list(range(1, 10))
    assert [progress.loss for progress in seen] == pytest.approx(alone.losses, abs=1e-5)
    assert alone.losses[-1] < alone.losses[0] - 0.1
    assert np.abs(group.vectors.local - alone.local).max() < 1e-5
    assert np.abs(alone.theta - alone.local).max() > 1e-3


def test_theta_is_the_same_however_it_is_shared_and_survives_it_to_the_last_bit(
    groups: Groups, alone: Alone, config: RunConfig, workers: int
) -> None:
    vectors = groups.members[workers].vectors
    vectors.local[:] = np.nan
    groups.runner.run(groups.members[workers].run_inner_loop(InnerLoop(0, (), 100, 0), lambda progress: None))
    for vector in (vectors.theta, vectors.local, initial_theta(config)):
        assert np.array_equal(vector.view(np.uint32), alone.theta.view(np.uint32))


@pytest.mark.thorough
def test_workers_together_evaluate_and_the_first_has_the_whole_model_when_it_must(
    groups: Groups, alone: Alone, workers: int, tmp_path: Path
) -> None:
    async def story() -> None:
        group = groups.members[workers]
        evaluated = await group.evaluate(8)
        assert evaluated.tokens == 8 * 16
        assert evaluated.loss == pytest.approx(alone.held_out, abs=1e-5)
        assert await group.generate("peers", 5, seed=1) == await group.generate("peers", 5, seed=1)
        await group.export(tmp_path / "model", FACTS)
        await group.run_inner_loop(InnerLoop(0, LEASE[:1], 1, 0), lambda progress: None)  # they are in step as before

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    exported = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    layout = Layout([(name, values.shape) for name, values in exported.items()])
    assert all(np.array_equal(exported[place.name].ravel(), alone.theta[place.slice]) for place in layout)


@pytest.mark.thorough
@pytest.mark.usefixtures("all_sizes")
def test_moments_are_the_same_however_the_model_is_shared(groups: Groups, tmp_path: Path) -> None:
    """Each value is kept once, though two replicas have it; and what one group has kept, another goes on with."""

    async def story() -> None:
        sharded, hybrid = groups.members[3], groups.members[4]
        for group, name in ((sharded, "sharded"), (hybrid, "hybrid")):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), lambda progress: None)
            await group.supervisor.keep_moments(tmp_path / name, "run", 1)
        await sharded.supervisor.recall_moments(tmp_path / "hybrid", "run")
        await sharded.supervisor.keep_moments(tmp_path / "again", "run", 1)
        await hybrid.run_inner_loop(InnerLoop(0, LEASE, 4, 0), lambda progress: None)
        await hybrid.supervisor.recall_moments(tmp_path / "again", "run")
        await hybrid.supervisor.keep_moments(tmp_path / "at last", "run", 1)

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))
    kept = {path.name: load_file(path) for path in tmp_path.iterdir()}
    assert all(np.isfinite(tensor).all() for tensor in kept["hybrid"].values())
    for name, tensor in kept["hybrid"].items():
        assert np.array_equal(tensor, kept["again"][name])
        assert np.array_equal(tensor, kept["at last"][name])
        assert tensor.shape == kept["sharded"][name].shape


@pytest.mark.thorough
@pytest.mark.usefixtures("all_sizes")
def test_when_one_worker_cannot_read_its_moments_all_begin_anew(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group = groups.members[3]
        await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), lambda progress: None)
        await group.supervisor.keep_moments(tmp_path / "kept", "run", 1)
        last = group.supervisor.workers[-1]
        move = last.move_moments

        async def move_or_fail(command: MoveMoments) -> None:
            missing = {"path": str(tmp_path / "missing")} if isinstance(command, RecallMoments) else {}
            await move(command.model_copy(update=missing))

        monkeypatch.setattr(last, "move_moments", move_or_fail)
        with pytest.raises(SnapshotError, match="No such file"):
            await group.supervisor.recall_moments(tmp_path / "kept", "run")
        with pytest.raises(SnapshotError, match="has not made a step"):
            await group.supervisor.keep_moments(tmp_path / "kept again", "run", 2)

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))


def test_when_one_worker_is_told_to_stop_all_stop_after_the_same_inner_step(groups: Groups, workers: int) -> None:
    async def story() -> None:
        group, seen = groups.members[workers], list[Progress]()

        def tell_the_last(progress: Progress) -> None:
            seen.append(progress)
            if progress.inner_step == 3:
                group.supervisor.workers[-1].write(EndInnerLoop(number=group._trainings))

        trained = await group.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), tell_the_last)
        assert trained.samples == (SampleRange(0, 5 * len(seen)),)

        def cancel(progress: Progress) -> None:
            cancelled.cancel()

        cancelled = asyncio.create_task(group.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), cancel))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 1, 0), seen.append)).samples == (SampleRange(3, 8),)

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))


def test_no_other_machine_can_reach_the_workers(groups: Groups, workers: int) -> None:
    addresses = [address for process in groups.processes[workers] for address in listening(process)]
    assert len(addresses) >= workers
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


def listening(process: int) -> list[str]:
    """Addresses, as the kernel writes them, at which a process waits for TCP connections."""
    sockets = {os.readlink(descriptor) for descriptor in Path(f"/proc/{process}/fd").iterdir()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        local.partition(":")[0]
        for _, local, _, state, *rest in lines
        if state == "0A" and f"socket:[{rest[5]}]" in sockets
    ]


@pytest.mark.thorough
@pytest.mark.usefixtures("all_sizes")
def test_peers_with_different_numbers_of_workers_have_the_same_bits(groups: Groups, config: RunConfig) -> None:
    """They apply the same payload, whichever of them trained for it."""

    async def story() -> None:
        peers = [LocalWorkload(group, config) for group in groups.members.values()]
        for index, trainer in enumerate(peers):
            await trainer.run_inner_loop(InnerLoop(index, LEASE, 4, 0), lambda progress: None)
            payload = bytes(await trainer.contribution())
            for peer in peers:
                await peer.apply(payload, index)
            digests = {await peer.state_digest() for peer in peers}
            assert len(digests) == 1
        for peer in peers:
            await peer.run_inner_loop(InnerLoop(2, (), 4, 0), lambda progress: None)
        first, *others = (peer.trainer.vectors.local.view(np.uint32) for peer in peers)
        assert all(np.array_equal(first, other) for other in others)

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))


def test_the_death_of_one_worker_ends_all(groups: Groups, workers: int) -> None:
    """Last, since it takes the groups with it."""
    group = groups.members[workers]
    victim = groups.processes[workers][-1]
    others = [os.pidfd_open(process) for process in groups.processes[workers][:-1]]

    async def story() -> None:
        training = asyncio.create_task(
            group.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), lambda progress: os.kill(victim, signal.SIGKILL))
        )
        with pytest.raises(WorkerError, match=f"worker {workers - 1} of {workers} was killed by SIGKILL"):
            await training
        assert "SIGKILL" in str(await group.wait_for_death())
        with pytest.raises(WorkerError, match="SIGKILL"):
            await group.evaluate(1)

    groups.runner.run(asyncio.wait_for(story(), PROMPT_SECONDS))
    for other in others:
        readable, _, _ = select.select([other], [], [], PROMPT_SECONDS)  # it becomes readable when the process ends
        os.close(other)
        assert readable
