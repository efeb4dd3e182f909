"""A joiner that comes late takes a state that others froze earlier, and replays the entries since (R14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log import lineage
from peers.log import lineage as branch
from peers.protocol import catching_up
from tests.simulation.test_schedules import SETTINGS, Fetches, goes_on
from tests.simulator.history import InvariantError
from tests.simulator.schedules import agreed
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

EVERY = 5
PLENTY = 100_000
MEMORY = 8  # entries that a peer remembers
NAMES = [f"peer{name}" for name in range(4)]


def swarm_at(index: int, every: int = EVERY, kept_bytes: int = PLENTY, seed: int = 1) -> Swarm:
    """Four peers at this entry, or a little further."""
    swarm = Swarm(seed, replace(SETTINGS, snapshot_every=every), kept_bytes=kept_bytes)
    for name in NAMES:
        swarm.start(name)
    reach(swarm, index)
    return swarm


def reach(swarm: Swarm, index: int) -> None:
    if not swarm.run(100.0 * index, until=lambda: swarm.longest >= index and agreed(swarm)):
        raise InvariantError(f"no progress: longest {swarm.longest}, wanted {index}")


def joins(swarm: Swarm, name: str = "late") -> tuple[SimulatedPeer, Fetches]:
    swarm.start(name)
    late = swarm.peers[name]
    return late, Fetches(late)


def is_in_the_roster(swarm: Swarm, late: SimulatedPeer) -> bool:
    return swarm.run(600.0, until=lambda: late.name in late.peer.log.roster)


@pytest.mark.parametrize(("seed", "past"), list(enumerate(range(EVERY))))
def test_a_late_joiner_takes_a_frozen_state_and_replays_the_rest(seed: int, past: int) -> None:
    swarm = swarm_at(2 * EVERY + past, seed=seed)
    at_start = swarm.longest
    late, fetches = joins(swarm)
    assert is_in_the_roster(swarm, late)
    assert fetches.snapshots == 1
    assert fetches.payloads >= at_start % EVERY
    goes_on(swarm)


def test_where_payloads_are_kept_too_shortly_for_that_a_newer_state_is_frozen() -> None:
    swarm = swarm_at(4 * EVERY - 1, every=4 * EVERY, kept_bytes=0, seed=0)
    for one in swarm.living:
        one.frozen(0)  # somebody has asked before
    reach(swarm, swarm.longest + 10)
    late, fetches = joins(swarm)
    assert is_in_the_roster(swarm, late)
    assert fetches.snapshots <= 3
    goes_on(swarm)


@pytest.mark.parametrize("distance", [MEMORY - 2, pytest.param(MEMORY + 4, marks=pytest.mark.thorough)])
def test_a_state_that_was_frozen_longer_ago_than_anybody_remembers_keeps_nobody_out(
    distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was offered, was in no lineage that goes back so far, and nobody could join until the next."""
    for module in (branch, lineage, catching_up):
        monkeypatch.setattr(module, "RECENT_ENTRIES", MEMORY, raising=False)
    swarm = swarm_at(MEMORY + 2, every=1000)
    early, _ = joins(swarm, "early")
    assert is_in_the_roster(swarm, early)
    reach(swarm, swarm.longest + distance)
    late, fetches = joins(swarm)
    assert is_in_the_roster(swarm, late)
    assert fetches.snapshots == 1
    goes_on(swarm)


def test_donors_die_while_a_late_joiner_catches_up() -> None:
    swarm = swarm_at(3 * EVERY - 1, seed=0)
    late, _ = joins(swarm)
    assert swarm.run(200.0, until=lambda: late.index > 0)
    swarm.kill(NAMES[0])
    assert is_in_the_roster(swarm, late)
    goes_on(swarm)
