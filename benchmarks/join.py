"""The seconds that a joiner takes to fetch a run's state, and the slowdown of the donors' rounds: `python -m
benchmarks.join`.

Donors and joiners are separate processes with a vector in place of a model. After the donors have averaged some rounds,
three joiners fetch the state, one after another:

- While the donors train. The bound is the time of the snapshot's bytes through the joiner's link, or through all the
  donors' links if these carry less.
- While the donors average, with a pause after each round. A snapshot gives way to rounds, so the time of rounds is
  added to the bound. The rounds are compared with earlier ones of the same donors.
- While the donors train, and one of them is killed (SIGKILL) when half of the state has arrived. From then on the
  bound follows from the links of the remaining donors.

A time is measured from the joiner's first request for a snapshot until it has checked all of it and copied it into its
own state.

With --namespaces all processes run in network namespaces, the joiner in the last one. The links must already have the
rates of --upload and --download. One line of the table is the rate that iperf3 gets from all donors at once to the
joiner. Without --namespaces the processes share the loopback interface and limit themselves to these rates.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import CONTENDERS, OUR_PEER, START_SECONDS, Group, Place, start_peers
from benchmarks.namespaces import IPERF_STREAMS, converging, has_iperf3, place_in
from benchmarks.processes import PeerProcess, PeerProcessError, gone
from benchmarks.reporting import Bar, json_option, report
from peers.network.daemon import sweep_sockets

DONORS = 3
STATE_BYTES = 8  # bytes of state for each value: theta and momentum, fp32 each
FETCH_SECONDS = 900.0
SETTLE_SECONDS = 15.0


@dataclass(frozen=True)
class Bandwidths:
    """The speeds of each donor's uplink and of the joiner's downlink, in bytes a second."""

    upload: float
    download: float

    def rate(self, donors: int) -> float:
        return min(self.download, donors * self.upload)


@dataclass
class Fetch:
    """One joiner's download of the state. Times are in seconds of the clock that all processes share.
    `fetched_before_kill` are the bytes received before the benchmark kills a donor; None: it kills no donor."""

    began: float
    ended: float = 0.0
    fetched: Counter[str] = field(default_factory=Counter)
    """Bytes received from each donor, by the donor's peer id."""
    fetched_before_kill: int | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def bound(self, size: int, links: Bandwidths, busy: float = 0.0) -> float:
        """Return the least seconds in which the links can carry `size` bytes to the joiner, plus the `busy` seconds in
        which rounds use the links."""
        before = min(size, size if self.fetched_before_kill is None else self.fetched_before_kill)
        return before / links.rate(DONORS) + (size - before) / links.rate(DONORS - 1) + busy

    def overlap(self, began: float, ended: float) -> float:
        return max(0.0, min(ended, self.ended) - max(began, self.began))


