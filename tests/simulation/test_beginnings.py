"""Peers that found a run together: before the first entry no roster says who leads (R13)."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from peers.log.settings import Timing
from peers.protocol.effects import TokensLost
from tests.simulation.test_schedules import SETTINGS
from tests.simulator.simulation import Swarm

PEERS = 5
BATCH = 15


def swarm_from_the_beginning(seed: int) -> Swarm:
    """Return a swarm at its first entry, whose peers started within five seconds, in any order."""
    start = random.Random(seed)
    swarm = Swarm(seed, replace(SETTINGS, minimum_peers=PEERS, timing=Timing()))
    for name in start.sample([f"peer{number}" for number in range(PEERS)], PEERS):
        swarm.at(start.uniform(0.0, 5.0), partial(swarm.start, name))
    assert swarm.run(200.0, until=lambda: swarm.longest > 0)
    return swarm


@pytest.mark.parametrize("first", range(0, 60, BATCH))
def test_nothing_is_lost_when_all_begin_together(first: int) -> None:
    """Regression: a peer that heard of another's work before it heard of the leader's got the leader's samples."""
    for seed in range(first, first + BATCH):
        swarm = swarm_from_the_beginning(seed)
        lost = [line for line in swarm.trace if any(isinstance(what, TokensLost) for what in line)]
        assert not lost, f"seed {seed}"
        assert swarm.history.smallest_roster == PEERS
