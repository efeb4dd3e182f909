"""Swarms of real drivers whose state is in several fragments, over hivemind within one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from peers.driver.driver import Driver
from peers.driver.keeping import Keeping
from peers.net.transport import HivemindTransport
from peers.values.identity import Identity
from tests.swarm.test_driver import LOCAL, SETTINGS, Swarm, Volunteer, digests_by_position, wait_until
from tests.swarm.vector_workload import VectorWorkload

FRAGMENTS = 3
STREAMING = replace(SETTINGS, fragments=FRAGMENTS, snapshot_every=2)


class StreamingSwarm(Swarm):
    """Each volunteer averages its state in fragments."""

    async def join(self) -> Volunteer:
        identity = Identity.generate()
        transport = await HivemindTransport.create(identity, self.bootstrap.addresses, LOCAL)
        workload = VectorWorkload(fragments=FRAGMENTS)
        driver = Driver(identity, transport, workload, STREAMING, Keeping(workload.state.digest()))
        volunteer = Volunteer(driver, transport, workload, asyncio.create_task(driver.run()))
        self.volunteers.append(volunteer)
        return volunteer


@asynccontextmanager
async def swarm() -> AsyncIterator[StreamingSwarm]:
    bootstrap = await HivemindTransport.create(Identity.generate(), (), LOCAL)
    swarm = StreamingSwarm(bootstrap)
    try:
        yield swarm
    finally:
        for volunteer in swarm.volunteers:
            await volunteer.die()
        await bootstrap.close()


async def settle(volunteers: list[Volunteer]) -> None:
    """Let nobody begin to train again, and wait until all are at one place."""
    for one in volunteers:
        one.workload.may_train.clear()
    await wait_until(
        volunteers,
        lambda: len({one.index for one in volunteers}) == 1 and all(one.rests for one in volunteers),
        "everybody to settle at one position",
    )


def test_each_fragment_has_a_round_of_its_own_and_all_agree() -> None:
    async def scenario() -> None:
        async with swarm() as run:
            volunteers = [await run.join() for _ in range(3)]
            await wait_until(volunteers, lambda: min(one.index for one in volunteers) >= 3, "three outer steps")
            await settle(volunteers)
            assert len(digests_by_position(volunteers)) == 1
            entries = volunteers[0].driver.peer.lineage.entries
            places = {(header.index, header.fragment) for header in entries}
            assert places >= {(index, fragment) for index in range(3) for fragment in range(FRAGMENTS)}
            assert {len(header.roster) for header in entries if header.index == 2} == {3}

    asyncio.run(scenario())
