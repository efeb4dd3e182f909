"""A diloco-peer process with a vector in place of a model: `python -m benchmarks.vector_peer`, started by other
benchmarks.

Driver, transport, codec and outer step are a volunteer's. The worker is replaced: it adds noise to theta. With --pause
its training takes this long; without, lines on its standard input control it: "prepare", and then "go". It reports each
applied entry as a line, see `benchmarks.processes`. With --folder its log and snapshots lie on the disk, as a
volunteer's do. With --votes its votes do, so that it starts again as the same voter. With --follows it takes no part
and only follows the log, as `diloco-peer follow` does.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import opendiloco
from benchmarks.processes import cpu_seconds, memory_taken, read_lines, say
from opendiloco.cli.options import join_option
from opendiloco.config.run_config import RunConfig
from opendiloco.shared_memory import SharedVectors, Vector, available_memory
from opendiloco.training.codec import block_bytes
from opendiloco.training.outer import LocalState
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.group import WorkerGroup
from peers.driver.driver import Driver
from peers.log.folder import LogFolder
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.log.votes import VotesFile
from peers.network.throttle import Caps
from peers.network.transport import HivemindTransport
from peers.transfer.following import Following
from peers.transfer.snapshots import SNAPSHOT, FrozenSnapshot
from peers.transfer.storage import FolderStorage
from peers.values.identity import Identity
from peers.values.leases import sample_count
from peers.values.manifest import Amendment
from peers.values.wire import digest_of
from peers.values.workload import Blocks, InnerLoop, Progress, Trained

TOKENS_PER_SAMPLE = 8
OUTER_STEPS = 1_000_000
CHUNK = 1 << 20
FOLLOWING_PAUSE = 0.2
GATED_TIMING = Timing(heartbeat_expiry=30.0, grace=30.0, round_timeout=600.0, partition_grace=3600.0)
CHURN_TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=3.0, grace=3.0, round_timeout=10.0, partition_grace=60.0, resend=0.25, leave=5.0
)


@dataclass(frozen=True)
class VectorPeerOptions:
    """The settings of one peer, from its command line."""

    values: int
    peers: int
    contact: str | None
    listen: str
    identity_file: Path | None
    pause: float | None
    snapshot_every: int
    fetches: bool
    follows: bool
    folder: Path | None
    votes: Path | None
    upload_limit: float | None
    download_limit: float | None
    usual_timing: bool
    steady: bool
    contribution_format: str | None

    @property
    def settings(self) -> RunSettings:
        """The settings of the benchmark's run, with the timing that the options of the command line demand."""
        return RunSettings(
            run="benchmark",
            manifest_digest=digest_of(b"benchmark"),
            inner_steps=1,
            samples_per_lease=8,
            tokens_per_sample=TOKENS_PER_SAMPLE,
            minimum_peers=self.peers,
            timing=Timing() if self.usual_timing else GATED_TIMING if self.pause is None else CHURN_TIMING,
            snapshot_every=self.snapshot_every,
        )


class VectorWorker(WorkerGroup):
    """A stand-in for a volunteer's workers, without a process or a model: its training adds noise to a vector."""

    def __init__(
        self, vectors: SharedVectors, pause: float | None, lines: asyncio.Queue[str], spread: float = 0.2
    ) -> None:
        self.vectors, self.fragments = vectors, [slice(0, vectors.theta.size)]
        self._pause, self._spread = pause, spread
        self._lines = lines

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: object = None,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        if self._pause is None:
            await self._wait_for("prepare")
        await asyncio.to_thread(add_noise, self.vectors.theta, self.vectors.local, (work.index, work.samples[0].start))
        if self._pause is None:
            say("ready", cpu=cpu_seconds())
            on_progress(Progress(0, None, 1.0))
            await self._wait_for("go")
        else:
            await asyncio.sleep(self._pause * random.uniform(1 - self._spread, 1 + self._spread))
        return Trained(work.samples, TOKENS_PER_SAMPLE * sample_count(work.samples), 1.0)

    async def _wait_for(self, wanted: str) -> None:
        while await self._lines.get() != wanted:
            pass


class VectorWorkload(LocalWorkload):
    """A workload that records the times of four moments of a round, and the processor seconds at the round's end.

    The moments are the round's beginning, the end of encoding, the arrival of the agreed payload, and the new theta.
    """

    began_at: float | None = None
    encoded_at: float | None = None
    agreed_at: float | None = None
    stepped_at: float | None = None
    cpu: float | None = None

    async def contribution(self, fragment: int = 0, format: int = 0) -> Blocks:
        self.began_at = time.monotonic()
        blocks = await super().contribution(fragment, format)
        self.encoded_at = time.monotonic()
        return blocks

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        self.agreed_at = time.monotonic()
        await super().apply(payload, index, fragment, keeps_work, counts, amendment=amendment)
        self.stepped_at = time.monotonic()
        self.cpu = cpu_seconds()


class TalkingTransport(HivemindTransport):
    """A transport that reports a peer's first request for a snapshot, and the bytes received from each donor."""

    is_fetching = False

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        if name == SNAPSHOT and not self.is_fetching:
            self.is_fetching = True
            say("fetching")
        answer, data = await super().pull(peer_id, name, header, max_bytes, timeout)
        if name == SNAPSHOT:
            say("fetched", donor=peer_id, bytes=len(data))
        return answer, data


