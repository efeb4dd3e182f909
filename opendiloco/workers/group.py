"""A machine's workers, as the peer process commands them: all do the same at the same time, or end together.

Workers that share a model wait for each other in every collective, so the death or failure of one would leave the
others waiting for good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DeviceMemoryError, WorkerError
from opendiloco.model.export import RunFacts
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.shared_memory import SharedVectors, copy_bytes, create_memory_file
from opendiloco.workers.control import (
    Configure,
    Configured,
    ControlMessage,
    CountDevices,
    DevicesCounted,
    EndInnerLoop,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    Generate,
    Generated,
    InnerLoopDone,
    InnerStepDone,
    LoadMoments,
    RunInnerLoop,
    StoreMoments,
)
from opendiloco.workers.options import (
    WorkerOptions,
    choose_devices,
    choose_threads,
    needs_gpu_count,
    usable_cores,
)
from opendiloco.workers.process import Answer, Inherited, UnexpectedWorkerError, WorkerDeathError, WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from opendiloco.workers.start_up import StartUp
from opendiloco.workers.telemetry import Telemetry
from peers.errors import DilocoPeerError
from peers.transfer.memory_file import MemoryFile
from peers.values.workload import InnerLoop, Progress, SnapshotError, Trained

logger = logging.getLogger(__name__)

LOST = (WorkerDeathError, UnexpectedWorkerError)
"""How workers fail that may do better when they are started again."""
EXPLANATION_SECONDS = 2.0
"""How long we wait, once a worker has failed, for what the others have to say: one of them may be the cause."""


class WorkersRestartedError(Exception):
    """The request's workers were lost, or short of memory, and new ones wait. They know nothing of it."""


