"""The library: DiLoCo around a training loop of one's own, where every step of the inner optimizer counts, and the H-th
ends the outer step.

    with DiLoCo(model, inner_optimizer, run="diloco:tiny-qz3h…4a@/ip4/…") as diloco:
        for windows in diloco.batches():  # the run's text; or text of one's own, in batches of the same size
            loss = loss_of(model, windows)
            loss.backward()
            diloco.report(loss)
            inner_optimizer.step()
            inner_optimizer.zero_grad()

Or around transformers' `Trainer`, whose effective batch (per-device batch times gradient accumulation) must be the
run's:

    Trainer(model, arguments, train_dataset=…, callbacks=[DiLoCoCallback("diloco:tiny-qz3h…4a@/ip4/…")]).train()

The swarm's part (membership, rounds, transfers, the outer step) lives in a thread of its own, as in the peer process of
`diloco-peer join`; here it lends the training thread theta and takes back what came of it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl

from opendiloco.config.model import check_initial_weights
from opendiloco.config.overrides import Overrides, mixture_phases
from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.data.ahead import Ahead
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.data.sample_order import numbers_of
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TokenizeAhead, TrainingData, load_data
from opendiloco.errors import LoopError, WorkerError, first_line
from opendiloco.evaluation_turns import HeldOut
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import Shards, layout_of, trainable
from opendiloco.run import Run, find_run
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.training.inner import inner_learning_rate_factor
from opendiloco.training.team import peak_memory
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.admission import ask_for_signed_heads, enter, read_ticket
from opendiloco.volunteer.identity import listen
from opendiloco.volunteer.interrupts import RememberedInterrupt
from opendiloco.volunteer.local_workload import Workload
from opendiloco.volunteer.volunteer import Volunteer, connected
from opendiloco.workers.control import InnerLoopDone, InnerStepDone
from opendiloco.workers.telemetry import Telemetry
from opendiloco.workers.trackers import Choice, tracking
from peers.driver.driver import Driver
from peers.errors import ManifestError
from peers.values.identity import Identity
from peers.values.leases import SampleRange, prefix, sample_count
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing

# The caller's model ---------------------------------------------------------------------------------------------------
EXACT = (torch.float32, torch.float64)
"""The types that hold theta's values as they are."""
JOIN = (
    "Train with `diloco-peer join`, which shares a model among all GPUs of a machine, or in one process on one device."
)


