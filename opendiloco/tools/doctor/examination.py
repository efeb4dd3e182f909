"""The doctor's examination of this machine, which makes all checks in the order of their dependencies. With an invite,
it adds the checks for that run."""

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
from opendiloco.shared_memory import cap_memory
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
from peers.network.daemon import own_addresses
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
"""Duration of the trial training, counted from the end of the first inner step, which is slower than the others."""
FIRST_SECONDS = 120.0
"""Limit for the whole trial. The first inner step may take most of it."""
MEGABITS = 1e-3, 1e6
"""Range of link rates that the planner accepts."""
NO_NODE = "no bootstrap node is given: add --run with an invite, or --initial-peer"
OF_RUNS = ("run", "admission", "data", "peers", "speed", "round")
"""Checks that need a run."""
NEEDED_TO_TRAIN = ("torch", "gpu", "kernels", "data", "memory")
"""Checks whose failure would also make the trial fail."""
LATENCY = 0.05
"""Seconds of a round trip, if none could be measured."""


@dataclass(frozen=True)
class _Speed:
    """The training speed in tokens a second, measured over `steps` inner steps, or estimated if `steps` is 0.
    `uncompiled` is the reason why training is not compiled although it should be, or empty."""

    tokens_per_second: float
    steps: int
    uncompiled: str = ""


MONTH_DAYS = 31.0
"""Days of a month: `_check_round` warns if the run's traffic reaches a monthly limit in fewer days."""


def _check_run(view: RunView, format: str | None = None) -> Finding:
    """Return the finding on a run: its progress, peers and archives. It is a failure if the run does not allow
    contributions in `format`, the owner's choice."""
    run, outer_steps, peers = view.run, view.outer_steps, len(view.trainers)
    outer_step = max((beat.index for beat in view.peers), default=0)
    archives = len(view.peers) - peers
    present = f"{peers} peer{'s' * (peers != 1)}" + f" and {archives} archive{'s' * (archives > 1)}" * bool(archives)
    values = {"peers": peers, "outer_step": outer_step, "outer_steps": outer_steps}
    found = f"{run.run_id}: {present}, outer step {outer_step} of {outer_steps}"
    found = "; ".join([found, *run.config.about.lines()])
    if format is not None and format not in run.config.codec.contributions:
        allowed = ", ".join(run.config.codec.contributions)
        remedy = f"Choose one of its formats with --contribution-format: {allowed}."
        return failed("run", f"{found}; it does not allow contributions in {format}", remedy, **values)
    if view.peers and outer_step >= outer_steps:
        return warned("run", f"{found}: it is finished", "Join another run.", **values)
    return passed("run", found, **values)


def _check_speed(speed: _Speed | None, why_not: str = "") -> Finding:
    """Return the finding on this machine's training speed. `why_not` is the reason why the speed was not measured."""
    if speed is None:
        return skipped("speed", why_not or "only a trial can measure CPUs and GPUs that are not in the table of peaks")
    how = f"measured over {speed.steps} inner steps"
    if not speed.steps:
        how = "estimated from the GPU's peak" + (f"; {why_not}" if why_not else "")
    found, rate = f"{speed.tokens_per_second:,.0f} tokens/s, {how}", speed.tokens_per_second
    if speed.uncompiled:
        found = f"{found}; {NOT_COMPILING}: {speed.uncompiled}"
        remedy = "Install gcc and Python's headers; empty the folder of TORCHINDUCTOR_CACHE_DIR, if that is set."
        return warned("speed", found, remedy, tokens_per_second=rate, is_measured=True)
    return passed("speed", found, tokens_per_second=rate, is_measured=bool(speed.steps))


