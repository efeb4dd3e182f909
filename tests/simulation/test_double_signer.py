"""One voter in both majorities: two processes with its key and incarnation each lead one half of the others, which do
not hear each other. Both halves certify an entry at one place; no rule for votes prevents that."""

from __future__ import annotations

from dataclasses import replace

from peers.log.settings import Timing
from tests.simulation.test_schedules import SETTINGS
from tests.simulator.schedules import EVENLY
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm
from tests.simulator.twins import FirstProcess

LIAR = "peer0"
NEAR, FAR = ("peer1", "peer2"), ("peer3", "peer4")


class Everywhere:
    """A side of a partition that reaches both."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def doubled() -> tuple[Swarm, FirstProcess]:
    """Return a swarm of five at work, one of which runs as two processes."""
    swarm = Swarm(0, replace(SETTINGS, timing=Timing(), minimum_peers=5), one_child=False, unevenness=EVENLY)
    make = swarm.peer_of

    def peer_of(name: str, world: Swarm, clock: tuple[float, float]) -> SimulatedPeer:
        honest = make(name, world, clock)
        return FirstProcess(name, world, world.block_count, world.kept_bytes, clock) if name == LIAR else honest

    swarm.peer_of = peer_of
    swarm.history.may_fork, swarm.history.liars = True, frozenset({LIAR})
    for name in (LIAR, *NEAR, *FAR):
        swarm.start(name)
    assert swarm.run(100.0, until=lambda: swarm.longest >= 1)
    first = swarm.peers[LIAR]
    assert isinstance(first, FirstProcess)
    first.double(swarm)

    def are_together() -> bool:
        processes = [*swarm.honest, first, first.twin]
        places = {one.peer.log.position for one in processes if one}
        return len(places) == 1 and {one.peer.state.value for one in processes if one} == {"training"}

    assert swarm.run(300.0, until=are_together)
    return swarm, first


def test_after_a_fork_that_is_certified_twice_all_end_on_one_branch_without_its_author() -> None:
    swarm, liar = doubled()
    split = swarm.longest
    liar.part(FAR)
    swarm.side.update(dict.fromkeys(FAR, 1))
    swarm.side[LIAR] = Everywhere()  # type: ignore[assignment]
    near, far = swarm.peers[NEAR[0]].peer, swarm.peers[FAR[0]].peer
    assert swarm.run(600.0, until=lambda: min(near.log.position.index, far.log.position.index) > split + 1)
    assert near.log.position.head != far.log.position.head
    assert swarm.history.forks
    assert not near.lineage.doubt
    assert not far.lineage.doubt
    liar.meet()
    swarm.heal()
    assert swarm.run(1000.0, until=lambda: all(LIAR in one.peer.log.excluded for one in swarm.honest))
    assert swarm.run(60.0, until=lambda: len({one.peer.log.position.head for one in swarm.honest}) == 1)


def test_where_all_hear_each_other_two_processes_with_one_key_are_convicted_all_the_same() -> None:
    """Whether their halves come to a fork is chance; before, one in two did, seventeen seconds after it began."""
    swarm, liar = doubled()
    liar.part(FAR)
    assert swarm.run(600.0, until=lambda: all(LIAR in one.peer.log.excluded for one in swarm.honest))
    liar.meet()
    assert swarm.run(300.0, until=lambda: len({one.peer.log.position.head for one in swarm.honest}) == 1)
