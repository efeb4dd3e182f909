"""Joining over real libp2p: a snapshot from several donors at once, one of which dies or lies; a joiner that is killed.

Two or three donors in this process, and what dies in another, have made a few entries and go no further.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.processes import PeerProcess, gone
from peers.driver.driver import Driver
from peers.network.daemon import sweep_sockets
from peers.network.transport import HivemindTransport
from peers.transfer.download import RANGES
from peers.transfer.storage import FolderStorage, Storage
from peers.values.identity import Identity
from peers.values.wire import Buffer
from tests.swarm.joining_peer import (
    CHUNKS,
    LOCAL,
    MeddlingTransport,
    WatchedTransport,
    rests,
    still_driver,
)

pytestmark = pytest.mark.swarm
PROGRAM = "tests.swarm.joining_peer"
DEADLINE = 240.0


class LyingTransport(MeddlingTransport):
    """What it gives is not what its digests say."""

    async def meddled(self, data: Buffer) -> Buffer:
        lie = bytearray(data)
        lie[len(lie) // 2] ^= 1
        return lie


@dataclass
class Volunteer:
    driver: Driver
    transport: HivemindTransport
    running: asyncio.Task[None]

    @property
    def id(self) -> str:
        return self.driver.peer.me

    async def until_it_trains(self) -> bytes:
        """The digest of its state after the last entry."""
        try:
            async with asyncio.timeout(DEADLINE):
                await self.driver.until(rests)
        except TimeoutError:
            pytest.fail(f"after {DEADLINE} s it is {self.driver.peer.state} at {self.driver.peer.log.position}")
        return self.driver.peer.state_digest

    async def leave(self) -> None:
        self.driver.leave()
        async with asyncio.timeout(DEADLINE):
            await self.running


class Swarm:
    def __init__(self, bootstrap: HivemindTransport, folder: Path) -> None:
        self.contact = bootstrap.addresses[0]
        self.volunteers: list[Volunteer] = []
        self.processes: list[PeerProcess] = []
        self.daemons: set[int] = set()
        self._folder = folder

    async def join(
        self, kind: type[HivemindTransport] = HivemindTransport, storage: Storage | None = None
    ) -> Volunteer:
        identity = Identity.generate()
        transport = await kind.create(identity, [self.contact], LOCAL)
        driver = still_driver(identity, transport, storage)
        volunteer = Volunteer(driver, transport, asyncio.create_task(driver.run()))
        self.volunteers.append(volunteer)
        return volunteer

    async def start(self, name: str, *arguments: object) -> tuple[PeerProcess, str]:
        """A peer in a process of its own, and its id."""
        identity = self._folder / f"{name}.pem"
        log = self._folder / f"{name}.log"
        process = await PeerProcess.start([PROGRAM, "--identity", identity, "--contact", self.contact, *arguments], log)
        self.processes.append(process)
        listening = await process.event("listening", DEADLINE)
        self.daemons |= process.children()
        return process, listening["peer"]

    async def end(self) -> None:
        for volunteer in self.volunteers:
            volunteer.running.cancel()
            await asyncio.gather(volunteer.running, return_exceptions=True)
            await volunteer.transport.close()
        await asyncio.gather(*(process.end() for process in self.processes))
        assert not await gone(self.daemons, DEADLINE), "daemons outlive their peers"
        sweep_sockets()


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[Swarm]:
    bootstrap = await HivemindTransport.create(Identity.generate(), (), LOCAL)
    swarm = Swarm(bootstrap, folder)
    try:
        yield swarm
    finally:
        await swarm.end()
        await bootstrap.close()


async def agreed(volunteers: list[Volunteer]) -> bytes:
    """The digest that all have after the last entry."""
    (digest,) = {await one.until_it_trains() for one in volunteers}
    return digest


def watched(joiner: Volunteer) -> WatchedTransport:
    assert isinstance(joiner.transport, WatchedTransport)
    return joiner.transport


@pytest.mark.thorough
def test_joiners_one_after_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            donors = await asyncio.gather(*(run.join() for _ in range(3)))
            digest = await agreed(donors)
            await one_fetches_from_all_at_once(run, digest, donors)
            await one_is_killed_and_fetches_only_the_rest_when_it_is_back(run, digest, tmp_path / "downloads")
            await one_avoids_a_donor_that_lies(run, digest, donors)

    asyncio.run(scenario())


async def one_fetches_from_all_at_once(run: Swarm, digest: bytes, donors: list[Volunteer]) -> None:
    joiner = await run.join(WatchedTransport)
    transport = watched(joiner)

    async def wait_for_the_others(donor: str, chunk: int) -> None:
        await transport.until(lambda: len(transport.given) == len(donors))

    transport.after_each = wait_for_the_others
    assert await joiner.until_it_trains() == digest
    assert set(transport.given) == {donor.id for donor in donors}
    assert transport.given.total() >= CHUNKS
    await joiner.leave()


async def one_is_killed_and_fetches_only_the_rest_when_it_is_back(run: Swarm, digest: bytes, downloads: Path) -> None:
    downloads.mkdir()
    process, _ = await run.start("joiner", "--downloads", downloads, "--chunks", CHUNKS // 3)
    first, rest = set[int](), set[int]()
    try:
        async with asyncio.timeout(DEADLINE):
            while event := await process.next_event():
                first.add(event["chunk"])
    except TimeoutError:
        pytest.fail(f"after {DEADLINE} s it is not dead: {process.last_words()}")
    joiner = await run.join(WatchedTransport, FolderStorage(downloads, lambda: 1 << 40))

    async def remember(donor: str, chunk: int) -> None:
        rest.add(chunk)

    watched(joiner).after_each = remember
    assert await joiner.until_it_trains() == digest
    assert len(first) >= CHUNKS // 3
    assert rest == set(range(CHUNKS)) - first
    assert rest
    assert list(downloads.iterdir()) == [], "nothing is left behind"
    await joiner.leave()


async def one_avoids_a_donor_that_lies(run: Swarm, digest: bytes, donors: list[Volunteer]) -> None:
    liar = await run.join(LyingTransport)
    assert await liar.until_it_trains() == digest
    joiner = await run.join(WatchedTransport)
    transport = watched(joiner)

    async def wait_for_the_lie(donor: str) -> None:
        if donor != liar.id:
            await transport.until(lambda: transport.given[liar.id] > 0)

    transport.before_each = wait_for_the_lie
    assert await joiner.until_it_trains() == digest
    assert 1 <= transport.asked[liar.id] <= RANGES
    assert sum(transport.given[donor.id] for donor in donors) >= CHUNKS


@pytest.mark.thorough
def test_a_donor_that_is_killed_while_it_gives_is_replaced_by_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            (process, mortal), *donors = await asyncio.gather(run.start("mortal"), run.join(), run.join())
            await process.event("training", DEADLINE)
            digest = await agreed(donors)
            process.tell("die")
            await process.event("mortal", DEADLINE)
            joiner = await run.join(WatchedTransport)
            transport = watched(joiner)

            async def wait_for_the_death(donor: str) -> None:
                if donor != mortal:
                    await transport.until(lambda: mortal in transport.failed)

            transport.before_each = wait_for_the_death
            assert await joiner.until_it_trains() == digest
            assert 1 <= transport.asked[mortal] <= RANGES
            assert set(transport.given) == {donor.id for donor in donors}
            async with asyncio.timeout(DEADLINE):
                await process.ended()

    asyncio.run(scenario())
