"""The swarm's side of the caller's own loop. A separate thread takes part in the run, like the peer process of
`diloco-peer join`, and exchanges weights with the training thread through flat vectors."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from opendiloco.config.run_config import EvaluationSection
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import WorkerError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library.model import initial_weights
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import layout_of
from opendiloco.run import Run, find_run
from opendiloco.shared_memory import SharedVectors, Vector
from opendiloco.training.team import peak_memory
from opendiloco.view.curves import configuration_of
from opendiloco.view.run_view import holders
from opendiloco.volunteer.admission import ask_for_signed_heads, enter, read_ticket
from opendiloco.volunteer.identity import hold_identity, listen
from opendiloco.volunteer.local_workload import TrainerWorkload
from opendiloco.volunteer.volunteer import Volunteer, connected
from opendiloco.workers.control import InnerLoopDone, InnerStepDone
from opendiloco.workers.telemetry import Telemetry
from peers.driver.driver import Driver
from peers.log.header import Header
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.leases import prefix, sample_count
from peers.values.manifest import Invite
from peers.values.system import start_task
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing


# Exchange between the swarm's thread and the training thread ----------------------------------------------------------
class OuterStep:
    """The inner steps of one outer step. The training thread takes them and stores fragments' weights, for which the
    swarm's thread waits.

    An outer step is void once the other peers have continued without this peer. Then its training does not count, and
    its weights are not published.
    """

    def __init__(
        self,
        work: InnerLoop,
        begin_with: Vector | None,
        usual_tokens: float,
        on_progress: Callable[[int, Progress], None],
    ) -> None:
        """Create the outer step. It begins with the weights `begin_with`, or, if these are None, with the loop's
        present weights. `usual_tokens` is the mean number of tokens of an earlier inner step. `on_progress` is called
        with the number of inner steps taken and the progress."""
        self.work = work
        self.begin_with = begin_with
        self.steps_done = 0
        self.is_void = False
        self.waited, self.late = 0.0, 0
        """Seconds that training has waited for averages, and the number of late averages."""
        self._tokens_done = 0
        self._usual_tokens = usual_tokens
        self._is_known = False  # True after the last fragment is stored, when the contribution is final
        self._on_progress = on_progress
        self._began = 0.0
        self._loop = asyncio.get_running_loop()
        self._stored: asyncio.Queue[tuple[int, Trained]] = asyncio.Queue()
        self._storing = threading.Lock()

    # Methods that the training thread calls
    def begin(self) -> None:
        """Record that the training thread begins this outer step."""
        self._began = time.monotonic()

    def planned_steps(self, batch_size: int) -> int:
        """Return the number of inner steps to take: one for each batch of `batch_size` samples in the lease, and at
        most the number that the swarm asks for."""
        return min(self.work.steps, math.ceil(sample_count(self.work.samples) / batch_size))

    @property
    def step_tokens(self) -> float:
        """The mean number of tokens of this peer's inner steps in this outer step; before the first, that of an earlier
        outer step."""
        return self._tokens_done / self.steps_done if self.steps_done else self._usual_tokens

    def step_taken(self, tokens: int, loss: float | None, batch_tokens: int) -> None:
        """Record an inner step that trained `tokens` tokens, and report the progress and the speed to the swarm. The
        speed counts at most `batch_tokens` tokens per step taken, because larger batches do not end a lease sooner."""
        self.steps_done += 1
        self._tokens_done += tokens
        counted = min(self._tokens_done, self.steps_done * batch_tokens)
        speed = counted / max(self.seconds - self.waited, 1e-9)
        number = 0 if self._is_known else self.steps_done
        self.report(self._on_progress, self.steps_done, Progress(number, loss, speed, self.step_tokens))

    def claim(self, steps: int, tokens_per_sample: int, loss: float | None) -> Trained:
        """Return the samples and tokens that this peer reports for the first `steps` inner steps, at most those of its
        lease, and the loss (None: 0). The tokens of steps not taken yet are estimated."""
        tokens = self._tokens_done + int((steps - self.steps_done) * self.step_tokens)
        samples = prefix(self.work.samples, math.ceil(tokens / tokens_per_sample))
        return Trained(samples, min(tokens, tokens_per_sample * sample_count(samples)), loss or 0.0)

    @contextmanager
    def storing(self, fragment: int, trained: Trained, is_last: bool) -> Iterator[bool]:
        """Let the caller store a fragment's weights in the `with` block, and publish them at its end. Yield True, or
        False if the outer step is void and nothing is published. `is_last` is True for the step's last fragment, which
        makes the contribution final."""
        with self._storing:
            yield not self.is_void
            self._is_known = is_last
            self.report(self._stored.put_nowait, (fragment, trained))

    @property
    def seconds(self) -> float:
        """The seconds since the training thread began this outer step."""
        return time.monotonic() - self._began

    def report(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the swarm's thread, unless the outer step is void when the thread reaches the call."""

        def call_unless_void() -> None:
            if not self.is_void:
                function(*arguments)

        with suppress(RuntimeError):  # the swarm's thread may have ended
            self._loop.call_soon_threadsafe(call_unless_void)

    # Methods that the swarm's thread calls
    async def stored(self) -> tuple[int, Trained]:
        """Wait for the next fragment that the training thread stores. Return its number, and the samples, tokens and
        loss that the training thread reports with it."""
        return await self._stored.get()

    def void(self) -> None:
        """Make the outer step void, so that its training no longer counts. Waits until a fragment that is being stored
        is complete."""
        with self._storing:
            self.is_void = True


