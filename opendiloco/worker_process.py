"""The peer process's handle on its worker. Knows no torch; speaks the control protocol.

The worker's death is noticed at once, since its end of the control channel closes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from opendiloco.config import RunConfig
from opendiloco.control import (
    LINE_LIMIT,
    Configure,
    Configured,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    Failed,
    Generate,
    Generated,
    LoadMoments,
    Message,
    MomentsMoved,
    Reply,
    RunFacts,
    StopTraining,
    StoreMoments,
    Train,
    TrainingDone,
    TrainingProgress,
    parse_reply,
)
from opendiloco.errors import DataError, MachineError, WorkerError
from opendiloco.shared_memory import SharedVectors, copy_bytes, create_memory_file
from peers.errors import DilocoPeerError, ManifestError
from peers.leases import SampleRange
from peers.memory_file import MemoryFile
from peers.signals import signals_held_back
from peers.workload import Progress, SnapshotError, Trained

OUTPUT_LINES_KEPT = 20
CLOSE_SECONDS = 2.0

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")

EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error for error in (DataError, MachineError, ManifestError, WorkerError)
}


class WorkerProcess:
    """A running, configured worker. Made by `start`; `close` ends it. Requests queue up behind one another."""

    vectors: SharedVectors
    tokens_per_sample: int
    device: str

    def __init__(self, process: asyncio.subprocess.Process, memory_descriptor: int, moments_descriptor: int) -> None:
        self._process = process
        self._memory_descriptor = memory_descriptor
        self._moments_descriptor = moments_descriptor
        self._turn = asyncio.Lock()
        self._moments_turn = asyncio.Lock()
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[MomentsMoved | None] = asyncio.Queue()
        self._death: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self._trainings = 0
        self._output: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        self._tasks: list[asyncio.Task[None]] = []
        self._requests: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks only weakly

    @classmethod
    async def start(cls, config: RunConfig, device: str = "auto", threads: int = 1) -> WorkerProcess:
        """Start a worker and have it build model and data: seconds, mostly imports.

        Raises: MachineError, DataError, ManifestError, or WorkerError when it dies meanwhile.
        """
        ours, theirs = socket.socketpair()
        memory_descriptor, moments_descriptor = create_memory_file(), create_memory_file()
        with theirs:
            process = await _spawn(theirs.fileno(), memory_descriptor, moments_descriptor, threads)
        worker = cls(process, memory_descriptor, moments_descriptor)
        try:
            await worker._listen(ours)
            await worker._configure(config, device, threads)
        except BaseException:
            await worker.close()
            raise
        return worker

    async def train(
        self,
        index: int,
        samples: tuple[SampleRange, ...],
        steps: int,
        tokens: int,
        on_progress: Callable[[Progress], None],
    ) -> Trained:
        """Train and publish into `vectors.local`; see `Replica.train`. When cancelled, stops within one inner step.

        Raises: WorkerError when the worker dies or a loss is not finite.
        """

        wanted = True

        def report(message: TrainingProgress) -> None:
            if wanted:
                on_progress(Progress(message.inner_step, message.loss, message.tokens_per_second))

        self._trainings += 1
        command = Train(number=self._trainings, index=index, samples=samples, steps=steps, tokens=tokens)
        request = self._begin(self._exchange(command, TrainingDone, report))
        try:
            done = await asyncio.shield(request)
        except asyncio.CancelledError:
            wanted = False
            self._write(StopTraining(number=command.number))
            await asyncio.wait([request])
            raise
        return Trained(done.samples, done.tokens, done.loss)

    async def evaluate(self, windows: int) -> Evaluated:
        """Held-out loss of theta over at most so many windows."""
        return await self._ask(Evaluate(windows=windows), Evaluated)

    async def generate(self, prompt: str, tokens: int, seed: int = 0) -> str:
        """theta's continuation of a prompt."""
        return (await self._ask(Generate(prompt=prompt, tokens=tokens, seed=seed), Generated)).text

    async def export(self, folder: Path, facts: RunFacts) -> None:
        """Write theta as a model folder. Raises: MachineError when it cannot be written."""
        await self._ask(Export(folder=str(folder.absolute()), facts=facts), Exported)

    async def store_moments(self, out: memoryview) -> None:
        """The inner optimizer's state (see moments.py) as it is after some inner step; training need not end for it.

        Raises: SnapshotError when the worker has none to give; OSError without memory; WorkerError when it dies.
        """
        await self._finish(self._move_moments(StoreMoments(), out))

    async def load_moments(self, moments: memoryview) -> None:
        """Have the inner optimizer go on with checked moments. Raises: as `store_moments`."""
        await self._finish(self._move_moments(LoadMoments(), moments))

    async def wait_for_death(self) -> WorkerError:
        """Returns what to raise once the worker is dead; a caller that only waits for `close` cancels this."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """End the worker: by closing its channel, else with SIGKILL. Leaves no process behind."""
        if self._tasks:
            self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in unfinished:
                task.cancel()
        if self._memory_descriptor >= 0:
            os.close(self._memory_descriptor)
            os.close(self._moments_descriptor)
            self._memory_descriptor = -1

    async def _listen(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        output = asyncio.create_task(self._read_output())
        self._tasks = [output, asyncio.create_task(self._read_replies(reader, output))]

    async def _configure(self, config: RunConfig, device: str, threads: int) -> None:
        command = Configure(manifest_content=config.to_manifest_content(), device=device, threads=threads)
        configured = await self._ask(command, Configured)
        self.vectors = SharedVectors(self._memory_descriptor, configured.parameters)
        self.tokens_per_sample = configured.tokens_per_sample
        self.device = configured.device

    async def _ask(self, command: Message, answer: type[Answer]) -> Answer:
        return await self._finish(self._exchange(command, answer, lambda progress: None))

    async def _finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` gives. It goes on to its end even if we are cancelled."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A request goes on to its reply even when nobody waits for it any more, so that no reply goes astray."""
        task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, request: asyncio.Task[Any]) -> None:
        """asyncio would print the errors of requests that nobody waits for any more."""
        self._requests.discard(request)
        if not request.cancelled():
            request.exception()

    async def _exchange(
        self, command: Message, answer: type[Answer], on_progress: Callable[[TrainingProgress], None]
    ) -> Answer:
        async with self._turn:
            self._write(command)
            while True:
                reply = await self._next_reply()
                if isinstance(reply, TrainingProgress):
                    on_progress(reply)
                elif isinstance(reply, Failed):
                    raise _rebuild(reply)
                elif isinstance(reply, answer):
                    return reply
                else:
                    raise WorkerError(f"the worker answered {command} with {reply}.", "This is a bug; report it.")

    async def _move_moments(self, command: StoreMoments | LoadMoments, moments: memoryview) -> None:
        """Through memory that both processes see, and that is taken only for so long."""
        async with self._moments_turn:
            memory = await asyncio.to_thread(MemoryFile, os.dup(self._moments_descriptor), len(moments))
            try:
                if isinstance(command, LoadMoments):
                    await asyncio.to_thread(copy_bytes, moments, memory.data)
                await self._ask_aside(command)
                if isinstance(command, StoreMoments):
                    await asyncio.to_thread(copy_bytes, memory.data, moments)
            finally:
                os.truncate(memory.descriptor, 0)

    async def _ask_aside(self, command: StoreMoments | LoadMoments) -> None:
        """Not in turn with other requests: the worker does it between two inner steps."""
        self._write(command)
        reply = await self._moments_replies.get()
        if reply is None:
            self._moments_replies.put_nowait(None)
            raise self._death.result()
        if reply.problem is not None:
            raise SnapshotError(reply.problem)

    async def _next_reply(self) -> Reply:
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            raise self._death.result()
        return reply

    def _write(self, message: Message) -> None:
        # What is written to a dead worker is lost without an error; its death is what the caller then waits for.
        if not self._writer.is_closing():
            self._writer.write(message.line())

    async def _read_replies(self, reader: asyncio.StreamReader, output: asyncio.Task[None]) -> None:
        try:
            while line := await reader.readline():
                reply = parse_reply(line)
                if isinstance(reply, MomentsMoved):
                    self._moments_replies.put_nowait(reply)
                else:
                    self._replies.put_nowait(reply)
            await self._process.wait()
        except (ConnectionError, ValidationError, ValueError) as error:
            self._output.append(f"control channel: {error}")
            self._process.kill()
            await self._process.wait()
        await asyncio.wait([output], timeout=CLOSE_SECONDS)
        self._death.set_result(self._describe_death())
        self._replies.put_nowait(None)
        self._moments_replies.put_nowait(None)

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while not self._process.stdout.at_eof():
            with contextlib.suppress(ValueError):  # a line beyond the reader's limit; asyncio has dropped it
                line = await self._process.stdout.readline()
                self._output.append(line.decode(errors="replace").rstrip())

    def _describe_death(self) -> WorkerError:
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        said = f" Its last words: {' | '.join(filter(None, self._output))}" if any(self._output) else ""
        remedy = "If the machine ran out of memory, use a smaller batch or another machine; then join again."
        return WorkerError(f"the worker {how}.{said}", remedy)


async def _spawn(control: int, memory: int, moments: int, threads: int) -> asyncio.subprocess.Process:
    """The worker sees the same modules as we do, whatever folder we were started in, and prints to a pipe of ours."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(threads)}
    descriptors = {"--control": control, "--memory": memory, "--moments": moments}
    command = ["-P", "-m", "opendiloco.worker", *(word for pair in descriptors.items() for word in map(str, pair))]
    with signals_held_back():  # it would be gone before a polite leave could finish the round under way
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            pass_fds=descriptors.values(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )


def _rebuild(failure: Failed) -> DilocoPeerError:
    """The worker's error as one of ours; unexpected ones as a WorkerError, with the worker's traceback as a note."""
    expected = EXPECTED_ERRORS.get(failure.error)
    if expected is not None:
        error = expected(failure.message, failure.remedy)
    else:
        error = WorkerError(f"the worker failed: {failure.error}: {failure.message}.", "This may be a bug; report it.")
    error.add_note(f"In the worker:\n{failure.traceback}")
    return error
