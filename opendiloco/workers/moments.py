"""How the inner optimizer's state gets out of a machine's workers, and into them: through memory, or through a file."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from opendiloco.errors import IslandError
from opendiloco.shared_memory import copy_bytes
from opendiloco.workers.control import (
    KeepMoments,
    LoadMoments,
    MomentsMoved,
    MoveMoments,
    RecallMoments,
    StoreMoments,
)
from opendiloco.workers.handle import WorkerDeathError, WorkerHandle
from opendiloco.workers.nodes import Parts, Region
from opendiloco.workers.request_queue import RequestQueue
from peers.transfer.memory_file import MemoryFile
from peers.values.workload import SnapshotError


class WorkersMoments:
    """Moves moments of the present `workers`, one request after another. `descriptor` is the memory that they see, too.

    Training of a single worker need not end for it; that of several must, since they are not at the same step at the
    same time. `is_over` says whether nobody will take the place of a worker that is gone.
    """

    def __init__(
        self,
        descriptor: int,
        requests: RequestQueue,
        workers: Callable[[], Sequence[WorkerHandle]],
        is_over: Callable[[], bool],
    ) -> None:
        self.descriptor = descriptor
        self._requests = requests
        self._workers = workers
        self._is_over = is_over
        self._turn = asyncio.Lock()

    async def store(self, out: memoryview) -> None:
        """Copy them (see inner/moments.py) as they are after some inner step.

        Raises: SnapshotError when there are none to give; OSError without memory; WorkerError when a worker dies.
        """
        await self._finish(lambda: self._through_memory(StoreMoments(), out))

    async def load(self, moments: memoryview) -> None:
        """Have the inner optimizer go on with checked ones. Raises: as `store`."""
        await self._finish(lambda: self._through_memory(LoadMoments(), moments))

    async def keep(self, path: Path, run: str, index: int) -> None:
        """Have workers write them into a file (see inner/moments_file.py), after `index` outer steps of a run. What is
        there if that fails is of no use.

        Raises: SnapshotError when there are none, or the file cannot be written; WorkerError when a worker dies.
        """
        await self._finish(lambda: self._through_file(KeepMoments(path=str(path.absolute()), run=run, index=index)))

    async def recall(self, path: Path, run: str) -> None:
        """Have the inner optimizer go on with those in a file. Raises: as `keep`."""
        await self._finish(lambda: self._through_file(RecallMoments(path=str(path.absolute()), run=run)))

    async def recall_at_once(self, path: Path, run: str) -> None:
        """Do the same for workers that are new, in the middle of a request. Raises: as `keep`."""
        async with self._turn:
            await self._through_file(RecallMoments(path=str(path.absolute()), run=run))

    async def _finish(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """It goes on to its end even if we are cancelled."""

        async def in_turn() -> None:
            async with self._turn:
                await work()

        if len(self._workers()) == 1:
            task = self._requests.hold(asyncio.create_task(in_turn()))
        else:
            task = self._requests.add(in_turn)
        await asyncio.shield(task)

    async def _through_memory(self, command: MoveMoments, moments: memoryview) -> None:
        """Through memory that all processes see, and that is taken only for so long."""
        memory = await asyncio.to_thread(MemoryFile, os.dup(self.descriptor), len(moments))
        try:
            if isinstance(command, LoadMoments):
                await asyncio.to_thread(copy_bytes, moments, memory.data)
            await self._tell(command, lambda: memory.data, len(moments))
            if isinstance(command, StoreMoments):
                await asyncio.to_thread(copy_bytes, memory.data, moments)
        finally:
            os.truncate(memory.descriptor, 0)

    async def _through_file(self, command: KeepMoments | RecallMoments) -> None:
        """Through a file, of which other machines have a copy in memory meanwhile: the first worker gives it its size
        here, and each machine's first worker there."""
        path = Path(command.path)
        size = _size(path) if isinstance(command, RecallMoments) else 0
        await self._tell(command, lambda: _mapped(path), size)

    async def _tell(self, command: MoveMoments, data: Callable[[], memoryview], size: int) -> None:
        """Have all workers move moments: those of other machines to or from a copy of `data`, of so many bytes."""
        workers = self._workers()
        nodes = list(dict.fromkeys(worker.node for worker in workers if worker.node is not None))
        try:
            for node in nodes:
                await node.resize(Region.MOMENTS, size)
                if isinstance(command, LoadMoments | RecallMoments):
                    await node.send(Region.MOMENTS, data(), (0, size))
            moved = await self._gather(command, workers)
            for worker, parts in zip(workers, moved, strict=True):
                if worker.node is not None and parts:
                    await worker.node.fetch(Region.MOMENTS, data(), parts)
        finally:
            with suppress(IslandError):
                for node in nodes:
                    await node.resize(Region.MOMENTS, 0)

    async def _gather(self, command: MoveMoments, workers: Sequence[WorkerHandle]) -> list[Parts]:
        """Return which bytes each worker has written."""
        moved = await asyncio.gather(*(worker.move_moments(command) for worker in workers), return_exceptions=True)
        problems = [said for said in moved if isinstance(said, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self._is_over():
            raise SnapshotError("the worker is gone")  # another takes its place
        if problems:
            raise problems[0]
        return [said.parts for said in moved if isinstance(said, MomentsMoved)]


def _size(path: Path) -> int:
    """Raises: SnapshotError."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unusable(error) from error


def _mapped(path: Path) -> memoryview:
    """Raises: SnapshotError."""
    try:
        with path.open("r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0))
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise _unusable(error) from error


def _unusable(error: Exception) -> SnapshotError:
    return SnapshotError(f"the file with the moments cannot be used: {error}")