def _check_round(
    plan: Plan,
    is_peer_assumed: bool,
    is_speed_measured: bool,
    monthly: tuple[float | None, float | None] = (None, None),
) -> Finding:
    """Return the finding on the duration and the traffic of a round with this machine, which is the first peer of
    `plan`.

    `is_peer_assumed`: the run has no other peers, and the plan assumes one like this machine. `is_speed_measured`: this
    machine's speed was measured, so a machine that is too slow is a failure, not a warning. `monthly` are the owner's
    limits in bytes, up and down.
    """
    outlook, peers = forecast(plan), plan.count
    own, training = outlook.peers[0], plan.training_seconds(plan.peers[0])
    sent, sent_a_day = own.sent_bits / 8, own.sent_bits / 8 / outlook.cycle_seconds * SECONDS_A_DAY
    received = sum(each.payload_bits * each.received[0] for each in plan.rounds) / 8
    if is_peer_assumed:
        others = "with one peer like this machine, since the run has no peer now"
    else:
        others = f"with {peers - 1} other{'s' * (peers != 2)}, if their links are like this one"
    found = (
        f"an outer step takes {duration(outlook.cycle_seconds)} {others}: {duration(training)}"
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
    moved_a_day, is_short = (sent_a_day, received / outlook.cycle_seconds * SECONDS_A_DAY), False
    for option, limit, moved in zip(("--monthly-upload", "--monthly-download"), monthly, moved_a_day, strict=True):
        if limit is not None and limit < MONTH_DAYS * moved:
            is_short, found = True, f"{found}; the limit of {option} is reached after {limit / moved:.1f} days"
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
    wrong = failed if is_speed_measured else warned
    if own.joining is None:
        return wrong("round", f"{found}; it would never catch up with the others", "Use a faster link.", **values)
    if not own.cycles:
        found = f"{found}; it is too slow: its work would never count"
        return wrong("round", found, "Use a faster machine, or more GPUs.", **values)
    if own.cycles > 1:
        found = f"{found}; its work counts in one of {own.cycles} outer steps"
        return warned("round", found, "Use a faster machine to count in each.", **values)
    if is_late:
        remedy = "Later blocks do not count: use a faster uplink, or stop other uploads."
        return warned("round", f"{found}; the uplink is too thin", remedy, **values)
    if is_short:
        remedy = "Raise the limit, or train in fewer --hours: at the limit, `join` pauses until the month ends."
        return warned("round", found, remedy, **values)
    return passed("round", found, **values)


# Sizes and speeds, which need torch ----------------------------------------------------------------------------------
def _size(config: RunConfig, gpus: int, options: WorkerOptions) -> tuple[Any, Needs]:
    """Return a run's model without weights, and the memory and disk that the run needs with `gpus` GPUs (0: on the
    CPU). Raises: DilocoPeerError if the model cannot be built."""
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    skeleton = sized_skeleton(config)
    return skeleton, needs_of(config, skeleton, max(1, gpus), options)


def _estimated_speed(needs: Needs, gpus: Sequence[Gpu]) -> _Speed | None:
    """Return the training speed estimated from the GPUs' peak rate; None for CPUs and for GPUs whose peak is
    unknown."""
    from opendiloco.model.utilisation import peak_tokens_per_second
    from opendiloco.workers.needs import UTILISATION

    if not gpus:
        return None
    peak = peak_tokens_per_second(gpus[0].name, len(gpus), needs.precision, needs.token_flops)
    return None if peak is None else _Speed(UTILISATION * peak, 0)


async def _measured_speed(config: RunConfig, options: WorkerOptions) -> _Speed | None:
    """Train a few inner steps as `join` would, discard the result, and return the speed, or None if no step ends in
    time. Raises: DilocoPeerError if this machine cannot train in the run."""
    from opendiloco.workers.group import WorkerGroup

    training = config.training
    work = InnerLoop(0, (SampleRange(0, training.inner_steps * training.batch_size),), training.inner_steps, 0)
    times: list[float] = []
    reports: list[Progress] = []

    def progressed(progress: Progress) -> None:
        times.append(time.monotonic())
        reports.append(progress)
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
    speed = _speed_of(times, reports, training.batch_size * training.sequence_length)
    return None if speed is None else replace(speed, uncompiled=group.supervisor.uncompiled)


def _speed_of(times: Sequence[float], reports: Sequence[Progress], tokens_per_step: int) -> _Speed | None:
    """Return the mean speed of the inner steps, which ended at these times (in seconds), without the first step. If
    only one step ended, return the speed in its report. Return None if that is 0 or no step ended."""
    if len(times) > 1 and times[-1] > times[0]:
        return _Speed((len(times) - 1) * tokens_per_step / (times[-1] - times[0]), len(times) - 1)
    return _Speed(reports[0].tokens_per_second, 1) if reports and reports[0].tokens_per_second > 0 else None


def _plan_among(
    config: RunConfig, skeleton: Any, speed: _Speed, bandwidth: Bandwidth, latency: float, others: Sequence[float]
) -> Plan:
    """Return the planner's input for the run with this machine and others. `others` are the other peers' speeds in
    tokens a second; `latency` is this machine's round trip in seconds.

    0 stands for a peer that has not reported its speed, and is taken to be as fast as this machine. The others' links
    are taken to be like this machine's. If there are no others, one peer like this machine is assumed.
    """
    speeds = [speed.tokens_per_second, *(other or speed.tokens_per_second for other in others or [0.0])]
    up, down = (min(max(rate / 1e6, MEGABITS[0]), MEGABITS[1]) for rate in (bandwidth.up, bandwidth.down))
    sections = [
        PeerSection(up_mbit=up, down_mbit=down, latency_ms=min(1e3 * latency, 60_000.0), tokens_per_second=each)
        for each in speeds[:PEERS_LIMIT]
    ]
    return plan_of(config, skeleton, LinksFile(peers=tuple(sections)))


class Examination:
    """Makes the checks of `diloco-peer doctor`: of this machine, the bootstrap nodes and, with an invite, the run.

    Without an invite, the bootstrap nodes are those that the settings name.
    """

    def __init__(
        self,
        settings: JoinSettings,
        invite: Invite | None,
        key: Identity,
        trains: bool,
        report: Callable[[Finding], None],
        on_activity: Callable[[str], None],
        if_refused: str = "",
    ) -> None:
        """Prepare the examination, which trains a little if `trains`. It calls `report` with each finding, and
        `on_activity` with each activity that begins. `if_refused` is the remedy if the run does not admit `key`; empty:
        the one of the refusal, as with a ticket that fits any key. Raises: AdmissionError if the settings name an
        invalid ticket."""
        self._findings: list[Finding] = []
        self._settings = settings
        self._run_id = invite.run_id if invite else None
        self._addresses = invite.addresses if invite else settings.initial_peers
        self._ticket = None if settings.ticket is None else read_ticket(settings.ticket)
        self._key, self._if_refused = key, if_refused
        self._trains = trains
        self._listener = report
        self._at = on_activity
        self._nodes: list[Node] = []
        self._bandwidth: Bandwidth | None = None
        self._others: list[Heartbeat] = []
        self._run: Run | None = None
        self._has_volunteer = False

    def _report(self, *findings: Finding) -> None:
        for finding in findings:
            self._findings.append(finding)
            self._listener(finding)

    async def run(self) -> list[Finding]:
        """Run all checks and return their findings, also those of failed checks. Raises: ManifestError for an invalid
        address; LocalNetworkError if libp2p's daemon dies."""
        self._at("looking at this machine")
        torch = await asyncio.to_thread(probed_torch, installed_torch())
        self._report(*await asyncio.to_thread(machine_findings, torch, self._settings.workers))
        state = self._settings.state or default_state_folder()
        self._has_volunteer = bool(await asyncio.to_thread(volunteers, state))
        self._at("testing the kernels")
        self._report(await asyncio.to_thread(check_kernels))
        await self._examine_network()
        await self._examine_training(torch)
        self._skip_until(None, "the run's needs are not known")
        return self._findings

    def _skip_until(self, end: str | None, why: str) -> None:
        """Report the checks before the check `end` (None: all checks) that have no finding yet as skipped, with the
        reason `why`."""
        for name in CHECKS:
            if name == end:
                break
            if not self._is_reported(name) and not (self._run_id is None and name in OF_RUNS):
                self._report(skipped(name, why))

    def _is_reported(self, name: str) -> bool:
        return any(finding.name == name for finding in self._findings)

    # The network ------------------------------------------------------------------------------------------------------
    async def _examine_network(self) -> None:
        settings = self._settings
        # No id is checked: the addresses may end in the id of the volunteer, whose key may differ from the doctor's.
        listen, announce = own_addresses(settings.listen) or everywhere(0), own_addresses(settings.announce)
        self._at("starting libp2p's daemon")
        p2pd = await check_p2pd()
        ports = check_ports(listen, settings.data_port, self._has_volunteer)
        self._report(p2pd, ports, check_ipv6())
        starts = p2pd.verdict is Verdict.PASS
        if not starts or not self._addresses:
            self._skip_until("memory", NO_NODE if starts else "libp2p's daemon does not start")
            return
        self._at("looking for the bootstrap nodes")
        self._nodes = await answering_nodes(self._addresses)
        if ports.verdict is Verdict.PASS:
            links = LinkSettings(settings.data_port)
        else:  # a running `join` may hold the chosen ports, so the doctor listens on any free ports
            listen, links = everywhere(0), LinkSettings()
        try:
            async with connected(self._key, self._addresses, listen, announce, links=links) as transport:
                await self._examine_swarm(transport)
        except DilocoPeerError as lost:
            # A ManifestError means that the owner gave an invalid address.
            if self._is_reported("bootstrap") or isinstance(lost, ManifestError):
                raise
            self._report(check_bootstrap(self._nodes, lost))
            self._skip_until("memory", "the swarm is out of reach")

    async def _examine_swarm(self, transport: HivemindTransport) -> None:
        self._nodes = await asyncio.gather(*(with_clock(transport, node) for node in self._nodes))
        self._report(check_bootstrap(self._nodes, None), check_clock(self._nodes))
        self._at("asking how this machine is seen")
        self._report(await check_reach(transport, self._nodes))
        ways: dict[str, Reach] = {}
        if self._run_id is not None:
            self._at("looking for the run")
            self._run = await self._find(transport, self._run_id)
        if self._run is not None:
            self._at("looking for ways to its peers")
            ways, sought = await ways_to_peers(transport, {beat.peer for beat in self._others})
            self._report(check_peers(ways, sought, len(self._others)))
        self._at("measuring the link")
        self._bandwidth = await measured_bandwidth(transport, ways, self._nodes)
        self._report(check_bandwidth(self._bandwidth))

    async def _find(self, transport: HivemindTransport, run_id: str) -> Run | None:
        """Look up the run, report the findings on it, and return it with this machine's files. Return None if no node
        knows the run, or if the settings do not name its model or tokenizer files."""
        try:
            run = await find_run(transport, run_id)
        except DilocoPeerError as error:
            self._report(failed_with("run", error))
            return None
        folder = None if self._ticket else RunFolder.at(run.run_id, self._key.peer_id, self._settings.state)
        try:  # ask for admission as `join` does: with the ticket in the settings, else with one stored in `folder`
            entered = await enter(transport, run, self._key, self._addresses, folder, self._ticket)
            found = "the run is open to all" if entered is None else "the run accepts the ticket"
            admission = passed("admission", found)
        except DilocoPeerError as error:
            ticket = self._ticket  # one for a single peer may be for the machine's own key, which was not tried
            is_own_missing = ticket is None or (ticket.run == run_id and ticket.peer is not None)
            admission = failed("admission", error.message, (is_own_missing and self._if_refused) or error.remedy)
        beats = [beat for beat in await transport.heartbeats(run_id) if beat.peer != self._key.peer_id]
        view = RunView(run, beats)
        self._others = list(view.trainers)
        self._report(_check_run(view, self._settings.contribution_format), admission)
        opened: Run | None = None
        try:
            opened = run.with_own(self._settings.own_files)
            opened = opened.with_data(self._settings.data)
        except DilocoPeerError as error:
            self._report(failed_with("data", error))
        else:
            sources = ", ".join(source.source for source in opened.config.data.all_sources)
            self._report(passed("data", f"the run reads {sources}"))
        return opened

    # A run's needs and speed ------------------------------------------------------------------------------------------
    async def _examine_training(self, torch: Torch | None) -> None:
        state = self._settings.state
        cap_memory(self._settings.memory_limit)
        if self._run is None:
            self._report(check_memory(), check_disk(state))
            return
        self._at("importing torch and transformers")
        try:
            gpus = self._gpus(torch)
            skeleton, needs = await asyncio.to_thread(_size, self._run.config, len(gpus), self._settings.workers)
        except DilocoPeerError as error:
            self._report(failed_with("memory", error), check_disk(state))
            return
        self._report(check_memory(gpus, needs), check_disk(state, needs))
        speed = await self._examine_speed(self._run.config, needs, gpus)
        if speed is None or self._bandwidth is None:
            self._report(skipped("round", f"the {'speed' if speed is None else 'bandwidth'} is not known"))
            return
        others = [beat.speed for beat in self._others]
        latency = min((node.seconds for node in self._nodes if node.seconds is not None), default=LATENCY)
        bandwidth = self._bandwidth.within(self._settings.upload_limit, self._settings.download_limit)
        plan = _plan_among(self._run.config, skeleton, speed, bandwidth, latency, others)
        limits = self._settings.monthly_limits
        self._report(
            _check_round(plan, is_peer_assumed=not others, is_speed_measured=bool(speed.steps), monthly=limits)
        )

    def _gpus(self, torch: Torch | None) -> tuple[Gpu, ...]:
        """Return the GPUs on which `join` would train, or none if it would train on the CPU. Raises: MachineError."""
        present = (torch.gpus if torch else None) or ()
        devices = choose_devices(self._settings.workers, len(present))
        if devices[0] == "cpu":
            return ()
        numbers = [int(device.partition(":")[2] or 0) for device in devices]
        return tuple(present[number] for number in numbers if number < len(present))

    async def _examine_speed(self, config: RunConfig, needs: Needs, gpus: Sequence[Gpu]) -> _Speed | None:
        """Measure the training speed in a trial, or estimate it if no trial is possible. Report and return the speed.
        Return None if the speed remains unknown."""
        why = ""
        if self._trains and self._has_volunteer:
            why = "a volunteer runs on this machine, and a trial would take memory and time from it"
        failing = [one.name for one in self._findings if one.verdict is Verdict.FAIL and one.name in NEEDED_TO_TRAIN]
        speed: _Speed | None = None
        if self._trains and not failing and not self._has_volunteer:
            self._at("training a little, as `join` would")
            try:
                speed = await _measured_speed(config, self._settings.workers)
            except DilocoPeerError as error:
                self._report(failed_with("speed", error))
                return None
            why = f"no inner step was done within {FIRST_SECONDS:.0f} s"
        speed = speed or _estimated_speed(needs, gpus)
        self._report(_check_speed(speed, f"not measured: see {', '.join(failing)}" if failing else why))
        return speed
