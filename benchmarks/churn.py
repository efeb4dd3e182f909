"""The agreement of peers on the log and the state while some are killed, suspended and restarted at random: `python -m
benchmarks.churn`.

Real processes have a vector of 5,000 values in place of a model. At random times one of them is killed (SIGKILL), and
started again after a while with only its identity and its votes; or it is stopped for some seconds (SIGSTOP, SIGCONT).
A majority is always at work: running, and in a round since it came back. The seed decides the faults and their times,
but not the phase of the round that they hit.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import Event, PeerProcess, gone
from benchmarks.reporting import Bar, json_option, report
from peers.network.daemon import sweep_sockets
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity

VALUES = 5_000
TRAINING_SECONDS = 0.5
BETWEEN_FAULTS = 4.0  # mean number of seconds between two faults
STOPPED = (0.5, 8.0)  # range of seconds for which a peer is suspended
DOWN = (0.5, 15.0)
SHARE_OF_STOPS = 0.3
START_SECONDS = 120.0
SETTLE_SECONDS = 15.0
AT_WORK = 0.8  # the benchmark passes only if at least this share (0 to 1) of the time is outside stalls
LONGEST_STALL = 25.0  # the benchmark passes only if no gap between two entries has more seconds
LOCAL = ("/ip4/127.0.0.1/tcp/0",)


@dataclass
class AppliedEntries:
    """The entries that peers have reported as applied: for each index, the reported digests of head and state, and the
    time of the first report."""

    heads: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    states: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    first_at: dict[int, float] = field(default_factory=dict)
    measurement_ended_at: float | None = None

    def add(self, event: Event) -> None:
        index, when = int(event["index"]), float(event["time"])
        self.heads[index].add(event["head"])
        self.states[index].add(event["state"])
        self.first_at[index] = min(when, self.first_at.get(index, when))

    @property
    def rounds(self) -> int:
        return max(self.heads, default=-1) + 1

    @property
    def divergences(self) -> list[int]:
        """The indices of entries for which peers have reported different heads or states."""
        return [index for index in sorted(self.heads) if len(self.heads[index]) > 1 or len(self.states[index]) > 1]

    @property
    def gaps(self) -> list[float]:
        """The seconds between the first reports of consecutive entries, and from the last entry to the end of the
        measurement."""
        times = [self.first_at[index] for index in sorted(self.first_at)]
        times += [] if self.measurement_ended_at is None else [max([self.measurement_ended_at, *times[-1:]])]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def stalls(self) -> list[float]:
        """The seconds of each gap between entries that is longer than three times the median gap."""
        return [gap for gap in self.gaps if gap > 3 * statistics.median(self.gaps)]

    @property
    def share_at_work(self) -> float:
        """The share (0 to 1) of the measured time that passed outside stalls, which are unusually long gaps between
        entries. It is 0 if nothing was measured."""
        return 1 - sum(self.stalls) / sum(self.gaps) if self.gaps else 0.0


@dataclass
class RestartingPeer:
    """A peer process that can be killed and started again with the same identity."""

    name: str
    arguments: list[object]
    log: Path
    record: AppliedEntries
    process: PeerProcess | None = None
    is_stopped: bool = False
    at_work: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    _listening: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.is_stopped and self.at_work.is_set()

    async def start(self) -> None:
        self.process = await PeerProcess.start(self.arguments, self.log)
        self._listening = asyncio.create_task(self._listen(self.process))

    async def kill(self) -> set[int]:
        """Kill the peer's process by SIGKILL, and return the ids of its child processes, so that the caller can check
        that they end."""
        assert self.process is not None
        process, self.process = self.process, None
        self.at_work.clear()
        children = process.children()
        process.send_signal(signal.SIGKILL)
        await process.end()
        return children

    async def stop_for(self, seconds: float) -> None:
        assert self.process is not None
        self.is_stopped = True
        self.at_work.clear()
        self.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.process.send_signal(signal.SIGCONT)
            self.is_stopped = False

    async def _listen(self, process: PeerProcess) -> None:
        while event := await process.next_event():
            if event["event"] == "averaged":
                self.record.add(event)
                if not self.is_stopped:
                    self.at_work.set()
        if self.process is process:  # the process ended by itself, not because the benchmark killed it
            self.failures += 1
            click.echo(f"{self.name} ended by itself: {process.last_words()}", err=True)

    async def end(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            await process.end()
        if self._listening is not None:
            await self._listening


@dataclass
class Churn:
    """A source of random faults, which kills or suspends peers and later restarts or resumes them."""

    volunteers: list[RestartingPeer]
    random: random.Random
    kills: int = 0
    stops: int = 0
    orphans: set[int] = field(default_factory=set)

    async def go_on(self, seconds: float) -> None:
        """Cause faults in peers for `seconds` seconds. Several peers may be down at once."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as faults:
            while (pause := self.random.expovariate(1 / BETWEEN_FAULTS)) < deadline - time.monotonic():
                await asyncio.sleep(pause)
                is_stop, victim = self.random.random() < SHARE_OF_STOPS, self._victim()
                lasts = self.random.uniform(*(STOPPED if is_stop else DOWN))
                if victim is not None:
                    faults.create_task(self._stop(victim, lasts) if is_stop else self._kill(victim, lasts))
                    await asyncio.sleep(0)  # lets the fault's task start before the next victim is chosen
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))

    def _victim(self) -> RestartingPeer | None:
        """Return a peer chosen at random for a fault, or None if this peer is down already or the other running peers
        are no majority of all peers."""
        chosen = self.random.choice(self.volunteers)
        if chosen.process is None or chosen.is_stopped:
            return None
        others = sum(one.is_up for one in self.volunteers if one is not chosen)
        return chosen if 2 * others > len(self.volunteers) else None

    async def _kill(self, victim: RestartingPeer, seconds: float) -> None:
        self.kills += 1
        self.orphans |= await victim.kill()
        await asyncio.sleep(seconds)
        await victim.start()

    async def _stop(self, victim: RestartingPeer, seconds: float) -> None:
        self.stops += 1
        await victim.stop_for(seconds)

    async def tidy_up(self) -> None:
        """Wait until killed peers' child processes have ended, report those still running, and remove the killed peers'
        sockets."""
        if left := await gone(self.orphans, SETTLE_SECONDS):
            click.echo(f"processes left behind: {sorted(left)}", err=True)
        sweep_sockets()


