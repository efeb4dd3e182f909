"""One examination: gathers facts in the order of what they need, and tells what each check makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.doctor.facts import Bandwidth, Gpu, Machine, Node, Speed, Taken
from opendiloco.doctor.findings import CHECKS, Finding, Verdict, failed_with, passed, skipped
from opendiloco.doctor.machine_checks import check_disk, check_kernels, check_memory, machine_findings
from opendiloco.doctor.network import (
    answering_nodes,
    chosen_ports,
    dialled_back,
    is_in_use,
    measured_bandwidth,
    own_addresses,
    start_p2pd,
    try_ports,
    ways_to_peers,
    with_clocks,
)
from opendiloco.doctor.network_checks import (
    check_bandwidth,
    check_bootstrap,
    check_clock,
    check_ipv6,
    check_p2pd,
    check_peers,
    check_ports,
    check_reach,
)
from opendiloco.doctor.run_checks import check_round, check_run, check_speed
from opendiloco.doctor.system import has_volunteer, try_kernels, whole_machine
from opendiloco.entrance import enter
from opendiloco.run import Run, find_run
from opendiloco.volunteer import connected
from opendiloco.workers.options import WorkerOptions, choose_devices
from peers.errors import DilocoPeerError, ManifestError
from peers.links.own_network import everywhere
from peers.links.settings import LinkSettings
from peers.net.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.reach import Reach
from peers.values.tickets import Ticket

NO_NODE = "no bootstrap node is given: add --run with an invite, or --initial-peer"
OF_RUNS = ("run", "admission", "data", "peers", "speed", "round")
"""Checks that there are only with a run."""
NEEDED_TO_TRAIN = ("torch", "gpu", "kernels", "data", "memory")
"""Checks without which a trial would only fail for the same reason."""
LATENCY = 0.05
"""Seconds of a round trip, where none could be measured."""


@dataclass(frozen=True)
class Wishes:
    """What is to be examined, as `join` would be started. Without a `run_id` it is the machine, and the bootstrap nodes
    at `addresses` if there are any. Without `tries` nothing is trained."""

    key: Identity
    listen: tuple[str, ...]
    workers: WorkerOptions
    run_id: str | None = None
    addresses: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    data_port: int = 0
    state: Path | None = None
    data: tuple[Path, ...] = ()
    own: OwnFiles = NONE
    ticket: Ticket | None = None
    tries: bool = True


class Examination:
    """`tell` hears each finding, `at` what is being done meanwhile. After `run`, all `findings` are there."""

    def __init__(self, wishes: Wishes, tell: Callable[[Finding], None], at: Callable[[str], None]) -> None:
        self.findings: list[Finding] = []
        self._wishes = wishes
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
            self.findings.append(finding)
            self._listener(finding)

    async def run(self) -> None:
        """Make all checks. What goes wrong is a finding. Raises: ManifestError for addresses that are none;
        LocalNetworkError when libp2p's daemon dies."""
        self._at("looking at this machine")
        machine = await asyncio.to_thread(whole_machine, self._wishes.state)
        self._tell(*machine_findings(machine, self._wishes.workers))
        self._has_volunteer = await asyncio.to_thread(has_volunteer, self._wishes.state)
        self._at("testing the kernels")
        self._tell(check_kernels(await asyncio.to_thread(try_kernels)))
        await self._examine_network()
        await self._examine_training(machine)
        self._skip_until(None, "what the run takes is not known")

    def _skip_until(self, end: str | None, why: str) -> None:
        """Tell that what comes before the check of this name, and was not made, is not made any more."""
        names = list(CHECKS)
        for name in names[: names.index(end) if end else None]:
            if self._wishes.run_id is None and name in OF_RUNS:
                continue
            if not self._is_told(name):
                self._tell(skipped(name, why))

    def _is_told(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)

    # The network ------------------------------------------------------------------------------------------------------
    async def _examine_network(self) -> None:
        wishes = self._wishes
        self._at("starting libp2p's daemon")
        seconds, error = await start_p2pd()
        self._tell(check_p2pd(seconds, error))
        taken = try_ports(wishes.listen, wishes.data_port)
        may_be_ours = self._has_volunteer and taken is not None and is_in_use(taken)
        self._tell(check_ports(chosen_ports(wishes.listen, wishes.data_port), taken, may_be_ours))
        self._tell(check_ipv6(own_addresses()))
        if error is not None or not wishes.addresses:
            self._skip_until("memory", NO_NODE if error is None else "libp2p's daemon does not start")
            return
        self._at("looking for the bootstrap nodes")
        self._nodes = await answering_nodes(wishes.addresses)
        try:
            async with self._connected(is_free=taken is None) as transport:
                await self._examine_swarm(transport)
        except DilocoPeerError as lost:
            if self._is_told("bootstrap") or isinstance(lost, ManifestError):  # which is about what was typed
                raise
            self._tell(check_bootstrap(self._nodes, lost))
            self._skip_until("memory", "the swarm is out of reach")

    @asynccontextmanager
    async def _connected(self, is_free: bool) -> AsyncIterator[HivemindTransport]:
        """Be in the swarm as `join` would; at other ports, if its own are in use: by a `join`, perhaps."""
        wishes = self._wishes
        listen = wishes.listen if is_free else everywhere(0)
        links = LinkSettings(wishes.data_port if is_free else 0)
        async with connected(wishes.key, wishes.addresses, listen, wishes.announce, links=links) as transport:
            yield transport

    async def _examine_swarm(self, transport: HivemindTransport) -> None:
        self._nodes = await with_clocks(transport, self._nodes)
        self._latency = min((node.seconds for node in self._nodes if node.seconds is not None), default=LATENCY)
        self._tell(check_bootstrap(self._nodes, None), check_clock(self._nodes))
        self._at("asking how this machine is seen")
        seen = await dialled_back(transport, self._wishes.addresses)
        self._tell(check_reach(seen, sum(node.answers for node in self._nodes)))
        ways: dict[str, Reach] = {}
        sought = 0
        if self._wishes.run_id is not None:
            self._at("looking for the run")
            self._run = await self._find(transport, self._wishes.run_id)
        if self._run is not None:
            self._at("looking for ways to its peers")
            ways, sought = await ways_to_peers(transport, {beat.peer for beat in self._others})
            self._tell(check_peers(ways, sought, len(self._others)))
        self._at("measuring the link")
        self._bandwidth = await measured_bandwidth(transport, ways, self._nodes)
        self._tell(check_bandwidth(self._bandwidth, "nobody who answers measures it with us now"))

    async def _find(self, transport: HivemindTransport, run_id: str) -> Run | None:
        """Return the run as this machine would train in it; None when it is unknown, or its model not to be opened."""
        wishes = self._wishes
        try:
            run = await find_run(transport, run_id)
        except DilocoPeerError as error:
            self._tell(failed_with("run", error))
            return None
        folder = None if wishes.ticket else RunFolder.at(run_id, wishes.key.peer_id, wishes.state)
        try:
            entrance = await enter(transport, run, wishes.key, wishes.addresses, folder, wishes.ticket)
            admission = passed(
                "admission", "the run is open to everybody" if entrance is None else "its ticket is good"
            )
        except DilocoPeerError as error:
            admission = failed_with("admission", error)
        away = (PeerState.LEAVING, PeerState.ARCHIVING)
        beats = [beat for beat in await transport.heartbeats(run_id) if beat.state not in away]
        self._others = [beat for beat in beats if beat.peer != wishes.key.peer_id]
        furthest = max((beat.index for beat in self._others), default=0)
        self._tell(check_run(run_id, len(self._others), furthest, run.config.total_outer_steps), admission)
        try:
            run = run.with_own(wishes.own)
        except DilocoPeerError as error:
            self._tell(failed_with("data", error))
            return None
        try:
            run = run.with_data(wishes.data)
        except DilocoPeerError as error:
            self._tell(failed_with("data", error))
            return run
        sources = ", ".join(source.source for source in run.config.data.all_sources)
        self._tell(passed("data", f"it reads {sources}"))
        return run

    # What a run would take, and give ----------------------------------------------------------------------------------
    async def _examine_training(self, machine: Machine) -> None:
        if self._run is None:
            self._tell(check_memory(machine.memory), check_disk(machine.folder))
            return
        self._at("importing torch and transformers")
        try:
            gpus = self._gpus(machine)
            skeleton, taken = await asyncio.to_thread(_size, self._run, len(gpus))
        except DilocoPeerError as error:
            self._tell(failed_with("memory", error), check_disk(machine.folder))
            return
        self._tell(check_memory(machine.memory, gpus, taken), check_disk(machine.folder, taken))
        speed = await self._examine_speed(skeleton, gpus)
        self._tell(self._check_round(skeleton, speed))

    def _gpus(self, machine: Machine) -> tuple[Gpu, ...]:
        """Return the GPUs that would train; none: the CPU would. Raises: MachineError."""
        there = (machine.torch.gpus if machine.torch else None) or ()
        devices = choose_devices(self._wishes.workers, len(there))
        if devices[0] == "cpu":
            return ()
        numbers = [int(device.partition(":")[2] or 0) for device in devices]
        return tuple(there[number] for number in numbers if number < len(there))

    async def _examine_speed(self, skeleton: Any, gpus: Sequence[Gpu]) -> Speed | None:
        """Train a little, if nothing is in the way, and nobody else trains here; else estimate."""
        from opendiloco.doctor import trial

        assert self._run is not None
        why = ""
        if self._wishes.tries and self._has_volunteer:
            why = "a volunteer runs on this machine, and a trial would take memory and time from it"
        failing = [finding.name for finding in self.findings if finding.verdict is Verdict.FAIL]
        lacking = [name for name in failing if name in NEEDED_TO_TRAIN]
        speed: Speed | None = None
        if self._wishes.tries and not lacking and not self._has_volunteer:
            self._at("training a little, as `join` would")
            try:
                speed = await trial.measured_speed(self._run.config, self._wishes.workers)
            except DilocoPeerError as error:
                self._tell(failed_with("speed", error))
                return None
            why = f"no inner step was done within {trial.FIRST_SECONDS:.0f} s"
        speed = speed or trial.estimated_speed(self._run.config, skeleton, gpus)
        self._tell(check_speed(speed, f"not measured: see {', '.join(lacking)}" if lacking else why))
        return speed

    def _check_round(self, skeleton: Any, speed: Speed | None) -> Finding:
        from opendiloco.doctor.trial import outlook_of

        assert self._run is not None
        if speed is None or self._bandwidth is None:
            return skipped("round", f"the {'speed' if speed is None else 'bandwidth'} is not known")
        others = [beat.speed for beat in self._others]
        outlook = outlook_of(self._run.config, skeleton, speed, self._bandwidth, self._latency, others)
        return check_round(outlook, bool(speed.steps))


def _size(run: Run, gpus: int) -> tuple[Any, Taken]:
    """Return the skeleton of a run's model, and what the run takes. Takes seconds, mostly imports.

    Raises: DilocoPeerError when the model cannot be built here.
    """
    from opendiloco.doctor.trial import taken_by
    from opendiloco.model.build import sized_skeleton

    skeleton = sized_skeleton(run.config)
    return skeleton, taken_by(run.config, skeleton, gpus)
