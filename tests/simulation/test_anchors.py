"""Runs that are founded a second time: whoever knows what an anchor has signed goes by that, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.settings import Timing
from peers.values.anchors import AnchoredHead, Anchors
from tests.simulation.test_weaknesses import SETTINGS, reach
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulation import Swarm

ANCHOR = "anchor"
KEYS = (ANCHOR, "archive")
FIRST, SECOND = ("peer0", "peer1", "peer2"), ("peer4", "peer5", "peer6", "peer7", "peer8")
NEWCOMER = "peer3"
LATELY = 3  # entries


def founded_twice(seed: int) -> Swarm:
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


def anchor(swarm: Swarm, name: str, index: int, key: str = ANCHOR) -> bytes:
    """Sign what this peer's log has after so many outer steps. Returns the head."""
    head = swarm.peers[name].entries.heads[index]
    signed = AnchoredHead.sign("simulated", index, head, key, SimulatedKeys(key))
    told = Anchors("simulated", KEYS, (signed,)).packed
    swarm.anchors = Anchors("simulated", KEYS, swarm.anchors.heads).taking(told, SimulatedKeys("any").verify)
    return head


def has(swarm: Swarm, name: str, head: bytes) -> bool:
    return head in swarm.peers[name].entries.heads


def trouble_of(swarm: Swarm, name: str) -> str:
    return swarm.peers[name].peer.troubles.told


def at_work_on(swarm: Swarm, names: tuple[str, ...], head: bytes) -> bool:
    """Whether they make entries together on the branch that has this head. A slower peer is not in each of them."""
    latest = [swarm.peers[name].entries._entries[-LATELY:] for name in names]
    rosters = [{peer for header, _ in entries for peer in header.peers} for entries in latest]
    return all(has(swarm, name, head) and set(names) <= roster for name, roster in zip(names, rosters, strict=True))


@pytest.mark.parametrize(("seed", "index"), [(1, 2), (1, 8), (2, 8), (3, 2)])
def test_a_newcomer_joins_the_founding_that_is_anchored(seed: int, index: int) -> None:
    """Those of the second founding are more, have trained more, and go by no anchor."""
    swarm = founded_twice(seed)
    swarm.unaware = set(SECOND)
    head = anchor(swarm, FIRST[0], index)
    swarm.heal()
    swarm.start(NEWCOMER)
    assert swarm.run(300.0, until=lambda: at_work_on(swarm, (*FIRST, NEWCOMER), head)), "they do not train together"
    assert not any(has(swarm, name, head) for name in SECOND)
    assert not any(trouble_of(swarm, name) for name in (*FIRST, NEWCOMER))


def test_without_an_anchor_it_joins_the_other_one() -> None:
    swarm = founded_twice(1)
    swarm.heal()
    swarm.start(NEWCOMER)
    second = swarm.peers[SECOND[0]].entries.heads[2]
    assert swarm.run(300.0, until=lambda: at_work_on(swarm, (*FIRST, *SECOND, NEWCOMER), second))


@pytest.mark.parametrize("seed", [1, 2])
def test_who_comes_back_with_a_longer_certified_log_leaves_it_for_the_anchored_one(seed: int) -> None:
    swarm = founded_twice(seed)
    head = anchor(swarm, FIRST[0], 8)
    swarm.run(40.0)
    for name in SECOND:
        told = trouble_of(swarm, name)
        assert told.startswith(f"the run's anchor {ANCHOR} has signed another outer step 8 than this peer's"), told
    assert not any(trouble_of(swarm, name) for name in FIRST)
    swarm.heal()
    assert swarm.run(600.0, until=lambda: at_work_on(swarm, FIRST + SECOND, head)), "they stay apart"
    swarm.run(30.0)
    assert not any(trouble_of(swarm, name) for name in FIRST + SECOND)


def test_a_branch_that_has_not_come_so_far_is_behind_and_nothing_worse() -> None:
    """The anchor's head is further on than anybody who is here."""
    swarm = founded_twice(1)
    ahead = AnchoredHead.sign("simulated", 10_000, bytes(32), ANCHOR, SimulatedKeys(ANCHOR))
    swarm.anchors = Anchors("simulated", KEYS).with_heads([ahead])
    before = swarm.peers[FIRST[0]].index
    swarm.run(100.0)
    assert swarm.peers[FIRST[0]].index > before
    assert not any(trouble_of(swarm, name) for name in FIRST + SECOND)


def test_a_newcomer_waits_for_the_anchored_log_rather_than_join_another_or_found_a_third() -> None:
    swarm = founded_twice(1)
    head = anchor(swarm, FIRST[0], 8)
    swarm.unaware = set(SECOND)
    for name in SECOND:
        swarm.side[name] = 0
    for name in FIRST:
        swarm.side[name] = 1
    for name in (NEWCOMER, "peer9", "peerA"):  # enough to found a run
        swarm.start(name)
    swarm.run(400.0)
    for name in (NEWCOMER, "peer9", "peerA"):
        assert swarm.peers[name].index == 0
        assert trouble_of(swarm, name) == (
            "the run's anchors have signed outer step 8, and this peer has not seen a log yet that has it;"
            " it waits for a peer or an archive with that log"
        )
    swarm.heal()
    together = (*FIRST, NEWCOMER, "peer9", "peerA")
    assert swarm.run(600.0, until=lambda: at_work_on(swarm, together, head)), "the newcomers do not find it"


def test_an_anchor_that_has_signed_both_foundings_is_not_believed() -> None:
    swarm = founded_twice(1)
    anchor(swarm, FIRST[0], 5)
    second = anchor(swarm, SECOND[0], 5)
    assert swarm.anchors.liars == {ANCHOR: 5}
    swarm.heal()
    assert swarm.run(300.0, until=lambda: at_work_on(swarm, FIRST + SECOND, second)), "those who are more decide"


def test_the_key_that_is_named_first_overrules_a_stolen_one() -> None:
    swarm = founded_twice(1)
    anchor(swarm, SECOND[0], 9, "archive")
    swarm.run(40.0)
    assert all(trouble_of(swarm, name).startswith("the run's anchor archive") for name in FIRST)
    first = anchor(swarm, FIRST[0], 5)
    swarm.heal()
    assert swarm.run(300.0, until=lambda: at_work_on(swarm, FIRST + SECOND, first))
    swarm.run(30.0)
    assert not any(trouble_of(swarm, name) for name in FIRST + SECOND)