class LoopWorker:
    """The caller's loop in the role of a worker process. The swarm's thread calls `run_inner_loop`; the training thread
    calls `next_outer_step`."""

    def __init__(self, vectors: SharedVectors, layout: Layout, inner_steps: int, device: torch.device) -> None:
        """Create a worker for a loop with `inner_steps` inner steps in an outer step. `layout` and `device` are those
        of the loop's model."""
        self.vectors = vectors
        self.layout = layout
        self.fragments: Sequence[slice] = layout.fragments
        self.device = "the caller's loop"
        self.telemetry = Telemetry(inner_steps)
        self.outer_steps_taken = 0
        """The number of outer steps of the whole run, once the run is over."""
        self.tokens_trained = 0
        self._torch_device = device
        self._outer_steps: queue.SimpleQueue[OuterStep | Future[HeldOut | None] | BaseException | None]
        self._outer_steps = queue.SimpleQueue()
        self._newest: OuterStep | None = None
        self._averages: dict[int, bool] = {}  # by each decided fragment's number: True if averaging changed its values
        self._decided = threading.Condition()

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        """Train for one outer step, as `InnerTrainer` specifies. Metrics that a loop does not report are NaN."""

        def progressed(steps_done: int, progress: Progress) -> None:
            taken = InnerStepDone(
                inner_step=steps_done,
                loss=math.nan if progress.loss is None else progress.loss,
                gradient_norm=math.nan,
                learning_rate=math.nan,
                tokens_per_second=progress.tokens_per_second,
            )
            self.telemetry.progressed(work.index, taken)
            on_progress(progress)

        begin_with = None if goes_on else self.vectors.local if from_local else self.vectors.theta
        usual_tokens = self._newest.step_tokens if self._newest else 0.0
        self._newest = outer_step = OuterStep(work, begin_with, usual_tokens, progressed)
        self._outer_steps.put(outer_step)
        try:
            while True:
                fragment, trained = await outer_step.stored()
                if fragment == len(self.fragments) - 1:
                    return trained
                await on_captured(fragment)
        except BaseException:
            self.end_rest()
            raise

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """Tell the training thread that a fragment's average is decided. With `is_changed`, the new values are in
        `vectors.local`."""
        with self._decided:
            self._averages[fragment] = is_changed
            self._decided.notify_all()

    def end_rest(self) -> None:
        """Make the present outer step void, so that the training thread stops waiting for averages."""
        if self._newest is not None:
            self._newest.void()
            with self._decided:
                self._decided.notify_all()

    async def held_out(self, section: EvaluationSection) -> HeldOut | None:
        """Return theta's held-out loss, which the training thread measures, or None if the loop cannot evaluate."""
        result: Future[HeldOut | None] = Future()
        self._outer_steps.put(result)
        return await asyncio.wrap_future(result)

    async def wait_for_death(self) -> WorkerError:
        """Wait forever, because this worker lives as long as its process."""
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    def run_is_over(self, outer_steps: int) -> None:
        """Record that the run is over, after `outer_steps` outer steps, and end the training thread's outer steps."""
        self.outer_steps_taken = outer_steps
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the training thread's outer steps. Its next call of `next_outer_step` raises `error`, or returns None if
        there is no error, because the run is over."""
        self._outer_steps.put(error)
        self.end_rest()

    # Methods that the training thread calls
    def next_outer_step(self, evaluate: Callable[[], HeldOut | None] = lambda: None) -> OuterStep | None:
        """Return the swarm's next outer step, after waiting for it; None at the end of the run. When the swarm asks for
        a held-out loss, call `evaluate`. Raises: the error that ended the swarm's thread."""
        while True:
            found = self._outer_steps.get()
            if isinstance(found, Future):
                if found.set_running_or_notify_cancel():  # False if the swarm's thread has stopped waiting
                    found.set_result(evaluate())
                continue
            if isinstance(found, BaseException):
                self.end(found)  # makes the next call raise the error, too
                raise found
            if found is None:
                self.end()
                return None
            if not found.is_void:
                found.begin()
                return found

    @contextmanager
    def storing(self, outer_step: OuterStep, fragment: int, trained: Trained) -> Iterator[Vector | None]:
        """Yield `vectors.local`, into which the caller writes a fragment's weights, or None if the outer step is void.
        Unless it is void, the end of the `with` block publishes the weights for averaging."""
        with self._decided:
            self._averages.pop(fragment, None)
        with outer_step.storing(fragment, trained, is_last=fragment == len(self.fragments) - 1) as counts:
            yield self.vectors.local if counts else None

    def is_changed(self, outer_step: OuterStep, fragment: int) -> bool:
        """Wait until the average of a stored fragment is decided. Return True if averaging has changed the fragment's
        values, which are then in `vectors.local`; False if not, or if the outer step is void."""
        with self._decided:
            began, outer_step.late = time.monotonic(), outer_step.late + (fragment not in self._averages)
            self._decided.wait_for(lambda: fragment in self._averages or outer_step.is_void)
            outer_step.waited += time.monotonic() - began
            return not outer_step.is_void and self._averages[fragment]

    def all_taken(self, outer_step: OuterStep, trained: Trained) -> None:
        """Report to the telemetry that the loop has taken all inner steps of an outer step, with its results."""
        self.tokens_trained += trained.tokens
        streams = len(self.fragments) > 1 or outer_step.begin_with is None
        done = InnerLoopDone(
            tokens=trained.tokens,
            inner_steps=outer_step.steps_done,
            loss=trained.loss,
            gradient_norm=math.nan,
            learning_rate=math.nan,
            skipped=0,
            seconds=outer_step.seconds,
            waited_seconds=math.nan,
            late_averages=outer_step.late,
            average_wait_seconds=outer_step.waited if streams else math.nan,
            peak_memory_bytes=peak_memory(self._torch_device),
        )
        outer_step.report(lambda: self.telemetry.trained(outer_step.work.index, done))


