"""Checks of a run against this machine: whether it can take part, how fast, and at what price."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.quantities import in_words
from opendiloco.run import Run
from opendiloco.storage.run_folder import RunFolder
from opendiloco.tools.doctor.findings import Finding, failed, failed_with, passed, skipped, warned
from opendiloco.tools.doctor.machine import Taken
from opendiloco.tools.doctor.network import Bandwidth
from opendiloco.tools.doctor.torch_probe import Gpu
from opendiloco.tools.plan.forecast import SECONDS_A_DAY, Plan, forecast
from opendiloco.tools.plan.links import PEERS_LIMIT, Links, PeerSection
from opendiloco.tools.plan.report import duration
from opendiloco.volunteer.admission import enter
from opendiloco.workers.options import WorkerOptions
from peers.errors import DilocoPeerError
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.tickets import Ticket
from peers.values.workload import InnerLoop, Progress

TRIAL_SECONDS = 8.0
"""Of training, from the first inner step on, which takes longer than the others."""
FIRST_SECONDS = 120.0
"""For the first inner steps."""
MEGABITS = 1e-3, 1e6
"""Between which the planner wants the rates of links."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second. `steps` inner steps were measured; 0: it is estimated."""

    tokens_per_second: float
    steps: int


def check_run(run: Run, positions: Sequence[int]) -> Finding:
    """`positions` are the outer steps at which its peers say that they are."""
    peers, outer_step, outer_steps = len(positions), max(positions, default=0), run.config.total_outer_steps
    values = {"peers": peers, "outer_step": outer_step, "outer_steps": outer_steps}
    found = f"{run.run_id}: {peers} peer{'s' * (peers != 1)} there, outer step {outer_step} of {outer_steps}"
    if peers and outer_step >= outer_steps:
        return warned("run", f"{found}: it is finished", "There is nothing more to train in it.", **values)
    return passed("run", found, **values)


async def check_admission(
    transport: HivemindTransport,
    run: Run,
    key: Identity,
    addresses: Sequence[str],
    state: Path | None,
    ticket: Ticket | None,
) -> Finding:
    """Come into the run as `join` would, with this ticket or with one that was kept."""
    folder = None if ticket else RunFolder.at(run.run_id, key.peer_id, state)
    try:
        admission = await enter(transport, run, key, addresses, folder, ticket)
    except DilocoPeerError as error:
        return failed_with("admission", error)
    return passed("admission", "the run is open to everybody" if admission is None else "its ticket is good")


def check_data(run: Run, folders: Sequence[Path]) -> tuple[Finding, Run]:
    """Return the run, too, with what it reads here."""
    try:
        run = run.with_data(folders)
    except DilocoPeerError as error:
        return failed_with("data", error), run
    return passed("data", f"it reads {', '.join(source.source for source in run.config.data.all_sources)}"), run


def check_speed(speed: Speed | None, why_not: str = "") -> Finding:
    """`why_not` says why the speed is not measured."""
    if speed is None:
        return skipped("speed", why_not or "of CPUs, and of GPUs whose peak is not known, only a trial tells it")
    how = f"measured over {speed.steps} inner steps"
    if not speed.steps:
        how = "estimated from the GPU's peak" + (f"; {why_not}" if why_not else "")
    values = {"tokens_per_second": speed.tokens_per_second, "is_measured": bool(speed.steps)}
    return passed("speed", f"{speed.tokens_per_second:,.0f} tokens/s, {how}", **values)


