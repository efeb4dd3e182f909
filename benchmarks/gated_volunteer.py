"""A volunteer that is alone in its run, and waits for a line of standard input after each training: `python -m
benchmarks.gated_volunteer`.

Its worker processes, driver, transport, heartbeats, log and checkpoints in a folder are those of `diloco-peer join`.
But after each training it reports the duration, and waits for a line on its standard input. Only then come the round,
the outer step, and the next training with the peer process's other work: the state's digest, and now and then a
snapshot and a checkpoint.

It also reports the longest delay with which the peer process woke up at a set time while its workers trained.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import memory_of, read_lines, say
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.run_folder import RunFolder
from opendiloco.storage.writer import KeepingPlan
from opendiloco.volunteer.local_workload import working
from opendiloco.volunteer.volunteer import volunteer_with
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.workload import InnerLoop, Progress, Trained

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CHECKPOINT_RATE = 200e6  # bytes of a checkpoint that are written in a second, as in `join` by default
LOOK_SECONDS = 0.01


class Lateness:
    """The longest delay, in seconds, with which this process's event loop wakes up from a sleep while the context is
    open."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> Lateness:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._looking.cancel()

    async def _look(self) -> None:
        while True:
            wanted = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.seconds = max(self.seconds, time.monotonic() - wanted)


def gate(workers: WorkerGroup, lines: asyncio.Queue[str]) -> None:
    """Make the workers wait for a line in `lines` after each training, and report the seconds of each training, from
    when theta is in shared memory until the trained weights are there too."""
    train = workers.run_inner_loop

    async def run_inner_loop(
        work: InnerLoop, on_progress: Callable[[Progress], None], *more: Any, **options: Any
    ) -> Trained:
        began = time.monotonic()
        async with Lateness() as lateness:
            trained = await train(work, on_progress, *more, **options)
        say(
            "trained",
            seconds=time.monotonic() - began,
            late_seconds=lateness.seconds,
            samples=trained.samples,
            tokens=trained.tokens,
            loss=trained.loss,
            parameters=workers.vectors.theta.size,
        )
        await lines.get()
        return trained

    workers.run_inner_loop = run_inner_loop  # type: ignore[method-assign]


async def take_part(run: Run, options: WorkerOptions, folder: Path) -> None:
    """Run a volunteer that takes part in `run` until standard input ends."""
    identity = Identity.generate()
    lines: asyncio.Queue[str] = asyncio.Queue()
    transport = await HivemindTransport.create(identity, (), (LOOPBACK,), local=True)
    try:
        say("connected", memory=memory_of())
        kept = RunFolder.open(run, identity.peer_id, folder)
        async with (
            working(run, options) as workload,
            Checkpointer(KeepingPlan(kept.path, rate=CHECKPOINT_RATE)) as checkpointer,
        ):
            gate(workload.trainer, lines)
            volunteer = await volunteer_with(workload, run, identity, transport, kept, checkpointer)
            reading = asyncio.create_task(read_lines(lines, volunteer.leave))
            await volunteer.take_part()
            reading.cancel()
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", type=int, help="Threads of each worker.  [default: as `join`]")
@click.option("--cpu-workers", type=int, default=1)
@click.option("--device", required=True)
@click.option("--micro-batch", type=int, help="[default: as `join`]")
@click.option("--compile/--no-compile", "compiles", default=None, help="[default: as `join`]")
def main(
    manifest: Path, threads: int | None, cpu_workers: int, device: str, micro_batch: int | None, compiles: bool | None
) -> None:
    config = RunConfig.from_manifest_content(json.loads(manifest.read_text()))
    options = WorkerOptions(
        device=device, cpu_workers=cpu_workers, threads=threads, micro_batch=micro_batch, compile=compiles
    )
    asyncio.run(take_part(Run.sign(config, Identity.generate()), options, manifest.parent / "state"))


if __name__ == "__main__":
    main()
