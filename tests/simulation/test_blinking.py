"""A member that is away for some seconds, where no entry is made without it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from peers.log.settings import Timing
from peers.protocol.pacemaker import death
from tests.simulation.test_schedules import SETTINGS
from tests.simulator.schedules import EVENLY, INNER_STEPS
from tests.simulator.simulation import Swarm

PEERS = 5
AWAY = 20.0
"""Seconds for which it is away, at most."""
VIEW = 25.0
"""Seconds of a view timer."""
BOUND = (1 + EVENLY) * INNER_STEPS + AWAY + Timing().grace + VIEW + death(Timing())
"""Seconds between two entries: a training, the absence, the grace, a view that fails, and until a death is known."""


def longest_pause(seed: int, way: str, blinks: int) -> float:
    """Return the longest time between two entries: two of five die, and one of the others, who are all needed until an
    entry without the two is made, is away again and again."""
    draw = random.Random(seed)
    swarm = Swarm(seed, replace(SETTINGS, timing=Timing(), minimum_peers=PEERS), unevenness=EVENLY)
    names = [f"peer{number}" for number in range(PEERS)]
    for name in names:
        swarm.start(name)
    assert swarm.run(200.0, until=lambda: swarm.longest >= 3)
    made = {swarm.longest: swarm.now}

    def note(name: str) -> None:
        made.setdefault(swarm.longest, swarm.now)

    swarm.on_apply = note
    dead = draw.sample(names, 2)
    for name in dead:
        swarm.kill(name)
    blinking = draw.choice([name for name in names if name not in dead])
    swarm.run(draw.uniform(0.0, 8.0))
    for _ in range(blinks):
        {"cut off": swarm.cut_off, "deaf": swarm.deafen, "stopped": swarm.stop}[way](blinking)
        swarm.run(draw.uniform(5.0, AWAY))
        swarm.heal()
        swarm.run(draw.uniform(2.0, 15.0))
    goal = swarm.longest + 2
    swarm.run(1000.0, until=lambda: swarm.longest >= goal)
    return max(later - earlier for earlier, later in pairwise([*made.values(), swarm.now]))


@pytest.mark.parametrize(
    "way", ["cut off", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("deaf", "stopped"))]
)
@pytest.mark.parametrize("blinks", [pytest.param(1, marks=pytest.mark.thorough), 4])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.thorough)], ids=str)
def test_a_member_that_blinks_costs_no_more_than_a_view(seeds: range, blinks: int, way: str) -> None:
    """Regression: its leader barred it for two minutes, and longer each time, though no entry could be made without."""
    for seed in seeds:
        assert longest_pause(seed, way, blinks) <= BOUND, f"seed {seed}"
