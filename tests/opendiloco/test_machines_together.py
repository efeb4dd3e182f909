"""How workers on several machines are commanded; here without processes: workers and nodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from opendiloco.workers.control import ControlMessage, InnerStepDone, MomentsMoved, MoveMoments
from opendiloco.workers.handle import Answer, WorkerHandle
from opendiloco.workers.moments import WorkersMoments
from opendiloco.workers.nodes import Node, Parts, Region
from opendiloco.workers.request_queue import RequestQueue
from peers.values.workload import SnapshotError


class PlayedWorker(WorkerHandle):
    """A worker that answers each command with one of `answers`, and moves moments without a word."""

    def __init__(self, node: Node | None = None, answers: tuple[ControlMessage, ...] = ()) -> None:
        super().__init__()
        self.node = node
        self._answers = iter(answers)

    def write(self, message: ControlMessage) -> None:
        pass

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_progress: Callable[[InnerStepDone], None]
    ) -> Answer:
        answered = next(self._answers)
        assert isinstance(answered, answer)
        return answered

    async def move_moments(self, command: MoveMoments) -> MomentsMoved:
        return MomentsMoved()


class PlayedNode:
    """A machine that takes everything, and has the workers that it is given."""

    def __init__(self, name: str, answers: tuple[ControlMessage, ...] = ()) -> None:
        self.name = name
        self.cores = 1
        self._answers = answers

    async def start_worker(self, threads: int) -> WorkerHandle:
        return PlayedWorker(self, self._answers)

    async def resize(self, region: Region, size: int) -> None:
        pass

    async def send(self, region: Region, data: memoryview, part: tuple[int, int], keeps: bool = False) -> None:
        pass

    async def sent(self) -> None:
        pass

    async def fetch(self, region: Region, data: memoryview, parts: Parts) -> None:
        pass


@pytest.mark.parametrize(("machines", "content"), [(1, None), (2, None), (2, b"")])
def test_a_file_of_moments_that_is_missing_or_empty_is_no_snapshot(
    machines: int, content: bytes | None, tmp_path: Path
) -> None:
    """Whoever asks takes that for moments that are lost, and begins anew."""
    path = tmp_path / "moments.safetensors"
    if content is not None:
        path.write_bytes(content)

    async def recall() -> None:
        workers = [PlayedWorker(), *(PlayedWorker(PlayedNode(f"node {rank}")) for rank in range(1, machines))]
        moments = WorkersMoments(-1, RequestQueue(), lambda: workers, lambda: False)
        await moments.recall_at_once(path, "run-1")

    with pytest.raises(SnapshotError, match="the file with the moments cannot be used"):
        asyncio.run(recall())
