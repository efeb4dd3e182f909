"""The seconds for which a checkpoint blocks the trainer, if another process writes it (as in diloco-peer), and if the
trainer's own process writes it: `python -m benchmarks.checkpoint`.

Ours copies momentum and theta into memory that was allocated before or, if they are large, into a file that is not
flushed. Another process then writes the copy to the disk. Only a next outer step that comes before the end of the copy
waits for it. "blocked" is therefore the extra time that the trainer needs to encode its pseudo-gradient beside the
copy, if both happen at the same time. "copied" is the time until the copy is done. "total" is the time until the file
is safe on the disk: flushed, under its name, with the name flushed, too. The other ways flush as well, because a file
that a power cut destroys is no checkpoint. Contenders take turns.

The bar: the faster way of saving at once takes at least 5 times as long as ours blocks.

With --limit the process keeps to a rate, as in `diloco-peer join` by default: total grows, blocked does not.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.reporting import Bar, json_option, report, speed_ratio
from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.kernels import INT8, quantize_difference
from opendiloco.shared_memory import available_memory
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.loading import Checkpoints
from opendiloco.storage.writer import KeepingPlan
from opendiloco.training.codec import BlockCodec
from opendiloco.training.outer import OuterState
from peers.transfer.snapshots import FrozenSnapshot
from peers.transfer.storage import FolderStorage

OURS, SAFETENSORS, TORCH = "ours, in a process", "safetensors.save_file + fsync", "torch.save + fsync"
RUN = "benchmark-" + "a" * 32
AT_LEAST = 5.0
SHORTEST = 1e-4
"""Seconds that are counted for a shorter or negative time."""


@dataclass
class Times:
    """The measured seconds of one contender (a way to save a checkpoint), with one value for each round."""

    blocked: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


def save_at_once(save: Callable[[Path], object], path: Path) -> float:
    """Call `save` to write a file to `path`, flush the file and its folder to the disk, and return the seconds that
    writing and flushing took."""
    start = time.perf_counter()
    save(path)
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


async def save_in_a_process(state: OuterState, plan: KeepingPlan) -> tuple[float, float, float]:
    """Save a checkpoint in diloco-peer's writer process. Return the seconds by which copying slows the trainer
    down, the seconds until the state is copied, and the seconds until the checkpoint is flushed to the disk."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    storage = FolderStorage(plan.folder, available_memory)
    memory = storage.snapshot(state.theta.nbytes + state.momentum.nbytes)
    digest, codec = state.digest(), BlockCodec(INT8, state.theta.size)
    payload = codec.empty_payload()

    def encode() -> float:
        began = time.perf_counter()
        quantize_difference(state.theta, state.momentum, payload)
        return time.perf_counter() - began

    encode()  # not timed, because the first call allocates the payload's memory
    alone = await asyncio.to_thread(encode)
    async with Checkpointer(plan) as checkpointer:
        start = time.perf_counter()
        copying = asyncio.create_task(asyncio.to_thread(state.copy_to, memory.data))
        blocked = max(SHORTEST, await asyncio.to_thread(encode) - alone)
        await copying
        copied = time.perf_counter() - start
        checkpointer.take(FrozenSnapshot(None, digest, (), memory.data, memory=memory))
        await checkpointer.idle()
        return blocked, copied, time.perf_counter() - start


def measure(values: int, rounds: int, folder: Path, rate: float | None) -> dict[str, Times]:
    """Return the times of all contenders (ways to save a checkpoint), by name. `rate` limits diloco-peer's writing, in
    bytes a second (None: no limit). Raises: ClickException if its checkpoint does not match the saved state."""
    import torch
    from safetensors.numpy import save_file

    draw = np.random.default_rng(1)
    state = OuterState(draw.standard_normal(values, np.float32), OuterOptimizerSection(learning_rate=0.7, momentum=0.6))
    state.momentum[:] = draw.standard_normal(values, np.float32)
    tensors = {"momentum": state.momentum, "theta": state.theta}
    as_torch = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    plan = KeepingPlan(folder / RUN / "peer", keep_newest=1, rate=rate)
    at_once: dict[str, Callable[[Path], object]] = {
        SAFETENSORS: lambda path: save_file(tensors, path),
        TORCH: lambda path: torch.save(as_torch, path),
    }
    times = {name: Times() for name in (OURS, *at_once)}
    for turn in range(rounds + 1):
        seconds = {OURS: asyncio.run(save_in_a_process(state, plan))}
        for name, save in at_once.items():
            seconds[name] = (save_at_once(save, folder / "at-once"),) * 3
        for name, (blocked, copied, total) in seconds.items() if turn else ():
            times[name].blocked.append(blocked)
            times[name].copied.append(copied)
            times[name].total.append(total)
    found = Checkpoints(plan.checkpoints, RUN).load_newest()
    if found is None or found.state_digest != state.digest():
        raise click.ClickException(f"no good checkpoint was written to {plan.checkpoints}")
    return times


def row_of(name: str, times: Times, values: int, blocked: dict[str, list[float]]) -> dict[str, Any]:
    seconds, total = statistics.median(times.blocked), statistics.median(times.total)
    return {
        "contender": name,
        "MB": 8 * values / 1e6,
        "blocked s": seconds,
        "copied s": statistics.median(times.copied),
        "total s": total,
        "blocked / total": seconds / total,
        "times ours": speed_ratio(blocked, OURS, name),
    }


@click.command(help=__doc__)
@click.option("--sizes", default="8,64", show_default=True, help="Millions (2^20) of parameters.")
@click.option("--rounds", default=5, show_default=True, help="Number of saves of each contender.")
@click.option("--limit", type=float, metavar="MBIT", help="Megabits a second for our process.  [default: none]")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), help="On the disk to test.  [default: TMPDIR]"
)
@json_option
def main(sizes: str, rounds: int, limit: float | None, folder: Path | None, json_file: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for values in (int(float(size) * 2**20) for size in sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            times = measure(values, rounds, Path(place), None if limit is None else limit * 1e6 / 8)
        blocked = {name: each.blocked for name, each in times.items()}
        rows += [row_of(name, each, values, blocked) for name, each in times.items()]
        faster = min(speed_ratio(blocked, OURS, other) for other in blocked if other != OURS)
        bars.append(Bar(f"faster save at once / blocked, {8 * values / 1e6:.0f} MB", faster, AT_LEAST))
    report("checkpoints: how long the trainer waits", rows, bars, json_file)


if __name__ == "__main__":
    main()
