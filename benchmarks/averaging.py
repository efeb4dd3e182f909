"""How long one averaging round takes, beside everybody else's: `python -m benchmarks.averaging`.

Every peer is a process of its own, on the loopback interface: one of ours, and one that has all other contenders in it.
They live side by side and take turns; those whose turn it is not are idle. Times are from telling all peers to go until
the last of them is done.

Ours is a whole round of int8 blocks, from ready to the outer step taken: from then on a peer trains again, and digests
its state meanwhile; no round is timed before all have. "exchange" is the part from when the first peer begins until all
know that all hold the same payload. hivemind's is its averager's, once it has
found the group; gloo's is torch.distributed's all_reduce and the division; torchft's its quorum, all_reduce and vote.

"incomplete" are rounds that ended without an error, but left a peer with its own values in some places, as hivemind's
do now and then. They are done again, and not timed.

With --namespaces each of our peers runs in a network namespace of its own, and what it is compared with is the time
that the links between them need at least.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks import shaped_links
from benchmarks.groups import CONTENDERS, GLOO, HIVEMIND_FP16, OURS, TORCHFT, Group, Place, measure, sent_bytes
from benchmarks.reporting import Bar, report, speed_ratio
from opendiloco.kernels import INT8
from peers.buffers import KEPT_AT_LEAST
from peers.driver import KEPT_BYTES


def memory_formula(values: int, peers: int, rounds: int) -> float:
    """Bytes that ours should take at most after so many rounds: payloads (its own blocks, room for the next average,
    what others sent of its part, and those that are kept for who fell behind); theta, momentum, and local."""
    payload = INT8.payload_size(values)
    kept = min(rounds, max(KEPT_AT_LEAST, KEPT_BYTES // payload))
    return (1 + 1 + (peers - 1) / peers + kept) * payload + 12 * values


def row_of(group: Group, groups: dict[str, Group], values: int) -> dict[str, Any]:
    """One line of the table."""
    peers, ours = len(group.peers), group.contender.name == OURS
    seconds, payload = statistics.median(group.seconds), group.contender.payload(values)
    peak, before = group.memory if ours else (0, 0)
    formula = memory_formula(values, peers, len(group.rounds) + 1)  # and one to warm up
    return {
        "contender": group.contender.name,
        "peers": peers,
        "incomplete": group.incomplete,
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
        shaped_links.run(values, namespaces.split(","), repetitions, json_file)
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
