"""The main memory that a peer takes, by the peer's role and phase: `python -m benchmarks.memory`.

Three volunteers with a vector in place of a model average it, and keep log and snapshots in a folder, as `join` does.
Such a peer process is like that of a volunteer whose worker has its weights on a GPU. Its phases are:

- training, and rounds up to the outer step
- a round after which the state is frozen
- rounds while a joiner fetches a snapshot, and the state is frozen again
- being late: it trains while the others average without it, and takes the outer step beside its training

A joiner is measured until it has the state, and then a follower of the log. Last, a volunteer with workers on the CPU
trains a model alone in its run; the memory of its workers counts, too.

Memory here excludes files on a disk: it is the pages that were written to, and all reserved bytes of memory files,
which processes share. The memory of a process before it made any vector is subtracted. Each figure is the peak of any
peer of that role in that phase, sampled every few milliseconds.

There are two bars. In no phase may a volunteer's peer process take more than 20 bytes a parameter, beside 192 MiB for
any model (2 bytes a parameter at 100 M parameters). No figure may differ from the formula (opendiloco/host_memory.py,
docs/training.md) by more than a tenth.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.groups import OUR_PEER, ROUND_SECONDS, START_SECONDS
from benchmarks.processes import Event, PeerProcess, PeerProcessError, memory_taken
from benchmarks.reporting import Bar, json_option, report, run_option
from benchmarks.training import TURN_SECONDS, prepared, start, workers_of
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.host_memory import FETCHED_AT_ONCE, IN_USE, HostMemory
from opendiloco.kernels import INT8
from opendiloco.model.build import build_skeleton
from opendiloco.workers.needs import worker_memory

PEERS = 3
SNAPSHOT_EVERY = 3
TURNS = 3
LOOK_SECONDS = 0.02
PAUSE = 2.0
"""Seconds between two rounds in which a joiner can fetch, because snapshots give way to rounds."""
FETCH_MBIT = 800.0
AT_MOST = 20.0
OFF_AT_MOST = 0.1
VOLUNTEER, CPU_VOLUNTEER, JOINER, FOLLOWER = "volunteer", "volunteer on the CPU", "joiner", "follower"
TRAINING, ROUND, FREEZING, SERVING, LATE = "training", "round", "freezing", "serving", "late"
FETCHING, FOLLOWING = "fetching", "following"


@dataclass
class Watched:
    """A process whose memory is measured, alone or together with its workers."""

    role: str
    process: PeerProcess
    before: int
    """Bytes of the process before it made any vector."""
    peer: str = ""
    address: str = ""
    before_worker: int | None = None
    """Bytes of each worker before the worker made any vector, or None if workers do not count."""

    @classmethod
    async def listening(cls, role: str, process: PeerProcess) -> Watched:
        """Wait until a peer process listens for connections, and return the `Watched` that measures its memory. Raises:
        PeerProcessError."""
        report = await process.event("listening", START_SECONDS)
        return cls(role, process, report["memory"], report["peer"], report["address"])

    @property
    def taken(self) -> int:
        """The bytes of memory that the process takes now, and its workers if they are measured with it, less the bytes
        before any vector was made; 0 once the process has ended."""
        workers = [] if self.before_worker is None else workers_of(self.process)
        before = self.before + len(workers) * (self.before_worker or 0)
        with suppress(FileNotFoundError, ProcessLookupError):
            return memory_taken(self.process.process_id, *workers) - before
        return 0


@dataclass
class PeakMemory:
    """The largest number of bytes that any peer of a role took in a phase, by role and phase."""

    most: dict[tuple[str, str], int] = field(default_factory=dict)

    @asynccontextmanager
    async def phase(self, name: str, *watched: Watched) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look(name, watched))
        try:
            yield
        finally:
            looking.cancel()

    async def _look(self, phase: str, watched: Sequence[Watched]) -> None:
        while True:
            for one in watched:
                key = one.role, phase
                self.most[key] = max(self.most.get(key, 0), one.taken)
            await asyncio.sleep(LOOK_SECONDS)


@dataclass
class Swarm:
    """A swarm of volunteers with a vector in place of a model, and the folder of their files."""

    volunteers: Sequence[Watched]
    watch: PeakMemory
    arguments: Sequence[object]
    folder: Path
    entries: int = 0
    """Number of entries that all volunteers have applied."""
    reports: list[Event] = field(default_factory=list)
    """The volunteers' reports on the last entry."""

    async def round(self) -> None:
        """Make all volunteers train and average once, and record their memory. Raises: PeerProcessError."""
        await self._train(TRAINING)
        freezes = (self.entries + 1) % SNAPSHOT_EVERY == 0
        await self._average(FREEZING if freezes else ROUND)

    async def serve_a_joiner(self) -> None:
        """Start a joiner, make the volunteers average until the joiner has the state, and record their memory."""
        command = [*self.arguments, "--fetches", "--folder", self.folder / JOINER, "--download-limit", FETCH_MBIT]
        async with newcomer(JOINER, command, self.folder) as joiner, self.watch.phase(FETCHING, joiner):
            await joiner.process.event("fetched", START_SECONDS)
            restored = asyncio.create_task(joiner.process.event("restored", ROUND_SECONDS))
            while not restored.done():
                await self._train(SERVING)
                await self._average(SERVING)
                await asyncio.wait([restored], timeout=PAUSE)
            await restored

    async def be_followed(self) -> None:
        """Start a peer that only follows the log, make the volunteers average once, and record the follower's
        memory."""
        async with newcomer(FOLLOWER, [*self.arguments, "--follows"], self.folder) as follower:
            async with self.watch.phase(FETCHING, follower):
                await follower.process.event("restored", START_SECONDS)
            async with self.watch.phase(FOLLOWING, follower):
                await self.round()
                await follower.process.event("followed", START_SECONDS)

    async def leave_one_behind(self) -> None:
        """Make all volunteers train, and make all but the roster's last member average. Record the memory of this
        member, which is then late."""
        last = self.reports[0]["roster"][-1]
        late = next(each for each in self.volunteers if each.peer == last)
        await self._train(TRAINING)
        async with self.watch.phase(LATE, late):
            await self._average(ROUND, late)

    async def _train(self, phase: str) -> None:
        async with self.watch.phase(phase, *self.volunteers):
            for each in self.volunteers:
                each.process.tell("prepare")
            await self._all("ready")

    async def _average(self, phase: str, late: Watched | None = None) -> None:
        others = [each for each in self.volunteers if each is not late]
        async with self.watch.phase(phase, *others):
            for each in others:
                each.process.tell("go")
            self.reports = await self._all("averaged")
            self.entries += 1
            if self.entries % SNAPSHOT_EVERY == 0 and late is None:
                await self._all("frozen")

    async def _all(self, kind: str) -> list[Event]:
        return await asyncio.gather(*(each.process.event(kind, ROUND_SECONDS) for each in self.volunteers))


