"""A volunteer's workers as a group, which the peer process asks to train, evaluate, generate text and export."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.errors import MachineError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.model.export import Dtype, RunFacts
from opendiloco.shared_memory import SharedVectors
from opendiloco.workers.control import (
    Answer,
    ControlMessage,
    EndInnerLoop,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    FragmentStored,
    Generate,
    Generated,
    InnerLoopDone,
    InnerStepDone,
    Report,
    RunInnerLoop,
    TakeAverage,
)
from opendiloco.workers.options import AUTO, TEMPERATURE, WorkerOptions, parse_overlap
from opendiloco.workers.supervisor import Supervisor, WorkersRestartedError
from opendiloco.workers.telemetry import Telemetry
from peers.errors import DilocoPeerError
from peers.values.system import start_task
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing

logger = logging.getLogger(__name__)

SEEN = 4
"""Number of newest trainings from which an "auto" overlap is computed, so that it stays longer for a while after a slow
average."""


class WorkerGroup:
    """All workers of a volunteer, started and configured. They carry out one request after the other. Create a group
    with `start`, and end it with `close`."""

    vectors: SharedVectors
    fragments: Sequence[slice]
    device: str
    telemetry: Telemetry
    held_out_digest: str
    reads_runs_text = True
    reads = True  # False if the workers open no text; their held-out loss is meaningless then
    bytes_per_token: float
    under_way: TrainingRecord | None = None  # the newest training, running or ended

    def __init__(self, config: RunConfig, options: WorkerOptions, reads_runs_text: bool) -> None:
        self.reads_runs_text = reads_runs_text
        self.reads = options.reads
        self._config = config
        self.overlap = Overlap(config, options.overlap)
        self.supervisor = Supervisor(config, options)
        self._has_overlap = config.streaming.overlap > 0
        self._trainings = 0

    @classmethod
    async def start(
        cls, config: RunConfig, options: WorkerOptions | None = None, reads_runs_text: bool = True
    ) -> WorkerGroup:
        """Start and configure the workers. `reads_runs_text` is true if they read the text that the run defines.
        Raises: the errors of `Supervisor.start`."""
        options = options or WorkerOptions()
        group = cls(config, options, reads_runs_text)
        supervisor = group.supervisor
        try:
            configured = await supervisor.start()
        except BaseException:
            await group.close()
            raise
        group.vectors = SharedVectors(supervisor.memory_descriptor, configured.parameters)
        group.fragments = [slice(*part) for part in configured.fragments]
        group.device = supervisor.pool.device
        group.held_out_digest = configured.held_out_digest
        group.bytes_per_token = configured.bytes_per_token
        group.telemetry = Telemetry.of(config, options, configured, len(supervisor.workers))
        return group

    # Training --------------------------------------------------------------------------------------------------------
    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        """Carry out the training `work`, write all fragments to `vectors.local`, and return the trained samples, their
        tokens and the mean loss. If cancelled, stop the workers within one inner step.

        In a run with an overlap, the workers still have inner steps to take when this returns. They take them before
        any other request.

        The training begins from theta, from `vectors.local` if `from_local`, or from the end of these workers' last
        training if it `goes_on`. For each captured fragment, the workers wait for `take_average`.

        Raises: WorkersRestartedError when a worker died or failed, or a device ran out of memory, and replacements are
        running, also when that happened before and the training `goes_on`. WorkerError and DeviceMemoryError when that
        happened too often. WorkerError also when most losses are not finite. AmendmentError.
        """
        before = self.under_way
        if not goes_on:
            self.end_rest()
        self._trainings += 1
        number, overlap = self._trainings, self.overlap.steps
        command = RunInnerLoop.of(
            work, self._config, number=number, overlap=overlap, from_local=from_local, goes_on=goes_on
        )

        def on_step(step: InnerStepDone) -> None:
            self.telemetry.progressed(work.index, step)
            number = 0 if under_way.is_known else step.inner_step  # 0: the training's result is already returned
            on_progress(Progress(number, step.loss, step.tokens_per_second))

        async def carry_out() -> InnerLoopDone:
            if before is not None and goes_on:
                before.check_rest()
            try:
                done = await self.supervisor.ask(command, InnerLoopDone, on_report=under_way.heard)
            except DilocoPeerError as error:
                if under_way.is_known:
                    logger.warning(
                        "in the training after outer step %d, the inner steps after the last capture failed, and their "
                        "work is lost: %s",
                        work.index,
                        error.message,
                    )
                raise
            if under_way.is_wanted:
                self.telemetry.trained(work.index, done)
                self.overlap.learn(done)
            return done

        supervisor, fragments = self.supervisor, len(self.fragments)
        self.under_way = under_way = TrainingRecord(lambda: len(supervisor.workers), fragments, on_step, on_captured)
        request = supervisor.requests.add(carry_out)
        stored = await under_way.result(request, lambda: self._tell(EndInnerLoop(number=number)))
        if not self._has_overlap:
            await asyncio.shield(request)
        return Trained(stored.samples, stored.tokens, stored.loss)

    def end_rest(self) -> None:
        """Stop the inner steps that workers still take after the last training's result, because the steps may wait
        for averages that never arrive."""
        if self.under_way is not None and self.under_way.has_rest:
            self._tell(EndInnerLoop(number=self._trainings))

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """Tell the workers if an outer step has changed a fragment that they have stored. If `is_changed`, they merge
        its new values, in `vectors.local`, into their weights; otherwise they keep their weights."""
        self._tell(TakeAverage(number=self._trainings, fragment=fragment, is_changed=is_changed))

    def _tell(self, command: ControlMessage) -> None:  # a benchmark with a worker thread overrides this method
        self.supervisor.tell(command)

    # The model -------------------------------------------------------------------------------------------------------
    async def evaluate(self, windows: int) -> Evaluated:
        """Return theta's mean held-out loss, in nats per token, over at most `windows` windows of text."""
        return await self._insist(Evaluate(windows=windows), Evaluated)

    async def held_out(self, section: EvaluationSection) -> HeldOut:
        """Return theta's held-out loss, in nats per token, over `section.windows` windows, and whether these are from
        the run's text."""
        is_runs_text = self.reads_runs_text and section.digest in (None, self.held_out_digest)
        return HeldOut((await self.evaluate(section.windows)).loss, is_runs_text)

    async def generate(self, prompt: str, tokens: int, seed: int = 0, temperature: float = TEMPERATURE) -> str:
        """Return the text with which theta continues `prompt`. At temperature 0 each token is the most likely one."""
        command = Generate(prompt=prompt, tokens=tokens, seed=seed, temperature=temperature)
        return (await self._insist(command, Generated, workers=1)).text

    async def export(self, folder: Path, facts: RunFacts, dtype: Dtype = "float32") -> None:
        """Write theta to a folder as a transformers model. Raises: MachineError when the folder cannot be written."""
        command = Export(folder=str(folder.absolute()), facts=facts, dtype=dtype)
        await self._insist(command, Exported, workers=1)

    async def _insist(self, command: ControlMessage, answer: type[Answer], workers: int | None = None) -> Answer:
        """Queue a command to all workers, or to the first `workers` of them, and return the answer of worker 0. If the
        workers are replaced meanwhile, send the command to the new ones."""

        async def ask() -> Answer:
            while True:
                with suppress(WorkersRestartedError):
                    return await self.supervisor.ask(command, answer, workers)

        return await asyncio.shield(self.supervisor.requests.add(ask))

    async def wait_for_death(self) -> DilocoPeerError:
        """Wait until the workers are dead and not replaced, and return the error to raise. The caller must cancel this
        call before it closes the group."""
        return await asyncio.shield(self.supervisor.death)

    async def close(self) -> None:
        """End the workers, and wait until their processes have ended."""
        await self.supervisor.close()


