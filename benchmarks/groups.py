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
from opendiloco.kernels import INT8

OURS, GLOO, TORCHFT = "ours, int8", "gloo, fp32", "torchft, fp32"
HIVEMIND, HIVEMIND_FP16 = "hivemind, fp32", "hivemind, fp16"
START_SECONDS = 120.0
ROUND_SECONDS = 900.0
ATTEMPTS = 5


@dataclass(frozen=True)
class Contender:
    """Its peers are `python -m ARGUMENTS --values … --peers … --rank …`."""

    name: str
    arguments: tuple[str, ...]
    value_bytes: float

    def payload(self, values: int) -> int:
        return INT8.payload_size(values) if self.name == OURS else int(values * self.value_bytes)


CONTENDERS = (
    Contender(OURS, ("benchmarks.vector_peer",), 1),
    Contender(HIVEMIND, ("benchmarks.averagers", "hivemind-fp32"), 4),
    Contender(HIVEMIND_FP16, ("benchmarks.averagers", "hivemind-fp16"), 2),
    Contender(GLOO, ("benchmarks.averagers", "gloo"), 4),
    Contender(TORCHFT, ("benchmarks.averagers", "torchft"), 4),
)


@dataclass(frozen=True)
class Place:
    """Where a peer runs."""

    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass
class Group:
    """All peers of one contender, and the times of their rounds."""

    contender: Contender
    peers: list[PeerProcess] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[list[Event]] = field(default_factory=list)
    """Of each round what every peer says about it."""
    incomplete: int = 0
    """Rounds after which a peer held something else than the average, without an error. They are done again."""

    async def start(self, values: int, places: Sequence[Place], logs: Path) -> None:
        """Start a peer in each place; the first tells the others where to find it."""
        contact: list[object] = []
        for rank, place in enumerate(places):
            arguments = [*self.contender.arguments, "--values", values, "--peers", len(places)]
            arguments += place.arguments if self.contender.name == OURS else ["--rank", rank]
            log = logs / f"{self.contender.name.replace(', ', '-')}-{len(places)}-{rank}.log"
            self.peers.append(await PeerProcess.start([*arguments, *contact], log, place.prefix))
            if not contact:
                contact = ["--contact", (await self.peers[0].event("listening", START_SECONDS))["address"]]

    async def average(self, counts: bool) -> None:
        """One round, or as many as it takes. The first only warms up, and does not count. Raises: PeerProcessError."""
        for _ in range(ATTEMPTS):
            seconds, said = await self._try_average()
            if all(event.get("complete", True) for event in said):
                break
            self.incomplete += 1
        else:
            raise PeerProcessError(f"{self.contender.name}: {ATTEMPTS} rounds in a row did not make the average")
        if counts:
            self.seconds.append(seconds)
            self.rounds.append(said)

    async def _try_average(self) -> tuple[float, list[Event]]:
        for peer in self.peers:
            peer.tell("prepare")
        await self._all("ready", ROUND_SECONDS)
        start = time.monotonic()
        for peer in self.peers:
            peer.tell("go")
        said = await self._all("averaged", ROUND_SECONDS)
        if len({event.get("state") for event in said}) > 1 or {event["peers"] for event in said} != {len(self.peers)}:
            raise PeerProcessError(f"{self.contender.name}: not all peers averaged together: {said}")
        return max(event["time"] for event in said) - start, said

    async def _all(self, kind: str, seconds: float) -> list[Event]:
        return await asyncio.gather(*(peer.event(kind, seconds) for peer in self.peers))

    async def end(self) -> None:
        await asyncio.gather(*(peer.end() for peer in self.peers))

    @property
    def exchange_seconds(self) -> float:
        """From the first that begins until the last knows that all hold the payload."""
        spans = [
            float(max(event["agreed"] for event in said) - min(event["began"] for event in said))
            for said in self.rounds
        ]
        return statistics.median(spans)

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the peer that took most, and what it had before it made any vector."""
        return max((event["memory_peak"], event["memory_before"]) for event in self.rounds[-1])


def sent_bytes(payload: int, peers: int) -> float:
    """What each peer sends, and receives, in any all-reduce that is spread evenly."""
    return 2 * (peers - 1) / peers * payload


async def measure(names: Sequence[str], values: int, places: Sequence[Place], repetitions: int) -> dict[str, Group]:
    """All contenders' rounds, interleaved."""
    groups = {contender.name: Group(contender) for contender in CONTENDERS if contender.name in names}
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="averaging-")))
        for group in groups.values():
            stack.push_async_callback(group.end)
            await group.start(values, places, logs)
        for turn in range(repetitions + 1):
            for group in groups.values():
                await group.average(counts=turn > 0)
    return groups
