"""The reasons why what a peer trains may not count, and the say that it gives up when it can take part in nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peers.log.header import Exclusion
from peers.messages.messages import LeaseRequest, Leaving, Propose, Ready, Vote
from peers.presence.heartbeat import PeerState
from peers.protocol.abstention import TURN
from peers.protocol.effects import StopTraining, Train, Trouble
from peers.protocol.events import (
    HeartbeatsSeen,
    NothingToTrain,
    ReachSeen,
    SignedHeadsSeen,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.hindrance import IN_VAIN, SHOWN_AFTER, TRAIN_AGAIN
from peers.protocol.states import State
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import Reach
from peers.values.workload import Progress
from tests.peers.builders import Rig, follower_at_second, of, propose, roster, sends, trained
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, SETTINGS, TIMING, next_header
from tests.peers.protocol.test_catching_up import replays
from tests.simulator.simulated_keys import SimulatedKeys

WAITING = replace(SETTINGS, goes_on_alone=False)
SECONDS = int(TIMING.partition_grace)
WAITS = 2 * TURN * TIMING.heartbeat
"""Of the third voter, which c is."""


def reaches(rig: Rig, **ways: Reach) -> Rig:
    rig.do(ReachSeen(ways, {}))
    return rig


def lasts(rig: Rig, seconds: float = SHOWN_AFTER, others: str | None = None, **said: Any) -> list[Any]:
    """Let so much time pass, while these are heard. Returns all effects."""
    effects: list[Any] = []
    for _ in range(int(seconds) + 1):
        effects += rig.see(others=others, **said) + rig.tick()
    return effects


# What is told --------------------------------------------------------------------------------------------------------
def excluded() -> Rig:
    rig = follower_at_second()
    log = rig.peer.log
    assert log.last is not None
    last = log.last.model_copy(update={"excluded": (Exclusion(peer="c", until=1000),)})
    rig.peer.replica.log = replace(log, last=last)
    return rig


def astray() -> Rig:
    rig = follower_at_second()
    signed = SignedHead.sign("tiny", 1, bytes(32), "z", SimulatedKeys("z"))
    log = rig.peer.log
    rig.do(SignedHeadsSeen(SignedHeads("tiny", ("z",)).with_heads([signed]), {1: log.position.head}))
    return rig


def late() -> Rig:
    rig = follower_at_second()
    rig.do(TrainingProgress(Progress(1, 1.0, 1.0)))
    replays(rig, "ab")
    rig.peer.trainer.in_vain = IN_VAIN
    return rig


def slow() -> Rig:
    rig = Rig("c", "ab", replace(SETTINGS, smallest_share=0.5, staleness=0)).joined().trained().exchanging()
    rig = rig.whole().applying().applied()
    rig.do(TrainingProgress(Progress(1, 1.0, 1.0)))
    rig.peer.trainer.in_vain = 1
    return rig


def probation() -> Rig:
    rig = follower_at_second()
    rig.peer.replica.log = replace(rig.peer.log, probation=3)
    return rig


def minority() -> Rig:
    rig = follower_at_second()
    rig.peer.lineage.doubt = LOG.append(next_header(LOG, roster(LOG, "xyz")))
    return rig


def waits() -> Rig:
    return Rig("c", "ab", WAITING).joined().trained().exchanging().whole().applying().applied()


NONE = dict.fromkeys("ab", Reach.NONE)
HINDERED: dict[str, tuple[Callable[[], Rig], dict[str, Any], str, bool]] = {
    "convicted": (excluded, {}, "excludes it for the next 1000 outer steps", True),
    "on probation": (probation, {}, "its first 3 outer steps do not count", False),
    "astray": (astray, {}, "archive z has signed another outer step 1", False),
    "cut off": (lambda: reaches(follower_at_second(), **NONE), {}, "this peer cannot reach the leader b", True),
    "too slow": (slow, {"speed": 1000.0}, "it cannot finish even the smallest lease in time", True),
    "waiting": (waits, {"others": ""}, "2 of the 3 peers of the last outer step are gone", False),
    "minority": (minority, {}, "only 0 of the 3 peers", False),
    "late": (late, {}, "were made without this peer's training", False),
}


@pytest.mark.parametrize("kind", HINDERED)
def test_r14_why_work_cannot_count_is_told_once_when_it_has_lasted(kind: str) -> None:
    """And a peer does not train what could not count (`is_aside`)."""
    make, said, reason, is_vain = HINDERED[kind]
    rig = make()
    rig.see(**said)
    before = of(rig.effects, Trouble)
    effects = lasts(rig, TIMING.heartbeat_expiry + SHOWN_AFTER + 2, **said)
    (told,) = before + of(effects, Trouble)
    assert reason in told.reason
    assert rig.peer.hindrances.reported_reason == told.reason
    assert rig.peer.hindrances.is_aside is is_vain
    assert not of(lasts(rig, **said), Trouble), "once"
    assert bool(of(effects, StopTraining)) is is_vain


def test_who_goes_on_where_all_others_have_left_is_not_alarmed_while_an_archive_has_its_log() -> None:
    """Regression: a newcomer that came while all others paused was told that its work might count nothing."""
    rig, effects = minority(), list[Any]()
    for sequence in range(1, int(SHOWN_AFTER) + 3):
        archive = beat("z", rig.peer.log, PeerState.ARCHIVING, sequence, index=2)
        effects += rig.do(HeartbeatsSeen((archive,))) + rig.see() + rig.tick()
    (told,) = of(effects, Trouble)
    assert "an archive keeps their outer steps" in told.reason
    assert told.level == "info"


@pytest.mark.parametrize("make", [slow, follower_at_second])
def test_a_peer_of_a_run_that_is_over_is_hindered_by_nothing_and_keeps_its_say(make: Callable[[], Rig]) -> None:
    """Regression: a volunteer that hands the model out was told that it was too slow, or took part in nothing."""
    rig = make()
    before = rig.peer.incarnation
    rig.do(NothingToTrain())
    assert not of(lasts(rig, 3 * SECONDS, speed=1000.0), Trouble)
    assert rig.peer.incarnation == before


def test_r14_a_hindrance_that_is_over_is_told_too_and_it_asks_for_a_lease_again() -> None:
    rig = reaches(follower_at_second(), **NONE)
    lasts(rig)
    assert rig.peer.state is State.JOINING
    effects = reaches(rig, a=Reach.OPEN, b=Reach.OPEN).effects + rig.see() + rig.tick()
    assert of(effects, Trouble) == [Trouble("")]
    assert of(effects, Train) or sends(effects, LeaseRequest)


def test_links_that_fail_for_a_moment_are_no_hindrance() -> None:
    rig = reaches(follower_at_second(), **NONE)
    assert not of(lasts(rig, SHOWN_AFTER - 3), Trouble)
    reaches(rig)
    assert not of(lasts(rig), Trouble)
    assert rig.peer.state is State.TRAINING


def test_r14_a_peer_that_reaches_the_leader_alone_goes_on() -> None:
    rig = reaches(follower_at_second(), a=Reach.NONE)
    assert not of(lasts(rig), Trouble)
    assert rig.peer.state is State.TRAINING


def test_a_peer_that_is_too_slow_tries_again_after_a_long_while() -> None:
    rig = slow()
    lasts(rig, speed=1000.0)
    assert rig.peer.state is State.JOINING
    assert rig.peer.trainer.in_vain > 0
    rig.now += TRAIN_AGAIN
    rig.see(speed=1000.0)
    rig.see(speed=1000.0)
    assert rig.peer.trainer.in_vain == 0


# The say that is given up (R12) --------------------------------------------------------------------------------------
def test_r12_a_voter_whose_workers_hang_gives_its_say_up_and_takes_part_again_with_what_it_has_trained() -> None:
    rig = follower_at_second()
    assert not sends(lasts(rig, SECONDS - 2), Leaving)
    assert rig.peer.incarnation == 0
    assert not sends(lasts(rig, WAITS + 4), Leaving), "it leaves nobody"
    assert rig.peer.incarnation == 1
    assert not rig.peer.log.counts("c", 1)
    lasts(rig, 2 * SECONDS)
    assert rig.peer.incarnation == 1, "and once is enough"
    ((_, said),) = sends(rig.do(TrainingDone(trained(rig.peer.log.leases["c"]))), Ready)
    assert (said.incarnation, said.tokens) == (1, trained(()).tokens)


def test_r12_a_worker_that_shows_progress_does_not_hang() -> None:
    rig = follower_at_second()
    for _ in range(8):
        lasts(rig, SECONDS // 2)
        rig.do(TrainingProgress(Progress(1, loss=1.0, tokens_per_second=1.0)))
    assert rig.peer.incarnation == 0


@pytest.mark.parametrize(
    ("ways", "others", "incarnation"),
    [(NONE, "ab", 1), ({"a": Reach.NONE}, "ab", 0), (NONE, "a", 0)],
    ids=["reaches no peer", "an ally of a liar refuses it", "the others are too few"],
)
def test_r12_a_voter_that_reaches_no_peer_gives_its_say_up_in_its_turn(
    ways: dict[str, Reach], others: str, incarnation: int
) -> None:
    rig = reaches(follower_at_second(), **ways)
    lasts(rig, SHOWN_AFTER + WAITS - 3, others)
    assert rig.peer.incarnation == 0, "others may have given theirs up before"
    lasts(rig, 6, others)
    assert rig.peer.incarnation == incarnation


def test_r12_a_voter_that_has_voted_keeps_its_say_there() -> None:
    """Its vote may have committed the entry."""
    rig = follower_at_second().trained().exchanging().whole()
    assert rig.peer.exchange is not None
    message: Propose = propose(rig.next_header(), round=rig.peer.exchange.round, marks=rig.marks)
    assert sends(rig.hear("b", message), Vote)
    lasts(reaches(rig, **NONE), SHOWN_AFTER + WAITS + 4)
    assert rig.peer.incarnation == 0
