"""How the inner optimizer's state gets out of a machine's workers, and into them: through memory, or through a file."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path

from opendiloco.shared_memory import copy_bytes
from opendiloco.workers.control import (
    ForgetMoments,
    KeepMoments,
    LoadMoments,
    RecallMoments,
    StoreMoments,
)
from opendiloco.workers.process import WorkerDeathError, WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from peers.transfer.memory_file import MemoryFile
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)


class WorkersMoments:
    """Moves moments of the present `workers`, one request after another. `descriptor` is the memory that they see, too.

    Training of a single worker need not end for it; that of several must, since they are not at the same step at the
    same time. `is_over` says whether nobody will take the place of a worker that is gone.
    """

    def __init__(
        self,
        descriptor: int,
        requests: RequestQueue,
        workers: Callable[[], Sequence[WorkerProcess]],
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
        await self._finish(lambda: self._write(KeepMoments(path=str(path.absolute()), run=run, index=index)))

    async def recall(self, path: Path, run: str) -> None:
        """Have the inner optimizer go on with those in a file. Raises: as `keep`."""
        await self._finish(lambda: self._read(RecallMoments(path=str(path.absolute()), run=run)))

    async def recall_at_once(self, path: Path, run: str) -> None:
        """Do the same for workers that are new, in the middle of a request. Raises: as `keep`."""
        async with self._turn:
            await self._read(RecallMoments(path=str(path.absolute()), run=run))

    async def recall_if_possible(self, path: Path, run: str) -> None:
        """Do the same where these moments can be used; otherwise the inner optimizer begins anew."""
        try:
            await self.recall_at_once(path, run)
        except SnapshotError as error:
            logger.warning("the inner optimizer begins anew: %s: %s", path, error)
        else:
            logger.info("the inner optimizer goes on with what %s has", path)

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

    async def _through_memory(self, command: StoreMoments | LoadMoments, moments: memoryview) -> None:
        """Through memory that all processes see, and that is taken only for so long."""
        memory = await asyncio.to_thread(MemoryFile, os.dup(self.descriptor), len(moments))
        try:
            if isinstance(command, StoreMoments):
                await self._write(command)
                await asyncio.to_thread(copy_bytes, memory.data, moments)
            else:
                await asyncio.to_thread(copy_bytes, moments, memory.data)
                await self._read(command)
        finally:
            os.truncate(memory.descriptor, 0)

    async def _write(self, command: StoreMoments | KeepMoments) -> None:
        """Have all workers write moments."""
        await self._gather(worker.move_moments(command) for worker in self._workers())

    async def _read(self, command: LoadMoments | RecallMoments) -> None:
        """Have all workers read moments.

        When some have read them and others could not, all begin anew. Otherwise they would go on with moments of
        different times, and with different learning rates.
        """
        workers, have_read = self._workers(), list[WorkerProcess]()

        async def read(worker: WorkerProcess) -> None:
            await worker.move_moments(command)
            have_read.append(worker)

        try:
            await self._gather(map(read, workers))
        except SnapshotError:
            if have_read:
                await self._gather(worker.move_moments(ForgetMoments()) for worker in workers)
            raise

    async def _gather(self, moves: Iterable[Awaitable[object]]) -> None:
        """Return once all of them have ended. Raises: what one of them does."""
        moved = await asyncio.gather(*moves, return_exceptions=True)
        problems = [said for said in moved if isinstance(said, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self._is_over():
            raise SnapshotError("the worker is gone")  # another takes its place
        if problems:
            raise problems[0]
