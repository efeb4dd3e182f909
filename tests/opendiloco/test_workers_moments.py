"""Workers whose answers about moments do not match: played without processes. (test_worker_group has real ones.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from opendiloco.inner.moments_file import header_of
from opendiloco.model.layout import Parameter
from opendiloco.workers.control import (
    ForgetMoments,
    KeepMoments,
    LocateMoments,
    MomentsMoved,
    MoveMoments,
    RecallMoments,
)
from opendiloco.workers.moments import WorkersMoments
from opendiloco.workers.request_queue import RequestQueue
from peers.values.workload import SnapshotError
from tests.opendiloco.test_machines_together import PlayedNode, PlayedWorker

HEADER = header_of([Parameter("a/exp_avg", (4,), 0)], {})
SIZE = 16
"""Bytes of values in a file."""
Ranges = Sequence[tuple[int, int]]


class Telling(PlayedWorker):
    """A worker that notes what it is told, reads nothing if it `refuses`, and writes or wants `parts`."""

    def __init__(self, refuses: bool = False, parts: Ranges = (), node: PlayedNode | None = None) -> None:
        self.node = node  # without all that would wait for replies, which an event loop has to make
        self.told = list[type[MoveMoments]]()
        self._refuses = refuses
        self._parts = tuple(parts)

    async def move_moments(self, command: MoveMoments) -> MomentsMoved:
        self.told.append(type(command))
        if self._refuses and isinstance(command, RecallMoments):
            raise SnapshotError("the device ran out of memory")
        if isinstance(command, KeepMoments):
            Path(command.path).write_bytes(HEADER + bytes(SIZE))
        return MomentsMoved(parts=self._parts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "moments.safetensors"
    path.write_bytes(HEADER + bytes(SIZE))
    return path


def run(workers: Sequence[PlayedWorker], ask: Callable[[WorkersMoments], Awaitable[None]]) -> None:
    async def story() -> None:
        await ask(WorkersMoments(-1, RequestQueue(), lambda: workers, lambda: False))

    asyncio.run(story())


def test_when_some_have_read_moments_and_others_could_not_all_begin_anew(file: Path) -> None:
    workers = [Telling(), Telling(refuses=True), Telling()]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.recall(file, "run-1"))
    assert [worker.told for worker in workers] == [[RecallMoments, ForgetMoments]] * 3


def test_so_do_those_of_the_first_machine_when_another_machines_could_not(file: Path) -> None:
    workers = [Telling(), Telling(refuses=True, node=PlayedNode("node 1"))]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.recall(file, "run-1"))
    assert [worker.told[-1] for worker in workers] == [ForgetMoments] * 2


def test_what_nobody_has_read_changes_nothing(file: Path) -> None:
    workers = [Telling(refuses=True), Telling(refuses=True)]
    with pytest.raises(SnapshotError, match="ran out of memory"):
        run(workers, lambda moments: moments.recall(file, "run-1"))
    assert [worker.told for worker in workers] == [[RecallMoments]] * 2


@pytest.mark.parametrize(
    ("parts", "byte"),
    [
        ([[(0, 8)], [(8, 16)]], None),
        ([[(0, 4), (8, 12)], [(4, 8), (12, 16), (16, 16)]], None),
        ([[(0, 6)], [(6, 11)]], 11),  # there is no third worker
        ([[(0, 8)], [(6, 16)]], 8),  # one has cut it into other pieces
        ([[(0, 6)], [(8, 16)]], 6),
        ([[(0, 8)], [(8, 24)]], 24),
        ([[], []], 0),
    ],
)
def test_parts_that_do_not_make_a_whole_are_no_moments(parts: Sequence[Ranges], byte: int | None, file: Path) -> None:
    start = len(HEADER)
    workers = [Telling(parts=[(start + first, start + end) for first, end in each]) for each in parts]
    if byte is None:
        run(workers, lambda moments: moments.keep(file, "run-1", 3))
    else:
        with pytest.raises(SnapshotError, match=f"do not fit together at byte {start + byte} of {start + SIZE}"):
            run(workers, lambda moments: moments.keep(file, "run-1", 3))
    assert [worker.told for worker in workers] == [[KeepMoments]] * 2


def test_a_worker_of_another_machine_wants_no_bytes_that_are_not_there(file: Path) -> None:
    size = len(HEADER) + SIZE
    worker = Telling(parts=[(len(HEADER), size + 1)], node=PlayedNode("node 1"))
    with pytest.raises(SnapshotError, match=f"wants bytes {len(HEADER)} to {size + 1} of moments that have {size}"):
        run([Telling(), worker], lambda moments: moments.recall(file, "run-1"))
    assert worker.told == [LocateMoments, ForgetMoments]
