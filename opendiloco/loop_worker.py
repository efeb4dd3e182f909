"""The worker in one's own training loop: outer steps' work, handed from the swarm's thread to the one that trains."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from threading import Lock

from opendiloco.errors import WorkerError
from opendiloco.shared_memory import SharedVectors
from peers.values.workload import InnerLoop, Progress, Trained


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

    def __init__(self, vectors: SharedVectors) -> None:
        self.vectors = vectors
        self.device = "the caller's loop"
        self._outer_steps: queue.SimpleQueue[OuterStep | BaseException | None] = queue.SimpleQueue()

    async def train(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        outer_step = OuterStep(work, on_progress)
        self._outer_steps.put(outer_step)
        return await outer_step.trained()

    async def wait_for_death(self) -> WorkerError:
        """It lives as long as we do."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def end(self, error: BaseException | None = None) -> None:
        """There are no more outer steps: the run is over, or this went wrong."""
        self._outer_steps.put(error)

    def next_outer_step(self) -> OuterStep | None:
        """Waits for the swarm to begin one; None at the end. Raises: what went wrong."""
        while True:
            found = self._outer_steps.get()
            if isinstance(found, BaseException):
                self.end(found)  # for who asks again
                raise found
            if found is None:
                self.end()
                return None
            if not found.is_void:
                return found
