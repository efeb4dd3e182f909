"""How the inner optimizer's state gets out of a machine's workers, and into them: through a file."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from opendiloco.errors import IslandError
from opendiloco.inner.moments_file import read_header
from opendiloco.workers.control import (
    ForgetMoments,
    KeepMoments,
    LocateMoments,
    RecallMoments,
)
from opendiloco.workers.handle import WorkerDeathError, WorkerHandle
from opendiloco.workers.nodes import Node, Parts, Region
from opendiloco.workers.request_queue import RequestQueue
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

Moved = TypeVar("Moved")


class _Given(NamedTuple):
    """Moments for workers to read: as bytes, of which the first `header` are for all of them; and what to ask a worker
    that is to say which others it reads."""

    data: memoryview
    locate: LocateMoments
    header: int


class WorkersMoments:
    """Moves moments of the present `workers`, one request after another. `descriptor` is for workers elsewhere.

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

    async def _through_file(self, command: KeepMoments | RecallMoments) -> None:
        """Through a file, to which the first worker gives its size here, and each machine's first worker there."""
        path = Path(command.path)
        if isinstance(command, KeepMoments):
            parts = await self._write(command, lambda: _mapped(path, writes=True))
            _check_complete(parts, _header_length(path), path.stat().st_size)
        else:
            given = _Given(
                _mapped(path, writes=False), LocateMoments(path=command.path, run=command.run), _header_length(path)
            )
            await self._read(command, given)

    async def _write(self, command: KeepMoments, data: Callable[[], memoryview]) -> Parts:
        """Have all workers write moments; what those of other machines write is brought into `data`. Returns which
        bytes they have written.
        """
        workers = self._workers()
        nodes = list(dict.fromkeys(worker.node for worker in workers if worker.node is not None))
        try:
            for node in nodes:
                await node.resize(Region.MOMENTS, 0)
            written = await self._gather(worker.move_moments(command) for worker in workers)
            for worker, moved in zip(workers, written, strict=True):
                if worker.node is not None and moved.parts:
                    await worker.node.fetch(Region.MOMENTS, data(), moved.parts)
            return list(chain.from_iterable(moved.parts for moved in written))
        finally:
            with suppress(IslandError):
                for node in nodes:
                    await node.resize(Region.MOMENTS, 0)

    async def _read(self, command: RecallMoments, given: _Given) -> None:
        """Have all workers read moments: on other machines in turns, each a copy of what it reads and no more.

        When some have read them and others could not, all begin anew. Otherwise they would go on with moments of
        different times, and with different learning rates.
        """
        workers, have_read = self._workers(), list[WorkerHandle]()

        async def read(worker: WorkerHandle) -> None:
            await worker.move_moments(command)
            have_read.append(worker)

        by_node: dict[Node | None, list[WorkerHandle]] = {}
        for worker in workers:
            by_node.setdefault(worker.node, []).append(worker)
        here = [read(worker) for worker in by_node.pop(None, [])]
        there = [_read_in_turns(node, others, read, given) for node, others in by_node.items() if node is not None]
        try:
            await self._gather([*here, *there])
        except SnapshotError:
            if have_read:
                await self._gather(worker.move_moments(ForgetMoments()) for worker in workers)
            raise

    async def _gather(self, moves: Iterable[Awaitable[Moved]]) -> list[Moved]:
        """Return what all of them return, once all have ended. Raises: what one of them does."""
        moved = await asyncio.gather(*moves, return_exceptions=True)
        problems = [said for said in moved if isinstance(said, BaseException)]
        if problems and isinstance(problems[0], WorkerDeathError) and not self._is_over():
            raise SnapshotError("the worker is gone")  # another takes its place
        if problems:
            raise problems[0]
        return [said for said in moved if not isinstance(said, BaseException)]


async def _read_in_turns(
    node: Node, workers: Sequence[WorkerHandle], read: Callable[[WorkerHandle], Awaitable[None]], given: _Given
) -> None:
    """Have workers of another machine read moments one after the other. Its memory for them has room for all of them,
    and takes no more than what is sent there."""
    for worker in workers:
        try:
            await node.resize(Region.MOMENTS, len(given.data))
            await node.send(Region.MOMENTS, given.data, (0, given.header))
            located = await worker.move_moments(given.locate)
            _check_within(located.parts, len(given.data))
            for part in located.parts:
                await node.send(Region.MOMENTS, given.data, part)
            await read(worker)
        finally:
            with suppress(IslandError):
                await node.resize(Region.MOMENTS, 0)


def _check_complete(parts: Parts, start: int, stop: int) -> None:
    """Raises: SnapshotError unless workers have written each byte from `start` to `stop` once, as those do that have
    cut the same model into as many pieces as they are."""
    place = start
    for begin, end in sorted(part for part in parts if part[0] < part[1]):
        if begin != place:
            break
        place = end
    if place != stop:
        raise SnapshotError(f"its workers' parts of the moments do not fit together at byte {place} of {stop}")


def _check_within(parts: Parts, size: int) -> None:
    """Raises: SnapshotError when a worker wants bytes that the moments do not have."""
    for begin, end in parts:
        if not 0 <= begin <= end <= size:
            raise SnapshotError(f"a worker wants bytes {begin} to {end} of moments that have {size}")


def _header_length(path: Path) -> int:
    """Raises: SnapshotError."""
    try:
        with path.open("rb") as file:
            return read_header(file)[2]
    except (OSError, ValueError) as error:
        raise _unusable(error) from error


def _mapped(path: Path, writes: bool) -> memoryview:
    """Raises: SnapshotError."""
    try:
        with path.open("r+b" if writes else "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise _unusable(error) from error


def _unusable(error: Exception) -> SnapshotError:
    return SnapshotError(f"the file with the moments cannot be used: {error}")
