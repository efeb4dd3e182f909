"""The peer process's handle on another machine of its volunteer, and on the workers there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from blake3 import blake3
from pydantic import ValidationError

from opendiloco.errors import IslandError
from opendiloco.island.frames import PIECE, REMEDY, Frame, Hello, Kind, Reason, Wanted, parse, read_frame, write_frame
from opendiloco.workers.control import ControlMessage
from opendiloco.workers.handle import WorkerDeathError, WorkerHandle
from opendiloco.workers.nodes import Parts, Region

logger = logging.getLogger(__name__)

ANSWERS = (Kind.LINE, Kind.DIED, Kind.PUT, Kind.LEAVE, Kind.REFUSED)
GOODBYE_SECONDS = 5.0
DEATH_SECONDS = 15.0
"""A worker that holds much memory takes seconds to end; torchrun ends us 30 seconds after Ctrl-C."""
PARTS_AT_ONCE = 10_000
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""How soon a machine that has vanished is noticed: seconds, seconds, a count, milliseconds."""


def pieces(parts: Parts) -> Iterator[tuple[int, int]]:
    """Yield the ranges in the order, and cut up as they are sent."""
    for start, stop in parts:
        for begin in range(start, stop, PIECE):
            yield begin, min(begin + PIECE, stop)


def _digest(piece: memoryview) -> bytes:
    return blake3(piece).digest()


