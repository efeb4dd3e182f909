"""Members that conclude an attempt by themselves, and members whose work can't count."""

from __future__ import annotations

from typing import Any

import pytest

from peers.presence.heartbeat import PeerState
from peers.protocol.agreement import SILENCE
from peers.protocol.effects import Apply, StopTraining, Trouble
from peers.protocol.events import HeartbeatsSeen, PayloadAssembled, ReachSeen, TrainingProgress
from peers.protocol.messages import Complete, Excluded, LeaseGrant, LeaseRequest, Prepared, Waiting
from peers.protocol.states import State
from peers.protocol.troubles import LOOK_AGAIN, TOLD_AFTER, TRAIN_AGAIN
from peers.values.wire import Reach, digest_of
from peers.values.workload import Progress
from tests.peers.builders import PAYLOAD, TIMING, Rig, beat, of, sends

OTHER = digest_of(b"another payload")


def at_second() -> Rig:
    """b has applied the first entry, and trains."""
    return Rig().joined().trained().averaging().holding().applying().applied()


def averaging(is_open: bool = True) -> Rig:
    rig = at_second().trained()
    rig.hear("a", rig.begin().model_copy(update={"open": is_open}))
    assert rig.is_in(State.AVERAGING)
    return rig


def whole(rig: Rig) -> Rig:
    """The payload is here, and nobody has said anything of theirs."""
    assert rig.peer.exchange is not None
    rig.do(PayloadAssembled(rig.peer.exchange.name, PAYLOAD))
    return rig


def prepared(rig: Rig, peer: str = "b", **said: Any) -> Prepared:
    """What the peer says of its payload before it signs."""
    complete = rig.complete(peer, **said)
    return Prepared(**complete.model_dump(include={"payload", "missed", "entry"}), attempt=complete.attempt)


def test_members_of_an_open_attempt_sign_when_all_say_the_same() -> None:
    rig = whole(averaging())
    assert sends(rig.effects, Prepared) == [("a", prepared(rig)), ("c", prepared(rig))]
    assert [waiting.missing for _, waiting in sends(rig.effects, Waiting)] == [("a", "c")], "the leader knows for whom"
    assert not sends(rig.hear("a", prepared(rig, "a")), Complete)
    effects = rig.hear("c", prepared(rig, "c"))
    assert sends(effects, Complete) == [("a", rig.complete("b")), ("c", rig.complete("b"))]
    assert sends(rig.tick(), Complete) == [("a", rig.complete("b"))], "the leader's commit repairs what gets lost"


def test_whoever_has_signed_need_not_say_it_before() -> None:
    """Who hears that all others are ready to sign signs at once, and so says both."""
    rig = whole(averaging())
    rig.hear("a", rig.complete("a"))
    assert sends(rig.hear("c", rig.complete("c")), Complete)
    rig = averaging()
    for name in "ac":
        rig.hear(name, prepared(rig, name))
    whole(rig)
    assert not sends(rig.effects, Prepared)
    assert len(sends(rig.effects, Complete)) == 2


@pytest.mark.parametrize("said", [{"payload": OTHER}, {"missed": (("a", 1),)}])
def test_nobody_signs_what_another_one_does_not_have(said: dict[str, Any]) -> None:
    """Regression: where somebody gave each another average, each held another entry, and none could be given up."""
    rig = whole(averaging())
    rig.hear("a", prepared(rig, "a"))
    rig.hear("c", prepared(rig, "c", **said))
    for _ in range(2 * int(TIMING.heartbeat_expiry)):
        rig.see(state=PeerState.AVERAGING)
        effects = rig.tick()
        assert not sends(effects, Complete)
    assert [waiting.missing for _, waiting in sends(effects, Waiting)] == [("c",)]
    assert rig.peer.slot.acceptor.held is None
    assert sends(rig.hear("c", prepared(rig, "c")), Complete), "it may have been behind by one message"


def test_who_says_nothing_is_not_waited_for_for_ever() -> None:
    """Its words may not come here, though they come to the leader."""
    rig = whole(averaging())
    rig.hear("a", prepared(rig, "a"))
    for _ in range(SILENCE):
        assert not sends(rig.tick(TIMING.resend), Complete)
    assert sends(rig.tick(TIMING.resend), Complete)


