"""The supervisor of a volunteer's workers: starts them, gives them commands, and replaces those that are lost.

All workers do the same at the same time, or end together. Workers that share a model wait for each other in every
collective, so the death or failure of one would leave the others waiting for good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opendiloco.config.run_config import RunConfig, TrainingSection
from opendiloco.cores import usable_cores
from opendiloco.errors import DeviceError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.gpus import LOOK_AT_DEVICE
from opendiloco.shared_memory import create_memory_file
from opendiloco.stages import WITH_A_COMPILER, StageLog, Watch, at_stage
from opendiloco.workers.control import (
    Answer,
    Configure,
    Configured,
    ControlMessage,
    CountDevices,
    DevicesCounted,
    Hold,
    InnerLoopDone,
    InnerStepDone,
    KeepMoments,
    MoveMoments,
    RecallMoments,
    Report,
    RunInnerLoop,
    UnexpectedWorkerError,
    WorkerDeathError,
    WorkerProcess,
    patience,
)
from opendiloco.workers.options import WorkerOptions, choose_devices, choose_threads, needs_gpu_count
from opendiloco.workers.telemetry import COMPILED
from peers.errors import DilocoPeerError
from peers.metrics import HEALTH
from peers.values.system import start_task
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EXPLANATION_SECONDS = 2.0
"""How long we wait, once a worker has failed, for what the others have to say: one of them may be the cause."""
COMPILING_SECONDS = 1800.0
"""For all blocks together. Where a compiler works, it takes seconds, or minutes on a slow machine."""
LOOKS = 10
"""At how a training goes on, within the time for which its workers may be silent."""
LOST = (WorkerDeathError, UnexpectedWorkerError, DeviceError)
"""How workers fail that may do better when they are started again."""

Result = TypeVar("Result")


class WorkersRestartedError(Exception):
    """The request's workers were lost, or short of memory, and new ones wait. They know nothing of it."""


