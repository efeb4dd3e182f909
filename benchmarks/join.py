"""How long a joiner needs for a run's state, and what that costs who gives it: `python -m benchmarks.join`.

Donors and joiners are processes of their own, with a vector in a model's place. Once the donors have averaged some
rounds, three joiners fetch the state, one after another:

- while the donors train. The bound is the snapshot's bytes through the joiner's link, or all the donors' if less.
- while the donors average, with a pause after each round. A snapshot gives way to rounds, so the time in which there
  was one is added to the bound. The rounds are compared with those before, of the same donors.
- while the donors train, and one is killed (SIGKILL) when half is there. From then on the bound is what the links of
  those who are left carry.

A time is from when the joiner first asks for a snapshot until it has put all of it, checked, in its own state's place.

With --namespaces all run in network namespaces, the joiner in the last, whose links have the rates of --upload and
--download already; what iperf3 gets from all donors at once to the joiner is a line of the table. Without, they share
the loopback interface and keep to these rates by themselves.
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
STATE_BYTES = 8  # a value: theta and momentum
FETCH_SECONDS = 900.0
SETTLE_SECONDS = 15.0


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second: of each donor's link up, and of the joiner's down."""

    upload: float
    download: float

    def rate(self, donors: int) -> float:
        return min(self.download, donors * self.upload)


@dataclass
class Fetch:
    """One joiner's way to the state, by the clock that all processes share."""

    began: float
    ended: float = 0.0
    fetched: Counter[str] = field(default_factory=Counter)
    """Bytes by donor."""
    fetched_before_kill: int | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def bound(self, size: int, links: Bandwidths, busy: float = 0.0) -> float:
        """Seconds that the links need at least for `size` bytes, if rounds have them for `busy` seconds."""
        before = min(size, size if self.fetched_before_kill is None else self.fetched_before_kill)
        return before / links.rate(DONORS) + (size - before) / links.rate(DONORS - 1) + busy

    def overlap(self, began: float, ended: float) -> float:
        """For how many seconds of it something else went on."""
        return max(0.0, min(ended, self.ended) - max(began, self.began))


@dataclass
class DonorSwarm:
    """The donors, and who joins them."""

    donors: Group
    contact: str
    place: Place
    """The joiners'."""
    arguments: Sequence[object]
    size: int
    """Bytes of the state."""
    pause: float
    """Seconds after each round."""
    logs: Path
    orphans: set[int] = field(default_factory=set)

    async def average(self, rounds: int) -> None:
        for _ in range(rounds):
            await self.donors.average(counts=True)
            await asyncio.sleep(self.pause)

    async def fetch(self, kills: PeerProcess | None = None) -> Fetch:
        """Let somebody join while the donors train; with `kills`, without this donor from half of the state on."""
        async with self._joining() as (joiner, fetch):
            await self._follow(joiner, fetch, kills)
        return fetch

    async def fetch_during_rounds(self) -> Fetch:
        """Let somebody join while the donors average."""
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
        """A joiner that has just begun to fetch."""
        command = [*self.arguments, *self.place.ours, "--fetches", "--contact", self.contact]
        joiner = await PeerProcess.start(command, self.logs / "joiner.log", self.place.prefix)
        try:
            yield joiner, Fetch(began=(await joiner.event("fetching", START_SECONDS))["time"])
        finally:
            await joiner.end()

    async def _follow(self, joiner: PeerProcess, fetch: Fetch, kills: PeerProcess | None = None) -> None:
        """Listen to a joiner until it has the state. Raises: PeerProcessError, TimeoutError."""
        async with asyncio.timeout(FETCH_SECONDS):
            while event := await joiner.next_event():
                if event["event"] == "restored":
                    fetch.ended = event["time"]
                    return
                if event["event"] == "fetched":
                    fetch.fetched[event["donor"]] += event["bytes"]
                if kills and fetch.fetched_before_kill is None and 2 * fetch.fetched.total() >= self.size:
                    fetch.fetched_before_kill = fetch.fetched.total()
                    self.orphans |= kills.children()
                    kills.send_signal(signal.SIGKILL)
        raise PeerProcessError(f"the joiner ended before it had the state: {joiner.last_words()}")

    async def tidy_up(self) -> None:
        """What a killed donor leaves behind: a daemon, which ends by itself, and its socket, which does not."""
        await gone(self.orphans, SETTLE_SECONDS)
        sweep_sockets()


@dataclass(frozen=True)
class FetchMeasurements:
    """The three fetches, and seconds of the donors' rounds before the first and during the second."""

    alone: Fetch
    during: Fetch
    killed: Fetch
    rounds_before: Sequence[float]
    rounds_during: Sequence[float]
    busy: float
    """Seconds of the second fetch in which there was a round."""


async def measure(values: int, places: Sequence[Place], rounds: int, pause: float) -> FetchMeasurements:
    """The last place is the joiners'."""
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="join-")))
        # Joiners are further behind than this after the first rounds, or they would replay those instead.
        arguments = [OUR_PEER, "--values", values, "--peers", DONORS, "--snapshot-every", rounds]
        donors = await start_peers(stack, [[*arguments, *place.ours] for place in places[:-1]], places[:-1], logs)
        contact = (await donors[1].event("listening", START_SECONDS))["address"]
        group = Group(CONTENDERS[0], donors)
        swarm = DonorSwarm(group, contact, places[-1], arguments, STATE_BYTES * values, pause, logs)
        stack.push_async_callback(swarm.tidy_up)
        await group.average(counts=False)
        await swarm.average(rounds)
        alone = await swarm.fetch()
        during = await swarm.fetch_during_rounds()
        spans = [
            (min(event["began"] for event in said), max(event["agreed"] for event in said)) for said in group.rounds
        ]
        busy = sum(during.overlap(*span) for span in spans)
        killed = await swarm.fetch(kills=donors[-1])
    return FetchMeasurements(alone, during, killed, group.seconds[:rounds], group.seconds[rounds:], busy)


def rows_of(measured: FetchMeasurements, size: int, links: Bandwidths) -> list[dict[str, Any]]:
    """The table's lines."""

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
    """The donors', then the joiners'."""
    if namespaces is None:
        return [
            *[Place(arguments=("--upload-limit", str(upload)))] * DONORS,
            Place(arguments=("--download-limit", str(download))),
        ]
    places = list(map(place_in, namespaces.split(",")))
    if len(places) != DONORS + 1:
        raise click.UsageError(f"--namespaces are {DONORS} donors' and one joiner's, not {len(places)} in all")
    return places


def carried_by(namespaces: str | None, streams: int) -> float | None:
    """Return the bytes a second that links between namespaces carry from the donors to the joiner; None: not known."""
    if namespaces is None or not has_iperf3():
        return None
    *donors, joiner = namespaces.split(",")
    return converging(donors, joiner, streams)


@click.command(help=__doc__)
@click.option("--values", default=100_000_000, show_default=True, help="fp32 values; the state has 8 bytes for each.")
@click.option("--upload", default=100.0, show_default=True, help="Mbit/s of each donor's link up.")
@click.option("--download", default=300.0, show_default=True, help="Mbit/s of the joiner's link down.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds before anybody joins.")
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
