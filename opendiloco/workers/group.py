"""A volunteer's workers as the peer process uses them: they train, evaluate, generate and export."""

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
"""Trainings whose averages count: a machine that waited once has more time for that long."""


class WorkerGroup:
    """Running, configured workers. Made by `start`; `close` ends them. Requests queue up behind one another."""

    vectors: SharedVectors
    fragments: Sequence[slice]
    device: str
    telemetry: Telemetry
    held_out_digest: str
    reads_runs_text = True
    reads = True  # False: it opens no text, and its held-out loss means nothing
    bytes_per_token: float
    under_way: UnderWay | None = None  # the newest training

    def __init__(self, config: RunConfig, options: WorkerOptions, reads_runs_text: bool) -> None:
        self.reads_runs_text = reads_runs_text
        self.reads = options.reads
        self._config = config
        self.overlap = Overlap(config, options.overlap)
        self.supervisor = Supervisor(config, options)
        self._has_rests = config.streaming.overlap > 0
        self._trainings = 0

    @classmethod
    async def start(
        cls, config: RunConfig, options: WorkerOptions | None = None, reads_runs_text: bool = True
    ) -> WorkerGroup:
        """Start workers. For `reads_runs_text` see `Run.has_runs_text`. Raises: see `Supervisor.start`."""
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
        """Train, and publish all fragments into `vectors.local`; see `Workload`. When cancelled, stops within one
        inner step. In a run with an overlap workers have then inner steps to take yet, and do so before all else.

        Begins from theta, or with `from_local` from what `vectors.local` holds; or it `goes_on` from where these
        workers' last training has ended. With each fragment that was captured, workers go on when `take_average` says
        so.

        Raises: WorkersRestartedError when a worker died or failed, or a device ran out of memory, and others have been
        started in their place; or were before, and the training `goes_on`. Too often, WorkerError and
        DeviceMemoryError; WorkerError also when most losses are not finite. AmendmentError.
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
            number = 0 if under_way.is_known else step.inner_step  # its outcome is known already
            on_progress(Progress(number, step.loss, step.tokens_per_second))

        async def carry_out() -> InnerLoopDone:
            if before is not None and goes_on:
                before.check_rest()
            try:
                done = await self.supervisor.ask(command, InnerLoopDone, on_report=under_way.heard)
            except DilocoPeerError as error:
                if under_way.is_known:
                    logger.warning("training after outer step %d has failed in the end: %s", work.index, error.message)
                raise
            if under_way.is_wanted:
                self.telemetry.trained(work.index, done)
                self.overlap.learn(done)
            return done

        supervisor, fragments = self.supervisor, len(self.fragments)
        self.under_way = under_way = UnderWay(lambda: len(supervisor.workers), fragments, on_step, on_captured)
        request = supervisor.requests.add(carry_out)
        stored = await under_way.outcome(request, lambda: self._tell(EndInnerLoop(number=number)))
        if not self._has_rests:
            await asyncio.shield(request)  # there is nothing more to take
        return Trained(stored.samples, stored.tokens, stored.loss)

    def end_rest(self) -> None:
        """Have workers leave their last inner steps, which may wait for averages that never come."""
        if self.under_way is not None and self.under_way.has_rest:
            self._tell(EndInnerLoop(number=self._trainings))

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """Have workers go on with a stored fragment: with what is in `vectors.local` now, if it `is_changed`."""
        self._tell(TakeAverage(number=self._trainings, fragment=fragment, is_changed=is_changed))

    def _tell(self, command: ControlMessage) -> None:  # a worker in a thread is told in another way
        self.supervisor.tell(command)

    # The model -------------------------------------------------------------------------------------------------------
    async def evaluate(self, windows: int) -> Evaluated:
        """Held-out loss of theta over at most so many windows."""
        return await self._insist(Evaluate(windows=windows), Evaluated)

    async def held_out(self, section: EvaluationSection) -> HeldOut:
        """Return theta's loss on held-out windows: as many as the manifest says."""
        is_runs_text = self.reads_runs_text and section.digest in (None, self.held_out_digest)
        return HeldOut((await self.evaluate(section.windows)).loss, is_runs_text)

    async def generate(self, prompt: str, tokens: int, seed: int = 0, temperature: float = TEMPERATURE) -> str:
        """theta's continuation of a prompt; the likeliest one at temperature 0."""
        command = Generate(prompt=prompt, tokens=tokens, seed=seed, temperature=temperature)
        return (await self._insist(command, Generated, workers=1)).text

    async def export(self, folder: Path, facts: RunFacts, dtype: Dtype = "float32") -> None:
        """Write theta as a model folder. Raises: MachineError when it cannot be written."""
        command = Export(folder=str(folder.absolute()), facts=facts, dtype=dtype)
        await self._insist(command, Exported, workers=1)

    async def _insist(self, command: ControlMessage, answer: type[Answer], workers: int | None = None) -> Answer:
        """Give workers a command, also others in the place of lost ones, when it is its turn. Return the answer."""

        async def ask() -> Answer:
            while True:
                with suppress(WorkersRestartedError):
                    return await self.supervisor.ask(command, answer, workers)

        return await asyncio.shield(self.supervisor.requests.add(ask))

    async def wait_for_death(self) -> DilocoPeerError:
        """Return what to raise once the workers are dead; a caller that only waits for `close` cancels this."""
        return await asyncio.shield(self.supervisor.death)

    async def close(self) -> None:
        """End the workers. Leaves no process behind."""
        await self.supervisor.close()