def add_noise(values: Vector, out: Vector, seed: tuple[int, ...]) -> None:
    """Write `values` plus noise to `out`. Both have the shape (n,), and may be the same array.

    Each chunk gets the same noise, so that little memory is needed.
    """
    noise = np.random.default_rng(seed).standard_normal(min(CHUNK, values.size), np.float32) * np.float32(0.01)
    for start in range(0, values.size, CHUNK):
        part = values[start : start + CHUNK]
        np.add(part, noise[: part.size], out=out[start : start + CHUNK])


def create_vectors(values: int) -> SharedVectors:
    """Return a peer's new vectors (theta and local weights), with the same theta in every peer. Raises: MachineError if
    memory is short."""
    vectors = SharedVectors.create(values)
    add_noise(vectors.theta, vectors.theta, (0,))
    return vectors


def memory(name: str) -> int:
    """Return the value, in bytes, of a line of this process's /proc/self/status: `VmRSS` is the memory taken now,
    `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


async def take_part(transport: HivemindTransport, identity: Identity, part: VectorPeerOptions) -> None:
    """Run a peer that takes part in the run until standard input ends."""
    memory_before = memory("VmRSS")
    log, storage = None, None
    if part.folder:
        log = LogFolder.open(part.folder / "log", part.settings.empty_log, block_bytes(run_config().codec))
        storage = FolderStorage(part.folder, available_memory)
    lines: asyncio.Queue[str] = asyncio.Queue()
    vectors = await asyncio.to_thread(create_vectors, part.values)
    worker = VectorWorker(vectors, part.pause, lines, 0.0 if part.steady else 0.2)
    config = run_config()
    workload = VectorWorkload(worker, config)

    def tell(header: Header, state_digest: bytes) -> None:
        say(
            "averaged",
            index=header.index,
            head=header.digest.hex(),
            state=state_digest.hex(),
            peers=len(header.roster),
            roster=[member.peer for member in header.roster],
            tokens=[member.tokens for member in header.roster],
            formats=[config.codec.contributions[member.format] for member in header.roster],
            began=workload.began_at,
            encoded=workload.encoded_at,
            agreed=workload.agreed_at,
            stepped=workload.stepped_at,
            cpu=workload.cpu,
            in_rounds=driver.rounds.costs.seconds,
            memory_before=memory_before,
            memory_peak=memory("VmHWM"),
        )

    def snapshot_is_here(snapshot: FrozenSnapshot) -> None:
        say("restored" if part.fetches else "frozen", index=snapshot.index)
        if part.fetches:
            driver.leave(at_once=True)

    driver = Driver(
        *(identity, transport, workload, part.settings, await workload.state_digest()),
        log=log,
        storage=storage,
        votes=VotesFile(part.votes) if part.votes else None,
        on_entry=tell,
        on_snapshot=snapshot_is_here,
        format=None if part.contribution_format is None else config.codec.number_of(part.contribution_format),
    )
    reading = asyncio.create_task(read_lines(lines, driver.leave))
    await driver.run()
    reading.cancel()


def run_config() -> RunConfig:
    """Return the configuration of demo.toml with more outer steps than any benchmark takes, and all thinner formats."""
    config = RunConfig.from_toml(Path(opendiloco.__file__).with_name("demo.toml"))
    formats = {"contributions": ["int8", "e2m1", "sparse"]}
    return config.changed({"outer_steps": OUTER_STEPS, "codec": formats})


async def follow(transport: HivemindTransport, part: VectorPeerOptions) -> None:
    """Fetch the state and follow the log, without training, until standard input ends."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    ended = asyncio.Event()
    reading = asyncio.create_task(read_lines(lines, ended.set))
    state = LocalState(np.zeros(part.values, np.float32), run_config())
    following = Following(transport, state, part.settings)
    await following.begin()
    say("restored", index=following.log.position.index)
    while not ended.is_set():
        if applied := await following.advance():
            say("followed", index=applied[0].index)
        else:
            await asyncio.sleep(FOLLOWING_PAUSE)
    reading.cancel()


async def run_peer(part: VectorPeerOptions) -> None:
    identity = Identity.load_or_create(part.identity_file) if part.identity_file else Identity.generate()
    contacts = (part.contact,) if part.contact else ()
    transport = await TalkingTransport.create(identity, contacts, (part.listen,), local=True)
    transport.cap(Caps.of_megabits(part.upload_limit, part.download_limit))
    try:
        say("listening", address=transport.addresses[0], peer=identity.peer_id, memory=memory_taken(os.getpid()))
        await (follow(transport, part) if part.follows else take_part(transport, identity, part))
    finally:
        await transport.close()


@click.command(help=__doc__)
@click.option("--values", type=int, required=True)
@click.option("--peers", type=int, required=True, help="Number of peers before the first round.")
@click.option("--contact", help="Address of a running peer.")
@click.option("--listen", default="/ip4/127.0.0.1/tcp/0", show_default=True)
@click.option("--identity", "identity_file", type=click.Path(dir_okay=False, path_type=Path), help="Its key file.")
@click.option("--pause", type=float, help="Seconds of training.")
@click.option("--snapshot-every", default=8, show_default=True, help="Entries from one snapshot to the next.")
@click.option("--fetches", is_flag=True, help="Only fetch the state.")
@click.option("--follows", is_flag=True, help="Only follow the log.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For the log, and for snapshots.")
@click.option("--votes", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A folder for its votes.")
@click.option("--steady", is_flag=True, help="Training takes exactly --pause; else up to a fifth more or less.")
@click.option("--usual-timing", is_flag=True, help="Use a manifest's timing instead of one for benchmarks.")
@join_option("upload_limit")
@join_option("download_limit")
@join_option("contribution_format")
def main(**options: Any) -> None:
    asyncio.run(run_peer(VectorPeerOptions(**options)))


if __name__ == "__main__":
    main()
