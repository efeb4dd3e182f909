"""Workers without processes: each trains in a thread of this one, with the code of a worker process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.inner.replica import ModelReplica
from opendiloco.inner.team import Team
from opendiloco.model.build import build_model
from opendiloco.model.evaluation import held_out_loss
from opendiloco.shared_memory import SharedVectors
from opendiloco.workers.channel import ControlChannel
from opendiloco.workers.control import (
    ControlMessage,
    EndInnerLoop,
    Evaluated,
    InnerLoopDone,
    InnerStepDone,
    RunInnerLoop,
    TakeAverage,
)
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.inner_loops import InnerLoops
from opendiloco.workers.nodes import Nodes, SpreadWeights
from opendiloco.workers.restarts import WorkersRestartedError
from opendiloco.workers.telemetry import Telemetry
from opendiloco.workers.under_way import UnderWay
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing


class Channel(ControlChannel):
    """What the worker says is heard at once, in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(socket.socket())
        self._connection.close()
        self._loop = loop
        self.hear: Callable[[Any], None] = lambda report: None

    def send(self, message: ControlMessage) -> None:
        self._loop.call_soon_threadsafe(self.hear, message)


@contextmanager
def as_it_is(windows: int) -> Iterator[None]:
    """Have windows computed in any number."""
    yield


class ThreadedWorkers(WorkerGroup):
    """One worker."""

    def __init__(self, config: RunConfig, overlap: int | None = None) -> None:
        """It merges averages after `overlap` inner steps, or as many as the run says."""
        self.config = config
        self.own_overlap = config.streaming.overlap if overlap is None else overlap
        self.weights = SpreadWeights(Nodes())
        self.held_out_digest = ""
        self.telemetry = Telemetry(config.training.inner_steps)
        self._trainings = 0
        self._turn = asyncio.Lock()
        self.went_on = False
        """Whether the newest training went on from where the one before had ended."""
        self.start_anew()
        layout = self.replica.layout
        self.vectors, self.fragments = SharedVectors.create(layout.size), layout.fragments
        self.replica.store(self.vectors.theta)

    def start_anew(self) -> None:
        """Have a new worker, which knows nothing of the one before."""
        tokenizer = build_tokenizer(self.config.tokenizer)
        self.data: TrainingData = load_data(self.config, tokenizer)
        self.replica = ModelReplica(self.config, build_model(self.config, tokenizer), self.data.samples)
        # What it does without compiled blocks is said to the whole process, in which others train at the same time.
        self.replica._as_tried = as_it_is  # type: ignore[method-assign]
        self.channel = Channel(asyncio.get_running_loop())
        self._loops: InnerLoops | None = None

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
        number = self._trainings
        command = RunInnerLoop(
            number=number, overlap=self.own_overlap, from_local=from_local, goes_on=goes_on, **vars(work)
        )

        def on_step(step: InnerStepDone) -> None:
            step_of_lease = 0 if under_way.is_known else step.inner_step
            on_progress(Progress(step_of_lease, step.loss, step.tokens_per_second))

        async def captured(fragment: int) -> None:
            if fragment < len(self.fragments) - 1:
                await on_captured(fragment)

        async def carry_out() -> InnerLoopDone:
            async with self._turn:
                self.channel.hear = under_way.heard
                return await self.carry_out(command)

        self.under_way = under_way = UnderWay(lambda: 1, len(self.fragments), on_step, captured)
        request = asyncio.create_task(carry_out())
        stored = await under_way.outcome(request, lambda: self._tell(EndInnerLoop(number=number)))
        return Trained(stored.samples, stored.tokens, stored.loss)

    async def carry_out(self, command: RunInnerLoop) -> InnerLoopDone:
        if self._loops is None:
            parts = self.config, self.replica, Team(torch.device("cpu")), self.vectors, self.channel
            self._loops = InnerLoops(*parts, lambda: None)
            if command.goes_on:
                raise WorkersRestartedError
        self.went_on = command.goes_on
        return await asyncio.to_thread(self._loops.run, command)

    def _tell(self, command: ControlMessage) -> None:
        assert isinstance(command, EndInnerLoop)
        self.channel.take(command)

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        self.channel.take(TakeAverage(number=self._trainings, fragment=fragment, is_changed=is_changed))

    async def evaluate(self, windows: int) -> Evaluated:
        async with self._turn:
            return self._evaluated(windows)

    def _evaluated(self, windows: int) -> Evaluated:
        with self.replica.showing(self.vectors.theta) as model:
            loss, tokens = held_out_loss(model, self.data.held_out, windows, 2, self.replica.precision)
        return Evaluated(loss=loss, tokens=tokens)