def check_round(plan: Plan, is_supposed: bool, is_measured: bool) -> Finding:
    """`plan` has this machine first (see `plan_among`). `is_supposed`: no others are there, and one like us is
    supposed. `is_measured`: our speed is, and so it is certain enough that a machine is too slow."""
    outlook, ourselves, peers = forecast(plan), plan.swarm.peers[0], plan.swarm.count
    own, training = outlook.peers[0], plan.training_seconds(ourselves)
    sent, sent_a_day = own.sent_bits / 8, own.sent_bits / 8 / outlook.cycle_seconds * SECONDS_A_DAY
    if is_supposed:
        with_whom = "with one peer like this machine, since nobody is there"
    else:
        with_whom = f"with {peers - 1} other{'s' * (peers != 2)}, if their links are like this one"
    found = (
        f"an outer step takes {duration(outlook.cycle_seconds)} {with_whom}: {duration(training)}"
        f" for {own.inner_steps} inner steps, {duration(outlook.round_seconds)} to average;"
        f" {in_words(round(sent))} up and as much down in each, {in_words(round(sent_a_day))} a day"
    )
    if own.joining is not None:
        found += f"; joining takes {duration(max(1.0, own.joining))}"
    values = {
        "outer_step_seconds": outlook.cycle_seconds,
        "training_seconds": training,
        "round_seconds": outlook.round_seconds,
        "sent_bytes": sent,
        "sent_bytes_a_day": sent_a_day,
        "joining_seconds": own.joining,
        "peers": peers,
    }
    if own.joining is None:
        found, remedy = f"{found}; it would never catch up with the others", "Use a faster link."
        return (failed if is_measured else warned)("round", found, remedy, **values)
    if not own.cycles:
        found, remedy = f"{found}; it is too slow: its work would never count", "Use a faster machine, or more GPUs."
        return (failed if is_measured else warned)("round", found, remedy, **values)
    if own.cycles > 1:
        found = f"{found}; its work counts in one of {own.cycles} outer steps"
        return warned("round", found, "A faster machine would count in each.", **values)
    return passed("round", found, **values)


# What they are made of, for which torch is needed ---------------------------------------------------------------------
def size(config: RunConfig, gpus: int) -> tuple[Any, Taken]:
    """Return the skeleton of a run's model, and what the run takes of this machine with so many GPUs; 0: it trains on
    the CPU. Takes seconds, mostly imports. Raises: DilocoPeerError when the model cannot be built here."""
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    skeleton = sized_skeleton(config)
    needs = needs_of(config, skeleton, max(1, gpus))
    if not gpus:
        return skeleton, Taken(needs.main_memory_on_cpu, None, 0, needs.disk)
    return skeleton, Taken(needs.main_memory, needs.device_memory, gpus, needs.disk)


def estimated_speed(config: RunConfig, skeleton: Any, gpus: Sequence[Gpu]) -> Speed | None:
    """Return what arithmetic says of GPUs whose peak is known; None of others, and of CPUs."""
    from opendiloco.model.utilisation import peak_tokens_per_second
    from opendiloco.workers.needs import UTILISATION, needs_of

    if not gpus:
        return None
    needs = needs_of(config, skeleton, len(gpus))
    peak = peak_tokens_per_second(gpus[0].name, len(gpus), needs.precision, needs.token_flops)
    return None if peak is None else Speed(UTILISATION * peak, 0)


async def measured_speed(config: RunConfig, options: WorkerOptions) -> Speed | None:
    """Train a few inner steps as `join` would; None if none is done in time. Nothing of it is kept.

    Raises: DilocoPeerError when this machine cannot train in the run.
    """
    from opendiloco.workers.group import WorkerGroup

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


def plan_among(
    config: RunConfig, skeleton: Any, speed: Speed, bandwidth: Bandwidth, latency: float, others: Sequence[float]
) -> Plan:
    """Return the run as it would be for this machine among others, of which it is given the tokens a second.

    0 stands for one that has not said how fast it is, and trains as fast as we do. Their links are taken to be like
    ours. Where nobody is there, one peer like ourselves is supposed.
    """
    from opendiloco.tools.plan.setup import plan_of

    speeds = [speed.tokens_per_second, *(other or speed.tokens_per_second for other in others)]
    if not others:
        speeds.append(speed.tokens_per_second)
    up, down = (min(max(rate / 1e6, MEGABITS[0]), MEGABITS[1]) for rate in (bandwidth.up, bandwidth.down))
    sections = [
        PeerSection(up_mbit=up, down_mbit=down, latency_ms=min(1e3 * latency, 60_000.0), tokens_per_second=each)
        for each in speeds[:PEERS_LIMIT]
    ]
    return plan_of(config, skeleton, Links(peers=tuple(sections)))
