"""Who has a say in the next entry: members sign no entry that takes it from a voter that they hear."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import Member
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Dropped, Effect, OpenRound
from peers.protocol.events import HeartbeatsSeen, TrainingDone
from peers.protocol.messages import Begin, Commit, Inquire, Ready
from peers.protocol.patience import Patience
from peers.protocol.rounds import Round
from peers.protocol.schedule import Schedule
from peers.protocol.states import State
from tests.peers.builders import (
    PAYLOAD,
    PAYLOADS,
    SETTINGS,
    SIZE,
    STATE,
    TIMING,
    Rig,
    beat,
    commitments,
    complete,
    first_log,
    member,
    of,
    ready,
    round_of,
    sends,
    trained,
)
from tests.peers.protocol.test_peer import at_second, leading_first
from tests.simulator.simulated_keys import SimulatedKeys

SCHEDULE = Schedule(TIMING)


def begin_of(rig: Rig, gone: str = "", alone: bool = False, named_alone: bool = False) -> Begin:
    """a begins a round with b, in which these are said to be gone; as a minority, or in a round named so."""
    at = rig.attempt().model_copy(update={"alone": alone})
    roster = [one for one in rig.roster() if one.peer in "ab"]
    round = round_of(at.model_copy(update={"alone": named_alone}), roster).model_copy(update={"gone": tuple(gone)})
    return Begin(attempt=at, round=round, seconds=20.0, open=False, commitments=commitments(round))


def reason(effects: list[Effect]) -> str:
    """Why a Begin was dropped; empty: the round is opened."""
    dropped: list[Dropped] = of(effects, Dropped)
    assert bool(dropped) != bool(of(effects, OpenRound))
    return dropped[0].reason if dropped else ""


# What members see to -------------------------------------------------------------------------------------------
def test_nobody_takes_part_in_a_round_that_takes_a_voter_its_say() -> None:
    rig = at_second().trained()
    assert reason(rig.hear("a", begin_of(rig, gone="c"))) == "it takes their say from c, who are here"
    assert rig.is_in(State.READY)
    ((to, said),) = sends(rig.tick(), Ready)
    assert (to, said.heard) == ("a", ("c",)), "so that an honest leader hears of it"
    assert not reason(rig.hear("a", begin_of(rig)))


def test_a_voter_is_in_no_round_as_another_start_than_it_is() -> None:
    """A leader could say that it has started again, and that it is lost: so it would have no say."""
    rig = at_second().trained()
    begin = begin_of(rig)
    idle = Member(peer="c", tokens=0, samples=(), incarnation=9)
    round = round_of(begin.round.name, [*begin.round.roster, idle])
    forged = begin.model_copy(update={"round": round, "commitments": commitments(round)})
    assert reason(rig.hear("a", forged)) == "it takes their say from c, who are here"
    rig.do(HeartbeatsSeen((beat("c", rig.peer.log, sequence=9, incarnation=9),)))
    assert not reason(rig.hear("a", forged)), "it says so itself"


@pytest.mark.parametrize("patience", [0, -1])
def test_voters_that_are_silent_may_be_gone(patience: int) -> None:
    rig = at_second().trained()
    for _ in range(int(TIMING.heartbeat_expiry) + 1 + patience):
        rig.see(others="a", state=PeerState.READY)
        rig.tick()
    assert bool(reason(rig.hear("a", begin_of(rig, gone="c")))) == bool(patience)


def test_a_voter_that_speaks_to_some_alone_is_silent() -> None:
    rig = at_second().trained()
    for _ in range(int(TIMING.heartbeat_expiry) + 1):
        rig.see(others="a", state=PeerState.READY)
        rig.tick()
        rig.hear("c", Inquire(position=rig.peer.log.position))
    assert not reason(rig.hear("a", begin_of(rig, gone="c")))


def test_a_round_that_goes_on_is_the_one_that_was_looked_at() -> None:
    rig = at_second().trained()
    for _ in range(int(TIMING.heartbeat_expiry) + 1):
        rig.see(others="a", state=PeerState.READY)
        rig.tick()
    begin = begin_of(rig, gone="c")
    assert not reason(rig.hear("a", begin))
    rig.see(others="ac")
    again = begin.model_copy(update={"attempt": rig.attempt(2)})
    assert not of(rig.hear("a", again), Dropped), "c is back, and too late for this entry"


@pytest.mark.parametrize(("alone", "named_alone"), [(False, True), (True, False), (True, True)])
def test_most_of_the_voters_are_no_minority(alone: bool, named_alone: bool) -> None:
    """Regression: a round that was named a minority's, in an attempt that was not, took all others their say; and after
    the partition grace most of the voters could call themselves a minority."""
    rig = at_second().trained()
    for _ in range(int(TIMING.partition_grace) + 1):
        rig.see(others="ac", state=PeerState.READY)
        rig.tick()
    why = reason(rig.hear("a", begin_of(rig, "c", alone=alone, named_alone=named_alone)))
    assert ("most are here" if alone and named_alone else "minority's") in why


# What the leader says ------------------------------------------------------------------------------------------
def second_of(rig: Rig) -> Rig:
    """a and b are ready for the second entry, and c is not."""
    rig.holding()
    for name in "bc":
        rig.hear(name, rig.complete(name))
    rig.applied()
    rig.do(TrainingDone(trained(rig.lease)))
    rig.tick(0.0)
    rig.hear("b", ready(rig.peer.log, "b"))
    return rig


def begun(rig: Rig, seen: str) -> Round:
    """The round that begins in the next seconds, while these are seen."""
    for _ in range(2 * int(TIMING.grace)):
        begins = sends(rig.see(others=seen), Begin) + sends(rig.tick(), Begin)
        begins += sends(rig.hear("b", ready(rig.peer.log, "b")), Begin)
        if begins:
            round: Round = begins[0][1].round
            assert round.peers == ("a", "b")
            return round
    raise AssertionError("no round begins")


def test_a_voter_that_is_late_keeps_its_say() -> None:
    rig = second_of(leading_first())
    round = begun(rig, "bc")
    assert round.gone == ()
    rig.holding()
    header = round.entry(rig.peer.log.in_state(STATE), {}, PAYLOAD)
    commits = sends(rig.hear("b", complete(header, round.name, "b")), Commit)
    assert [one.peer for one in commits[0][1].header.bystanders] == ["c"]


def test_a_leader_is_more_patient_with_who_is_silent_than_members_are() -> None:
    """So that they do not object to a round since one of them heard a voter last."""
    rig = second_of(leading_first())
    rig.see(others="c")
    assert begun(rig, "b").gone == (), "its heartbeats have just expired"
    rig = second_of(leading_first())
    rig.tick(SCHEDULE.death + 1)
    assert begun(rig, "b").gone == ("c",)


@pytest.mark.parametrize(("silent", "is_believed"), [(SCHEDULE.death + 1, True), (TIMING.partition_grace + 9, False)])
def test_a_leader_begins_anew_with_a_voter_that_a_member_hears(silent: float, is_believed: bool) -> None:
    """For a while; else whoever says so would keep those who are dead among the voters."""
    rig = second_of(leading_first())
    rig.tick(silent)
    round = begun(rig, "b")
    assert round.gone == ("c",)
    effects = rig.hear("b", ready(rig.peer.log, "b").model_copy(update={"heard": ("c",)}))
    rig.see(others="b")
    again = [begin for _, begin in sends(effects, Begin)]
    if is_believed:
        effects = rig.hear("a", ready(rig.peer.log, "a", last_attempt=round.name.number))
        effects += rig.hear("b", ready(rig.peer.log, "b", last_attempt=round.name.number))
        again = [begin for _, begin in sends(effects + rig.tick(), Begin)]
        assert {begin.round.gone for begin in again} == {()}
    else:
        assert {begin.round for begin in again} <= {round}


# What is lost in a round ---------------------------------------------------------------------------------------
def lost(log: LogState, *roster: Member, missed: str) -> LogState:
    """Where a round of these leads, if all blocks of one are missing."""
    name = Rig().attempt().model_copy(update={"position": log.position})
    return log.append(round_of(name, roster, missed).entry(log, {missed: SIZE.chunks}, PAYLOAD))


def test_who_is_lost_without_a_trace_keeps_its_say() -> None:
    """A leader may say at once that somebody is lost."""
    log = first_log()
    after = lost(log, *[log.expected(name) for name in "abc"], missed="c")
    assert (after.roster, after.voters) == (("a", "b"), ("a", "b", "c"))


def test_newcomers_that_are_lost_have_no_say() -> None:
    log = first_log()
    after = lost(log, log.expected("a"), log.expected("b"), member("z", 120, 140), missed="z")
    assert after.voters == ("a", "b", "c")


# Who turns away from a leader ----------------------------------------------------------------------------------
def ready_for(seconds: float, vote: str) -> Presence:
    """What b thinks of its leader a, whom most have left after so many seconds; by itself it would take `vote`."""
    presence = Presence("b", 10.0, 40.0, bar=20.0, now=0.0)
    desk = Desk("b", SETTINGS, PAYLOADS, 0.0, incarnation=0, keys=SimulatedKeys("b"))
    patience = Patience(desk, presence, first_log())
    desk.now = presence.now = seconds
    presence.vote = vote
    patience.turn_away("a")
    return presence


def test_whoever_goes_with_the_others_after_a_long_time_gives_the_leader_up_too() -> None:
    """Regression: it went back to the leader as soon as votes were split, and so liars that led one after another, and
    were nearly half, kept all from agreeing on somebody honest for an hour."""
    long: Any = SCHEDULE.begin(everyone_is_ready=True)
    assert "a" in ready_for(long, "a").distrusted
    assert "a" not in ready_for(long / 3, "a").distrusted, "they may have seen another one for a moment"
    assert "a" not in ready_for(long, "c").distrusted, "we would not have taken it either"
