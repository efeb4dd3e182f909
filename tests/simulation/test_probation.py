"""Newcomers on probation take part, and neither count nor vote; many of them do not hold up the others (R17)."""

from __future__ import annotations

from dataclasses import replace

from peers.protocol.effects import Trouble
from tests.simulation.test_schedules import SETTINGS, swarm_of
from tests.simulator.simulation import Swarm

PROBATION = replace(SETTINGS, probation=3)
SYBILS = [f"sybil{number}" for number in range(6)]
FOUNDERS = ["peer0", "peer1", "peer2"]
SOONER_THAN_A_MINORITY = SETTINGS.timing.partition_grace


def joined(swarm: Swarm) -> None:
    """Six join three."""
    for name in SYBILS:
        swarm.start(name)
    log = swarm.peers["peer0"].peer
    assert swarm.run(600.0, until=lambda: set(SYBILS) <= set(log.log.roster)), "they take part"


def test_newcomers_count_and_vote_when_they_have_served() -> None:
    swarm = swarm_of(3, 0, PROBATION)
    first, by_index = swarm.peers["peer0"].peer, dict[int, int]()
    tokens: dict[int, int] = {}
    swarm.start("late")

    def look() -> bool:
        last = first.log.last
        if last is not None and "late" in last.peers:
            by_index[last.index] = first.log.served["late"]
            tokens[last.index] = last.tokens_of("late")
        return "late" in first.log.voters and max(tokens.values(), default=0) > 0

    assert swarm.run(1000.0, until=look)
    counted = [index for index, number in sorted(tokens.items()) if number]
    assert len([index for index in tokens if index < counted[0]]) >= PROBATION.probation
    told = [what.reason for line in swarm.trace for what in line if isinstance(what, Trouble)]
    assert any("its first 3 outer steps do not count" in reason for reason in told)
    assert told[-1] == "", "and it is told when they do"


def test_many_newcomers_at_once_are_no_majority() -> None:
    """They disappear together: had they a say, the others would be a minority, and wait for the partition grace."""
    swarm = swarm_of(3, 0, PROBATION)
    joined(swarm)
    log = swarm.peers["peer0"].peer.log
    assert set(log.voters) == set(FOUNDERS)
    before = swarm.longest
    for name in SYBILS:
        swarm.kill(name)
    assert swarm.run(SOONER_THAN_A_MINORITY, until=lambda: swarm.longest > before + 1)
    assert swarm.history.one_child, "two entries at a position would have been an error"


def test_newcomers_that_are_left_alone_go_on() -> None:
    swarm = swarm_of(3, 0, PROBATION, one_child=False)
    joined(swarm)
    before = swarm.longest
    for name in FOUNDERS:
        swarm.kill(name)
    assert swarm.run(2000.0, until=lambda: swarm.longest >= before + 3)
    survivor = swarm.peers[SYBILS[0]].peer.log
    assert set(survivor.voters) <= set(SYBILS)
    assert survivor.voters
