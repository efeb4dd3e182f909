"""A lie in the exchange costs its liar; the others count as before, and no honest peer is blamed (R3, R9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.settings import RunSettings, Timing
from peers.protocol.effects import Dropped, Trouble
from peers.transfer.buffers import inspection, offer
from peers.values.chunks import Sum
from peers.values.wire import digest_of
from peers.values.workload import Trained
from tests.simulator.malice import Deceit, plant
from tests.simulator.schedules import agreed
from tests.simulator.simulation import Swarm

SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, Timing())
LIAR = "peer4"
ENTRY = 12.0 + 2 * 30.0
"""Seconds: a training, and twice as long as an exchange may take in which a link is not measured."""
HONEST = ("peer0", "peer1", "peer2", "peer3")


def understates(swarm: Swarm) -> None:
    """Commit to a hundredth of the norm that its blocks have."""
    mine = swarm.peers[LIAR].fragments[0]
    inspect = inspection(mine.workload.squared_norm, mine.buffers)

    def commit_to(trained: Trained) -> Sum:
        return offer(mine.workload.contribution(trained), mine.buffers, lambda *blocks: inspect(*blocks) / 10000)

    mine.commit_to = commit_to  # type: ignore[method-assign]


def in_time(swarm: Swarm) -> Swarm:
    """Have all train for about as long, so that nobody is late by chance."""
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    return swarm


def five_together(kind: str | None = None) -> Swarm:
    """Return five that have made an entry together, of which one lies from the third on. Of many chunks each averages
    some, however slow its link is measured to be."""
    swarm = in_time(Swarm(1, SETTINGS, block_count=28))
    swarm.history.liars = frozenset({LIAR})
    if kind is not None:
        plant(swarm, (Deceit(LIAR, kind, 2),))
    for number in range(5):
        swarm.start(f"peer{number}")

    def are_together() -> bool:
        return agreed(swarm) and all(len(one.peer.log.roster) == 5 for one in swarm.living)

    assert swarm.run(300.0, until=are_together)
    return swarm


def the_honest_count(swarm: Swarm) -> None:
    """Eight more entries come: each may take the time of an exchange, and that of an heir. All the honest count in
    them, and are told of no trouble."""
    swarm.run(30.0)
    before, counted, told = swarm.longest, swarm.history.counted.copy(), len(swarm.trace)
    assert swarm.run(8 * ENTRY, until=lambda: swarm.longest >= before + 8)
    whole = SETTINGS.samples_per_lease * SETTINGS.tokens_per_sample
    for name in HONEST:
        assert swarm.history.counted[name] - counted[name] >= 5 * whole, name
    lines = [line for line in swarm.trace[told:] if line[1] in HONEST]
    assert not [what for line in lines for what in line if isinstance(what, Trouble) and what.reason]


@pytest.mark.parametrize(
    "kind",
    [
        *("starves", "makes absent", "wrong blocks"),
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("mute", "trickles", "many averages", "unsigned blocks")
        ),
    ],
)
def test_a_liar_in_the_exchange_costs_the_others_next_to_nothing(kind: str) -> None:
    the_honest_count(five_together(kind))


def dropped(swarm: Swarm) -> set[tuple[str, str]]:
    """Return the peers of which something was dropped, and what."""
    return {(what.peer, what.what) for line in swarm.trace for what in line if isinstance(what, Dropped)}


@pytest.mark.parametrize("kind", ["wrong blocks", "unsigned blocks"])
def test_blocks_that_are_not_as_committed_are_dropped(kind: str) -> None:
    swarm = five_together(kind)
    swarm.run(100.0)
    assert (LIAR, "contribution") in dropped(swarm)
    assert {peer for peer, _ in dropped(swarm)} == {LIAR}


def test_another_norm_than_the_committed_one_convicts_its_owner_alone() -> None:
    swarm = five_together()
    understates(swarm)
    assert swarm.run(300.0, until=lambda: all(LIAR in swarm.peers[name].peer.log.excluded for name in HONEST))
    assert swarm.history.named.keys() == {"contribution"}
    the_honest_count(swarm)


def test_who_sends_another_format_than_it_has_committed_to_is_absent_from_what_others_average() -> None:
    swarm = five_together()
    swarm.formats = (0, 1)
    mine = swarm.peers[LIAR].fragments[0]
    commit_to = mine.commit_to
    mine.commit_to = lambda trained: commit_to(replace(trained, format=1 - trained.format))  # type: ignore[method-assign]
    swarm.run(60.0)
    counted = swarm.history.counted[LIAR]
    the_honest_count(swarm)
    whole = SETTINGS.samples_per_lease * SETTINGS.tokens_per_sample
    assert swarm.history.counted[LIAR] - counted <= 8 * whole / 4, "its own chunks are with what it averages itself"
    last = swarm.peers["peer0"].peer.log.last
    assert last is not None
    assert {member.format for member in last.roster} == {0, 1}, "the log names formats"


@pytest.mark.parametrize("slower", [50.0, 500.0])
def test_a_leader_that_is_late_for_its_own_round_leads_it_without_its_own_blocks(slower: float) -> None:
    """Regression: it had no averages to compare with, and ended up to six attempts."""
    swarm = five_together()
    leader = swarm.peers["peer0"].peer.log.leader_of(0)
    assert leader is not None
    swarm.peers[leader].speed /= slower
    before = swarm.longest
    assert swarm.run(120.0, until=lambda: swarm.longest >= before + 3)
    assert leader not in swarm.peers[min({*HONEST} - {leader})].peer.log.roster