async def measure(seconds: float, peers: int, seed: int, folder: Path) -> tuple[Churn, AppliedEntries]:
    """Run peers and cause faults for `seconds` seconds, and return the faults and the applied entries. Raises:
    TimeoutError if some peer does not average within START_SECONDS."""
    record = AppliedEntries()
    churn = Churn([], random.Random(seed))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(churn.tidy_up)
        bootstrap = await HivemindTransport.create(Identity.generate(), (), LOCAL)
        stack.push_async_callback(bootstrap.close)
        for number in range(peers):
            arguments: list[object] = ["benchmarks.vector_peer", "--values", VALUES, "--peers", peers]
            arguments += ["--pause", TRAINING_SECONDS, "--contact", bootstrap.addresses[0]]
            votes = folder / f"{number}-votes"
            votes.mkdir(exist_ok=True)
            arguments += ["--identity", folder / f"{number}.pem", "--votes", votes]
            volunteer = RestartingPeer(f"peer {number}", arguments, folder / f"{number}.log", record)
            churn.volunteers.append(volunteer)
            stack.push_async_callback(volunteer.end)
            await volunteer.start()
        async with asyncio.timeout(START_SECONDS):
            await asyncio.gather(*(one.at_work.wait() for one in churn.volunteers))
        await churn.go_on(seconds)
        record.measurement_ended_at = time.monotonic()
    return churn, record


def figures(churn: Churn, record: AppliedEntries) -> dict[str, Any]:
    gaps, stalls = record.gaps, record.stalls
    return {
        "kills": churn.kills,
        "stops": churn.stops,
        "peers that ended by themselves": sum(one.failures for one in churn.volunteers),
        "rounds": record.rounds,
        "seconds": sum(gaps),
        "median seconds from one to the next": statistics.median(gaps) if gaps else None,
        "stalls: over three times the median": len(stalls),
        "seconds in stalls": sum(stalls),
        "longest seconds from one to the next": max(gaps, default=None),
        "divergences": len(record.divergences),
    }


@click.command(help=__doc__)
@click.option("--minutes", default=10.0, show_default=True, help="Duration of the faults.")
@click.option("--peers", default=6, show_default=True, type=click.IntRange(min=3), help="Number of peers.")
@click.option("--seed", default=1, show_default=True, help="Decides the faults and their times.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for the peers' logs.")
@json_option
def main(minutes: float, peers: int, seed: int, logs: Path | None, json_file: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="churn-") as temporary:
        folder = logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        churn, record = asyncio.run(measure(minutes * 60, peers, seed, folder))
    for index in record.divergences:
        click.echo(f"entry {index}: heads {record.heads[index]}, states {record.states[index]}", err=True)
    rows = [{"what": what, "figure": figure} for what, figure in figures(churn, record).items()]
    bars = [
        Bar("1 / (1 + divergences)", 1 / (1 + len(record.divergences)), 1.0),
        Bar("share of the time outside stalls", record.share_at_work, AT_WORK),
        Bar(f"{LONGEST_STALL:g} seconds / the longest from one to the next", LONGEST_STALL / max(record.gaps), 1.0),
    ]
    report(f"churn: {peers} peers, {minutes:g} minutes, seed {seed}", rows, bars, json_file)


if __name__ == "__main__":
    main()
