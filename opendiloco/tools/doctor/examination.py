"""One examination: all checks in the order of what they need, and those of a run against this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from opendiloco.config.run_config import RunConfig
from opendiloco.owner.controls import volunteers
from opendiloco.quantities import SECONDS_A_DAY, in_words
from opendiloco.run import Run, find_run
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.stages import NOT_COMPILING
from opendiloco.storage.run_folder import RunFolder, default_state_folder
from opendiloco.tools.doctor.findings import CHECKS, Finding, Verdict, failed, failed_with, passed, skipped, warned
from opendiloco.tools.doctor.machine import check_disk, check_kernels, check_memory, machine_findings
from opendiloco.tools.doctor.network import (
    Bandwidth,
    Node,
    answering_nodes,
    check_bandwidth,
    check_bootstrap,
    check_clock,
    check_ipv6,
    check_p2pd,
    check_peers,
    check_ports,
    check_reach,
    measured_bandwidth,
    ways_to_peers,
    with_clock,
)
from opendiloco.tools.doctor.torch_probe import Gpu, Torch, installed_torch, probed_torch
from opendiloco.tools.plan import PEERS_LIMIT, LinksFile, PeerSection, Plan, duration, forecast, plan_of
from opendiloco.view.run_view import RunView
from opendiloco.volunteer.admission import enter, read_ticket
from opendiloco.volunteer.volunteer import connected
from opendiloco.workers.options import WorkerOptions, choose_devices
from peers.errors import DilocoPeerError, ManifestError
from peers.network.links import LinkSettings
from peers.network.own_network import everywhere
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Invite
from peers.values.system import start_task
from peers.values.wire import Reach
from peers.values.workload import InnerLoop, Progress

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs

TRIAL_SECONDS = 8.0
"""Of training, from the first inner step on, which takes longer than the others."""
FIRST_SECONDS = 120.0
"""For the first inner steps."""
MEGABITS = 1e-3, 1e6
"""Between which the planner wants the rates of links."""
NO_NODE = "no bootstrap node is given: add --run with an invite, or --initial-peer"
OF_RUNS = ("run", "admission", "data", "peers", "speed", "round")
"""Checks that there are only with a run."""
NEEDED_TO_TRAIN = ("torch", "gpu", "kernels", "data", "memory")
"""Checks without which a trial would only fail for the same reason."""
LATENCY = 0.05
"""Seconds of a round trip, where none could be measured."""


@dataclass(frozen=True)
class _Speed:
    """Tokens a second. `steps` inner steps were measured; 0: it is estimated. `uncompiled` says why training was not
    compiled, where it should be."""

    tokens_per_second: float
    steps: int
    uncompiled: str = ""


def _check_run(view: RunView) -> Finding:
    """Return how far a run is, as its peers and archives say."""
    run, outer_steps, peers = view.run, view.outer_steps, len(view.trainers)
    outer_step = max((beat.index for beat in view.peers), default=0)
    archives = len(view.peers) - peers
    there = f"{peers} peer{'s' * (peers != 1)}" + f" and {archives} archive{'s' * (archives > 1)}" * bool(archives)
    values = {"peers": peers, "outer_step": outer_step, "outer_steps": outer_steps}
    found = f"{run.run_id}: {there} there, outer step {outer_step} of {outer_steps}"
    found = "; ".join([found, *run.config.about.lines()])
    if view.peers and outer_step >= outer_steps:
        return warned("run", f"{found}: it is finished", "There is nothing more to train in it.", **values)
    return passed("run", found, **values)


def _check_speed(speed: _Speed | None, why_not: str = "") -> Finding:
    """`why_not` says why the speed is not measured."""
    if speed is None:
        return skipped("speed", why_not or "of CPUs, and of GPUs whose peak is not known, only a trial tells it")
    how = f"measured over {speed.steps} inner steps"
    if not speed.steps:
        how = "estimated from the GPU's peak" + (f"; {why_not}" if why_not else "")
    found, rate = f"{speed.tokens_per_second:,.0f} tokens/s, {how}", speed.tokens_per_second
    if speed.uncompiled:
        found = f"{found}; {NOT_COMPILING}: {speed.uncompiled}"
        remedy = "Install gcc and Python's headers; empty the folder of TORCHINDUCTOR_CACHE_DIR, if that is set."
        return warned("speed", found, remedy, tokens_per_second=rate, is_measured=True)
    return passed("speed", found, tokens_per_second=rate, is_measured=bool(speed.steps))


def _check_round(plan: Plan, is_supposed: bool, is_measured: bool) -> Finding:
    """`plan` has this machine first (see `_plan_among`). `is_supposed`: no others are there, and one like us is
    supposed. `is_measured`: our speed is, and so it is certain enough that a machine is too slow."""
    outlook, ourselves, peers = forecast(plan), plan.peers[0], plan.count
    own, training = outlook.peers[0], plan.training_seconds(ourselves)
    sent, sent_a_day = own.sent_bits / 8, own.sent_bits / 8 / outlook.cycle_seconds * SECONDS_A_DAY
    received = sum(each.payload_bits * each.moved[0] for each in plan.rounds) / 8
    if is_supposed:
        with_whom = "with one peer like this machine, since nobody is there"
    else:
        with_whom = f"with {peers - 1} other{'s' * (peers != 2)}, if their links are like this one"
    found = (
        f"an outer step takes {duration(outlook.cycle_seconds)} {with_whom}: {duration(training)}"
        f" for {own.inner_steps} inner steps, {duration(outlook.round_seconds)} to average;"
        f" {in_words(round(sent))} up and {in_words(round(received))} down in each,"
        f" {in_words(round(sent_a_day))} up a day"
    )
    sending = max((each.sending[0] for each in plan.rounds), key=lambda one: one.bytes)
    formats, is_late = " and ".join(own.formats), sending.seconds > sending.allowed
    time = f"{duration(sending.seconds)} of {duration(sending.allowed)}"
    found += f"; its uplink sends contributions in {formats}, {time}"
    if own.joining is not None:
        found += f"; joining takes {duration(max(1.0, own.joining))}"
    values = {
        "outer_step_seconds": outlook.cycle_seconds,
        "training_seconds": training,
        "round_seconds": outlook.round_seconds,
        "sent_bytes": sent,
        "sent_bytes_a_day": sent_a_day,
        "received_bytes": received,
        "joining_seconds": own.joining,
        "formats": formats,
        "sending_seconds": sending.seconds,
        "sending_allowed_seconds": sending.allowed,
        "peers": peers,
    }
    wrong = failed if is_measured else warned
    if own.joining is None:
        return wrong("round", f"{found}; it would never catch up with the others", "Use a faster link.", **values)
    if not own.cycles:
        found = f"{found}; it is too slow: its work would never count"
        return wrong("round", found, "Use a faster machine, or more GPUs.", **values)
    if own.cycles > 1:
        found = f"{found}; its work counts in one of {own.cycles} outer steps"
        return warned("round", found, "A faster machine would count in each.", **values)
    if is_late:
        remedy = "What comes later is left out: use a faster uplink, or one that nothing else uses."
        return warned("round", f"{found}; the uplink is too thin", remedy, **values)
    return passed("round", found, **values)


# What they are made of, for which torch is needed ---------------------------------------------------------------------
def _size(config: RunConfig, gpus: int, options: WorkerOptions) -> tuple[Any, Needs]:
    """Return a run's model as a skeleton, and its needs with so many GPUs (0: on the CPU). Raises: DilocoPeerError."""
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    skeleton = sized_skeleton(config)
    return skeleton, needs_of(config, skeleton, max(1, gpus), options)


