"""The swarm's part of a loop of one's own: membership, rounds, transfers and the outer step, in a thread of its own, as
in the peer process of `diloco-peer join`. It lends the training thread theta and takes back what was trained.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass

import torch

from opendiloco.config.run_config import EvaluationSection
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import LoopError, WorkerError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library.model import JOIN, initial_vectors
from opendiloco.model.parameters import layout_of
from opendiloco.run import Run, find_run
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.team import peak_memory
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.admission import ask_for_signed_heads, enter, read_ticket
from opendiloco.volunteer.identity import listen
from opendiloco.volunteer.local_workload import Workload
from opendiloco.volunteer.volunteer import Volunteer, connected
from opendiloco.workers.control import InnerLoopDone, InnerStepDone
from opendiloco.workers.telemetry import Telemetry
from peers.driver.driver import Driver
from peers.values.identity import Identity
from peers.values.leases import prefix, sample_count
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing


# Between two threads --------------------------------------------------------------------------------------------------
class OuterStep:
    """The inner steps of one outer step. The training thread reports each; the swarm's waits for what is `trained`.

    When the swarm cancels that, since it has moved on, nothing that was done counts, nor will it be published.
    """

    def __init__(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> None:
        self.work = work
        self.steps_done = 0
        self.tokens_done = 0
        self.trained: Future[Trained] = Future()
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()

    @property
    def is_void(self) -> bool:
        """Return whether the swarm has moved on since it began."""
        return self.trained.cancelled()

    def planned_steps(self, batch_size: int) -> int:
        """Return the inner steps of this outer step: one for each of the run's batches in the lease, and at most those
        that the swarm wants."""
        return min(self.work.steps, math.ceil(sample_count(self.work.samples) / batch_size))

    def claim(self, tokens_per_sample: int, loss: float | None) -> Trained:
        """Return what the inner steps so far count as: the tokens that were trained, but no more than the lease has,
        and the samples that have so many."""
        samples = prefix(self.work.samples, math.ceil(self.tokens_done / tokens_per_sample))
        tokens = min(self.tokens_done, tokens_per_sample * sample_count(samples))
        return Trained(samples, tokens, loss or 0.0)

    def report(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._pass_on, progress)

    def finish(self, publish: Callable[[], None], trained: Trained) -> None:
        """Publish the weights and say so, unless it is void."""
        if self.trained.set_running_or_notify_cancel():
            publish()
            self.trained.set_result(trained)

    def _pass_on(self, progress: Progress) -> None:
        if not self.is_void:
            self._on_progress(progress)


class LoopWorker:
    """Stands where a worker process would. `run_inner_loop` is the swarm's; `next_outer_step` the training thread's."""

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
        """Always from theta, and all of it at once: runs that stream are refused. What a loop does not say is NaN."""
        began = time.monotonic()

        def progressed(progress: Progress) -> None:
            taken = InnerStepDone(
                inner_step=progress.inner_step,
                loss=math.nan if progress.loss is None else progress.loss,
                gradient_norm=math.nan,
                learning_rate=math.nan,
                tokens_per_second=progress.tokens_per_second,
            )
            self.telemetry.progressed(work.index, taken)
            on_progress(progress)

        outer_step = OuterStep(work, progressed)
        self._outer_steps.put(outer_step)
        trained = await asyncio.wrap_future(outer_step.trained)
        done = InnerLoopDone(
            tokens=trained.tokens,
            inner_steps=outer_step.steps_done,
            loss=trained.loss,
            gradient_norm=math.nan,
            learning_rate=math.nan,
            skipped=0,
            seconds=time.monotonic() - began,
            waited_seconds=math.nan,
            average_wait_seconds=math.nan,
            peak_memory_bytes=peak_memory(self._torch_device),
        )
        self.telemetry.trained(work.index, done)
        return trained

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
        """Wait for the swarm's next; `evaluate` when it asks; return None at the end. Raises: what went wrong."""
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


# The swarm's thread ---------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at whether the training loop is still there


@dataclass(frozen=True)
class Joined:
    """What the swarm's thread has to say to the training thread once it is in the run."""

    run: Run
    worker: LoopWorker
    leave: Callable[[], None]


class SwarmThread(threading.Thread):
    """The swarm's part, from finding the run to leaving it. What goes wrong before it `joined` is raised by that, what
    goes wrong later by the worker's next outer step."""

    def __init__(
        self,
        invite: Invite,
        identity: Identity,
        ticket: str | None,
        own: OwnFiles,
        model: torch.nn.Module,
        is_abandoned: Callable[[], bool],
    ) -> None:
        """See `DiLoCo`, whose arguments these are."""
        super().__init__(name="diloco-peer", daemon=True)
        self._invite = invite
        self._ticket = None if ticket is None else read_ticket(ticket)
        self._own = own
        self._model = model
        self._is_abandoned = is_abandoned
        self._living: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self.identity = identity
        self.joined: Future[Joined] = Future()

    def leave(self) -> None:
        """Leave the run, and wait for the end."""
        self.joined.result().leave()
        self.join()

    def give_up(self) -> None:
        """End, wherever it is."""
        with suppress(CancelledError):  # it has not come to life
            loop, life = self._living.result()
            _call(loop, life.cancel)
        self.join()

    def run(self) -> None:
        try:
            asyncio.run(self._begin())
        except BaseException as error:
            self._living.cancel()
            if self.joined.done():
                self.joined.result().worker.end(error)
            else:
                self.joined.set_exception(error)
        else:
            self.joined.result().worker.end()

    async def _begin(self) -> None:
        life = asyncio.create_task(self._take_part())
        self._living.set_result((asyncio.get_running_loop(), life))
        await life

    async def _take_part(self) -> None:
        async with connected(self.identity, self._invite.addresses) as transport:
            run = (await find_run(transport, self._invite.run_id)).with_own(self._own)
            if not run.config.streaming.is_plain:
                raise LoopError("this run streams, which loops of one's own cannot do yet.", JOIN)
            worker = await asyncio.to_thread(self.worker_of, run)  # what is refused is refused before we are a member
            workload = Workload(worker, run.config, run_is_over=worker.end)
            digest = await workload.state_digest()
            await ask_for_signed_heads(transport, run, self._invite.addresses)
            admission = await enter(transport, run, self.identity, self._invite.addresses, None, self._ticket)
            await listen(transport, run.run_id)
            driver = Driver(self.identity, transport, workload, run.settings, digest)
            workload.take_turns(driver, self.identity.peer_id)
            volunteer = Volunteer(run, driver, transport, workload, admission=admission)
            worker.telemetry.track_with([], configuration_of(run, self.identity.peer_id, worker.device))
            loop = asyncio.get_running_loop()
            watching = asyncio.create_task(self._leave_when_abandoned(volunteer))
            self.joined.set_result(Joined(run, worker, lambda: _call(loop, volunteer.leave)))
            try:
                await volunteer.take_part()
            finally:
                watching.cancel()

    def worker_of(self, run: Run) -> LoopWorker:
        """Return the loop as a worker of a run, whose initial weights it has. Raises: see `initial_vectors`."""
        vectors = initial_vectors(run.config, layout_of(self._model))
        device = next(self._model.parameters()).device
        return LoopWorker(vectors, run.config.training.inner_steps, device)

    async def _leave_when_abandoned(self, volunteer: Volunteer) -> None:
        while not self._is_abandoned():
            await asyncio.sleep(LOOK_SECONDS)
        logger.warning("the training loop has ended without a word: leaving the run")
        volunteer.leave()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
