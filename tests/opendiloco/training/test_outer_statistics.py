"""An outer step in numbers, and how they reach people."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import OuterStatistics, OuterStepTaken
from opendiloco.view.curves import Curves
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.telemetry import Telemetry
from peers.driver.rounds import RoundCosts
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Trained
from tests.opendiloco.volunteer.test_local_workload import StateOnly
from tests.opendiloco.workers.trainings import NotingTracker

SIZES = (1, 1000, 128 * 1024, 128 * 1024 + 1, 300_001)


def encoded(values: Vector, format: kernels.Format) -> tuple[kernels.Payload, Vector]:
    payload, decoded = kernels.Payload(format, values.size), np.empty_like(values)
    kernels.quantize(values, payload)
    kernels.dequantize(payload, decoded)
    return payload, decoded


@pytest.mark.parametrize("format", kernels.FORMATS.values(), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_norms_and_the_angle_are_those_of_the_decoded_vectors(size: int, format: kernels.Format) -> None:
    source = np.random.default_rng(size)
    first, second, momentum = source.standard_normal((3, size)).astype(np.float32)
    average, averages = encoded(first, format)
    own, owns = encoded(first + 0.5 * second, format)
    found = OuterStatistics.measured(average, momentum, own)
    norms = [float(np.linalg.norm(values.astype(np.float64))) for values in (averages, momentum, owns)]
    product = float(averages.astype(np.float64) @ owns.astype(np.float64))
    cosine = product / (norms[0] * norms[2])
    expected = OuterStatistics(norms[0], norms[1], norms[2], cosine)
    for name, value in vars(expected).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name


def test_what_a_peer_without_a_pseudo_gradient_lacks_is_nan() -> None:
    zero, momentum = kernels.Payload(kernels.INT8, 3000), np.ones(3000, np.float32)
    found = OuterStatistics.measured(zero, momentum)
    assert [found.average_norm, found.momentum_norm] == pytest.approx([0.0, math.sqrt(3000)])
    assert math.isnan(found.pseudo_gradient_norm)
    assert math.isnan(found.cosine)
    assert math.isnan(OuterStatistics.measured(zero, momentum, zero).cosine)


class Trainer(StateOnly):
    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: object,
        on_captured: object = None,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        self.vectors.local[:] = self.vectors.theta - 1
        return Trained(work.samples, 16, 1.0)

    async def take_average(self, fragment: int, is_changed: bool) -> None:
        """It waits for none."""


def test_where_workers_train_on_there_is_no_pause(small_config: RunConfig) -> None:
    told = list[OuterStepTaken]()

    async def story() -> None:
        workload = LocalWorkload(Trainer(2500), small_config.changed({"streaming": {"overlap": 2}}))
        workload.measuring.on_outer_step = told.append
        await workload.run_inner_loop(InnerLoop(0, (SampleRange(0, 1),), 1, 0), lambda progress: None)
        await workload.apply(bytes(await workload.contribution()), 0)
        await workload.measuring.finished()

    asyncio.run(story())
    assert [math.isnan(step.pause_seconds) for step in told] == [True]


def test_each_outer_step_is_told_of_once_it_is_taken(small_config: RunConfig) -> None:
    """With this peer's own pseudo-gradient only where the average may have it."""
    told = list[OuterStepTaken]()

    async def story() -> None:
        workload = LocalWorkload(Trainer(2500), small_config)
        opposite, _ = encoded(np.full(2500, -2, np.float32), kernels.INT8)
        await workload.apply(bytes(opposite), 0)  # nobody listens: as when a log is replayed
        workload.measuring.on_outer_step = told.append
        work = InnerLoop(1, (SampleRange(0, 1),), 1, 0)
        for index, keeps_work in ((1, False), (2, True), (3, False), (4, False)):
            if index < 3:
                await workload.run_inner_loop(work, lambda progress: None)
                own = bytes(await workload.contribution())
            await workload.apply(own if index == 1 else bytes(opposite), index, keeps_work=keeps_work)
        await workload.contribution()  # waits for what is being measured

    asyncio.run(story())
    assert [step.index for step in told] == [1, 2, 3, 4]
    cosines = [step.statistics.cosine for step in told]
    assert [cosines[0], cosines[2]] == pytest.approx([1, -1])
    assert math.isnan(cosines[1])
    assert math.isnan(cosines[3])
    assert [math.isnan(step.pause_seconds) for step in told] == [False, True, False, True]
    assert told[0].statistics.average_norm == pytest.approx(math.sqrt(2500), rel=1e-2)
    schedule = LocalWorkload(Trainer(1), small_config)._state.outer
    assert [step.learning_rate for step in told] == [schedule.learning_rate(index) for index in (1, 2, 3, 4)]


def test_costs_are_those_since_the_outer_step_before() -> None:
    telemetry, tracker = Telemetry(inner_steps=4), NotingTracker()
    telemetry.trackers.append(tracker)
    curves = Curves(telemetry)
    for index, costs in enumerate((RoundCosts(2.0, 100, 50), RoundCosts(5.0, 300, 450, 70.0, 90.0))):
        curves.add_outer_step(OuterStepTaken(index, 0.7, 0.9, math.nan, OuterStatistics(1.0, 2.0)), costs)
    names = ("round_seconds", "sent_bytes", "received_bytes", "peak_sent_rate", "peak_received_rate")
    found = [[values.get(f"outer_step/{name}") for name in names] for _, values in tracker.records]
    assert found == [[2.0, 100, 50, None, None], [3.0, 200, 400, 70.0, 90.0]], "no link was measured at first"
