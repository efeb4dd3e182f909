"""How fast this machine trains a run's model: a very short training, or an estimate; and what would come of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.doctor.facts import Bandwidth, Gpu, Outlook, Speed, Taken
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.plan.forecast import forecast
from opendiloco.plan.links import PEERS_LIMIT, Links, PeerSection
from opendiloco.plan.setup import plan_of
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.needs import UTILISATION, needs_of
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Progress

TRIAL_SECONDS = 8.0
"""Of training, from the first inner step on, which takes longer than the others."""
FIRST_SECONDS = 120.0
"""For the first inner steps."""
MEGABITS = 1e-3, 1e6
"""Between which the planner wants the rates of links."""


def taken_by(config: RunConfig, skeleton: Any, gpus: int) -> Taken:
    """Return what a run takes of this machine, with so many GPUs; 0: it trains on the CPU."""
    needs = needs_of(config, skeleton, max(1, gpus))
    if not gpus:
        return Taken(needs.main_memory_on_cpu, None, 0, needs.disk)
    return Taken(needs.main_memory, needs.device_memory, gpus, needs.disk)


def estimated_speed(config: RunConfig, skeleton: Any, gpus: Sequence[Gpu]) -> Speed | None:
    """Return what arithmetic says of GPUs whose peak is known; None of others, and of CPUs."""
    if not gpus:
        return None
    needs = needs_of(config, skeleton, len(gpus))
    peak = peak_tokens_per_second(gpus[0].name, len(gpus), needs.precision, needs.token_flops)
    return None if peak is None else Speed(UTILISATION * peak, 0)


async def measured_speed(config: RunConfig, options: WorkerOptions) -> Speed | None:
    """Train a few inner steps as `join` would; None if none is done in time. Nothing of it is kept.

    Raises: DilocoPeerError when this machine cannot train in the run.
    """
    training = config.training
    work = InnerLoop(0, (SampleRange(0, training.inner_steps * training.batch_size),), training.inner_steps, 0)
    times: list[float] = []
    told: list[Progress] = []
    is_enough = asyncio.Event()

    def progressed(progress: Progress) -> None:
        times.append(time.monotonic())
        told.append(progress)
        if len(times) > 1 and times[-1] - times[0] >= TRIAL_SECONDS:
            is_enough.set()

    group = await WorkerGroup.start(config, options)
    try:
        trying, waiting = (
            asyncio.create_task(group.run_inner_loop(work, progressed)),
            asyncio.create_task(is_enough.wait()),
        )
        try:
            await asyncio.wait({trying, waiting}, timeout=FIRST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if trying.done():
                trying.result()
        finally:
            for task in (trying, waiting):
                task.cancel()
            await asyncio.gather(trying, waiting, return_exceptions=True)
    finally:
        await group.close()
    return speed_of(times, told, training.batch_size * training.sequence_length)


def speed_of(times: Sequence[float], told: Sequence[Progress], tokens_per_step: int) -> Speed | None:
    """Return the speed of all inner steps but the first, which ended at these times; of the first if it is alone."""
    if len(times) > 1 and times[-1] > times[0]:
        return Speed((len(times) - 1) * tokens_per_step / (times[-1] - times[0]), len(times) - 1)
    return Speed(told[0].tokens_per_second, 1) if told and told[0].tokens_per_second > 0 else None


def outlook_of(
    config: RunConfig, skeleton: Any, speed: Speed, bandwidth: Bandwidth, latency: float, others: Sequence[float]
) -> Outlook:
    """Return what the planner says of this machine among others, of which it is given the tokens a second.

    0 stands for one that has not said how fast it is, and trains as fast as we do. Their links are taken to be like
    ours. Where nobody is there, one peer like ourselves is supposed.
    """
    speeds = [speed.tokens_per_second, *(other or speed.tokens_per_second for other in others)]
    if not others:
        speeds.append(speed.tokens_per_second)
    up, down = (min(max(rate / 1e6, MEGABITS[0]), MEGABITS[1]) for rate in (bandwidth.up, bandwidth.down))
    sections = [
        PeerSection(up_mbit=up, down_mbit=down, latency_ms=min(1e3 * latency, 60_000.0), tokens_per_second=each)
        for each in speeds[:PEERS_LIMIT]
    ]
    plan = plan_of(config, skeleton, Links(peers=tuple(sections)))
    found = forecast(plan)
    own, ourselves = found.peers[0], plan.swarm.peers[0]
    return Outlook(
        inner_steps=own.inner_steps,
        training_seconds=plan.training_seconds(ourselves),
        round_seconds=found.round_seconds,
        cycle_seconds=found.cycle_seconds,
        sent=own.sent_bits / 8,
        joining_seconds=own.joining,
        cycles=own.cycles,
        peers=len(sections),
        is_supposed=not others,
    )