def test_whom_we_do_not_reach_is_not_waited_for() -> None:
    rig = averaging()
    rig.do(ReachSeen({"c": Reach.NONE, "a": Reach.OPEN}, {}))
    whole(rig)
    assert [to for to, _ in sends(rig.effects, Prepared)] == ["a"]
    assert sends(rig.hear("a", prepared(rig, "a")), Complete)


def test_what_was_said_in_an_earlier_attempt_counts_no_more() -> None:
    rig = averaging()
    for name in "ac":
        rig.hear(name, prepared(rig, name))
    rig.hear("a", rig.begin(2, lost="c", name=rig.attempt()).model_copy(update={"open": True}))
    whole(rig)
    assert not sends(rig.effects, Complete)
    assert sends(rig.hear("a", prepared(rig, "a", number=2)), Complete)


@pytest.mark.parametrize("first", ["own", "others"])
def test_who_has_heard_the_same_of_all_applies_the_entry(first: str) -> None:
    rig = averaging()
    header = rig.next_header()
    if first == "own":
        rig.holding()
    assert not of(rig.hear("a", rig.complete("a")), Apply)
    effects = rig.hear("c", rig.complete("c"))
    if first == "others":
        rig.holding()
        effects = rig.effects
    assert of(effects, Apply) == [Apply(header)]


@pytest.mark.parametrize(
    "why", ["not open", "one is missing", "another payload", "other chunks lack", "an earlier attempt", "a stranger"]
)
def test_otherwise_the_leader_alone_can_commit(why: str) -> None:
    rig = averaging(is_open=why != "not open").holding()
    rig.hear("a", rig.complete("a"))
    match why:
        case "not open":
            rig.hear("c", rig.complete("c"))
        case "another payload":
            rig.hear("c", rig.complete("c", payload=OTHER))
        case "other chunks lack":
            rig.hear("c", rig.complete("c", missed=(("a", 1),)))
        case "an earlier attempt":
            rig.hear("c", rig.complete("c", number=0))
        case "a stranger":
            rig.hear("z", rig.complete("z"))
    assert rig.is_in(State.AVERAGING)


def test_who_has_left_the_attempt_concludes_nothing() -> None:
    """It may have promised to follow another leader."""
    rig = averaging().holding()
    rig.hear("a", rig.complete("a"))
    rig.see(others="c", state=PeerState.AVERAGING)
    rig.peer.membership.unreachable("a")
    rig.tick()
    assert rig.is_in(State.READY)
    assert not of(rig.hear("c", rig.complete("c")), Apply)


def test_those_who_are_lost_need_not_be_complete() -> None:
    rig = averaging()
    going_on = rig.begin(2, lost="c", name=rig.attempt()).model_copy(update={"open": True})
    rig.hear("a", going_on)
    whole(rig)
    assert [to for to, _ in sends(rig.effects, Prepared)] == ["a"]
    assert of(rig.hear("a", rig.complete("a", number=2)), Apply)


def test_who_waits_says_with_whom_it_can_exchange_nothing() -> None:
    rig = averaging()
    rig.do(ReachSeen({"c": Reach.NONE, "a": Reach.OPEN}, {}))
    (_, waiting), *_ = sends(rig.tick(), Waiting)
    assert waiting.unreached == ("c",)


# Trouble -------------------------------------------------------------------------------------------------------
def excluded(rig: Rig) -> Excluded:
    return Excluded(position=rig.peer.log.position, reason="no data can be exchanged between this peer and c")


def test_who_is_left_out_is_told_stops_and_asks_again_later() -> None:
    rig = at_second().trained()
    rig.do(ReachSeen({"c": Reach.NONE}, {}))
    [trouble] = of(rig.hear("a", excluded(rig)), Trouble)
    assert "no data can be exchanged" in trouble.reason
    assert rig.peer.troubles.told == trouble.reason
    assert rig.is_in(State.JOINING)
    rig.see()
    assert not sends(rig.tick(), LeaseRequest)
    rig.now += LOOK_AGAIN
    rig.see()
    assert [to for to, _ in sends(rig.tick(), LeaseRequest)] == ["a"], "though it has a lease in the log"
    grant = LeaseGrant(position=rig.peer.log.position, samples=rig.lease, steps=10)
    assert of(rig.hear("a", grant), Trouble) == [Trouble("")]
    assert rig.is_in(State.TRAINING)


