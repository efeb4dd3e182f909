"""One examination: all checks in the order of what they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.run import Run, find_run
from opendiloco.tools.doctor.findings import CHECKS, Finding, Verdict, failed_with, skipped
from opendiloco.tools.doctor.machine import check_disk, check_kernels, check_memory, has_volunteer, machine_findings
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
    with_clocks,
)
from opendiloco.tools.doctor.run import (
    FIRST_SECONDS,
    Speed,
    check_admission,
    check_data,
    check_round,
    check_run,
    check_speed,
    estimated_speed,
    measured_speed,
    plan_among,
    size,
)
from opendiloco.tools.doctor.torch_probe import Gpu, Torch, installed_torch, probed_torch
from opendiloco.volunteer.volunteer import connected
from opendiloco.workers.options import WorkerOptions, choose_devices
from peers.errors import DilocoPeerError, ManifestError
from peers.network.links import LinkSettings
from peers.network.own_network import everywhere
from peers.network.transport import HivemindTransport
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
        torch = await asyncio.to_thread(probed_torch, installed_torch())
        self._tell(*await asyncio.to_thread(machine_findings, torch, self._wishes.workers))
        self._has_volunteer = await asyncio.to_thread(has_volunteer, self._wishes.state)
        self._at("testing the kernels")
        self._tell(await asyncio.to_thread(check_kernels))
        await self._examine_network()
        await self._examine_training(torch)
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
        p2pd = await check_p2pd()
        ports = check_ports(wishes.listen, wishes.data_port, self._has_volunteer)
        self._tell(p2pd, ports, check_ipv6())
        starts = p2pd.verdict is Verdict.PASS
        if not starts or not wishes.addresses:
            self._skip_until("memory", NO_NODE if starts else "libp2p's daemon does not start")
            return
        self._at("looking for the bootstrap nodes")
        self._nodes = await answering_nodes(wishes.addresses)
        try:
            async with self._connected(is_free=ports.verdict is Verdict.PASS) as transport:
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
        self._tell(await check_reach(transport, self._nodes))
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
        self._tell(check_bandwidth(self._bandwidth))

    async def _find(self, transport: HivemindTransport, run_id: str) -> Run | None:
        """Return the run as this machine would train in it; None when it is unknown, or its model not to be opened."""
        wishes = self._wishes
        try:
            run = await find_run(transport, run_id)
        except DilocoPeerError as error:
            self._tell(failed_with("run", error))
            return None
        admission = await check_admission(transport, run, wishes.key, wishes.addresses, wishes.state, wishes.ticket)
        away = (PeerState.LEAVING, PeerState.ARCHIVING)
        beats = [beat for beat in await transport.heartbeats(run_id) if beat.state not in away]
        self._others = [beat for beat in beats if beat.peer != wishes.key.peer_id]
        self._tell(check_run(run, [beat.index for beat in self._others]), admission)
        try:
            run = run.with_own(wishes.own)
        except DilocoPeerError as error:
            self._tell(failed_with("data", error))
            return None
        data, run = check_data(run, wishes.data)
        self._tell(data)
        return run

    # What a run would take, and give ----------------------------------------------------------------------------------
    async def _examine_training(self, torch: Torch | None) -> None:
        state = self._wishes.state
        if self._run is None:
            self._tell(check_memory(), check_disk(state))
            return
        self._at("importing torch and transformers")
        try:
            gpus = self._gpus(torch)
            skeleton, taken = await asyncio.to_thread(size, self._run.config, len(gpus))
        except DilocoPeerError as error:
            self._tell(failed_with("memory", error), check_disk(state))
            return
        self._tell(check_memory(gpus, taken), check_disk(state, taken))
        speed = await self._examine_speed(self._run, skeleton, gpus)
        if speed is None or self._bandwidth is None:
            self._tell(skipped("round", f"the {'speed' if speed is None else 'bandwidth'} is not known"))
            return
        others = [beat.speed for beat in self._others]
        plan = plan_among(self._run.config, skeleton, speed, self._bandwidth, self._latency, others)
        self._tell(check_round(plan, is_supposed=not others, is_measured=bool(speed.steps)))

    def _gpus(self, torch: Torch | None) -> tuple[Gpu, ...]:
        """Return the GPUs that would train; none: the CPU would. Raises: MachineError."""
        there = (torch.gpus if torch else None) or ()
        devices = choose_devices(self._wishes.workers, len(there))
        if devices[0] == "cpu":
            return ()
        numbers = [int(device.partition(":")[2] or 0) for device in devices]
        return tuple(there[number] for number in numbers if number < len(there))

    async def _examine_speed(self, run: Run, skeleton: Any, gpus: Sequence[Gpu]) -> Speed | None:
        """Train a little, if nothing is in the way, and nobody else trains here; else estimate."""
        why = ""
        if self._wishes.tries and self._has_volunteer:
            why = "a volunteer runs on this machine, and a trial would take memory and time from it"
        failing = [finding.name for finding in self.findings if finding.verdict is Verdict.FAIL]
        lacking = [name for name in failing if name in NEEDED_TO_TRAIN]
        speed: Speed | None = None
        if self._wishes.tries and not lacking and not self._has_volunteer:
            self._at("training a little, as `join` would")
            try:
                speed = await measured_speed(run.config, self._wishes.workers)
            except DilocoPeerError as error:
                self._tell(failed_with("speed", error))
                return None
            why = f"no inner step was done within {FIRST_SECONDS:.0f} s"
        speed = speed or estimated_speed(run.config, skeleton, gpus)
        self._tell(check_speed(speed, f"not measured: see {', '.join(lacking)}" if lacking else why))
        return speed
