"""Swarms of real drivers whose state is in several fragments, over real libp2p in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from opendiloco.config.overrides import Overrides
from opendiloco.storage.loading import resume
from peers.driver.driver import Driver
from peers.log.folder import ENTRIES, LogFolder, read_chain
from peers.log.header import UNKNOWN_STATE
from peers.network.transport import HivemindTransport
from peers.protocol.events import AmendmentSeen
from peers.transfer.following import Following
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from tests.swarm.test_driver import LOCAL, SETTINGS, Swarm, Volunteer, digests_by_position
from tests.swarm.vector_workload import VectorWorkload

pytestmark = pytest.mark.swarm
DEADLINE = 240.0
FRAGMENTS = 3
TRAINING_SECONDS = 0.1
NAMES = ("first", "second")
TIMING = replace(SETTINGS.timing, partition_grace=3.0)  # which peers that start anew wait for with each fragment
ORGANISER = Identity.generate()
STREAMING = replace(
    SETTINGS, fragments=FRAGMENTS, minimum_peers=2, snapshot_every=2, timing=TIMING, organiser=ORGANISER.peer_id
)


class UnhurriedWorkload(VectorWorkload):
    """Trains a while for each fragment: between two rounds others can fetch what they lack."""

    def __init__(self) -> None:
        super().__init__(fragments=FRAGMENTS)

    async def take_inner_steps(self) -> None:
        await asyncio.sleep(TRAINING_SECONDS)


class StreamingSwarm(Swarm):
    """Each volunteer averages its state in fragments, and keeps its log in a folder: `first`, `second` …"""

    def __init__(self, bootstrap: HivemindTransport, folder: Path) -> None:
        super().__init__(bootstrap, STREAMING)
        self._folder = folder
        self._identities: dict[str, Identity] = {}

    def log(self, name: str) -> LogFolder:
        return LogFolder.open(self._folder / name, STREAMING.empty_log, VectorWorkload().codec.byte_range(0, 1)[1])

    async def start(self, name: str) -> Volunteer:
        """A volunteer goes on from what is in its folder."""
        identity = self._identities.setdefault(name, Identity.generate())
        transport = await HivemindTransport.create(identity, self.bootstrap.addresses, LOCAL)
        workload, log = UnhurriedWorkload(), self.log(name)
        end = await resume(workload, log)
        kept = workload.state.digest(), log.lineage(end), log
        driver = Driver(identity, transport, workload, self.settings, *kept)
        volunteer = Volunteer(driver, transport, workload, asyncio.create_task(driver.run()))
        self.volunteers.append(volunteer)
        return volunteer


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[StreamingSwarm]:
    bootstrap = await HivemindTransport.create(Identity.generate(), (), LOCAL)
    swarm = StreamingSwarm(bootstrap, folder)
    try:
        yield swarm
    finally:
        for volunteer in swarm.volunteers:
            await volunteer.die()
        await bootstrap.close()


async def wait_until(volunteers: list[Volunteer], condition: Callable[[], bool], reason: str) -> None:
    """Look again whenever something happens to the first of the volunteers. Raises what has ended any of them."""

    def is_true() -> bool:
        for one in volunteers:
            if one.running.done():
                one.running.result()
        return condition()

    try:
        async with asyncio.timeout(DEADLINE):
            await volunteers[0].driver.until(lambda _: is_true())
    except TimeoutError:
        pytest.fail(f"after {DEADLINE} s still waiting for {reason}: {[shown(one) for one in volunteers]}")


def shown(one: Volunteer) -> str:
    """Where a volunteer is, and what it does."""
    peer = one.driver.peer
    rounds = {fragment: str(round.state) for fragment, round in peer.rounds.items()}
    return f"at {peer.log.position}, {peer.state}, {peer.trainer.state}, {peer.replica.state}, {rounds}"


async def past(volunteers: list[Volunteer], cycles: int) -> None:
    goal = max(one.index for one in volunteers) + cycles
    await wait_until(volunteers, lambda: min(one.index for one in volunteers) >= goal, f"{cycles} outer steps")


async def settle(volunteers: list[Volunteer]) -> None:
    """Let no peer begin to train again, and wait until all are at the end of one cycle. There they stay: fewer peers
    than a round needs have trained."""
    for one in volunteers:
        one.workload.may_train.clear()

    def have_settled() -> bool:
        trained = [one for one in volunteers if not one.workload.waits_to_train]
        at_end = all(one.driver.peer.is_at_cycles_end for one in volunteers)
        return at_end and len({one.index for one in volunteers}) == 1 and len(trained) < STREAMING.minimum_peers

    await wait_until(volunteers, have_settled, "all to settle at one position")
    assert len(digests_by_position(volunteers)) == 1


def test_peers_agree_through_a_death_and_a_join(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            first, second, third = [await run.start(name) for name in ("first", "second", "third")]
            await past(run.volunteers, 2)
            entries = first.driver.peer.lineage.entries
            places = {(header.index, header.fragment) for header in entries}
            assert places >= {(index, fragment) for index in range(2) for fragment in range(FRAGMENTS)}
            await third.die()
            newcomer = await run.start("newcomer")
            alive = [first, second, newcomer]
            me = newcomer.driver.peer.me
            await wait_until(alive, lambda: me in first.driver.peer.log.roster, "the newcomer in the roster")
            await past(alive, 1)
            await settle(alive)

    asyncio.run(scenario())


@pytest.mark.thorough
def test_a_run_goes_on_from_its_volunteers_disks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            before = [await run.start(name) for name in NAMES]
            await past(before, 2)
            await settle(before)
            reached, states = before[0].index, {one.workload.state.digest() for one in before}
            for one in before:
                await one.driver.replication.recorder.finish()  # until the last entry is on the disk
                await one.die()
            for name in NAMES:
                chain, problem = read_chain(tmp_path / name / ENTRIES, STREAMING.empty_log)
                assert (chain.end.position.index, problem) == (reached, None)
            again = [await run.start(name) for name in NAMES]
            assert {one.index for one in again} == {reached}
            assert {one.workload.state.digest() for one in again} == states
            await past(again, 1)
            await settle(again)

    asyncio.run(scenario())


def test_an_amendment_is_in_force_for_all_fragments_and_after_a_restart(tmp_path: Path) -> None:
    """Replaying a log compares each state with the one that was recorded when it was first reached."""

    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            volunteers = [await run.start(name) for name in NAMES]
            await past(volunteers, 1)
            signed = Amendment.sign(
                STREAMING.run, 1, Overrides(outer_learning_rate=0.1, outer_momentum=0.2).content, ORGANISER
            )
            volunteers[1].driver.handle(AmendmentSeen(signed))
            await wait_until(
                volunteers,
                lambda: {one.driver.peer.log.amendment for one in volunteers} == {signed},
                "the amendment to be in force",
            )
            await past(volunteers, 2)
            await settle(volunteers)
            for one in volunteers:
                await one.driver.replication.recorder.finish()  # until the last entry is on the disk
            for name in NAMES:
                log, replayed = run.log(name), VectorWorkload(fragments=FRAGMENTS)
                assert await resume(replayed, log) == volunteers[0].driver.peer.log.in_state(UNKNOWN_STATE)
                assert replayed.state.digest() == volunteers[0].workload.state.digest()

    asyncio.run(scenario())


@pytest.mark.thorough
def test_a_run_of_fragments_is_followed_from_outside(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as run:
            volunteers = [await run.start(name) for name in NAMES]
            await past(volunteers, 2)
            transport = await HivemindTransport.create(Identity.generate(), run.bootstrap.addresses, LOCAL)
            try:
                state = VectorWorkload(fragments=FRAGMENTS)
                following = Following(transport, state, STREAMING)
                await following.begin()
                began = following.log.position.index
                await past(volunteers, 2)
                await settle(volunteers)
                async with asyncio.timeout(60):
                    while following.log.position.index < volunteers[0].index:
                        if await following.advance() is None:
                            await asyncio.sleep(STREAMING.timing.heartbeat)  # until heartbeats tell of the last one
                assert following.log.position.index > began
                assert state.state.digest() == volunteers[0].workload.state.digest()
            finally:
                await transport.close()

    asyncio.run(scenario())