def _check_own_model(model: torch.nn.Module) -> None:
    """Raises: LoopError when the model is shared with other processes, or cannot hold theta."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise LoopError(
            f"this is process {dist.get_rank()} of {dist.get_world_size()}; each would join as a peer of its own.",
            JOIN,
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise LoopError("the model is wrapped in FSDP.", JOIN)
    for name, parameter in trainable(model).items():
        if isinstance(parameter, DTensor):
            raise LoopError(f"the model's parameter {name} is a shard (FSDP2, or a DTensor of another kind).", JOIN)
        if parameter.is_meta:
            raise LoopError(f"the model's parameter {name} has no memory.", "Use `model.to_empty(device=…)` first.")
        if parameter.dtype not in EXACT:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise LoopError(
                f"the model's parameter {name} is {kind}; theta would be rounded to it, and what that changes would "
                "count as trained.",
                "Keep the weights in float32 (model.float()), and compute in bfloat16 with torch.autocast.",
            )


def _initial_vectors(config: RunConfig, layout: Layout) -> SharedVectors:
    """Return memory with the weights that the run begins with, for a model of this layout.

    Raises: ManifestError when the run's model has another; MachineError without memory; see `check_initial_weights`.
    """
    model = build_model(config, build_tokenizer(config.tokenizer))
    runs = layout_of(model, config.streaming)
    remedy = "Build the model as the run's manifest says: `diloco-peer run show` prints it."
    for ours, theirs in zip(layout, runs, strict=False):
        if ours.shape != theirs.shape:
            raise ManifestError(
                f"the model's parameter {ours.name} has the shape {ours.shape}; the run's {theirs.name} has "
                f"{theirs.shape}.",
                remedy,
            )
    if layout.size != runs.size:
        raise ManifestError(f"the model has {layout.size} trainable values; the run's has {runs.size}.", remedy)
    vectors = SharedVectors.create(runs.size)
    Shards(runs).store(trainable(model), vectors.theta)
    check_initial_weights(vectors.theta, config.model)
    return vectors


# Between two threads --------------------------------------------------------------------------------------------------
class _OuterStep:
    """The inner steps of one outer step. The training thread reports each; the swarm's waits for what is `trained`.

    When the swarm cancels that, since it has moved on, nothing that was done counts, nor will it be published.
    """

    def __init__(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> None:
        self.work = work
        self.steps_done = 0
        self.trained: Future[Trained] = Future()
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()

    @property
    def is_void(self) -> bool:
        """Return whether the swarm has moved on since it began."""
        return self.trained.cancelled()

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


class _LoopWorker:
    """Stands where a worker process would. `run_inner_loop` is the swarm's; `next_outer_step` the training thread's."""

    def __init__(self, vectors: SharedVectors, inner_steps: int, device: torch.device) -> None:
        """`inner_steps` are those of an outer step; the loop's model is on `device`."""
        self.vectors = vectors
        self.fragments: Sequence[slice] = [slice(0, vectors.theta.size)]
        self.device = "the caller's loop"
        self.telemetry = Telemetry(inner_steps)
        self.outer_steps_taken = 0
        """Those of the whole run, once it is over."""
        self._torch_device = device
        self._outer_steps: queue.SimpleQueue[_OuterStep | Future[HeldOut | None] | BaseException | None]
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

        outer_step = _OuterStep(work, progressed)
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

    def run_is_over(self, outer_steps: int) -> None:
        """Take in that the run has taken its last outer step, after so many."""
        self.outer_steps_taken = outer_steps
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """There are no more outer steps: the run is over, or this went wrong."""
        self._outer_steps.put(error)

    def next_outer_step(self, evaluate: Callable[[], HeldOut | None] = lambda: None) -> _OuterStep | None:
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
class _Joined:
    """What the swarm's thread has to say to the training thread once it is in the run."""

    run: Run
    worker: _LoopWorker
    leave: Callable[[], None]


class _Swarm(threading.Thread):
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
        self.joined: Future[_Joined] = Future()

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
            await ask_for_signed_heads(transport, run, self._invite.addresses)
            admission = await enter(transport, run, self.identity, self._invite.addresses, None, self._ticket)
            await listen(transport, run.run_id)
            vectors = await asyncio.to_thread(_initial_vectors, run.config, layout_of(self._model))
            device = next(self._model.parameters()).device
            worker = _LoopWorker(vectors, run.config.training.inner_steps, device)
            workload = Workload(worker, run.config, run_is_over=worker.run_is_over)
            digest = await workload.state_digest()
            driver = Driver(self.identity, transport, workload, run.settings, digest)
            workload.take_turns(driver, self.identity.peer_id)
            volunteer = Volunteer(run, driver, transport, workload, admission=admission)
            worker.telemetry.track_with([], configuration_of(run, self.identity.peer_id, worker.device))
            loop = asyncio.get_running_loop()
            watching = asyncio.create_task(self._leave_when_abandoned(volunteer))
            self.joined.set_result(_Joined(run, worker, lambda: _call(loop, volunteer.leave)))
            try:
                await volunteer.take_part()
            finally:
                watching.cancel()

    async def _leave_when_abandoned(self, volunteer: Volunteer) -> None:
        while not self._is_abandoned():
            await asyncio.sleep(LOOK_SECONDS)
        logger.warning("the training loop has ended without a word: leaving the run")
        volunteer.leave()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


