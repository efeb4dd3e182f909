"""The organiser's amendments come into the log under any leader, and never make two peers disagree (R18).

The simulator checks after every step that each peer's state is the one that the log's entries lead to; with an
amendment in force, an outer step gives another state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from peers.log.settings import RunSettings, Timing
from peers.protocol.amending import Amending
from peers.protocol.events import AmendmentSeen
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from peers.values.wire import digest_of
from tests.simulator.malice import promised
from tests.simulator.schedules import LONGEST_TRAINING, agreed, draw_life, live
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
SETTINGS = RunSettings(
    "simulated", digest_of(b"manifest"), 10, 20, 10, 3, TIMING, organiser=ORGANISER.peer_id, exclusion=0
)


def amendment(number: int = 1, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign("simulated", number, b"%g" % learning_rate, by)


def swarm_of(number: int, settings: RunSettings = SETTINGS, seed: int = 1) -> Swarm:
    """A swarm that has made its first entry."""
    swarm = Swarm(seed, settings)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    for name in range(number):
        swarm.start(f"peer{name}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    return swarm


def give(swarm: Swarm, name: str, given: Amendment) -> None:
    swarm.handle(swarm.peers[name], AmendmentSeen(given))


def leader_of(swarm: Swarm) -> SimulatedPeer:
    leader = swarm.living[0].peer.log.leader_of(0)
    assert leader is not None
    return swarm.peers[leader]


def in_force(peers: Iterable[SimulatedPeer]) -> set[Amendment | None]:
    return {one.peer.log.amendment for one in peers}


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("given_to", ["peer0", "peer3"])
def test_all_peers_have_it_within_two_entries_whoever_was_given_it(given_to: str, fragments: int) -> None:
    swarm = swarm_of(4, replace(SETTINGS, fragments=fragments))
    before = swarm.longest
    give(swarm, given_to, amendment())
    assert in_force(swarm.living) == {None}, "it waits for an entry"
    assert swarm.run(100.0, until=lambda: in_force(swarm.living) == {amendment()} and agreed(swarm))
    assert swarm.longest <= before + 2
    assert swarm.run(100.0, until=lambda: swarm.longest >= before + 5 and agreed(swarm))
    assert len({one.state for one in swarm.living}) == 1
    assert in_force(swarm.living) == {amendment()}, "and it stays in force"
    assert {one.peer.proposed_amendment for one in swarm.living} == {None}


def test_a_joiner_and_a_peer_that_starts_again_have_it_from_the_log() -> None:
    swarm = swarm_of(4)
    give(swarm, "peer1", amendment())
    assert swarm.run(100.0, until=lambda: in_force(swarm.living) == {amendment()})
    swarm.kill("peer3")
    swarm.run(30.0)
    for name in ("peer3", "joiner"):
        swarm.start(name)
    before = swarm.longest
    assert swarm.run(200.0, until=lambda: swarm.longest >= before + 3 and agreed(swarm))
    assert {"peer3", "joiner"} <= set(swarm.peers["peer0"].peer.log.roster)
    assert in_force(swarm.living) == {amendment()}
    assert len({one.state for one in swarm.living}) == 1


def test_a_leader_that_leaves_it_out_delays_it_and_nothing_else() -> None:
    swarm = swarm_of(5)
    leader = leader_of(swarm)
    leader.peer._context.amending.hear = lambda amendment: False  # type: ignore[method-assign]
    give(swarm, next(one.name for one in swarm.living if one is not leader), amendment())
    before = swarm.longest
    assert swarm.run(200.0, until=lambda: swarm.longest >= before + 3 and agreed(swarm)), "nobody waits for it"
    assert in_force(swarm.living) == {None}
    swarm.kill(leader.name)
    assert swarm.run(100.0, until=lambda: in_force(swarm.living) == {amendment()}), "the next leader takes it in"


@pytest.mark.parametrize(
    "made_up", [amendment(by=STRANGER), Amendment.sign("another", 1, b"0.4", ORGANISER)], ids=["forged", "of another"]
)
def test_a_leader_that_makes_one_up_gets_no_entry(made_up: Amendment) -> None:
    """Its members refuse it, as they do whatever can lead to no entry, and turn to the next leader."""
    swarm = swarm_of(5)
    liar = leader_of(swarm)
    liar.peer._context.amending._newest = made_up
    before = swarm.longest
    limit = promised(TIMING, LONGEST_TRAINING, liars=1)
    assert swarm.run(limit, until=lambda: swarm.longest >= before + 2)
    assert in_force(swarm.living) == {None}
    assert not any(one.peer.proposed_amendment for one in swarm.living if one is not liar), "nobody passes it on"


def test_of_two_with_one_number_the_log_has_the_one_that_came_first() -> None:
    swarm = swarm_of(4)
    one, other = amendment(1, 0.4), amendment(1, 0.5)
    give(swarm, "peer0", one)
    for name in ("peer1", "peer2", "peer3"):
        give(swarm, name, other)
    assert swarm.run(100.0, until=lambda: None not in in_force(swarm.living) and agreed(swarm))
    (first,) = in_force(swarm.living)
    before = swarm.longest
    swarm.kill(leader_of(swarm).name)
    assert swarm.run(200.0, until=lambda: swarm.longest >= before + 3 and agreed(swarm))
    assert in_force(swarm.living) == {first}, "whoever leads next has the other one, and it comes too late"
    give(swarm, swarm.living[0].name, amendment(2, 0.3))
    assert swarm.run(100.0, until=lambda: in_force(swarm.living) == {amendment(2, 0.3)})


@pytest.mark.parametrize(
    ("fragments", "seeds"), [(1, 2), (2, 2), *(pytest.param(count, 12, marks=pytest.mark.thorough) for count in (1, 2))]
)
def test_random_lives_with_amendments(fragments: int, seeds: int) -> None:
    """Peers are killed, stopped, cut off and start again while amendments come in; and at the end all agree."""
    amended = 0
    for seed in range(seeds):
        swarms = list[Swarm]()

        def watch(swarm: Swarm, swarms: list[Swarm] = swarms, seed: int = seed) -> None:
            swarm.settings = replace(swarm.settings, organiser=ORGANISER.peer_id)
            swarms.append(swarm)
            draw = random.Random(seed)

            def amend(number: int) -> None:
                give(swarm, draw.choice(swarm.living).name, amendment(number, 1.0 / number))

            for number in range(1, 7):
                swarm.at(draw.uniform(10.0, 40.0) * number, lambda number=number: amend(number))  # type: ignore[misc]

        live(draw_life(seed, fragments), watch)
        (last,) = in_force(swarms[0].living)
        amended += last is not None
    assert amended == seeds


@pytest.mark.parametrize(
    ("fragments", "unable"),
    [(1, ["peer3"]), (3, ["peer1", "peer2", "peer3"]), (1, ["peer0", "peer1", "peer2", "peer3"])],
)
def test_an_amendment_that_too_many_cannot_follow_stays_out_and_the_run_goes_on(
    unable: list[str], fragments: int
) -> None:
    swarm = swarm_of(4, replace(SETTINGS, fragments=fragments))
    for name in unable:
        context = swarm.peers[name].peer._context
        context.settings = replace(context.settings, why_not_followed=lambda amendment: "It is too new.")
        context.amending = Amending(context.settings)
    before = swarm.longest
    for name in swarm.peers:
        give(swarm, name, amendment())
    assert swarm.run(600.0, until=lambda: swarm.longest >= before + 8 and agreed(swarm)), "the run goes on"
    is_quorum_able = len(unable) == 1
    assert in_force(swarm.living) == ({amendment()} if is_quorum_able else {None})