def test_who_is_left_out_and_reaches_everybody_asks_again_soon() -> None:
    """Regression: the leader had heard of the others' broken links before they were mended, and a minute was lost."""
    rig = at_second().trained()
    rig.do(ReachSeen({"c": Reach.NONE}, {}))
    for reach, seconds in ((Reach.NONE, LOOK_AGAIN), (Reach.OPEN, TOLD_AFTER)):
        rig.do(ReachSeen({"c": reach}, {}))
        one = rig.peer.troubles
        one.left_out("for some reason")
        rig.now += seconds - 1
        rig.see()
        assert not one.may_ask
        rig.now += 1
        rig.see()
        assert one.may_ask


def test_a_leader_that_leaves_out_a_peer_whom_all_reach_is_not_believed() -> None:
    """Regression: a leader that left out all others made its entries alone, for ever."""
    rig = at_second().trained()
    assert not of(rig.hear("a", excluded(rig)), Trouble)
    assert rig.is_in(State.READY)
    assert rig.peer.slot.leadership.elect() == rig.peer.me, "it distrusts the leader, and is the next one"


def test_it_asks_again_at_once_when_its_links_have_changed() -> None:
    rig = at_second().trained()
    rig.do(ReachSeen({"c": Reach.NONE}, {}))
    rig.hear("a", excluded(rig))
    rig.do(ReachSeen({"c": Reach.PUNCHED}, {}))
    assert sends(rig.tick(), LeaseRequest)


def test_only_the_leader_is_believed_that_we_are_left_out() -> None:
    rig = at_second().trained()
    assert not of(rig.hear("c", excluded(rig)), Trouble)
    assert rig.is_in(State.READY)


def test_who_holds_an_entry_keeps_its_word_and_stays() -> None:
    rig = averaging().holding()
    rig.hear("a", excluded(rig))
    assert rig.is_in(State.AVERAGING)


def test_who_stands_aside_keeps_its_promises() -> None:
    rig = at_second().trained()
    pledged = rig.peer.slot.acceptor
    rig.hear("a", excluded(rig))
    assert rig.peer.slot.acceptor is pledged
    assert pledged.pledged_to == "a"


@pytest.mark.parametrize(("kind", "stops"), [("a", True), ("c", False)])
def test_who_cannot_reach_the_leader_stops(kind: str, stops: bool) -> None:
    rig = at_second()
    rig.do(ReachSeen({"a": Reach.NONE, "c": Reach.NONE} if stops else {"c": Reach.NONE}, {}))
    rig.see()
    assert rig.is_in(State.TRAINING), "links come and go"
    rig.now += TOLD_AFTER
    effects = rig.see()
    assert bool(of(effects, Trouble)) is bool(of(effects, StopTraining)) is stops
    assert rig.is_in(State.JOINING if stops else State.TRAINING)
    if stops:
        assert of(rig.do(ReachSeen({}, {})), Trouble) == [Trouble("")]


def fast_others(rig: Rig) -> HeartbeatsSeen:
    rig.sequence += 1
    return HeartbeatsSeen(tuple(beat(name, rig.peer.log, sequence=rig.sequence, speed=1000.0) for name in "ac"))


def test_who_is_too_slow_is_told_and_stops_when_a_lease_was_in_vain() -> None:
    rig = at_second()
    rig.do(TrainingProgress(Progress(1, loss=1.0, tokens_per_second=10.0)))
    rig.do(fast_others(rig))
    rig.now += TOLD_AFTER
    [trouble] = of(rig.do(fast_others(rig)), Trouble)
    assert "10 tokens a second" in trouble.reason
    assert rig.is_in(State.TRAINING), "others may boast of their speed"
    rig.peer.trainer.in_vain = 1
    assert of(rig.do(fast_others(rig)), StopTraining)
    assert rig.is_in(State.JOINING)
    rig.now += TRAIN_AGAIN
    rig.do(fast_others(rig))
    rig.do(fast_others(rig))
    rig.tick()
    assert rig.is_in(State.TRAINING), "it may have become faster"
