"""The training side, as the protocol commands it: the worker trains, and what it trained is quantized."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from peers.driver.host import Host
from peers.health import HEALTH
from peers.protocol.effects import StopTraining, Train
from peers.protocol.events import TrainingDone, TrainingProgress
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.inspection import inspection, offer
from peers.values.workload import Progress, Trained, Workload

FIRST_STEP_LIMIT = 1800.0  # seconds; a compiler may be at work
STEP_LIMIT = 600.0  # seconds from one inner step to the next
STUCK = "training has not gone on"
USUAL_STEPS = 10  # times as long as the longest inner step so far may be one, if that is more


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
        self._longest_step = 0.0  # seconds
        self._stepped_at: float | None = None

    def begin(self, train: Train) -> None:
        self.on_begin(train.index)
        self._training = self._host.start(self._train(train))

    def stop(self, stop: StopTraining) -> None:
        if self._training:
            self._training.cancel()

    async def _train(self, train: Train) -> None:
        async with self._worker:  # a training that was stopped needs a moment to end
            await asyncio.to_thread(self._buffers.prepare)
            trained = await self._watched(train)
            async with self._state:
                own = await self._workload.contribution()  # now, so that no round waits for it
            root = await asyncio.to_thread(offer, own, self._buffers, self._inspect)
        self._host.handle(TrainingDone(replace(trained, contribution=root)))

    async def _watched(self, train: Train) -> Trained:
        """Have the worker train, and let others know should nothing come of it for long."""
        HEALTH.expect("training", max(FIRST_STEP_LIMIT, USUAL_STEPS * self._longest_step), STUCK)
        self._stepped_at = None
        try:
            return await self._workload.train(train, self._progress)
        finally:
            HEALTH.over("training")

    def _progress(self, progress: Progress) -> None:
        if self._stepped_at is not None:
            self._longest_step = max(self._longest_step, time.monotonic() - self._stepped_at)
        self._stepped_at = time.monotonic()  # without the time in which the machine slept
        HEALTH.expect("training", max(STEP_LIMIT, USUAL_STEPS * self._longest_step), STUCK)
        self._host.handle(TrainingProgress(progress))
