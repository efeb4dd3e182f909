"""Another machine's side: one process on each machine but the first. It keeps that machine's memory files, starts its
workers, and passes on what they and the peer process say to each other. It ends when the peer process does."""

from __future__ import annotations

import asyncio
import os

from pydantic import ValidationError

from opendiloco.errors import IslandError
from opendiloco.island.arrival import Connection
from opendiloco.island.frames import (
    REMEDY,
    Frame,
    Kind,
    Reason,
    Wanted,
    parse,
    read_frame,
    write_frame,
)
from opendiloco.island.remote import notice_loss, pieces
from opendiloco.shared_memory import create_memory_file
from opendiloco.workers.control import Export, Generate, KeepMoments, LocateMoments, RecallMoments, parse_command
from opendiloco.workers.nodes import Region
from opendiloco.workers.process import Inherited, WorkerProcess
from peers.errors import DilocoPeerError

LACKING = "See what it lacks: memory, open files or processes; torchrun --max-restarts N starts all machines again."
COMMANDS = (Kind.START, Kind.KILL, Kind.LINE, Kind.RESIZE, Kind.PUT, Kind.GET, Kind.BYE, Kind.REFUSED)


class _RelayedWorker(WorkerProcess):
    """A worker of this machine whose lines and whose death go to the peer process."""

    agent: NodeAgent
    number: int

    def hear(self, line: bytes) -> None:
        self.agent.write(Frame(Kind.LINE, self.number, 0, line))

    def end(self, death: DilocoPeerError) -> None:
        super().end(death)
        self.agent.write(Frame(Kind.DIED, self.number, 0, Reason.of(death).packed()))


class NodeAgent:
    """This machine's part in a volunteer whose peer process is elsewhere."""

    def __init__(self, connection: Connection) -> None:
        self._reader, self._writer = connection
        self._files = dict[Region, int]()
        self._workers: dict[int, WorkerProcess] = {}
        self._endings = set[asyncio.Task[None]]()
        notice_loss(self._writer)

    def write(self, frame: Frame) -> None:
        """Send a frame to the peer process."""
        write_frame(self._writer, frame)

    def ask_to_leave(self) -> None:
        """Ask the peer process to leave the run; when it has, `serve` returns."""
        self.write(Frame(Kind.LEAVE))

    async def serve(self) -> None:
        """Do what the peer process says until it leaves. Leaves no process behind.

        Raises: IslandError when it fails, or is lost, or this machine cannot do its part; the peer process hears why.
        """
        try:
            await self._obey()
        except IslandError as error:
            self._say_why(error)
            raise
        except OSError as error:
            problem = IslandError(f"the machine cannot do its part: {error.strerror}.", LACKING)
            self._say_why(problem)
            raise problem from error
        finally:
            await asyncio.gather(*(worker.close() for worker in self._workers.values()), *self._endings)
            for descriptor in self._files.values():
                os.close(descriptor)
            self._writer.close()

    async def _obey(self) -> None:
        self._files = {region: create_memory_file() for region in Region}
        while True:
            frame = await read_frame(self._reader, *COMMANDS)
            if frame.kind is Kind.BYE:
                return
            if frame.kind is Kind.REFUSED:
                raise IslandError(*parse(Reason, frame.body).said)
            await self._carry_out(frame)

    def _say_why(self, error: IslandError) -> None:
        self.write(Frame(Kind.REFUSED, 0, 0, Reason.of(error).packed()))

    async def _carry_out(self, frame: Frame) -> None:
        """Raises: IslandError when it cannot be meant."""
        match frame.kind:
            case Kind.START:
                await self._start(frame.number, frame.offset)
            case Kind.KILL:
                if frame.number in self._workers:
                    self._end(self._workers.pop(frame.number))
            case Kind.LINE:
                self._tell(frame)
            case Kind.RESIZE:
                os.ftruncate(self._file(frame), frame.offset)
            case Kind.PUT:
                descriptor = self._file(frame)
                self._check(descriptor, frame.offset, frame.offset + len(frame.body))
                os.pwrite(descriptor, frame.body, frame.offset)
            case _:
                await self._give(frame)

    async def _start(self, number: int, threads: int) -> None:
        inherited = Inherited(self._files[Region.VECTORS], self._files[Region.MOMENTS], surroundings={})
        worker = await _RelayedWorker.start(inherited, threads)
        worker.agent, worker.number = self, number
        self._workers[number] = worker

    def _end(self, worker: WorkerProcess) -> None:
        ending = asyncio.create_task(worker.close())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def _tell(self, frame: Frame) -> None:
        """Pass a command on. The file of moments that it names is on the first machine; here it is a memory file."""
        try:
            command = parse_command(bytes(frame.body))
        except ValidationError as error:
            raise IslandError("the first machine sent no command that is known here.", REMEDY) from error
        if isinstance(command, Export | Generate):
            raise IslandError(f"the first machine sent {command.kind}, which only its own worker is to do.", REMEDY)
        if isinstance(command, KeepMoments | LocateMoments | RecallMoments) and command.path is not None:
            command = command.model_copy(update={"path": f"/proc/self/fd/{self._files[Region.MOMENTS]}"})
        if isinstance(command, KeepMoments):  # of what other machines write there is nothing here
            command = command.model_copy(update={"reserves": False})
        if frame.number in self._workers:
            self._workers[frame.number].write(command)

    async def _give(self, frame: Frame) -> None:
        descriptor = self._file(frame)
        for start, stop in pieces(parse(Wanted, frame.body).parts):
            self._check(descriptor, start, stop)
            self.write(Frame(Kind.PUT, frame.number, start, os.pread(descriptor, stop - start, start)))
            try:
                await self._writer.drain()
            except OSError as error:
                raise IslandError("the connection to the first machine is lost.", REMEDY) from error

    def _file(self, frame: Frame) -> int:
        if frame.number not in set(Region):
            raise IslandError(f"the first machine speaks of a memory file {frame.number}.", REMEDY)
        return self._files[Region(frame.number)]

    def _check(self, descriptor: int, start: int, stop: int) -> None:
        size = os.fstat(descriptor).st_size
        if not start <= stop <= size:
            raise IslandError(
                f"the first machine speaks of bytes {start} to {stop} of a memory file of {size}.", REMEDY
            )
