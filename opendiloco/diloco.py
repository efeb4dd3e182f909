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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from opendiloco.anchorage import ask_for_anchors
from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import numbers_of
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import load_data
from opendiloco.entrance import enter, read_ticket
from opendiloco.local_workload import TrainingWorkload
from opendiloco.loop_worker import LoopWorker, OuterStep
from opendiloco.model.build import build_model, layout_of, store_weights, trainable
from opendiloco.model.initial_weights import check_initial_weights
from opendiloco.model.layout import Layout
from opendiloco.model.shards import Shards
from opendiloco.run import Run, find_run
from opendiloco.shared_memory import SharedVectors
from opendiloco.sole import listen
from opendiloco.volunteer import Volunteer, connected
from peers.driver.driver import Driver
from peers.driver.keeping import Keeping
from peers.errors import ManifestError
from peers.values.identity import Identity
from peers.values.leases import SampleRange, prefix, sample_count
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, Progress, Trained


@dataclass(frozen=True)
class _Joined:
    """What the swarm's thread has to say to the training thread once it is in the run."""

    run: Run
    worker: LoopWorker
    leave: Callable[[], None]


class DiLoCo:
    """A peer of a run whose inner loop is the caller's. A context: entering it joins the run, leaving it leaves.

    `model` is any module with the run's trainable parameters (same shapes, same order); its weights are replaced by
    theta at each outer step. `inner_optimizer` steps it; each of its steps must train one batch of the run's size
    (`training.batch_size` windows of `training.sequence_length` tokens), since contributions are weighted by tokens.

    Entering raises: ManifestError, AdmissionError, CopiedKeyError, SwarmUnreachableError, LocalNetworkError,
    MachineError. What goes wrong later is raised by the inner step during which it is noticed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        run: str,
        data: Sequence[Path] = (),
        identity: Identity | None = None,
        ticket: str | None = None,
    ) -> None:
        """`run` is an invite; one by invitation needs a `ticket`, too: its text, or a file's path. `data` are folders
        to read instead of sources that are local to this machine."""
        self.finished = False
        """Whether the run has had its last outer step. The model then holds the run's final weights."""
        self._model = model
        self._layout = layout_of(model)
        self._shards = Shards(self._layout)
        self._inner_optimizer = inner_optimizer
        self._invite = Invite.parse(run)
        self._data = data
        self._identity = identity or Identity.generate()
        self._ticket = None if ticket is None else read_ticket(ticket)
        self._loss: float | None = None
        self._joining: Future[_Joined] = Future()
        self._thread = threading.Thread(target=self._live, name="diloco-peer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._joined = self._joining.result()
        except BaseException:
            self._thread.join()
            raise
        self._begin_outer_step()
        self._hook = self._inner_optimizer.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._joined.leave()
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

    def report(self, loss: torch.Tensor | float) -> None:
        """The loss of the inner step under way, to be shown to others."""
        self._loss = float(loss)

    def batches(self) -> Iterator[torch.Tensor]:
        """The run's text, batch by batch, until the run is over: token ids of shape (batch_size, sequence_length + 1).

        Each batch is for one inner step. Raises: DataError.
        """
        config = self.run.with_data(self._data).config
        samples = load_data(config, build_tokenizer(config.tokenizer)).samples
        size = config.training.batch_size
        while (outer_step := self._outer_step) is not None:
            first = outer_step.steps_done * size
            yield torch.from_numpy(samples.read(numbers_of(outer_step.work.samples)[first : first + size]))

    # The training thread --------------------------------------------------------------------------------------
    def _begin_outer_step(self) -> None:
        """Wait for the swarm, and take over theta."""
        self._outer_step: OuterStep | None = self._joined.worker.next_outer_step()
        self._began_at = time.monotonic()
        self._shards.load(self._joined.worker.vectors.theta, trainable(self._model))
        self.finished = self._outer_step is None

    def _after_inner_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        outer_step = self._outer_step
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

    def _publish(self) -> None:
        self._shards.store(trainable(self._model), self._joined.worker.vectors.local)

    # The swarm's thread ---------------------------------------------------------------------------------------
    def _live(self) -> None:
        try:
            asyncio.run(self._take_part())
        except BaseException as error:
            if self._joining.done():
                self._joined.worker.end(error)
            else:
                self._joining.set_exception(error)
        else:
            self._joined.worker.end()

    async def _take_part(self) -> None:
        async with connected(self._identity, self._invite.addresses) as transport:
            run = await find_run(transport, self._invite.run_id)
            await ask_for_anchors(transport, run, self._invite.addresses)
            entrance = await enter(transport, run, self._identity, self._invite.addresses, None, self._ticket)
            await listen(transport, run.run_id)
            worker = LoopWorker(await asyncio.to_thread(initial_vectors, run.config, self._layout))
            workload = LoopWorkload(worker, run)
            keeping = Keeping(await workload.state_digest())
            driver = Driver(self._identity, transport, workload, run.settings, keeping)
            volunteer = Volunteer(run, driver, transport, workload)
            volunteer.admitted_by(entrance)
            loop = asyncio.get_running_loop()
            self._joining.set_result(_Joined(run, worker, lambda: _call(loop, volunteer.leave)))
            await volunteer.train()


class LoopWorkload(TrainingWorkload):
    """Trains in the caller's loop, and tells it when the run is over."""

    def __init__(self, worker: LoopWorker, run: Run) -> None:
        super().__init__(worker, run.config)
        self._worker = worker
        self._outer_steps = run.config.total_outer_steps

    async def train(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        if work.index >= self._outer_steps:
            self._worker.end()
            await asyncio.Event().wait()
        return await super().train(work, on_progress)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


def initial_vectors(config: RunConfig, layout: Layout) -> SharedVectors:
    """With the weights that the run begins with, for a model of this layout.

    Raises: ManifestError when the run's model has another; MachineError without memory; see `check_initial_weights`.
    """
    model = build_model(config, build_tokenizer(config.tokenizer))
    _check_layout(layout, layout_of(model))
    vectors = SharedVectors.create(layout.size)
    store_weights(model, vectors.theta)
    check_initial_weights(vectors.theta, config.model)
    return vectors


def _check_layout(own: Layout, runs: Layout) -> None:
    remedy = "Build the model as the run's manifest says: `diloco-peer run show` prints it."
    for ours, theirs in zip(own, runs, strict=False):
        if ours.shape != theirs.shape:
            raise ManifestError(
                f"the model's parameter {ours.name} has the shape {ours.shape}; the run's {theirs.name} has "
                f"{theirs.shape}.",
                remedy,
            )
    if own.size != runs.size:
        raise ManifestError(f"the model has {own.size} trainable values; the run's has {runs.size}.", remedy)
