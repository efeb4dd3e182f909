"""The peer process's handle on one worker process. Knows no torch; speaks the control protocol.

The worker's death is noticed at once, since its end of the control channel closes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from opendiloco.errors import DataError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.workers.control import (
    LINE_LIMIT,
    AtStage,
    ControlMessage,
    Failed,
    InnerStepDone,
    MomentsMoved,
    MoveMoments,
    Reply,
    parse_reply,
)
from opendiloco.workers.last_words import LastWords
from peers.errors import DilocoPeerError, ManifestError
from peers.net.signals import signals_held_back
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0

Answer = TypeVar("Answer", bound=ControlMessage)

EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error for error in (DataError, DeviceMemoryError, MachineError, ManifestError, WorkerError)
}


class UnexpectedWorkerError(WorkerError):
    """The worker failed in a way that none of ours describes."""


class WorkerDeathError(WorkerError):
    """The worker's process has ended."""


class Inherited(NamedTuple):
    """What a worker inherits: memory files for vectors and for moments, and, if it is the first, where all meet."""

    memory: int
    moments: int
    listener: int | None = None


class WorkerProcess:
    """A running worker. Made by `start`; `close` ends it. One request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.name = "the worker"
        self.on_stage: Callable[[str, float | None], None] = lambda stage, share: None
        self._process = process
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[MomentsMoved | None] = asyncio.Queue()
        self._death: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self._output = LastWords()
        self._is_ended = False
        """Whether its end is our doing."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, descriptors: Inherited, threads: int) -> WorkerProcess:
        """Start a worker that inherits these descriptors."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker = cls(await _spawn(theirs.fileno(), descriptors, threads))
        try:
            await worker._listen(ours)
        except BaseException:
            worker.kill()
            raise
        return worker

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_progress: Callable[[InnerStepDone], None]
    ) -> Answer:
        """Send a command and wait for its answer. Must not be cancelled, or the next command gets this one's answer.

        Raises: the worker's error as one of ours; WorkerError when it dies.
        """
        self.write(command)
        while True:
            reply = await self._next_reply()
            if isinstance(reply, InnerStepDone):
                on_progress(reply)
            elif isinstance(reply, Failed):
                raise _rebuild(reply)
            elif isinstance(reply, answer):
                return reply
            else:
                raise WorkerError(f"the worker answered {command} with {reply}.", "This is a bug; report it.")

    async def move_moments(self, command: MoveMoments) -> None:
        """Also while it answers another command. One at a time.

        Raises: SnapshotError when they cannot be moved; WorkerError when it dies.
        """
        self.write(command)
        reply = await self._moments_replies.get()
        if reply is None:
            self._moments_replies.put_nowait(None)
            raise self._death.result()
        if reply.problem is not None:
            raise SnapshotError(reply.problem)

    def write(self, message: ControlMessage) -> None:
        """What is written to a dead worker is lost without an error; its death is what the caller then waits for."""
        if not self._writer.is_closing():
            self._writer.write(message.line())

    async def wait_for_death(self) -> WorkerError:
        """Returns what to raise once the worker is dead."""
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        self._is_ended = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the worker: by closing its channel, else with SIGKILL. Leaves no process behind."""
        self._is_ended = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        output = asyncio.create_task(self._read_output())
        self._tasks = [output, asyncio.create_task(self._read_replies(reader, output))]

    async def _next_reply(self) -> Reply:
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            raise self._death.result()
        return reply

    async def _read_replies(self, reader: asyncio.StreamReader, output: asyncio.Task[None]) -> None:
        try:
            while line := await reader.readline():
                reply = parse_reply(line)
                if isinstance(reply, AtStage):
                    self.on_stage(reply.stage, reply.share)
                elif isinstance(reply, MomentsMoved):
                    self._moments_replies.put_nowait(reply)
                else:
                    self._replies.put_nowait(reply)
            await self._process.wait()
        except ConnectionError:  # it has ended before it read all that we said
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        except (ValidationError, ValueError) as error:
            self._output.heard(f"control channel: {error}")
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
                self._output.heard(line.decode(errors="replace"))

    def _describe_death(self) -> WorkerDeathError:
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        if not self._is_ended:
            self._output.log(self.name)
        remedy = "If the machine ran out of memory, use a smaller batch or another machine; then join again."
        return WorkerDeathError(f"{self.name} {how}.{self._output.sentence()}", remedy)


async def _spawn(control: int, descriptors: Inherited, threads: int) -> asyncio.subprocess.Process:
    """The worker sees the same modules as we do, whatever folder we were started in, and prints to a pipe of ours.

    Its collectives stay on the loopback interface.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    named = {"control": control} | descriptors._asdict()
    given = {name: number for name, number in named.items() if number is not None}
    command = ["-P", "-m", "opendiloco.workers.worker", *(f"--{name}={number}" for name, number in given.items())]
    with signals_held_back():  # it would be gone before a polite leave could finish the round under way
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            pass_fds=given.values(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )


def _rebuild(failure: Failed) -> DilocoPeerError:
    """The worker's error as one of ours; unexpected ones as a WorkerError, with the worker's traceback as a note."""
    expected = EXPECTED_ERRORS.get(failure.error)
    error: DilocoPeerError
    if expected is not None:
        error = expected(failure.message, failure.remedy)
    else:
        logger.error("in the worker:\n%s", failure.traceback.rstrip())
        said = f"the worker failed: {failure.error}: {failure.message}."
        error = UnexpectedWorkerError(said, "This may be a bug; report it.")
    error.add_note(f"In the worker:\n{failure.traceback}")
    return error
