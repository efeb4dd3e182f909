"""Several peers over real libp2p in one event loop: rounds, a death, a mid-run join, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from peers.driver.driver import Driver
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.messages.rounds import Round, RoundName
from peers.network.transport import HivemindTransport
from peers.protocol.effects import Effect, OpenRound, SendChunk
from peers.protocol.events import ChunkSent, Event
from peers.values.identity import Identity
from peers.values.wire import digest_of
from tests.swarm.vector_workload import UnhurriedWorkload, VectorWorkload

pytestmark = pytest.mark.swarm
LOCAL = ("/ip4/127.0.0.1/tcp/0",)
DEADLINE = 240.0
TIMING = Timing(
    heartbeat=0.5, heartbeat_expiry=3.0, grace=5.0, round_timeout=10.0, partition_grace=20.0, resend=0.2, leave=5.0
)
SETTINGS = RunSettings("driver-test", digest_of(b"manifest"), 4, 8, 8, minimum_peers=3, timing=TIMING)


@dataclass
class Volunteer:
    driver: Driver
    transport: HivemindTransport
    workload: VectorWorkload
    running: asyncio.Task[None]

    @property
    def index(self) -> int:
        return self.driver.peer.log.position.index

    @property
    def rests(self) -> bool:
        """Whether it does nothing more, once no peer may train: one that has trained waits for the others."""
        return self.driver.peer.state in ("training", "ready")

    async def die(self) -> None:
        """Without a word, as a killed process does."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.close()


class Swarm:
    def __init__(self, bootstrap: HivemindTransport, settings: RunSettings) -> None:
        self.bootstrap = bootstrap
        self.settings = settings
        self.volunteers: list[Volunteer] = []

    async def join(self) -> Volunteer:
        identity = Identity.generate()
        transport = await HivemindTransport.create(identity, self.bootstrap.addresses, LOCAL)
        workload = UnhurriedWorkload()
        driver = Driver(identity, transport, workload, self.settings, workload.state.digest())
        volunteer = Volunteer(driver, transport, workload, asyncio.create_task(driver.run()))
        self.volunteers.append(volunteer)
        return volunteer


@asynccontextmanager
async def swarm(minimum_peers: int = SETTINGS.minimum_peers) -> AsyncIterator[Swarm]:
    bootstrap = await HivemindTransport.create(Identity.generate(), (), LOCAL)
    swarm = Swarm(bootstrap, replace(SETTINGS, minimum_peers=minimum_peers))
    try:
        yield swarm
    finally:
        for volunteer in swarm.volunteers:
            await volunteer.die()
        await bootstrap.close()


async def wait_until(volunteers: list[Volunteer], condition: Callable[[], bool], reason: str) -> None:
    """Look again whenever something happens to the first of the volunteers (a tick, at the least)."""
    try:
        async with asyncio.timeout(DEADLINE):
            await volunteers[0].driver.until(lambda _: condition())
    except TimeoutError:
        pytest.fail(f"after {DEADLINE} s still waiting for {reason}")


def digests_by_position(volunteers: list[Volunteer]) -> set[tuple[int, bytes, bytes]]:
    return {(one.index, one.driver.peer.log.position.head, one.workload.state.digest()) for one in volunteers}


def test_peers_agree_through_a_death_and_a_join() -> None:
    async def scenario() -> None:
        async with swarm() as run:
            first, second, third = [await run.join() for _ in range(3)]
            await wait_until(run.volunteers, lambda: min(one.index for one in run.volunteers) >= 3, "three outer steps")
            await third.die()
            at_death = first.index
            newcomer = await run.join()
            alive = [first, second, newcomer]
            await wait_until(
                alive,
                lambda: newcomer.driver.peer.me in first.driver.peer.log.roster and first.index >= at_death + 3,
                "the newcomer in the roster",
            )
            for one in alive:
                one.workload.may_train.clear()
            await wait_until(
                alive,
                lambda: len({one.index for one in alive}) == 1 and all(one.rests for one in alive),
                "all to settle at one position",
            )
            assert len(digests_by_position(alive)) == 1

    asyncio.run(scenario())


@pytest.mark.thorough
def test_one_leaves_and_the_others_go_on() -> None:
    async def scenario() -> None:
        async with swarm() as run:
            volunteers = [await run.join() for _ in range(3)]
            await wait_until(volunteers, lambda: min(one.index for one in volunteers) >= 2, "two outer steps")
            leaver, *others = volunteers
            leaver.driver.leave()
            async with asyncio.timeout(DEADLINE):
                await leaver.running
            assert leaver.driver.peer.state == "left"
            reached = max(one.index for one in others)
            await wait_until(
                others, lambda: min(one.index for one in others) >= reached + 2, "outer steps without the leaver"
            )
            assert leaver.driver.peer.me not in others[0].driver.peer.log.roster

    asyncio.run(scenario())


