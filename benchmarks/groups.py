"""The peers of each contender of benchmarks/averaging.py, as processes that average side by side, in turns."""

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
    """A way to average. `kind` is what benchmarks/averagers.py calls it; ours is none of those.

    `value_bytes` is None for those that move our payload's bytes.
    """

    name: str
    kind: str
    value_bytes: int | None = None

    def payload(self, values: int) -> int:
        """Return the bytes that stand for so many values."""
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
    """Where a peer runs: behind which command, and with which IPv4 address on which network interface.

    `arguments` are for our peers alone.
    """

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"
    arguments: tuple[str, ...] = ()

    @property
    def ours(self) -> list[str]:
        """Return what benchmarks/vector_peer.py is told about the place."""
        return ["--listen", f"/ip4/{self.address}/tcp/0", *self.arguments]

    @property
    def others(self) -> list[str]:
        """Return what benchmarks/averagers.py is told about the place."""
        return ["--address", self.address, "--interface", self.interface]


@dataclass
class Group:
    """All peers of one contender, and the times of their rounds."""

    contender: AveragingMethod
    peers: Sequence[PeerProcess]
    began: list[float] = field(default_factory=list)
    """When each round's peers were told to go, by the clock that all processes share."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of all peers, and of all processes that they have started, in each round."""
    rounds: list[list[Event]] = field(default_factory=list)
    """Of each round what every peer says about it."""
    incomplete: int = 0
    """Rounds after which a peer held something else than the average, without an error. They are done again."""

    async def average(self, counts: bool) -> None:
        """One round, or as many as it takes. The first only warms up, and does not count. Raises: PeerProcessError."""
        for _ in range(ATTEMPTS):
            began, cpu, said = await self._try_average()
            if all(event.get("complete", True) for event in said):
                break
            self.incomplete += 1
        else:
            raise PeerProcessError(f"{self.contender.name}: {ATTEMPTS} rounds in a row did not make the average")
        if counts:
            self.began.append(began)
            self.seconds.append(max(float(event.get("stepped") or event["time"]) for event in said) - began)
            self.cpu_seconds.append(cpu)
            self.rounds.append(said)

    async def _try_average(self) -> tuple[float, float, list[Event]]:
        """Return when it began, the processor time that it took, and what the peers say."""
        for peer in self.peers:
            peer.tell(f"prepare {self.contender.kind}".strip())
        ready = await self._all("ready", ROUND_SECONDS)
        began = time.monotonic()
        for peer in self.peers:
            peer.tell("go")
        said = await self._all("averaged", ROUND_SECONDS)
        if len({event.get("state") for event in said}) > 1 or {event["peers"] for event in said} != {len(self.peers)}:
            raise PeerProcessError(f"{self.contender.name}: not all peers averaged together: {said}")
        cpu = sum(after["cpu"] - before["cpu"] for before, after in zip(ready, said, strict=True))
        return began, cpu, said

    async def _all(self, kind: str, seconds: float) -> list[Event]:
        return await asyncio.gather(*(peer.event(kind, seconds) for peer in self.peers))

    @property
    def exchange_seconds(self) -> float:
        """From the first that begins until the last knows that all hold the payload."""
        spans = [
            float(max(event["agreed"] for event in said) - min(event["began"] for event in said))
            for said in self.rounds
        ]
        return statistics.median(spans)

    def cpu_per_gigabyte(self, values: int) -> float:
        """Return the processor seconds for each GB that the peers of a round send, all together."""
        peers = len(self.peers)
        sent = peers * sent_bytes(self.contender.payload(values), peers)
        return statistics.median(self.cpu_seconds) / sent * 1e9

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the peer that took most, and what it had before it made any vector."""
        return max((event["memory_peak"], event["memory_before"]) for event in self.rounds[-1])


def times_ours(groups: dict[str, Group], theirs: str) -> float:
    """Return how many times our seconds another contender takes: the median over the rounds."""
    return speed_ratio({name: group.seconds for name, group in groups.items()}, OURS, theirs)


def sent_bytes(payload: int, peers: int) -> float:
    """What each peer sends, and receives, in any all-reduce that is spread evenly."""
    return 2 * (peers - 1) / peers * payload


async def measure(names: Sequence[str], values: int, places: Sequence[Place], repetitions: int) -> dict[str, Group]:
    """All contenders' rounds, interleaved."""
    contenders = [contender for contender in CONTENDERS if contender.name in names]
    others = [contender.kind for contender in contenders if contender.kind]
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="averaging-")))
        sizes = ["--values", values, "--peers", len(places)]
        ours = [OUR_PEER, *sizes, "--contribution-format", "int8"]  # all contenders move as many bytes on each link
        peers = await start_peers(stack, [[*ours, *place.ours] for place in places], places, logs)
        groups = {OURS: Group(contenders[0], peers)}
        if others:
            commands = [[OTHER_PEER, *others, *sizes, "--rank", rank, *at.others] for rank, at in enumerate(places)]
            peers = await start_peers(stack, commands, places, logs)
            groups |= {contender.name: Group(contender, peers) for contender in contenders if contender.kind}
        for turn in range(repetitions + 1):
            for group in groups.values():
                await group.average(counts=turn > 0)
    return groups


async def start_peers(
    stack: AsyncExitStack, commands: Sequence[Sequence[object]], places: Sequence[Place], logs: Path
) -> list[PeerProcess]:
    """A peer in each place; the first tells the others where to find it. They end with the stack, all at once."""
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