# The swarm's thread ---------------------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # seconds between two checks that the training loop still runs


@dataclass(frozen=True)
class Joined:
    """The objects that the swarm's thread passes to the training thread after joining."""

    run: Run
    worker: LoopWorker
    leave: Callable[[], None]


class SwarmThread(threading.Thread):
    """The swarm's thread, which finds the run, takes part in it and leaves it. An error before joining is raised by the
    future `joined`; a later error is raised by the worker's `next_outer_step`."""

    def __init__(
        self,
        invite: Invite,
        key: Identity | Path,
        ticket: str | None,
        own: OwnFiles,
        model: torch.nn.Module,
        is_abandoned: Callable[[], bool],
        folders: Sequence[Path] = (),
    ) -> None:
        """Create the thread. The arguments are those of `DiLoCo`, with its `run` parsed as an invite. If `key` is a
        file, it is locked while the thread runs."""
        super().__init__(name="diloco-peer", daemon=True)
        self._invite = invite
        self._ticket = None if ticket is None else read_ticket(ticket)
        self._own = own
        self._model = model
        self._is_abandoned = is_abandoned
        self._folders = folders
        self._living: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._key = nullcontext(key) if isinstance(key, Identity) else hold_identity(key)
        self.identity: Identity
        self.joined: Future[Joined] = Future()

    def leave(self) -> None:
        """Leave the run, and wait until the thread has ended."""
        self.joined.result().leave()
        self.join()

    def give_up(self) -> None:
        """Cancel the thread's work at any stage, and wait until the thread has ended."""
        with suppress(CancelledError):  # the thread may have failed before its work began
            loop, life = self._living.result()
            _call(loop, life.cancel)
        self.join()

    def run(self) -> None:
        try:
            with self._key as self.identity:
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
        life = start_task(self._take_part())
        self._living.set_result((asyncio.get_running_loop(), life))
        await life

    async def _take_part(self) -> None:
        async with connected(self.identity, self._invite.addresses) as transport:
            run = (await find_run(transport, self._invite.run_id)).with_own(self._own)
            worker = await asyncio.to_thread(self.worker_of, run)  # may raise, and so runs before this peer is a member
            workload = TrainerWorkload(worker, run.config, run_is_over=worker.run_is_over)
            digest = await workload.state_digest()
            await ask_for_signed_heads(transport, run, self._invite.addresses)
            admission = await enter(transport, run, self.identity, self._invite.addresses, None, self._ticket)
            await listen(transport, run.run_id)
            tokens_counted = 0

            def count(header: Header, state_digest: bytes) -> None:
                nonlocal tokens_counted
                tokens_counted += header.tokens_of(self.identity.peer_id)

            driver = Driver(self.identity, transport, workload, run.settings, digest, on_entry=count)
            workload.take_turns(driver, self.identity.peer_id)
            volunteer = Volunteer(run, driver, transport, workload, admission=admission)
            worker.telemetry.track_with([], configuration_of(run, self.identity.peer_id, worker.device))
            loop = asyncio.get_running_loop()
            watching = start_task(self._leave_when_abandoned(volunteer))
            self.joined.set_result(Joined(run, worker, lambda: _call(loop, volunteer.leave)))
            try:
                await volunteer.take_part()
            finally:
                watching.cancel()
            warn_if_in_vain(run.run_id, worker.tokens_trained, tokens_counted)
            warn_if_only_copy(volunteer.others(), volunteer.outer_step)

    def worker_of(self, run: Run) -> LoopWorker:
        """Return a worker for the caller's loop, with the run's initial weights. Raises: DataError if the text folders
        that the caller passed to `DiLoCo` do not fit the run's sources; also the errors of `initial_weights`."""
        if self._folders:
            run.with_data(self._folders)
        layout, vectors = initial_weights(run.config, layout_of(self._model))
        device = next(self._model.parameters()).device
        return LoopWorker(vectors, layout, run.config.training.inner_steps, device)

    async def _leave_when_abandoned(self, volunteer: Volunteer) -> None:
        while not self._is_abandoned():
            await asyncio.sleep(LOOK_SECONDS)
        logger.warning("the training loop has ended without leaving the run: leaving it now")
        volunteer.leave()


def warn_if_in_vain(run_id: str, trained: int, counted: int) -> None:
    """Log a warning if a loop trained tokens and none of them counted in the run."""
    if trained and not counted:
        logger.warning(
            "run %s counted none of the %s tokens that this loop trained: its work was always ready too late, or did"
            " not arrive in time. A faster device or link helps, or a longer rounds.grace_seconds in run.toml.",
            *(run_id, f"{trained:,}"),
        )


def warn_if_only_copy(others: Sequence[Heartbeat], outer_step: int) -> None:
    """Log a warning if a loop leaves and none of the live peers `others` has its newest outer step."""
    if outer_step and not holders(others, outer_step):
        logger.warning(
            "this loop has left, and hears no other machine that has outer step %d: peers that join later may begin"
            " before it. A bootstrap node with --archive keeps each outer step; with rounds.minimum_peers in run.toml,"
            " peers wait for each other.",
            outer_step,
        )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the event loop may have ended
        loop.call_soon_threadsafe(function)
