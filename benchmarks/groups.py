"""The groups of peers that benchmarks/averaging.py compares, one for each averaging library. The groups' processes run
side by side, and the groups average in turns."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import Event, PeerProcess, PeerProcessError
from benchmarks.reporting import speed_ratio
from opendiloco.kernels import INT8

OURS, GLOO, TORCHFT = "ours, int8", "gloo, fp32", "torchft, fp32"
GLOO_BYTES = "gloo, as many bytes"
HIVEMIND, HIVEMIND_FP16 = "hivemind, fp32", "hivemind, fp16"
START_SECONDS = 120.0
ROUND_SECONDS = 900.0
ATTEMPTS = 5
OUR_PEER, OTHER_PEER = "benchmarks.vector_peer", "benchmarks.averagers"


@dataclass(frozen=True)
class AveragingMethod:
    """An averaging library and its number format. `kind` is the library's name in benchmarks/averagers.py, or empty for
    diloco-peer.

    `value_bytes` is None for a method that moves as many bytes as our payload.
    """

    name: str
    kind: str
    value_bytes: int | None = None

    def payload(self, values: int) -> int:
        """Return the size, in bytes, of `values` values as this method sends them."""
        return INT8.payload_size(values) if self.value_bytes is None else values * self.value_bytes


CONTENDERS = (
    AveragingMethod(OURS, ""),
    AveragingMethod(HIVEMIND, "hivemind-fp32", 4),
    AveragingMethod(HIVEMIND_FP16, "hivemind-fp16", 2),
    AveragingMethod(TORCHFT, "torchft", 4),
    AveragingMethod(GLOO, "gloo", 4),
    AveragingMethod(GLOO_BYTES, "gloo-bytes"),
)


@dataclass(frozen=True)
class Place:
    """The place of a peer in the network: a command that runs a process in this place, its IPv4 address, and its
    network interface.

    `arguments` are for our own peers only.
    """

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"
    arguments: tuple[str, ...] = ()

    @property
    def for_vector_peer(self) -> list[str]:
        """The command-line arguments for benchmarks/vector_peer.py: the address to listen on, and `arguments`."""
        return ["--listen", f"/ip4/{self.address}/tcp/0", *self.arguments]

    @property
    def for_averagers(self) -> list[str]:
        """The command-line arguments for benchmarks/averagers.py: the IPv4 address and the network interface."""
        return ["--address", self.address, "--interface", self.interface]


@dataclass
class Group:
    """The peers that average by one method (a library and a number format), and the measurements of their rounds."""

    contender: AveragingMethod
    peers: Sequence[PeerProcess]
    began: list[float] = field(default_factory=list)
    """The start of each round, in seconds of the clock that all processes share."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor seconds in each round, of all peers and of all processes that they have started."""
    rounds: list[list[Event]] = field(default_factory=list)
    """The reports of all peers on each round."""
    incomplete: int = 0
    """Number of rounds that ended without an error, but left a peer without the average. Such rounds are repeated."""

    async def average(self, counts: bool) -> None:
        """Run averaging rounds until one is complete, and record this round's measurements if `counts`. Raises:
        PeerProcessError if a peer fails, or five rounds in a row are incomplete."""
        for _ in range(ATTEMPTS):
            began, cpu, reports = await self._try_average()
            if all(report.get("complete", True) for report in reports):
                break
            self.incomplete += 1
        else:
            raise PeerProcessError(f"{self.contender.name}: {ATTEMPTS} rounds in a row did not make the average")
        if counts:
            self.began.append(began)
            self.seconds.append(max(float(report.get("stepped") or report["time"]) for report in reports) - began)
            self.cpu_seconds.append(cpu)
            self.rounds.append(reports)

    async def _try_average(self) -> tuple[float, float, list[Event]]:
        """Run one round, and return its start (seconds of the shared clock), the processor seconds of all peers, and
        each peer's report."""
        for peer in self.peers:
            peer.tell(f"prepare {self.contender.kind}".strip())
        ready = await self._all("ready", ROUND_SECONDS)
        began = time.monotonic()
        for peer in self.peers:
            peer.tell("go")
        reports = await self._all("averaged", ROUND_SECONDS)
        states, counts = {report.get("state") for report in reports}, {report["peers"] for report in reports}
        if len(states) > 1 or counts != {len(self.peers)}:
            raise PeerProcessError(f"{self.contender.name}: not all peers averaged together: {reports}")
        cpu = sum(after["cpu"] - before["cpu"] for before, after in zip(ready, reports, strict=True))
        return began, cpu, reports

    async def _all(self, kind: str, seconds: float) -> list[Event]:
        return await asyncio.gather(*(peer.event(kind, seconds) for peer in self.peers))

    @property
    def exchange_seconds(self) -> float:
        """The median seconds of a round, from when the first peer begins until all peers know that all hold the same
        payload."""
        spans = [
            float(max(report["agreed"] for report in reports) - min(report["began"] for report in reports))
            for reports in self.rounds
        ]
        return statistics.median(spans)

    def cpu_per_gigabyte(self, values: int) -> float:
        """Return the processor seconds that all peers together take for each GB (10⁹ bytes) that they send, in the
        median round."""
        peers = len(self.peers)
        sent = peers * sent_bytes(self.contender.payload(values), peers)
        return statistics.median(self.cpu_seconds) / sent * 1e9

    @property
    def memory(self) -> tuple[int, int]:
        """The bytes of main memory of the largest peer: its peak, and its use before it created any vector."""
        return max((event["memory_peak"], event["memory_before"]) for event in self.rounds[-1])


