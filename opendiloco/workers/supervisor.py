"""The supervisor of a volunteer's workers: it starts workers, sends them commands, and replaces lost ones.

All workers do the same at the same time, and end together. Workers that share a model wait for each other in every
collective, so the others would wait forever for a dead or failed worker.
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
"""Seconds to wait for the errors of the other workers after one has failed, because one of them may be the cause."""
COMPILING_SECONDS = 1800.0
"""Time limit for compiling all blocks. A working compiler takes seconds, or minutes on a slow machine."""
LOOKS = 10
"""Number of checks for progress within the time for which workers may be silent."""
LOST = (WorkerDeathError, UnexpectedWorkerError, DeviceError)
"""Failures after which restarted workers may succeed."""

Result = TypeVar("Result")


class WorkersRestartedError(Exception):
    """The workers died or failed during a request. Replacement workers run, but the caller must send the request
    again."""


class Supervisor:
    """The supervisor of a volunteer's workers. `start` starts the workers, `ask` sends them a command, `close` ends
    them. Callers add functions that use the workers to the queue `requests`, which runs them one after the other."""

    def __init__(self, config: RunConfig, options: WorkerOptions) -> None:
        self.memory_descriptor = create_memory_file()
        self.requests = _RequestQueue()
        self.kept_moments: tuple[Path, str] | None = None
        """The file with the newest moments that this machine has written, and the id of their run. Replacement workers
        continue with these moments."""
        self.pool = _WorkerPool(self.memory_descriptor)
        self.death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        """The error to raise once the workers are dead and are not replaced."""
        self._config = config
        self._options = options
        self.uncompiled = ""
        """The reason why the present workers train uncompiled transformer blocks although compiled ones would be
        faster; else empty."""
        self._lost: DilocoPeerError | None = None  # the error that made the supervisor kill the workers
        self._restarts = _Restarts(options.restarts)
        self._moving = asyncio.Lock()  # lock that a task holds while workers write or load moments
        self._watchdog = _Watchdog(self._hung, lambda: self._is_held or self._moving.locked())
        self._is_closing = self._is_held = False

    @property
    def workers(self) -> list[WorkerProcess]:
        """The running workers, in the order of ranks."""
        return self.pool.workers

    def tell(self, command: ControlMessage) -> None:
        """Send all workers a command to which they do not reply."""
        for worker in self.workers:
            worker.write(command)

    def hold(self, held: bool) -> None:
        """Pause training in all workers if `held`, or else resume it. Workers started during a pause are paused,
        too."""
        self._is_held = held
        self._watchdog.heard()
        self.tell(Hold(held=held))

    async def close(self) -> None:
        """End the workers, and wait until their processes have ended."""
        self._is_closing = True
        await self.pool.close()
        await self.requests.idle()
        await self.pool.close()  # a second time, because the last requests may have started new workers
        if self.memory_descriptor >= 0:
            os.close(self.memory_descriptor)
            self.memory_descriptor = -1

    # Starting and ending ---------------------------------------------------------------------------------------------
    async def start(self, fresh: bool = True) -> Configured:
        """Start the workers, wait until all have built their models and data, and return the first worker's reply. If
        `fresh`, the first worker writes the initial theta into the shared memory.

        Raises: MachineError, DataError or ManifestError; WorkerError when a worker dies meanwhile.
        """
        if self._is_closing:
            raise WorkerError("the workers were closed while they started.")
        pool = self.pool = _WorkerPool(self.memory_descriptor)
        self._watchdog.begin_anew()

        def died(death: asyncio.Future[DilocoPeerError]) -> None:
            if not pool.is_over:
                self._lose(death.result())

        def heard_of_other(stage: str, share: float | None) -> None:
            if stage in WITH_A_COMPILER:  # each stage that compiles has its own time limit
                with suppress(RuntimeError):  # raised if the start, and with it the time limit, is over
                    compiling.reschedule(asyncio.get_running_loop().time() + COMPILING_SECONDS)

        def heard_of_first(stage: str, share: float | None) -> None:
            log(stage, share)
            self._watchdog.heard()
            at_stage(stage, share)  # displays only the first worker's stage, because all workers reach it together
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
                "a worker's compiler did not finish in %.0f minutes. The workers start again without compiling and "
                "train more slowly.",
                COMPILING_SECONDS / 60,
            )
            self._options = replace(self._options, compile=False)
            self.uncompiled = f"the compiler did not finish in {COMPILING_SECONDS / 60:.0f} minutes."
            return await self._start_again()
        self._restarts.started(answers[0].micro_batch, answers[0].uncompiled_micro_batch)
        if self._options.micro_batch is None and self._options.trains:
            _log_micro_batch(self._config.training, len(self.workers), answers[0].micro_batch)
        self._report_compiling(answers)
        HEALTH.recovered("workers")
        return answers[0]

    def _report_compiling(self, answers: Sequence[Configured]) -> None:
        """Set a metric to 1 if all workers have compiled the model's transformer blocks, else to 0. If a worker could
        not compile them, log the reason."""
        COMPILED.set(min(answer.is_compiled for answer in answers))
        if self._options.compile is not False:  # False: the owner turned it off, or the compiler was too slow
            self.uncompiled = next((answer.uncompiled for answer in answers if answer.uncompiled), "")
        if self.uncompiled:
            logger.warning("this machine trains uncompiled, which takes longer: %s", self.uncompiled)

    async def _start_again(self) -> Configured:
        """Start new workers, which read theta from shared memory, and return the first worker's reply."""
        await self.pool.close()
        if stuck := [worker.name for worker in self.workers if worker.is_running]:
            raise MachineError(f"a GPU's driver keeps killed workers running: {', '.join(stuck)}.", LOOK_AT_DEVICE)
        self._lost = None
        return await self.start(fresh=False)

    def _lose(self, error: DilocoPeerError) -> None:
        """Kill the running workers after an error. The next request replaces them, unless no restarts are left."""
        if self._lost is not None:
            return
        self._lost = error
        HEALTH.failing("workers", error.message)
        self.pool.kill()
        if not self._restarts.left:
            self._die(error)

    def _hung(self, seconds: float) -> None:
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
        """Send a command to all workers, or to the first `workers` of them, and return the first worker's answer.

        This is the one place that decides whether failed workers are replaced. It also replaces workers that died
        between two requests. The restarts count anew after each training that ends well or, if nothing is trained,
        after each answer.

        Raises: WorkersRestartedError when workers were lost or ran out of memory during this request, and others have
        been started; otherwise the workers' error.
        """
        if self._lost is not None:
            await self._replace_after(self._lost)
        try:
            if isinstance(command, RunInnerLoop) and command.goes_on and not self.pool.has_trained:
                raise WorkersRestartedError  # these workers are replacements, with no training to continue
            is_training = isinstance(command, RunInnerLoop)
            with self._watchdog.watching(on_report) if is_training else nullcontext(on_report) as hear:
                [answered, *_] = await self._exchange([command] * (workers or len(self.workers)), answer, hear)
        except (DeviceMemoryError, *LOST) as error:
            await self._replace_after(error)
            raise WorkersRestartedError from error
        except DilocoPeerError as error:
            if len(self.workers) > 1 and workers is None:
                self._die(error)  # otherwise the other workers would wait forever for the failed worker
            raise
        self.pool.has_trained |= isinstance(answered, InnerLoopDone)
        if isinstance(answered, InnerLoopDone) or not self._options.trains:
            self._restarts.begin_anew()
        return answered

    async def _replace_after(self, error: DilocoPeerError) -> None:
        """Start replacements of workers that failed with `error`, and load the optimizer's `kept_moments` into them. If
        they fail while they start, start others, until no restart is left.

        Raises: the error that makes a replacement impossible; the workers are dead then.
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
                except (DeviceMemoryError, *LOST) as next_error:
                    error, is_starting = next_error, True
        except DilocoPeerError as final:
            self._die(final)
            raise

    async def _exchange(
        self,
        commands: Sequence[ControlMessage],
        answer: type[Answer],
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> list[Answer]:
        """Send each worker its command and return the answers, in the order of ranks. If there are fewer commands than
        workers, the last workers get none.

        Raises: the reason why the workers are lost or, when a worker fails, the most probable cause.
        """
        pairs = zip(self.workers, commands, strict=False)
        tasks = [self.requests.keep(worker.exchange(command, answer, on_report)) for worker, command in pairs]
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if unfinished:
            await asyncio.wait(unfinished, timeout=EXPLANATION_SECONDS)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            # When one worker fails, collective operations of the others fail with unexpected errors. So raise an error
            # that is in EXPECTED_ERRORS, if there is one.
            raise self._lost or min(errors, key=lambda error: isinstance(error, UnexpectedWorkerError)) from None
        return [task.result() for task in tasks]

    # The inner optimizer's state -------------------------------------------------------------------------------------
    async def keep_moments(self, path: Path, run: str, index: int) -> None:
        """Make the workers write the inner optimizer's moments to the file `path`. `index` is the number of outer steps
        that the run `run` has taken.

        Raises: SnapshotError when there are no moments, or the file cannot be written; WorkerError when a worker dies.
        """
        await self._move(KeepMoments(path=str(path.absolute()), run=run, index=index))

    async def recall_moments(self, path: Path, run: str) -> None:
        """Load the inner optimizer's moments from a file into the workers, and into replacement workers that start
        later. Raises: the errors of `keep_moments`."""
        await self._move(RecallMoments(path=str(path.absolute()), run=run))
        self.kept_moments = path, run

    async def _recall_kept_moments(self) -> None:
        """Load the kept moments into replacement workers. If that fails, the inner optimizer starts without moments."""
        if self.kept_moments is None:
            return
        path, run = self.kept_moments
        try:
            await self._move_now(RecallMoments(path=str(path.absolute()), run=run))
        except SnapshotError as error:
            logger.warning("the inner optimizer begins anew: %s: %s", path, error)
        else:
            logger.info("the inner optimizer continues with the moments in %s", path)

    async def _move(self, command: MoveMoments) -> None:
        """Send the workers a command to write or load the optimizer's moments once earlier such commands are done, and
        wait for the replies.

        A single worker moves moments during training. Several workers do so only between trainings, because they are
        not at the same step at the same time. Once all of them have the command, the next request may follow.
        """
        if len(self.workers) == 1:
            move = self.requests.keep(self._move_now(command))
        else:
            move = await asyncio.shield(self.requests.add(partial(self._begin_move, command)))
        await asyncio.shield(move)

    async def _begin_move(self, command: MoveMoments) -> asyncio.Task[None]:
        are_given = asyncio.Event()
        move = self.requests.keep(self._move_now(command, are_given))
        await are_given.wait()
        return move

    async def _move_now(self, command: MoveMoments, are_given: asyncio.Event | None = None) -> None:
        """Send all workers a command to write or load the optimizer's moments, and wait for their replies. Raises: the
        error of the first worker that failed."""
        async with self._moving:
            moves = [start_task(worker.move_moments(command)) for worker in self.workers]
            await asyncio.sleep(0)  # lets each task send its command
            if are_given is not None:
                are_given.set()
            moved = await asyncio.gather(*moves, return_exceptions=True)
        problems = [result for result in moved if isinstance(result, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self.death.done():
            raise SnapshotError("the worker is gone")  # a replacement worker will start
        if problems:
            raise problems[0]


class _WorkerPool:
    """Workers that are started and ended together, ordered by rank. A new pool is empty until `start`."""

    def __init__(self, memory_descriptor: int) -> None:
        self.workers: list[WorkerProcess] = []
        self._memory = memory_descriptor
        self._devices: list[str] = []
        self.is_over = False
        """True once the pool is being closed, so that the end of its workers is no loss."""
        self.has_trained = False
        """True once its workers have carried out a training from which they can go on."""

    async def start(
        self, config: RunConfig, options: WorkerOptions, fresh: bool, watch_first: Watch, watch_other: Watch
    ) -> list[Configure]:
        """Start one worker per device, and return each worker's `Configure` command. Call `watch_first` with the first
        worker's stages, `watch_other` with the others'. If `fresh`, shared memory does not hold theta yet.

        The first worker starts before the others, because it counts the GPUs with torch.

        Raises: MachineError when the machine has too few GPUs, or torch cannot use them; WorkerError when a worker
        dies, or the pool is closed meanwhile.
        """
        with socket.create_server((LOOPBACK, 0)) as listener:
            descriptor, port = listener.fileno(), listener.getsockname()[1]  # the workers connect to this port
            # The first worker starts before the devices are known, so it gets as many threads as a worker on the CPU.
            threads = choose_threads(options, ["cpu"] * options.cpu_workers, usable_cores())
            first = await WorkerProcess.start((self._memory, descriptor), threads, watch_first)
        self.workers.append(first)
        if self.is_over:
            raise WorkerError("the workers were closed while they started.")
        gpus = 0
        if needs_gpu_count(options):
            counted = await first.exchange(CountDevices(), DevicesCounted, lambda progress: None)
            if counted.problem and options.trains:  # a CPU, a hundred times slower, is no substitute
                raise MachineError(f"{counted.problem}.", counted.remedy)
            gpus = counted.gpus
        self._devices = choose_devices(options, gpus)
        threads = choose_threads(options, self._devices, usable_cores())
        for _ in self._devices[1:]:
            other = await WorkerProcess.start((self._memory,), threads, watch_other)
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
        """The devices that the workers train on, as text, such as "2 x cuda"."""
        first, *others = self._devices
        return f"{len(self._devices)} x {first.partition(':')[0]}" if others else first

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    async def close(self) -> None:
        self.is_over = True
        await asyncio.gather(*(worker.close() for worker in self.workers))


def _log_micro_batch(training: TrainingSection, workers: int, micro_batch: int) -> None:
    """Log the number of windows that each worker computes at once, unless this is its whole part of a batch."""
    piece = -(-training.batch_size // workers)
    if micro_batch < piece:
        reason = "as the run recommends" if micro_batch == training.micro_batch else "because memory is short"
        logger.info(
            "each worker puts %d of its %d windows through the model at once, %s; set --micro-batch to change this",
            *(micro_batch, piece, reason),
        )


class _Watchdog:
    """A detector of hung workers: of those that, in training, send no report for longer than `patience` allows.

    It counts checks in a row without a report. Time in which this process was stopped or the machine asleep therefore
    does not count. `on_hang` gets the seconds of silence. Silence while `is_excused()` does not count.
    """

    def __init__(self, on_hang: Callable[[float], None], is_excused: Callable[[], bool]) -> None:
        self._on_hang = on_hang
        self._is_excused = is_excused
        self._slowest: float | None = None  # seconds of the running workers' slowest inner step
        self._silent = 0
        self._look: asyncio.TimerHandle | None = None

    def begin_anew(self) -> None:
        self._slowest = None

    @contextmanager
    def watching(self, on_report: Callable[[Report], None]) -> Iterator[Callable[[Report], None]]:
        """Watch for hung workers in a `with` block. Yield a function that must get each report; it calls
        `on_report`."""

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
        self._silent = 0

    def _wait(self) -> None:
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
    """A counter of restarts, which decides whether lost workers are restarted: up to `allowed` times in a row.

    After a device ran out of memory there are two extra restarts: one with as many windows at once as fit uncompiled,
    if these are fewer, and one with half as many.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = self.left = allowed
        self._micro_batch = self._fewer = 0
        self._has_halved = False

    def begin_anew(self) -> None:
        self.left = self._allowed

    def started(self, micro_batch: int, uncompiled: int) -> None:
        """Record how many windows each new worker computes at once, and how many would fit in memory without
        compiling."""
        self._micro_batch, self._fewer = micro_batch, uncompiled

    def after(self, error: DilocoPeerError, is_starting: bool) -> int | None:
        """Return how many windows each replacement worker is to compute at once, or None for as many as before.

        The present workers failed with `error`, while they started if `is_starting`. Raises: `error`, when no restart
        is left.
        """
        is_short, before = isinstance(error, DeviceMemoryError), self._micro_batch
        if is_short and (self._fewer < before or (not self._has_halved and before > 1)):
            if self._fewer == before:
                self._fewer, self._has_halved = before // 2, True
            self._micro_batch = self._fewer
            logger.warning(
                "%s The workers start again with %d windows at once instead of %d. Next time, use --micro-batch %d.",
                *(error.message, self._fewer, before, self._fewer),
            )
            return self._fewer
        if not self.left or (is_short and not is_starting):
            raise error
        self.left -= 1
        logger.warning("%s The workers start again; their last work is lost.", error.message)
        return None


class _RequestQueue:
    """A queue of requests that run one after the other. A request runs to its end even if its caller is cancelled."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # keeps tasks alive: the event loop has only weak references

    def add(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Run `work` after all requests added earlier, and return its task. Await the task with `asyncio.shield`."""

        async def in_turn() -> Result:
            async with self._turn:
                return await work()

        return self.keep(in_turn())

    def keep(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` at once, and return its task. If the task fails and is not awaited, asyncio logs no warning."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
