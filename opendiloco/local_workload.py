"""The training side as the swarm sees it: the machine's workers, and the kernels between them and the state.

Heavy arithmetic runs in threads, so that the event loop never waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.errors import WorkerError
from opendiloco.evaluation_turns import bits_per_byte, is_our_turn
from opendiloco.kernels import Payload
from opendiloco.model.card import RunFacts
from opendiloco.model.export import Dtype
from opendiloco.model.initial_weights import check_initial_weights
from opendiloco.outer.bases import Bases
from opendiloco.outer.handover import Handover
from opendiloco.outer.measuring import Measuring
from opendiloco.outer.residuals import Residuals
from opendiloco.outer.state import LocalState
from opendiloco.shared_memory import SharedVectors
from opendiloco.workers.control import Evaluated
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from opendiloco.workers.restarts import WorkersRestartedError
from opendiloco.workers.telemetry import Telemetry
from peers.errors import DilocoPeerError
from peers.health import HEALTH
from peers.presence.heartbeat import HeldOutLoss
from peers.values.amendments import Amendment
from peers.values.workload import Blocks, InnerLoop, OnCaptured, Progress, Reduction, Trained, captures_nothing

if TYPE_CHECKING:
    from peers.driver.driver import Driver

logger = logging.getLogger(__name__)


class LocalTrainer(Protocol):
    """Whoever makes the inner steps: the machine's workers, or one's own loop."""

    vectors: SharedVectors
    fragments: Sequence[slice]
    """Where each lies in the vectors."""
    device: str
    telemetry: Telemetry

    async def run_inner_loop(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        """See `peers.values.workload.Workload.run_inner_loop`. What came of it is in `vectors.local`."""

    async def wait_for_death(self) -> DilocoPeerError:
        """Returns what to raise once it cannot train any more."""


class HeldOut(NamedTuple):
    """theta's loss on held-out text, and whether that is the text that the run means."""

    loss: float
    is_runs_text: bool


