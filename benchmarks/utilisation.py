"""A comparison of the share of time in which peers compute, as measured, with the share that `diloco-peer plan`
predicts: `python -m benchmarks.utilisation --namespaces a,b,c,d`.

Four ways to train take turns on the same links, each time as a new swarm: DiLoCo, which waits for each round; Streaming
DiLoCo, which waits for each fragment; the same with an overlap; and also with four bits. Peers are real except for
their inner steps, which sleep. A cycle has as many of them as a round of DiLoCo is planned to take. The table also has
the plan of `diloco-peer plan` for links with the rates that iperf3 measures here. Figures are medians over all turns;
the first two cycles of a turn do not count.

The bars: at least 0.97 with overlap and four bits, and no swarm more than 0.1 away from its plan.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import Place, start_peers
from benchmarks.namespaces import IPERF_STREAMS, has_iperf3, place_in, rates_at_once, round_trip
from benchmarks.processes import PeerProcess, PeerProcessError
from benchmarks.reporting import Bar, json_option, report
from opendiloco.kernels import FORMATS
from opendiloco.tools.plan import LINK_SHARE, Forecast, PeerGroup, Plan, forecast, round_of

PEER = "benchmarks.streaming_peer"
CYCLE_SECONDS = 300.0
"""Time limit of a cycle in seconds, including the founding of the run."""
WARM_UP = 2
"""Cycles of a turn that do not count, because a swarm stores fragments before they are due only from its second cycle
on."""
LEAST, OFF = 0.97, 0.1


@dataclass(frozen=True)
class TrainingMethod:
    """A method of training: its number of fragments, its overlap in inner steps, and its codec."""

    name: str
    fragments: int
    overlap: int
    codec: str

    @property
    def bits(self) -> float:
        """The bits of an encoded value, including its part of the block's scale."""
        return 8 * FORMATS[self.codec].payload_size(1 << 20) / (1 << 20)

    def plan(self, peers: tuple[PeerGroup, ...], values: int, inner_steps: int) -> Plan:
        """Return the plan (the input of `forecast`) of a run that trains by this method."""
        cuts = [values * cut // self.fragments for cut in range(self.fragments + 1)]
        fragments = tuple(end - start for start, end in pairwise(cuts))
        return Plan(fragments, peers, inner_steps, 1, 1.0, 1, self.bits, overlap=self.overlap)


@dataclass(frozen=True)
class SwarmSetup:
    """The settings that all swarms of the benchmark share."""

    values: int
    inner_steps: int
    step_seconds: float


@dataclass
class Series:
    """The measurements of one method of training: for each turn, the share (0 to 1) of the time in which the peers
    computed."""

    method: TrainingMethod
    setting: SwarmSetup
    shares: list[float] = field(default_factory=list)

    async def take_turn(self, places: Sequence[Place], cycles: int) -> None:
        """Run a swarm for a warm-up and `cycles` more cycles, and record the share of these cycles' time in which the
        peers computed. Raises: PeerProcessError."""
        async with AsyncExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="utilisation-")))
            peers = await start_peers(stack, [self._command(place, len(places)) for place in places], places, logs)
            reports = [await asyncio.gather(*map(_next_cycle, peers)) for _ in range(WARM_UP + cycles)]
        for events in reports:
            if {event["peers"] for event in events} != {len(peers)} or len({event["state"] for event in events}) > 1:
                raise PeerProcessError(f"{self.method.name}: not all peers averaged together: {events}")
        spans = [last["time"] - first["time"] for first, last in zip(reports[WARM_UP - 1], reports[-1], strict=True)]
        computed = cycles * self.setting.inner_steps * self.setting.step_seconds
        self.shares.append(statistics.median(computed / span for span in spans))

    def _command(self, place: Place, peers: int) -> list[object]:
        command: list[object] = [PEER, "--values", self.setting.values, "--peers", peers]
        command += ["--inner-steps", self.setting.inner_steps, "--step-seconds", self.setting.step_seconds]
        command += ["--fragments", self.method.fragments, "--overlap", self.method.overlap]
        command += ["--codec", self.method.codec]
        return [*command, *place.for_vector_peer]


