"""One peer's protocol: its states, what it refuses, and how it gets out of trouble."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from peers.errors import LocalProtocolError
from peers.events import (
    Applied,
    Apply,
    BadBlocks,
    Event,
    FetchSnapshot,
    HeartbeatsSeen,
    LeaveRequested,
    OpenRound,
    PayloadDigested,
    SnapshotFailed,
    SnapshotRestored,
    Stop,
    StopTraining,
    Tick,
    Train,
    TrainingDone,
    Undelivered,
)
from peers.heartbeat import PeerState
from peers.leases import PIECE_LIMIT, SampleRange
from peers.log import Header, LogState
from peers.messages import (
    Abort,
    Accuse,
    Attempt,
    Begin,
    Commit,
    Complete,
    Elsewhere,
    Held,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Ready,
    Refuse,
    Waiting,
)
from peers.states import TRANSITIONS, State
from peers.wire import digest_of
from tests.peers.builders import (
    LOG,
    PAYLOAD,
    SETTINGS,
    STATE,
    TIMING,
    Rig,
    attempt,
    beat,
    first_log,
    member,
    of,
    ready,
    sends,
    trained,
)

OTHER = digest_of(b"another payload")


def at_second() -> Rig:
    """b has applied the first entry and trains its second lease."""
    rig = Rig().joined().trained().averaging().holding().applying().applied()
    assert rig.is_in(State.TRAINING)
    return rig


def ahead_by(rig: Rig, entries: int, payload: bytes = OTHER) -> LogState:
    log = rig.peer.log
    for _ in range(entries):
        pool_start = log.pool.cursor
        leases = log.leases
        samples = leases.get("a", (SampleRange(pool_start, pool_start + 20),))
        log = log.append(log.next_header([member("a", samples[0].start, samples[0].stop)], payload))
    return log


IN_STATE: dict[State, Callable[[], Rig]] = {
    State.JOINING: Rig,
    State.TRAINING: at_second,
    State.READY: lambda: at_second().trained(),
    State.AVERAGING: lambda: at_second().trained().averaging(),
    State.APPLYING: lambda: at_second().trained().averaging().holding().applying(),
    State.FETCHING: lambda: fetching(at_second()),
    State.LEFT: lambda: left(at_second()),
}


def fetching(rig: Rig) -> Rig:
    rig.see(ahead_by(rig, 1))
    assert rig.is_in(State.FETCHING)
    return rig


def left(rig: Rig) -> Rig:
    rig.do(LeaveRequested(at_once=True))
    assert rig.is_in(State.LEFT)
    return rig


@pytest.mark.parametrize("state", IN_STATE)
def test_every_state_is_reached(state: State) -> None:
    assert IN_STATE[state]().peer.state is state


# The way through a round ---------------------------------------------------------------------------------------
def test_joining_asks_the_leader_for_a_lease_once_peers_can_have_met() -> None:
    rig = Rig()
    assert rig.tick(100.0) == []  # it has not even looked who is there
    rig.see(state=PeerState.JOINING)
    assert [to for to, _ in sends(rig.tick(), LeaseRequest)] == ["a"]
    assert sends(rig.tick(0.5), LeaseRequest) == []
    assert sends(rig.tick(0.5), LeaseRequest), "no answer: asked again"


def test_the_first_entry_waits_for_the_minimum_of_peers() -> None:
    rig = Rig(others="a")
    rig.see(state=PeerState.JOINING)
    assert rig.tick(5.0) == []
    rig.see(others="ac", state=PeerState.JOINING)
    assert sends(rig.tick(), LeaseRequest)


def test_the_first_leader_gives_itself_a_lease() -> None:
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    effects = rig.tick(5.0)
    assert of(effects, Train) == [Train(0, (SampleRange(0, 20),), 10)]
    granted = rig.hear("b", LeaseRequest(position=LOG.position, state_digest=STATE))
    assert sends(granted, LeaseGrant)[0][1].samples == (SampleRange(20, 40),)


def test_a_whole_round_of_a_member() -> None:
    rig = Rig().joined()
    (say,) = sends(rig.do(TrainingDone(trained(rig.lease))), Ready)
    assert say == ("a", ready(LOG, "b", samples=rig.lease, incumbent=False))
    opened = of(rig.hear("a", rig.begin()), OpenRound)
    assert [effect.owners for effect in opened] == [("a", "b", "c")]
    assert sends(rig.tick(), Waiting)
    effects = rig.do(PayloadDigested(attempt(LOG), PAYLOAD))
    assert sends(effects, Complete) == [("a", Complete(attempt=attempt(LOG), payload=PAYLOAD))]
    header = rig.next_header()
    assert of(rig.hear("a", Commit(header=header)), Apply) == [Apply(header)]
    assert of(rig.do(Applied(header, OTHER)), Train) == [Train(1, rig.lease, 10)]
    assert rig.peer.state_digest == OTHER
    assert rig.peer.log.last == header
    rig.see()
    assert sends(rig.do(TrainingDone(trained(rig.lease))), Ready)[0][1].incumbent


def test_a_leader_does_the_whole_round_with_itself_as_a_member() -> None:
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    rig.do(TrainingDone(trained((SampleRange(0, 20),))))
    for place, name in enumerate("bc", 1):
        rig.hear(name, ready(LOG, name, samples=(SampleRange(20 * place, 20 * place + 20),)))
    rig.see(state=PeerState.READY)
    effects = rig.tick()
    assert [to for to, _ in sends(effects, Begin)] == ["b", "c"]
    assert rig.is_in(State.AVERAGING)
    rig.do(PayloadDigested(attempt(LOG), PAYLOAD))
    rig.hear("b", Complete(attempt=attempt(LOG), payload=PAYLOAD))
    effects = rig.hear("c", Complete(attempt=attempt(LOG), payload=PAYLOAD))
    assert [to for to, _ in sends(effects, Commit)] == ["b", "c"]
    assert of(effects, Apply)
    assert rig.is_in(State.APPLYING)


# What is illegal, and what is merely late ----------------------------------------------------------------------
HEADER = LOG.next_header([member("a", 0, 20)], PAYLOAD)
ILLEGAL: list[tuple[Event, State]] = [
    *((Applied(HEADER, STATE), state) for state in State if state not in (State.APPLYING, State.LEFT)),
    *((SnapshotRestored("a", None, STATE), state) for state in State if state not in (State.FETCHING, State.LEFT)),
    *((SnapshotFailed("a", ""), state) for state in State if state not in (State.FETCHING, State.LEFT)),
]


@pytest.mark.parametrize(
    ("event", "state"), ILLEGAL, ids=lambda value: str(value) if isinstance(value, State) else type(value).__name__
)
def test_events_that_nobody_asked_for_are_bugs_of_ours(event: Event, state: State) -> None:
    rig = IN_STATE[state]()
    log = rig.peer.log
    with pytest.raises(LocalProtocolError):
        rig.do(event)
    assert rig.peer.log == log


def test_unknown_events_are_bugs_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="no such event"):
        Rig().do("surprise")  # type: ignore[arg-type]


def test_only_the_transitions_in_the_table_are_possible() -> None:
    for first in State:
        for second in set(State) - TRANSITIONS[first]:
            rig = Rig()
            rig.peer.state = first
            with pytest.raises(LocalProtocolError, match=f"{first} can't become {second}"):
                rig.peer._enter(second)


@pytest.mark.parametrize("state", State)
def test_late_news_of_training_and_rounds_is_void(state: State) -> None:
    rig = IN_STATE[state]()
    assert of(rig.do(PayloadDigested(attempt(LOG, 99), PAYLOAD)), Apply) == []
    if state is not State.TRAINING:
        rig.do(TrainingDone(trained(rig.lease)))
    assert rig.peer.state is state


# Pledges -------------------------------------------------------------------------------------------------------
def refused_begin(rig: Rig, sender: str, begin: Begin) -> bool:
    return not of(rig.hear(sender, begin), OpenRound)


def test_no_attempt_of_a_leader_that_we_are_not_pledged_to() -> None:
    rig = at_second().trained()
    assert refused_begin(rig, "c", rig.begin(leader="c"))
    assert refused_begin(rig, "c", rig.begin(leader="a"))
    assert refused_begin(rig, "a", rig.begin(leader="c"))
    assert not refused_begin(rig, "a", rig.begin())


def test_no_attempt_that_changes_our_offer() -> None:
    rig = at_second().trained()
    roster = tuple(one if one.peer != "b" else one.model_copy(update={"tokens": 1}) for one in rig.roster())
    assert refused_begin(rig, "a", rig.begin().model_copy(update={"roster": roster}))
    assert refused_begin(rig, "a", rig.begin().model_copy(update={"roster": (rig.roster()[0],)}))


def test_no_attempt_that_our_ready_did_not_promise() -> None:
    rig = at_second().trained()
    assert refused_begin(rig, "a", rig.begin(number=2))
    assert refused_begin(rig, "a", rig.begin(number=0))


def test_no_attempt_that_can_lead_to_no_entry() -> None:
    """Regression: a roster that the log does not allow raised LogError when the payload was complete."""
    rig = at_second().trained()
    begin = rig.begin()
    twice = (*begin.roster, begin.roster[0])
    others = (begin.roster[1], member("c", 80, 100))
    for roster in (twice, others):
        assert refused_begin(rig, "a", begin.model_copy(update={"roster": roster}))
    forged = Held(attempt=attempt(rig.peer.log), header=rig.next_header().model_copy(update={"cursor": 1}))
    assert refused_begin(rig, "a", rig.begin(adopted=forged, holders="a"))
    real = Held(attempt=attempt(rig.peer.log), header=rig.next_header())
    assert refused_begin(rig, "a", rig.begin(adopted=real, holders=""))
    assert refused_begin(rig, "a", rig.begin(holders="a"))
    assert not refused_begin(rig, "a", begin)


def test_no_attempt_that_ignores_what_we_hold() -> None:
    rig = at_second().trained().averaging().holding()
    held = Held(attempt=attempt(rig.peer.log, 1), header=rig.next_header())
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 1), reason=""))
    assert rig.is_in(State.READY)
    assert sends(rig.effects, Ready)[0][1].held == held
    assert refused_begin(rig, "a", rig.begin(2))
    older = Held(attempt=attempt(rig.peer.log, 0), header=rig.next_header(OTHER))
    assert refused_begin(rig, "a", rig.begin(2, adopted=older, holders="c"))
    assert not refused_begin(rig, "a", rig.begin(2, adopted=held, holders="b"))


def test_a_later_entry_displaces_what_we_hold() -> None:
    rig = at_second().trained().averaging().holding()
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 1), reason=""))
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 2), reason=""))
    newer = Held(attempt=attempt(rig.peer.log, 2), header=rig.next_header(OTHER))
    assert not refused_begin(rig, "a", rig.begin(3, adopted=newer, holders="c"))
    rig.holding(3, OTHER)
    assert of(rig.hear("a", Commit(header=newer.header)), Apply)


def test_garbage_handed_on_does_not_displace_what_we_hold() -> None:
    rig = at_second().trained().averaging().holding()
    mine = rig.next_header()
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 1), reason=""))
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 2), reason=""))
    newer = Held(attempt=attempt(rig.peer.log, 2), header=rig.next_header(OTHER))
    rig.hear("a", rig.begin(3, adopted=newer, holders="c"))
    rig.holding(3, digest_of(b"garbage"))
    assert not of(rig.hear("a", Commit(header=newer.header)), Apply)
    assert of(rig.hear("a", Commit(header=mine)), Apply)


def test_another_leader_gets_a_later_promise() -> None:
    """Regression: a, given up by b, could begin attempt 2 from b's old Ready after b had completed c's attempt 1, and
    with it hand on an entry older than the one that c had committed."""
    rig = at_second().trained()
    assert sends(rig.tick(), Ready)[0][1].last_attempt == 0
    rig.do(Undelivered("a"))
    (to, say), *_ = sends(rig.tick(), Ready) or [("b", None)]
    assert to == "b", "b is next in the roster, and leads itself"
    rig.see()
    (to, say), *_ = sends(rig.tick(), Ready)
    assert (to, say.last_attempt) == ("a", 2), "once for b, once for a"
    assert refused_begin(rig, "a", rig.begin(1)), "what a may have begun with the first Ready"
    assert not refused_begin(rig, "a", rig.begin(3))


def test_a_leader_that_is_further_is_followed() -> None:
    rig = at_second().trained()
    effects = rig.hear("a", Abort(attempt=attempt(rig.peer.log, 7), reason="say Ready for a later attempt"))
    assert sends(effects, Ready)[0][1].last_attempt == 7
    assert not sends(rig.hear("c", Abort(attempt=attempt(rig.peer.log, 9, "c"), reason="")), Ready)
    assert not sends(rig.hear("a", Abort(attempt=attempt(rig.peer.log, 2**61), reason="")), Ready)
    assert not refused_begin(rig, "a", rig.begin(8))


def test_only_the_attempts_leader_aborts_it() -> None:
    rig = at_second().trained().averaging()
    rig.hear("c", Abort(attempt=attempt(rig.peer.log), reason=""))
    rig.hear("a", Abort(attempt=attempt(rig.peer.log, 2), reason=""))
    assert rig.is_in(State.AVERAGING)
    rig.hear("a", Abort(attempt=attempt(rig.peer.log), reason=""))
    assert rig.is_in(State.READY)


# Commit --------------------------------------------------------------------------------------------------------
def test_place_and_state_are_named_together_only_once_the_outer_step_is_done() -> None:
    rig = Rig().joined().trained().averaging().holding().applying()
    assert (rig.peer.log.position.index, rig.peer.settled.position.index) == (1, 0)
    rig.applied()
    assert rig.peer.settled is rig.peer.log


def test_only_what_we_hold_is_applied() -> None:
    rig = at_second().trained().averaging()
    assert not of(rig.hear("a", Commit(header=rig.next_header())), Apply)
    rig.holding()
    assert not of(rig.hear("a", Commit(header=rig.next_header(OTHER))), Apply)
    assert of(rig.hear("a", Commit(header=rig.next_header())), Apply)


def test_the_answer_to_a_lost_commit_is_the_commit() -> None:
    rig = at_second()
    header = rig.peer.log.last
    assert header is not None
    for message in (Ready, Inquire):
        asked: Message = ready(LOG, "c", samples=()) if message is Ready else Inquire(position=LOG.position)
        assert sends(rig.hear("c", asked), Commit) == [("c", Commit(header=header))]


def test_who_asks_about_a_place_we_never_were_hears_where_we_are() -> None:
    rig = at_second()
    elsewhere = ahead_by(rig, 2).position
    (to, answer), *_ = sends(rig.hear("c", Inquire(position=elsewhere)), Elsewhere)
    assert (to, answer.position) == ("c", rig.peer.log.position)


# Behind --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [State.JOINING, State.TRAINING, State.READY, State.AVERAGING])
def test_who_is_behind_fetches(state: State) -> None:
    rig = IN_STATE[state]()
    rig.see(ahead_by(rig, 2))
    effects = rig.effects + rig.tick()
    assert of(effects, FetchSnapshot) == [FetchSnapshot("c")]
    assert bool(of(effects, StopTraining)) is (state is State.TRAINING)


def test_who_holds_what_may_be_the_next_entry_inquires_first() -> None:
    rig = at_second().trained().averaging().holding()
    next_log = rig.peer.log.append(rig.next_header())
    (to, inquiry), *_ = sends(rig.see(next_log), Inquire)
    assert inquiry.position == rig.peer.log.position
    assert of(rig.hear(to, Commit(header=rig.next_header())), Apply)


def test_an_inquiry_that_finds_another_entry_ends_in_a_fetch() -> None:
    """Regression: it was asked again at once, and again, as fast as the network went."""
    rig = at_second().trained().averaging().holding()
    theirs = ahead_by(rig, 1)
    assert theirs.last is not None
    (to, _), *_ = sends(rig.see(theirs), Inquire)
    effects = rig.hear(to, Commit(header=theirs.last))
    assert of(effects, FetchSnapshot) == [FetchSnapshot("c")]
    assert not sends(effects, Inquire)


def test_an_inquiry_that_leads_nowhere_ends_in_a_fetch() -> None:
    rig = at_second().trained().averaging().holding()
    theirs = ahead_by(rig, 1)
    (to, _), *_ = sends(rig.see(theirs), Inquire)
    assert of(rig.hear("a", Elsewhere(position=theirs.position)), FetchSnapshot) == []
    assert of(rig.hear(to, Elsewhere(position=theirs.position)), FetchSnapshot)


def test_the_heavier_lineage_wins_and_the_smaller_digest_among_equals() -> None:
    rig = at_second()
    log = rig.peer.log
    lighter = beat("c", log, sequence=9, head=bytes([0] * 32), lineage_tokens=log.lineage_tokens - 1)
    larger = beat("c", log, sequence=10, head=bytes([255] * 32))
    smaller = beat("c", log, sequence=11, head=bytes([0] * 32))
    for heartbeat, fetches in ((lighter, False), (larger, False), (smaller, True)):
        assert bool(of(rig.do(HeartbeatsSeen((heartbeat,))), FetchSnapshot)) is fetches


def test_a_fetched_state_leads_to_a_lease() -> None:
    rig = fetching(at_second())
    theirs = ahead_by(rig, 1)
    effects = rig.do(SnapshotRestored("c", theirs.last, OTHER))
    assert rig.peer.log.position == theirs.position
    assert rig.is_in(State.JOINING)
    (to, request), *_ = sends(effects, LeaseRequest)
    assert (to, request.state_digest) == ("a", OTHER)


def test_a_failed_donor_is_not_asked_again_for_a_while() -> None:
    rig = fetching(at_second())
    rig.do(SnapshotFailed("c", "gone"))
    assert rig.is_in(State.JOINING)
    assert of(rig.tick(), FetchSnapshot) == [FetchSnapshot("a")]


@pytest.mark.parametrize("how", ["restored", "failed"])
def test_who_has_fetched_counts_in_no_quorum_at_that_position(how: str) -> None:
    """Regression: a peer that forgot what it held, because it fetched, vouched for holding nothing."""
    rig = at_second().trained()
    rig.hear("a", Refuse(position=rig.peer.log.position, reason="its state is not ours"))
    assert rig.is_in(State.FETCHING)
    rig.do(SnapshotRestored("a", rig.peer.log.last, STATE) if how == "restored" else SnapshotFailed("a", "gone"))
    rig.tick(2 * TIMING.round_timeout)  # a is trusted again
    rig.see()
    assert not sends(rig.do(TrainingDone(trained(rig.lease))), Ready)[0][1].incumbent


# Leases --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sender", "samples", "steps"),
    [
        ("c", SampleRange(0, 20), 10),
        ("a", SampleRange(0, 21), 10),
        ("a", SampleRange(5, 25), 10),
        ("a", SampleRange(0, 20), 11),
    ],
    ids=["not the leader", "too many samples", "no lease of the log", "too many steps"],
)
def test_only_a_proper_lease_of_the_leader_is_trained(sender: str, samples: SampleRange, steps: int) -> None:
    """Regression: anybody could keep a joiner busy with 2**61 samples."""
    rig = Rig()
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    rig.hear(sender, LeaseGrant(position=LOG.position, samples=(samples,), steps=steps))
    assert rig.is_in(State.JOINING)


def test_strangers_get_no_lease() -> None:
    """Regression: every name that anybody makes up got one, and was remembered."""
    rig = at_second()
    request = LeaseRequest(position=rig.peer.log.position, state_digest=STATE)
    assert rig.hear("stranger", request) == []
    assert sends(rig.hear("c", request), LeaseGrant)


def test_strangers_are_not_ready() -> None:
    """Regression: anybody's Ready was taken, and with a higher number it threw out everybody else's."""
    rig = at_second()
    log = rig.peer.log
    rig.hear("c", ready(log, "c"))
    assert rig.hear("stranger", ready(log, "stranger", samples=(), tokens=0, last_attempt=5)) == []
    assert [to for to, _ in sends(rig.hear("a", ready(log, "a", last_attempt=5)), Abort)] == ["c"]


# Trouble -------------------------------------------------------------------------------------------------------
def test_bad_blocks_are_reported_to_the_leader() -> None:
    rig = at_second().trained().averaging()
    (to, accuse), *_ = sends(rig.do(BadBlocks(attempt(rig.peer.log), "c", "x" * 1000)), Accuse)
    assert (to, accuse.accused, len(accuse.reason)) == ("a", "c", 500)


def test_a_dead_leader_is_succeeded_in_roster_order() -> None:
    rig = at_second().trained().averaging()
    rig.do(Undelivered("a"))
    rig.tick()
    assert rig.is_in(State.READY)
    rig.hear("c", ready(rig.peer.log, "c", last_attempt=2))
    rig.see(others="c", state=PeerState.READY)
    rig.do(Undelivered("a"))
    for _ in range(3):
        effects = rig.tick()
        if sends(effects, Begin):
            break
        rig.hear("c", ready(rig.peer.log, "c", last_attempt=rig.peer._last_attempt))
        rig.do(Undelivered("a"))
    assert [to for to, _ in sends(effects, Begin)] == ["c"]


def test_a_leader_that_never_concludes_is_given_up() -> None:
    rig = at_second().trained().averaging()
    started = rig.now
    while rig.is_in(State.AVERAGING):
        rig.see(state=PeerState.AVERAGING)
        rig.tick(1.0)
        assert rig.now - started <= 2 * TIMING.round_timeout + 2
    assert sends(rig.effects, Ready) == [], "it is pledged to itself now"
    assert rig.peer._pledged_to == "b"


def test_a_leader_that_never_begins_is_given_up() -> None:
    rig = at_second().trained()
    patience = TIMING.grace + TIMING.partition_grace + 2 * TIMING.round_timeout
    started = rig.now
    while rig.peer._pledged_to == "a":
        rig.see(state=PeerState.READY)
        rig.tick(1.0)
        assert rig.now - started <= patience + 2


# Leaving -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [State.JOINING, State.FETCHING, State.TRAINING, State.READY])
def test_leaving_at_once_where_nothing_is_under_way(state: State) -> None:
    rig = IN_STATE[state]()
    effects = rig.do(LeaveRequested())
    assert rig.is_in(State.LEFT)
    assert of(effects, Stop)
    assert bool(of(effects, StopTraining)) is (state is State.TRAINING)


@pytest.mark.parametrize("state", [State.AVERAGING, State.APPLYING])
def test_a_round_under_way_is_finished_first(state: State) -> None:
    rig = IN_STATE[state]()
    assert not of(rig.do(LeaveRequested()), Stop)
    if state is State.AVERAGING:
        rig.holding().applying()
    last = rig.peer.log.last
    assert last is not None
    assert of(rig.do(Applied(last, STATE)), Stop)


def test_an_aborted_round_is_left() -> None:
    rig = IN_STATE[State.AVERAGING]()
    rig.do(LeaveRequested())
    assert of(rig.hear("a", Abort(attempt=attempt(rig.peer.log), reason="")), Stop)


@pytest.mark.parametrize("state", [State.AVERAGING, State.APPLYING])
def test_patience_with_a_round_under_way_ends(state: State) -> None:
    rig = IN_STATE[state]()
    rig.do(LeaveRequested())
    rig.see(state=PeerState.AVERAGING)
    rig.do(LeaveRequested(), after=5.0)  # asking again wins no time
    rig.see(state=PeerState.AVERAGING)
    assert of(rig.tick(TIMING.leave - 5.0), Stop)


@pytest.mark.parametrize("state", [state for state in State if state is not State.LEFT])
def test_leaving_without_patience(state: State) -> None:
    rig = IN_STATE[state]()
    assert of(rig.do(LeaveRequested(at_once=True)), Stop)


def test_after_leaving_nothing_happens() -> None:
    rig = IN_STATE[State.LEFT]()
    for event in (Tick(), LeaveRequested(), Applied(HEADER, STATE), TrainingDone(trained(()))):
        assert rig.do(event) == []


def test_a_goodbye_ends_the_attempt_that_we_lead() -> None:
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    rig.do(TrainingDone(trained((SampleRange(0, 20),))))
    for place, name in enumerate("bc", 1):
        rig.hear(name, ready(LOG, name, samples=(SampleRange(20 * place, 20 * place + 20),)))
    rig.tick()
    effects = rig.hear("c", Leaving(position=LOG.position, holds=False))
    assert [to for to, _ in sends(effects, Abort)] == ["b", "c"]
    assert rig.is_in(State.READY)


# Hostile -------------------------------------------------------------------------------------------------------
def hostile_messages(rig: Rig, draw: random.Random) -> Message:
    """A well-formed message, right or wrong in each of its parts."""
    here = rig.peer.log
    position = draw.choice([here.position, here.position, here.position, LOG.position, ahead_by(rig, 1).position])
    log = draw.choice([here, here, LOG, first_log()])
    number = draw.choice([0, 1, 1, 2, 3, 2**33, 2**62 - 1])
    leader = draw.choice("abc")
    which = Attempt(position=position, number=number, leader=leader)
    samples = draw.choice(
        [
            (),
            *here.leases.values(),
            (SampleRange(0, 2**62 - 1),),
            (SampleRange(2**62 - 2, 2**62 - 1),),
            tuple(SampleRange(200 + 2 * n, 201 + 2 * n) for n in range(draw.choice([5, PIECE_LIMIT]))),
        ]
    )
    tokens = draw.choice([0, 1, 100, 2**62 - 1])
    roster = tuple(member(name, 20 * n, 20 * n + 20, tokens) for n, name in enumerate(draw.sample("abcz", 3)))
    header = draw.choice([rig.next_header(), here.last or HEADER, forged(rig.next_header(), draw)])
    held = draw.choice([None, Held(attempt=which, header=header)])
    digest = draw.choice([STATE, PAYLOAD, here.position.head])
    messages: list[Message] = [
        LeaseRequest(position=position, state_digest=digest),
        LeaseGrant(position=position, samples=(SampleRange(0, draw.choice([20, 2**62 - 1])),), steps=number),
        ready(log, "x", samples, state_digest=digest, tokens=tokens, last_attempt=number, held=held),
        Begin(attempt=which, roster=roster, adopted=held, holders=draw.choice([(), ("a",), ("z", "b")])),
        rig.begin(number, leader, held, draw.choice(["", "a", "bc"])),
        Waiting(attempt=which, missing=("a", "z")),
        Accuse(attempt=which, accused=draw.choice("abz"), reason="x"),
        Complete(attempt=which, payload=digest),
        Commit(header=header),
        Abort(attempt=which, reason="x"),
        Refuse(position=position, reason="x"),
        Inquire(position=position),
        Elsewhere(position=position),
        Leaving(position=position, holds=draw.choice([True, False])),
    ]
    return draw.choice(messages)


def forged(header: Header, draw: random.Random) -> Header:
    fields = {name: getattr(header, name) for name in Header.model_fields}
    fields |= draw.choice(
        [
            {"cursor": 2**62 - 1},
            {"lineage_tokens": 2**62 - 1},
            {"index": 2**62 - 1},
            {"roster": (member("a", 0, 20, 2**62 - 1), member("b", 20, 40, 2**62 - 1))},
            {"roster": (member("a", 0, 20), member("a", 20, 40))},
        ]
    )
    return Header(**fields)


def own_event(rig: Rig, draw: random.Random) -> Event:
    """Something that our driver may say in this state."""
    state = rig.peer.state
    if state is State.APPLYING and rig.peer.log.last:
        return Applied(rig.peer.log.last, STATE)
    if state is State.FETCHING:
        restored = SnapshotRestored("a", rig.peer.log.last, STATE)
        return restored if draw.random() < 0.5 else SnapshotFailed("a", "")
    if state is State.TRAINING:
        return TrainingDone(trained(rig.lease))
    if state is State.AVERAGING and rig.peer.exchange:
        return PayloadDigested(rig.peer.exchange.attempt, draw.choice([PAYLOAD, OTHER]))
    return Tick()


@pytest.mark.parametrize("seed", range(60))
def test_no_message_makes_a_peer_fall(seed: int) -> None:
    draw = random.Random(seed)
    rig = draw.choice([at_second, Rig, at_second().trained, at_second().trained().averaging])()
    rig = Rig("a", "bc", replace(SETTINGS, minimum_peers=1)) if seed % 5 == 0 else rig
    for _ in range(150):
        dice = draw.random()
        if dice < 0.7:
            rig.hear(draw.choice("abcz"), hostile_messages(rig, draw), draw.choice([0.0, 0.1]))
        elif dice < 0.8:
            rig.see(state=draw.choice([PeerState.TRAINING, PeerState.READY, PeerState.JOINING]))
        elif dice < 0.9:
            rig.do(own_event(rig, draw), draw.choice([0.0, 1.0, 30.0]))
        else:
            rig.tick(draw.choice([0.5, 5.0, 150.0]))
    assert rig.peer.state in State