class TrainingRecord:
    """The peer process's record of one training: it handles the workers' reports and determines the training's result.

    It calls `on_captured` for each of the `fragments`, except the last, that all `workers()` workers have stored. The
    training's result is known when the last fragment is stored. The workers may still have inner steps to take then:
    the *rest*.
    """

    def __init__(
        self,
        workers: Callable[[], int],
        fragments: int,
        on_step: Callable[[InnerStepDone], None],
        on_captured: OnCaptured,
    ) -> None:
        self._workers = workers
        self._fragments = fragments
        self._on_step = on_step
        self._on_captured = on_captured
        self._stored: Counter[int] = Counter()
        self._captures: set[asyncio.Task[None]] = set()
        self._request: asyncio.Task[InnerLoopDone] | None = None
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: FragmentStored | None = None
        self._errors: list[Exception] = []
        self.is_wanted = True
        self.is_known = False
        """True once `result` has returned what was trained."""

    @property
    def has_rest(self) -> bool:
        """True if the training's result is known but the workers still have inner steps to take."""
        return self.is_known and self._request is not None and not self._request.done()

    def check_rest(self) -> None:
        """If the inner steps after the training's result have failed, raise their error."""
        if self.is_known and self._request is not None:
            with suppress(asyncio.CancelledError):
                self._request.result()

    def heard(self, report: Report) -> None:
        """Handle a worker's report of a finished inner step or a stored fragment. Start a task that processes a
        fragment once all workers have stored it."""
        if not self.is_wanted:
            return
        if isinstance(report, InnerStepDone):
            self._on_step(report)
        elif isinstance(report, FragmentStored):
            self._stored[report.fragment] += 1
            if self._stored[report.fragment] == self._workers():
                self._captures.add(start_task(self._capture(report)))

    async def result(self, request: asyncio.Task[InnerLoopDone], stop: Callable[[], None]) -> FragmentStored:
        """Wait until all stored fragments are processed, and return the report of the last fragment. On an error or a
        cancellation, call `stop`, and wait until the workers have stopped."""
        self._request = request
        try:
            ended: list[asyncio.Future[Any]] = [request, self._news]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if self._captures:
                await asyncio.wait(self._captures)
            if self._errors:
                raise self._errors[0]
            if self._last is None:
                raise request.exception() or AssertionError("trained but not stored")
            self.is_known = True
            return self._last
        except BaseException:
            self.is_wanted = False
            stop()
            for capture in self._captures:
                capture.cancel()
            await asyncio.wait([request, *self._captures])
            raise

    async def _capture(self, stored: FragmentStored) -> None:
        try:
            if stored.fragment < self._fragments - 1:
                await self._on_captured(stored.fragment)
        except Exception as error:  # kept for `result`, which raises the error
            self._errors.append(error)
        if stored.fragment == self._fragments - 1:
            self._last = stored
        if (self._errors or self._last) and not self._news.done():
            self._news.set_result(None)


