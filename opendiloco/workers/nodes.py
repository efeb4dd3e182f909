"""The other machines of a volunteer, as far as commanding their workers needs to know them; and the weights there.

What workers share with the peer process lies in memory files. Each machine has its own; a node keeps its copy of them,
and the peer process moves bytes from the one to the other: an offset means the same in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

from opendiloco.errors import IslandError
from opendiloco.shared_memory import VALUE_BYTES, SharedVectors
from opendiloco.workers.control import ControlMessage, Evaluate, RunInnerLoop
from opendiloco.workers.handle import WorkerHandle

LOOPBACK = "127.0.0.1"
Parts: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of a memory file's bytes, each from its first byte up to where it ends."""


class Region(IntEnum):
    """A memory file: theta and local one after the other (see `SharedVectors`), or the inner optimizer's moments."""

    VECTORS = 0
    MOMENTS = 1


class Node(Protocol):
    """Another machine of this volunteer. All methods raise IslandError once it is lost."""

    name: str
    cores: int
    others_steps: int
    """After how many outer steps of this run another peer has kept its newest checkpoint there; 0: none has."""

    async def start_worker(self, threads: int) -> WorkerHandle:
        """Start a worker there that shares the node's memory files."""

    async def resize(self, region: Region, size: int) -> None:
        """Have a memory file there so many bytes. None: give its memory back."""

    async def send(self, region: Region, data: memoryview, part: tuple[int, int], keeps: bool = False) -> None:
        """Copy a part of our memory file there. With `keeps`, nobody there changes it, so that bytes which are there
        already need not go again."""

    async def sent(self) -> None:
        """Return once nothing is on its way there."""

    async def fetch(self, region: Region, data: memoryview, parts: Parts) -> None:
        """Copy parts of the node's memory file into ours."""


@dataclass(frozen=True)
class Nodes:
    """All of them; and the store at which the workers of all machines meet, which is torchrun's."""

    others: Sequence[Node] = ()
    host: str = LOOPBACK
    port: int = 0

    def check_that_it_is_new(self, index: int) -> None:
        """Raises: IslandError when another machine was the first one before, and has a later state of the run on its
        disk than anybody had who was there now: that after `index` outer steps."""
        for node in self.others:
            if node.others_steps > index:
                raise IslandError(
                    f"{node.name} has this run's state after outer step {node.others_steps} on its disk; here, on node "
                    f"0, training would go on after outer step {index}.",
                    "Start torchrun so that it numbers the machines as before, or give --state and --identity on a "
                    "disk that all machines share. If that state is not wanted, remove it there.",
                )


class SpreadWeights:
    """Brings what other machines need of `SharedVectors` there before training or evaluation, and takes it back."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes.others
        self._parts: list[tuple[Node, Parts]] = []

    def written_by(self, workers: Iterable[tuple[WorkerHandle, Parts]]) -> None:
        """Learn which bytes each worker writes when it has trained."""
        self._parts = [(worker.node, parts) for worker, parts in workers if worker.node is not None]

    async def bring(self, command: ControlMessage, vectors: SharedVectors) -> None:
        """Send to each machine, once, what a command has its workers begin with. Raises: IslandError."""
        if not self._nodes or not isinstance(command, RunInnerLoop | Evaluate):
            return
        if isinstance(command, RunInnerLoop) and command.goes_on:
            return
        is_local = isinstance(command, RunInnerLoop) and command.from_local
        part = vectors.local_part if is_local else vectors.theta_part
        sending = [node.send(Region.VECTORS, vectors.data, part, keeps=not is_local) for node in self._nodes]
        await asyncio.gather(*sending)

    async def take(self, vectors: SharedVectors, fragment: slice) -> None:
        """Copy what workers of other machines have stored of a fragment into our own memory. Raises: IslandError."""
        first, end = _bytes_of(vectors, fragment)
        fetching = [
            node.fetch(Region.VECTORS, vectors.data, [part for part in parts if first <= part[0] < end])
            for node, parts in self._parts
        ]
        await asyncio.gather(*fetching)

    async def spread(self, vectors: SharedVectors, fragment: slice) -> None:
        """Send a fragment's part of `local` to each machine. Raises: IslandError."""
        part = _bytes_of(vectors, fragment)
        await asyncio.gather(*(node.send(Region.VECTORS, vectors.data, part) for node in self._nodes))

    async def theta_is_sent(self) -> None:
        """Return once theta may change: no machine is being sent it any more."""
        for node in self._nodes:
            await node.sent()


def _bytes_of(vectors: SharedVectors, fragment: slice) -> tuple[int, int]:
    """Return where a fragment of `local` lies in the memory file."""
    start = vectors.local_part[0]
    return start + VALUE_BYTES * fragment.start, start + VALUE_BYTES * fragment.stop