class UnderWay:
    """One training as the peer process sees it: the reports of its workers, and its outcome.

    Passes on what `workers()` workers report: to `on_captured` each of the `fragments` that all of them have stored,
    but the last one, with which the training is known.

    What is trained is known once that is so of all fragments. Workers may still have inner steps to take: the *rest*.
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
        """What is trained, since it was returned as the outcome."""

    @property
    def has_rest(self) -> bool:
        """Whether what is trained is known, and workers have inner steps to take yet."""
        return self.is_known and self._request is not None and not self._request.done()

    def check_rest(self) -> None:
        """Raises: what has gone wrong with the rest, once it is over."""
        if self.is_known and self._request is not None:
            with suppress(asyncio.CancelledError):
                self._request.result()

    def heard(self, report: Report) -> None:
        """One of the workers reports something."""
        if not self.is_wanted:
            return
        if isinstance(report, InnerStepDone):
            self._on_step(report)
        elif isinstance(report, FragmentStored):
            self._stored[report.fragment] += 1
            if self._stored[report.fragment] == self._workers():
                self._captures.add(start_task(self._capture(report)))

    async def outcome(self, request: asyncio.Task[InnerLoopDone], stop: Callable[[], None]) -> FragmentStored:
        """Return what the request has trained, once all that was captured is taken. When it is cancelled or fails,
        call `stop`, which has the workers stop, and wait until they have."""
        self._request = request
        try:
            ended: list[asyncio.Future[Any]] = [request, self._news]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if self._captures:
                await asyncio.wait(self._captures)
            if self._errors:
                raise self._errors[0]
            if self._last is None:
                raise request.exception() or AssertionError("trained, and not stored")
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
        except Exception as error:  # raised by `outcome`
            self._errors.append(error)
        if stored.fragment == self._fragments - 1:
            self._last = stored
        if (self._errors or self._last) and not self._news.done():
            self._news.set_result(None)


class Overlap:
    """How many inner steps after a fragment was stored a machine merges what was averaged: its own τ (arXiv 2501.18512,
    section 3.3.2).

    `steps` is for the next training. With "auto" these are as many as averages have lately taken at most, less than
    a cycle has; the run's τ until that is known. Peers that wait for averages, in a run without overlap, do so anyway.
    """

    def __init__(self, config: RunConfig, own: str | None) -> None:
        """`own` is what the machine's owner says, if anything. Raises: MachineError when a run has no such overlap."""
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
                f"--overlap {own} is no less than the run's training.inner_steps = {self._most + 1}.",
                f"Choose {self._most} at most, or auto.",
            )
        self.steps = chosen

    def learn(self, done: InnerLoopDone) -> None:
        """Take account of a training."""
        computed = done.seconds - done.average_wait_seconds
        if self._follows and done.inner_steps and computed > 0 and done.longest_average_seconds > 0:
            self._needed.append(math.ceil(done.longest_average_seconds * done.inner_steps / computed))
            self.steps = min(max(self._needed), self._most)
