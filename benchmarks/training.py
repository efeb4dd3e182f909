"""The speed of a volunteer between rounds, as a share of the speed of a plain PyTorch loop that trains the same model:
`python -m benchmarks.training`.

The contenders have the same weights, optimizer, batches, micro-batches, precision and number of threads, and either all
or none compile. They run side by side and take turns of one outer step's inner steps; the first turn only warms up.

- The bare loop (benchmarks/bare_loop.py) is one process: the loop that one would write by hand around transformers'
  model.
- The loop by hand is the same with a Llama written for training alone (benchmarks/plain_llama.py), in the manner of
  nanochat. By default it takes part on a GPU; see `--by-hand`.
- The volunteer (benchmarks/gated_volunteer.py) is a peer process with its workers, alone in its run. Its time is from
  theta in shared memory to the trained weights there. The peer process works at the same time: heartbeats, the digest
  of the last outer step's state, and now and then a snapshot and a checkpoint. Rounds and evaluations are not included.
  Heartbeats also go on during the loops' turns.

The bars: at least 0.98 of each loop's tokens a second, as the median over turns of the ratio in the same turn, on the
CPU as on a GPU. "of bare" is that ratio to the bare loop. "MFU (matmuls, causal)" is model FLOPs utilisation, where the
device's peak is known. It counts matrix products without the look-up of embeddings, and causal attention once
(opendiloco/model/utilisation.py).

"memory" is the largest memory at the end of a training, beyond the contender's libraries and corpus. "formula" is that
of docs/training.md, which excludes activations. GPU memory is not counted.

`--data` replaces the run's text and tokenizer, so that nothing is downloaded: a folder of text, or "stdlib", by bytes.
The model stays, with its vocabulary and its head. The held-out text, a twentieth of all text, must have as many windows
as a batch: 11 MB of text for the 512 windows of llama-150m.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import PeerProcess, memory_of
from benchmarks.reporting import Bar, json_option, report, run_option, speed_ratio
from opendiloco.config.data import STANDARD_LIBRARY, DataSection, TokenizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.host_memory import HostMemory, WorkerMemory
from opendiloco.kernels import INT8

BARE, BY_HAND, VOLUNTEER = "bare loop", "loop by hand", "volunteer"
MFU = "MFU (matmuls, causal)"
WORKER = b"opendiloco.workers.worker\0"
START_SECONDS = 600.0
TURN_SECONDS = 3600.0
FIRST_GPU = "cuda:0"
AT_LEAST = 0.98
LEAST_UTILISATION = 0.4
"""Bar: the least utilisation (0 to 1) of an H100 that trains the 150M Llama in bf16."""


@dataclass(frozen=True)
class Machine:
    """The device, threads, workers and micro-batch with which all contenders train."""

    device: str
    threads: int
    """Threads of each of the volunteer's workers. The loops have as many as all workers together."""
    cpu_workers: int
    micro_batch: int
    compiles: bool

    @property
    def loop_arguments(self) -> list[object]:
        return ["--device", self.device, "--threads", self.threads * self.cpu_workers, *self._of_all]

    @property
    def volunteer_arguments(self) -> list[object]:
        return ["--device", self.device, "--threads", self.threads, "--cpu-workers", self.cpu_workers, *self._of_all]

    @property
    def _of_all(self) -> list[object]:
        return ["--micro-batch", self.micro_batch, "--compile" if self.compiles else "--no-compile"]

    def formula(self, name: str, parameters: int) -> int:
        """Return the bytes of main memory that the contender `name` should take: weights, gradients and moments if it
        trains on the CPU, and for a volunteer also the bytes of its peer process that grow with the model."""
        worker = WorkerMemory(parameters, parameters).training if self.device == "cpu" else 0
        return worker + (HostMemory(parameters, INT8).growing if name == VOLUNTEER else 0)


@dataclass
class Turns:
    """The measurements of one contender. A turn consists of the inner steps of one outer step."""

    seconds_per_token: list[float] = field(default_factory=list)
    memory: int = 0
    processes: int = 0
    loss: float = 0.0
    """The loss of the last turn, in nats per token."""

    def add(self, trained: dict[str, Any], memory: list[int]) -> None:
        self.seconds_per_token.append(trained["seconds"] / trained["tokens"])
        self.memory, self.processes, self.loss = max(self.memory, sum(memory)), len(memory), trained["loss"]


