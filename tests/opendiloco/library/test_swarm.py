from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library.swarm import LoopWorker, OuterStep
from opendiloco.model.layout import Layout
from opendiloco.run import Run
from opendiloco.shared_memory import SharedVectors
from opendiloco.volunteer.local_workload import TrainerWorkload
from peers.presence.heartbeat import HeldOutLoss
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.system import cancel_and_wait
from peers.values.workload import InnerLoop, Progress, Trained
from tests.opendiloco.workers.trainings import NotingTracker

LEASE = (SampleRange(0, 8),)
TRAINED = Trained(LEASE, 80, 1.0)
SECONDS = 120.0


def new_worker() -> LoopWorker:
    return LoopWorker(SharedVectors.create(4), Layout([("weight", (4,))]), 10, torch.device("cpu"))


def finish(worker: LoopWorker, outer_step: OuterStep) -> None:
    """Store all of a model's weights."""
    with worker.storing(outer_step, 0, TRAINED) as local:
        if local is not None:
            local.fill(2)


def new_run() -> Run:
    content = {
        "name": "small",
        "outer_steps": 9,
        "model": {"config": {"model_type": "llama"}},
        "training": {"inner_steps": 10, "batch_size": 2, "sequence_length": 4},
        "inner_optimizer": {"learning_rate": 0.1},
        "schedule": {"kind": "constant", "warmup_steps": 1},
    }
    return Run.sign(RunConfig.from_manifest_content(content), Identity.generate())


def in_another_thread(work: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def test_an_outer_step_goes_to_the_training_thread_and_back() -> None:
    worker, heard = new_worker(), list[Progress]()

    def train() -> None:
        outer_step = worker.next_outer_step()
        assert outer_step is not None
        assert outer_step.work == InnerLoop(7, LEASE, 4, 0)
        outer_step.step_taken(8, None, 8)
        finish(worker, outer_step)

    async def scenario() -> None:
        training = in_another_thread(train)
        async with asyncio.timeout(SECONDS):
            assert await worker.run_inner_loop(InnerLoop(7, LEASE, 4, 0), heard.append) == TRAINED
            await asyncio.wrap_future(training)

    asyncio.run(scenario())
    assert [(progress.inner_step, progress.loss, progress.step_tokens) for progress in heard] == [(1, None, 8)]
    np.testing.assert_array_equal(worker.vectors.local, 2)


def test_what_was_stopped_is_neither_published_nor_heard_of() -> None:
    worker, heard = new_worker(), list[Progress]()

    async def scenario() -> None:
        stopped = asyncio.create_task(worker.run_inner_loop(InnerLoop(0, LEASE, 4, 0), heard.append))
        await asyncio.sleep(0)
        outer_step = worker.next_outer_step()
        assert outer_step is not None
        assert not outer_step.is_void
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert outer_step.is_void
        outer_step.step_taken(8, None, 8)
        finish(worker, outer_step)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert heard == []
    np.testing.assert_array_equal(worker.vectors.local, 0)


def test_what_was_stopped_before_it_began_is_passed_over() -> None:
    worker, found = new_worker(), list[OuterStep | None]()

    async def scenario() -> None:
        stopped = asyncio.create_task(worker.run_inner_loop(InnerLoop(0, LEASE, 4, 0), lambda progress: None))
        await asyncio.sleep(0)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        following = asyncio.create_task(worker.run_inner_loop(InnerLoop(1, LEASE, 4, 0), lambda progress: None))
        await asyncio.sleep(0)
        found.append(worker.next_outer_step())
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scenario())
    assert found[0] is not None
    assert found[0].work.index == 1


@pytest.mark.parametrize(
    ("amended", "index", "is_over"),
    [(b"", 6, False), (b"", 7, True), (b'{"outer_steps":9}', 7, False), (b'{"outer_steps":9}', 9, True)],
)
def test_a_run_is_over_when_the_amendment_in_force_says_so(amended: bytes, index: int, is_over: bool) -> None:
    worker = new_worker()
    config = new_run().config.model_copy(update={"outer_steps": 7})
    workload = TrainerWorkload(worker, config, run_is_over=worker.run_is_over)
    amendment = Amendment(number=1, content=amended or b"{}", signature=bytes(64))

    async def scenario() -> None:
        work = InnerLoop(index, LEASE, 4, 0, (LoggedAmendment(amendment=amendment, cursor=0),) if amended else ())
        training = asyncio.create_task(workload.run_inner_loop(work, lambda progress: None))
        async with asyncio.timeout(SECONDS):
            found = await asyncio.to_thread(worker.next_outer_step)
        assert (found is None) == is_over
        assert worker.outer_steps_taken == (index if is_over else 0)
        await cancel_and_wait(training)

    asyncio.run(scenario())


def test_the_end_of_the_run_and_what_went_wrong_are_heard_each_time() -> None:
    over, broken = new_worker(), new_worker()
    over.end()
    broken.end(RuntimeError("the network is gone"))
    for _ in range(2):
        assert over.next_outer_step() is None
        with pytest.raises(RuntimeError, match="the network is gone"):
            broken.next_outer_step()


@pytest.mark.parametrize("found", [HeldOut(2.5, True), HeldOut(2.5, False), None])
def test_a_loop_takes_its_turns_to_evaluate_and_draws_curves(found: HeldOut | None) -> None:
    """Before the outer step that it is asked for; what it does not know is not drawn."""
    worker, tracker, heard = new_worker(), NotingTracker(), list[HeldOutLoss]()
    workload = TrainerWorkload(worker, new_run().config, run_is_over=worker.run_is_over)
    worker.telemetry.trackers.append(tracker)
    workload.is_our_turn, workload.on_evaluated = lambda: True, heard.append
    evaluated = list[None]()

    def evaluate() -> HeldOut | None:
        evaluated.append(None)
        return found

    def train() -> None:
        outer_step = worker.next_outer_step(evaluate)
        assert outer_step is not None
        assert evaluated
        outer_step.step_taken(8, None, 8)
        outer_step.step_taken(8, 1.5, 8)
        worker.all_taken(outer_step, TRAINED)
        finish(worker, outer_step)

    async def scenario() -> None:
        training = in_another_thread(train)
        async with asyncio.timeout(SECONDS):
            assert await workload.run_inner_loop(InnerLoop(3, LEASE, 4, 0), lambda progress: None) == TRAINED
            await asyncio.wrap_future(training)

    asyncio.run(scenario())
    assert heard == ([HeldOutLoss(index=3, loss=2.5)] if found and found.is_runs_text else [])
    steps, names = zip(*((step, set(values)) for step, values in tracker.records), strict=True)
    curve = [] if found is None else [{"held_out/loss"} if found.is_runs_text else {"own_held_out/loss"}]
    done = {"loss", "tokens", "tokens_per_second", "peak_memory_bytes", "skipped_inner_steps"}
    assert list(names) == [*curve, set(), {"inner_step/loss"}, {f"training/{name}" for name in done}]
    assert list(steps) == [*([30] if curve else []), 31, 32, 32]


def test_an_evaluation_that_the_swarm_gave_up_is_passed_over() -> None:
    worker = new_worker()

    async def scenario() -> None:
        asked = asyncio.create_task(worker.held_out(EvaluationSection()))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        worker.end()
        assert worker.next_outer_step(lambda: pytest.fail("nobody wants to know")) is None

    asyncio.run(scenario())
