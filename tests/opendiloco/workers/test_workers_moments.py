"""Workers of which some cannot read moments: played without processes. (test_worker_group has real ones.)"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.workers.control import ForgetMoments, MoveMoments, RecallMoments, WorkerProcess
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import Supervisor
from peers.values.workload import SnapshotError

FILE = Path("moments.safetensors")


class Telling(WorkerProcess):
    """A worker that notes what it is told, and reads nothing if it `refuses`."""

    def __init__(self, refuses: bool = False) -> None:  # there is no process, and no event loop yet
        self.told = list[type[MoveMoments]]()
        self._refuses = refuses

    async def move_moments(self, command: MoveMoments) -> None:
        self.told.append(type(command))
        if self._refuses and isinstance(command, RecallMoments):
            raise SnapshotError("the device ran out of memory")


def recall(config: RunConfig, workers: Sequence[Telling]) -> None:
    async def story() -> None:
        supervisor = Supervisor(config, WorkerOptions())
        supervisor.workers.extend(workers)
        await supervisor.recall_moments(FILE, "run-1")

    asyncio.run(story())


def test_when_some_have_read_moments_and_others_could_not_all_begin_anew(small_config: RunConfig) -> None:
    workers = [Telling(), Telling(refuses=True), Telling()]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        recall(small_config, workers)
    assert [worker.told for worker in workers] == [[RecallMoments, ForgetMoments]] * 3


def test_what_nobody_has_read_changes_nothing(small_config: RunConfig) -> None:
    workers = [Telling(refuses=True), Telling(refuses=True)]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        recall(small_config, workers)
    assert [worker.told for worker in workers] == [[RecallMoments]] * 2
