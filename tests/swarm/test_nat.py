"""Volunteers behind routers of each kind, and nobody opens a port: they become one swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.processes import PeerProcess
from peers.network.own_network import everywhere
from peers.values.wire import Reach
from tests.swarm.routers import Internet, Kind, Machine

pytestmark = pytest.mark.swarm
PROGRAM = "tests.swarm.nat_peer"
DEADLINE = 240.0  # seconds until all are in a roster
WEB_PORT, WEB_DATA_PORT = 443, 80
LAPTOP = ("--peers", 2, "--pause", 1.0)  # the others go on without it, and not too far
ENTRIES = 3  # that all apply alike


class Volunteer:
    """A peer, and what it says."""

    def __init__(self, machine: Machine, news: asyncio.Event) -> None:
        self.machine = machine
        self.entries: dict[int, tuple[str, str]] = {}
        self.members: dict[int, set[str]] = {}
        self.reach: dict[str, str] = {}
        self.averaged = 0
        self._news = news
        self._listening: asyncio.Task[None] | None = None

    async def start(self, contact: Sequence[str], options: Sequence[object], log: Path) -> None:
        arguments = [PROGRAM, *options]
        for address in everywhere(0):
            arguments += ["--listen", address]
        for address in contact:
            arguments += ["--contact", address]
        self._process = await PeerProcess.start(arguments, log, self.machine.prefix)
        self.id = (await self._process.event("listening", DEADLINE))["peer"]
        self._listening = asyncio.create_task(self._listen())

    async def end(self) -> None:
        await self._process.end()
        if self._listening is not None:  # else it has not come so far
            await self._listening

    def last_words(self) -> str:
        return f"{self.machine.kind} at {max(self.entries, default=None)}, {self.reach}; {self._process.last_words()}"

    async def _listen(self) -> None:
        while event := await self._process.next_event():
            if event["event"] == "applied":
                self.entries[event["index"]] = (event["head"], event["state"])
                self.members[event["index"]] = set(event["members"])
                self.reach, self.averaged = event["reach"], event["averaged"]
            self._news.set()


class Swarm:
    def __init__(self, volunteers: list[Volunteer], news: asyncio.Event) -> None:
        self.volunteers = volunteers
        self._news = news

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            why = f"after {DEADLINE:.0f} s still waiting for {what}"
            pytest.fail("\n".join([why, *(one.last_words() for one in self.volunteers)]))

    def whole(self, since: int = 0) -> list[int]:
        """Return the entries that all have applied alike, with the work of all in them."""
        everybody = {one.id for one in self.volunteers}
        first, *others = self.volunteers
        return [
            index
            for index, entry in first.entries.items()
            if index >= since
            and first.members[index] == everybody
            and all(other.entries.get(index) == entry for other in others)
        ]

    async def trains_as_one(self) -> None:
        await self.until(lambda: bool(self.whole()), "the first entry of all")
        await self.until(lambda: len(self.whole()) >= ENTRIES, f"{ENTRIES} entries of all")

    async def goes_on_without(self, one: Volunteer) -> int:
        """Wait for an entry of the others alone; returns its index."""
        others = [other for other in self.volunteers if other is not one]
        newest = max(max(other.entries) for other in others)
        alone = {other.id for other in others}
        condition = lambda: any(  # noqa: E731
            index > newest and members == alone for index, members in others[0].members.items()
        )
        await self.until(condition, "an entry without one")
        return max(index for index, members in others[0].members.items() if members == alone)

    async def reaches(self, one: int, other: int, way: Reach) -> None:
        """Links are made while rounds go on."""
        first, second = self.volunteers[one], self.volunteers[other]
        await self.until(lambda: first.reach.get(second.id) == way, f"a {way} link")
        await self.until(lambda: second.reach.get(first.id) == way, f"a {way} link from the other side")


@asynccontextmanager
async def swarm(
    net: Internet, kinds: Sequence[Kind], folder: Path, *options: object, data_port: int = 0
) -> AsyncIterator[Swarm]:
    """Volunteers on machines of these kinds, and a bootstrap node with a public address. By default all train together,
    or nobody does."""
    node, news = net.machine(Kind.OPEN), asyncio.Event()
    volunteers = [Volunteer(net.machine(kind), news) for kind in kinds]
    listen = [f"--listen={address}" for address in everywhere(WEB_PORT)]
    bootstrap = await PeerProcess.start(
        [PROGRAM, *listen, "--data-port", data_port], folder / "bootstrap.log", node.prefix
    )
    started: list[Volunteer] = []
    try:
        addresses = (await bootstrap.event("listening", DEADLINE))["addresses"]
        public = [one for one in addresses if f"/{node.address}/" in one or f"/{node.address6}/" in one]
        async with asyncio.TaskGroup() as starting:
            for number, one in enumerate(volunteers):
                starting.create_task(one.start(public, options or ("--peers", len(kinds)), folder / f"{number}.log"))
                started.append(one)
        yield Swarm(volunteers, news)
    finally:
        await asyncio.gather(*(one.end() for one in started))
        await bootstrap.end()


@pytest.mark.parametrize(
    ("kinds", "way"),
    [
        ((Kind.CONE, Kind.CONE), Reach.PUNCHED),
        pytest.param((Kind.SYMMETRIC, Kind.SYMMETRIC), Reach.RELAYED, marks=pytest.mark.thorough),
        pytest.param((Kind.CGNAT, Kind.CONE), Reach.RELAYED, marks=pytest.mark.thorough),
        pytest.param((Kind.IPV6, Kind.CONE), Reach.RELAYED, marks=pytest.mark.thorough),
    ],
)
def test_two_volunteers_behind_routers_train_as_one(
    net: Internet, tmp_path: Path, kinds: tuple[Kind, Kind], way: Reach
) -> None:
    async def story() -> None:
        async with swarm(net, kinds, tmp_path) as together:
            await together.trains_as_one()
            await together.reaches(0, 1, way)

    asyncio.run(story())


@pytest.mark.thorough
def test_volunteers_behind_a_firewall_that_knows_only_the_web(net: Internet, tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(net, (Kind.WEB, Kind.WEB), tmp_path, data_port=WEB_DATA_PORT) as together:
            await together.trains_as_one()
            await together.reaches(0, 1, Reach.RELAYED)

    asyncio.run(story())


@pytest.mark.thorough
def test_an_open_volunteer_reduces_for_those_behind_routers(net: Internet, tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(net, (Kind.SYMMETRIC, Kind.SYMMETRIC, Kind.OPEN), tmp_path) as together:
            await together.trains_as_one()
            await together.reaches(0, 2, Reach.OPEN)
            await together.reaches(1, 2, Reach.OPEN)
            one, other, reducer = together.volunteers
            known = max(reducer.entries)
            await together.until(lambda: bool(together.whole(known + 2)), "entries when all is known")
            before, last = (one.averaged, other.averaged), max(reducer.entries)
            await together.until(lambda: bool(together.whole(last + 2)), "more entries")
            assert (one.averaged, other.averaged) == before
            assert reducer.averaged > 0

    asyncio.run(story())


@pytest.mark.thorough
def test_a_volunteer_that_moves_to_another_network_comes_back(net: Internet, tmp_path: Path) -> None:
    """A laptop is carried from one home to another. Its process is not told."""

    async def story() -> None:
        async with swarm(net, (Kind.CONE, Kind.CONE, Kind.OPEN), tmp_path, *LAPTOP) as together:
            await together.trains_as_one()
            laptop = together.volunteers[0]
            newest = max(laptop.entries)
            laptop.machine = net.move(laptop.machine, Kind.SYMMETRIC)
            await together.until(lambda: bool(together.whole(newest + 2)), "entries of all, from the new network")

    asyncio.run(story())


@pytest.mark.thorough
def test_a_volunteer_that_slept_comes_back(net: Internet, tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(net, (Kind.CONE, Kind.CONE, Kind.OPEN), tmp_path, *LAPTOP) as together:
            await together.trains_as_one()
            laptop = together.volunteers[0]
            net.suspend(laptop.machine)
            try:
                index = await together.goes_on_without(laptop)
            finally:
                net.wake(laptop.machine)
            await together.until(lambda: bool(together.whole(index)), "entries of all, after its sleep")

    asyncio.run(story())