def _estimated_speed(needs: Needs, gpus: Sequence[Gpu]) -> _Speed | None:
    """Return what arithmetic says of GPUs whose peak is known; None of others, and of CPUs."""
    from opendiloco.model.utilisation import peak_tokens_per_second
    from opendiloco.workers.needs import UTILISATION

    if not gpus:
        return None
    peak = peak_tokens_per_second(gpus[0].name, len(gpus), needs.precision, needs.token_flops)
    return None if peak is None else _Speed(UTILISATION * peak, 0)


async def _measured_speed(config: RunConfig, options: WorkerOptions) -> _Speed | None:
    """Train a few inner steps as `join` would; None if none is done in time. Nothing of it is kept.

    Raises: DilocoPeerError when this machine cannot train in the run.
    """
    from opendiloco.workers.group import WorkerGroup

    training = config.training
    work = InnerLoop(0, (SampleRange(0, training.inner_steps * training.batch_size),), training.inner_steps, 0)
    times: list[float] = []
    told: list[Progress] = []

    def progressed(progress: Progress) -> None:
        times.append(time.monotonic())
        told.append(progress)
        if len(times) > 1 and times[-1] - times[0] >= TRIAL_SECONDS:
            trying.cancel()

    group = await WorkerGroup.start(config, options)
    trying = start_task(group.run_inner_loop(work, progressed))
    try:
        await asyncio.wait({trying}, timeout=FIRST_SECONDS)
    finally:
        trying.cancel()
        [ended] = await asyncio.gather(trying, return_exceptions=True)
        await group.close()
    if isinstance(ended, Exception):
        raise ended
    speed = _speed_of(times, told, training.batch_size * training.sequence_length)
    return None if speed is None else replace(speed, uncompiled=group.supervisor.uncompiled)