@dataclass
class DonorSwarm:
    """A swarm of donors, with the settings for starting joiners that fetch its state."""

    donors: Group
    contact: str
    place: Place
    """The place of the joiners."""
    arguments: Sequence[object]
    size: int
    """Bytes of the state."""
    pause: float
    """Seconds from the end of a round to the start of the next."""
    logs: Path
    orphans: set[int] = field(default_factory=set)

    async def average(self, rounds: int) -> None:
        for _ in range(rounds):
            await self.donors.average(counts=True)
            await asyncio.sleep(self.pause)

    async def fetch(self, donor_to_kill: PeerProcess | None = None) -> Fetch:
        """Start a joiner while the donors train, and return its download of the state. If `donor_to_kill` is
        given, kill it when half of the state has arrived."""
        async with self._joining() as (joiner, fetch):
            await self._follow(joiner, fetch, donor_to_kill)
        return fetch

    async def fetch_during_rounds(self) -> Fetch:
        """Start a joiner while the donors average, and return its download of the state."""
        async with self._joining() as (joiner, fetch):
            following = asyncio.create_task(self._follow(joiner, fetch))
            try:
                while not following.done():
                    await self.donors.average(counts=True)
                    await asyncio.wait([following], timeout=self.pause)
                await following
            finally:
                following.cancel()
        return fetch

    @asynccontextmanager
    async def _joining(self) -> AsyncIterator[tuple[PeerProcess, Fetch]]:
        """Start a joiner, wait for its first request for a snapshot, and yield the joiner's process and its
        download."""
        command = [*self.arguments, *self.place.for_vector_peer, "--fetches", "--contact", self.contact]
        joiner = await PeerProcess.start(command, self.logs / "joiner.log", self.place.prefix)
        try:
            yield joiner, Fetch(began=(await joiner.event("fetching", START_SECONDS))["time"])
        finally:
            await joiner.end()

    async def _follow(self, joiner: PeerProcess, fetch: Fetch, donor_to_kill: PeerProcess | None = None) -> None:
        """Record a joiner's download in `fetch` until the joiner has the state. Kill `donor_to_kill`, if given, when
        half of the state has arrived. Raises: PeerProcessError if the joiner ends, TimeoutError after FETCH_SECONDS."""
        async with asyncio.timeout(FETCH_SECONDS):
            while event := await joiner.next_event():
                if event["event"] == "restored":
                    fetch.ended = event["time"]
                    return
                if event["event"] == "fetched":
                    fetch.fetched[event["donor"]] += event["bytes"]
                if donor_to_kill and fetch.fetched_before_kill is None and 2 * fetch.fetched.total() >= self.size:
                    fetch.fetched_before_kill = fetch.fetched.total()
                    self.orphans |= donor_to_kill.children()
                    donor_to_kill.send_signal(signal.SIGKILL)
        raise PeerProcessError(f"the joiner ended before it had the state: {joiner.last_words()}")

    async def tidy_up(self) -> None:
        """Wait until a killed donor's network daemon has ended by itself, and remove the daemon's socket."""
        await gone(self.orphans, SETTLE_SECONDS)
        sweep_sockets()


@dataclass(frozen=True)
class FetchMeasurements:
    """The downloads of three joiners, and the seconds of the donors' rounds before the first download and during the
    second."""

    alone: Fetch
    during: Fetch
    killed: Fetch
    rounds_before: Sequence[float]
    rounds_during: Sequence[float]
    busy: float
    """Seconds of the second download in which the donors averaged."""


async def measure(values: int, places: Sequence[Place], rounds: int, pause: float) -> FetchMeasurements:
    """Let donors average `rounds` rounds of `values` values, each followed by a pause of `pause` seconds. Return
    measurements of three joiners, which run in the last of `places`; each donor runs in another place."""
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="join-")))
        # When the first joiner starts, the log has more entries than `--snapshot-every`, so joiners fetch a snapshot
        # instead of replaying entries.
        arguments = [OUR_PEER, "--values", values, "--peers", DONORS, "--snapshot-every", rounds]
        donors = await start_peers(
            stack, [[*arguments, *place.for_vector_peer] for place in places[:-1]], places[:-1], logs
        )
        contact = (await donors[1].event("listening", START_SECONDS))["address"]
        group = Group(CONTENDERS[0], donors)
        swarm = DonorSwarm(group, contact, places[-1], arguments, STATE_BYTES * values, pause, logs)
        stack.push_async_callback(swarm.tidy_up)
        await group.average(counts=False)
        await swarm.average(rounds)
        alone = await swarm.fetch()
        during = await swarm.fetch_during_rounds()
        spans = [
            (min(report["began"] for report in reports), max(report["agreed"] for report in reports))
            for reports in group.rounds
        ]
        busy = sum(during.overlap(*span) for span in spans)
        killed = await swarm.fetch(donor_to_kill=donors[-1])
    return FetchMeasurements(alone, during, killed, group.seconds[:rounds], group.seconds[rounds:], busy)


