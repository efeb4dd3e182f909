"""One worker in a thread of this process, in place of a volunteer's worker processes."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.workers.control import (
    ControlMessage,
    EndInnerLoop,
    InnerLoopDone,
    InnerStepDone,
    RunInnerLoop,
    TakeAverage,
)
from opendiloco.workers.group import TrainingRecord, WorkerGroup
from opendiloco.workers.worker import ControlChannel
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing


class InProcessControlChannel(ControlChannel):
    """A control channel that passes messages to the event loop directly, without a socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(socket.socket())
        self._connection.close()
        self._loop = loop
        self.hear: Callable[[Any], None] = lambda report: None

    def send(self, message: ControlMessage) -> None:
        self._loop.call_soon_threadsafe(self.hear, message)


class ThreadedWorker(WorkerGroup):
    """A worker that carries out one training at a time by `carry_out`. Subclasses set `vectors` and `fragments`."""

    def __init__(self, config: RunConfig, overlap: int | None = None) -> None:
        """Create the worker. `overlap` is the number of inner steps between storing a fragment and merging its average;
        None means the number in the run's settings."""
        self.config = config
        self.channel = InProcessControlChannel(asyncio.get_running_loop())
        self._own_overlap = config.streaming.overlap if overlap is None else overlap
        self._trainings = 0
        self._turn = asyncio.Lock()

    @abstractmethod
    async def carry_out(self, command: RunInnerLoop) -> InnerLoopDone:
        """Train in a thread that sends its messages through `channel`, and return the result of the training."""

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        if not goes_on:
            self.end_rest()
        self._trainings += 1
        number, overlap = self._trainings, self._own_overlap
        given = {"number": number, "overlap": overlap, "from_local": from_local, "goes_on": goes_on}
        command = RunInnerLoop.of(work, self.config, **given)

        def on_step(step: InnerStepDone) -> None:
            step_of_lease = 0 if under_way.is_known else step.inner_step
            on_progress(Progress(step_of_lease, step.loss, step.tokens_per_second))

        async def in_turn() -> InnerLoopDone:
            async with self._turn:
                self.channel.hear = under_way.heard
                return await self.carry_out(command)

        self.under_way = under_way = TrainingRecord(lambda: 1, len(self.fragments), on_step, on_captured)
        request = asyncio.create_task(in_turn())
        stored = await under_way.result(request, lambda: self._tell(EndInnerLoop(number=number)))
        return Trained(stored.samples, stored.tokens, stored.loss)

    def _tell(self, command: ControlMessage) -> None:
        assert isinstance(command, EndInnerLoop)
        self.channel.take(command)

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        self.channel.take(TakeAverage(number=self._trainings, fragment=fragment, is_changed=is_changed))
