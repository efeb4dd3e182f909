"""A diloco-peer process whose inner steps only sleep: `python -m benchmarks.streaming_peer`, started by other
benchmarks.

Driver, transport, codec, outer step and the worker's way through a cycle are a volunteer's. The model is replaced: an
inner step sleeps, as a CPU does while a GPU works, and the learned difference is noise. The peer reports the end of
each cycle, and trains until its standard input ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.processes import read_lines, say
from benchmarks.threaded_worker import ThreadedWorker
from benchmarks.vector_peer import GATED_TIMING, OUTER_STEPS, add_noise, create_vectors, run_config
from opendiloco.alignment import ALIGNMENT
from opendiloco.config.overrides import Overrides
from opendiloco.config.run_config import CodecSection, RunConfig
from opendiloco.shared_memory import SharedVectors, Vector
from opendiloco.training.inner import InnerSteps, ModelReplica
from opendiloco.training.team import Team
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.control import InnerLoopDone, RunInnerLoop
from opendiloco.workers.worker import InnerLoops
from peers.driver.driver import Driver
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.wire import digest_of

NEVER_SNAPSHOT = 1_000_000


@dataclass(frozen=True)
class StreamingPeerOptions:
    """The settings of one peer, from its command line."""

    values: int
    peers: int
    fragments: int
    inner_steps: int
    step_seconds: float
    overlap: int
    codec: str
    contact: str | None
    listen: str

    @property
    def settings(self) -> RunSettings:
        return RunSettings(
            run="benchmark",
            manifest_digest=digest_of(b"benchmark"),
            inner_steps=self.inner_steps,
            samples_per_lease=self.inner_steps,
            tokens_per_sample=1,
            minimum_peers=self.peers,
            timing=GATED_TIMING,
            snapshot_every=NEVER_SNAPSHOT,
            fragments=self.fragments,
        )

    @property
    def config(self) -> RunConfig:
        config = run_config()
        streaming = config.streaming.model_copy(
            update={"overlap": self.overlap, "layers_per_fragment": None if self.fragments == 1 else 1}
        )
        training = {"inner_steps": self.inner_steps, "batch_size": 1, "sequence_length": 1}
        return config.model_copy(
            update={
                "outer_steps": OUTER_STEPS,
                "streaming": streaming,
                "training": config.training.model_copy(update=training),
                "codec": CodecSection.model_validate({"kind": self.codec}),
            }
        )

    def parts(self, values: int) -> list[slice]:
        """Return the slice of each fragment in a vector of `values` values. All fragments have the same size, in whole
        blocks, except for the last."""
        each = values // self.fragments // ALIGNMENT * ALIGNMENT
        starts = [each * number for number in range(self.fragments)]
        return [slice(start, start + each) for start in starts[:-1]] + [slice(starts[-1], values)]


class NoSamples:
    """A stand-in for the run's text, with zeros as tokens."""

    def expect(self, numbers: NDArray[np.int64]) -> None:
        """Ignore the announcement of the next samples' numbers."""

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros((len(numbers), 2), np.int64)


class FragmentPlaces(NamedTuple):
    """A stand-in for a model's layout that has only the fragments' slices of the vector."""

    fragments: list[slice]


class SleepingReplica:
    """A stand-in for the `ModelReplica` of `InnerLoops`. Its inner steps only sleep."""

    learning_rate = 0.0

    def __init__(self, part: StreamingPeerOptions, theta: Vector) -> None:
        self.layout = FragmentPlaces(part.parts(theta.size))
        self._part = part
        self._theta = theta
        self._stores = 0

    def inner_steps(
        self,
        theta: Vector | None,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        tokens: int,
        stop_wanted: Callable[[], bool],
        overrides: Overrides,
    ) -> InnerSteps:
        def take(batch: NDArray[np.int64], step: int, tokens: int) -> tuple[float, float, bool]:
            time.sleep(self._part.step_seconds)
            return 1.0, 1.0, stop_wanted()

        return InnerSteps(take, cast(Any, NoSamples()), self._part.config.training, index, lease, steps, tokens)

    def store(self, flat: Vector, fragment: int) -> None:
        self._stores += 1
        place = self.layout.fragments[fragment]
        add_noise(self._theta[place], flat[place], (fragment, self._stores))

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        """Do nothing, because a sleeping replica has no weights to merge."""


class SleepingWorker(ThreadedWorker):
    """A worker in a thread, which trains with a `SleepingReplica`."""

    def __init__(self, part: StreamingPeerOptions, vectors: SharedVectors) -> None:
        config = part.config
        super().__init__(config)
        self.vectors, self.fragments = vectors, part.parts(vectors.theta.size)
        self.replica = SleepingReplica(part, vectors.theta)
        team = Team(torch.device("cpu"))
        self._loops = InnerLoops(config, cast(ModelReplica, self.replica), team, vectors, self.channel, lambda: None)

    async def carry_out(self, command: RunInnerLoop) -> InnerLoopDone:
        return await asyncio.to_thread(self._loops.run, command)


async def take_part(transport: HivemindTransport, identity: Identity, part: StreamingPeerOptions) -> None:
    """Run a peer that takes part in the run until standard input ends."""
    vectors = await asyncio.to_thread(create_vectors, part.values)
    workload = LocalWorkload(SleepingWorker(part, vectors), part.config)

    def tell(header: Header, state_digest: bytes) -> None:
        say("cycle", index=header.index, state=state_digest.hex(), peers=len(header.roster))

    driver = Driver(identity, transport, workload, part.settings, await workload.state_digest(), on_entry=tell)
    reading = asyncio.create_task(read_lines(asyncio.Queue(), lambda: driver.leave(at_once=True)))
    await driver.run()
    reading.cancel()


async def run_peer(part: StreamingPeerOptions) -> None:
    identity = Identity.generate()
    contacts = (part.contact,) if part.contact else ()
    transport = await HivemindTransport.create(identity, contacts, (part.listen,), local=True)
    try:
        say("listening", address=transport.addresses[0])
        await take_part(transport, identity, part)
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.option("--values", type=int, required=True)
@click.option("--peers", type=int, required=True, help="Number of peers before the first round.")
@click.option("--fragments", type=int, default=1, show_default=True)
@click.option("--inner-steps", type=int, required=True, help="Inner steps of a cycle.")
@click.option("--step-seconds", type=float, required=True, help="Duration of an inner step.")
@click.option("--overlap", type=int, default=0, show_default=True)
@click.option("--codec", default="int8", show_default=True)
@click.option("--contact", help="Address of a running peer.")
@click.option("--listen", default="/ip4/127.0.0.1/tcp/0", show_default=True)
def main(**options: Any) -> None:
    asyncio.run(run_peer(StreamingPeerOptions(**options)))


if __name__ == "__main__":
    main()
