"""How the inner optimizer's state gets out of a machine's workers, and into them: through a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path

from opendiloco.workers.control import ForgetMoments, KeepMoments, MoveMoments, RecallMoments
from opendiloco.workers.process import WorkerDeathError, WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)


class WorkersMoments:
    """Moves moments of the present `workers`, one request after another.

    Training of a single worker need not end for it; that of several must, since they are not at the same step at the
    same time. `is_over` says whether nobody will take the place of a worker that is gone.
    """

    def __init__(
        self,
        requests: RequestQueue,
        workers: Callable[[], Sequence[WorkerProcess]],
        is_over: Callable[[], bool],
    ) -> None:
        self._requests = requests
        self._workers = workers
        self._is_over = is_over
        self._turn = asyncio.Lock()

    async def keep(self, path: Path, run: str, index: int) -> None:
        """Have workers write them into a file (see inner/moments_file.py), after `index` outer steps of a run. What is
        there if that fails is of no use.

        Raises: SnapshotError when there are none, or the file cannot be written; WorkerError when a worker dies.
        """
        await self._finish(lambda: self._tell_all(KeepMoments(path=str(path.absolute()), run=run, index=index)))

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

    async def _read(self, command: RecallMoments) -> None:
        """Have all workers read moments.

        When some have read them and others could not, all begin anew. Otherwise they would go on with moments of
        different times, and with different learning rates.
        """
        have_read = list[WorkerProcess]()

        async def read(worker: WorkerProcess) -> None:
            await worker.move_moments(command)
            have_read.append(worker)

        try:
            await self._gather(map(read, self._workers()))
        except SnapshotError:
            if have_read:
                await self._tell_all(ForgetMoments())
            raise

    async def _tell_all(self, command: MoveMoments) -> None:
        await self._gather(worker.move_moments(command) for worker in self._workers())

    async def _gather(self, moves: Iterable[Awaitable[object]]) -> None:
        """Return once all of them have ended. Raises: what one of them does."""
        moved = await asyncio.gather(*moves, return_exceptions=True)
        problems = [said for said in moved if isinstance(said, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self._is_over():
            raise SnapshotError("the worker is gone")  # another takes its place
        if problems:
            raise problems[0]