# The caller's loop ----------------------------------------------------------------------------------------------------
BEFORE_EXIT: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
"""Has Python call a function before it ends; `atexit` alone does so when executors, which leaving needs, have ended."""


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
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """`run` is an invite; one by invitation needs a `ticket`, too: its text, or a file's path. `data` are folders
        to read instead of sources that are local to this machine, `own` the run's model and tokenizer where these are.
        With `evaluates`, it takes its turns to evaluate. `is_abandoned` says whether the loop has ended without leaving
        this context: the run is then left all the same."""
        self.finished = False
        """Whether the run has had its last outer step. The model then holds the run's final weights."""
        _check_own_model(model)
        self._model = model
        self._shards = Shards(layout_of(model))
        self._inner_optimizer = inner_optimizer
        self._data = data
        self._loss: float | None = None
        self._text: TrainingData | None = None
        self._evaluates = evaluates
        self._until_leaving = ExitStack()
        self._interrupt = RememberedInterrupt()
        self._swarm = _Swarm(Invite.parse(run), identity or Identity.generate(), ticket, own, model, is_abandoned)

    def __enter__(self) -> Self:
        self._until_leaving.enter_context(self._interrupt)
        BEFORE_EXIT(_leave_before_exit, weakref.ref(self._swarm))
        self._swarm.start()
        try:
            self._swarm.joined.result()
            self._begin_outer_step()
        except BaseException:
            with self._until_leaving:
                self._swarm.give_up()
            raise
        self._until_leaving.callback(self._inner_optimizer.register_step_post_hook(self._after_inner_step).remove)
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self._swarm.leave()
        except BaseException:  # whoever is interrupted now does not want to wait for the round under way
            self._swarm.give_up()
            raise
        finally:
            self._until_leaving.close()

    @property
    def run(self) -> Run:
        return self._swarm.joined.result().run

    @property
    def _worker(self) -> _LoopWorker:
        return self._swarm.joined.result().worker

    @property
    def outer_step(self) -> int:
        """Outer steps that the run has taken."""
        return self._worker.outer_steps_taken if self._outer_step is None else self._outer_step.work.index

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer step."""
        return 0 if self._outer_step is None else self._outer_step.steps_done

    @property
    def lease(self) -> tuple[SampleRange, ...]:
        """Return the samples of the present outer step: numbers in the run's endless order, for this peer alone."""
        return () if self._outer_step is None else self._outer_step.work.samples

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor that the run's schedule and amendments give the inner learning rate in the next inner step;
        0 when the run is over. It is the loop that multiplies its rate with it."""
        if (outer_step := self._outer_step) is None:
            return 0.0
        config, work = self.run.config, outer_step.work
        step = work.index * config.training.inner_steps + outer_step.steps_done
        batch = config.training.batch_size * config.training.sequence_length
        tokens = work.tokens + (outer_step.steps_done + 1) * batch
        return inner_learning_rate_factor(config, Overrides.of(work.amendment, config), step, tokens)

    def track(self, choice: str) -> None:
        """Draw curves until it leaves, in "tensorboard:FOLDER" or "wandb:PROJECT". Raises: ValueError, MachineError."""
        chosen = [Choice.parse(choice)]
        peer = self._swarm.identity.peer_id
        opened = self._until_leaving.enter_context(tracking(chosen, self.run.run_id, peer))
        configuration = configuration_of(self.run, peer, self._worker.device)
        self._worker.telemetry.track_with(opened, configuration)

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
                data.samples.mix(mixture_phases(outer_step.work.amendments, run.config))
                data.samples.expect(lease)
                yield torch.from_numpy(data.samples.read(lease[first : first + size]))

    def _read(self, run: Run, tokenize_ahead: TokenizeAhead | None = None) -> TrainingData:
        """Open the text of a run, as this machine may read it. Raises: DataError, MachineError."""
        tokenizer = build_tokenizer(run.config.tokenizer)
        self._text = load_data(run.config, tokenizer, None, tokenize_ahead)
        per_token = self._text.held_out.bytes_per_token(run.config.evaluation.windows, tokenizer)
        self._worker.telemetry.bytes_per_token = per_token
        return self._text

    def _begin_outer_step(self) -> None:
        """Wait for the swarm, which may have theta evaluated first, and take over theta."""
        self._outer_step: _OuterStep | None = self._worker.next_outer_step(self._evaluate)
        self._began_at = time.monotonic()
        self._shards.load(self._worker.vectors.theta, trainable(self._model))
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
            outer_step.finish(lambda: self._shards.store(trainable(self._model), self._worker.vectors.local), trained)
        self._begin_outer_step()

    def _trained_in(self, outer_step: _OuterStep) -> Trained:
        training = self.run.config.training
        samples = prefix(outer_step.work.samples, outer_step.steps_done * training.batch_size)
        return Trained(samples, training.sequence_length * sample_count(samples), self._loss or 0.0)

    def _evaluate(self) -> HeldOut | None:
        """Return theta's loss on the run's held-out text, read at the first turn; None if the loop takes no turns."""
        if not self._evaluates:
            return None
        try:
            if self._text is None:
                logger.info(
                    "reading the run's text to evaluate theta on what is held out; evaluates=False leaves it out"
                )
            run = self.run.with_data(self._data)
            section, held_out = run.config.evaluation, (self._text or self._read(run)).held_out
            self._shards.load(self._worker.vectors.theta, trainable(self._model))
            is_bf16, device = run.config.training.precision == "bf16", next(self._model.parameters()).device.type
            precision = partial(torch.autocast, device, torch.bfloat16, enabled=is_bf16)
            loss, _ = held_out_loss(self._model, held_out, section.windows, EVALUATED_AT_ONCE, precision)
            is_runs_text = run.has_runs_text and section.digest in (None, held_out.digest(section.windows))
            return HeldOut(loss, is_runs_text)
        except Exception as error:  # a model may be called in other ways than transformers'
            logger.warning("this loop takes no turns to evaluate theta: %s", first_line(error))
            self._evaluates = False
            return None


def _leave_before_exit(reference: weakref.ref[_Swarm]) -> None:
    """Leave the run if nobody has: a program may end right after its training has raised, still in the context."""
    swarm = reference()
    if swarm is not None and swarm.is_alive():
        swarm.leave()


# transformers' Trainer ------------------------------------------------------------------------------------------------
class DiLoCoCallback(TrainerCallback):
    """Joins the run when training begins, ends training with the run, and leaves when training ends, however it does.

    A Trainer that raises calls no callback. So we look now and then whether the call that trains is still under way.
    """

    def __init__(self, run: str, **options: Any) -> None:
        """`options` are those of `DiLoCo`."""
        self._run = run
        self._options = options
        self._diloco: DiLoCo | None = None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._leave()  # what an earlier training that raised has left
        optimizer = kwargs["optimizer"]
        inner_optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        call = _Call.outside_callbacks(sys._getframe())
        diloco = DiLoCo(
            kwargs["model"], inner_optimizer, self._run, is_abandoned=lambda: not call.is_under_way(), **self._options
        )
        diloco.__enter__()
        self._diloco = diloco

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop |= self._diloco is None or self._diloco.finished

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs.get("logs", {})
        if self._diloco is not None and "loss" in logs:
            self._diloco.report(logs["loss"])

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        diloco, self._diloco = self._diloco, None
        if diloco is not None:
            diloco.__exit__()


class _Call:
    """A call of a function, in a thread: whether it has not returned or raised yet."""

    def __init__(self, frame: FrameType) -> None:
        self._thread = threading.get_ident()
        self._frame: FrameType | None = frame

    @classmethod
    def outside_callbacks(cls, frame: FrameType) -> _Call:
        """Return the innermost call below `frame` that is neither ours nor one of those that call callbacks."""
        passed_over = {__name__, TrainerCallback.__module__}
        while frame.f_globals.get("__name__") in passed_over and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame)

    def is_under_way(self) -> bool:
        """Asked from another thread."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is None:
            self._frame = None  # or else its variables would live as long as we do
        return frame is not None
