"""A voter that can take part in nothing says farewell as the start that has the say, and is another one."""

from __future__ import annotations

import pytest

from peers.log.certificate import Departure
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Effect
from peers.protocol.events import ReachSeen, TrainingDone, TrainingProgress
from peers.protocol.messages import Excluded, Leaving, Ready
from peers.protocol.states import State
from peers.protocol.troubles import TOLD_AFTER
from peers.simulator.simulated_keys import SimulatedKeys
from peers.values.reach import Reach
from peers.values.workload import Progress
from tests.peers.builders import RUN, TIMING, Rig, sends, trained
from tests.peers.protocol.test_peer import at_second

SECONDS = int(TIMING.partition_grace)
EXPIRY = TIMING.heartbeat_expiry


def farewells(effects: list[Effect]) -> dict[str, Leaving]:
    return dict(sends(effects, Leaving))


def waits(rig: Rig, seconds: float) -> list[Effect]:
    """What it does while so much time passes, and the others are there."""
    effects: list[Effect] = []
    for _ in range(int(seconds)):
        effects += rig.tick()
        effects += rig.see(state=PeerState.TRAINING)
    return effects


def test_whose_workers_hang_gives_its_say_up() -> None:
    rig = at_second()
    assert rig.is_in(State.TRAINING)
    assert not farewells(waits(rig, SECONDS - 1))
    said = farewells(waits(rig, 3))
    assert said.keys() == {"a", "c"}, "those who count it"
    told = said["a"]
    text = Departure(run=RUN, peer="b", incarnation=0, index=told.departure).text
    assert SimulatedKeys("b").verify("b", text, told.signature)
    assert (told.incarnation, rig.peer.incarnation) == (0, 1)
    assert told.departure <= rig.peer.log.position.index, "it counts in no quorum from this entry on"
    assert not rig.peer.log.counts("b", rig.peer.incarnation)


def test_it_says_so_again_until_an_entry_takes_its_say() -> None:
    rig = at_second()
    waits(rig, SECONDS + 3)
    again = farewells(waits(rig, EXPIRY + 2))
    assert (again["a"].incarnation, again["a"].position) == (0, rig.peer.log.position)
    assert rig.peer.incarnation == 1, "and is no other start once more"


def test_it_takes_part_again_with_what_it_has_trained() -> None:
    rig = at_second()
    waits(rig, SECONDS + 3)
    ((_, said),) = sends(rig.do(TrainingDone(trained(rig.lease))), Ready)
    assert (said.incarnation, said.tokens) == (1, trained(rig.lease).tokens)


@pytest.mark.parametrize("shows_progress", [True, False])
def test_a_worker_that_shows_progress_does_not_hang(shows_progress: bool) -> None:
    rig = at_second()
    effects: list[Effect] = []
    for second in range(4 * SECONDS):
        effects += waits(rig, 1)
        if shows_progress and second % (SECONDS // 2) == 0:
            rig.do(TrainingProgress(Progress(1, loss=1.0, tokens_per_second=1.0)))
    assert bool(farewells(effects)) != shows_progress


def test_what_others_can_bring_about_takes_nobody_its_say() -> None:
    """The leader says that it goes on without us, and an ally of its refuses our connections."""
    rig = at_second().trained()
    rig.do(ReachSeen({"a": Reach.OPEN, "c": Reach.NONE}, {}, frozenset()))
    rig.hear("a", Excluded(position=rig.peer.log.position, reason="no data can be exchanged"))
    assert not farewells(waits(rig, 2 * SECONDS))
    assert "no data" in rig.peer.troubles.told


def test_whoever_reaches_nobody_gives_its_say_up() -> None:
    rig = at_second()
    rig.do(ReachSeen({"a": Reach.NONE, "c": Reach.NONE}, {}, frozenset()))
    assert not farewells(waits(rig, TOLD_AFTER - 2))
    assert farewells(waits(rig, 4)).keys() == {"a", "c"}


def test_whoever_holds_an_entry_keeps_its_say_in_it() -> None:
    """It may be committed with its signature."""
    rig = at_second().trained().averaging().holding()
    rig.do(ReachSeen({"a": Reach.NONE, "c": Reach.NONE}, {}, frozenset()))
    assert not farewells(waits(rig, TOLD_AFTER + 4))
    assert rig.peer.incarnation == 0
