"""Workers without processes: each trains in a thread of this one, with the code of a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.threaded_worker import InProcessControlChannel, ThreadedWorker
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.model.build import build_model
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.evaluation import held_out_loss
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.workers.control import Evaluated, InnerLoopDone, RunInnerLoop
from opendiloco.workers.supervisor import WorkersRestartedError
from opendiloco.workers.telemetry import Telemetry
from opendiloco.workers.worker import InnerLoops


@contextmanager
def as_it_is(is_tried: bool) -> Iterator[None]:
    """Have windows computed in any number."""
    yield


class ThreadedWorkers(ThreadedWorker):
    """One worker."""

    def __init__(self, config: RunConfig, overlap: int | None = None) -> None:
        """It merges averages after `overlap` inner steps, or as many as the run says."""
        super().__init__(config, overlap)
        self.held_out_digest = ""
        self.telemetry = Telemetry(config.training.inner_steps)
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
        self.channel = InProcessControlChannel(asyncio.get_running_loop())
        self._loops: InnerLoops | None = None

    async def carry_out(self, command: RunInnerLoop) -> InnerLoopDone:
        if self._loops is None:
            parts = self.config, self.replica, Team(torch.device("cpu")), self.vectors, self.channel
            self._loops = InnerLoops(*parts, lambda: None)
            if command.goes_on:
                raise WorkersRestartedError
        self.went_on = command.goes_on
        self.data.samples.mix(command.mixtures)
        return await asyncio.to_thread(self._loops.run, command)

    async def evaluate(self, windows: int) -> Evaluated:
        async with self._turn:
            return self._evaluated(windows)

    def _evaluated(self, windows: int) -> Evaluated:
        with self.replica.showing(self.vectors.theta) as model:
            loss, tokens = held_out_loss(model, self.data.held_out, windows, 2, self.replica.precision)
        return Evaluated(loss=loss, tokens=tokens)
