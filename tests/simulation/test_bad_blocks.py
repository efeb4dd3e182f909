"""Malformed blocks, or such as have no average, cost their sender the round, and the others nothing (R3)."""

from __future__ import annotations

import pytest

from peers.protocol.effects import Dropped
from peers.transfer.averages import Average
from peers.values.workload import BadBlocksError, Blocks, Reduction, Trained
from tests.simulation.test_schedules import swarm_of, the_honest_go_on
from tests.simulator.simulated_workload import BLOCK_BYTES, SimulatedWorkload
from tests.simulator.simulation import Swarm

LIAR = "peer2"
SPOILT = b"\xff" * BLOCK_BYTES


class Garbage(SimulatedWorkload):
    """Commits to what no encoder makes, and sends that."""

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        return super().squared_norm(blocks, first_block) if any(blocks) else 1e5

    def contribution(self, trained: Trained) -> bytes:
        return bytes(len(super().contribution(trained)))


class Spoiling(SimulatedWorkload):
    """Sends blocks that pass every check, and that nobody can average."""

    def contribution(self, trained: Trained) -> bytes:
        return SPOILT * self.block_count


def cannot_average_what_is_spoilt(swarm: Swarm) -> None:
    """Nobody can but the liar, who makes no mistake that would be its own."""
    for one in (one for one in swarm.living if one.name != LIAR):
        average = one.workload.reduce

        async def fail(reduction: Reduction, average: Average = average) -> Blocks:
            if any(bytes(data).startswith(SPOILT) for data, _ in reduction.contributions):
                raise BadBlocksError("the weighted values overflow")
            return await average(reduction)

        one.fragments[0].average = fail


def dropped(swarm: Swarm) -> set[tuple[str, str]]:
    """Whose what was dropped."""
    return {(what.peer, what.what) for line in swarm.trace for what in line if isinstance(what, Dropped)}


@pytest.mark.parametrize("kind", [Garbage, Spoiling])
def test_blocks_without_an_average_stop_nobody(kind: type[SimulatedWorkload]) -> None:
    """Regression: no simulated peer looked at what it was sent."""
    swarm = swarm_of(5)
    swarm.history.liars = frozenset({LIAR})
    cannot_average_what_is_spoilt(swarm)
    liar = swarm.peers[LIAR]
    liar.workload.__class__ = kind
    liar.fragments[0].commit_to(Trained((), 0, 1.0))
    the_honest_go_on(swarm)
    assert dropped(swarm) == {(LIAR, "contribution")}
