"""The seconds of one averaging round of diloco-peer, and of other libraries: `python -m benchmarks.averaging`.

Every peer is a separate process on the loopback interface: one of ours, and one that contains all other contenders.
They run side by side and take turns; the others are idle meanwhile. Times are from the start signal to all peers until
the last of them is done.

Ours is a whole round of int8 blocks, from ready to the outer step. Afterwards a peer trains again and digests its state
at the same time; the next round is timed only after all digests. "exchange" is the time from the first peer's beginning
until all know that all hold the same payload. hivemind's time is its averager's, after it has found the group; gloo's
is torch.distributed's all_reduce and the division; torchft's its quorum, all_reduce and vote.

"incomplete" are rounds that ended without an error, but left a peer with its own values in some places, as hivemind's
do now and then. They are repeated, and not timed.

"CPU s/GB" is the processor time, user and system, of all peers of a contender and of all processes that they have
started, for each GB that all of them send.

With --namespaces every peer runs in its own network namespace. It is compared with the limits of the links between
them, and with gloo for as many bytes as our payload has (of meaningless values). iperf3 measures each link by itself
and then all at once, with --iperf-streams connections between each two. The links' shape decides --bar:

    200 Mbit/s, 50 ms there and back, 2 and 4 peers      --bar 0.85
    1 Gbit/s, 20 ms, 2 peers                             --bar 0.8
    0.1 % loss and CUBIC, 2 and 4 peers                  --bar 0.75 --iperf-streams 16
    100 ms, 1 % loss and BBR                             --bar 0.75
    one with 20 Mbit/s up among some with 200            --bar 0.87  (1.15 of the best split's time)
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks import shaped_links
from benchmarks.groups import (
    CONTENDERS,
    GLOO,
    GLOO_BYTES,
    HIVEMIND_FP16,
    OURS,
    TORCHFT,
    Group,
    Place,
    measure,
    sent_bytes,
    times_ours,
)
from benchmarks.namespaces import IPERF_STREAMS
from benchmarks.reporting import Bar, json_option, report
from opendiloco.host_memory import IN_USE, HostMemory
from opendiloco.kernels import INT8
from peers.values.chunks import KEPT_AT_LEAST


def row_of(group: Group, groups: dict[str, Group], values: int) -> dict[str, Any]:
    peers, ours = len(group.peers), group.contender.name == OURS
    seconds, payload = statistics.median(group.seconds), group.contender.payload(values)
    peak, before = group.memory if ours else (0, 0)
    host = HostMemory(values, INT8)
    # Bytes of main memory that a peer should take if it has no folder for its log and snapshots.
    formula = host.growing + max(host.kept, KEPT_AT_LEAST * host.payload) + IN_USE
    return {
        "contender": group.contender.name,
        "peers": peers,
        "incomplete": group.incomplete,
        "seconds": seconds,
        "exchange s": group.exchange_seconds if ours else None,
        "payload MB": payload / 1e6,
        "sent MB": sent_bytes(payload, peers) / 1e6,
        "CPU s/GB": group.cpu_per_gigabyte(values),
        "times ours": times_ours(groups, group.contender.name),
        "peak RSS MB": peak / 1e6 if ours else None,
        "before MB": before / 1e6 if ours else None,
        "formula MB": formula / 1e6 if ours else None,
        "of formula": (peak - before) / formula if ours else None,
    }


def bars_of(groups: dict[str, Group], peers: int) -> list[Bar]:
    least = {GLOO: 1.0, HIVEMIND_FP16: 6.0}
    return [
        Bar(f"{name} / ours, {peers} peers", times_ours(groups, name), bar)
        for name, bar in least.items()
        if name in groups
    ]


def choose(without: str) -> list[str]:
    """Return the names of the contenders to measure on the loopback interface: diloco-peer, and each installed library
    that `without` does not exclude."""
    names = [contender.name for contender in CONTENDERS if contender.name != GLOO_BYTES]
    if importlib.util.find_spec("torchft") is None:
        click.echo("torchft is not installed here: not measured", err=True)
        names.remove(TORCHFT)
    return [name for name in names if name == OURS or is_wanted(name, without)]


def is_wanted(name: str, without: str) -> bool:
    """Return True if a contender's name begins with none of the comma-separated prefixes in `without`."""
    return not any(name.startswith(part.strip()) for part in without.split(",") if part.strip())


@click.command(help=__doc__)
@click.option("--values", default=100_000_000, show_default=True, help="fp32 values to average.")
@click.option("--peers", "counts", default="2,3,4", show_default=True, help="Numbers of peers.")
@click.option("--repetitions", default=3, show_default=True, help="Rounds of each contender.")
@click.option("--without", default="", help="Contenders to leave out, such as hivemind,torchft.")
@click.option("--namespaces", help="Network namespaces, two or more, that links of any shape join. Needs root.")
@click.option("--bar", default=0.85, show_default=True, help="With --namespaces: the share of the possible speed.")
@click.option("--iperf-streams", default=IPERF_STREAMS, show_default=True, help="Connections between each two.")
@json_option
def main(
    values: int,
    counts: str,
    repetitions: int,
    without: str,
    namespaces: str | None,
    bar: float,
    iperf_streams: int,
    json_file: Path | None,
) -> None:
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    where = "on the loopback interface"
    if namespaces:
        where = "over shaped links"
        with_gloo = is_wanted(GLOO_BYTES, without)
        rows, bars = shaped_links.run(values, namespaces.split(","), repetitions, with_gloo, iperf_streams, bar)
    else:
        names = choose(without)
        for peers in map(int, counts.split(",")):
            groups = asyncio.run(measure(names, values, [Place()] * peers, repetitions))
            rows += [row_of(group, groups, values) for group in groups.values()]
            bars += bars_of(groups, peers)
    if rows:
        report(f"averaging {values / 1e6:g} M fp32 values {where}, median of {repetitions}", rows, bars, json_file)


if __name__ == "__main__":
    main()
