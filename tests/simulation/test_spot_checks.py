"""A reducer that averages wrongly for all alike is found by spot checks alone; no other peer is blamed."""

from __future__ import annotations

import pytest

from peers.log.settings import RunSettings, Timing
from peers.protocol.effects import Note
from peers.values.wire import digest_of
from tests.simulator.history import InvariantError
from tests.simulator.malice import Deceit, plant
from tests.simulator.simulation import Swarm
from tests.simulator.spot_checks import check_averages

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, Timing())
LIAR = "peer3"
FEW = 30
"""Entries, within which four that draw one of 28 averages each find the one that a liar makes, with a probability of
0.98."""


def lying(seed: int) -> Swarm:
    """Five peers, of which one averages wrongly from the second entry on. Of many blocks it averages some, however slow
    its link is measured to be."""
    swarm = Swarm(seed, SETTINGS, block_count=28, unevenness=0.2, traced=False)
    plant(swarm, (Deceit(LIAR, "wrong averages", 2),))
    for number in range(5):
        swarm.start(f"peer{number}")
    return swarm


def warned(swarm: Swarm) -> set[str]:
    """Return the peers whose volunteers are told of wrong averages."""
    notes = [(line[1], what) for line in swarm.trace for what in line if isinstance(what, Note)]
    return {str(name) for name, note in notes if note.level == "warning" and "wrongly" in note.text}


def test_a_reducer_that_averages_wrongly_for_all_is_found_and_volunteers_are_told() -> None:
    swarm = lying(0)
    check_averages(swarm)
    assert swarm.run(900.0, until=lambda: swarm.history.refuted[LIAR] > 0)
    found = swarm.longest
    assert found <= 2 + FEW
    assert swarm.run(600.0, until=lambda: swarm.longest >= found + 5), "all have one state, and go on"
    assert warned(swarm)
    assert swarm.history.refuted.keys() == {LIAR}


def test_a_leader_that_tells_each_other_commitments_has_no_honest_peers_blame_each_other() -> None:
    """Regression: each found the averages of the others wrong, and exchanged nothing with them for an hour."""
    swarm = Swarm(0, SETTINGS, block_count=28, unevenness=0.2, traced=False)
    plant(swarm, (Deceit("peer1", "invented roots", 2),))
    check_averages(swarm)
    for number in range(5):
        swarm.start(f"peer{number}")
    assert swarm.run(1500.0, until=lambda: swarm.longest >= 6)
    assert not swarm.history.refuted


@pytest.mark.thorough
def test_without_spot_checks_nobody_finds_that() -> None:
    swarm = lying(1)
    swarm.run(600.0, until=lambda: swarm.longest >= 2 + FEW)
    assert not warned(swarm)


def test_a_spot_check_that_blames_somebody_honest_is_noticed() -> None:
    swarm = lying(1)
    check_averages(swarm)
    swarm.history.liars = frozenset()
    with pytest.raises(InvariantError, match=f"{LIAR} has averaged wrongly, though honest"):
        swarm.run(600.0)
