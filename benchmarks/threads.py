"""The training speed of a volunteer on the CPU, by its worker's number of threads: `python -m benchmarks.threads`.

Several volunteers (benchmarks/gated_volunteer.py) run side by side, each alone in its run and with one worker. They
take turns, each of one outer step's inner steps; the first turn of each only warms up. One chooses its number of
threads by itself, as `join` does without `--threads`. The others get a number: one, two, four and so on, all cores but
one, and all cores.

"of one thread" is the median over turns of the ratio of the tokens a second to those with one thread in the same turn.
"late" is the longest delay in a turn with which the peer process woke up at a set time: the median over turns, and the
most.

The bar: the chosen number is as fast as any number that leaves the peer process a core. All cores are shown beside it.
They are faster if nothing else runs, and slower otherwise, because threads that have finished their part of an
operation wait for the one whose core is taken.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import PeerProcess
from benchmarks.reporting import Bar, json_option, report, run_option, speed_ratio
from benchmarks.training import START_SECONDS, TURN_SECONDS, prepared, start
from opendiloco.config.run_config import RunConfig
from opendiloco.cores import usable_cores
from opendiloco.workers.options import WorkerOptions, choose_threads

BY_ITSELF, ONE = "by itself", "1"
AT_LEAST = 0.97


@dataclass
class Contender:
    """A volunteer whose worker has `threads` threads. Each turn (the inner steps of one outer step) adds two numbers:
    the seconds per token, and the longest delay of the volunteer's event loop, in seconds."""

    threads: int
    seconds_per_token: list[float] = field(default_factory=list)
    longest_delays: list[float] = field(default_factory=list)

    def add(self, trained: dict[str, Any]) -> None:
        self.seconds_per_token.append(trained["seconds"] / trained["tokens"])
        self.longest_delays.append(trained["late_seconds"])

    @property
    def speed(self) -> float:
        """The volunteer's speed in tokens a second, the median over turns."""
        return statistics.median(1 / seconds for seconds in self.seconds_per_token)


def contenders_on(cores: int) -> dict[str, Contender]:
    """Return the volunteers to compare on a machine with `cores` cores, by name: one for each number of threads, and
    one with the number that `join` chooses."""
    numbers = {1, max(1, cores - 1), cores} | {2**power for power in range(cores.bit_length())}
    given = {str(number): Contender(number) for number in sorted(numbers)}
    return given | {BY_ITSELF: Contender(choose_threads(WorkerOptions(threads=None), ["cpu"], cores))}


async def measure(config: RunConfig, contenders: dict[str, Contender], repetitions: int) -> None:
    """Train with all contenders in turns, `repetitions` times, and record each training. Raises: PeerProcessError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="threads-")))
        volunteers = dict[str, PeerProcess]()
        for name, contender in contenders.items():
            (own := folder / name.replace(" ", "-")).mkdir()
            manifest = own / "manifest.json"
            manifest.write_text(json.dumps(config.to_manifest_content()), encoding="utf-8")
            threads = [] if name == BY_ITSELF else ["--threads", contender.threads]
            command = ["benchmarks.gated_volunteer", manifest, "--device", "cpu", *threads]
            volunteers[name] = await start(stack, command, own)
            await volunteers[name].event("trained", START_SECONDS + TURN_SECONDS)
        for _ in range(repetitions):
            for name, volunteer in volunteers.items():
                volunteer.tell("go")
                contenders[name].add(await volunteer.event("trained", TURN_SECONDS))


def rows_of(contenders: dict[str, Contender]) -> list[dict[str, Any]]:
    """Return the table's rows, one for each contender: its number of threads, its speed, and its event loop's delays in
    ms."""
    seconds = {name: contender.seconds_per_token for name, contender in contenders.items()}
    return [
        {
            "asked for": name,
            "threads": contender.threads,
            "tokens/s": contender.speed,
            "slowest turn": 1 / max(contender.seconds_per_token),
            "of one thread": speed_ratio(seconds, name, ONE),
            "late ms": 1e3 * statistics.median(contender.longest_delays),
            "latest ms": 1e3 * max(contender.longest_delays),
        }
        for name, contender in contenders.items()
    ]


def bars_of(contenders: dict[str, Contender], cores: int) -> list[Bar]:
    """Return the benchmark's only bar, a required ratio: the speed with as many threads as `join` chooses must be at
    least AT_LEAST times the speed with the fastest number of threads that leaves a core free."""
    seconds = {name: contender.seconds_per_token for name, contender in contenders.items()}
    ratios = {
        name: speed_ratio(seconds, BY_ITSELF, name)
        for name, contender in contenders.items()
        if name != BY_ITSELF and contender.threads <= max(1, cores - 1)
    }
    best = min(ratios, key=lambda name: ratios[name])
    return [Bar(f"tokens/s by itself / with {best}, the best that leaves a core", ratios[best], AT_LEAST)]


@click.command(help=__doc__)
@run_option("examples/llama-2m.toml", "The run to train, a run.toml.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=1), help="Inner steps of a turn.")
@click.option("--repetitions", default=8, show_default=True, type=click.IntRange(min=1), help="Turns that count.")
@json_option
def main(run_file: Path, steps: int, repetitions: int, json_file: Path | None) -> None:
    config, cores = prepared(RunConfig.from_toml(run_file), steps, repetitions), usable_cores()
    contenders = contenders_on(cores)
    asyncio.run(measure(config, contenders, repetitions))
    title = f"training {config.name} on the CPU, {cores} cores: {repetitions} turns of {steps} steps"
    report(title, rows_of(contenders), bars_of(contenders, cores), json_file)


if __name__ == "__main__":
    main()