class Overlap:
    """This machine's own τ: the number of inner steps between storing a fragment and merging its average (arXiv
    2501.18512, section 3.3.2).

    `steps` is for the next training. With "auto" it is the longest time that recent averages took, in inner steps, and
    less than a cycle's; it is the run's τ until that is known. In a run without overlap peers wait for averages in any
    case.
    """

    def __init__(self, config: RunConfig, own: str | None) -> None:
        """Set the overlap to `own`, the owner's choice, or to the run's overlap if `own` is None or "auto". Raises:
        MachineError when the run does not allow `own`."""
        self.steps = config.streaming.overlap
        self._most = config.training.inner_steps - 1
        self._follows = own == AUTO and self.steps > 0
        self._needed: deque[int] = deque(maxlen=SEEN)
        chosen = None if own is None else parse_overlap(own)
        if chosen is None:
            return
        if self.steps == 0:
            raise MachineError(f"--overlap {own}: in this run peers wait for averages.", "Leave --overlap out.")
        if chosen > self._most:
            raise MachineError(
                f"--overlap {own} is not below the run's training.inner_steps = {self._most + 1}.",
                f"Choose at most {self._most}, or auto.",
            )
        self.steps = chosen

    def learn(self, done: InnerLoopDone) -> None:
        """Adapt `steps` to the time that averages took in a finished training, if the owner chose "auto"."""
        computed = done.seconds - done.average_wait_seconds
        if self._follows and done.inner_steps and computed > 0 and done.longest_average_seconds > 0:
            self._needed.append(math.ceil(done.longest_average_seconds * done.inner_steps / computed))
            self.steps = min(max(self._needed), self._most)
