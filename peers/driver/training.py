"""The training side, as the protocol commands it: the worker trains, and what it trained is quantized."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from peers.driver.host import Host
from peers.protocol.effects import StopTraining, Train
from peers.protocol.events import TrainingDone, TrainingProgress
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.inspection import inspection, offer
from peers.values.workload import Progress, Workload


class Training:
    """Has the worker train once at a time. `on_begin` is told of the index of each outer step that is trained for."""

    def __init__(
        self, workload: Workload, buffers: PayloadBuffers, worker: asyncio.Lock, state: asyncio.Lock, host: Host
    ) -> None:
        """`worker` is held while the worker is at work, `state` while theta and momentum are read."""
        self.on_begin: Callable[[int], None] = lambda index: None
        self._workload = workload
        self._buffers = buffers
        self._inspect = inspection(workload, buffers)
        self._worker = worker
        self._state = state
        self._host = host
        self._training: asyncio.Task[None] | None = None

    def begin(self, train: Train) -> None:
        self.on_begin(train.index)
        self._training = self._host.start(self._train(train))

    def stop(self, stop: StopTraining) -> None:
        if self._training:
            self._training.cancel()

    async def _train(self, train: Train) -> None:
        async with self._worker:  # a training that was stopped needs a moment to end
            await asyncio.to_thread(self._buffers.prepare)
            trained = await self._workload.train(train, self._progress)
            async with self._state:
                own = await self._workload.contribution()  # now, so that no round waits for it
            root = await asyncio.to_thread(offer, own, self._buffers, self._inspect)
        self._host.handle(TrainingDone(replace(trained, contribution=root)))

    def _progress(self, progress: Progress) -> None:
        self._host.handle(TrainingProgress(progress))
