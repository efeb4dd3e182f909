"""A peer of a run that stands still after a few entries, so that others can join: for test_joining.

As a process, `python -m tests.swarm.joining_peer`, it kills itself: while it gives a snapshot, once a line on its
standard input has told it to, or while it fetches one. It says when it trains, and of every chunk that it has fetched
which it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import say
from peers.driver.driver import Driver
from peers.log.settings import RunSettings, Timing
from peers.network.channel import PeerUnreachableError, Serve
from peers.network.throttle import Caps
from peers.network.transport import HivemindTransport
from peers.protocol.peer import Peer
from peers.protocol.states import State
from peers.transfer.snapshots import SNAPSHOT, SnapshotRequest
from peers.transfer.storage import FolderStorage, Storage
from peers.values.chunks import StateChunking
from peers.values.identity import Identity
from peers.values.wire import Buffer, digest_of, unpack
from peers.values.workload import InnerLoop, OnCaptured, Progress, Trained, captures_nothing
from tests.swarm.vector_workload import VectorWorkload

LOCAL = ("/ip4/127.0.0.1/tcp/0",)
VALUES = 1 << 22
CHUNKS = StateChunking(8 * VALUES).count
TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=5.0, grace=10.0, round_timeout=20.0, partition_grace=100.0, resend=0.2, leave=5.0
)
FROZEN, END = 2, 3  # entries in the snapshot, and in all
SETTINGS = RunSettings(
    "joining-test", digest_of(b"manifest"), 4, 8, 8, minimum_peers=3, timing=TIMING, snapshot_every=FROZEN
)
DYING_RATE = 1e6  # bytes a second, of who is to die while it sends: a chunk takes a second
DYING_SECONDS = 0.3
TURNS = 100  # of the event loop, in which what has arrived is written, and nothing else happens


class StillWorkload(VectorWorkload):
    """Goes on from the frozen state when that is frozen, and does not end the training after the last entry."""

    def __init__(self) -> None:
        super().__init__(VALUES)
        self.frozen = asyncio.Event()

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        if work.index >= FROZEN:
            await self.frozen.wait()
        if work.index >= END:
            await asyncio.Event().wait()
        return await super().run_inner_loop(work, on_progress, on_captured)


def still_driver(identity: Identity, transport: HivemindTransport, storage: Storage | None = None) -> Driver:
    workload = StillWorkload()
    return Driver(
        *(identity, transport, workload, SETTINGS, workload.state.digest()),
        storage=storage,
        on_snapshot=lambda snapshot: workload.frozen.set(),
    )


def rests(peer: Peer) -> bool:
    """Return whether it stands at the last entry. One that was late for that has its work already, and is ready."""
    is_there = peer.log.position.index == END and peer.is_settled
    return is_there and peer.state in (State.TRAINING, State.READY)


def chunk_of(name: str, header: bytes) -> int | None:
    """The chunk of a snapshot that a pull asks for, if it does. States here have so few that it is one at a time."""
    if name != SNAPSHOT or (request := unpack(SnapshotRequest, header)).head is None:
        return None
    assert request.last == request.first + 1
    return request.first


class WatchedTransport(HivemindTransport):
    """Remembers of whom it has asked chunks, who gave some, and who failed to."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked, self.given = Counter[str](), Counter[str]()
        self.before_each: Callable[[str], Any] | None = None
        self.after_each: Callable[[str, int], Any] | None = None
        self.failed: set[str] = set()
        self.changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        chunk = chunk_of(name, header)
        if chunk is None:
            return await super().pull(peer_id, name, header, max_bytes, timeout)
        self.asked[peer_id] += 1
        if self.before_each:
            await self.before_each(peer_id)
        try:
            answer = await super().pull(peer_id, name, header, max_bytes, timeout)
            self.given[peer_id] += 1
        except PeerUnreachableError:
            self.failed.add(peer_id)
            raise
        finally:
            async with self.changed:
                self.changed.notify_all()
        if self.after_each:
            await self.after_each(peer_id, chunk)
        return answer


class MeddlingTransport(HivemindTransport):
    """Does something with every chunk of a snapshot that it gives."""

    async def meddled(self, data: Buffer) -> Buffer:
        raise NotImplementedError

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        @asynccontextmanager
        async def meddle(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
            async with serve(sender, packed) as (answer, data):
                yield answer, data if chunk_of(name, packed) is None else await self.meddled(data)

        await super().on_pull(name, meddle if name == SNAPSHOT else serve, gives_way)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingTransport(MeddlingTransport):
    """Is dead before the first chunk is sent, once it is told to: one of the others may have to fetch the state, too,
    when what it trained at the beginning of the run was refused."""

    is_told = False

    async def meddled(self, data: Buffer) -> Buffer:
        if self.is_told:
            asyncio.get_running_loop().call_later(DYING_SECONDS, die)
        return data


async def give_and_die(identity: Identity, contact: str) -> None:
    transport = await DyingTransport.create(identity, [contact], LOCAL)

    def be_told() -> None:
        transport.is_told = True
        transport.cap(Caps(upload=DYING_RATE))
        say("mortal")

    await drive(still_driver(identity, transport), identity, transport, be_told)


async def fetch_and_die(identity: Identity, contact: str, downloads: Path, chunks: int) -> None:
    transport = await WatchedTransport.create(identity, [contact], LOCAL)

    dying = list[asyncio.Task[None]]()

    async def tell(donor: str, chunk: int) -> None:
        """Of so many chunks; no other ever arrives."""
        if transport.given.total() > chunks:
            await asyncio.Event().wait()
        say("fetched", chunk=chunk)
        if transport.given.total() == chunks:
            dying.append(asyncio.create_task(die_once_all_is_written()))

    async def die_once_all_is_written() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        die()

    transport.after_each = tell
    await drive(still_driver(identity, transport, FolderStorage(downloads, lambda: 1 << 40)), identity, transport)


async def drive(
    driver: Driver, identity: Identity, transport: HivemindTransport, be_told: Callable[[], None] = lambda: None
) -> None:
    """Run until standard input ends."""
    say("listening", peer=identity.peer_id)

    async def tell() -> None:
        await driver.until(rests)
        say("training", state=driver.peer.state_digest.hex())

    async def listen() -> None:
        while await asyncio.to_thread(sys.stdin.readline):
            be_told()
        driver.leave()

    others = [asyncio.create_task(tell()), asyncio.create_task(listen())]
    try:
        await driver.run()
    finally:
        for other in others:
            other.cancel()
        await transport.close()


@click.command(help=__doc__)
@click.option("--identity", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Kept here.")
@click.option("--contact", required=True, help="Address of the bootstrap node.")
@click.option("--downloads", type=click.Path(path_type=Path), help="It fetches a snapshot to this folder.")
@click.option("--chunks", type=int, default=0, help="So many of it, before it dies.")
def main(identity: Path, contact: str, downloads: Path | None, chunks: int) -> None:
    key = Identity.load_or_create(identity)
    asyncio.run(fetch_and_die(key, contact, downloads, chunks) if downloads else give_and_die(key, contact))


if __name__ == "__main__":
    main()
