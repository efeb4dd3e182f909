"""Swarms with several fragments: their rounds run side by side, and each cycle is one outer step (R15)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from peers.log.header import NO_PAYLOAD, Header
from peers.log.settings import RunSettings, Timing
from peers.protocol.events import Captured, TrainingDone
from peers.protocol.round import RoundState
from peers.values.wire import digest_of
from tests.simulator.links import Faults
from tests.simulator.schedules import agreed, draw_life, live
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, TIMING, fragments=3)
SLOW = Faults(longest_delay=0.6)
OVERLAPPING = Faults(longest_delay=1.5)  # so that a round takes longer than a fragment's turn


class Entries:
    """All entries that anybody has applied, by cycle and fragment."""

    def __init__(self, swarm: Swarm) -> None:
        self.by_place: dict[tuple[int, int], Header] = {}
        self._swarm = swarm
        swarm.on_apply = self._note

    def _note(self, name: str) -> None:
        for header in self._swarm.peers[name].peer.lineage.entries:
            self.by_place[header.index, header.fragment] = header

    def of_cycle(self, index: int) -> list[Header]:
        return [self.by_place[index, fragment] for fragment in range(SETTINGS.fragments)]


def swarm_of(number: int, seed: int = 1, settings: RunSettings = SETTINGS, faults: Faults = SLOW) -> Swarm:
    swarm = Swarm(seed, replace(settings, minimum_peers=number), faults)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.9, 1.1)  # type: ignore[method-assign]
    for one in range(number):
        swarm.start(f"peer{one}")
    return swarm


def past(swarm: Swarm, cycles: int) -> bool:
    goal = swarm.longest + cycles
    return swarm.run(100.0 * cycles, until=lambda: swarm.longest >= goal)


def test_each_cycle_has_an_entry_of_each_fragment_with_everybodys_work() -> None:
    swarm = swarm_of(4)
    entries = Entries(swarm)
    assert past(swarm, 5)
    for index in range(4):
        first, second, closing = entries.of_cycle(index)
        assert {header.previous for header in (first, second, closing)} == {first.previous}
        assert {header.peers for header in (first, second, closing)} == {closing.peers}
        assert len(closing.peers) == 4
        assert not first.leases
        assert len(closing.leases) == 4


def test_rounds_of_several_fragments_are_under_way_at_once() -> None:
    swarm = swarm_of(3, faults=OVERLAPPING)
    most = Counter[str]()

    def look(name: str) -> None:
        rounds = swarm.peers[name].peer.rounds.values()
        most[name] = max(most[name], sum(round.state is RoundState.EXCHANGING for round in rounds))

    swarm.on_effect = look
    assert past(swarm, 6)
    assert max(most.values()) >= 2


def test_training_goes_on_while_fragments_are_averaged_and_applied() -> None:
    swarm = swarm_of(3, faults=Faults())
    applied = defaultdict[bool, int](int)

    def look(name: str) -> None:
        peer = swarm.peers[name].peer
        applied[peer.trainer.is_training] += 1

    swarm.on_apply = look
    assert past(swarm, 4)
    assert applied[True] >= 2 * applied[False] / 3, "all fragments but the closing one"


@pytest.mark.parametrize("victim", ["peer0", "peer2"], ids=["the leader", "another"])
def test_a_death_with_several_rounds_under_way_costs_only_its_owners_work(victim: str) -> None:
    swarm = swarm_of(5, 0, faults=OVERLAPPING)
    entries = Entries(swarm)
    assert past(swarm, 2)
    peer = swarm.peers[victim].peer
    assert swarm.run(
        60.0, until=lambda: sum(round.state is RoundState.EXCHANGING for round in peer.rounds.values()) >= 2
    ), "two of its rounds are under way"
    index = peer.log.position.index
    swarm.kill(victim)
    assert past(swarm, 2)
    rosters = [set(header.peers) for header in entries.of_cycle(index)]
    others = {peer for peer in swarm.peers if peer != victim}
    assert all(others <= roster for roster in rosters)


def test_who_was_cut_off_in_the_midst_of_a_cycle_gets_what_it_missed() -> None:
    swarm = swarm_of(4)
    assert past(swarm, 2)
    late = swarm.peers["peer3"].peer
    assert swarm.run(60.0, until=lambda: len(late.log.made) == 1), "one of its three fragments"
    swarm.cut_off("peer3")
    assert swarm.run(200.0, until=lambda: swarm.longest > late.log.position.index + 1)
    swarm.heal()
    assert past(swarm, 3)
    assert "peer3" in swarm.peers["peer0"].peer.log.roster
    assert late.log.position.index >= swarm.longest - 1


def test_who_joins_in_the_midst_of_a_cycle_takes_part_in_the_next() -> None:
    swarm = swarm_of(3)
    assert past(swarm, 3)
    first = swarm.peers["peer0"].peer
    assert swarm.run(60.0, until=lambda: len(first.log.made) == 1)
    swarm.start("peer9")
    assert past(swarm, 4)
    assert "peer9" in first.log.roster


def test_who_is_far_behind_takes_a_snapshot_of_the_end_of_a_cycle() -> None:
    swarm = swarm_of(3, settings=replace(SETTINGS, snapshot_every=2))
    assert past(swarm, 7)
    swarm.start("peer9")
    assert swarm.run(200.0, until=lambda: "peer9" in swarm.peers["peer0"].peer.log.roster)
    assert any("fetches a state of" in line for line in swarm.trace)


def test_a_fragment_that_nobody_has_trained_stays_as_it_is() -> None:
    """All who had are gone, say; the cycle goes on without it."""
    swarm = swarm_of(3)
    entries = Entries(swarm)
    assert past(swarm, 1)
    index = swarm.longest + 1
    for peer in swarm.peers.values():
        miss(peer, index, fragment=1)
    assert past(swarm, 4)
    first, second, closing = entries.of_cycle(index)
    assert second.payload == NO_PAYLOAD
    assert {member.tokens for member in second.roster} == {0}
    assert NO_PAYLOAD not in (first.payload, closing.payload)
    assert NO_PAYLOAD not in {entry.payload for entry in entries.of_cycle(index + 1)}


def miss(peer: SimulatedPeer, index: int, fragment: int) -> None:
    """Let the peer miss a fragment's turn in this cycle."""
    is_present = peer.is_of_present_training

    def is_of_present_training(event: Captured | TrainingDone) -> bool:
        is_missed = isinstance(event, Captured) and (event.fragment, peer.index) == (fragment, index)
        return is_present(event) and not is_missed

    peer.is_of_present_training = is_of_present_training  # type: ignore[method-assign]


