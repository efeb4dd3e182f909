"""The peer process's handle on one worker process, and what that prints. Knows no torch; speaks the control protocol.

The worker's death is noticed at once, since its end of the control channel closes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

from pydantic import ValidationError

from opendiloco.errors import WorkerError
from opendiloco.workers.control import (
    LINE_LIMIT,
    AtStage,
    ControlMessage,
    Failed,
    MomentsMoved,
    MoveMoments,
    Reply,
    Report,
    parse_reply,
    rebuild,
)
from peers.errors import DilocoPeerError
from peers.network.signals import signals_held_back
from peers.values.workload import SnapshotError

Answer = TypeVar("Answer", bound=ControlMessage)

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
LOOK_SECONDS = 0.2
LINES_KEPT = 60
"""As many as a traceback through torch has."""
LINE_LENGTH = 500
IN_A_SENTENCE = 3
"""Lines that an error repeats, the last ones; the log has all that were kept."""
TERMINAL_COMMANDS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Inherited(NamedTuple):
    """What a worker inherits: the memory file for vectors and, if it is the first, the socket where all meet."""

    memory: int
    listener: int | None = None

    def named(self) -> dict[str, int]:
        """Return the descriptors by the worker's options for them."""
        numbers = {"memory": self.memory, "listener": self.listener}
        return {name: number for name, number in numbers.items() if number is not None}


class LastWords:
    """The last lines that a worker has printed, fit for a terminal: without colours, progress bars as they ended."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def heard(self, line: str) -> None:
        """Take a line."""
        plain = TERMINAL_COMMANDS.sub("", line).rstrip().rpartition("\r")[2].replace("\t", "    ")[:LINE_LENGTH]
        shown = "".join(character if character.isprintable() else " " for character in plain)
        if shown.strip():
            self._lines.append(shown)
            logger.debug("the worker says: %s", shown)

    def sentence(self) -> str:
        """Return the last lines as the end of an error's message; nothing if there are none."""
        lines = [line.strip() for line in self._lines][-IN_A_SENTENCE:]
        return f" Its last words: {' | '.join(lines)}" if lines else ""

    def log(self, name: str) -> None:
        """Log all that was kept."""
        if self._lines:
            logger.error("%s printed last:\n%s", name, "\n".join(f"    {line}" for line in self._lines))


class WorkerDeathError(WorkerError):
    """The worker's process has ended."""


class WorkerProcess:
    """A running worker: takes one request at a time, and moves of moments beside it. Made by `start`; `close` ends
    it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.name = "the worker"
        self.on_stage: Callable[[str, float | None], None] = lambda stage, share: None
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[MomentsMoved | None] = asyncio.Queue()
        self._death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        self._process = process
        self._output = LastWords()
        self._is_ended = False
        """Whether its end is our doing."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, descriptors: Inherited, threads: int) -> Self:
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

    def write(self, message: ControlMessage) -> None:
        """What is written to a dead worker is lost without an error; its death is what the caller then waits for."""
        if not self._writer.is_closing():
            self._writer.write(message.line())

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_report: Callable[[Report], None]
    ) -> Answer:
        """Send a command and wait for its answer. Must not be cancelled, or the next command gets this one's answer.

        Raises: the worker's error as one of ours; WorkerError when it dies.
        """
        self.write(command)
        while True:
            reply = await self._next_reply()
            if isinstance(reply, Report):
                on_report(reply)
            elif isinstance(reply, Failed):
                raise rebuild(reply)
            elif isinstance(reply, answer):
                return reply
            else:
                raise WorkerError(f"the worker answered {command} with {reply}.", "This is a bug; report it.")

    async def move_moments(self, command: MoveMoments) -> None:
        """Have the worker move moments. Also while it answers another command. One at a time.

        Raises: SnapshotError when they cannot be moved; WorkerError when it dies.
        """
        self.write(command)
        reply = await self._moments_replies.get()
        if reply is None:
            self._moments_replies.put_nowait(None)
            raise self._death.result()
        if reply.problem is not None:
            raise SnapshotError(reply.problem)

    async def wait_for_death(self) -> DilocoPeerError:
        """Returns what to raise once the worker is dead."""
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        """End the worker at once, without waiting for its end."""
        self._is_ended = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the worker: by closing its channel, else with SIGKILL. Leaves no process behind."""
        self._is_ended = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._ended(), CLOSE_SECONDS)
        except TimeoutError:
            self.kill()
            await self._ended()
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(self._describe_death())

    def _hear(self, line: bytes) -> None:
        """Take a line of the worker's. Raises: pydantic.ValidationError when it is none of the protocol's."""
        reply = parse_reply(line)
        if isinstance(reply, AtStage):
            self.on_stage(reply.stage, reply.share)
        elif isinstance(reply, MomentsMoved):
            self._moments_replies.put_nowait(reply)
        else:
            self._replies.put_nowait(reply)

    def _end(self, death: DilocoPeerError) -> None:
        """The worker is dead: `death` is what everybody gets who waits for it."""
        if not self._death.done():
            self._death.set_result(death)
            self._replies.put_nowait(None)
            self._moments_replies.put_nowait(None)

    async def _next_reply(self) -> Reply:
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            raise self._death.result()
        return reply

    async def _ended(self) -> None:
        """Return once the process has ended. Some versions of asyncio also wait for whoever else holds its output, such
        as a compiler that it called and that hangs."""
        while self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LOOK_SECONDS)

    async def _listen(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        output = asyncio.create_task(self._read_output())
        self._tasks = [output, asyncio.create_task(self._read_replies(reader, output))]

    async def _read_replies(self, reader: asyncio.StreamReader, output: asyncio.Task[None]) -> None:
        try:
            while line := await reader.readline():
                self._hear(line)
        except ConnectionError:  # it has ended before it read all that we said
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(), CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        except (ValidationError, ValueError) as error:
            self._output.heard(f"control channel: {error}")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._ended()
        await asyncio.wait([output], timeout=CLOSE_SECONDS)
        self._end(self._describe_death())

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
    """The worker sees the same modules as we do, whatever folder we were started in, and prints to a pipe of ours."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(threads)}
    given = {"control": control} | descriptors.named()
    command = ["-P", "-m", "opendiloco.workers.worker", *(f"--{name}={number}" for name, number in given.items())]
    with signals_held_back():  # it would be gone before a polite leave could finish the round under way
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            pass_fds=given.values(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment | LOOPBACK_ONLY,
        )