class Supervisor:
    """Running workers of a run. `start` starts them; `close` ends them. Requests queue up behind one another."""

    def __init__(self, config: RunConfig, options: WorkerOptions) -> None:
        self.memory_descriptor = create_memory_file()
        self.requests = _RequestQueue()
        self.kept_moments: tuple[Path, str] | None = None
        """The file with the newest moments that this machine has kept, and the run that they are of. New workers in the
        place of lost ones go on with them."""
        self.pool = _WorkerPool(self.memory_descriptor)
        self.death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        """What to raise once the workers are dead, and none take their place."""
        self._config = config
        self._options = options
        self.uncompiled = ""
        """Why the present workers train uncompiled blocks, where compiled ones would be faster."""
        self._lost: DilocoPeerError | None = None  # why the present workers are of no use any more
        self._restarts = _Restarts(options.restarts)
        self._moving = asyncio.Lock()  # held while moments are moved
        self._watchdog = _Watchdog(self._hung, lambda: self._is_held or self._moving.locked())
        self._is_closing = self._is_held = False

    @property
    def workers(self) -> list[WorkerProcess]:
        """The present workers."""
        return self.pool.workers

    def tell(self, command: ControlMessage) -> None:
        """Tell all workers what has no reply."""
        for worker in self.workers:
            worker.write(command)

    def hold(self, held: bool) -> None:
        """Have the workers make no inner step while they are held: these, and those that are started in their place."""
        self._is_held = held
        self._watchdog.heard()
        self.tell(Hold(held=held))

    async def close(self) -> None:
        """End the workers. Leaves no process behind."""
        self._is_closing = True
        await self.pool.close()
        await self.requests.idle()
        await self.pool.close()  # what a request had started meanwhile
        if self.memory_descriptor >= 0:
            os.close(self.memory_descriptor)
            self.memory_descriptor = -1

    # Starting and ending ---------------------------------------------------------------------------------------------
    async def start(self, fresh: bool = True) -> Configured:
        """Start workers, which build model and data in seconds, and put the initial theta into the memory if `fresh`.

        Raises: MachineError, DataError, ManifestError, or WorkerError when one dies meanwhile.
        """
        if self._is_closing:
            raise WorkerError("no workers are wanted any more.")
        pool = self.pool = _WorkerPool(self.memory_descriptor)
        self._watchdog.begin_anew()

        def died(death: asyncio.Future[DilocoPeerError]) -> None:
            if not pool.is_over:
                self._lose(death.result())

        def heard_of_other(stage: str, share: float | None) -> None:
            if stage in WITH_A_COMPILER:  # each has its time
                with suppress(RuntimeError):  # the start is over
                    compiling.reschedule(asyncio.get_running_loop().time() + COMPILING_SECONDS)

        def heard_of_first(stage: str, share: float | None) -> None:
            log(stage, share)
            self._watchdog.heard()
            at_stage(stage, share)  # the others do the same
            heard_of_other(stage, share)

        log = StageLog()
        try:
            async with asyncio.timeout(None) as compiling:
                commands = await pool.start(self._config, self._options, fresh, heard_of_first, heard_of_other)
                for worker in pool.workers:
                    worker.death.add_done_callback(died)
                if self._is_held:
                    self.hold(True)
                answers = await self._exchange(commands, Configured)
        except TimeoutError:
            logger.warning(
                "a worker's compiler has not come to an end in %.0f minutes. The workers start again and do not "
                "compile, which would be faster.",
                COMPILING_SECONDS / 60,
            )
            self._options = replace(self._options, compile=False)
            self.uncompiled = f"the compiler has not come to an end in {COMPILING_SECONDS / 60:.0f} minutes."
            return await self._start_again()
        self._restarts.started(answers[0].micro_batch, answers[0].uncompiled_micro_batch)
        if self._options.micro_batch is None and self._options.trains:
            _tell_micro_batch(self._config.training, len(self.workers), answers[0].micro_batch)
        self._tell_of_compiling(answers)
        HEALTH.well("workers")
        return answers[0]

    def _tell_of_compiling(self, answers: Sequence[Configured]) -> None:
        """Say whether workers train compiled blocks, and why not where they should, in the log and in metrics."""
        COMPILED.set(min(answer.is_compiled for answer in answers))
        if self._options.compile is not False:  # else the owner has chosen, or the compiler did not come to an end
            self.uncompiled = next((answer.uncompiled for answer in answers if answer.uncompiled), "")
        if self.uncompiled:
            logger.warning("this machine trains uncompiled, which takes longer: %s", self.uncompiled)

    async def _start_again(self) -> Configured:
        """Start workers in the place of others, which have put the initial theta where it belongs."""
        await self.pool.close()
        if stuck := [worker.name for worker in self.workers if worker.is_running]:
            raise MachineError(f"killed, and not ended: {', '.join(stuck)}; a GPU's driver holds it.", LOOK_AT_DEVICE)
        self._lost = None
        return await self.start(fresh=False)

    def _lose(self, error: DilocoPeerError) -> None:
        """Give up the present workers. The next request starts others, unless that was too often already."""
        if self._lost is not None:
            return
        self._lost = error
        HEALTH.failing("workers", error.message)
        self.pool.kill()
        if not self._restarts.left:
            self._die(error)

    def _hung(self, seconds: float) -> None:
        """Give up workers that have finished no inner step for so long."""
        minutes = f"{seconds / 60:.0f} minutes"
        self._lose(WorkerDeathError(f"the workers have finished no inner step in {minutes}.", LOOK_AT_DEVICE))

    def _die(self, error: DilocoPeerError) -> None:
        self.pool.kill()
        if not self.death.done():
            self.death.set_result(error)

    # Commands --------------------------------------------------------------------------------------------------------
    async def ask(
        self,
        command: ControlMessage,
        answer: type[Answer],
        workers: int | None = None,
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> Answer:
        """Give all workers, or only the first, a command, and return the first one's answer.

        This is the one place that decides what becomes of workers that fail. Lost ones are replaced, also those that
        died between two requests; the count of restarts begins anew with each training that ends well, and, where
        nothing is trained, with each answer.

        Raises: WorkersRestartedError when they were lost, or short of memory, in this request, and others have been
        started; otherwise their error.
        """
        if self._lost is not None:
            await self._replace_after(self._lost)
        try:
            if isinstance(command, RunInnerLoop) and command.goes_on and not self.pool.has_trained:
                raise WorkersRestartedError  # those that could go on were lost before
            is_training = isinstance(command, RunInnerLoop)
            with self._watchdog.watching(on_report) if is_training else nullcontext(on_report) as hear:
                [answered, *_] = await self._exchange([command] * (workers or len(self.workers)), answer, hear)
        except (DeviceMemoryError, *LOST) as error:
            await self._replace_after(error)
            raise WorkersRestartedError from error
        except DilocoPeerError as error:
            if len(self.workers) > 1 and workers is None:
                self._die(error)  # the others wait for the one that failed
            raise
        self.pool.has_trained |= isinstance(answered, InnerLoopDone)
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
                micro_batch = self._restarts.after(error, is_starting)
                if micro_batch is not None:
                    self._options = replace(self._options, micro_batch=micro_batch)
                try:
                    await self._start_again()
                    return await self._recall_kept_moments()
                except (DeviceMemoryError, *LOST) as again:
                    error, is_starting = again, True
        except DilocoPeerError as final:
            self._die(final)
            raise

    async def _exchange(
        self,
        commands: Sequence[ControlMessage],
        answer: type[Answer],
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> list[Answer]:
        """Give each of the first workers its command; return their answers.

        Raises: why the workers are lost, or what most probably was the cause when one fails.
        """
        pairs = zip(self.workers, commands, strict=False)
        tasks = [self.requests.keep(worker.exchange(command, answer, on_report)) for worker, command in pairs]
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if unfinished:
            await asyncio.wait(unfinished, timeout=EXPLANATION_SECONDS)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            # An unexpected error is such as a collective raises when another worker is gone.
            raise self._lost or min(errors, key=lambda error: isinstance(error, UnexpectedWorkerError)) from None
        return [task.result() for task in tasks]

    # The inner optimizer's state -------------------------------------------------------------------------------------
    async def keep_moments(self, path: Path, run: str, index: int) -> None:
        """Have workers write their moments into a file, after `index` outer steps of a run.

        Raises: SnapshotError when there are none, or the file cannot be written; WorkerError when a worker dies.
        """
        await self._move(KeepMoments(path=str(path.absolute()), run=run, index=index))

    async def recall_moments(self, path: Path, run: str) -> None:
        """Have the inner optimizer go on with a file's, also that of later workers. Raises: as `keep_moments`."""
        await self._move(RecallMoments(path=str(path.absolute()), run=run))
        self.kept_moments = path, run

    async def _recall_kept_moments(self) -> None:
        """Do the same for new workers, in the middle of a request; where it fails, the inner optimizer begins anew."""
        if self.kept_moments is None:
            return
        path, run = self.kept_moments
        try:
            await self._move_now(RecallMoments(path=str(path.absolute()), run=run))
        except SnapshotError as error:
            logger.warning("the inner optimizer begins anew: %s: %s", path, error)
        else:
            logger.info("the inner optimizer goes on with what %s has", path)

    async def _move(self, command: MoveMoments) -> None:
        """Have workers move moments, one request after another, each to its end even if the caller is cancelled.

        Training of a single worker need not end for it. That of several must, since they are not at the same step at
        the same time; once all have the command, the next request may follow it.
        """
        if len(self.workers) == 1:
            move = self.requests.keep(self._move_now(command))
        else:
            move = await asyncio.shield(self.requests.add(partial(self._begin_move, command)))
        await asyncio.shield(move)

    async def _begin_move(self, command: MoveMoments) -> asyncio.Task[None]:
        """Return the move, once workers have the command."""
        are_given = asyncio.Event()
        move = self.requests.keep(self._move_now(command, are_given))
        await are_given.wait()
        return move

    async def _move_now(self, command: MoveMoments, are_given: asyncio.Event | None = None) -> None:
        """Return once all workers have answered. Raises: what one of them does."""
        async with self._moving:
            moves = [start_task(worker.move_moments(command)) for worker in self.workers]
            await asyncio.sleep(0)  # in which each sends the command
            if are_given is not None:
                are_given.set()
            moved = await asyncio.gather(*moves, return_exceptions=True)
        problems = [said for said in moved if isinstance(said, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self.death.done():
            raise SnapshotError("the worker is gone")  # another takes its place
        if problems:
            raise problems[0]


class _WorkerPool:
    """The workers of a volunteer at one time, ordered by rank: started, and told what each of them is. Made empty."""

    def __init__(self, memory_descriptor: int) -> None:
        self.workers: list[WorkerProcess] = []
        self._memory = memory_descriptor
        self._devices: list[str] = []
        self.is_over = False
        """Whether the end of its workers is no loss."""
        self.has_trained = False
        """Whether its workers have carried out a training, from which they can go on."""

    async def start(
        self, config: RunConfig, options: WorkerOptions, fresh: bool, of_first: Watch, of_other: Watch
    ) -> list[Configure]:
        """Start a worker for each device; the first, there in any case, counts the GPUs. Return what to tell each next.

        Raises: MachineError when there are too few, or torch cannot use those that are there; WorkerError when one
        dies, or the pool is closed meanwhile.
        """
        with socket.create_server((LOOPBACK, 0)) as listener:
            descriptor, port = listener.fileno(), listener.getsockname()[1]  # where they meet
            threads = choose_threads(options, ["cpu"] * options.cpu_workers, usable_cores())  # at most
            first = await WorkerProcess.start((self._memory, descriptor), threads, of_first)
        self.workers.append(first)
        if self.is_over:
            raise WorkerError("no workers are wanted any more.")
        gpus = 0
        if needs_gpu_count(options):
            counted = await first.exchange(CountDevices(), DevicesCounted, lambda progress: None)
            if counted.hidden and options.trains:  # the CPU would take a hundred times as long
                raise MachineError(f"{counted.hidden}.", counted.remedy)
            gpus = counted.gpus
        self._devices = choose_devices(options, gpus)
        threads = choose_threads(options, self._devices, usable_cores())
        for _ in self._devices[1:]:
            other = await WorkerProcess.start((self._memory,), threads, of_other)
            self.workers.append(other)
        if len(self.workers) > 1:
            for rank, worker in enumerate(self.workers):
                worker.name = f"worker {rank} of {len(self.workers)}"
        content = config.to_manifest_content()
        return [
            Configure(
                manifest_content=content,
                options=options,
                threads=threads,
                device=device,
                rank=rank,
                workers=len(self.workers),
                memory=self._memory,
                listener=None if rank else descriptor,
                port=port,
                fresh=fresh,
            )
            for rank, device in enumerate(self._devices)
        ]

    @property
    def device(self) -> str:
        """What they train on, in words."""
        first, *others = self._devices
        return f"{len(self._devices)} x {first.partition(':')[0]}" if others else first

    def kill(self) -> None:
        """End the workers at once, without waiting for their end."""
        for worker in self.workers:
            worker.kill()

    async def close(self) -> None:
        """End the workers. Leaves no process behind."""
        self.is_over = True
        await asyncio.gather(*(worker.close() for worker in self.workers))


def _tell_micro_batch(training: TrainingSection, workers: int, micro_batch: int) -> None:
    """Log how many windows go through the model at once, where that is not each worker's whole piece of a batch."""
    piece = -(-training.batch_size // workers)
    if micro_batch < piece:
        wish = "as the run recommends" if micro_batch == training.micro_batch else "for want of memory"
        logger.info(
            "each worker puts %d of its %d windows through the model at once, %s; --micro-batch says otherwise",
            *(micro_batch, piece, wish),
        )


class _Watchdog:
    """Watches trainings for workers that are silent for longer than `patience` allows: they hang.

    It counts how many looks in a row have heard of nothing: time in which this process was stopped, or the machine
    asleep, has no looks. `on_hang` is given the seconds of silence; those in which silence `is_excused` do not count.
    """

    def __init__(self, on_hang: Callable[[float], None], is_excused: Callable[[], bool]) -> None:
        self._on_hang = on_hang
        self._is_excused = is_excused
        self._slowest: float | None = None  # inner step of the present workers, in seconds
        self._silent = 0
        self._look: asyncio.TimerHandle | None = None

    def begin_anew(self) -> None:
        """Watch other workers, of which no inner step is known."""
        self._slowest = None

    @contextmanager
    def watching(self, on_report: Callable[[Report], None]) -> Iterator[Callable[[Report], None]]:
        """Watch a training; yield what is to hear its reports, and passes them on."""

        def hear(report: Report) -> None:
            self.heard()
            if isinstance(report, InnerStepDone) and report.slowest_seconds != self._slowest:
                self._slowest = report.slowest_seconds
                self._wait()
            on_report(report)

        self.heard()
        self._wait()
        try:
            yield hear
        finally:
            if self._look is not None:
                self._look.cancel()

    def heard(self) -> None:
        """Begin to count from none: there was a word of the workers."""
        self._silent = 0

    def _wait(self) -> None:
        """Look after a part of the patience, instead of when it was to be."""
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_later(patience(self._slowest) / LOOKS, self._looked)

    def _looked(self) -> None:
        self._silent = 0 if self._is_excused() else self._silent + 1
        if self._silent > LOOKS:
            self._on_hang(patience(self._slowest))
        else:
            self._wait()


class _Restarts:
    """Up to `allowed` restarts in a row. After a device ran out of memory, instead, one with as many windows at once as
    fit uncompiled, if these are fewer, and one with half as many."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self.left = allowed
        self._micro_batch = self._fewer = 0
        self._has_halved = False

    def begin_anew(self) -> None:
        """All went well: count from none."""
        self.left = self._allowed

    def started(self, micro_batch: int, uncompiled: int) -> None:
        """Workers have started that put so many windows through the model at once, and so many uncompiled."""
        self._micro_batch, self._fewer = micro_batch, uncompiled

    def after(self, error: DilocoPeerError, is_starting: bool) -> int | None:
        """Return the windows at once with which to start the next workers; None: as many as before.

        The present ones failed with `error`, perhaps while `is_starting`. Raises: the error, when there is to be no
        other start.
        """
        is_short, before = isinstance(error, DeviceMemoryError), self._micro_batch
        if is_short and (self._fewer < before or (not self._has_halved and before > 1)):
            if self._fewer == before:
                self._fewer, self._has_halved = before // 2, True
            self._micro_batch = self._fewer
            logger.warning(
                "%s The workers start again with %d windows at once instead of %d; --micro-batch %d does so at once.",
                *(error.message, self._fewer, before, self._fewer),
            )
            return self._fewer
        if not self.left or (is_short and not is_starting):
            raise error
        self.left -= 1
        logger.warning("%s The workers start again, without what they did last.", error.message)
        return None


class _RequestQueue:
    """Requests that queue up behind one another. Each goes on to its end even when nobody waits for it any more."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks only weakly

    def add(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Begin when all that were added before are done. Wait for it with `asyncio.shield`."""

        async def in_turn() -> Result:
            async with self._turn:
                return await work()

        return self.keep(in_turn())

    def keep(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begin now; should it fail while nobody waits for it, asyncio prints nothing."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def idle(self) -> None:
        """Return once all of them have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
