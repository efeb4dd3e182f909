"""The training side as the swarm sees it: the machine's workers, and the kernels between them and the state.

Heavy arithmetic runs in threads, so that the event loop never waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.errors import WorkerError
from opendiloco.evaluation_turns import bits_per_byte, is_our_turn
from opendiloco.model.card import RunFacts
from opendiloco.model.export import Dtype
from opendiloco.model.initial_weights import check_initial_weights
from opendiloco.outer.inner_state import InnerState
from opendiloco.outer.state import LocalState
from opendiloco.outer.statistics import OuterStatistics, measure
from opendiloco.shared_memory import SharedVectors, Vector
from opendiloco.workers.control import Evaluated
from opendiloco.workers.group import WorkerGroup, WorkersRestartedError
from opendiloco.workers.nodes import Nodes
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from opendiloco.workers.telemetry import Telemetry
from peers.errors import DilocoPeerError
from peers.health import HEALTH
from peers.presence.heartbeat import HeldOutLoss
from peers.values.workload import Blocks, InnerLoop, OnCaptured, Progress, Reduction, Trained, captures_nothing

if TYPE_CHECKING:
    from peers.driver.driver import Driver

logger = logging.getLogger(__name__)


class LocalTrainer(Protocol):
    """Whoever makes the inner steps: the machine's workers, or one's own loop."""

    vectors: SharedVectors
    device: str
    telemetry: Telemetry

    async def train(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        """See `peers.values.workload.Workload.train`. What came of it is in `vectors.local`."""

    async def wait_for_death(self) -> DilocoPeerError:
        """Returns what to raise once it cannot train any more."""


class HeldOut(NamedTuple):
    """theta's loss on held-out text, and whether that is the text that the run means."""

    loss: float
    is_runs_text: bool


@dataclass(frozen=True)
class OuterStepTaken:
    """An outer step's statistics; `pause_seconds` from the end of training to the new theta, NaN where this machine
    trained on meanwhile."""

    index: int
    learning_rate: float
    pause_seconds: float
    statistics: OuterStatistics


