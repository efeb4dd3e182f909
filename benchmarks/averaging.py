"""How long one averaging round takes, beside everybody else's: `python -m benchmarks.averaging`.

Every peer is a process of its own, on the loopback interface. All contenders' processes live side by side and take
turns; those whose turn it is not are idle. Times are from telling all peers to go until the last of them is done:

- ours: a whole round of int8 blocks, from ready to the outer step taken and digested; "exchange" is the part of it from
  the first peer that begins until all hold the same payload, and know it;
- hivemind: its averager, after it has found the group;
- gloo: torch.distributed's all_reduce and the division;
- torchft: its quorum, all_reduce and vote.

With --namespaces each of our peers runs in a network namespace of its own, and what it is compared with is the time that
the links between them need at least.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click

from benchmarks.processes import Event, PeerProcess, PeerProcessError
from benchmarks.reporting import Bar, report, speed_ratio
from opendiloco.kernels import INT8

OURS, GLOO, TORCHFT = "ours, int8", "gloo, fp32", "torchft, fp32"
HIVEMIND, HIVEMIND_FP16 = "hivemind, fp32", "hivemind, fp16"
START_SECONDS = 120.0
ROUND_SECONDS = 900.0
KEPT_PAYLOADS = 3
"""How many payloads a peer keeps at the least: the one held, the one before it, and one more."""


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


@dataclass
class Group:
    """All peers of one contender, and the times of their rounds."""

    contender: Contender
    peers: list[PeerProcess] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[list[Event]] = field(default_factory=list)
    """Of each round what every peer says about it."""

    async def start(self, values: int, places: Sequence[Place], logs: Path) -> Self:
        """Start a peer in each place; the first tells the others where to find it."""
        contact: list[object] = []
        for rank, place in enumerate(places):
            arguments = [*self.contender.arguments, "--values", values, "--peers", len(places)]
            arguments += place.arguments if self.contender.name == OURS else ["--rank", rank]
            log = logs / f"{self.contender.name.replace(', ', '-')}-{len(places)}-{rank}.log"
            self.peers.append(await PeerProcess.start([*arguments, *contact], log, place.prefix))
            if not contact:
                contact = ["--contact", (await self.peers[0].event("listening", START_SECONDS))["address"]]
        return self

    async def average(self, counts: bool) -> None:
        """One round. The first only warms up, and does not count. Raises: PeerProcessError."""
        for peer in self.peers:
            peer.tell("prepare")
        await self._all("ready", ROUND_SECONDS)
        start = time.monotonic()
        for peer in self.peers:
            peer.tell("go")
        said = await self._all("averaged", ROUND_SECONDS)
        if len({event.get("state") for event in said}) > 1 or {event["peers"] for event in said} != {len(self.peers)}:
            raise PeerProcessError(f"{self.contender.name}: not all peers made the same average: {said}")
        if counts:
            self.seconds.append(max(event["time"] for event in said) - start)
            self.rounds.append(said)

    async def _all(self, kind: str, seconds: float) -> list[Event]:
        return await asyncio.gather(*(peer.event(kind, seconds) for peer in self.peers))

    async def end(self) -> None:
        await asyncio.gather(*(peer.end() for peer in self.peers))

    @property
    def exchange_seconds(self) -> float:
        """From the first that begins until the last knows that all hold the payload."""
        return statistics.median(
            max(event["agreed"] for event in said) - min(event["began"] for event in said) for said in self.rounds
        )

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the peer that took most, and what it had before it made any vector."""
        return max((event["memory_peak"], event["memory_before"]) for event in self.rounds[-1])


@dataclass(frozen=True)
class Place:
    """Where a peer runs."""

    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def sent_bytes(payload: int, peers: int) -> float:
    """What each peer sends, and receives, in any all-reduce that is spread evenly."""
    return 2 * (peers - 1) / peers * payload


def memory_formula(values: int, peers: int) -> float:
    """Bytes that a round of ours should take at most: payloads; theta, momentum, and local."""
    payload = INT8.payload_size(values)
    return (1 + 1 + KEPT_PAYLOADS + (peers - 1) / peers) * payload + 12 * values


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


def row_of(group: Group, groups: dict[str, Group], values: int) -> dict[str, Any]:
    """One line of the table."""
    peers, ours = len(group.peers), group.contender.name == OURS
    seconds, payload = statistics.median(group.seconds), group.contender.payload(values)
    peak, before = group.memory if ours else (0, 0)
    formula = memory_formula(values, peers)
    return {
        "contender": group.contender.name,
        "peers": peers,
        "seconds": seconds,
        "exchange s": group.exchange_seconds if ours else None,
        "payload MB": payload / 1e6,
        "sent MB": sent_bytes(payload, peers) / 1e6,
        "MB/s": sent_bytes(payload, peers) / seconds / 1e6,
        "times ours": ratio(groups, group.contender.name),
        "peak RSS MB": peak / 1e6 if ours else None,
        "before MB": before / 1e6 if ours else None,
        "formula MB": formula / 1e6 if ours else None,
        "of formula": (peak - before) / formula if ours else None,
    }


def ratio(groups: dict[str, Group], theirs: str) -> float:
    return speed_ratio({name: group.seconds for name, group in groups.items()}, OURS, theirs)


def bars_of(groups: dict[str, Group], peers: int) -> list[Bar]:
    bars = []
    if HIVEMIND_FP16 in groups:
        bars.append(Bar(f"{HIVEMIND_FP16} / ours, {peers} peers", ratio(groups, HIVEMIND_FP16), 3.0))
    if GLOO in groups and peers == 2:
        bars.append(Bar(f"{GLOO} / ours, {peers} peers", ratio(groups, GLOO), 1.0))
    return bars


def choose(without: str) -> list[str]:
    """The contenders that can run here, and are wanted."""
    names = [contender.name for contender in CONTENDERS]
    if importlib.util.find_spec("torchft") is None:
        click.echo("torchft is not installed here: not measured", err=True)
        names.remove(TORCHFT)
    unwanted = [part.strip() for part in without.split(",") if part.strip()]
    return [name for name in names if name == OURS or not any(name.startswith(part) for part in unwanted)]


@click.command(help=__doc__)
@click.option("--values", default=100_000_000, show_default=True, help="fp32 values to average.")
@click.option("--peers", "counts", default="2,3,4", show_default=True, help="Numbers of peers.")
@click.option("--repetitions", default=3, show_default=True, help="Rounds of each contender.")
@click.option("--without", default="", help="Contenders to leave out, such as hivemind,torchft.")
@click.option("--namespaces", help="Network namespaces, two or more, that links of any shape join. Needs root.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def main(
    values: int, counts: str, repetitions: int, without: str, namespaces: str | None, json_file: Path | None
) -> None:
    if namespaces:
        from benchmarks.shaped_links import run

        run(values, namespaces.split(","), repetitions, json_file)
        return
    names = choose(without)
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for peers in map(int, counts.split(",")):
        groups = asyncio.run(measure(names, values, [Place()] * peers, repetitions))
        rows += [row_of(group, groups, values) for group in groups.values()]
        bars += bars_of(groups, peers)
    report(f"averaging {values / 1e6:g} M fp32 values, median of {repetitions}", rows, bars, json_file)


if __name__ == "__main__":
    main()
