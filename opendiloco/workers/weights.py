"""The weights on a volunteer's other machines: brought there before training or evaluation, and taken back after it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from opendiloco.shared_memory import SharedVectors
from opendiloco.workers.control import ControlMessage, Evaluate, RunInnerLoop
from opendiloco.workers.handle import WorkerHandle
from opendiloco.workers.nodes import Node, Nodes, Parts, Region


class SpreadWeights:
    """What the peer process and its other machines have of `SharedVectors`."""

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
        is_local = isinstance(command, RunInnerLoop) and command.from_local
        part = vectors.local_part if is_local else vectors.theta_part
        sending = [node.send(Region.VECTORS, vectors.data, part, keeps=not is_local) for node in self._nodes]
        await asyncio.gather(*sending)

    async def take(self, vectors: SharedVectors) -> None:
        """Copy what workers of other machines have trained into our own memory. Raises: IslandError."""
        await asyncio.gather(*(node.fetch(Region.VECTORS, vectors.data, parts) for node, parts in self._parts))

    async def theta_is_sent(self) -> None:
        """Return once theta may change: no machine is being sent it any more."""
        for node in self._nodes:
            await node.sent()
