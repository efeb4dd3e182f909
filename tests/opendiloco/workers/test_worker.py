"""Real worker processes: what they do on command, and how they end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DataError, MachineError, WorkerError
from opendiloco.workers import control
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import WorkersRestartedError
from opendiloco.workers.worker import _nothing_collected
from peers.network.signals import LEAVE_SIGNALS
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Progress, SnapshotError
from tests.child_processes import child_processes
from tests.opendiloco.workers.trainings import NotingTracker

pytestmark = pytest.mark.swarm
PROMPT_SECONDS = 120.0  # for what takes milliseconds, on a machine that is doing much else
CPU = WorkerOptions(device="cpu")
ENDLESS = (SampleRange(0, 10**6),)

ABANDONED = """
import asyncio, json, os, sys
from opendiloco.config.run_config import RunConfig
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop

async def main():
    config = RunConfig.from_manifest_content(json.loads(sys.argv[1]))
    worker = await WorkerGroup.start(config, WorkerOptions(device="cpu"))
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        child = file.read()
    work = InnerLoop(0, (SampleRange(0, 10**6),), 10**6, 0)
    await worker.run_inner_loop(work, lambda progress: print(child, flush=True))

asyncio.run(main())
"""


def wait_until_gone(pidfd: int) -> None:
    """A process descriptor becomes readable when its process ends."""
    readable, _, _ = select.select([pidfd], [], [], PROMPT_SECONDS)
    assert readable


def test_a_worker_trains_stops_survives_ctrl_c_and_dies_loudly(small_config: RunConfig, tmp_path: Path) -> None:
    async def story() -> None:
        before = child_processes()
        worker = await WorkerGroup.start(small_config, CPU)
        [process] = child_processes().keys() - before.keys()
        theta = worker.vectors.theta.copy()
        await stops_within_a_step_when_cancelled(worker)
        await says_what_a_training_came_to(worker)
        await moves_moments_between_two_inner_steps(worker, tmp_path)
        await is_not_asked_to_end(worker, process)
        assert (worker.vectors.theta == theta).all()
        assert (worker.vectors.local != theta).any()
        await takes_no_reply_for_another(worker)
        await says_how_it_died_to_those_who_wait(worker, process, tmp_path)
        await worker.close()
        await worker.close()

    asyncio.run(asyncio.wait_for(story(), 300))  # starting a worker imports torch and transformers


async def stops_within_a_step_when_cancelled(worker: WorkerGroup) -> None:
    reached = asyncio.Event()
    seen: list[Progress] = []

    def note(progress: Progress) -> None:
        seen.append(progress)
        if progress.inner_step == 3:
            reached.set()

    training = asyncio.create_task(worker.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), note))
    await reached.wait()
    steps = [progress.inner_step for progress in seen]  # more than three, if it trained on until we woke
    assert steps == list(range(1, max(3, len(steps)) + 1))
    assert all((progress.loss or 0) > 0 and progress.tokens_per_second > 0 for progress in seen)
    training.cancel()
    queued = asyncio.create_task(worker.run_inner_loop(InnerLoop(1, ENDLESS, 10**6, 0), note))
    asyncio.get_running_loop().call_soon(queued.cancel)  # before the worker has heard of it
    for stopped in (training, queued):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(stopped, PROMPT_SECONDS)


async def says_what_a_training_came_to(worker: WorkerGroup) -> None:
    tracker = NotingTracker()
    worker.telemetry.trackers.append(tracker)
    trained = await worker.run_inner_loop(InnerLoop(2, (SampleRange(0, 6),), 3, 0), lambda progress: None)
    worker.telemetry.trackers.remove(tracker)
    *steps, (last, values) = tracker.records
    assert [step for step, _ in steps] == [9, 10, 11]  # after 2 outer steps of 4
    assert last == 11
    norms = [said["inner_step/gradient_norm"] for _, said in steps]
    assert values["training/gradient_norm"] == pytest.approx(sum(norms) / 3)
    assert (values["training/loss"], values["training/tokens"]) == (trained.loss, 6 * 16)
    assert values["training/tokens_per_second"] > 0
    assert 0 < values["training/data_wait_share"] <= 1
    assert values["training/peak_memory_bytes"] > worker.vectors.theta.nbytes
    assert "training/flops_utilisation" not in values  # a CPU's peak is not known


async def moves_moments_between_two_inner_steps(worker: WorkerGroup, folder: Path) -> None:
    """Training goes on."""
    training = asyncio.create_task(worker.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), lambda progress: None))
    async with asyncio.timeout(PROMPT_SECONDS):
        given_up = asyncio.create_task(worker.supervisor.keep_moments(folder / "given up", "run", 1))
        asyncio.get_running_loop().call_soon(given_up.cancel)
        await worker.supervisor.keep_moments(folder / "kept", "run", 1)
        assert given_up.cancelled()
        with pytest.raises(SnapshotError, match="its run is"):
            await worker.supervisor.recall_moments(folder / "kept", "another")
        await worker.supervisor.recall_moments(folder / "kept", "run")
        await worker.supervisor.keep_moments(folder / "kept later", "run", 1)
        first, later = (load_file(folder / name) for name in ("kept", "kept later"))
        step = next(name for name in first if name.endswith("/step"))
        assert later[step] >= first[step] >= 1
        assert not training.done()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        await worker.supervisor.keep_moments(folder / "at last", "run", 1)  # nor need it train


async def is_not_asked_to_end(worker: WorkerGroup, process: int) -> None:
    """Its peer is, and decides what the worker still has to do."""

    def interrupt(progress: Progress) -> None:
        for number in LEAVE_SIGNALS:
            os.kill(process, number)

    trained = await worker.run_inner_loop(InnerLoop(0, (SampleRange(0, 7),), 4, 0), interrupt)
    assert trained.samples == (SampleRange(0, 7),)


async def takes_no_reply_for_another(worker: WorkerGroup) -> None:
    given_up = asyncio.create_task(worker.evaluate(4))
    asyncio.get_running_loop().call_soon(given_up.cancel)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await worker.evaluate(8)).tokens == 8 * 16  # a reply that nobody waited for is not taken for this one


async def says_how_it_died_to_those_who_wait(worker: WorkerGroup, process: int, folder: Path) -> None:
    """A request that was given up fails like the others, and asyncio prints no traceback of it."""
    printed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))

    def kill(progress: Progress) -> None:
        given_up.cancel()
        os.kill(process, signal.SIGKILL)

    training = asyncio.create_task(worker.run_inner_loop(InnerLoop(0, ENDLESS, 10**6, 0), kill))
    given_up = asyncio.create_task(worker.evaluate(1))  # its turn comes after the training
    with pytest.raises(WorkerError, match="the worker was killed by SIGKILL") as caught:
        await asyncio.wait_for(training, PROMPT_SECONDS)
    assert caught.value.exit_code == 8
    with pytest.raises(WorkerError, match="SIGKILL"):
        await asyncio.wait_for(worker.evaluate(1), PROMPT_SECONDS)
    with pytest.raises(WorkerError, match="SIGKILL"):
        await asyncio.wait_for(worker.supervisor.keep_moments(folder / "too late", "run", 1), PROMPT_SECONDS)
    assert "SIGKILL" in str(await asyncio.wait_for(worker.wait_for_death(), PROMPT_SECONDS))
    assert given_up.cancelled()
    gc.collect()
    assert not printed


def test_a_worker_does_not_outlive_the_process_that_started_it(small_content: dict[str, Any]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ABANDONED, json.dumps(small_content)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))  # printed once it is in the middle of training
        try:
            parent.kill()
            wait_until_gone(pidfd)
        finally:
            os.close(pidfd)


def test_a_worker_that_hangs_is_ended_and_started_again(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process is as silent as one whose GPU hangs, and only SIGKILL ends it."""
    monkeypatch.setattr(control, "LEAST_PATIENCE", 3.0)

    async def story() -> None:
        before = child_processes()
        worker = await WorkerGroup.start(small_config, WorkerOptions(device="cpu", restarts=1))
        [process] = child_processes().keys() - before.keys()
        try:
            with pytest.raises(WorkersRestartedError):
                await worker.run_inner_loop(
                    InnerLoop(0, ENDLESS, 10**6, 0), lambda progress: os.kill(process, signal.SIGSTOP)
                )
            assert process not in child_processes()
            assert (await worker.run_inner_loop(InnerLoop(0, (SampleRange(0, 4),), 2, 0), lambda _: None)).tokens == 64
        finally:
            await worker.close()

    asyncio.run(asyncio.wait_for(story(), 600))
    assert "have finished no inner step" in caplog.text