def notice_loss(writer: asyncio.StreamWriter) -> None:
    """Have the system look whether the machine at the other end is still there."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class RemoteWorker(WorkerHandle):
    """A worker on another machine."""

    def __init__(self, node: RemoteNode, number: int) -> None:
        super().__init__()
        self.node = self._there = node
        self._number = number

    def write(self, message: ControlMessage) -> None:
        self._there.write(Frame(Kind.LINE, self._number, 0, message.line()))

    def kill(self) -> None:
        if not self._death.done():
            self._there.write(Frame(Kind.KILL, self._number))

    async def close(self) -> None:
        """End the worker. Returns also when its machine is lost; one that does not answer is given up."""
        self.kill()
        try:
            await asyncio.wait_for(self.wait_for_death(), DEATH_SECONDS)
        except TimeoutError:
            self._there.give_up(IslandError(f"{self._there.name} of this volunteer does not answer.", REMEDY))


class _Fetching(NamedTuple):
    """Parts of a memory file that are on their way here: `expected` are the next pieces."""

    region: Region
    data: memoryview
    expected: deque[tuple[int, int]]
    done: asyncio.Future[None]


class RemoteNode:
    """Another machine of this volunteer; implements `opendiloco.workers.nodes.Node`. `close` ends it.

    `on_leave` is called when somebody there asks this volunteer to leave. `peer` is the volunteer's id.
    """

    def __init__(
        self,
        hello: Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_leave: Callable[[], None],
        peer: str = "",
    ) -> None:
        self.name = f"node {hello.rank}"
        self.cores = hello.cores
        self.others_steps = max((steps for other, steps in hello.kept.items() if other != peer), default=0)
        self._on_leave = on_leave
        self._reader, self._writer = reader, writer
        self._workers: list[RemoteWorker] = []
        self._sending, self._fetch_turn = asyncio.Lock(), asyncio.Lock()
        self._kept: dict[int, bytes] = {}  # digests of the pieces of theta that are there, by where they begin
        self._fetching: _Fetching | None = None
        self._loss: IslandError | None = None
        notice_loss(writer)
        self._listening = asyncio.create_task(self._listen())

    async def start_worker(self, threads: int) -> WorkerHandle:
        """Start a worker there. Raises: IslandError."""
        self._check()
        worker = RemoteWorker(self, len(self._workers))
        self._workers.append(worker)
        self.write(Frame(Kind.START, len(self._workers) - 1, threads))
        return worker

    async def resize(self, region: Region, size: int) -> None:
        """Have a memory file there so many bytes. Raises: IslandError."""
        self._check()
        self.write(Frame(Kind.RESIZE, region, size))

    async def send(self, region: Region, data: memoryview, part: tuple[int, int], keeps: bool = False) -> None:
        """Copy a part of our memory file there; see `Node.send`. Raises: IslandError."""
        async with self._sending:
            for start, stop in pieces([part]):
                piece = data[start:stop]
                if keeps:
                    digest = await asyncio.to_thread(_digest, piece)
                    if self._kept.get(start) == digest:
                        continue
                    self._kept[start] = digest
                self._check()
                self.write(Frame(Kind.PUT, region, start, piece))
                try:
                    await self._writer.drain()
                except OSError as error:
                    raise self._lost() from error

    async def sent(self) -> None:
        """Return once nothing is on its way there."""
        async with self._sending:
            pass

    async def fetch(self, region: Region, data: memoryview, parts: Parts) -> None:
        """Copy parts of its memory file into ours. Raises: IslandError."""
        async with self._fetch_turn:
            for first in range(0, len(parts), PARTS_AT_ONCE):
                self._check()
                wanted = tuple(parts[first : first + PARTS_AT_ONCE])
                done = asyncio.get_running_loop().create_future()
                self._fetching = _Fetching(region, data, deque(pieces(wanted)), done)
                self.write(Frame(Kind.GET, region, 0, Wanted(parts=wanted).packed()))
                await done

    def write(self, frame: Frame) -> None:
        """Have a frame sent; it is lost without an error when the machine is."""
        write_frame(self._writer, frame)

    async def close(self, reason: Reason | None = None) -> None:
        """Let the node go: it ends politely, or with what went wrong here."""
        self.write(Frame(Kind.BYE) if reason is None else Frame(Kind.REFUSED, 0, 0, reason.packed()))
        self._lose(IslandError(f"{self.name} is not wanted any more."))
        await asyncio.wait([self._listening], timeout=GOODBYE_SECONDS)  # it hangs up when it has ended its workers
        self._listening.cancel()
        self._writer.transport.abort()  # whatever is on its way, nobody takes any more
        await asyncio.gather(self._listening, self._writer.wait_closed(), return_exceptions=True)

    def give_up(self, error: IslandError) -> None:
        """Hang up, without waiting for anything; `error` is what everybody gets who waits for something from there."""
        self._lose(error)
        self._writer.transport.abort()

    async def _listen(self) -> None:
        try:
            while True:
                frame = await read_frame(self._reader, *ANSWERS)
                if frame.kind is Kind.LEAVE:
                    logger.info("somebody asks this volunteer to leave, on %s", self.name)
                    self._on_leave()
                elif frame.kind is Kind.REFUSED:
                    message, remedy = parse(Reason, frame.body).said
                    return self._lose(IslandError(f"{self.name} of this volunteer is lost: {message}", remedy))
                elif frame.kind is Kind.PUT:
                    self._take(frame)
                elif frame.number >= len(self._workers):
                    raise IslandError(f"{self.name} speaks of worker {frame.number}, which it does not have.", REMEDY)
                elif frame.kind is Kind.LINE:
                    self._workers[frame.number].hear(bytes(frame.body))
                else:
                    message, remedy = parse(Reason, frame.body).said
                    worker = self._workers[frame.number]
                    worker.end(WorkerDeathError(f"{worker.name}, on {self.name}: {message}", remedy))
        except (IslandError, ValidationError, ValueError) as error:
            self._lose(IslandError(f"{self.name} of this volunteer is lost: {error}", REMEDY))

    def _take(self, frame: Frame) -> None:
        """Copy bytes that were asked for to where they belong. Raises: IslandError for any others."""
        fetching, place = self._fetching, (frame.offset, frame.offset + len(frame.body))
        if fetching is None or frame.number != fetching.region or fetching.expected[0] != place:
            raise IslandError("it sent bytes that nobody wants.")
        fetching.expected.popleft()
        fetching.data[slice(*place)] = frame.body
        if not fetching.expected:
            self._fetching = None
            fetching.done.set_result(None)

    def _check(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _lost(self) -> IslandError:
        self._lose(IslandError(f"{self.name} of this volunteer is lost.", REMEDY))
        assert self._loss is not None
        return self._loss

    def _lose(self, error: IslandError) -> None:
        """Nothing more can be had from there."""
        self._loss = self._loss or error
        for worker in self._workers:
            worker.end(self._loss)
        if self._fetching is not None and not self._fetching.done.done():
            self._fetching.done.set_exception(self._loss)
            self._fetching = None