# A death in the middle of a round -------------------------------------------------------------------------------
class DiesAfterItsFirstChunk:
    """Lets a volunteer send one of its own chunks of the next round of three that it opens; then it is dead.

    On a busy machine a round may begin with two, and without its victim too few would be left of that. Or all links but
    the victim's seem slow, so that it alone reduces, and sends none of its own chunks."""

    def __init__(self, volunteer: Volunteer) -> None:
        self.volunteer = volunteer
        self.round: Round | None = None
        self.confirmed = asyncio.Event()
        driver = volunteer.driver
        self._carry_out, self._handle = driver._effects.carry_out, driver.handle
        self._chosen: SendChunk | None = None
        driver._effects.carry_out = self.carry_out  # type: ignore[method-assign]
        driver.handle = self.handle  # type: ignore[method-assign]

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case OpenRound(round) if len(round.roster) == 3 and self._others_reduce(round):
                self.round = self.round or round
            case SendChunk() if self.round is not None and effect.round_name == self.round.name:
                if self._chosen is not None or effect.reduced:
                    return
                self._chosen = effect
        self._carry_out(effect)

    def handle(self, event: Event) -> None:
        if self._chosen and isinstance(event, ChunkSent) and event.round_name == self._chosen.round_name:
            self.confirmed.set()
        self._handle(event)

    def _others_reduce(self, round: Round) -> bool:
        me = self.volunteer.driver.peer.me
        return any(share.chunks for share in round.shares if share.member.peer != me)

    async def dead(self) -> Round:
        """The round in which it died."""
        async with asyncio.timeout(DEADLINE):
            await self.confirmed.wait()
        await self.volunteer.transport.close()  # first, so that no other word is heard
        await self.volunteer.die()
        assert self.round is not None
        return self.round


def rounds_opened_by(volunteer: Volunteer) -> list[RoundName]:
    """The rounds that it takes part in from now on."""
    names = list[RoundName]()
    effects = volunteer.driver._effects
    carry_out = effects.carry_out

    def remember(effect: Effect) -> None:
        if isinstance(effect, OpenRound):
            names.append(effect.round.name)
        carry_out(effect)

    effects.carry_out = remember  # type: ignore[method-assign]
    return names


def entries_of(volunteer: Volunteer) -> dict[int, tuple[Header, bytes]]:
    """The entries that it applies from now on, each with the state digest after it."""
    entries = dict[int, tuple[Header, bytes]]()

    def remember(header: Header, state_digest: bytes) -> None:
        entries[header.index] = header, state_digest

    volunteer.driver.replication._on_entry = remember
    return entries


@pytest.mark.thorough
@pytest.mark.parametrize("place", [0, 2], ids=["the leader", "another"])
def test_a_death_in_the_middle_of_a_round_costs_no_restart(place: int) -> None:
    """The entry commits as one round, with what had arrived of the dead member's blocks (R3, R4, R14)."""

    async def scenario() -> None:
        async with swarm() as run:
            volunteers = [await run.join() for _ in range(3)]
            rounds = [rounds_opened_by(one) for one in volunteers]
            peer = volunteers[0].driver.peer
            await wait_until(
                volunteers,
                lambda: min(one.index for one in volunteers) >= 2 and len(peer.log.roster) == 3,
                "two outer steps, and a roster of three",
            )
            victim_id = peer.log.roster[place]
            (victim,) = (one for one in volunteers if one.driver.peer.me == victim_id)
            others = [one for one in volunteers if one is not victim]
            entries = [entries_of(one) for one in others]
            round = await DiesAfterItsFirstChunk(victim).dead()
            index = round.name.position.index
            await wait_until(others, lambda: all(index + 1 in seen for seen in entries), "the entry and one more")
            opened = [names for one, names in zip(volunteers, rounds, strict=True) if one is not victim]
            for names in opened:  # what came before the death is not its doing
                since = [name for name in names[names.index(round.name) :] if name.position.index == index]
                assert since == [round.name], "another round was begun"
            assert entries[0][index] == entries[1][index]
            assert entries[0][index + 1] == entries[1][index + 1]
            header, _ = entries[0][index]
            counted = {member.peer: member.tokens for member in header.roster}
            trained = {member.peer: member.tokens for member in round.roster}
            assert counted == trained | {victim_id: trained[victim_id] // round.chunks}, "one chunk of its had arrived"

    asyncio.run(scenario())