@asynccontextmanager
async def newcomer(role: str, command: Sequence[object], folder: Path) -> AsyncIterator[Watched]:
    """Start a peer process with a vector in place of a model, wait until it listens, and yield the `Watched` that
    measures its memory. The process ends with the context."""
    process = await PeerProcess.start(command, folder / f"{role}.log")
    try:
        yield await Watched.listening(role, process)
    finally:
        await process.end()


async def measure_swarm(values: int, watch: PeakMemory) -> None:
    """Measure the memory of volunteers, a joiner and a follower, which all have a vector of `values` values in place of
    a model. Raises: PeerProcessError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memory-")))
        arguments: list[object] = [OUR_PEER, "--values", values, "--peers", PEERS, "--snapshot-every", SNAPSHOT_EVERY]
        volunteers: list[Watched] = []
        for rank in range(PEERS):
            peer = newcomer(VOLUNTEER, [*arguments, "--folder", folder / str(rank)], folder)
            volunteers.append(await stack.enter_async_context(peer))
            if rank == 0:
                arguments += ["--contact", volunteers[0].address]
        swarm = Swarm(volunteers, watch, arguments, folder)
        for _ in range(SNAPSHOT_EVERY + 2):  # enough entries that joiners fetch a snapshot instead of replaying entries
            await swarm.round()
        await swarm.serve_a_joiner()
        await swarm.be_followed()
        await swarm.leave_one_behind()


async def measure_cpu_volunteer(config: RunConfig, workers: int, watch: PeakMemory) -> None:
    """Measure the memory of a volunteer that is alone in its run and has `workers` workers on the CPU.

    Raises: PeerProcessError.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memory-")))
        manifest = folder / "manifest.json"
        manifest.write_text(json.dumps(config.to_manifest_content()), encoding="utf-8")
        bare = await start(stack, ["benchmarks.bare_loop", manifest, "--device", "cpu", "--threads", 1], folder)
        loaded = (await bare.event("loaded", START_SECONDS))["memory"]  # bytes of a worker's libraries and corpus
        command = ["benchmarks.gated_volunteer", manifest, "--device", "cpu", "--threads", 1]
        command += ["--cpu-workers", workers]
        volunteer = await start(stack, command, folder)
        connected = (await volunteer.event("connected", START_SECONDS))["memory"]
        watched = Watched(CPU_VOLUNTEER, volunteer, connected, before_worker=loaded)
        async with watch.phase(TRAINING, watched):
            for _ in range(TURNS):
                await volunteer.event("trained", TURN_SECONDS)
                volunteer.tell("go")


