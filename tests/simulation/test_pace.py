"""Swarms of uneven machines: nobody is late for long, nobody's work is left out, and where runs are asynchronous nobody
waits for those who are far away."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest

from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.log.state import TERM
from peers.protocol.effects import ReduceChunk
from peers.protocol.hindrance import TRAIN_AGAIN
from peers.values.wire import digest_of
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 100, 200, 10, 1, Timing())
STEP_SECONDS = 3.0
BLOCKS, KEPT_BYTES = 7, 200
SPEEDS = (1.0, 0.95, 0.9, 0.85)


@pytest.mark.thorough
@pytest.mark.parametrize("unevenness", [0.0, 0.03])
def test_peers_that_are_nearly_as_fast_are_in_every_entry(unevenness: float) -> None:
    """Regression: each trained as much as the fastest, came later than the grace, and was in every other entry."""
    settings = replace(SETTINGS, minimum_peers=len(SPEEDS))
    swarm = Swarm(1, settings, speeds=SPEEDS, step_seconds=STEP_SECONDS, unevenness=unevenness)
    entries = Counter[str]()

    def see(name: str) -> None:
        header = swarm.peers[name].peer.log.last
        assert header is not None
        entries[name] += header.tokens_of(name) > 0

    swarm.on_apply = see
    for place in range(len(SPEEDS)):
        swarm.start(f"peer{place}")
    assert swarm.run(12_000.0, until=lambda: swarm.longest >= 20)
    assert min(entries.values()) >= 0.9 * swarm.longest, entries


def test_a_leader_leads_on_where_entries_come_faster_than_beats() -> None:
    """R1. Regression: its beats named places that were long past, so it was skipped in every other entry."""
    settings = replace(SETTINGS, minimum_peers=4)
    swarm = Swarm(1, settings, step_seconds=0.002, unevenness=0.0)
    leaders: list[str | None] = []

    def see(name: str) -> None:
        header = swarm.peers[name].peer.log.last
        assert header is not None
        if name == "peer0" and TERM < header.index <= 2 * TERM:
            leaders.append(header.leader)

    swarm.on_apply = see
    for place in range(4):
        swarm.start(f"peer{place}")
    assert swarm.run(600.0, until=lambda: len(leaders) == TERM)
    assert len(set(leaders)) == 1, leaders


@pytest.mark.thorough
def test_a_peer_that_is_never_ready_does_not_hold_up_each_round() -> None:
    """It asks for work once in half an hour: then the others wait for a twentieth of the training, 30 seconds."""
    settings, speeds = replace(SETTINGS, minimum_peers=4), (1.0, 1.0, 1.0, 0.001)
    swarm = Swarm(1, settings, speeds=speeds, step_seconds=6.0, unevenness=0.0)
    made: list[float] = []
    swarm.on_apply = lambda name: made.append(swarm.now) if name == "peer0" else None
    for place in range(len(speeds)):
        swarm.start(f"peer{place}")
    assert swarm.run(20_000.0, until=lambda: swarm.longest >= 12)
    seconds = [later - earlier for earlier, later in pairwise(made)]
    assert sum(each > 615 for each in seconds) <= sum(seconds) / TRAIN_AGAIN + 1
    assert max(seconds) < 635


class Watched(SimulatedPeer):
    """Remembers what everybody's blocks counted with where it averaged them."""

    weights: ClassVar[set[tuple[str, float]]] = set()

    def _average(self, reduce: ReduceChunk) -> None:
        self.weights.update(reduce.weights)
        super()._average(reduce)


