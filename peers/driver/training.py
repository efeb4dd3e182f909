"""The training part of the driver, which runs the workers and quantizes their pseudo-gradients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from peers.driver.replication import Replication
from peers.metrics import HEALTH
from peers.protocol.effects import StopTraining, Train
from peers.protocol.events import Captured, TrainingDone, TrainingProgress
from peers.protocol.planning import format_for
from peers.protocol.round import RoundState
from peers.transfer.buffers import PayloadBuffers, inspection, offer
from peers.values.chunks import Sum
from peers.values.leases import sample_count
from peers.values.workload import Progress, Trained, Workload

if TYPE_CHECKING:
    from peers.driver.driver import Driver

FIRST_STEP_LIMIT = 1800.0  # seconds that the health check allows for the first inner step; a compiler may run during it
STEP_LIMIT = 600.0  # seconds that the health check allows from one inner step to the next
STUCK = "training has not gone on"
STEP_FACTOR = 10  # the health check allows this many times the longest inner step so far, if that is more


class Sending(NamedTuple):
    """The format of a contribution, its size in bytes, and the reason for the format: the last upload rate in bytes a
    second (0 if unknown), and the seconds allowed for the upload."""

    format: int
    bytes: float
    uplink: float
    allowed: float

    @property
    def seconds(self) -> float:
        """The seconds that the upload of the contribution takes; 0 if the rate is unknown."""
        return self.bytes / self.uplink if self.uplink else 0.0


class Training:
    """The part of the driver that runs the training of this peer's workers, one lease at a time."""

    def __init__(
        self,
        workload: Workload,
        buffers: Sequence[PayloadBuffers],
        replication: Replication,
        host: Driver,
        format: int | None = None,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Create the object without a lease. `begin` then trains a lease with the workload's workers.

        Args:
            buffers: one for each fragment.
            format: the format of all contributions; None for the first one that the uplink has time for.
            share: returns a fraction of the bytes of a contribution in the run's first format. This peer chooses a
                format with at most that fraction of the bytes, or if there is none, the smallest format.
        """
        self._workload = workload
        self._buffers = buffers
        self._replication = replication
        self._host = host
        self._training: asyncio.Task[None] | None = None
        self._loss = 0.0
        self._step_tokens: float | None = None
        self._longest_step = 0.0  # seconds of the longest inner step so far
        self._stepped_at: float | None = None
        self._is_watched = False
        self._format, self._share = format, share
        self.sending: Sending | None = None
        """The format of the last contribution."""

    def begin(self, train: Train) -> None:
        self._training = self._host.start(self._run(train))

    def stop(self, stop: StopTraining) -> None:
        if self._training:
            self._training.cancel()

    async def _run(self, train: Train) -> None:
        async with self._replication.worker:  # waits until cancelled training has ended
            for buffers in self._buffers:
                await asyncio.to_thread(buffers.prepare)
            trained = await self._watched(train)
            root, format = await self._quantize(len(self._buffers) - 1)  # quantized now, so that no round waits
        self._host.handle(TrainingDone(replace(trained, contribution=root, format=format)))

    async def _watched(self, train: Train) -> Trained:
        """Run the workers' inner steps for a lease, and return their result. The health check "training" fails if the
        workers are silent for long."""
        HEALTH.expect("training", max(FIRST_STEP_LIMIT, STEP_FACTOR * self._longest_step), STUCK)
        self._stepped_at, self._is_watched = None, True
        try:
            return await self._workload.run_inner_loop(train, self._progress, partial(self._captured, train))
        finally:
            self._is_watched = False
            HEALTH.forget("training")

    def rest(self) -> None:
        """Stop expecting inner steps in the health check."""
        self._is_watched = False
        HEALTH.forget("training")

    def look(self) -> None:
        """Restart the time limit of the health check "training" while the workers may wait for a round or an average.
        They wait only in the cycle in which their training began."""
        peer = self._host.peer
        is_late = peer.trainer.is_late(peer.log)
        are_open = all(round.state is RoundState.OPEN for round in peer.rounds.values())
        if self._is_watched and not is_late and not are_open:
            self._expect_a_step()
            self._stepped_at = None  # a step that included a wait is not measured

    def _expect_a_step(self) -> None:
        HEALTH.expect("training", max(STEP_LIMIT, STEP_FACTOR * self._longest_step), STUCK)

    async def _captured(self, train: Train, fragment: int) -> None:
        """Quantize a fragment's pseudo-gradient, and pass it to the protocol for its round. If no round needs it any
        more, let the workers continue."""
        root, format = await self._quantize(fragment)
        trained = Trained((), self._planned_tokens(train), self._loss, contribution=root, format=format)
        self._host.handle(Captured(fragment, trained))
        if not self._host.peer.trainer.captures.keeps(fragment) and not self._replication.is_applying(fragment):
            await self._workload.unchanged(train.index, fragment)

    async def _quantize(self, fragment: int) -> tuple[Sum, int]:
        """Quantize a fragment's pseudo-gradient. Return the Merkle root over its chunks, and the format used."""
        buffers = self._buffers[fragment]
        format = self._choose_format(fragment)
        async with self._replication.snapshotter.state_lock:
            own = await self._workload.contribution(fragment, format)
        inspect = inspection(self._workload.squared_norm, buffers)
        return await asyncio.to_thread(offer, own, buffers, inspect, format), format

    def _choose_format(self, fragment: int) -> int:
        """Choose and return the format of a fragment's contribution, and record the choice in `sending`."""
        size, uplink = self._buffers[fragment].size, self._host.rounds.traffic.last_uplink
        allowed = self._host.peer.seconds_to_send(fragment)
        format = self._format
        if format is None:
            in_share = format_for(size, self._share() * size.bytes, 1.0)
            format = max(format_for(size, uplink, allowed), in_share)
        self.sending = Sending(format, size.by_format[format], uplink, allowed)
        return format

    def _planned_tokens(self, train: Train) -> int:
        """Return an estimate of the tokens that all inner steps of a lease will train, made before the last steps. The
        estimate is lower if the steps so far trained fewer tokens than the run's batch has, on average."""
        settings = self._host.peer.settings
        batch = settings.samples_per_lease // settings.inner_steps
        tokens = min(sample_count(train.samples), train.steps * batch) * settings.tokens_per_sample
        if self._step_tokens is None:
            return tokens
        return int(tokens * min(1.0, self._step_tokens / (batch * settings.tokens_per_sample)))

    def _progress(self, progress: Progress) -> None:
        self._loss = self._loss if progress.loss is None else progress.loss
        self._step_tokens = progress.step_tokens
        if self._stepped_at is not None:
            self._longest_step = max(self._longest_step, time.monotonic() - self._stepped_at)
        self._stepped_at = time.monotonic()  # this clock excludes the time in which the machine slept
        if self._is_watched:
            self._expect_a_step()
        self._host.handle(TrainingProgress(progress))
