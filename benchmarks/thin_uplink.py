"""The delay that a member with a thin (slow) uplink causes in a swarm, and the share of this member's work that counts:
`python -m benchmarks.thin_uplink --namespaces a,b,c`.

Each namespace has one peer, which trains for a fixed time and averages with the others. The last one has the thin
uplink. Three swarms take turns on the same links: the others without it; all of them; and all of them while the thin
peer may send only the run's own format, as with `codec.contributions = ["int8"]`. A round's time is the longest of the
other peers. An outer step's time is from one entry to the next.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import OUR_PEER, start_peers
from benchmarks.namespaces import place_in
from benchmarks.processes import Event, PeerProcess
from benchmarks.reporting import Bar, json_option, report

WITHOUT, CHOSEN, OWN = "without it", "with it", "with it, int8 only"
LEAST, MOST = 0.95, 1.1
"""Bars: the share of entries in which the thin member counts, and the time of a round with this member as a
multiple of a round's time without the member."""
ENTRY_SECONDS = 300.0


@dataclass
class SwarmTimes:
    """The measurements of one swarm's entries: the seconds of each round and outer step, and the thin member's tokens
    divided by those of the member that trained most."""

    name: str
    seconds: list[float] = field(default_factory=list)
    outer_steps: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)

    def note(self, before: Sequence[Event], entry: Sequence[Event], thin: str | None) -> None:
        """Record one entry's measurements. `entry` has the reports of all members except the thin one on this entry,
        `before` their reports on the preceding entry. `thin` is the thin member's peer id."""
        both = list(zip(before, entry, strict=True))
        self.seconds.append(max(after["in_rounds"] - earlier["in_rounds"] for earlier, after in both))
        self.outer_steps.append(max(after["agreed"] - earlier["agreed"] for earlier, after in both))
        tokens, formats = (dict(zip(entry[0]["roster"], entry[0][what], strict=True)) for what in ("tokens", "formats"))
        if thin is not None:
            self.shares.append(tokens.get(thin, 0) / max(tokens.values()))
            if thin in formats:
                self.formats[formats[thin]] += 1

    @property
    def row(self) -> dict[str, Any]:
        counted = [share for share in self.shares if share > 0]
        return {
            "swarm": self.name,
            "entries": len(self.seconds),
            "round s": statistics.median(self.seconds),
            "slowest": max(self.seconds),
            "outer step s": statistics.median(self.outer_steps),
            "it counts in": len(counted) / len(self.shares) if self.shares else None,
            "by, mean": statistics.mean(self.shares) if self.shares else None,
            "it sends": ", ".join(f"{kind} {count}" for kind, count in self.formats.most_common()) or "-",
        }


async def run(swarm: SwarmTimes, namespaces: Sequence[str], values: int, pause: float, entries: int) -> None:
    """Run the peers of a swarm, and record `entries` entries of their log in `swarm`. The log's first entry does not
    count."""
    places = [place_in(each) for each in (namespaces[:-1] if swarm.name == WITHOUT else namespaces)]
    usual = ["--values", values, "--peers", len(places), "--pause", pause, "--steady", "--usual-timing"]
    own = ["--contribution-format", "int8"]
    commands: list[list[object]] = [[OUR_PEER, *usual, *place.for_vector_peer] for place in places]
    if swarm.name == OWN:
        commands[-1] += own
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thin-uplink-")))
        peers = await start_peers(stack, commands, places, logs)
        is_thin = swarm.name != WITHOUT
        thin = (await peers[-1].event("listening", ENTRY_SECONDS))["peer"] if is_thin else None
        others = peers[:-1] if is_thin else peers
        before = await asyncio.gather(*(_entry(peer, 0) for peer in others))
        for number in range(1, entries + 1):
            entry = await asyncio.gather(*(_entry(peer, number) for peer in others))
            swarm.note(before, entry, thin)
            before = entry


async def _entry(peer: PeerProcess, index: int) -> Event:
    while (event := await peer.event("averaged", ENTRY_SECONDS))["index"] < index:
        pass
    return event


def bars_of(swarms: dict[str, SwarmTimes]) -> list[Bar]:
    seconds = {name: statistics.median(swarm.seconds) for name, swarm in swarms.items()}
    return [
        Bar("entries in which the thin member counts", swarms[CHOSEN].row["it counts in"], LEAST),
        Bar("a round without it / with it", seconds[WITHOUT] / seconds[CHOSEN], 1 / MOST),
    ]


@click.command(help=__doc__)
@click.option("--namespaces", required=True, help="Names of network namespaces, the thin one last.")
@click.option("--values", default=25_000_000, show_default=True)
@click.option("--pause", default=6.0, show_default=True, help="Seconds of training.")
@click.option("--entries", default=20, show_default=True, help="Entries of each swarm in each turn.")
@click.option("--turns", default=2, show_default=True)
@click.option("--own-entries", default=3, show_default=True, help="Entries with int8 only in each turn; 0 for none.")
@json_option
def main(
    namespaces: str, values: int, pause: float, entries: int, turns: int, own_entries: int, json_file: Path | None
) -> None:
    names = namespaces.split(",")
    if len(names) < 3:
        raise click.BadParameter("give at least three, the thin one last.", param_hint="--namespaces")
    swarms = {name: SwarmTimes(name) for name in (WITHOUT, CHOSEN, *([OWN] if own_entries else []))}
    for _ in range(turns):
        for name, swarm in swarms.items():
            asyncio.run(run(swarm, names, values, pause, own_entries if name == OWN else entries))
    title = f"{len(names)} peers, {values:,} values, one thin uplink"
    report(title, [swarm.row for swarm in swarms.values()], bars_of(swarms), json_file)


if __name__ == "__main__":
    main()