class Uneven:
    """A run of four fast peers, one that is five times slower, and one that is sixteen times slower."""

    SPEEDS = (1.0, 0.97, 0.94, 0.9, 0.2, 1 / 16)
    SLOWEST = "peer5"

    def __init__(self, contributions: float | None, training: float, cycles: int = 20, fragments: int = 1) -> None:
        settings = replace(SETTINGS, minimum_peers=4, staleness=2, contributions=contributions, fragments=fragments)
        step = training / settings.inner_steps
        self.swarm = Swarm(1, settings, speeds=self.SPEEDS, step_seconds=step, unevenness=0.03)
        self.swarm.peer_of = lambda name, swarm, clock: Watched(name, swarm, BLOCKS, KEPT_BYTES, clock)
        self.entries: dict[int, Header] = {}
        self.of_fragments: dict[tuple[int, int], Header] = {}
        self.swarm.on_apply = self._see
        for place in range(len(self.SPEEDS)):
            self.swarm.start(f"peer{place}")
        self.swarm.run(cycles * training)

    def _see(self, name: str) -> None:
        for header in self.swarm.peers[name].peer.lineage.entries:
            self.of_fragments[header.fragment, header.index] = header
            if header.fragment == self.swarm.settings.fragments - 1:
                self.entries[header.index] = header

    def count_of(self, peer: str) -> int:
        """Return the entries that the peer's work counts in."""
        return sum(header.tokens_of(peer) > 0 for header in self.entries.values())

    def counts_of(self, peer: str, fragment: int) -> list[int]:
        """Return the cycles in which the peer's work on a fragment counts."""
        places = sorted(place for place in self.of_fragments if place[0] == fragment)
        return [place[1] for place in places if self.of_fragments[place].tokens_of(peer)]

    def seconds_of(self, peer: str) -> float:
        """Return the seconds for which the peer has trained what counts."""
        tokens = sum(header.tokens_of(peer) for header in self.entries.values())
        return tokens / self.swarm.tokens_per_second(self.SPEEDS[int(peer[-1])])


@pytest.mark.thorough
@pytest.mark.parametrize(("training", "gain"), [(30.0, 1.05), (100.0, 1.0)])
def test_an_asynchronous_run_does_not_wait_for_those_who_are_far_away(training: float, gain: float) -> None:
    """R16. Nor does a synchronous one wait for a peer that was late twice (R7), but it has no use for its work. The
    shorter the training, the longer a part of it is the grace."""
    waiting, going = Uneven(None, training, cycles=40), Uneven(0.5, training, cycles=40)
    assert len(going.entries) >= gain * len(waiting.entries)
    assert len(going.entries) >= 0.93 * 40, "an entry takes hardly longer than the training"
    assert going.count_of(Uneven.SLOWEST) >= 0.25 * len(going.entries)
    for place in range(4):
        assert going.count_of(f"peer{place}") >= 0.85 * len(going.entries), "all fast ones come in time, but by chance"
    assert going.count_of("peer4") >= 0.85 * len(going.entries), "so does who trains less"


@pytest.mark.thorough
def test_whoever_is_late_in_an_asynchronous_run_trains_all_the_time_and_all_of_it_counts() -> None:
    Watched.weights.clear()
    going = Uneven(0.5, 100.0, cycles=31)
    entries = [going.entries[index] for index in sorted(going.entries)]
    late = [header.index for header in entries if header.tokens_of(going.SLOWEST)]
    assert {later - earlier for earlier, later in pairwise(late)} == {3}, "it may miss two of them"
    assert going.seconds_of(going.SLOWEST) >= 0.8 * going.swarm.now
    trained = [piece for header in entries for one in header.roster for piece in one.samples]
    given = sum(piece.stop - piece.start for piece in trained)
    assert given == len({sample for piece in trained for sample in range(piece.start, piece.stop)}), "none twice"
    counted = {weight for peer, weight in Watched.weights if peer == going.SLOWEST}
    tokens = {header.tokens_of(going.SLOWEST) for header in entries[late[1] :]} - {0}
    assert {int(count / math.sqrt(3)) for count in tokens} <= counted, "it is two entries old"
    assert not tokens & counted
    kept = sum(piece.stop - piece.start for lease in entries[-1].leases for piece in lease.samples)
    free = sum(piece.stop - piece.start for piece in entries[-1].free)
    assert entries[-1].cursor == given + kept + free, "none is skipped"


def test_in_a_run_that_streams_late_work_counts_for_each_fragment_once() -> None:
    """Regression: what the slowest peer had learned of a fragment counted only if it was stored in a cycle before the
    others made that fragment's entry: here, of the first one never."""
    going = Uneven(0.5, 100.0, cycles=12, fragments=3)
    leases = len(going.counts_of(going.SLOWEST, 2))
    assert leases >= 3
    for fragment in range(3):
        counts = going.counts_of(going.SLOWEST, fragment)
        assert abs(len(counts) - leases) <= 1, "one may be under way when this is over"
        assert {later - earlier for earlier, later in pairwise(counts[1:])} == {3}
        assert len(going.counts_of("peer0", fragment)) >= 0.85 * len(going.entries), "nobody else loses by that"
