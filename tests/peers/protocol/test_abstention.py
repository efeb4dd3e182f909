"""A voter that can take part in nothing is another start from then on, which has no say until it is in an entry."""

from __future__ import annotations

import pytest

from peers.protocol.abstention import TURN
from peers.protocol.events import ReachSeen, TrainingDone, TrainingProgress
from peers.protocol.messages import Excluded, Leaving, Ready
from peers.protocol.states import State
from peers.protocol.troubles import TOLD_AFTER
from peers.values.wire import Reach
from peers.values.workload import Progress
from tests.peers.builders import TIMING, Rig, sends, trained
from tests.peers.protocol.test_peer import at_second

SECONDS = int(TIMING.partition_grace)
WAITS = TURN * TIMING.heartbeat
"""Of the second voter, which this peer is."""
NOBODY = ReachSeen({"a": Reach.NONE, "c": Reach.NONE}, {}, frozenset())


def waits(rig: Rig, seconds: float, live: str | None = None) -> None:
    """So much time passes, and the others are there."""
    for _ in range(int(seconds)):
        assert not sends(rig.tick(), Leaving), "it leaves nobody"
        rig.see(others=live)


def test_whose_workers_hang_gives_its_say_up() -> None:
    rig = at_second()
    assert rig.is_in(State.TRAINING)
    waits(rig, SECONDS - 1)
    assert rig.peer.incarnation == 0
    waits(rig, 3 + WAITS)
    assert rig.peer.incarnation == 1
    assert not rig.peer.log.counts("b", rig.peer.incarnation)
    waits(rig, 4 * SECONDS)
    assert rig.peer.incarnation == 1, "and is no other start once more"


def test_it_takes_part_again_with_what_it_has_trained() -> None:
    rig = at_second()
    waits(rig, SECONDS + 3 + WAITS)
    ((_, said),) = sends(rig.do(TrainingDone(trained(rig.lease))), Ready)
    assert (said.incarnation, said.tokens) == (1, trained(rig.lease).tokens)


@pytest.mark.parametrize("shows_progress", [True, False])
def test_a_worker_that_shows_progress_does_not_hang(shows_progress: bool) -> None:
    rig = at_second()
    for second in range(4 * SECONDS):
        waits(rig, 1)
        if shows_progress and second % (SECONDS // 2) == 0:
            rig.do(TrainingProgress(Progress(1, loss=1.0, tokens_per_second=1.0)))
    assert rig.peer.incarnation == (0 if shows_progress else 1)


def test_what_others_can_bring_about_takes_nobody_its_say() -> None:
    """The leader says that it goes on without us, and an ally of its refuses our connections."""
    rig = at_second().trained()
    rig.do(ReachSeen({"a": Reach.OPEN, "c": Reach.NONE}, {}, frozenset()))
    rig.hear("a", Excluded(position=rig.peer.log.position, reason="no data can be exchanged"))
    waits(rig, 2 * SECONDS)
    assert rig.peer.incarnation == 0
    assert "no data" in rig.peer.troubles.told


def test_whoever_reaches_nobody_gives_its_say_up_in_its_turn() -> None:
    """Others that reach nobody either may have given theirs up before."""
    rig = at_second()
    rig.do(NOBODY)
    waits(rig, TOLD_AFTER + WAITS - 2)
    assert rig.peer.incarnation == 0
    waits(rig, 5)
    assert rig.peer.incarnation == 1


def test_where_too_few_are_left_nobody_gives_its_say_up() -> None:
    """What befalls most of them must not leave the run to the others."""
    rig = at_second()
    rig.do(NOBODY)
    waits(rig, 4 * SECONDS, live="a")
    assert rig.peer.incarnation == 0


def test_whoever_holds_an_entry_keeps_its_say_in_it() -> None:
    """It may be committed with its signature."""
    rig = at_second().trained().averaging().holding()
    rig.do(NOBODY)
    waits(rig, TOLD_AFTER + WAITS + 4)
    assert rig.peer.incarnation == 0
