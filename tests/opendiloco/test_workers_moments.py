"""Workers of which some cannot read moments: played without processes. (test_worker_group has real ones.)"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from opendiloco.inner.moments import STEPS_BYTES
from opendiloco.shared_memory import create_memory_file
from opendiloco.workers.control import ForgetMoments, LoadMoments, MoveMoments, RecallMoments
from opendiloco.workers.moments import WorkersMoments
from opendiloco.workers.process import WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from peers.values.workload import SnapshotError

FILE = Path("moments.safetensors")


class Telling(WorkerProcess):
    """A worker that notes what it is told, and reads nothing if it `refuses`."""

    def __init__(self, refuses: bool = False) -> None:  # there is no process, and no event loop yet
        self.told = list[type[MoveMoments]]()
        self._refuses = refuses

    async def move_moments(self, command: MoveMoments) -> None:
        self.told.append(type(command))
        if self._refuses and isinstance(command, LoadMoments | RecallMoments):
            raise SnapshotError("the device ran out of memory")


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_memory_file()
    yield made
    os.close(made)


def run(workers: Sequence[Telling], ask: Callable[[WorkersMoments], Awaitable[None]], memory: int = -1) -> None:
    async def story() -> None:
        await ask(WorkersMoments(memory, RequestQueue(), lambda: workers, lambda: False))

    asyncio.run(story())


def test_when_some_have_read_moments_and_others_could_not_all_begin_anew(descriptor: int) -> None:
    workers = [Telling(), Telling(refuses=True), Telling()]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.recall(FILE, "run-1"))
    assert [worker.told for worker in workers] == [[RecallMoments, ForgetMoments]] * 3
    workers = [Telling(refuses=True), Telling()]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.load(memoryview(bytes(STEPS_BYTES + 16))), descriptor)
    assert [worker.told for worker in workers] == [[LoadMoments, ForgetMoments]] * 2


def test_what_nobody_has_read_changes_nothing() -> None:
    """As when their own moments are worth as much."""
    workers = [Telling(refuses=True), Telling(refuses=True)]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.recall(FILE, "run-1"))
    assert [worker.told for worker in workers] == [[RecallMoments]] * 2
