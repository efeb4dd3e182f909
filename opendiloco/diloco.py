"""DiLoCo around one's own training loop: every step of the inner optimizer counts, and the H-th ends the outer step.

    with DiLoCo(model, inner_optimizer, run="diloco:tiny-qz3h…4a@/ip4/…") as diloco:
        for windows in diloco.batches():  # the run's text; or text of one's own, in batches of the same size
            loss = loss_of(model, windows)
            loss.backward()
            diloco.report(loss)
            inner_optimizer.step()
            inner_optimizer.zero_grad()

The swarm's part (membership, rounds, transfers, the outer step) lives in a thread of its own, as in the peer process of
`diloco-peer join`; here it lends the training thread theta and takes back what came of it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from opendiloco.data.ahead import Ahead
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.data.sample_order import numbers_of
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TokenizeAhead, TrainingData, load_data
from opendiloco.errors import first_line
from opendiloco.evaluation_turns import HeldOut
from opendiloco.loop_worker import LoopWorker, OuterStep
from opendiloco.model.build import layout_of, trainable
from opendiloco.model.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.model.shards import Shards
from opendiloco.own_model import check_own_model, check_run, initial_vectors
from opendiloco.run import Run, find_run
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.admission import ask_for_signed_heads, enter, read_ticket
from opendiloco.volunteer.identity import listen
from opendiloco.volunteer.interrupts import RememberedInterrupt
from opendiloco.volunteer.local_workload import Workload
from opendiloco.volunteer.volunteer import Volunteer, connected
from opendiloco.workers.trackers import Choice, tracking
from peers.driver.driver import Driver
from peers.driver.keeping import Keeping
from peers.values.identity import Identity
from peers.values.leases import SampleRange, prefix, sample_count
from peers.values.manifest import Invite
from peers.values.workload import Progress, Trained

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
BEFORE_EXIT: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
"""Has Python call a function before it ends; `atexit` alone does so when executors, which leaving needs, have ended."""


@dataclass(frozen=True)
class _Joined:
    """What the swarm's thread has to say to the training thread once it is in the run."""

    run: Run
    worker: LoopWorker
    leave: Callable[[], None]