@dataclass(frozen=True)
class SpeedMeasurements:
    turns: dict[str, Turns]
    parameters: int
    peak: float | None = None
    """Tokens a second of the device if it did only the model's arithmetic, or None if its peak is unknown."""
    device_name: str = ""

    def ratio(self, name: str, beside: str = BARE) -> float:
        """Return the speed of the contender `name` as a share of the speed of the contender `beside`."""
        return speed_ratio({name: each.seconds_per_token for name, each in self.turns.items()}, name, beside)

    def speed(self, name: str) -> float:
        """Return the speed of a contender in tokens a second, the median over turns."""
        return statistics.median(1 / seconds for seconds in self.turns[name].seconds_per_token)

    def utilisation(self, name: str) -> float | None:
        return self.speed(name) / self.peak if self.peak else None


def prepared(config: RunConfig, steps: int | None, repetitions: int) -> RunConfig:
    """Return a copy of `config` for one peer, with `steps` inner steps (None: unchanged) and `repetitions` + 2 outer
    steps. Raises: UsageError if `config` has a z-loss or a document mask."""
    training = config.training
    if training.z_loss or training.document_mask:
        raise click.UsageError(
            f"training.z_loss = {training.z_loss:g}, training.document_mask = {str(training.document_mask).lower()}: "
            "the bare loop supports neither. Set z_loss = 0 and document_mask = false in a copy of the run."
        )
    return config.model_copy(
        update={
            "training": training.model_copy(update={"inner_steps": steps or training.inner_steps}),
            "rounds": config.rounds.model_copy(update={"minimum_peers": 1, "smallest_share": 1.0}),
            "outer_steps": repetitions + 2,
        }
    )


def with_text(config: RunConfig, text: str) -> RunConfig:
    """Return the run's configuration with bytes as tokens and with local text, from a folder or from Python's standard
    library."""
    source = text if text == STANDARD_LIBRARY else str(Path(text).resolve())
    return config.model_copy(update={"tokenizer": TokenizerSection(), "data": DataSection(source=source)})


async def measure(config: RunConfig, machine: Machine, repetitions: int, by_hand: bool) -> SpeedMeasurements:
    """Train in turns with a bare PyTorch loop, a volunteer and, if `by_hand`, a loop with a model written by hand.
    Return the measurements. Raises: PeerProcessError."""
    turns = {name: Turns() for name in (BARE, *([BY_HAND] if by_hand else []), VOLUNTEER)}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="training-")))
        manifest = folder / "manifest.json"
        manifest.write_text(json.dumps(config.to_manifest_content()), encoding="utf-8")
        loops, loop = dict[str, PeerProcess](), ["benchmarks.bare_loop", manifest, *machine.loop_arguments]
        for name in [name for name in turns if name != VOLUNTEER]:
            (stem := folder / name.replace(" ", "-")).mkdir()
            by_name = ["--by-hand"] if name == BY_HAND else []
            loops[name] = await start(stack, [*loop, *by_name], stem, machine.threads * machine.cpu_workers)
            loaded = (await loops[name].event("loaded", START_SECONDS))["memory"]
        volunteer = await start(stack, ["benchmarks.gated_volunteer", manifest, *machine.volunteer_arguments], folder)
        connected = (await volunteer.event("connected", START_SECONDS))["memory"]
        for turn in range(repetitions + 1):
            if turn:
                volunteer.tell("go")
            ours = await volunteer.event("trained", TURN_SECONDS)
            if turn:
                workers = [memory_of(process) - loaded for process in workers_of(volunteer)]
                turns[VOLUNTEER].add(ours, [memory_of(volunteer.process_id) - connected, *workers])
            for name, process in loops.items():
                process.tell(json.dumps(ours["samples"]))
                theirs = await process.event("trained", TURN_SECONDS)
                if turn:
                    turns[name].add(theirs, [memory_of(process.process_id) - loaded])
    return SpeedMeasurements(turns, ours["parameters"], theirs["peak"], theirs["device"])


async def start(stack: AsyncExitStack, command: list[object], folder: Path, threads: int | None = None) -> PeerProcess:
    """Start a peer process that ends with the stack, and return the process. `threads` is passed in the environment,
    because libraries read the number of threads once, when they are imported."""
    prefix = [] if threads is None else ["env", f"OMP_NUM_THREADS={threads}"]
    process = await PeerProcess.start(command, folder / f"{command[0]}.log", prefix)
    stack.push_async_callback(process.end)
    return process