def _speed_of(times: Sequence[float], told: Sequence[Progress], tokens_per_step: int) -> _Speed | None:
    """Return the speed of all inner steps but the first, which ended at these times; of the first if it is alone."""
    if len(times) > 1 and times[-1] > times[0]:
        return _Speed((len(times) - 1) * tokens_per_step / (times[-1] - times[0]), len(times) - 1)
    return _Speed(told[0].tokens_per_second, 1) if told and told[0].tokens_per_second > 0 else None


def _plan_among(
    config: RunConfig, skeleton: Any, speed: _Speed, bandwidth: Bandwidth, latency: float, others: Sequence[float]
) -> Plan:
    """Return the run as it would be for this machine among others, of which it is given the tokens a second.

    0 stands for one that has not said how fast it is, and trains as fast as we do. Their links are taken to be like
    ours. Where nobody is there, one peer like ourselves is supposed.
    """
    speeds = [speed.tokens_per_second, *(other or speed.tokens_per_second for other in others or [0.0])]
    up, down = (min(max(rate / 1e6, MEGABITS[0]), MEGABITS[1]) for rate in (bandwidth.up, bandwidth.down))
    sections = [
        PeerSection(up_mbit=up, down_mbit=down, latency_ms=min(1e3 * latency, 60_000.0), tokens_per_second=each)
        for each in speeds[:PEERS_LIMIT]
    ]
    return plan_of(config, skeleton, LinksFile(peers=tuple(sections)))


