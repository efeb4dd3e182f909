"""A volunteer's workers, as the peer process commands them: all do the same at the same time, or end together.

Workers that share a model wait for each other in every collective, so the death or failure of one would leave the
others waiting for good.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.errors import DeviceMemoryError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.model.card import RunFacts
from opendiloco.model.export import Dtype
from opendiloco.shared_memory import SharedVectors, create_memory_file
from opendiloco.workers.compiling import CompilerHangError, CompilerWatch
from opendiloco.workers.control import (
    Configured,
    ControlMessage,
    EndInnerLoop,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    Generate,
    Generated,
    Hold,
    InnerLoopDone,
    InnerStepDone,
    Report,
    RunInnerLoop,
    TakeAverage,
)
from opendiloco.workers.crew import Crew
from opendiloco.workers.moments import WorkersMoments
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from opendiloco.workers.overlap import Overlap
from opendiloco.workers.process import Answer, Inherited, WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from opendiloco.workers.restarts import LOST, Restarts, WorkersRestartedError
from opendiloco.workers.start_up import tell_micro_batch
from opendiloco.workers.telemetry import Telemetry
from opendiloco.workers.under_way import UnderWay
from peers.errors import DilocoPeerError
from peers.health import HEALTH
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Running, configured workers. Made by `start`; `close` ends them. Requests queue up behind one another."""

    vectors: SharedVectors
    fragments: Sequence[slice]
    tokens_per_sample: int
    device: str
    telemetry: Telemetry
    held_out_digest: str
    bytes_per_token: float
    reads_runs_text = True
    """See `Run.has_runs_text`."""
    under_way: UnderWay | None = None  # the newest training

    def __init__(self, config: RunConfig, options: WorkerOptions) -> None:
        self._config = config
        self._options = options
        self._memory_descriptor = create_memory_file()
        self._watching: asyncio.Task[None] | None = None
        self._death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        self._requests = RequestQueue()
        self.moments = WorkersMoments(self._requests, lambda: self._workers, self._death.done)
        self.kept_moments: tuple[Path, str] | None = None
        """The file with the newest moments that this machine has kept, and the run that they are of."""
        self._trainings = 0
        self.overlap = Overlap(config, options.overlap)
        self._micro_batch = 0
        self._may_go_on = False  # whether the present workers have carried out a training
        self._lost: DilocoPeerError | None = None  # why the present workers are of no use any more
        self._restarts = Restarts(options.restarts)
        self._is_closing = self._is_held = False
        self._crew = self._new_crew()

    @classmethod
    async def start(cls, config: RunConfig, options: WorkerOptions | None = None) -> WorkerGroup:
        """Start workers, and have them build model and data: seconds, mostly imports.

        Raises: MachineError, DataError, ManifestError, or WorkerError when one dies meanwhile.
        """
        group = cls(config, options or WorkerOptions())
        try:
            configured = await group._start_workers(fresh=True)
        except BaseException:
            await group.close()
            raise
        group.vectors = SharedVectors(group._memory_descriptor, configured.parameters)
        group.fragments = [slice(*part) for part in configured.fragments]
        group.tokens_per_sample = configured.tokens_per_sample
        group.held_out_digest = configured.held_out_digest
        group.bytes_per_token = configured.bytes_per_token
        group.telemetry = Telemetry.of(config, group._options, configured, len(group._workers))
        return group

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
        DeviceMemoryError; WorkerError also when most losses are not finite.
        """
        before = self.under_way
        if not goes_on:
            self.end_rest()
        self._trainings += 1
        number, overlap = self._trainings, self.overlap.steps
        command = RunInnerLoop(number=number, overlap=overlap, from_local=from_local, goes_on=goes_on, **vars(work))

        def on_step(step: InnerStepDone) -> None:
            self.telemetry.progressed(work.index, step)
            number = 0 if under_way.is_known else step.inner_step
            on_progress(Progress(number, step.loss, step.tokens_per_second))

        async def captured(fragment: int) -> None:
            if fragment < len(self.fragments) - 1:
                await on_captured(fragment)

        async def carry_out() -> InnerLoopDone:
            if before is not None and goes_on:
                before.check_rest()
            try:
                done = await self._ask(command, InnerLoopDone, on_report=under_way.heard)
            except DilocoPeerError as error:
                if under_way.is_known:
                    logger.warning("training after outer step %d has failed in the end: %s", work.index, error.message)
                raise
            if under_way.is_wanted:
                self.telemetry.trained(work.index, done)
                self.overlap.learn(done)
            return done

        self.under_way = under_way = UnderWay(lambda: len(self._workers), len(self.fragments), on_step, captured)
        request = self._requests.add(carry_out)
        stored = await under_way.outcome(request, lambda: self._tell(EndInnerLoop(number=number)))
        if not self._config.streaming.overlap:
            await asyncio.shield(request)  # there is nothing more to take
        return Trained(stored.samples, stored.tokens, stored.loss)

    def end_rest(self) -> None:
        """Have workers leave their last inner steps: they may wait for averages that nobody will tell them of."""
        if self.under_way is not None and self.under_way.has_rest:
            self._tell(EndInnerLoop(number=self._trainings))

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """Have workers go on with a fragment that they have stored in the newest training. If it `is_changed`, its new
        values are in `vectors.local`."""
        number = self._trainings
        self._tell(TakeAverage(number=number, fragment=fragment, is_changed=is_changed))

    def _tell(self, command: ControlMessage) -> None:
        for worker in self._workers:
            worker.write(command)

    def hold(self, held: bool) -> None:
        """Have the workers make no inner step while they are held: these, and those that are started in their place."""
        self._is_held = held
        self._tell(Hold(held=held))

    async def evaluate(self, windows: int) -> Evaluated:
        """Held-out loss of theta over at most so many windows."""
        command = Evaluate(windows=windows)
        return await asyncio.shield(self._requests.add(lambda: self._insist(command, Evaluated)))

    async def held_out(self, section: EvaluationSection) -> HeldOut:
        """Return theta's loss on held-out windows: as many as the manifest says, whoever asks."""
        is_runs_text = self.reads_runs_text and section.digest in (None, self.held_out_digest)
        return HeldOut((await self.evaluate(section.windows)).loss, is_runs_text)

    async def generate(self, prompt: str, tokens: int, seed: int = 0, temperature: float = TEMPERATURE) -> str:
        """theta's continuation of a prompt; the likeliest one at temperature 0."""
        command = Generate(prompt=prompt, tokens=tokens, seed=seed, temperature=temperature)
        return (await asyncio.shield(self._requests.add(lambda: self._insist(command, Generated, workers=1)))).text

    async def export(self, folder: Path, facts: RunFacts, dtype: Dtype = "float32") -> None:
        """Write theta as a model folder. Raises: MachineError when it cannot be written."""
        command = Export(folder=str(folder.absolute()), facts=facts, dtype=dtype)
        await asyncio.shield(self._requests.add(lambda: self._insist(command, Exported, workers=1)))

    async def keep_moments(self, path: Path, run: str, index: int) -> None:
        """See `WorkersMoments.keep`."""
        await self.moments.keep(path, run, index)

    async def recall_moments(self, path: Path, run: str) -> None:
        """Have the inner optimizer go on with what a file has; new workers in the place of lost ones do so, too.

        Raises: see `WorkersMoments.recall`.
        """
        await self.moments.recall(path, run)
        self.kept_moments = path, run

    async def wait_for_death(self) -> DilocoPeerError:
        """Returns what to raise once the workers are dead; a caller that only waits for `close` cancels this."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """End the workers. Leaves no process behind."""
        self._is_closing = True
        await self._end_workers()
        await self._requests.idle()
        await self._end_workers()  # what a request had started meanwhile
        if self._memory_descriptor >= 0:
            os.close(self._memory_descriptor)
            self._memory_descriptor = -1

    # Starting and ending ---------------------------------------------------------------------------------------------
    @property
    def _workers(self) -> list[WorkerProcess]:
        return self._crew.workers

    def _new_crew(self) -> Crew:
        return Crew(Inherited(self._memory_descriptor), lambda: not self._is_closing)

    async def _start_workers(self, fresh: bool) -> Configured:
        self._crew, self._may_go_on = self._new_crew(), False
        await self._crew.start(self._options)
        self._watching = asyncio.create_task(self._watch(self._workers))
        self.device = self._crew.device
        if self._is_held:
            self.hold(True)
        commands = self._crew.commands(self._config, self._options, fresh)
        try:
            with CompilerWatch(self._workers, self._lose):
                answers = await self._exchange(commands, Configured)
        except CompilerHangError as error:
            logger.warning("%s The workers start again and do not compile, which would be faster.", error.message)
            self._options = replace(self._options, compile=False)
            return await self._start_again()
        self._micro_batch = answers[0].micro_batch
        if self._options.micro_batch is None and self._options.trains:
            tell_micro_batch(self._config.training, len(self._workers), self._micro_batch)
        HEALTH.well("workers")
        return answers[0]

    async def _start_again(self) -> Configured:
        """Start workers in the place of others, which have put the initial theta where it belongs."""
        await self._end_workers()
        self._lost = None
        return await self._start_workers(fresh=False)

    async def _restart(self) -> None:
        await self._start_again()
        if self.kept_moments is not None:
            await self.moments.recall_if_possible(*self.kept_moments)

    async def _watch(self, workers: Sequence[WorkerProcess]) -> None:
        deaths = [asyncio.create_task(worker.wait_for_death()) for worker in workers]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            self._lose(next(iter(done)).result())
        finally:
            for death in deaths:
                death.cancel()
            await asyncio.gather(*deaths, return_exceptions=True)

    def _lose(self, error: DilocoPeerError) -> None:
        """The workers are of no use any more. Whoever needs them next starts others, if that was not too often yet."""
        self._lost = self._lost or error
        HEALTH.failing("workers", error.message)
        self._kill()
        can_be_got_round = isinstance(self._lost, CompilerHangError)  # by not compiling
        if not self._restarts.left and not can_be_got_round:
            self._die(error)

    def _die(self, error: DilocoPeerError) -> None:
        self._kill()
        if not self._death.done():
            self._death.set_result(error)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    async def _end_workers(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await asyncio.gather(*(worker.close() for worker in self._workers))

    # Requests --------------------------------------------------------------------------------------------------------
    async def _insist(self, command: ControlMessage, answer: type[Answer], workers: int | None = None) -> Answer:
        """Ask again, for as long as new workers take the place of lost ones. Raises: as `_ask`."""
        while True:
            with suppress(WorkersRestartedError):
                return await self._ask(command, answer, workers)

    async def _ask(
        self,
        command: ControlMessage,
        answer: type[Answer],
        workers: int | None = None,
        on_report: Callable[[Report], None] | None = None,
    ) -> Answer:
        """Give all workers, or only the first, a command, and return the first one's answer.

        This is the one place that decides what becomes of workers that fail. Lost ones are replaced, also those that
        died while nobody needed them; the count of restarts begins anew with each training that ends well, and, where
        nothing is trained, with each answer.

        Raises: WorkersRestartedError when they were lost, or short of memory, in this request, and others have been
        started; otherwise their error.
        """
        if self._lost is not None:
            await self._replace_after(self._lost)
        try:
            if isinstance(command, RunInnerLoop) and command.goes_on and not self._may_go_on:
                raise WorkersRestartedError  # those that could go on were lost before
            [answered, *_] = await self._exchange([command] * (workers or len(self._workers)), answer, on_report)
        except (DeviceMemoryError, *LOST) as error:
            await self._replace_after(error)
            raise WorkersRestartedError from error
        except DilocoPeerError as error:
            if len(self._workers) > 1 and workers is None:
                self._die(error)  # the others wait for the one that failed
            raise
        self._may_go_on = self._may_go_on or isinstance(answered, InnerLoopDone)
        if isinstance(answered, InnerLoopDone) or not self._options.trains:
            self._restarts.begin_anew()
        return answered

    async def _replace_after(self, error: DilocoPeerError) -> None:
        """Start workers in the place of lost ones, whose moments are lost, too; again, if those are lost as they start.

        Raises: what makes that impossible; the workers are then dead.
        """
        is_starting = False
        try:
            while True:
                if self._is_closing:
                    raise error
                micro_batch = self._restarts.after(error, self._micro_batch, is_starting)
                if micro_batch is not None:
                    self._options = replace(self._options, micro_batch=micro_batch)
                try:
                    return await self._restart()
                except (DeviceMemoryError, *LOST) as again:
                    error, is_starting = again, True
        except DilocoPeerError as final:
            self._die(final)
            raise

    async def _exchange(
        self,
        commands: Sequence[ControlMessage],
        answer: type[Answer],
        on_report: Callable[[Report], None] | None = None,
    ) -> list[Answer]:
        """Give each of the first workers its command; return their answers. Raises: why they are lost, or one fails."""
        try:
            return await self._crew.exchange(commands, answer, self._requests.hold, on_report)
        except Exception as error:
            raise (self._lost or error) from None