@pytest.mark.thorough
def test_a_failed_command_is_the_same_error_on_our_side(small_content: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(small_content | {"inner_optimizer": {"learning_rate": 1e30}})

    async def story() -> None:
        worker = await WorkerGroup.start(config, CPU)
        try:
            with pytest.raises(WorkerError, match="norm nan") as caught:
                await worker.run_inner_loop(InnerLoop(0, ENDLESS, 10, 0), lambda progress: None)
            assert "in _pass_through" in caught.value.__notes__[0]
            assert (await worker.evaluate(4)).loss > 0
        finally:
            await worker.close()

    asyncio.run(asyncio.wait_for(story(), 300))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "source", "error"),
    [
        (WorkerOptions(device="abacus"), "stdlib", MachineError),
        (WorkerOptions(device="cpu", cpu_workers=2), "/nowhere/at/all", DataError),
    ],
)
def test_workers_that_cannot_be_configured_leave_no_process(
    small_content: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    options: WorkerOptions,
    source: str,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = RunConfig.from_manifest_content(small_content | {"data": {"source": source}})
    before = child_processes()
    with pytest.raises(error):
        asyncio.run(asyncio.wait_for(WorkerGroup.start(config, options), 300))
    assert child_processes() == before


@pytest.mark.thorough
def test_garbage_is_looked_for_again_after_imports_and_not_among_them() -> None:
    gc.collect()
    before = gc.get_freeze_count()
    with suppress(ImportError), _nothing_collected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
