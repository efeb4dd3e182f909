"""Peers that are cut off from most others: their entries meanwhile, and which branch counts afterwards (R8, R21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.lineage import RECENT_ENTRIES
from peers.log.settings import Timing
from peers.protocol.states import State
from tests.simulation.test_weaknesses import SETTINGS, at_work, swarm_of
from tests.simulator.schedules import agreed
from tests.simulator.simulation import Swarm

TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=60.0)
FEW, MANY = ("peer3", "peer4"), ("peer0", "peer1", "peer2")


def split(goes_on_alone: bool = True) -> Swarm:
    """Five at work, two of which are cut off now, and train three times as fast as the others."""
    settings = replace(SETTINGS, timing=TIMING, goes_on_alone=goes_on_alone)
    swarm = at_work(swarm_of(5, 1, settings, one_child=False), 2)
    for name in FEW:
        swarm.side[name] = 1
        swarm.peers[name].speed = 3.0
    return swarm


def heads(swarm: Swarm, names: tuple[str, ...]) -> set[bytes]:
    return {swarm.peers[name].peer.log.position.head for name in names}


def trouble_of(swarm: Swarm, name: str) -> str:
    return swarm.peers[name].peer.hindrances.reported_reason


def meet(swarm: Swarm, seconds: float = 300.0) -> None:
    swarm.heal()
    longest = swarm.longest
    assert swarm.run(seconds, until=lambda: agreed(swarm) and swarm.longest >= longest), "they stay apart"


def test_who_went_on_alone_comes_back_to_what_most_have_signed_whatever_it_has_trained() -> None:
    swarm = split()
    before = swarm.longest
    swarm.run(400.0)
    few, many = (swarm.peers[name].peer for name in (FEW[0], MANY[0]))
    assert few.log.position.index > before, "it went on alone"
    assert few.log.lineage_tokens > many.log.lineage_tokens, "and trained more than the others"
    kept = swarm.peers[MANY[0]].entries.heads
    meet(swarm)
    assert swarm.peers[FEW[0]].entries.heads[: len(kept)] == kept
    assert heads(swarm, FEW) == heads(swarm, MANY)


@pytest.mark.thorough
def test_a_minority_that_is_far_ahead_comes_back_too() -> None:
    """Regression: each of the two found the other where its own log had led, and looked at nobody else: they had made
    more entries than peers remember, so that nobody could see in a heartbeat that the others' log was another one."""
    swarm = split()
    for name in FEW:
        swarm.peers[name].speed = 20.0
    few, many = (swarm.peers[name].peer for name in (FEW[0], MANY[0]))
    is_far = swarm.run(2000.0, until=lambda: few.log.position.index > many.log.position.index + 1.5 * RECENT_ENTRIES)
    assert is_far, "the few make no entries"
    kept = swarm.peers[MANY[0]].entries.heads
    swarm.heal()
    assert swarm.run(300.0, until=lambda: agreed(swarm)), "they stay apart"
    assert swarm.peers[FEW[0]].entries.heads[: len(kept)] == kept


def test_a_minority_is_told_that_it_is_one_until_the_others_are_back() -> None:
    swarm = split()
    split_at = swarm.longest
    swarm.run(400.0)
    for name in FEW:
        assert trouble_of(swarm, name).startswith(f"only 2 of the 5 peers of outer step {split_at}")
    assert not any(trouble_of(swarm, name) for name in MANY)
    meet(swarm)
    swarm.run(60.0)
    assert not any(trouble_of(swarm, name) for name in FEW + MANY)


def test_who_wants_to_waits_for_the_others() -> None:
    swarm = split(goes_on_alone=False)
    before = heads(swarm, FEW)
    swarm.run(400.0)
    assert heads(swarm, FEW) == before
    for name in FEW:
        assert swarm.peers[name].peer.state is State.READY, "what it has trained is kept"
        assert trouble_of(swarm, name) == (
            "3 of the 5 peers of the last outer step are gone; waiting for them, as --on-partition wait says"
        )
    assert swarm.peers[MANY[0]].index > swarm.peers[FEW[0]].index, "most go on"
    meet(swarm)
    swarm.run(60.0)
    assert not any(trouble_of(swarm, name) for name in FEW + MANY)