@pytest.mark.parametrize(("fragments", "seed"), [(1, 0), (3, 0)])
def test_when_most_have_forgotten_what_they_held_they_go_on_together(fragments: int, seed: int) -> None:
    """Regression: the two that counted took the three that had restarted for a majority at work, and waited for hours.
    Where they did not, each leader went on with those who were left to it."""
    faults = Faults(loss=0.1, longest_delay=0.6, suspicion=0.05)
    swarm = swarm_of(5, seed, replace(SETTINGS, fragments=fragments), faults)
    assert past(swarm, 2)
    for number in (0, 2, 3):
        swarm.kill(f"peer{number}")
        swarm.disk_of(f"peer{number}").lose()
        swarm.start(f"peer{number}")
    goal = swarm.longest + 2
    assert swarm.run(1.25 * TIMING.partition_grace, until=lambda: swarm.longest >= goal and agreed(swarm))
    assert len(swarm.peers["peer1"].peer.log.roster) >= 3


def test_one_fragment_is_plain_diloco() -> None:
    """The same peers, clocks and delays: with one fragment nothing of a cycle is to be seen."""
    swarm = swarm_of(3, settings=replace(SETTINGS, fragments=1))
    entries = Entries(swarm)
    assert past(swarm, 4)
    assert {fragment for _, fragment in entries.by_place} == {0}
    heads = [entries.by_place[index, 0] for index in range(3)]
    assert [header.previous for header in heads[1:]] == [header.digest for header in heads[:-1]]


@pytest.mark.parametrize("seed", range(48000, 48002))
def test_random_lives_of_several_fragments(seed: int) -> None:
    live(draw_life(seed, fragments=3))


@pytest.mark.parametrize(
    ("seed", "fragments"),
    [
        pytest.param(10420, 3, marks=pytest.mark.thorough),
        (10572, 2),
        pytest.param(11906, 3, marks=pytest.mark.thorough),
    ],
    ids=["a member forgot its part of a round", "most had left the first round", "an entry whose leader is dead"],
)
def test_lives_of_several_fragments_that_ended_badly(seed: int, fragments: int) -> None:
    """Regressions: two stalls and a fork."""
    live(draw_life(seed, fragments))