def workers_of(volunteer: PeerProcess) -> list[int]:
    """Return the ids of those child processes of the volunteer that are workers, not its network daemon or checkpoint
    writer."""
    workers = []
    for process in volunteer.children():
        with suppress(FileNotFoundError, ProcessLookupError):  # the child process may have ended meanwhile
            if WORKER in Path(f"/proc/{process}/cmdline").read_bytes():
                workers.append(process)
    return workers


def row_of(name: str, measured: SpeedMeasurements, machine: Machine) -> dict[str, Any]:
    turns, formula = measured.turns[name], machine.formula(name, measured.parameters)
    utilisation = measured.utilisation(name)
    return {
        "contender": name,
        "processes": turns.processes,
        "threads": machine.threads * machine.cpu_workers,
        "tokens/s": measured.speed(name),
        "slowest turn": 1 / max(turns.seconds_per_token),
        "of bare": measured.ratio(name),
        MFU: "unknown" if utilisation is None else utilisation,
        "loss": turns.loss,
        "memory MB": turns.memory / 1e6,
        "formula MB": formula / 1e6,
        "beyond it MB": (turns.memory - formula) / 1e6,
    }


def bars_of(config: RunConfig, measured: SpeedMeasurements) -> list[Bar]:
    loops = [name for name in measured.turns if name != VOLUNTEER]
    bars = [
        Bar(f"tokens/s of the volunteer / of the {name}", measured.ratio(VOLUNTEER, name), AT_LEAST) for name in loops
    ]
    is_of_an_h100 = "H100" in measured.device_name and config.training.precision == "bf16"
    if is_of_an_h100 and config.name == "llama-150m" and (utilisation := measured.utilisation(VOLUNTEER)):
        bars.append(Bar(f"{MFU} of the volunteer", utilisation, LEAST_UTILISATION))
    return bars


@click.command(help=__doc__)
@run_option("examples/llama-2m.toml", "The run to train, a run.toml.")
@click.option("--steps", type=click.IntRange(min=1), help="Inner steps of a turn.  [default: the run's]")
@click.option("--repetitions", default=8, show_default=True, type=click.IntRange(min=1), help="Turns that count.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of each worker.")
@click.option("--cpu-workers", default=1, show_default=True, type=click.IntRange(min=1), help="Its workers.")
@click.option("--by-hand/--no-by-hand", default=None, help="Include a Llama written by hand.  [default: on a GPU]")
@click.option("--micro-batch", type=click.IntRange(min=1), help="Windows at once.  [default: the run's, or all]")
@click.option("--compile/--no-compile", "compiles", default=None, help="In all contenders.  [default: on a GPU]")
@click.option("--data", help='Text instead of the run\'s, by bytes: a folder, or "stdlib".')
@click.option("--device", default="cpu", show_default=True, help="cpu, or one GPU: cuda, the first, or cuda:1.")
@json_option
def main(
    run_file: Path,
    steps: int | None,
    repetitions: int,
    threads: int,
    cpu_workers: int,
    by_hand: bool | None,
    micro_batch: int | None,
    compiles: bool | None,
    data: str | None,
    device: str,
    json_file: Path | None,
) -> None:
    config = prepared(RunConfig.from_toml(run_file), steps, repetitions)
    config = config if data is None else with_text(config, data)
    is_gpu = device != "cpu"
    machine = Machine(
        FIRST_GPU if device == "cuda" else device,  # a volunteer would use all GPUs for "cuda", but the loops use one
        threads,
        cpu_workers,
        micro_batch or config.training.micro_batch or config.training.batch_size,
        is_gpu if compiles is None else compiles,
    )
    by_hand = is_gpu if by_hand is None else by_hand
    measured = asyncio.run(measure(config, machine, repetitions, by_hand))
    size, inner_steps = measured.parameters / 1e6, config.training.inner_steps
    what = f"training {config.name}, {size:.3g} M parameters, on {machine.device}"
    title = f"{what}: {repetitions} turns of {inner_steps} steps"
    rows = [row_of(name, measured, machine) for name in measured.turns]
    report(title, rows, bars_of(config, measured), json_file)


if __name__ == "__main__":
    main()