class WorkerGroup:
    """Running, configured workers. Made by `start`; `close` ends them. Requests queue up behind one another."""

    vectors: SharedVectors
    tokens_per_sample: int
    device: str
    telemetry: Telemetry
    held_out_digest: str

    def __init__(self, config: RunConfig, options: WorkerOptions) -> None:
        self._config = config
        self._options = options
        self._memory_descriptor, self._moments_descriptor = create_memory_file(), create_memory_file()
        self._moments_turn = asyncio.Lock()
        self._workers: list[WorkerProcess] = []
        self._watching: asyncio.Task[None] | None = None
        self._death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        self._requests = RequestQueue()
        self._trainings = 0
        self._micro_batch = 0
        self._halved = False
        self._lost: DilocoPeerError | None = None  # why the present workers are of no use any more
        self._restarts_left = options.restarts
        self._is_closing = False

    @classmethod
    async def start(cls, config: RunConfig, options: WorkerOptions | None = None) -> WorkerGroup:
        """Start workers and have them build model and data: seconds, mostly imports.

        Raises: MachineError, DataError, ManifestError, or WorkerError when one dies meanwhile.
        """
        group = cls(config, options or WorkerOptions())
        try:
            configured = await group._start_workers(fresh=True)
        except BaseException:
            await group.close()
            raise
        group.vectors = SharedVectors(group._memory_descriptor, configured.parameters)
        group.tokens_per_sample = configured.tokens_per_sample
        group.held_out_digest = configured.held_out_digest
        peak = peak_tokens_per_second(
            configured.device_name, len(group._workers), config.training.precision, configured.flops_per_token
        )
        group.telemetry = Telemetry(config.training.inner_steps, peak)
        return group

    async def train(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], from_local: bool = False
    ) -> Trained:
        """Train and publish into `vectors.local`; see `Replica.train`. When cancelled, stops within one inner step.

        Begins from theta, or with `from_local` from what `vectors.local` holds.

        Raises: WorkersRestartedError when a worker died or failed, or a device ran out of memory, and others have been
        started in their place. Too often, WorkerError and DeviceMemoryError; WorkerError also when most losses are not
        finite.
        """
        wanted = True

        def report(message: InnerStepDone) -> None:
            if wanted:
                self.telemetry.progressed(work.index, message)
                on_progress(Progress(message.inner_step, message.loss, message.tokens_per_second))

        self._trainings += 1
        number = self._trainings
        command = RunInnerLoop(number=number, from_local=from_local, **vars(work))
        request = self._requests.add(lambda: self._ask(command, InnerLoopDone, on_progress=report))
        try:
            done = await asyncio.shield(request)
        except asyncio.CancelledError:
            wanted = False
            for worker in self._workers:
                worker.write(EndInnerLoop(number=number))
            await asyncio.wait([request])
            raise
        self.telemetry.trained(work.index, done)
        return Trained(done.samples, done.tokens, done.loss)

    async def evaluate(self, windows: int) -> Evaluated:
        """Held-out loss of theta over at most so many windows."""
        command = Evaluate(windows=windows)
        return await asyncio.shield(self._requests.add(lambda: self._insist(command, Evaluated)))

    async def generate(self, prompt: str, tokens: int, seed: int = 0) -> str:
        """theta's continuation of a prompt."""
        command = Generate(prompt=prompt, tokens=tokens, seed=seed)
        return (await asyncio.shield(self._requests.add(lambda: self._insist(command, Generated, workers=1)))).text

    async def export(self, folder: Path, facts: RunFacts) -> None:
        """Write theta as a model folder. Raises: MachineError when it cannot be written."""
        command = Export(folder=str(folder.absolute()), facts=facts)
        await asyncio.shield(self._requests.add(lambda: self._insist(command, Exported, workers=1)))

    async def store_moments(self, out: memoryview) -> None:
        """The inner optimizer's state (see inner/moments.py) as it is after some inner step. Of a single worker
        training need not end for it; of several it must, since they are not at the same step at the same time.

        Raises: SnapshotError when there is none to give; OSError without memory; WorkerError when a worker dies.
        """
        await self._finish_moving(StoreMoments(), out)

    async def load_moments(self, moments: memoryview) -> None:
        """Have the inner optimizer go on with checked moments. Raises: as `store_moments`."""
        await self._finish_moving(LoadMoments(), moments)

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
            os.close(self._moments_descriptor)
            self._memory_descriptor = -1

    # Starting and ending ---------------------------------------------------------------------------------------------
    async def _start_workers(self, fresh: bool) -> Configured:
        cores, shared = usable_cores(), Inherited(self._memory_descriptor, self._moments_descriptor)
        threads = choose_threads(self._options, ["cpu"] * self._options.cpu_workers, cores)  # at most
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._workers = [await WorkerProcess.start(shared._replace(listener=listener.fileno()), threads)]
        self._workers[0].on_stage = StartUp().heard  # the others do the same
        if self._is_closing:
            raise WorkerError("no workers are wanted any more.")
        devices = choose_devices(self._options, await self._count_gpus())
        threads = choose_threads(self._options, devices, cores)
        for _ in devices[1:]:
            self._workers.append(await WorkerProcess.start(shared, threads))
        if len(devices) > 1:
            for rank, worker in enumerate(self._workers):
                worker.name = f"worker {rank} of {len(devices)}"
        self._watching = asyncio.create_task(self._watch(self._workers))
        self.device = devices[0] if len(devices) == 1 else f"{len(devices)} x {devices[0].partition(':')[0]}"
        commands = [
            Configure(
                manifest_content=self._config.to_manifest_content(),
                options=replace(self._options, threads=threads),
                device=device,
                rank=rank,
                workers=len(devices),
                port=port,
                fresh=fresh,
            )
            for rank, device in enumerate(devices)
        ]
        configured = await self._exchange(commands, Configured)
        self._micro_batch = configured.micro_batch
        training = self._config.training
        wanted = min(training.micro_batch or training.batch_size, -(-training.batch_size // len(devices)))
        if self._options.micro_batch is None and self._micro_batch < wanted:
            logger.info("for want of memory, each worker puts %d windows through the model at once", self._micro_batch)
        return configured

    async def _count_gpus(self) -> int:
        if not needs_gpu_count(self._options):
            return 0
        return (await self._exchange([CountDevices()], DevicesCounted)).gpus

    async def _restart_with_half(self, error: DilocoPeerError) -> None:
        """New workers with half the micro-batch; their moments start anew. Raises: the error, if we did so before."""
        before = self._micro_batch
        if self._halved or before == 1:
            raise error
        self._halved = True
        self._options = replace(self._options, micro_batch=before // 2)
        logger.warning(
            "%s The workers start again with %d windows at once instead of %d; --micro-batch %d does so at once.",
            *(error.message, before // 2, before, before // 2),
        )
        await self._restart()

    async def _start_again(self, error: DilocoPeerError) -> None:
        """Start workers in the place of lost ones, whose moments are lost, too. Raises: the error of the last ones that
        were lost, if that was too often."""
        while self._restarts_left and not self._is_closing:
            self._restarts_left -= 1
            logger.warning("%s The workers start again, without what they did last.", error.message)
            try:
                return await self._restart()
            except LOST as lost_again:
                error = lost_again
        raise error

    async def _restart(self) -> None:
        await self._end_workers()
        self._lost = None
        await self._start_workers(fresh=False)

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
        self._kill()
        if not self._restarts_left:
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
        on_progress: Callable[[InnerStepDone], None] | None = None,
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
            answered = await self._exchange([command] * (workers or len(self._workers)), answer, on_progress)
        except (DeviceMemoryError, *LOST) as error:
            await self._replace_after(error)
            raise WorkersRestartedError from error
        except DilocoPeerError as error:
            if len(self._workers) > 1 and workers is None:
                self._die(error)  # the others wait for the one that failed
            raise
        if isinstance(answered, InnerLoopDone) or not self._options.trains:
            self._restarts_left = self._options.restarts
        return answered

    async def _replace_after(self, error: DilocoPeerError) -> None:
        """Raises: what makes that impossible; the workers are then dead."""
        try:
            await (self._restart_with_half if isinstance(error, DeviceMemoryError) else self._start_again)(error)
        except DilocoPeerError as final:
            self._die(final)
            raise

    async def _finish_moving(self, command: StoreMoments | LoadMoments, moments: memoryview) -> None:
        """It goes on to its end even if we are cancelled."""
        if len(self._workers) == 1:
            work = self._requests.hold(asyncio.create_task(self._move_moments(command, moments)))
        else:
            work = self._requests.add(lambda: self._move_moments(command, moments))
        await asyncio.shield(work)

    async def _move_moments(self, command: StoreMoments | LoadMoments, moments: memoryview) -> None:
        """Through memory that all processes see, and that is taken only for so long."""
        async with self._moments_turn:
            memory = await asyncio.to_thread(MemoryFile, os.dup(self._moments_descriptor), len(moments))
            try:
                if isinstance(command, LoadMoments):
                    await asyncio.to_thread(copy_bytes, moments, memory.data)
                moved = [worker.move_moments(command) for worker in self._workers]
                problems = [said for said in await asyncio.gather(*moved, return_exceptions=True) if said is not None]
                if problems and isinstance(problems[0], WorkerDeathError) and not self._death.done():
                    raise SnapshotError("the worker is gone")  # another takes its place
                if problems:
                    raise problems[0]
                if isinstance(command, StoreMoments):
                    await asyncio.to_thread(copy_bytes, memory.data, moments)
            finally:
                os.truncate(memory.descriptor, 0)

    async def _exchange(
        self,
        commands: Sequence[ControlMessage],
        answer: type[Answer],
        on_progress: Callable[[InnerStepDone], None] | None = None,
    ) -> Answer:
        """Give each of the first workers its command; the first one's answer, when all have answered.

        Raises: what most probably was the cause, when one fails.
        """
        exchanges = [
            self._requests.hold(asyncio.create_task(worker.exchange(command, answer, on_progress or _ignore)))
            for worker, command in zip(self._workers, commands, strict=False)
        ]
        _, unfinished = await asyncio.wait(exchanges, return_when=asyncio.FIRST_EXCEPTION)
        if unfinished:
            await asyncio.wait(unfinished, timeout=EXPLANATION_SECONDS)
        errors = [error for task in exchanges if task.done() and (error := task.exception())]
        if errors:
            raise self._lost or min(errors, key=_is_unexpected)
        return exchanges[0].result()


def _is_unexpected(error: BaseException) -> bool:
    """Such as what a collective raises when another worker is gone."""
    return isinstance(error, UnexpectedWorkerError)


def _ignore(progress: InnerStepDone) -> None:
    pass
