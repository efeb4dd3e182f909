"""The worker in one's own training loop: outer steps' work, handed from the swarm's thread to the one that trains."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

import torch

from opendiloco.config.run_config import EvaluationSection
from opendiloco.errors import WorkerError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.device_facts import peak_memory
from opendiloco.workers.control import InnerLoopDone, InnerStepDone
from opendiloco.workers.telemetry import Telemetry
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing


class OuterStep:
    """The inner steps of one outer step. The training thread reports each."""

    def __init__(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> None:
        self.work = work
        self.steps_done = 0
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._trained: asyncio.Future[Trained] = self._loop.create_future()
        self._lock = Lock()  # held by whoever ends it
        self._is_void = False

    async def trained(self) -> Trained:
        """For the swarm's thread. When cancelled, nothing that was done counts, nor will it be published."""
        try:
            return await self._trained
        except asyncio.CancelledError:
            with self._lock:
                self._is_void = True
            raise

    def report(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._pass_on, progress)

    def finish(self, publish: Callable[[], None], trained: Trained) -> None:
        """Have the weights published and say so, unless it is void."""
        with self._lock:
            if self._is_void:
                return
            publish()
        self._loop.call_soon_threadsafe(self._conclude, trained)

    @property
    def is_void(self) -> bool:
        """Whether the swarm has moved on since it began."""
        return self._is_void

    def _pass_on(self, progress: Progress) -> None:
        if not self._is_void:
            self._on_progress(progress)

    def _conclude(self, trained: Trained) -> None:
        if not self._trained.done():
            self._trained.set_result(trained)


class LoopWorker:
    """Stands where a worker process would. `train` is the swarm's; `next_outer_step` the training thread's."""

    def __init__(self, vectors: SharedVectors, inner_steps: int, device: torch.device) -> None:
        """`inner_steps` are those of an outer step; the loop's model is on `device`."""
        self.vectors = vectors
        self.fragments: Sequence[slice] = [slice(0, vectors.theta.size)]
        self.device = "the caller's loop"
        self.telemetry = Telemetry(inner_steps)
        self._torch_device = device
        self._outer_steps: queue.SimpleQueue[OuterStep | Future[HeldOut | None] | BaseException | None]
        self._outer_steps = queue.SimpleQueue()

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        """Always from theta, and all of it at once: runs that stream are refused."""
        began, steps = time.monotonic(), 0

        def progressed(progress: Progress) -> None:
            nonlocal steps
            steps = progress.inner_step
            self.telemetry.progressed(work.index, _inner_step_done(progress))
            on_progress(progress)

        outer_step = OuterStep(work, progressed)
        self._outer_steps.put(outer_step)
        trained = await outer_step.trained()
        self.telemetry.trained(work.index, self._done(trained, steps, time.monotonic() - began))
        return trained

    def _done(self, trained: Trained, steps: int, seconds: float) -> InnerLoopDone:
        """What a loop does not say is NaN."""
        return InnerLoopDone(
            tokens=trained.tokens,
            inner_steps=steps,
            loss=trained.loss,
            gradient_norm=math.nan,
            learning_rate=math.nan,
            skipped=0,
            seconds=seconds,
            waited_seconds=math.nan,
            average_wait_seconds=math.nan,
            peak_memory_bytes=peak_memory(self._torch_device),
        )

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """There are none in the midst of training."""

    def end_rest(self) -> None:
        """There is none."""

    async def held_out(self, section: EvaluationSection) -> HeldOut | None:
        """Return theta's loss as the training thread finds it, which knows the run; None if it cannot say."""
        asked: Future[HeldOut | None] = Future()
        self._outer_steps.put(asked)
        return await asyncio.wrap_future(asked)

    async def wait_for_death(self) -> WorkerError:
        """It lives as long as we do."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def end(self, error: BaseException | None = None) -> None:
        """There are no more outer steps: the run is over, or this went wrong."""
        self._outer_steps.put(error)

    def next_outer_step(self, evaluate: Callable[[], HeldOut | None] = lambda: None) -> OuterStep | None:
        """Wait for the swarm to begin one, and `evaluate` when it asks for that; None at the end. Raises: what went
        wrong."""
        while True:
            found = self._outer_steps.get()
            if isinstance(found, Future):
                if found.set_running_or_notify_cancel():  # the swarm may have moved on
                    found.set_result(evaluate())
                continue
            if isinstance(found, BaseException):
                self.end(found)  # for who asks again
                raise found
            if found is None:
                self.end()
                return None
            if not found.is_void:
                return found


def _inner_step_done(progress: Progress) -> InnerStepDone:
    """What a loop does not say is NaN."""
    return InnerStepDone(
        inner_step=progress.inner_step,
        loss=math.nan if progress.loss is None else progress.loss,
        gradient_norm=math.nan,
        learning_rate=math.nan,
        tokens_per_second=progress.tokens_per_second,
    )
