"""The workload of a peer that trains: a trainer of inner steps, and the outer state with its arithmetic.

Heavy arithmetic runs in threads, so that the event loop never waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from opendiloco.config.model import check_initial_weights
from opendiloco.config.overrides import Overrides
from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.evaluation_turns import HeldOut, is_our_turn
from opendiloco.kernels import Payload
from opendiloco.run import Run
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.codec import Residual, RunRounding
from opendiloco.training.outer import LocalState, OuterStepMeter
from opendiloco.training.streaming import FragmentWork
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import WorkersRestartedError
from opendiloco.workers.telemetry import Telemetry
from peers.errors import DilocoPeerError
from peers.metrics import HEALTH
from peers.presence.heartbeat import HeldOutLoss
from peers.values.manifest import Amendment
from peers.values.workload import Blocked, Blocks, InnerLoop, OnCaptured, Progress, Reduction, Trained, captures_nothing

if TYPE_CHECKING:
    from peers.driver.driver import Driver

logger = logging.getLogger(__name__)

NO_TRAINING = WorkerOptions(trains=False, threads=None)
NO_TEXT = replace(NO_TRAINING, reads=False)


class InnerTrainer(Protocol):
    """The object that takes the inner steps: the machine's workers, or the training loop of a researcher's own
    program."""

    vectors: SharedVectors
    fragments: Sequence[slice]
    """The slice of each fragment in the vectors."""
    device: str
    telemetry: Telemetry

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        """Train on a lease, and store the trained weights in `vectors.local`. See
        `peers.values.workload.Workload.run_inner_loop`.

        The training begins from theta, from `vectors.local` if `from_local`, or from the end of the previous training
        if it `goes_on`.

        Raises: WorkersRestartedError when all of the training is lost, but can be repeated.
        """

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """Inform the training that a fragment's average is decided. If `is_changed`, an outer step has changed the
        fragment, and the new values are in `vectors.local`; otherwise there is nothing to merge."""

    def end_rest(self) -> None:
        """Skip the inner steps of the last training that have not been taken yet."""

    async def held_out(self, section: EvaluationSection) -> HeldOut | None:
        """Return theta's loss on held-out text, or None if the trainer cannot compute it. Callers must not call this
        during training."""

    async def wait_for_death(self) -> DilocoPeerError:
        """Wait until the trainer can no longer train, and return the error that the caller must raise."""


InnerTrainer_co = TypeVar("InnerTrainer_co", bound=InnerTrainer, covariant=True)


class TrainerWorkload(Generic[InnerTrainer_co]):
    """An implementation of `peers.values.workload.Workload` for any trainer.

    It trains until the run's last outer step, as the amendment in force defines it. After that the peer stays, to serve
    the finished state. No later entry can contain an amendment.
    """

    def __init__(
        self,
        trainer: InnerTrainer_co,
        config: RunConfig,
        run_is_over: Callable[[int], object] = lambda outer_steps: None,
    ) -> None:
        """Create the workload, whose momentum is zero. `run_is_over` is called with the run's number of outer steps
        when the run's training is complete."""
        self.trainer = trainer
        vectors = trainer.vectors
        self._state = state = LocalState(vectors.theta, config, trainer.fragments)
        self._rounding = RunRounding(config.codec)
        self._config = config
        self._run_is_over = run_is_over
        self._streams = not config.streaming.is_plain
        self._fragments = [
            FragmentWork(
                vectors.theta[part], vectors.local[part], codec, Residual(config.codec, codec.values), self._streams
            )
            for part, codec in zip(state.outer.fragments, state.fragments, strict=True)
        ]
        self._work = InnerLoop(0, (), 0, 0)  # the current training, or else the last one
        # The outer step for which the last training began or, once an average contains the work of this training, the
        # outer step of that average.
        self._ended_at: int | None = None
        self._index: int | None = None  # outer step of the last training, if workers can continue from its end
        self._state_lock = asyncio.Lock()  # held while theta changes or is copied
        self.is_our_turn: Callable[[], bool] = lambda: False
        self.on_evaluated: Callable[[HeldOutLoss], None] = lambda held_out: None
        own = [lambda work=work: work.payload for work in self._fragments]
        self.measuring = OuterStepMeter(state.outer, own, trains_on=config.streaming.overlap > 0)
        self.folder: Path | None = None
        """The folder for a large residual; see `Residual.to_add`."""

    # The state -------------------------------------------------------------------------------------------------------
    @property
    def fragments(self) -> Sequence[Blocked]:
        return self._state.fragments

    @property
    def state_size(self) -> int:
        return self._state.state_size

    async def state_digest(self) -> bytes:
        return await self._state.state_digest()

    async def copy_state(self, out: memoryview) -> None:
        await self._state.copy_state(out)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Replace the state by a snapshot's bytes. Raises: SnapshotError, without changing the state."""
        async with self._state_lock:
            await self.measuring.finished()
            await self._state.restore(state, state_digest)
            for work in self._fragments:
                work.begin()
                work.residual.forget()
            self.measuring.forget()
            self._end()

    # Training --------------------------------------------------------------------------------------------------------
    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        goes_on = self._begin(work.index)
        try:
            await self._take_turn(work.index)
            if work.index >= Overrides.of(work.amendment, self._config).total_outer_steps(self._config):
                self._run_is_over(work.index)
                await asyncio.Event().wait()
            self.measuring.forget()
            for fragment in self._fragments:
                fragment.residual.forget_unanswered()
                if self._ended_at not in (work.index - 1, work.index):
                    fragment.residual.forget()
            self._work, self._ended_at = work, work.index
            return await self._train(work, on_progress, on_captured, goes_on)
        except BaseException:
            self._end()
            raise

    def _begin(self, index: int) -> bool:
        """Begin the training for outer step `index`. Return True if the workers continue from their present
        weights, or False if they begin with theta.

        They continue in a run that streams, if this training follows their last one and all of its fragments were
        handed over.
        """
        follows = self._index is not None and self._ended_at == index - 1
        goes_on = follows and all(work.is_handed_over for work in self._fragments)
        for work in self._fragments:
            work.begin_training(from_theta=not goes_on)
        self._index = index
        if not goes_on:
            self.trainer.end_rest()  # otherwise an evaluation would wait for the last training's remaining steps
        return goes_on

    def _end(self) -> None:
        """End the current training, so that the next one begins with theta."""
        self._index = None
        self.trainer.end_rest()

    async def _train(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured, goes_on: bool
    ) -> Trained:
        """Train on a lease. When workers are lost and replaced, repeat the training, from the same theta.

        In a run that streams, fragments of theta may change before the workers have loaded them. The workers therefore
        begin with the bases, unless they go on from their present weights.
        """

        async def captured(fragment: int) -> None:
            if not self._fragments[fragment].is_captured:
                await on_captured(fragment)
            await self._stored(fragment)

        if goes_on or not self._streams:
            with suppress(WorkersRestartedError):
                return await self.trainer.run_inner_loop(work, on_progress, captured, goes_on=goes_on)
        while True:
            for fragment in self._fragments:
                fragment.begin_again()
            async with self._state_lock:
                # Workers begin with the theta from which each fragment's pseudo-gradient is computed, which is not the
                # present theta if an outer step has changed the fragment since.
                for fragment in self._fragments:
                    await asyncio.to_thread(np.copyto, fragment.local, fragment.base)
            with suppress(WorkersRestartedError):
                return await self.trainer.run_inner_loop(work, on_progress, captured, from_local=True)

    # An outer step ---------------------------------------------------------------------------------------------------
    async def contribution(self, fragment: int = 0, format: int = 0) -> Blocks:
        """Encode and return this peer's contribution to a fragment. Raises: WorkerError when its trained weights are
        not finite."""
        await self.measuring.finished()
        self.measuring.trained(fragment)
        work = self._fragments[fragment]
        rounding = self._rounding.of_contribution(self._work.index, fragment, self._work.samples, format)
        await asyncio.to_thread(work.encode, rounding, format, self.folder)
        work.is_encoded = True
        if self._streams and fragment == len(self._fragments) - 1:
            await self._stored(fragment)
        return work.payload.buffer

    async def reduce(self, reduction: Reduction) -> Blocks:
        return await asyncio.to_thread(
            self._fragments[reduction.fragment].codec.average,
            *(reduction.contributions, reduction.first_block, reduction.out, reduction.tokens),
            self._rounding.of_average(reduction.index, reduction.fragment, reduction.first_block),
            reduction.formats,
        )

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        return self._fragments[fragment].codec.squared_norm(blocks, first_block, format)

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        """Apply the average `payload` to a fragment, in outer step `index`. Raises: BadBlocksError, AmendmentError,
        both without changing the state."""
        work, overrides = self._fragments[fragment], Overrides.of(amendment, self._config)
        async with self._state_lock:
            await self.measuring.finished()
            average = await asyncio.to_thread(self._apply, payload, index, fragment, keeps_work, overrides)
            if counts:
                await asyncio.to_thread(work.residual.take_back, work.payload, average)
                self._ended_at = index if fragment == len(self._fragments) - 1 else self._ended_at
            elif not keeps_work:  # work that is kept may still be in a later entry
                await asyncio.to_thread(work.residual.forget)
            self.measuring.taken(average, index, fragment, keeps_work, overrides)
            await self._decided(index, fragment, is_changed=True)

    def _apply(self, payload: Blocks, index: int, fragment: int, keeps_work: bool, overrides: Overrides) -> Payload:
        """Apply an average to a fragment, and return the average. If a later average may contain this peer's work, copy
        theta before, because the work's pseudo-gradient is computed from it; otherwise drop an earlier copy."""
        work = self._fragments[fragment]
        average = work.codec.checked(payload)
        is_awaited = self._waits_for(index) and work.is_stored and work.is_changed is None
        if (keeps_work or self._workers_continue(work)) and not is_awaited:
            work.keep_base()
        else:
            work.drop_base()
        self._state.outer.apply(average, index, fragment, overrides)
        return average

    async def unchanged(self, index: int, fragment: int) -> None:
        work = self._fragments[fragment]
        if not self._workers_continue(work):  # if they continue, a later entry may contain this contribution
            work.residual.forget()
        async with self._state_lock:
            await self._decided(index, fragment, is_changed=False)

    # Handing fragments over ------------------------------------------------------------------------------------------
    def _waits_for(self, index: int) -> bool:
        return self._index is not None and index >= self._index

    def _workers_continue(self, work: FragmentWork) -> bool:
        """Return True if the workers know if an outer step has changed this fragment, and continue their training.

        Their next pseudo-gradient is computed from the theta at which they continued, even if a later entry contains
        the stored work.
        """
        return self._index is not None and work.is_handed_over

    async def _stored(self, fragment: int) -> None:
        """Record that a fragment's weights from all workers are in `vectors.local`, and that they are encoded."""
        work = self._fragments[fragment]
        work.is_captured = work.is_stored = True
        if work.is_changed is not None:
            async with self._state_lock:
                await self._hand_over(fragment)

    async def _decided(self, index: int, fragment: int, is_changed: bool) -> None:
        """Record that outer step `index` has changed a fragment, or has left the fragment unchanged. The caller must
        hold the lock."""
        work = self._fragments[fragment]
        if self._streams and self._waits_for(index) and work.decide(is_changed) and work.is_stored:
            await self._hand_over(fragment)

    async def _hand_over(self, fragment: int) -> None:
        index, work = self._index, self._fragments[fragment]
        is_changed = bool(work.is_changed)
        if is_changed:
            await asyncio.to_thread(work.take_theta)
        if index != self._index or not work.is_stored:
            return  # the training has ended, or replacements of lost workers must store the fragment again
        await self.trainer.take_average(fragment, is_changed)
        work.is_handed_over = True

    # Evaluating theta ------------------------------------------------------------------------------------------------
    def take_turns(self, driver: Driver, me: str) -> None:
        """Let this peer evaluate theta, and publish the loss, whenever the log chooses this peer to do so."""
        self.is_our_turn = lambda: is_our_turn(me, driver.peer.log, self._config.evaluation)
        self.on_evaluated = driver.evaluated

    async def _take_turn(self, index: int) -> None:
        """Evaluate theta after outer step `index`, if the log chooses this peer to do so. Publish the loss if it is on
        the run's own text."""
        if not self.is_our_turn() or (found := await self.trainer.held_out(self._config.evaluation)) is None:
            return
        if not math.isfinite(found.loss):
            logger.warning("the held-out loss after outer step %d is %s; it is not published", index, found.loss)
            return
        held_out = HeldOutLoss(index=index, loss=found.loss)
        self.trainer.telemetry.evaluated(held_out, found.is_runs_text)
        if found.is_runs_text:
            self.on_evaluated(held_out)


LocalWorkload: TypeAlias = TrainerWorkload[WorkerGroup]
"""A workload with the machine's workers, which can also evaluate, generate and export."""


@asynccontextmanager
async def working(run: Run, options: WorkerOptions = NO_TRAINING) -> AsyncIterator[LocalWorkload]:
    """Start workers, and yield a run's workload that uses them, in the run's initial state. End the workers after the
    `with` block.

    Raises: see `WorkerGroup.start` and `check_initial_weights`.
    """
    workers = await WorkerGroup.start(run.config, options, run.has_runs_text)
    try:
        await asyncio.to_thread(check_initial_weights, workers.vectors.theta, run.config.model)
        yield TrainerWorkload(workers, run.config)
    finally:
        HEALTH.forget("workers")
        await workers.close()