async def _next_cycle(peer: PeerProcess) -> dict[str, Any]:
    return await peer.event("cycle", CYCLE_SECONDS)


def methods_for(fragments: int, overlap: int) -> list[TrainingMethod]:
    return [
        TrainingMethod("DiLoCo int8", 1, 0, "int8"),
        TrainingMethod("Streaming int8", fragments, 0, "int8"),
        TrainingMethod(f"Streaming int8, τ = {overlap}", fragments, overlap, "int8"),
        TrainingMethod(f"Streaming e3m0, τ = {overlap}", fragments, overlap, "e3m0"),
    ]


async def measure(
    methods: Sequence[TrainingMethod], setting: SwarmSetup, places: Sequence[Place], turns: int, cycles: int
) -> list[Series]:
    """Train a new swarm by each method, for a warm-up and `cycles` measured cycles. Repeat all of this `turns` times,
    and return the measurements of each method."""
    found = [Series(method, setting) for method in methods]
    for _ in range(turns):
        for series in found:
            await series.take_turn(places, cycles)
    return found


def row_of(series: Series, planned: Forecast) -> dict[str, Any]:
    return {
        "swarm": series.method.name,
        "fragments": series.method.fragments,
        "bits": series.method.bits,
        "computes": statistics.median(series.shares),
        "least": min(series.shares),
        "most": max(series.shares),
        "planned": planned.utilisation,
        "round s, planned": planned.round_seconds,
        "cycle s, planned": planned.cycle_seconds,
        "sent MB a cycle": planned.sent_bits / 8e6,
    }


def bars_of(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    away = max(abs(row["computes"] - row["planned"]) for row in rows)
    return [
        Bar(f"{rows[-1]['swarm']}: share of the time that peers compute", rows[-1]["computes"], LEAST, digits=3),
        Bar("1 - the most that a swarm is away from its plan", 1 - away, 1 - OFF, digits=3),
    ]


@click.command(help=__doc__)
@click.option("--namespaces", required=True, help="Network namespaces, two or more, joined by links. Needs root.")
@click.option("--values", default=25_000_000, show_default=True, help="fp32 values of the model.")
@click.option("--fragments", default=8, show_default=True, help="Fragments of the streaming swarms.")
@click.option("--overlap", default=5, show_default=True, help="τ: inner steps while a fragment is averaged.")
@click.option("--step-seconds", default=0.5, show_default=True, help="Duration of an inner step.")
@click.option("--turns", default=2, show_default=True, help="Turns of each swarm.")
@click.option("--cycles", default=2, show_default=True, help="Cycles of a turn that count.")
@click.option("--iperf-streams", default=IPERF_STREAMS, show_default=True, help="Connections between each two.")
@json_option
def main(
    namespaces: str,
    values: int,
    fragments: int,
    overlap: int,
    step_seconds: float,
    turns: int,
    cycles: int,
    iperf_streams: int,
    json_file: Path | None,
) -> None:
    if not has_iperf3():
        return
    names = namespaces.split(",")
    rate, latency = min(rates_at_once(names, iperf_streams).both_ways), round_trip((names[0], names[1]))
    link = 8 * rate / LINK_SHARE
    to_server = latency / 2  # seconds of a round trip from a peer to a server half way to another peer
    peers = (PeerGroup("peer", len(names), link, link, to_server, step_seconds),)
    methods = methods_for(fragments, overlap)
    inner_steps = max(overlap + 1, fragments, round(round_of(peers, values, methods[0].bits).seconds / step_seconds))
    setting, places = SwarmSetup(values, inner_steps, step_seconds), list(map(place_in, names))
    found = asyncio.run(measure(methods, setting, places, turns, cycles))
    rows = [row_of(series, forecast(series.method.plan(peers, values, inner_steps))) for series in found]
    links = f"{link / 1e6:.0f} Mbit/s, {latency * 1e3:.0f} ms there and back"
    cycle = f"{values / 1e6:g} M values, {inner_steps} inner steps of {step_seconds:g} s"
    title = f"utilisation: {len(names)} peers, {links}, {cycle}"
    report(title, rows, bars_of(rows), json_file)


if __name__ == "__main__":
    main()