class Examination:
    """One examination of this machine, as `join` would be started with these settings by this key.

    Without an invite it is of the machine, and of the bootstrap nodes that the settings name; without `tries` nothing
    is trained. `tell` hears each finding, `at` what is being done meanwhile.
    """

    def __init__(
        self,
        settings: JoinSettings,
        invite: Invite | None,
        key: Identity,
        tries: bool,
        tell: Callable[[Finding], None],
        at: Callable[[str], None],
    ) -> None:
        """Raises: AdmissionError for a ticket that is none."""
        self._findings: list[Finding] = []
        self._settings = settings
        self._run_id = invite.run_id if invite else None
        self._addresses = invite.addresses if invite else settings.initial_peers
        self._ticket = None if settings.ticket is None else read_ticket(settings.ticket)
        self._key = key
        self._tries = tries
        self._listener = tell
        self._at = at
        self._nodes: list[Node] = []
        self._latency = LATENCY
        self._bandwidth: Bandwidth | None = None
        self._others: list[Heartbeat] = []
        self._run: Run | None = None
        self._has_volunteer = False

    def _tell(self, *findings: Finding) -> None:
        for finding in findings:
            self._findings.append(finding)
            self._listener(finding)

    async def run(self) -> list[Finding]:
        """Make all checks. Return what they find, also what goes wrong. Raises: ManifestError for addresses that are
        none; LocalNetworkError when libp2p's daemon dies."""
        self._at("looking at this machine")
        torch = await asyncio.to_thread(probed_torch, installed_torch())
        self._tell(*await asyncio.to_thread(machine_findings, torch, self._settings.workers))
        state = self._settings.state or default_state_folder()
        self._has_volunteer = bool(await asyncio.to_thread(volunteers, state))
        self._at("testing the kernels")
        self._tell(await asyncio.to_thread(check_kernels))
        await self._examine_network()
        await self._examine_training(torch)
        self._skip_until(None, "what the run takes is not known")
        return self._findings

    def _skip_until(self, end: str | None, why: str) -> None:
        """Tell that what comes before the check of this name, and was not made, is not made any more."""
        for name in CHECKS:
            if name == end:
                break
            if not self._is_told(name) and not (self._run_id is None and name in OF_RUNS):
                self._tell(skipped(name, why))

    def _is_told(self, name: str) -> bool:
        return any(finding.name == name for finding in self._findings)

    # The network ------------------------------------------------------------------------------------------------------
    async def _examine_network(self) -> None:
        settings = self._settings
        listen = settings.listen or everywhere(0)
        self._at("starting libp2p's daemon")
        p2pd = await check_p2pd()
        ports = check_ports(listen, settings.data_port, self._has_volunteer)
        self._tell(p2pd, ports, check_ipv6())
        starts = p2pd.verdict is Verdict.PASS
        if not starts or not self._addresses:
            self._skip_until("memory", NO_NODE if starts else "libp2p's daemon does not start")
            return
        self._at("looking for the bootstrap nodes")
        self._nodes = await answering_nodes(self._addresses)
        if ports.verdict is Verdict.PASS:
            links = LinkSettings(settings.data_port)
        else:  # a `join` may use them: any others do
            listen, links = everywhere(0), LinkSettings()
        try:
            async with connected(self._key, self._addresses, listen, settings.announce, links=links) as transport:
                await self._examine_swarm(transport)
        except DilocoPeerError as lost:
            if self._is_told("bootstrap") or isinstance(lost, ManifestError):  # which is about what was typed
                raise
            self._tell(check_bootstrap(self._nodes, lost))
            self._skip_until("memory", "the swarm is out of reach")

    async def _examine_swarm(self, transport: HivemindTransport) -> None:
        self._nodes = await asyncio.gather(*(with_clock(transport, node) for node in self._nodes))
        self._latency = min((node.seconds for node in self._nodes if node.seconds is not None), default=LATENCY)
        self._tell(check_bootstrap(self._nodes, None), check_clock(self._nodes))
        self._at("asking how this machine is seen")
        self._tell(await check_reach(transport, self._nodes))
        ways: dict[str, Reach] = {}
        if self._run_id is not None:
            self._at("looking for the run")
            self._run = await self._find(transport, self._run_id)
        if self._run is not None:
            self._at("looking for ways to its peers")
            ways, sought = await ways_to_peers(transport, {beat.peer for beat in self._others})
            self._tell(check_peers(ways, sought, len(self._others)))
        self._at("measuring the link")
        self._bandwidth = await measured_bandwidth(transport, ways, self._nodes)
        self._tell(check_bandwidth(self._bandwidth))

    async def _find(self, transport: HivemindTransport, run_id: str) -> Run | None:
        """Return the run as this machine would train in it; None when it is unknown, or its model not to be opened."""
        try:
            run = await find_run(transport, run_id)
        except DilocoPeerError as error:
            self._tell(failed_with("run", error))
            return None
        folder = None if self._ticket else RunFolder.at(run.run_id, self._key.peer_id, self._settings.state)
        try:  # as `join` would, with the ticket that is given or one that was kept
            entered = await enter(transport, run, self._key, self._addresses, folder, self._ticket)
            found = "the run is open to everybody" if entered is None else "its ticket is good"
            admission = passed("admission", found)
        except DilocoPeerError as error:
            admission = failed_with("admission", error)
        beats = [beat for beat in await transport.heartbeats(run_id) if beat.peer != self._key.peer_id]
        view = RunView(run, beats)
        self._others = list(view.trainers)
        self._tell(_check_run(view), admission)
        opened: Run | None = None
        try:
            opened = run.with_own(self._settings.own_files)
            opened = opened.with_data(self._settings.data)
        except DilocoPeerError as error:
            self._tell(failed_with("data", error))
        else:
            sources = ", ".join(source.source for source in opened.config.data.all_sources)
            self._tell(passed("data", f"it reads {sources}"))
        return opened

    # What a run would take, and give ----------------------------------------------------------------------------------
    async def _examine_training(self, torch: Torch | None) -> None:
        state = self._settings.state
        if self._run is None:
            self._tell(check_memory(), check_disk(state))
            return
        self._at("importing torch and transformers")
        try:
            gpus = self._gpus(torch)
            skeleton, needs = await asyncio.to_thread(_size, self._run.config, len(gpus), self._settings.workers)
        except DilocoPeerError as error:
            self._tell(failed_with("memory", error), check_disk(state))
            return
        self._tell(check_memory(gpus, needs), check_disk(state, needs))
        speed = await self._examine_speed(self._run.config, needs, gpus)
        if speed is None or self._bandwidth is None:
            self._tell(skipped("round", f"the {'speed' if speed is None else 'bandwidth'} is not known"))
            return
        others = [beat.speed for beat in self._others]
        bandwidth = self._bandwidth.within(self._settings.upload_limit, self._settings.download_limit)
        plan = _plan_among(self._run.config, skeleton, speed, bandwidth, self._latency, others)
        self._tell(_check_round(plan, is_supposed=not others, is_measured=bool(speed.steps)))

    def _gpus(self, torch: Torch | None) -> tuple[Gpu, ...]:
        """Return the GPUs that would train; none: the CPU would. Raises: MachineError."""
        there = (torch.gpus if torch else None) or ()
        devices = choose_devices(self._settings.workers, len(there))
        if devices[0] == "cpu":
            return ()
        numbers = [int(device.partition(":")[2] or 0) for device in devices]
        return tuple(there[number] for number in numbers if number < len(there))

    async def _examine_speed(self, config: RunConfig, needs: Needs, gpus: Sequence[Gpu]) -> _Speed | None:
        """Train a little, if nothing is in the way, and nobody else trains here; else estimate."""
        why = ""
        if self._tries and self._has_volunteer:
            why = "a volunteer runs on this machine, and a trial would take memory and time from it"
        lacking = [one.name for one in self._findings if one.verdict is Verdict.FAIL and one.name in NEEDED_TO_TRAIN]
        speed: _Speed | None = None
        if self._tries and not lacking and not self._has_volunteer:
            self._at("training a little, as `join` would")
            try:
                speed = await _measured_speed(config, self._settings.workers)
            except DilocoPeerError as error:
                self._tell(failed_with("speed", error))
                return None
            why = f"no inner step was done within {FIRST_SECONDS:.0f} s"
        speed = speed or _estimated_speed(needs, gpus)
        self._tell(_check_speed(speed, f"not measured: see {', '.join(lacking)}" if lacking else why))
        return speed