def cpu_config(run_file: Path, hidden: int, layers: int, workers: int) -> RunConfig:
    """Return the run of `run_file` with a model of `layers` layers of width `hidden`, and with so few tokens at once
    that activations take little memory."""
    config = prepared(RunConfig.from_toml(run_file), 1, TURNS)
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    model = config.model.model_copy(update={"config": {**(config.model.config or {}), **shape}})
    training = config.training.model_copy(update={"batch_size": workers, "sequence_length": 32})
    return config.model_copy(update={"model": model, "training": training})


def formulas(host: HostMemory) -> dict[tuple[str, str], int]:
    """Return the predicted bytes of main memory, by role and phase."""
    return {
        (VOLUNTEER, TRAINING): host.training,
        (VOLUNTEER, ROUND): host.training,
        (VOLUNTEER, FREEZING): host.training + host.snapshot,
        (VOLUNTEER, SERVING): host.training + host.snapshot,
        (VOLUNTEER, LATE): host.late,
        (JOINER, FETCHING): host.joining,
        (FOLLOWER, FETCHING): host.beginning_to_follow,
        (FOLLOWER, FOLLOWING): host.following,
    }


def cpu_formula(config: RunConfig, workers: int) -> tuple[int, int]:
    """Return the number of the model's trained parameters, and the predicted bytes of a volunteer with `workers`
    workers on the CPU."""
    skeleton = build_skeleton(config, build_tokenizer(config.tokenizer))
    memory = worker_memory(skeleton, config.training, "cpu", workers)
    return memory.trained, HostMemory(memory.trained, INT8).training + memory.training


def row_of(role: str, phase: str, taken: int, parameters: int, formula: int) -> dict[str, Any]:
    return {
        "role": role,
        "phase": phase,
        "M parameters": parameters / 1e6,
        "MB": taken / 1e6,
        "formula MB": formula / 1e6,
        "bytes a parameter": taken / parameters,
        "of formula": taken / formula,
    }


def bars_of(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    fixed = (IN_USE + FETCHED_AT_ONCE) / 1e6
    most = max((row["MB"] - fixed) / row["M parameters"] for row in rows if row["role"] == VOLUNTEER)
    ratios = [row["of formula"] for row in rows]
    return [
        Bar(
            f"{AT_MOST:g} bytes a parameter / the most that a volunteer takes beside {fixed:.0f} MB",
            AT_MOST / most,
            1.0,
        ),
        Bar("the formula / what takes most beside it", 1 / max(ratios), round(1 / (1 + OFF_AT_MOST), 3)),
        Bar("what takes least beside it / the formula", min(ratios), 1 - OFF_AT_MOST),
    ]


@click.command(help=__doc__)
@click.option("--values", default=100_000_000, show_default=True, help="Values of the vector.")
@click.option("--hidden", default=768, show_default=True, help="Width of the model that is trained on the CPU.")
@click.option("--layers", default=8, show_default=True, help="Layers of that model.")
@click.option("--cpu-workers", default=1, show_default=True, type=click.IntRange(min=1), help="Its workers.")
@run_option("examples/llama-2m.toml", "The run in which that model is trained, a run.toml.")
@json_option
def main(values: int, hidden: int, layers: int, cpu_workers: int, run_file: Path, json_file: Path | None) -> None:
    watch, host = PeakMemory(), HostMemory(values, INT8)
    try:
        asyncio.run(measure_swarm(values, watch))
        rows = [row_of(*key, watch.most[key], values, formula) for key, formula in formulas(host).items()]
        config = cpu_config(run_file, hidden, layers, cpu_workers)
        asyncio.run(measure_cpu_volunteer(config, cpu_workers, watch))
    except PeerProcessError as error:
        raise click.ClickException(str(error)) from error
    parameters, formula = cpu_formula(config, cpu_workers)
    key = CPU_VOLUNTEER, TRAINING
    rows.append(row_of(*key, watch.most[key], parameters, formula))
    report(f"main memory, {values / 1e6:g} M parameters", rows, bars_of(rows), json_file)


if __name__ == "__main__":
    main()