def times_ours(groups: dict[str, Group], theirs: str) -> float:
    """Return the seconds of the averaging method `theirs` as a multiple of diloco-peer's, in the median round."""
    return speed_ratio({name: group.seconds for name, group in groups.items()}, OURS, theirs)


def sent_bytes(payload: int, peers: int) -> float:
    """Return the bytes that each peer sends, and also receives, when an all-reduce of `payload` bytes is spread evenly
    over the peers."""
    return 2 * (peers - 1) / peers * payload


async def measure(names: Sequence[str], values: int, places: Sequence[Place], repetitions: int) -> dict[str, Group]:
    """Run `repetitions` rounds of each averaging method in `names`, in turns, with a peer at each network address in
    `places`. Return the peers of each method with the measurements of their rounds, by the method's name."""
    contenders = [contender for contender in CONTENDERS if contender.name in names]
    others = [contender.kind for contender in contenders if contender.kind]
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="averaging-")))
        sizes = ["--values", values, "--peers", len(places)]
        # The format is fixed, so that all peers send equally many bytes.
        ours = [OUR_PEER, *sizes, "--contribution-format", "int8"]
        peers = await start_peers(stack, [[*ours, *place.for_vector_peer] for place in places], places, logs)
        groups = {OURS: Group(contenders[0], peers)}
        if others:
            commands = [
                [OTHER_PEER, *others, *sizes, "--rank", rank, *at.for_averagers] for rank, at in enumerate(places)
            ]
            peers = await start_peers(stack, commands, places, logs)
            groups |= {contender.name: Group(contender, peers) for contender in contenders if contender.kind}
        for turn in range(repetitions + 1):
            for group in groups.values():
                await group.average(counts=turn > 0)
    return groups


async def start_peers(
    stack: AsyncExitStack, commands: Sequence[Sequence[object]], places: Sequence[Place], logs: Path
) -> list[PeerProcess]:
    """Start a peer process for each command, in the network namespace of its place. Pass the first peer's address to
    the others, and return the processes. `stack` ends all processes."""
    peers: list[PeerProcess] = []

    async def end() -> None:
        await asyncio.gather(*(peer.end() for peer in peers))

    stack.push_async_callback(end)
    contact: list[object] = []
    for rank, (command, place) in enumerate(zip(commands, places, strict=True)):
        log = logs / f"{command[0]}-{rank}.log"
        peers.append(await PeerProcess.start([*command, *contact], log, place.prefix))
        if not contact:
            contact = ["--contact", (await peers[0].event("listening", START_SECONDS))["address"]]
    return peers