class TrainingWorkload(LocalState):
    """Implements `peers.values.workload.Workload`, whoever trains.

    Trains until the run's last outer step. After that its peer stays, to hand out the finished state.
    """

    def __init__(self, trainer: LocalTrainer, config: RunConfig) -> None:
        super().__init__(trainer.vectors.theta, config)
        self.trainer = trainer
        self._outer_steps = config.total_outer_steps
        self._contribution = self._codec.empty_payload()
        self._base: Vector | None = None  # theta as training loaded it, if entries were applied since
        self._needs_base = True  # until what has been trained is encoded
        self.is_our_turn: Callable[[], bool] = lambda: False
        self.on_evaluated: Callable[[HeldOutLoss], None] = lambda held_out: None
        self.on_outer_step: Callable[[OuterStepTaken], None] | None = None
        """Told of each outer step that is taken while somebody listens, a moment after it."""
        self._trained_at: float | None = None  # when the contribution was encoded that no outer step has had yet
        self._measuring: asyncio.Task[None] | None = None

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

    async def train(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        await self._take_turn(work.index)
        if work.index >= self._outer_steps:
            self.run_is_over()
            await asyncio.Event().wait()
        self._base, self._needs_base, self._trained_at = None, True, None
        return await self._inner_loop(work, on_progress)

    async def _inner_loop(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        return await self.trainer.train(work, on_progress)

    async def contribution(self, fragment: int = 0) -> Blocks:
        """Raises: WorkerError when the weights that training left are not finite."""
        await self._measured()
        self._trained_at = time.monotonic()
        base = self._state.theta if self._base is None else self._base
        try:
            await asyncio.to_thread(self._codec.encode_difference, base, self.trainer.vectors.local, self._contribution)
        except kernels.NonFiniteError as error:
            raise WorkerError(f"the trained weights are unusable: {error.message}", error.remedy) from error
        self._base, self._needs_base = None, False
        return self._contribution.buffer

    async def reduce(self, reduction: Reduction) -> Blocks:
        return await asyncio.to_thread(
            self._codec.average, reduction.contributions, reduction.first_block, reduction.out, reduction.tokens
        )

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0) -> float:
        return self._codec.squared_norm(blocks, first_block)

    async def apply(self, payload: Blocks, index: int, fragment: int = 0, keeps_work: bool = False) -> None:
        """Raises: BadBlocksError, and changes nothing."""
        await self._measured()
        await asyncio.to_thread(self._apply_beside_work, payload, index, keeps_work)
        if self.on_outer_step is not None:
            trained_at = None if keeps_work else self._trained_at
            self._measuring = asyncio.create_task(self._measure(payload, index, trained_at, self.on_outer_step))
        if not keeps_work:
            self._trained_at = None

    async def unchanged(self, index: int, fragment: int) -> None:
        """Nobody waits for a fragment here, where there is one."""

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Raises: SnapshotError, and changes nothing."""
        await self._measured()
        await super().restore(state, state_digest)
        self._base = self._trained_at = None

    async def _measure(
        self, payload: Blocks, index: int, trained_at: float | None, tell: Callable[[OuterStepTaken], None]
    ) -> None:
        """Measure an outer step that has just been taken, beside whatever comes next, and tell of it."""
        pause = math.nan if trained_at is None else time.monotonic() - trained_at
        average = kernels.Payload(self._codec.format, self.parameter_count, payload)
        own = None if trained_at is None else self._contribution
        statistics = await asyncio.to_thread(measure, average, self._state.momentum, own)
        tell(OuterStepTaken(index, self._state.learning_rate(index), pause, statistics))

    async def _measured(self) -> None:
        """Wait until nobody reads the momentum and the contribution of the last outer step any more."""
        if self._measuring is not None:
            await asyncio.wait([self._measuring])
            self._measuring = None

    def _apply_beside_work(self, payload: Blocks, index: int, keeps_work: bool) -> None:
        checked = self._codec.checked(payload)
        if not keeps_work:
            self._base = None
        elif self._base is None and self._needs_base:
            self._base = self._state.theta.copy()
        self._state.apply(checked, index)


class LocalWorkload(TrainingWorkload):
    """With the machine's workers, which can do more with a model than train it."""

    def __init__(self, workers: WorkerGroup, config: RunConfig) -> None:
        super().__init__(workers, config)
        self.workers = workers
        self._windows, self._held_out_digest = config.evaluation.windows, config.evaluation.digest
        self.reads_runs_text = True
        """See `Run.has_runs_text`."""
        copies = config.inner_optimizer.on_join == "copy"
        self.companion = InnerState(workers, config) if copies else None

    @classmethod
    async def start(cls, config: RunConfig, options: WorkerOptions | None = None, nodes: Nodes | None = None) -> Self:
        """With fresh workers, on this machine and other nodes, and the run's initial state.

        Raises: see `WorkerGroup.start` and `check_initial_weights`.
        """
        workers = await WorkerGroup.start(config, options, nodes)
        try:
            await asyncio.to_thread(check_initial_weights, workers.vectors.theta, config.model)
        except BaseException:
            await workers.close()
            raise
        return cls(workers, config)

    async def _inner_loop(self, work: InnerLoop, on_progress: Callable[[Progress], None]) -> Trained:
        """Train again from the same base, for as long as new workers take the place of lost ones."""
        with suppress(WorkersRestartedError):
            return await super()._inner_loop(work, on_progress)
        while True:
            await asyncio.to_thread(self._put_base_into_local)
            with suppress(WorkersRestartedError):
                return await self.workers.train(work, on_progress, from_local=True)

    async def apply(self, payload: Blocks, index: int, fragment: int = 0, keeps_work: bool = False) -> None:
        await self.workers.weights.theta_is_sent()  # or a machine would get some of the old theta, some of the new
        await super().apply(payload, index, fragment, keeps_work)

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

    def _put_base_into_local(self) -> None:
        """The theta that training began with. An entry may be applied meanwhile, but keeps the base before it does."""
        local = self.workers.vectors.local
        np.copyto(local, self._state.theta)
        if self._base is not None:
            np.copyto(local, self._base)