class DiLoCo:
    """A peer of a run whose inner loop is the caller's. A context: entering it joins the run, leaving it leaves.

    `model` is any module with the run's trainable parameters (same shapes, same order), whole, in one process, as
    float32 or float64; its weights are replaced by theta at each outer step. `inner_optimizer` steps it; each of its
    steps must train one batch of the run's size (`training.batch_size` windows of `training.sequence_length` tokens),
    since contributions are weighted by tokens.

    It takes its turns to evaluate theta on the run's held-out text, where that can be read here and the model is called
    as transformers' models are.

    Raises: LoopError for a model that is sharded, in half precision, or in one of several processes. Entering raises:
    ManifestError, AdmissionError, CopiedKeyError, SwarmUnreachableError, LocalNetworkError, MachineError; and leaves no
    thread behind, also when it is interrupted. What goes wrong later is raised by the inner step during which it is
    noticed, and so is a KeyboardInterrupt that Python has lost.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        run: str,
        data: Sequence[Path] = (),
        identity: Identity | None = None,
        ticket: str | None = None,
        evaluates: bool = True,
        own: OwnFiles = NONE,
    ) -> None:
        """`run` is an invite; one by invitation needs a `ticket`, too: its text, or a file's path. `data` are folders
        to read instead of sources that are local to this machine, `own` the run's model and tokenizer where these are.
        With `evaluates`, it takes its turns to evaluate."""
        self.finished = False
        """Whether the run has had its last outer step. The model then holds the run's final weights."""
        self.is_abandoned: Callable[[], bool] = lambda: False
        """Whether the loop has ended without leaving this context; we then leave the run all the same."""
        check_own_model(model)
        self._model = model
        self._layout = layout_of(model)
        self._shards = Shards(self._layout)
        self._inner_optimizer = inner_optimizer
        self._invite = Invite.parse(run)
        self._data = data
        self._own = own
        self._identity = identity or Identity.generate()
        self._ticket = None if ticket is None else read_ticket(ticket)
        self._loss: float | None = None
        self._text: TrainingData | None = None
        self._has_runs_text = True
        self._evaluates = evaluates
        self._until_leaving = ExitStack()
        self._interrupt = RememberedInterrupt()
        self._living: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._joining: Future[_Joined] = Future()
        self._thread = threading.Thread(target=self._live, name="diloco-peer", daemon=True)

    def __enter__(self) -> Self:
        self._until_leaving.enter_context(self._interrupt)
        BEFORE_EXIT(_leave_before_exit, weakref.ref(self))
        self._thread.start()
        try:
            self._joined = self._joining.result()
            self._begin_outer_step()
        except BaseException:
            with self._until_leaving:
                self._give_up()
            raise
        self._hook = self._inner_optimizer.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        try:
            self._joined.leave()
            self._thread.join()
        except BaseException:  # whoever is interrupted now does not want to wait for the round under way
            self._give_up()
            raise
        finally:
            self._until_leaving.close()

    def _give_up(self) -> None:
        """End the swarm's thread, wherever it is."""
        with suppress(CancelledError):  # it has not come to life
            loop, life = self._living.result()
            _call(loop, life.cancel)
        self._thread.join()

    @property
    def run(self) -> Run:
        return self._joined.run

    @property
    def outer_step(self) -> int:
        """Outer steps that the run has taken."""
        return self.run.config.total_outer_steps if self._outer_step is None else self._outer_step.work.index

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer step."""
        return 0 if self._outer_step is None else self._outer_step.steps_done

    @property
    def lease(self) -> tuple[SampleRange, ...]:
        """The samples of the present outer step: numbers in the run's endless order, which nobody else trains."""
        return () if self._outer_step is None else self._outer_step.work.samples

    def track(self, choice: str) -> None:
        """Draw curves of this loop's training until it leaves: in "tensorboard:FOLDER" or "wandb:PROJECT".

        Raises: ValueError for anything else; MachineError when the package for it is missing.
        """
        chosen = [Choice.parse(choice)]
        opened = self._until_leaving.enter_context(tracking(chosen, self.run.run_id, self._identity.peer_id))
        configuration = configuration_of(self.run, self._identity.peer_id, self._joined.worker.device)
        self._joined.worker.telemetry.track_with(opened, configuration)

    def report(self, loss: torch.Tensor | float) -> None:
        """Take the loss of the inner step under way, to be shown to others."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the run's text, batch by batch, until the run is over: token ids of shape (batch_size,
        sequence_length + 1).

        Each batch is for one inner step. The next shard of a source with shards is tokenized meanwhile, by a process
        that ends with this iterator, or when the loop leaves. Raises: DataError.
        """
        run = self.run.with_data(self._data)
        with closing(Ahead(run.config)) as ahead:
            self._until_leaving.callback(ahead.close)  # an iterator may outlive its loop
            data, size = self._read(run, ahead.tokenize), run.config.training.batch_size
            while (outer_step := self._outer_step) is not None:
                self._interrupt.raise_again()
                lease, first = numbers_of(outer_step.work.samples), outer_step.steps_done * size
                data.samples.expect(lease)
                yield torch.from_numpy(data.samples.read(lease[first : first + size]))

    def _read(self, run: Run, tokenize_ahead: TokenizeAhead | None = None) -> TrainingData:
        """Open the text of a run, as this machine may read it. Raises: DataError, MachineError."""
        tokenizer = build_tokenizer(run.config.tokenizer)
        self._text, self._has_runs_text = load_data(run.config, tokenizer, None, tokenize_ahead), run.has_runs_text
        per_token = self._text.held_out.bytes_per_token(run.config.evaluation.windows, tokenizer)
        self._joined.worker.telemetry.bytes_per_token = per_token
        return self._text

    # The training thread --------------------------------------------------------------------------------------
    def _begin_outer_step(self) -> None:
        """Wait for the swarm, which may have theta evaluated first, and take over theta."""
        self._outer_step: OuterStep | None = self._joined.worker.next_outer_step(self._evaluate)
        self._began_at = time.monotonic()
        self._shards.load(self._joined.worker.vectors.theta, trainable(self._model))
        self.finished = self._outer_step is None

    def _after_inner_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        outer_step = self._outer_step
        self._interrupt.raise_again()
        if outer_step is None:
            return  # the run is over; what is trained now is the caller's alone
        if not outer_step.is_void:
            outer_step.steps_done += 1
            trained = self._trained_in(outer_step)
            speed = trained.tokens / (time.monotonic() - self._began_at)
            outer_step.report(Progress(outer_step.steps_done, self._loss, speed))
            if outer_step.steps_done < outer_step.work.steps and trained.samples != outer_step.work.samples:
                return
            outer_step.finish(self._publish, trained)
        self._begin_outer_step()

    def _trained_in(self, outer_step: OuterStep) -> Trained:
        training = self.run.config.training
        samples = prefix(outer_step.work.samples, outer_step.steps_done * training.batch_size)
        return Trained(samples, training.sequence_length * sample_count(samples), self._loss or 0.0)

    def _evaluate(self) -> HeldOut | None:
        """Return theta's loss on the run's held-out text, which is read at the first turn; None if the loop takes no
        turns."""
        if not self._evaluates:
            return None
        try:
            return self._held_out_loss(self._text or self._read_to_evaluate())
        except Exception as error:  # a model may be called in other ways than transformers'
            logger.warning("this loop takes no turns to evaluate theta: %s", first_line(error))
            self._evaluates = False
            return None

    def _read_to_evaluate(self) -> TrainingData:
        logger.info(
            "reading the run's text, of which some is held out to evaluate theta; evaluates=False leaves it out"
        )
        return self._read(self.run.with_data(self._data))

    def _held_out_loss(self, text: TrainingData) -> HeldOut:
        section, held_out = self.run.config.evaluation, text.held_out
        self._shards.load(self._joined.worker.vectors.theta, trainable(self._model))
        loss, _ = held_out_loss(self._model, held_out, section.windows, EVALUATED_AT_ONCE, self._precision)
        is_runs_text = self._has_runs_text and section.digest in (None, held_out.digest(section.windows))
        return HeldOut(loss, is_runs_text)

    def _precision(self) -> AbstractContextManager[Any]:
        device = next(self._model.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.run.config.training.precision == "bf16")

    def _publish(self) -> None:
        self._shards.store(trainable(self._model), self._joined.worker.vectors.local)

    # The swarm's thread ---------------------------------------------------------------------------------------
    def _live(self) -> None:
        try:
            asyncio.run(self._begin())
        except BaseException as error:
            self._living.cancel()
            if self._joining.done():
                self._joined.worker.end(error)
            else:
                self._joining.set_exception(error)
        else:
            self._joined.worker.end()

    async def _begin(self) -> None:
        life = asyncio.create_task(self._take_part())
        self._living.set_result((asyncio.get_running_loop(), life))
        await life

    async def _take_part(self) -> None:
        async with connected(self._identity, self._invite.addresses) as transport:
            run = (await find_run(transport, self._invite.run_id)).with_own(self._own)
            check_run(run.config)
            await ask_for_signed_heads(transport, run, self._invite.addresses)
            admission = await enter(transport, run, self._identity, self._invite.addresses, None, self._ticket)
            await listen(transport, run.run_id)
            vectors = await asyncio.to_thread(initial_vectors, run.config, self._layout)
            device = next(self._model.parameters()).device
            worker = LoopWorker(vectors, run.config.training.inner_steps, device)
            workload = Workload(worker, run.config, run_is_over=worker.end)
            keeping = Keeping(await workload.state_digest())
            driver = Driver(self._identity, transport, workload, run.settings, keeping)
            workload.take_turns(driver, self._identity.peer_id)
            volunteer = Volunteer(run, driver, transport, workload, admission=admission)
            worker.telemetry.track_with([], configuration_of(run, self._identity.peer_id, worker.device))
            loop = asyncio.get_running_loop()
            watching = asyncio.create_task(self._leave_when_abandoned(volunteer))
            self._joining.set_result(_Joined(run, worker, lambda: _call(loop, volunteer.leave)))
            try:
                await volunteer.take_part()
            finally:
                watching.cancel()

    async def _leave_when_abandoned(self, volunteer: Volunteer) -> None:
        while not self.is_abandoned():
            await asyncio.sleep(LOOK_SECONDS)
        logger.warning("the training loop has ended without a word: leaving the run")
        volunteer.leave()


def _leave_before_exit(reference: weakref.ref[DiLoCo]) -> None:
    """Leave the run if nobody has: a program may end right after its training has raised, still in the context."""
    diloco = reference()  # lives as long as its thread does
    if diloco is not None and diloco._thread.is_alive():
        diloco._joined.leave()
        diloco._thread.join()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
