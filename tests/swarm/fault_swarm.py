"""A swarm of real processes, each of which can be struck at a named moment, seen from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.processes import Event, PeerProcess, gone
from peers.network.daemon import sweep_sockets
from tests.swarm.fault_peer import PEERS, Moment
from tests.swarm.networks import Network, Place

PROGRAM = "tests.swarm.fault_peer"
PLACES = PEERS + 1  # one for the bootstrap node
DEADLINE = 240.0  # seconds for whatever is waited for; 1 to 10 on an idle machine
LOOK = 0.02  # seconds


@dataclass(frozen=True)
class Entry:
    """What a peer says of an entry that it has applied. Members are those whose work counts in it."""

    head: str
    state: str
    members: tuple[str, ...]
    leader: str
    payload: str = ""
    """In base64, where its peer says it."""


class Volunteer:
    """A peer, in one process or, when that is killed, in another with the same identity.

    Each fault is a context manager: entered once the process has struck itself, and left when the peer is back.
    """

    def __init__(
        self,
        place: Place,
        network: Network | None,
        log: Path,
        news: asyncio.Event,
        program: Sequence[object] = (PROGRAM,),
    ) -> None:
        self.place = place
        self.network = network
        self.applied: dict[int, Entry] = {}
        self.struck_at: int | None = None  # the entry that the round was about
        self.is_armed = False
        self.daemons: set[int] = set()
        self.id = ""
        self._log = log
        self._news = news
        self._program = program
        self._process: PeerProcess | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, contact: Sequence[object]) -> str:
        """Returns its address."""
        self._contact = contact
        self.applied.clear()
        named = ("--listen", self.place.listen, "--identity", self._log.with_suffix(".pem"))
        arguments = [*self._program, *named, *contact]
        self._process = await PeerProcess.start(arguments, self._log, self.place.prefix)
        listening = await self._process.event("listening", DEADLINE)
        self.id = listening["peer"]
        self.daemons |= self._process.children()
        self._listening = asyncio.create_task(self._listen(self._process))
        return str(listening["address"])

    def arm(self, moment: Moment, number: signal.Signals) -> None:
        self.struck_at, self.is_armed = None, True
        self._running.tell(f"{moment} {number.name}")

    def disarm(self) -> None:
        """It is armed until it says that it is not, or has struck."""
        self._running.tell("never")

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()
        if self._listening is not None:
            await self._listening

    def last_words(self) -> str:
        return f"at {max(self.applied, default=None)}, {self._running.last_words()}"

    # Faults ---------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def killed(self) -> AsyncIterator[None]:
        await self.end()
        yield
        await self.start(self._contact)

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Its daemon still runs: what others send it is accepted, and not answered."""
        await self._has_stopped()
        try:
            yield
        finally:
            self._running.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """As the machine is when its lid is closed."""
        async with self.stopped():
            daemons = self._running.children()
            try:
                signal_all(daemons, signal.SIGSTOP)
                yield
            finally:
                signal_all(daemons, signal.SIGCONT)

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        """Cut its cable: it runs, and hears no other peer."""
        assert self.network is not None
        async with self.stopped():
            self.network.cut(self.place)
        try:
            yield
        finally:
            self.network.mend(self.place)

    async def _has_stopped(self) -> None:
        """The process says that it is struck a moment before it is."""
        stat = Path(f"/proc/{self._running.process_id}/stat")
        async with asyncio.timeout(DEADLINE):
            while stat.read_text(errors="replace").rpartition(")")[2].split()[0] != "T":
                await asyncio.sleep(LOOK)

    @property
    def _running(self) -> PeerProcess:
        assert self._process is not None
        return self._process

    async def _listen(self, process: PeerProcess) -> None:
        while event := await process.next_event():
            self.hear(event)
            self._news.set()

    def hear(self, event: Event) -> None:
        """Take in what the process says."""
        if event["event"] == "applied":
            said = event["head"], event["state"], tuple(event["members"]), event["leader"]
            self.applied[event["index"]] = Entry(*said, event.get("payload", ""))
        elif event["event"] == "struck":
            self.struck_at, self.is_armed = event["index"], False
        elif event["event"] == "disarmed":
            self.is_armed = False


def signal_all(processes: Collection[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


class Swarm:
    """`PEERS` volunteers and a bootstrap node, each in a place of its own where there is a network."""

    def __init__(self, network: Network | None, folder: Path) -> None:
        self._news = asyncio.Event()
        places = network.places if network else [Place()] * PLACES
        self._bootstrap, *self.volunteers = (
            Volunteer(place, network, folder / f"{number}.log", self._news) for number, place in enumerate(places)
        )

    async def start(self) -> None:
        address = await self._bootstrap.start(())
        async with asyncio.TaskGroup() as starting:
            for one in self.volunteers:
                starting.create_task(one.start(("--contact", address)))
        await self.until(lambda: bool(self.whole(0)), "the first entry of all")

    async def end(self) -> None:
        started = [self._bootstrap, *self.volunteers]
        await asyncio.gather(*(one.end() for one in started))
        left = await gone(set[int]().union(*(one.daemons for one in started)), DEADLINE)
        sweep_sockets()  # of those who were killed
        assert not left, "daemons outlive their peers"

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again at each event of a peer."""
        try:
            async with asyncio.timeout(DEADLINE):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            why = f"after {DEADLINE:.0f} s still waiting for {what}"
            pytest.fail("\n".join([why, *(one.last_words() for one in self.volunteers)]))

    @property
    def index(self) -> int:
        """The last entry that anybody has."""
        return max(max(one.applied, default=-1) for one in self.volunteers)

    def whole(self, since: int) -> list[Entry]:
        """Return the entries from the index `since` on that all have applied, with the work of all in them."""
        first, *others = (one.applied for one in self.volunteers)
        return [
            entry
            for index, entry in first.items()
            if index >= since
            and len(entry.members) == len(self.volunteers)
            and all(other.get(index) == entry for other in others)
        ]

    def leader_and_members(self) -> list[Volunteer]:
        """Return the peer that led the last entry of all, which goes on leading (R1), and then the others."""
        leader = self.whole(0)[-1].leader
        return sorted(self.volunteers, key=lambda one: one.id != leader)


def divergences(volunteers: Sequence[Volunteer], since: int) -> dict[int, set[Entry]]:
    """What not all of them hold alike, by index."""
    said: dict[int, set[Entry]] = {}
    for one in volunteers:
        for index, entry in one.applied.items():
            said.setdefault(index, set()).add(entry)
    return {index: entries for index, entries in said.items() if index >= since and len(entries) > 1}