def rows_of(measured: FetchMeasurements, size: int, links: Bandwidths) -> list[dict[str, Any]]:
    """Return the table's rows: the donors' rounds before any joiner, then each joiner's download."""

    def row(joiner: str, fetch: Fetch, busy: float = 0.0, rounds: Sequence[float] = ()) -> dict[str, Any]:
        return {
            "a joiner": joiner,
            "state MB": size / 1e6,
            "seconds": fetch.seconds,
            "bound s": fetch.bound(size, links, busy),
            "times the bound": fetch.seconds / fetch.bound(size, links, busy),
            "Mbit/s": size * 8 / 1e6 / fetch.seconds,
            "MB by donor": " ".join(f"{count / 1e6:.4g}" for count in sorted(fetch.fetched.values())),
            "rounds": len(rounds) or None,
            "round s": statistics.median(rounds) if rounds else None,
        }

    rounds = measured.rounds_before
    before = dict.fromkeys(row("", measured.alone)) | {
        "a joiner": "none yet",
        "rounds": len(rounds),
        "round s": statistics.median(rounds),
    }
    return [
        before,
        row("while donors train", measured.alone),
        row("while donors average", measured.during, measured.busy, measured.rounds_during),
        row("a donor is killed half way", measured.killed),
    ]


def bars_of(measured: FetchMeasurements, size: int, links: Bandwidths) -> list[Bar]:
    alone = measured.alone.bound(size, links) / measured.alone.seconds
    killed = measured.killed.bound(size, links) / measured.killed.seconds
    rounds = statistics.median(measured.rounds_before) / statistics.median(measured.rounds_during)
    return [
        Bar("bound / seconds of a fetch while donors train", alone, round(1 / 1.15, 3)),
        Bar("round without / with a fetch beside it", rounds, round(1 / 1.1, 3)),
        Bar("times the bound without / with a donor killed half way", killed / alone, round(1 / 1.1, 3)),
    ]


def places_in(namespaces: str | None, upload: float, download: float) -> list[Place]:
    """Return the donors' places, followed by the joiner's place: in the `namespaces`, or (if None) on the loopback
    interface, where `upload` limits each donor and `download` the joiner, in Mbit/s."""
    if namespaces is None:
        return [
            *[Place(arguments=("--upload-limit", str(upload)))] * DONORS,
            Place(arguments=("--download-limit", str(download))),
        ]
    places = list(map(place_in, namespaces.split(",")))
    if len(places) != DONORS + 1:
        raise click.UsageError(f"--namespaces needs {DONORS} donors' and one joiner's, not {len(places)} in all")
    return places


def carried_by(namespaces: str | None, streams: int) -> float | None:
    """Return the bytes a second that iperf3 measures from all donors at once to the joiner, or None if there are no
    namespaces or no iperf3."""
    if namespaces is None or not has_iperf3():
        return None
    *donors, joiner = namespaces.split(",")
    return converging(donors, joiner, streams)


@click.command(help=__doc__)
@click.option("--values", default=100_000_000, show_default=True, help="fp32 values; the state has 8 bytes for each.")
@click.option("--upload", default=100.0, show_default=True, help="Mbit/s of each donor's uplink.")
@click.option("--download", default=300.0, show_default=True, help="Mbit/s of the joiner's downlink.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds before any joiner.")
@click.option("--pause", default=10.0, show_default=True, help="Seconds after each round.")
@click.option("--namespaces", help="Four network namespaces, the joiner's last, with links of these rates. Needs root.")
@click.option("--iperf-streams", default=IPERF_STREAMS, show_default=True, help="Connections from each donor.")
@json_option
def main(
    values: int,
    upload: float,
    download: float,
    rounds: int,
    pause: float,
    namespaces: str | None,
    iperf_streams: int,
    json_file: Path | None,
) -> None:
    links, size = Bandwidths(upload * 1e6 / 8, download * 1e6 / 8), STATE_BYTES * values
    places = places_in(namespaces, upload, download)
    carried = carried_by(namespaces, iperf_streams)
    measured = asyncio.run(measure(values, places, rounds, pause))
    where = "network namespaces" if namespaces else "the loopback interface, with our own limits"
    title = f"joining: {DONORS} donors with {upload:g} Mbit/s up, {download:g} Mbit/s down, on {where}"
    rows = rows_of(measured, size, links)
    if carried is not None:
        rows.append(dict.fromkeys(rows[0]) | {"a joiner": "iperf3 in its place", "Mbit/s": carried * 8 / 1e6})
    report(title, rows, bars_of(measured, size, links), json_file)


if __name__ == "__main__":
    main()