class TrainingWorkload(LocalState):
    """Implements `peers.values.workload.Workload`, whoever trains.

    Trains until the run's last outer step. After that its peer stays, to hand out the finished state.
    """

    def __init__(self, trainer: LocalTrainer, config: RunConfig) -> None:
        super().__init__(trainer.vectors.theta, config, trainer.fragments)
        self.trainer = trainer
        self._outer_steps = config.total_outer_steps
        self._contributions = [codec.empty_payload() for codec in self._codecs]
        self._streams = not config.streaming.is_plain
        self._bases = Bases(self._state, outlives_encoding=self._streams)
        self._work = InnerLoop(0, (), 0, 0)  # what is trained, or has been
        self._ended_at: int | None = None  # the outer step that has had all of it, or else that it was trained for
        self._residuals = Residuals(config.codec.error_feedback, self._state.fragments)
        self.is_our_turn: Callable[[], bool] = lambda: False
        self.on_evaluated: Callable[[HeldOutLoss], None] = lambda held_out: None
        self.measuring = Measuring(self._state, self._contributions, trains_on=config.streaming.overlap > 0)

    def take_turns(self, driver: Driver, me: str, section: EvaluationSection) -> None:
        """Evaluate theta whenever the log says that it is this peer's turn, and tell the others."""
        self.is_our_turn = lambda: is_our_turn(me, driver.peer.log, section)
        self.on_evaluated = driver.evaluated

    async def _take_turn(self, index: int) -> None:
        """Evaluate theta at outer step `index`, if it is our turn. The others hear of a loss of the run's text only."""
        if not self.is_our_turn() or (found := await self.held_out()) is None:
            return
        if not math.isfinite(found.loss):
            logger.warning("the held-out loss after outer step %d is %s: nobody is told", index, found.loss)
            return
        held_out = HeldOutLoss(index=index, loss=found.loss)
        self.trainer.telemetry.evaluated(held_out, found.is_runs_text)
        if found.is_runs_text:
            self.on_evaluated(held_out)

    async def held_out(self) -> HeldOut | None:
        """Return theta's loss on held-out text; None if whoever trains cannot say. Not while training."""
        return None

    def run_is_over(self) -> None:
        """Hear that there is nothing more to train."""

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        await self._take_turn(work.index)
        if work.index >= self._outer_steps:
            self.run_is_over()
            await asyncio.Event().wait()
        self.measuring.forget()
        self._residuals.forget_unanswered()
        if self._ended_at not in (work.index - 1, work.index):
            self._residuals.forget_all()
        self._work, self._ended_at = work, work.index
        return await self._inner_loop(work, on_progress, on_captured)

    async def _inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured
    ) -> Trained:
        self._bases.begin_all()
        return await self.trainer.run_inner_loop(work, on_progress)

    async def contribution(self, fragment: int = 0) -> Blocks:
        """Raises: WorkerError when the weights that training left are not finite."""
        await self.measuring.finished()
        self.measuring.trained(fragment)
        encode, out = self._codecs[fragment].encode_difference, self._contributions[fragment]
        local = self.trainer.vectors.local[self._state.fragments[fragment]]
        rounding = self._rounding.of_contribution(self._work.index, fragment, self._work.samples)
        try:
            residual = await asyncio.to_thread(self._residuals.of, fragment)
            await asyncio.to_thread(encode, self._bases.of(fragment), local, out, rounding, residual)
        except kernels.NonFiniteError as error:
            raise WorkerError(f"the trained weights are unusable: {error.message}", error.remedy) from error
        self._bases.encoded(fragment)
        return out.buffer

    async def reduce(self, reduction: Reduction) -> Blocks:
        return await asyncio.to_thread(
            self._codecs[reduction.fragment].average,
            *(reduction.contributions, reduction.first_block, reduction.out, reduction.tokens),
            self._rounding.of_average(reduction.index, reduction.fragment, reduction.first_block),
        )

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0) -> float:
        return self._codecs[fragment].squared_norm(blocks, first_block)

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
        """Raises: BadBlocksError, and changes nothing."""
        await self.measuring.finished()
        await asyncio.to_thread(self._apply_beside_work, payload, index, fragment, keeps_work, amendment)
        if counts:
            own = self._contributions[fragment]
            await asyncio.to_thread(self._residuals.take_back, fragment, own, Payload(own.format, own.values, payload))
            self._ended_at = index if fragment == len(self._contributions) - 1 else self._ended_at
        elif not keeps_work:  # else a later entry may take our payload
            await asyncio.to_thread(self._residuals.forget, fragment)
        self.measuring.taken(payload, index, fragment, keeps_work, amendment)

    async def unchanged(self, index: int, fragment: int) -> None:
        """Nobody waits for a fragment here, where there is one."""
        self._residuals.forget(fragment)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Raises: SnapshotError, and changes nothing."""
        await self.measuring.finished()
        await super().restore(state, state_digest)
        self._bases.begin_all()
        self._residuals.forget_all()
        self.measuring.forget()

    def _apply_beside_work(
        self, payload: Blocks, index: int, fragment: int, keeps_work: bool, amendment: Amendment | None
    ) -> None:
        checked = self._codecs[fragment].checked(payload)
        if keeps_work:
            self._bases.keep(fragment)
        else:
            self._bases.drop(fragment)
        self._state.apply(checked, index, fragment, amendment)


class LocalWorkload(TrainingWorkload):
    """With the machine's workers, which can do more with a model than train it."""

    def __init__(self, workers: WorkerGroup, config: RunConfig) -> None:
        super().__init__(workers, config)
        self.workers = workers
        self._windows, self._held_out_digest = config.evaluation.windows, config.evaluation.digest
        self.reads_runs_text = True
        """See `Run.has_runs_text`."""
        self._goes_on = False  # whether workers go on from where they are
        self._state_lock = asyncio.Lock()
        """Held while theta changes, or a part of it is copied."""
        self._handover = Handover(
            self._state, self._bases, workers.vectors.local, self._state_lock, workers.take_average
        )

    @classmethod
    async def start(cls, config: RunConfig, options: WorkerOptions | None = None) -> Self:
        """With fresh workers, and the run's initial state.

        Raises: see `WorkerGroup.start` and `check_initial_weights`.
        """
        workers = await WorkerGroup.start(config, options)
        try:
            await asyncio.to_thread(check_initial_weights, workers.vectors.theta, config.model)
        except BaseException:
            await workers.close()
            raise
        return cls(workers, config)

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        follows = self._ended_at == work.index - 1
        self._goes_on = self._handover.begin(work.index, follows) and self._streams
        if not self._goes_on:
            self.workers.end_rest()  # or it may keep us waiting when it is our turn to evaluate
        try:
            return await super().run_inner_loop(work, on_progress, on_captured)
        except BaseException:
            self._handover.end()
            self.workers.end_rest()
            raise

    async def _inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured
    ) -> Trained:
        """Train again from the same bases, for as long as new workers take the place of lost ones.

        In a run that streams fragments of theta may change before workers have loaded them, so that they begin with the
        bases, unless they go on from where they are.
        """

        async def captured(fragment: int) -> None:
            if not self._handover.is_encoded(fragment):
                await on_captured(fragment)
            await self._handover.stored(fragment)

        if self._goes_on or not self._streams:
            with suppress(WorkersRestartedError):
                return await self.workers.run_inner_loop(work, on_progress, captured, goes_on=self._goes_on)
        while True:
            self._handover.begin_again()
            async with self._state_lock:
                await asyncio.to_thread(self._put_bases_into_local)
            with suppress(WorkersRestartedError):
                return await self.workers.run_inner_loop(work, on_progress, captured, from_local=True)

    async def contribution(self, fragment: int = 0) -> Blocks:
        contribution = await super().contribution(fragment)
        self._handover.read(fragment)
        if self._streams and fragment == len(self._codecs) - 1:
            await self._handover.stored(fragment)
        return contribution

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
        async with self._state_lock:
            await super().apply(payload, index, fragment, keeps_work, counts, amendment=amendment)
            if self._streams:
                await self._handover.decided(index, fragment, is_changed=True)

    async def unchanged(self, index: int, fragment: int) -> None:
        if not self._handover.has_told(fragment):  # else a later entry may take our payload
            await super().unchanged(index, fragment)
        if self._streams:
            async with self._state_lock:
                await self._handover.decided(index, fragment, is_changed=False)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        async with self._state_lock:
            await super().restore(state, state_digest)
            self._handover.end()
            self.workers.end_rest()

    async def evaluate(self) -> Evaluated:
        """Return the loss of theta on the run's held-out windows: as many as the manifest says, whoever asks. Not while
        training."""
        return await self.workers.evaluate(self._windows)

    async def held_out(self) -> HeldOut:
        return HeldOut((await self.evaluate()).loss, self.has_held_out_text)

    @property
    def has_held_out_text(self) -> bool:
        """Whether this machine has the held-out text that the run means, as far as can be known."""
        return self.reads_runs_text and self._held_out_digest in (None, self.workers.held_out_digest)

    def bits_per_byte(self, loss: float) -> float:
        """Return a loss on the held-out text in bits per byte of it."""
        return bits_per_byte(loss, self.workers.bytes_per_token)

    async def generate(self, prompt: str, tokens: int, seed: int = 0, temperature: float = TEMPERATURE) -> str:
        """What theta makes of a prompt. Not while training."""
        return await self.workers.generate(prompt, tokens, seed, temperature)

    async def export(self, folder: Path, facts: RunFacts, dtype: Dtype = "float32") -> None:
        """Write theta as a model folder. Not while training."""
        await self.workers.export(folder, facts, dtype)

    async def close(self) -> None:
        """End the workers."""
        HEALTH.over("workers")
        await self.workers.close()

    def _apply_beside_work(
        self, payload: Blocks, index: int, fragment: int, keeps_work: bool, amendment: Amendment | None
    ) -> None:
        keeps_work = keeps_work or self._handover.has_told(fragment)
        keeps_work = keeps_work and not self._handover.hands_over(index, fragment)
        super()._apply_beside_work(payload, index, fragment, keeps_work, amendment)

    def _put_bases_into_local(self) -> None:
        """The theta that training began with. An entry may be applied meanwhile, but keeps the base before it does."""
        for fragment, part in enumerate(self._state.fragments):
            np.copyto(self.workers.vectors.local[part], self._bases.of(fragment))
