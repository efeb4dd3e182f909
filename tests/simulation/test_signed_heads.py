"""Runs that are founded twice: a peer that knows a signed head goes by that, and by nothing else (R19)."""

from __future__ import annotations

from dataclasses import replace

from peers.log.settings import Timing
from peers.values.signed_heads import SignedHead, SignedHeads
from tests.simulation.test_weaknesses import SETTINGS, reach
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulation import Swarm

ARCHIVE, OTHER = KEYS = ("archive", "other")
FIRST, SECOND = ("peer0", "peer1", "peer2"), ("peer4", "peer5", "peer6", "peer7", "peer8")
NEWCOMER = "peer3"
LATELY = 3  # entries


def founded_twice(seed: int = 1) -> Swarm:
    """Three have founded the run, and five have, who train twice as fast. They have not met."""
    swarm = Swarm(seed, replace(SETTINGS, timing=Timing(grace=30.0, round_timeout=8.0)), one_child=False)
    for name in FIRST + SECOND:
        swarm.start(name)
        swarm.side[name] = int(name in SECOND)
        swarm.peers[name].speed = 2.0 if name in SECOND else 1.0

    def are_founded() -> bool:
        return all(swarm.peers[name].index >= 9 for name in FIRST + SECOND)

    reach(swarm.run(2000.0, until=are_founded), "two foundings")
    assert tokens(swarm, SECOND[0]) > tokens(swarm, FIRST[0])
    return swarm


def tokens(swarm: Swarm, name: str) -> int:
    return swarm.peers[name].peer.log.lineage_tokens


def sign(swarm: Swarm, name: str, index: int, key: str = ARCHIVE) -> bytes:
    """Sign what this peer's log has after so many outer steps. Returns the head."""
    head = swarm.peers[name].entries.heads[index]
    signed = SignedHead.sign("simulated", index, head, key, SimulatedKeys(key))
    swarm.signed = SignedHeads("simulated", KEYS, swarm.signed.heads).with_heads([signed])
    return head


def has(swarm: Swarm, name: str, head: bytes) -> bool:
    return head in swarm.peers[name].entries.heads


def trouble_of(swarm: Swarm, name: str) -> str:
    return swarm.peers[name].peer.hindrances.reported_reason


def at_work_on(swarm: Swarm, names: tuple[str, ...], head: bytes) -> bool:
    """Whether they make entries together on the branch that has this head. A slower peer is not in each of them."""
    latest = [swarm.peers[name].entries._entries[-LATELY:] for name in names]
    rosters = [{peer for header, _ in entries for peer in header.peers} for entries in latest]
    return all(has(swarm, name, head) and set(names) <= roster for name, roster in zip(names, rosters, strict=True))


def test_a_newcomer_joins_the_founding_that_is_signed() -> None:
    """Those of the second founding are more, have trained more, and go by no archive. First it sees them alone: it
    waits rather than join them or found a third."""
    swarm = founded_twice()
    head = sign(swarm, FIRST[0], 8)
    swarm.unaware = set(SECOND)
    for name in FIRST + SECOND:
        swarm.side[name] = int(name in FIRST)
    newcomers = NEWCOMER, "peer9", "peerA"  # enough to found a run
    for name in newcomers:
        swarm.start(name)
    swarm.run(200.0)
    for name in newcomers:
        assert swarm.peers[name].index == 0
        assert trouble_of(swarm, name) == (
            "the run's archives have signed outer step 8, and this peer has not found a log with it yet;"
            " it waits for a peer or an archive that has that log"
        )
    swarm.heal()
    assert swarm.run(600.0, until=lambda: at_work_on(swarm, FIRST + newcomers, head)), "they do not train together"


def test_who_comes_back_with_a_longer_certified_log_leaves_it_for_the_signed_one() -> None:
    swarm = founded_twice()
    head = sign(swarm, FIRST[0], 8)
    swarm.run(40.0)
    for name in SECOND:
        told = trouble_of(swarm, name)
        assert f"the run's archive {ARCHIVE} has signed another outer step 8" in told
    assert not any(trouble_of(swarm, name) for name in FIRST)
    swarm.heal()
    assert swarm.run(600.0, until=lambda: at_work_on(swarm, FIRST + SECOND, head)), "they stay apart"
    swarm.run(30.0)
    assert not any(trouble_of(swarm, name) for name in FIRST + SECOND)


def test_progress_does_not_wait_for_what_is_signed() -> None:
    """The signed head is further on than anybody who is here."""
    swarm = founded_twice()
    ahead = SignedHead.sign("simulated", 10_000, bytes(32), ARCHIVE, SimulatedKeys(ARCHIVE))
    swarm.signed = SignedHeads("simulated", KEYS).with_heads([ahead])
    before = swarm.peers[FIRST[0]].index
    swarm.run(100.0)
    assert swarm.peers[FIRST[0]].index > before
    assert not any(trouble_of(swarm, name) for name in FIRST + SECOND)


def test_two_archives_that_contradict_each_other_are_not_believed() -> None:
    swarm = founded_twice()
    sign(swarm, FIRST[0], 5)
    second = sign(swarm, SECOND[0], 5, OTHER)
    assert swarm.signed.disbelieved == dict.fromkeys(KEYS, 5)
    swarm.heal()
    assert swarm.run(300.0, until=lambda: at_work_on(swarm, FIRST + SECOND, second)), "those who are more decide"
