"""One peer's protocol: its states, what it refuses, and how it gets out of trouble."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from peers.errors import LocalProtocolError
from peers.log.certificate import Proof
from peers.log.header import NO_PAYLOAD, Header, Member
from peers.log.lineage import RECENT_ENTRIES, Branch
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.standing import FORGIVEN
from peers.protocol.chunk_sets import chunk_set
from peers.protocol.commitment import ChunkProof, Evidence, digest_of_all
from peers.protocol.effects import (
    Apply,
    Dropped,
    FetchLineage,
    FetchPayload,
    FetchSnapshot,
    Note,
    OpenRound,
    SendChunk,
    Stop,
    StopTraining,
    Train,
)
from peers.protocol.events import (
    Applied,
    AverageRefuted,
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    Digested,
    Event,
    HeartbeatsSeen,
    LeaveRequested,
    LineageNotSeen,
    LineageSeen,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    ReducedArrived,
    SignedHeadsSeen,
    SnapshotFailed,
    SnapshotRestored,
    Tick,
    TrainingDone,
    TrainingProgress,
    Undelivered,
)
from peers.protocol.internal import WorkDone
from peers.protocol.messages import (
    Abort,
    Accuse,
    Adopt,
    Begin,
    Commit,
    Complete,
    Elsewhere,
    Excluded,
    Holding,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Ready,
    Refuse,
    Waiting,
    Want,
)
from peers.protocol.rounds import (
    Attempt,
    Holder,
    Round,
)
from peers.protocol.schedule import Schedule
from peers.protocol.slot import SlotState
from peers.protocol.states import State
from peers.protocol.troubles import TOLD_AFTER
from peers.values.leases import PIECE_LIMIT, SampleRange
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import Reach, digest_of
from peers.values.workload import Progress
from tests.peers.builders import (
    CERTIFIED,
    LOG,
    PAYLOAD,
    SETTINGS,
    SIZE,
    STATE,
    TIMING,
    Rig,
    attempt,
    beat,
    commitment,
    commitments,
    first_log,
    holders_of,
    holding,
    leaving,
    member,
    of,
    ready,
    round_of,
    sends,
    trained,
    vote,
)
from tests.simulator.simulated_keys import SimulatedKeys

OTHER = digest_of(b"another payload")
SCHEDULE = Schedule(TIMING)


def at_second() -> Rig:
    """b has applied the first entry and trains its second lease."""
    rig = Rig().joined().trained().averaging().holding().applying().applied()
    assert rig.is_in(State.TRAINING)
    return rig


def leading() -> Rig:
    """a leads the round after the first entry, and takes part in it."""
    rig = leading_first().holding()
    for name in "bc":
        rig.hear(name, rig.complete(name))
    rig.applied()
    rig.do(TrainingDone(trained(rig.lease)))
    rig.tick(0.0)
    rig.hear("b", ready(rig.peer.log, "b"))
    begins = sends(rig.hear("c", ready(rig.peer.log, "c")), Begin)
    assert [to for to, _ in begins] == ["b", "c"], "at once, when the last one is ready"
    return rig


def leading_first() -> Rig:
    """a leads the first round, and takes part in it."""
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    rig.do(TrainingDone(trained((SampleRange(0, 20),))))
    for place, name in enumerate("bc", 1):
        effects = rig.hear(name, ready(LOG, name, samples=(SampleRange(20 * place, 20 * place + 20),)))
    assert [to for to, _ in sends(effects, Begin)] == ["b", "c"]
    assert rig.is_in(State.AVERAGING)
    rig.see(state=PeerState.READY)
    return rig


def waiting() -> Rig:
    """It has started long enough ago to have heard of all who wait, too."""
    rig = Rig()
    rig.now = SETTINGS.timing.heartbeat_expiry
    return rig


def ahead_by(rig: Rig, entries: int, payload: bytes = OTHER) -> LogState:
    log = rig.peer.log
    for _ in range(entries):
        pool_start = log.pool.cursor
        leases = log.leases
        samples = leases.get("a", (SampleRange(pool_start, pool_start + 20),))
        gone = [peer for peer in log.voters if peer != "a"]
        log = log.append(log.next_header([member("a", samples[0].start, samples[0].stop)], payload, (), gone))
    return log


IN_STATE: dict[State, Callable[[], Rig]] = {
    State.JOINING: waiting,
    State.TRAINING: at_second,
    State.READY: lambda: at_second().trained(),
    State.AVERAGING: lambda: at_second().trained().averaging(),
    State.APPLYING: lambda: at_second().trained().averaging().holding().applying(),
    State.FETCHING: lambda: fetching(at_second()),
    State.REPLAYING: lambda: replaying(at_second()),
    State.LEFT: lambda: left(at_second()),
}


def fetching(rig: Rig) -> Rig:
    theirs = ahead_by(rig, SETTINGS.snapshot_every + 1)
    rig.see(theirs)
    rig.shown(theirs)
    assert rig.is_in(State.FETCHING)
    return rig


def told(rig: Rig, sender: str = "c", entries: int = 1) -> Header:
    """The others are so many entries further on, and one of them says what came next."""
    header = ahead_by(rig, 1).last
    assert header is not None
    rig.see(ahead_by(rig, entries))
    rig.hear(sender, rig.commit(header))
    return header


def replaying(rig: Rig) -> Rig:
    told(rig)
    assert rig.is_in(State.REPLAYING)
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
    assert of(effects, Train) == [Train(0, (SampleRange(0, 20),), 10, 0)]
    granted = rig.hear("b", LeaseRequest(position=LOG.position, state_digest=STATE, relayed=(), unreached=()))
    assert sends(granted, LeaseGrant)[0][1].samples == (SampleRange(20, 40),)


def test_a_whole_round_of_a_member() -> None:
    rig = Rig().joined()
    (say,) = sends(rig.do(TrainingDone(trained(rig.lease))), Ready)
    assert say == ("a", ready(LOG, "b", samples=rig.lease))
    begin = rig.begin()
    assert of(rig.hear("a", begin), OpenRound) == [OpenRound(begin.round)]
    waiting = Waiting(attempt=attempt(LOG), missing=("a", "c"), moved=0, unreached=())
    assert sends(rig.tick(), Waiting) == [("a", waiting)]
    rig.do(ReducedArrived(begin.attempt, "c", 4, ()))
    (_, later), *_ = sends(rig.tick(), Waiting)
    assert (later.missing, later.moved) == (("a", "c"), rig.moved)
    assert later.moved > waiting.moved
    effects = rig.agreeing(rig.do(PayloadAssembled(begin.attempt, PAYLOAD)))
    complete = rig.complete("b")
    assert sends(effects, Complete) == [("a", complete)]
    assert sends(rig.tick(), Complete) == [("a", complete)], "it may not have arrived"
    header = rig.next_header()
    assert of(rig.hear("a", rig.commit(header)), Apply) == [Apply(header)]
    assert of(rig.step(header, OTHER), Train) == [Train(1, rig.lease, 10, header.lineage_tokens)]
    assert rig.peer.state_digest == OTHER
    assert rig.peer.log.last == header
    rig.do(HeartbeatsSeen(tuple(beat(name, rig.peer.log, sequence=9, state_digest=OTHER) for name in "ac")))
    assert sends(rig.do(TrainingDone(trained(rig.lease))), Ready)


def test_whose_state_is_not_that_of_most_takes_theirs() -> None:
    """A bit has flipped here, while the outer step was taken: what most have is what the log leads to."""
    rig = Rig().joined().trained().averaging().holding().applying()
    header = rig.peer.log.last
    assert header is not None
    rig.step(header, OTHER)
    [fetch] = of(rig.see(), FetchSnapshot)
    assert (fetch.donor, fetch.others, fetch.least) == ("a", ("c",), 1)


def test_nobody_takes_the_state_of_fewer_than_most() -> None:
    rig = Rig().joined().trained().averaging().holding().applying()
    header = rig.peer.log.last
    assert header is not None
    rig.step(header, OTHER)
    for others, starts in (("c", 0), ("ac", 7)):
        beats = (beat(name, rig.peer.log, sequence=9 + starts, incarnation=starts) for name in others)
        assert not of(rig.do(HeartbeatsSeen(tuple(beats))), FetchSnapshot)


def test_a_leader_with_another_state_than_most_is_not_believed() -> None:
    """Regression: whoever led had the right state, and all others fetched it."""
    rig = at_second().trained()
    rig.hear("a", Refuse(position=rig.peer.log.position, state_digest=OTHER, reason="its state is not ours"))
    assert rig.is_in(State.READY)
    rig.tick()
    assert rig.peer.slot.acceptor.pledged_to == "b"


def test_a_leader_that_refuses_a_state_and_gives_none_leads_no_more() -> None:
    rig = Rig()
    rig.see(LOG)
    refuse = Refuse(position=LOG.position, state_digest=OTHER, reason="its state is not ours")
    assert [fetch.donor for fetch in of(rig.hear("a", refuse), FetchSnapshot)] == ["a"]
    rig.do(SnapshotFailed("a", "it gives none"))
    assert rig.peer.slot.leadership.elect() == "a", "whoever has nothing to give may lead"
    assert of(rig.hear("a", refuse), FetchSnapshot) == []
    assert rig.peer.slot.leadership.elect() != "a"


def test_training_goes_on_while_the_state_is_digested() -> None:
    """Nothing is said to others that would need the digest; then it is said at once."""
    rig = IN_STATE[State.APPLYING]()
    header = rig.peer.log.last
    assert header is not None
    assert of(rig.do(Applied(header)), Train)
    assert rig.peer.settled.position.index == rig.peer.log.position.index - 1
    rig.see()
    assert sends(rig.do(TrainingDone(trained(rig.lease))), Ready) == []
    assert rig.is_in(State.READY)
    assert sends(rig.tick(), Ready) == []
    assert sends(rig.do(Digested(header, OTHER)), Ready)[0][1].state_digest == OTHER


@pytest.mark.parametrize(
    ("own", "fastest", "wants"),
    [
        (100.0, 0.0, 0),
        (100.0, 100.0, 0),
        (90.0, 100.0, 0),
        (81.0, 100.0, 18),
        (50.0, 100.0, 10),
        (31.0, 100.0, 8),
        (1.0, 1e12, 4),
        (0.0, 100.0, 0),
    ],
    ids=[
        "nobody's is known",
        "equal",
        "in time",
        "nearly",
        "half",
        "whole steps",
        "a braggart",
        "our own is not known",
    ],
)
def test_who_is_slower_than_another_wants_a_shorter_lease(own: float, fastest: float, wants: int) -> None:
    """Of 20 samples, two an inner step; at the least an eighth of ten inner steps."""
    rig = at_second()
    rig.do(TrainingProgress(Progress(inner_step=1, loss=1.0, tokens_per_second=own)))
    faster = beat("c", rig.peer.log, PeerState.TRAINING, 1000, speed=fastest)
    rig.do(HeartbeatsSeen((beat("a", rig.peer.log, sequence=1000), faster)))
    ((_, said),) = sends(rig.trained().effects, Ready)
    assert said.wants == wants


@pytest.mark.parametrize(("speed", "steps"), [(0.0, 10), (25.0, 3)])
def test_who_is_known_to_be_slow_trains_less_of_a_grant(speed: float, steps: int) -> None:
    """A newcomer trains all of it, and is late once if it is slow."""
    rig = Rig()
    rig.peer.trainer.speed = speed
    rig.do(HeartbeatsSeen((beat("a", LOG, speed=100.0), beat("c", LOG, speed=100.0))))
    rig.tick(5.0)
    grant = LeaseGrant(position=LOG.position, samples=(SampleRange(20, 40),), steps=10)
    assert of(rig.hear("a", grant), Train) == [Train(0, (SampleRange(20, 40),), steps, 0)]


def test_a_newcomer_that_knows_of_a_signed_head_trains_on_nobodys_grant() -> None:
    """Regression: a stranger that was taken for the leader of an empty log had it found another run."""
    rig = Rig()
    rig.do(HeartbeatsSeen((beat("a", LOG), beat("c", LOG))))
    rig.tick(5.0)
    signed = SignedHead.sign("tiny", 9, bytes(32), "z", SimulatedKeys("z"))
    rig.do(SignedHeadsSeen(SignedHeads("tiny", ("z",)).with_heads([signed])))
    grant = LeaseGrant(position=LOG.position, samples=(SampleRange(20, 40),), steps=10)
    assert not of(rig.hear("a", grant), Train)


def test_a_round_that_gives_us_another_lease_than_we_want_is_not_ours() -> None:
    rig = at_second().trained()
    roster = [one.model_copy(update={"wants": 2}) if one.peer == "b" else one for one in rig.roster()]
    at = rig.attempt()
    rig.hear("a", Begin(attempt=at, round=round_of(at, roster), seconds=20.0, open=False, commitments=()))
    assert rig.is_in(State.READY)


def test_a_leader_takes_nobody_before_its_state_is_digested() -> None:
    rig = leading_first()
    rig.holding()
    for other in "bc":
        rig.hear(other, rig.complete(other))
    header = rig.peer.log.last
    assert header is not None
    rig.do(Applied(header))
    rig.see()
    asks = LeaseRequest(position=rig.peer.log.position, state_digest=STATE, relayed=(), unreached=())
    assert rig.hear("d", asks) == []
    rig.do(Digested(header, STATE))
    assert sends(rig.hear("b", asks), LeaseGrant)


def test_who_has_no_lease_asks_for_one_once_its_state_is_digested() -> None:
    rig = at_second()
    for digest in (STATE, OTHER):  # the first entry takes its lease, the second is one more that it is not in
        header = told(rig)
        rig.do(PayloadFetched(header))
        rig.do(Applied(header))
        assert sends(rig.tick(), LeaseRequest) == []
        asked = sends(rig.do(Digested(header, digest)), LeaseRequest)
    assert asked[0][1].state_digest == OTHER


@pytest.mark.parametrize("asked_first", [True, False])
def test_who_leaves_notes_down_the_last_entry(asked_first: bool) -> None:
    rig = IN_STATE[State.APPLYING]()
    header = rig.peer.log.last
    assert header is not None
    for event in (LeaveRequested(), Applied(header)) if asked_first else (Applied(header), LeaveRequested()):
        assert of(rig.do(event), Stop) == []
    assert of(rig.do(Digested(header, STATE)), Stop)


def test_a_leader_does_the_whole_round_with_itself_as_a_member() -> None:
    rig = leading_first()
    rig.holding()
    rig.hear("b", rig.complete("b"))
    effects = rig.hear("c", rig.complete("c"))
    assert [to for to, _ in sends(effects, Commit)] == ["b", "c"]
    assert of(effects, Apply)
    assert rig.is_in(State.APPLYING)


# What is illegal, and what is merely late ----------------------------------------------------------------------
HEADER = LOG.next_header([member("a", 0, 20)], PAYLOAD)
ILLEGAL: list[tuple[Event, State]] = [
    *((Applied(HEADER), state) for state in State if state not in (State.APPLYING, State.LEFT)),
    *((Digested(HEADER, STATE), state) for state in State if state is not State.LEFT),
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


LATE = attempt(LOG, 99)
LATE_NEWS: list[Event] = [
    ContributionArrived(LATE, "a", 2),
    BadBlocks(LATE, "a", 2, "code -128"),
    ReducedArrived(LATE, "a", 0, ()),
    ChunkSent(LATE, "a", 2, reduced=True),
    ChunksUnsent(LATE, "a", (2,), reduced=True),
    PayloadAssembled(LATE, PAYLOAD),
    PayloadFetched(HEADER),
    PayloadNotFetched(HEADER, "gone"),
    RateMeasured(1000),
    AverageRefuted(LATE, "c", 0),
]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", LATE_NEWS, ids=lambda event: type(event).__name__)
def test_late_news_of_rounds_and_payloads_is_void(state: State, event: Event) -> None:
    rig = IN_STATE[state]()
    log = rig.peer.log
    assert not [effect for effect in rig.do(event) if isinstance(effect, Apply | SendChunk)]
    assert (rig.peer.state, rig.peer.log) == (state, log)


@pytest.mark.parametrize("state", sorted(set(State) - {State.TRAINING}))
def test_late_news_of_training_is_void(state: State) -> None:
    rig = IN_STATE[state]()
    assert not sends(rig.do(TrainingDone(trained(rig.lease))), Ready)
    assert rig.peer.state is state


# From state to state ----------------------------------------------------------------------------------------------
def seen_far_ahead(rig: Rig) -> None:
    theirs = ahead_by(rig, SETTINGS.snapshot_every + 1)
    rig.see(theirs)
    rig.shown(theirs)


def leaves_at_once(rig: Rig) -> None:
    rig.do(LeaveRequested(at_once=True))


def gets_a_lease(rig: Rig) -> None:
    rig.joined()


def takes_the_step(rig: Rig) -> None:
    rig.applied()


def takes_the_step_out_of_it(rig: Rig) -> None:
    """c has gone on to the entry after this one, so b's lease is no good."""
    last = rig.peer.log.last
    assert last is not None
    rig.see(ahead_by(rig, 1), others="c")
    rig.step(last)


def gets_the_payload(rig: Rig) -> None:
    assert rig.peer.replica.replaying is not None
    rig.do(PayloadFetched(rig.peer.replica.replaying))


def gets_no_payload(rig: Rig) -> None:
    assert rig.peer.replica.replaying is not None
    rig.do(PayloadNotFetched(rig.peer.replica.replaying, "gone"))


def gets_no_payload_of_the_dead(rig: Rig) -> None:
    for name in "ac":
        rig.do(Undelivered(name))
    gets_no_payload(rig)


def goes_on_with_what_it_trained(rig: Rig) -> None:
    """Having applied the second entry, it is ready when the others have made the third without it."""
    rig.applied().trained()
    missed = told(rig)
    rig.do(PayloadFetched(missed))
    rig.step(missed)


def hears_of_the_commit_late(rig: Rig) -> None:
    """It was complete; then the leader seemed to be dead."""
    rig.averaging().holding()
    rig.do(Undelivered("a"))
    rig.tick()
    assert rig.is_in(State.READY)
    rig.hear("a", rig.commit())


def is_cut_off(rig: Rig) -> None:
    """Its links say for a while that the leader can't be reached."""
    rig.do(ReachSeen({"a": Reach.NONE, "c": Reach.NONE}, {}))
    rig.see()
    rig.now += TOLD_AFTER
    rig.see()


def is_left_out(rig: Rig) -> None:
    """It can exchange nothing with one of the others, and the leader goes on without it."""
    rig.do(ReachSeen({"c": Reach.NONE}, {}))
    rig.hear("a", Excluded(position=rig.peer.log.position, reason="no data can be exchanged between this peer and c"))


Way = Callable[[Rig], object]
MOVES: dict[tuple[State, State], Way] = {
    (State.TRAINING, State.JOINING): is_cut_off,
    (State.READY, State.JOINING): is_left_out,
    (State.JOINING, State.FETCHING): seen_far_ahead,
    (State.JOINING, State.REPLAYING): told,
    (State.JOINING, State.TRAINING): gets_a_lease,
    (State.JOINING, State.LEFT): leaves_at_once,
    (State.FETCHING, State.JOINING): lambda rig: rig.do(SnapshotFailed("c", "gone")),
    (State.FETCHING, State.LEFT): leaves_at_once,
    (State.REPLAYING, State.APPLYING): gets_the_payload,
    (State.REPLAYING, State.JOINING): gets_no_payload_of_the_dead,
    (State.REPLAYING, State.FETCHING): gets_no_payload,
    (State.REPLAYING, State.LEFT): leaves_at_once,
    (State.TRAINING, State.READY): lambda rig: rig.trained(),
    (State.TRAINING, State.FETCHING): seen_far_ahead,
    (State.TRAINING, State.REPLAYING): told,
    (State.TRAINING, State.LEFT): leaves_at_once,
    (State.READY, State.AVERAGING): lambda rig: rig.averaging(),
    (State.READY, State.APPLYING): hears_of_the_commit_late,
    (State.READY, State.FETCHING): seen_far_ahead,
    (State.READY, State.REPLAYING): told,
    (State.READY, State.LEFT): leaves_at_once,
    (State.AVERAGING, State.READY): lambda rig: rig.hear("a", Abort(attempt=rig.attempt(), reason="")),
    (State.AVERAGING, State.APPLYING): lambda rig: rig.holding().applying(),
    (State.AVERAGING, State.FETCHING): seen_far_ahead,
    (State.AVERAGING, State.REPLAYING): told,
    (State.AVERAGING, State.LEFT): leaves_at_once,
    (State.APPLYING, State.TRAINING): takes_the_step,
    (State.APPLYING, State.READY): goes_on_with_what_it_trained,
    (State.APPLYING, State.JOINING): takes_the_step_out_of_it,
    (State.APPLYING, State.LEFT): leaves_at_once,
}


@pytest.mark.parametrize(("first", "second"), MOVES, ids=lambda state: str(state))
def test_every_way_from_state_to_state(first: State, second: State) -> None:
    rig = IN_STATE[first]()
    assert rig.peer.state is first
    MOVES[first, second](rig)
    assert rig.peer.state is second


def test_who_took_a_state_works_where_that_is() -> None:
    """Regression: its slot stayed at the position before."""
    rig = at_second()
    log = ahead_by(rig, SETTINGS.snapshot_every + 1)
    rig.see(log)
    rig.shown(log)
    assert rig.is_in(State.FETCHING)
    rig.do(SnapshotRestored("a", log.last, STATE, (log.position.head,)))
    assert rig.peer.slot.log.position == log.position
    grant = log.grants[0]
    rig.hear("a", LeaseGrant(position=log.position, samples=grant, steps=10))
    said = sends(rig.do(TrainingDone(trained(grant))), Ready)
    assert [one.position for _, one in said] == [log.position]


def test_no_entry_of_another_fragment_is_taken_over() -> None:
    """Regression: one member's word that another fragment was skipped stopped the whole swarm."""
    rig = Rig(settings=replace(SETTINGS, fragments=2))
    log = rig.peer.log
    skipped = log.next_header([Member(peer="a", tokens=0, samples=())], NO_PAYLOAD)
    slot = rig.peer.slots[1]
    slot.take(WorkDone(trained((SampleRange(20, 40),))))
    slot.acceptor.pledge("a")
    name = Attempt(position=log.of(1).position, number=1, leader="a")
    signed = Holder(peer="a", attempt=name, signature=vote(skipped, name, "a"))
    slot.take(Adopt(attempt=name, header=skipped, holders=(signed,), seconds=10.0), "a")
    assert slot.state is SlotState.READY
    assert slot.acceptor.held is None


@pytest.mark.parametrize("keeps_work", [True, False])
def test_nothing_new_begins_while_who_leaves_notes_down_the_last_entry(keeps_work: bool) -> None:
    """Regression: the leader's lease made the peer fall."""
    rig = at_second().trained()
    if keeps_work:
        missed = told(rig)
        rig.do(PayloadFetched(missed))
    else:
        rig.averaging().holding().applying()
    header = rig.peer.log.last
    assert header is not None
    rig.do(LeaveRequested())
    rig.do(Applied(header))
    assert rig.is_in(State.APPLYING)
    position, lease = rig.peer.log.position, rig.peer.log.leases.get("b", rig.peer.log.grants[0])
    for message in (
        LeaseGrant(position=position, samples=lease, steps=10),
        Refuse(position=position, state_digest=STATE, reason="x"),
        Excluded(position=position, reason="x"),
    ):
        assert rig.hear("a", message) == []
    rig.see(ahead_by(rig, 2))
    assert of(rig.do(Digested(header, STATE)), Stop)


# Pledges -------------------------------------------------------------------------------------------------------
def takes_part(rig: Rig, sender: str, message: Begin | Adopt) -> bool:
    """Whether the peer enters the attempt."""
    before = rig.peer.slot.attempt
    rig.hear(sender, message)
    assert rig.peer.slot.attempt in (before, message.attempt)
    return rig.peer.slot.attempt == message.attempt


def test_no_attempt_of_a_leader_that_we_are_not_pledged_to() -> None:
    rig = at_second().trained()
    held = rig.held()
    for sender, leader in (("c", "c"), ("c", "a"), ("a", "c")):
        assert not takes_part(rig, sender, rig.begin(leader=leader))
        assert not takes_part(rig, sender, rig.adopt(1, held, leader=leader))
    assert takes_part(rig, "a", rig.begin())


@pytest.mark.parametrize("state", sorted(set(State) - {State.READY, State.AVERAGING}))
def test_no_attempt_of_a_peer_that_has_made_no_offer(state: State) -> None:
    rig = IN_STATE[state]()
    assert not takes_part(rig, "a", rig.begin())
    assert not takes_part(rig, "a", rig.adopt(1, rig.held()))
    assert rig.is_in(state)


@pytest.mark.parametrize("state", [State.READY, State.AVERAGING])
def test_a_later_attempt_replaces_the_one_we_are_in(state: State) -> None:
    """Of the round before nothing is held; another one begins with the same offers, which are committed to anew."""
    rig = IN_STATE[state]()
    assert not takes_part(rig, "a", rig.begin(2)), "nobody has committed to anything for it"
    assert sends(rig.hear("a", Abort(attempt=rig.attempt(), reason="")), Ready)
    assert takes_part(rig, "a", rig.begin(2))
    assert rig.is_in(State.AVERAGING)
    assert of(rig.effects, OpenRound) == [OpenRound(rig.begin(2).round)]
    assert not takes_part(rig, "a", rig.begin(1)), "that one is over"


def test_no_attempt_that_changes_our_offer() -> None:
    rig = at_second().trained()
    for changed in ({"tokens": 1}, {"samples": ()}, {"missed": 1}):
        roster = [one if one.peer != "b" else one.model_copy(update=changed) for one in rig.roster()]
        assert not takes_part(rig, "a", rig.begin().model_copy(update={"round": round_of(rig.attempt(), roster)}))
    without = round_of(rig.attempt(), rig.roster()[::2])
    assert not takes_part(rig, "a", rig.begin().model_copy(update={"round": without}))
    assert not takes_part(rig, "a", rig.begin(lost="b")), "it calls us lost"


def test_no_attempt_that_our_ready_did_not_promise() -> None:
    rig = at_second().trained()
    rig.hear("a", Abort(attempt=rig.attempt(4), reason="say Ready for a later attempt"))
    for number in (0, 1, 4, 2**33, 2**62 - 1):
        assert not takes_part(rig, "a", rig.begin(number)), number
    assert takes_part(rig, "a", rig.begin(5))


def unsigned(begin: Begin) -> dict[str, Begin]:
    said = commitments(begin.round)
    other = said[0].model_copy(update={"squares": 2.0})
    not_ours = (said[0], other, said[2])
    changes = {"none": (), "one lacks": said[:-1], "not what its round names": (*said[:2], other)}
    told = {what: begin.model_copy(update={"commitments": said}) for what, said in changes.items()}
    round = begin.round.model_copy(update={"committed": digest_of_all(not_ours)})
    return told | {"of us another": begin.model_copy(update={"commitments": not_ours, "round": round})}


@pytest.mark.parametrize("what", ["none", "one lacks", "not what its round names", "of us another"])
def test_who_averages_takes_part_only_if_it_knows_what_all_have_committed_to(what: str) -> None:
    rig = at_second().trained()
    assert not takes_part(rig, "a", unsigned(rig.begin())[what])
    assert [(dropped.peer, dropped.what) for dropped in of(rig.effects, Dropped)] == [("a", "begin")]
    assert takes_part(rig, "a", rig.begin())


def test_a_round_goes_on_with_what_was_committed_to_when_it_began() -> None:
    rig = at_second().trained().averaging()
    begin = rig.begin(2, lost="c", name=rig.attempt())
    assert takes_part(rig, "a", unsigned(begin)["none"])
    assert rig.peer.exchange is not None
    assert rig.peer.exchange.contributions.commitments.keys() == set("abc")


def impossible_rounds() -> dict[str, Round]:
    rig = at_second()
    a, b, c = rig.roster()
    name = rig.attempt()
    return {
        "a member twice": round_of(name, (a, b, c, a)),
        "another's samples": round_of(name, (b, member("c", 80, 100))),
        "too few chunks": round_of(name, (a, b, c), chunks=[2, 2, 1]),
        "too many chunks": round_of(name, (a, b, c), chunks=[2, 2, 3]),
        "no chunks": round_of(name, (a, b, c), chunks=[0, 0, 0]),
        "who reduces has trained nothing": round_of(
            name, (a, b, c.model_copy(update={"tokens": 0, "samples": ()})), chunks=[2, 2, 2]
        ),
        "all who reduce are lost": round_of(name, (a, b, c), lost="a", chunks=[6, 0, 0]),
    }


@pytest.mark.parametrize("what", impossible_rounds())
def test_no_attempt_that_can_lead_to_no_entry(what: str) -> None:
    """Regression: a roster that the log does not allow raised LogError when the payload was complete."""
    rig = at_second().trained()
    begin = Begin(attempt=rig.attempt(), round=impossible_rounds()[what], seconds=20.0, open=False, commitments=())
    assert not takes_part(rig, "a", begin)
    assert [(dropped.peer, dropped.what) for dropped in of(rig.effects, Dropped)] == [("a", "begin")]
    assert takes_part(rig, "a", rig.begin())


def test_no_entry_that_does_not_follow_is_taken_over() -> None:
    rig = at_second().trained()
    forged = holding(rig.next_header().model_copy(update={"cursor": 1}), rig.attempt(), "c")
    assert not takes_part(rig, "a", rig.adopt(1, forged))
    assert [dropped.what for dropped in of(rig.effects, Dropped)] == ["adopt"]
    assert "a" in rig.peer.presence.distrusted, "an honest leader has looked at it"


# What is held --------------------------------------------------------------------------------------------------
def back_to_ready(rig: Rig, number: int = 1) -> Rig:
    """The attempt with this number was ended by its leader."""
    rig.hear("a", Abort(attempt=rig.attempt(number), reason=""))
    assert rig.is_in(State.READY)
    return rig


def test_what_we_hold_is_in_our_ready() -> None:
    rig = at_second().trained().averaging().holding()
    back_to_ready(rig)
    say = sends(rig.effects, Ready)[0][1]
    assert say.held == rig.held(1)
    assert say.round == rig.begin().round
    assert say.last_attempt == 1


def test_no_round_that_ignores_what_we_hold() -> None:
    rig = back_to_ready(at_second().trained().averaging().holding())
    assert not takes_part(rig, "a", rig.begin(2))
    other = rig.begin(2, name=rig.attempt(3))
    assert not takes_part(rig, "a", other)
    assert takes_part(rig, "a", rig.adopt(2, rig.held(1)))


def test_no_older_entry_displaces_what_we_hold() -> None:
    rig = back_to_ready(at_second().trained().averaging().holding())
    assert not takes_part(rig, "a", rig.adopt(2, rig.held(0, payload=OTHER)))
    assert rig.peer.slot.acceptor.held == rig.held(1)


def test_who_holds_the_entry_that_is_handed_on_is_complete_at_once() -> None:
    rig = back_to_ready(at_second().trained().averaging().holding())
    effects = rig.hear("a", rig.adopt(2, rig.held(1), holders="b"))
    assert not of(effects, FetchPayload)
    assert sends(effects, Complete) == [("a", rig.complete("b", 2))]
    assert rig.peer.slot.acceptor.held == rig.held(2), "as of the attempt in which it said so last"
    assert of(rig.hear("a", rig.commit()), Apply)


def test_who_lacks_the_entry_that_is_handed_on_fetches_its_payload() -> None:
    rig = at_second().trained()
    adopt = rig.adopt(1, rig.held(0, payload=OTHER), holders="bc")
    effects = rig.hear("a", adopt)
    header = adopt.header
    assert of(effects, FetchPayload) == [FetchPayload(header, ("c",))], "not from ourselves"
    assert not sends(effects, Complete)
    assert not of(rig.hear("a", rig.commit(header)), Apply), "it is not here yet"
    rig.do(PayloadNotFetched(header, "busy"))
    assert of(rig.tick(), FetchPayload) == [FetchPayload(header, ("c",))], "asked again"
    effects = rig.do(PayloadFetched(header))
    assert sends(effects, Complete) == [("a", rig.complete("b", payload=OTHER))]
    assert of(rig.hear("a", rig.commit(header)), Apply) == [Apply(header)]


def test_a_later_entry_displaces_what_we_hold() -> None:
    rig = back_to_ready(back_to_ready(at_second().trained().averaging().holding()), 2)
    newer = rig.held(2, payload=OTHER)
    assert takes_part(rig, "a", rig.adopt(3, newer))
    assert rig.peer.slot.acceptor.held == rig.held(1), "until the other one is here"
    rig.do(PayloadFetched(newer.header))
    assert rig.peer.slot.acceptor.held == rig.held(3, payload=OTHER)
    assert of(rig.hear("a", rig.commit(newer.header)), Apply)


def test_what_is_averaged_meanwhile_does_not_displace_what_is_handed_on() -> None:
    rig = at_second().trained().averaging()
    adopt = rig.adopt(2, rig.held(0, payload=OTHER))
    assert takes_part(rig, "a", adopt)
    assert not sends(rig.holding().effects, Complete)
    assert rig.peer.slot.acceptor.held is None
    assert sends(rig.do(PayloadFetched(adopt.header)), Complete)[0][1].payload == OTHER


def test_a_payload_that_comes_when_the_attempt_is_over_is_not_held() -> None:
    rig = at_second().trained()
    adopt = rig.adopt(1, rig.held(0, payload=OTHER))
    rig.hear("a", adopt)
    back_to_ready(rig)
    assert not sends(rig.do(PayloadFetched(adopt.header)), Complete)
    assert rig.peer.slot.acceptor.held is None


def test_a_payload_averaged_between_two_attempts_is_held_in_the_next() -> None:
    rig = at_second().trained().averaging()
    name = rig.attempt()
    back_to_ready(rig)
    assert not sends(rig.holding().effects, Complete)
    assert rig.peer.slot.acceptor.held is None
    effects = rig.agreeing(rig.hear("a", rig.begin(2, name=name)))
    assert sends(effects, Complete) == [("a", rig.complete("b", 2))]


# Somebody is lost ----------------------------------------------------------------------------------------------
def test_a_revised_attempt_goes_on_with_the_round() -> None:
    rig = at_second().trained().averaging()
    rig.do(ReducedArrived(rig.attempt(), "c", 4, ()))
    effects = rig.hear("a", rig.begin(2, lost="c", name=rig.attempt()))
    assert not of(effects, OpenRound), "what has arrived stays"
    assert sends(effects, Holding) == [("a", Holding(attempt=rig.attempt(2), chunks=chunk_set([4])))]
    assert rig.peer.exchange is not None
    assert rig.peer.exchange.round.remaining == ("a", "b")
    waiting = sends(rig.tick(), Waiting)[0][1]
    assert (waiting.attempt, waiting.missing, waiting.moved) == (rig.attempt(2), ("a",), rig.moved)


def test_what_is_held_in_an_unbroken_attempt_is_held_in_its_revision() -> None:
    """Only the leader could have committed it, and it goes on instead."""
    rig = at_second().trained().averaging().holding()
    begin = rig.begin(2, lost="c", name=rig.attempt())
    assert takes_part(rig, "a", begin)
    assert sends(rig.effects, Complete) == [("a", rig.complete("b", 2))]
    assert rig.peer.slot.acceptor.held == rig.held(2)
    assert of(rig.hear("a", rig.commit()), Apply)


def test_what_is_held_is_held_in_a_later_attempt_of_its_round_too() -> None:
    """With its whole payload here, nothing else can come of it."""
    rig = back_to_ready(at_second().trained().averaging().holding())
    assert takes_part(rig, "a", rig.begin(2, lost="c", name=rig.attempt()))
    assert sends(rig.effects, Complete) == [("a", rig.complete("b", 2))]
    assert rig.peer.slot.acceptor.held == rig.held(2)


@pytest.mark.parametrize("at", ["averaging", "ready"])
def test_a_round_that_goes_on_is_the_same_one(at: str) -> None:
    """Else a leader could have one payload signed in two entries, and both certified."""
    rig = at_second().trained().averaging().holding()
    if at == "ready":
        rig = back_to_ready(rig)
    begin = rig.begin(2, lost="c", name=rig.attempt())
    first, *others = begin.round.shares
    other = first.model_copy(update={"member": first.member.model_copy(update={"wants": 5})})
    round = begin.round.model_copy(update={"shares": (other, *others)})
    assert not takes_part(rig, "a", begin.model_copy(update={"round": round}))
    assert takes_part(rig, "a", begin)


def test_what_was_taken_over_is_kept_though_its_leader_goes_on_with_a_round() -> None:
    """Regression: it was taken for the same attempt, which could not have committed anything."""
    rig = at_second().trained().averaging()
    rig.hear("a", rig.adopt(2, rig.held(0), "ac"))
    rig.do(PayloadFetched(rig.held(0).header))
    assert rig.peer.slot.acceptor.held is not None
    rig.hear("a", rig.begin(3, name=rig.attempt()))
    rig.holding()
    assert rig.peer.slot.acceptor.held.header == rig.held(0).header


def test_another_round_is_not_begun_while_something_is_held() -> None:
    rig = at_second().trained().averaging().holding()
    assert not takes_part(rig, "a", rig.begin(2))


def test_who_lacks_in_how_many_chunks_is_said_and_in_the_header() -> None:
    rig = at_second().trained().averaging()
    rig.hear("a", rig.begin(2, lost="c", name=rig.attempt()))
    for chunk in range(SIZE.chunks):
        absent = ("c",) if chunk < 4 else ()
        rig.do(ReducedArrived(rig.attempt(), "b" if chunk in (2, 3) else "a", chunk, absent))
    effects = rig.holding().effects
    assert sends(effects, Complete)[0][1].missed == (("c", 4),)
    header = rig.next_header(missed=(("c", 4),))
    assert of(rig.hear("a", rig.commit(header)), Apply) == [Apply(header)]
    assert "c" in rig.peer.log.roster


def test_members_settle_what_becomes_of_a_lost_members_chunks() -> None:
    rig = leading()
    rig.hear("c", leaving(rig.peer.log, "c", 1))
    at = rig.attempt(2)
    effects = rig.hear("b", Holding(attempt=at, chunks=chunk_set([4])))
    assert sends(effects, Want) == [("b", Want(attempt=at, reduced=chunk_set([4]), own=chunk_set([5])))]
    assert rig.hear("b", Want(attempt=at, reduced=chunk_set([4]), own=chunk_set([5]))) == [], "b inherits nothing"


def test_the_next_leader_is_told_of_the_round_and_goes_on_with_it() -> None:
    rig = at_second().trained().averaging()
    name = rig.attempt()
    log = rig.peer.log
    rig.do(Undelivered("a"))
    rig.tick()
    number = rig.peer.slot.acceptor.last_attempt
    heard = rig.hear("c", ready(log, "c", last_attempt=number, round=round_of(name, rig.roster())))
    begin = sends(heard, Begin)[0][1]
    assert begin.round == round_of(name, rig.roster(), lost="a")
    assert begin.attempt == rig.attempt(number + 1, "b")
    assert not of(rig.effects, OpenRound)
    assert rig.is_in(State.AVERAGING)


def test_our_rate_is_in_our_ready() -> None:
    rig = at_second()
    rig.do(RateMeasured(12_345))
    rig.trained()
    assert sends(rig.effects, Ready)[0][1].rate == 12_345


def test_with_whoever_averages_wrongly_nothing_is_exchanged_for_an_hour() -> None:
    rig = at_second()
    effects = rig.do(AverageRefuted(rig.attempt(), "c", 4))
    [note] = of(effects, Note)
    assert "c has averaged chunk 4 of" in note.text
    rig.trained()
    assert sends(rig.effects, Ready)[0][1].unreached == ("c",)
    rig.peer.presence.now += FORGIVEN
    assert rig.peer.presence.unreached == frozenset()


# The leader, as we see it --------------------------------------------------------------------------------------
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
    assert not takes_part(rig, "a", rig.begin(1)), "what a may have begun with the first Ready"
    assert takes_part(rig, "a", rig.begin(3))


def test_a_leader_that_is_further_is_followed() -> None:
    rig = at_second().trained()
    effects = rig.hear("a", Abort(attempt=attempt(rig.peer.log, 7), reason="say Ready for a later attempt"))
    assert sends(effects, Ready)[0][1].last_attempt == 7
    assert not sends(rig.hear("c", Abort(attempt=attempt(rig.peer.log, 9, "c"), reason="")), Ready)
    assert not sends(rig.hear("a", Abort(attempt=attempt(rig.peer.log, 2**61), reason="")), Ready)
    assert takes_part(rig, "a", rig.begin(8))


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
    assert not of(rig.hear("a", rig.commit()), Apply)
    rig.holding()
    assert not of(rig.hear("a", rig.commit(rig.next_header(OTHER))), Apply)
    assert of(rig.hear("a", rig.commit()), Apply)


def test_the_answer_to_a_lost_commit_is_the_commit() -> None:
    rig = at_second()
    header = rig.peer.log.last
    assert header is not None
    for message in (Ready, Inquire):
        asked: Message = ready(LOG, "c", samples=()) if message is Ready else Inquire(position=LOG.position)
        assert sends(rig.hear("c", asked), Commit) == [("c", rig.commit(header))]


def test_while_the_commit_of_many_is_on_its_way_only_whoever_inquires_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: at 1,000 peers half of what the leader sent were certificates for those who had said Complete again
    before the tree had reached them."""
    monkeypatch.setattr("peers.protocol.replica.OPEN_LIMIT", 2)
    rig = Rig().joined().trained().averaging().holding().applying().applied()
    again, asked = ready(LOG, "c", samples=()), Inquire(position=LOG.position)
    assert not sends(rig.hear("c", again), Commit)
    assert [to for to, _ in sends(rig.hear("c", asked), Commit)] == ["c"]
    assert [to for to, _ in sends(rig.hear("c", again, after=TIMING.resend), Commit)] == ["c"], "it has missed it"


def test_who_asks_about_a_place_we_never_were_hears_where_we_are() -> None:
    rig = at_second()
    elsewhere = ahead_by(rig, 2).position
    (to, answer), *_ = sends(rig.hear("c", Inquire(position=elsewhere)), Elsewhere)
    assert (to, answer.position) == ("c", rig.peer.log.position)


# Behind --------------------------------------------------------------------------------------------------------
BEHIND = pytest.mark.parametrize("state", [State.JOINING, State.TRAINING, State.READY, State.AVERAGING])


@BEHIND
@pytest.mark.parametrize("entries", range(1, SETTINGS.snapshot_every + 1))
def test_who_is_a_few_entries_behind_asks_what_followed(state: State, entries: int) -> None:
    rig = IN_STATE[state]()
    effects = rig.see(ahead_by(rig, entries))
    assert sends(effects, Inquire) == [("c", Inquire(position=rig.peer.log.position))]
    assert rig.is_in(state), "it goes on until it knows"
    assert not of(effects, FetchSnapshot)


@BEHIND
def test_who_is_far_behind_takes_a_snapshot(state: State) -> None:
    rig = IN_STATE[state]()
    theirs = ahead_by(rig, SETTINGS.snapshot_every + 1)
    effects = rig.see(theirs)
    assert of(effects, FetchLineage) == [FetchLineage("c", theirs.position.index, ("a",))]
    assert not of(effects, StopTraining), "it is told so, no more"
    assert not sends(effects, Inquire)
    effects = rig.shown(theirs)
    assert of(effects, FetchSnapshot) == [FetchSnapshot("c", ("a",), rig.peer.log.position.index + 1)]
    assert bool(of(effects, StopTraining)) is (state is State.TRAINING)


@BEHIND
def test_an_entry_that_was_missed_is_replayed(state: State) -> None:
    rig = IN_STATE[state]()
    header = told(rig)
    assert of(rig.effects, FetchPayload) == [FetchPayload(header, ("a", "c"))]
    assert rig.is_in(State.REPLAYING)
    assert [effect.header for effect in of(rig.do(PayloadFetched(header)), Apply)] == [header]
    assert rig.peer.log.last == header


def test_one_entry_after_another_is_replayed_until_we_are_where_the_others_are() -> None:
    rig = at_second().trained()
    theirs = ahead_by(rig, 3)
    while rig.peer.log.position != theirs.position:
        rig.see(theirs)
        (to, inquiry), *_ = sends(rig.effects, Inquire)
        assert inquiry.position == rig.peer.log.position
        header = ahead_by(rig, 1).last
        assert header is not None
        rig.hear(to, rig.commit(header))
        rig.do(PayloadFetched(header))
        rig.step(header, OTHER)
    assert sends(rig.effects, LeaseRequest)[0][1].state_digest == OTHER
    assert rig.peer.settled.position == theirs.position


def test_nobody_who_can_be_behind_too_is_asked_for_a_payload() -> None:
    rig = at_second()
    header = ahead_by(rig, 1).last
    assert header is not None
    rig.see(ahead_by(rig, 1), others="c")
    assert rig.hear("a", rig.commit(header)) == [], "a is where we are: how should it know"
    rig.hear("c", rig.commit(header))
    assert of(rig.effects, FetchPayload) == [FetchPayload(header, ("c",))]


def test_an_entry_that_does_not_follow_is_not_replayed() -> None:
    rig = at_second()
    header = ahead_by(rig, 1).last
    assert header is not None
    rig.see(ahead_by(rig, 1))
    effects = rig.hear("c", rig.commit(header.model_copy(update={"cursor": 7})))
    assert [(dropped.peer, dropped.what) for dropped in of(effects, Dropped)] == [("c", "commit")]
    assert rig.is_in(State.TRAINING)


def test_a_payload_that_is_not_to_be_had_ends_in_a_snapshot() -> None:
    rig = replaying(at_second())
    header = rig.peer.replica.replaying
    assert header is not None
    log = rig.peer.log
    assert of(rig.do(PayloadNotFetched(header, "all are busy")), FetchSnapshot) == [
        FetchSnapshot("c", ("a",), rig.peer.log.position.index + 1)
    ]
    assert rig.peer.log == log


def test_while_one_entry_is_replayed_another_one_is_not() -> None:
    rig = replaying(at_second())
    effects = rig.hear("a", rig.commit(ahead_by(rig, 1, digest_of(b"a third")).last or HEADER))
    effects += rig.see(ahead_by(rig, 2))
    effects += rig.tick()
    assert not [effect for effect in effects if isinstance(effect, FetchPayload | FetchSnapshot | Apply)]
    assert not sends(effects, Inquire)


PROGRESS = Progress(inner_step=1, loss=1.0, tokens_per_second=1.0)


def test_who_is_late_goes_on_training_while_it_replays() -> None:
    """Its lease is carried on, and its worker has loaded theta: what it trains is for the next entry."""
    rig = at_second()
    rig.do(TrainingProgress(PROGRESS))
    lease = rig.lease
    header = told(rig)
    assert not of(rig.effects, StopTraining)
    assert of(rig.do(PayloadFetched(header)), Apply) == [Apply(header, keeps_work=True)]
    assert not of(rig.step(header), Train), "it is at it already"
    assert rig.is_in(State.TRAINING)
    assert rig.peer.log.leases["b"] == lease
    rig.see()
    assert sends(rig.do(TrainingDone(trained(lease))), Ready)[0][1].samples == lease


def test_who_is_done_while_it_replays_is_ready_when_it_has() -> None:
    rig = at_second()
    rig.do(TrainingProgress(PROGRESS))
    lease = rig.lease
    header = told(rig)
    assert not sends(rig.do(TrainingDone(trained(lease))), Ready)
    rig.do(PayloadFetched(header))
    rig.step(header)
    assert rig.is_in(State.READY)
    rig.see()
    assert sends(rig.tick(), Ready)[0][1].samples == lease


def test_work_that_had_not_begun_is_stopped_when_an_entry_was_missed() -> None:
    """Its worker might load theta from before the entry or after it."""
    rig = at_second()
    told(rig)
    assert of(rig.effects, StopTraining)


def test_work_that_is_too_old_is_stopped_when_another_entry_was_missed() -> None:
    rig = at_second()
    rig.do(TrainingProgress(PROGRESS))
    rig = replays(rig)
    told(rig)
    assert of(rig.effects, StopTraining)


def test_who_holds_the_entry_that_was_committed_needs_no_payload() -> None:
    rig = at_second().trained().averaging().holding()
    next_log = rig.peer.log.append(rig.next_header())
    (to, inquiry), *_ = sends(rig.see(next_log), Inquire)
    assert inquiry.position == rig.peer.log.position
    effects = rig.hear(to, rig.commit())
    assert of(effects, Apply)
    assert not of(effects, FetchPayload)


def test_an_inquiry_that_finds_another_entry_than_we_hold_is_asked_once() -> None:
    """Regression: it was asked again at once, and again, as fast as the network went."""
    rig = at_second().trained().averaging().holding()
    theirs = ahead_by(rig, 1)
    assert theirs.last is not None
    (to, _), *_ = sends(rig.see(theirs), Inquire)
    effects = rig.hear(to, rig.commit(theirs.last))
    assert of(effects, FetchPayload) == [FetchPayload(theirs.last, ("a", "c"))]
    assert not sends(effects, Inquire)


def test_an_inquiry_that_leads_nowhere_ends_in_a_fetch() -> None:
    """Who is asked has that position no more in its recent log, or is on another lineage."""
    rig = at_second().trained().averaging().holding()
    theirs = ahead_by(rig, 1)
    (to, _), *_ = sends(rig.see(theirs), Inquire)
    assert of(rig.hear("a", Elsewhere(position=theirs.position)), FetchLineage) == []
    assert of(rig.hear(to, Elsewhere(position=theirs.position)), FetchLineage)
    assert of(rig.shown(theirs), FetchSnapshot)


def test_the_recent_log_is_as_long_as_anybody_can_need_and_not_endless() -> None:
    rig = at_second()
    passed = [rig.peer.log.position]
    for _ in range(RECENT_ENTRIES):
        header = told(rig)
        rig.do(PayloadFetched(header))
        rig.step(header)
        passed.append(rig.peer.log.position)
    assert not sends(rig.hear("c", Inquire(position=LOG.position)), Commit)
    for position in passed[-SETTINGS.snapshot_every - 1 : -1]:
        assert sends(rig.hear("c", Inquire(position=position)), Commit)


def say_ready(rig: Rig) -> Ready:
    """Its Ready, from wherever it is in getting there."""
    rig.now += 2 * TIMING.round_timeout  # whom it distrusts is trusted again
    rig.see()
    rig.tick()
    if rig.is_in(State.JOINING):
        grant = rig.peer.log.grants[0]
        rig.hear("a", LeaseGrant(position=rig.peer.log.position, samples=grant, steps=10))
    assert rig.is_in(State.TRAINING)
    lease = rig.peer.log.leases.get("b") or rig.peer.log.grants[0]
    message: Ready = sends(rig.do(TrainingDone(trained(lease))), Ready)[0][1]
    return message


def replays(rig: Rig) -> Rig:
    header = told(rig)
    rig.do(PayloadFetched(header))
    rig.step(header)
    return rig


def newcomer() -> Rig:
    """Has fetched the state at a position where it may have been before."""
    rig = fetching(at_second())
    rig.do(SnapshotRestored("c", ahead_by(rig, SETTINGS.snapshot_every + 1).last, STATE))
    return rig


@pytest.mark.parametrize("way", [at_second, newcomer, lambda: replays(newcomer())], ids=["stays", "fetches", "replays"])
def test_one_start_is_one_incarnation(way: Callable[[], Rig]) -> None:
    """Whatever it fetches and replays, it forgets nothing that it has promised."""
    rig = replays(way())
    assert say_ready(rig).incarnation == rig.peer.incarnation == 0


def test_who_failed_to_replay_is_where_it_was() -> None:
    """All who are further on are gone before it has the payload."""
    rig = newcomer()
    told(rig)
    gets_no_payload_of_the_dead(rig)
    assert rig.is_in(State.JOINING)
    assert say_ready(rig).last_attempt == 0


def test_what_others_say_of_their_log_is_looked_at_once_and_changes_nothing() -> None:
    """Regression: whoever said that it had trained more was believed, and everybody dropped its work."""
    rig = at_second()
    elsewhere = beat("c", rig.peer.log, sequence=9, head=bytes(32), lineage_tokens=2**61)
    assert of(rig.do(HeartbeatsSeen((elsewhere,))), FetchLineage) == [FetchLineage("c", 1, ("a",))]
    assert rig.is_in(State.TRAINING)
    assert not rig.do(LineageNotSeen("c", "nothing follows"))[1:]
    assert rig.is_in(State.TRAINING)
    assert not of(rig.see(rig.peer.log, others="a"), FetchLineage), "c comes last for a while"
    assert of(rig.do(HeartbeatsSeen((elsewhere.model_copy(update={"sequence": 10}),)), after=10.1), FetchLineage)


@pytest.mark.parametrize(("theirs", "moves"), [(Proof(True, 2), True), (Proof(False, 2), False)])
def test_a_certified_entry_goes_before_a_minoritys(theirs: Proof, moves: bool) -> None:
    rig = at_second()
    other = LOG.append(LOG.next_header(rig.roster(), OTHER))
    rig.do(HeartbeatsSeen((beat("c", other, sequence=9, lineage_tokens=2**61),)))
    start = Branch(rig.peer.log, rig.peer.log)
    ours = replace(start, first={0: (b"ours", Proof(not theirs.is_certified, 1))})
    seen = LineageSeen("c", replace(start, end=ahead_by(rig, 2), first={0: (b"theirs", theirs)}), ours)
    assert bool(of(rig.do(seen), FetchSnapshot)) is moves
    assert rig.is_in(State.FETCHING if moves else State.TRAINING)


def test_a_fetched_state_leads_to_a_lease() -> None:
    rig = fetching(at_second())
    theirs = ahead_by(rig, SETTINGS.snapshot_every + 1)
    effects = rig.do(SnapshotRestored("c", theirs.last, OTHER))
    assert rig.peer.log.position == theirs.position
    assert rig.is_in(State.JOINING)
    (to, request), *_ = sends(effects, LeaseRequest)
    assert (to, request.state_digest) == ("a", OTHER)


def replayed(rig: Rig, theirs: LogState) -> None:
    """The next entry is asked for, fetched and applied."""
    ((to, inquiry),) = sends(rig.effects, Inquire)
    assert (to, inquiry.position) == ("a", rig.peer.log.position), "it was in the last roster"
    header = ahead_by(rig, 1).last
    assert header is not None
    rig.hear("c", rig.commit(header))
    rig.do(PayloadFetched(header))
    rig.step(header)
    rig.see(theirs)


def test_who_has_a_snapshot_replays_what_came_since_however_much_it_is() -> None:
    """They go on while we fetch and replay; another snapshot would be eight times as large as an entry, too."""
    rig = fetching(at_second())
    rig.see(ahead_by(rig, 2 * SETTINGS.snapshot_every))
    rig.do(SnapshotRestored("c", ahead_by(rig, 2).last, STATE))
    theirs = ahead_by(rig, 2 * SETTINGS.snapshot_every)
    rig.see(theirs)
    while rig.peer.log.position != theirs.position:
        assert not of(rig.effects, FetchSnapshot)
        replayed(rig, theirs)
    assert rig.is_in(State.JOINING)
    assert of(rig.see(ahead_by(rig, SETTINGS.snapshot_every + 1)), FetchLineage), (
        "it had arrived, and is late once more"
    )


def test_of_a_snapshot_that_nobody_can_tell_the_rest_of_a_newer_one_is_taken() -> None:
    """Regression: the same one was fetched again and again."""
    rig = newcomer()
    theirs = ahead_by(rig, 5)
    rig.see(theirs)
    ((to, _),) = sends(rig.effects, Inquire)
    rig.hear(to, Elsewhere(position=LOG.position))
    (fetch,) = of(rig.shown(theirs), FetchSnapshot)
    assert fetch.least == rig.peer.log.position.index + 1


def test_no_snapshot_is_taken_from_where_nobody_remembers_the_way() -> None:
    rig = Rig()
    theirs = ahead_by(rig, RECENT_ENTRIES)
    rig.see(theirs)
    (fetch,) = of(rig.shown(theirs), FetchSnapshot)
    assert RECENT_ENTRIES // 4 < fetch.least < RECENT_ENTRIES * 3 // 4


def test_of_a_lineage_that_is_heavier_and_no_longer_any_snapshot_will_do() -> None:
    rig = at_second()
    heavier = LOG.append(LOG.next_header([member("c", 0, 20, 2000)], OTHER))
    rig.see(heavier)
    ours = Branch(LOG, rig.peer.log, {0: (b"ours", CERTIFIED)})
    theirs = Branch(LOG, heavier, {0: (b"theirs", CERTIFIED)}, {0: LOG.position.head, 1: heavier.position.head})
    (fetch,) = of(rig.do(LineageSeen("c", theirs, ours)), FetchSnapshot)
    assert (fetch.donor, fetch.least) == ("c", 0)


def test_a_failed_donor_is_not_asked_again_for_a_while() -> None:
    rig = fetching(at_second())
    rig.do(SnapshotFailed("c", "gone"))
    assert rig.is_in(State.JOINING)
    [(to, _)] = sends(rig.tick(), Inquire)
    assert to == "a", "it may have all that followed"
    [look] = of(rig.hear("a", Elsewhere(position=ahead_by(rig, 20).position)), FetchLineage)
    assert look.donor == "a"


def test_an_archives_snapshot_may_be_as_old_as_it_likes() -> None:
    """It knows all that followed; peers know the last entries alone."""
    rig = at_second()
    far = ahead_by(rig, 2 * RECENT_ENTRIES)
    for state, least in ((PeerState.TRAINING, far.position.index - RECENT_ENTRIES // 2), (PeerState.ARCHIVING, 2)):
        rig = at_second()
        rig.do(HeartbeatsSeen((beat("c", far, sequence=10, state=state),)))
        [fetch] = of(rig.shown(far), FetchSnapshot)
        assert fetch.least == least


@pytest.mark.parametrize("how", ["restored", "failed"])
def test_who_has_fetched_remembers_what_it_has_promised_there(how: str) -> None:
    """Regression: a peer that forgot what it held, because it fetched, vouched for holding nothing."""
    rig = at_second().trained().averaging().holding()
    held = rig.peer.slot.acceptor.held
    assert held is not None
    rig.hear("a", Abort(attempt=held.attempt, reason="over"))
    fetching(rig)
    rig.do(SnapshotRestored("a", rig.peer.log.last, STATE) if how == "restored" else SnapshotFailed("a", "gone"))
    rig.tick(2 * TIMING.round_timeout)  # a is trusted again
    rig.see()
    say = sends(rig.do(TrainingDone(trained(rig.lease))), Ready)[0][1]
    assert (say.held, say.last_attempt) == (held, held.attempt.number)


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
    rig = leading()
    request = LeaseRequest(position=rig.peer.log.position, state_digest=STATE, relayed=(), unreached=())
    assert rig.hear("stranger", request) == []
    assert sends(rig.hear("c", request), LeaseGrant)


REQUEST = LeaseRequest(position=LOG.position, state_digest=STATE, relayed=(), unreached=())


def granted_by_a() -> Rig:
    """b trains what a gave it, and has not heard yet that a trains, too."""
    rig = Rig()
    rig.see(state=PeerState.JOINING)
    rig.tick(5.0)
    rig.hear("a", LeaseGrant(position=LOG.position, samples=(SampleRange(20, 40),), steps=10))
    return rig


def test_the_giver_of_our_lease_leads_before_its_heartbeats_say_so() -> None:
    """Regression: c heard first that b is at work, asked b, and got the samples that a had given itself."""
    rig = granted_by_a()
    assert sends(rig.hear("c", REQUEST), LeaseGrant) == []
    assert [to for to, _ in sends(rig.do(TrainingDone(trained(rig.lease))), Ready)] == ["a"]
    assert sends(rig.hear("c", REQUEST), LeaseGrant) == []


def test_a_giver_of_leases_that_asks_for_one_itself_gets_one() -> None:
    rig = granted_by_a()
    assert [to for to, _ in sends(rig.hear("a", REQUEST), LeaseGrant)] == ["a"]


def test_a_peer_that_has_given_leases_leads_itself() -> None:
    """Regression: it asked one that it had given a lease, got what it had given to a third, and refused itself."""
    rig = Rig("a", "bc")
    rig.see(state=PeerState.JOINING)
    rig.now += 5.0
    assert sends(rig.hear("b", REQUEST), LeaseGrant)
    rig.see(others="b")
    assert of(rig.tick(), Train) == [Train(0, (SampleRange(20, 40),), 10, 0)]


@pytest.mark.parametrize("alive", ["cd", "ac"], ids=["dead", "never at work"])
def test_another_leads_when_the_giver_of_its_lease_is(alive: str) -> None:
    """It gives what comes after its own lease: what comes before that was given already."""
    rig = granted_by_a()
    rig.now += TIMING.heartbeat_expiry + 1.0
    rig.see(others=alive, state=PeerState.JOINING)
    assert [grant.samples for _, grant in sends(rig.hear("c", REQUEST), LeaseGrant)] == [(SampleRange(40, 60),)]


GIVEN_TO_ANOTHER = Refuse(position=LOG.position, state_digest=STATE, reason="its samples were given to another joiner")


def test_samples_that_another_leader_gave_are_exchanged_for_the_present_ones() -> None:
    """Regression: the state of the leader was fetched, though it is the same."""
    rig = granted_by_a()
    rig.do(TrainingDone(trained(rig.lease)))
    rig.peer.presence.distrust("a")
    rig.do(HeartbeatsSeen(tuple(beat(name, LOG, sequence=9).model_copy(update={"vote": "c"}) for name in "ac")))
    assert [to for to, _ in sends(rig.tick(), Ready)] == ["c"]
    assert [to for to, _ in sends(rig.hear("c", GIVEN_TO_ANOTHER), LeaseRequest)] == ["c"]
    assert "c" not in rig.peer.presence.distrusted
    assert sends(rig.hear("c", GIVEN_TO_ANOTHER), LeaseRequest) == [], "that it says so again is late"
    grant = LeaseGrant(position=LOG.position, samples=(SampleRange(40, 60),), steps=10)
    assert of(rig.hear("c", grant), Train) == [Train(0, (SampleRange(40, 60),), 10, 0)]


def test_a_leader_that_refuses_what_it_gave_is_distrusted() -> None:
    rig = granted_by_a()
    rig.do(TrainingDone(trained(rig.lease)))
    assert sends(rig.hear("a", GIVEN_TO_ANOTHER), LeaseRequest) == []
    assert rig.peer.presence.distrusted == {"a"}


def test_a_leader_that_refuses_what_the_log_gave_is_distrusted() -> None:
    """Regression: its state was fetched, though it is the same."""
    rig = at_second().trained()
    refuse = Refuse(position=rig.peer.log.position, state_digest=STATE, reason="not yours")
    assert of(rig.hear("a", refuse), FetchSnapshot) == []
    assert rig.peer.presence.distrusted == {"a"}


def test_a_founder_that_gives_no_samples_is_given_up() -> None:
    """Regression: it kept everybody from the run for ever."""
    rig, patience = Rig(), Schedule(TIMING).begin(everyone_is_ready=True)
    for after in (5.0, patience):
        rig.now += after
        rig.see(state=PeerState.JOINING)
        assert [to for to, _ in sends(rig.tick(), LeaseRequest)] == ["a"]
    assert of(rig.tick(), Train), "it asks itself, which is the next one"


def test_two_founders_that_give_no_samples_in_turn_are_given_up() -> None:
    """Regression: whenever another one was asked, the time began anew."""
    rig, patience = Rig(), Schedule(TIMING).begin(everyone_is_ready=True)
    for _ in range(2):
        for founder in "ac":
            rig.now += patience / 2
            rig.see(others=founder)
            rig.tick()
    assert rig.peer.presence.distrusted == {"a", "c"}


def test_strangers_are_not_ready() -> None:
    """Regression: anybody's Ready was taken, and with a higher number it threw out everybody else's."""
    rig = at_second()
    log = rig.peer.log
    rig.hear("c", ready(log, "c"))
    assert rig.hear("stranger", ready(log, "stranger", samples=(), tokens=0, last_attempt=5)) == []
    assert [to for to, _ in sends(rig.hear("a", ready(log, "a", last_attempt=5)), Abort)] == ["c"]


# Trouble -------------------------------------------------------------------------------------------------------
def evidence_against_c(log: LogState) -> Evidence:
    proof = ChunkProof(squares=1.0, path=b"")
    return Evidence(commitment=commitment("c", 0, log.position), chunk=2, proof=proof, data=b"blocks")


def test_bad_blocks_are_shown_to_the_leader() -> None:
    rig = at_second().trained().averaging()
    evidence = evidence_against_c(rig.peer.log)
    bad = BadBlocks(attempt(rig.peer.log), "c", 2, "x" * 1000, evidence)
    (to, accuse), *_ = sends(rig.do(bad), Accuse)
    assert (to, accuse.accused, len(accuse.reason), accuse.evidence) == ("a", "c", 500, evidence)


def test_of_bad_blocks_that_show_nothing_the_leader_hears_that_there_is_no_exchange() -> None:
    rig = at_second().trained().averaging()
    assert not sends(rig.do(BadBlocks(attempt(rig.peer.log), "c", 2, "not what it committed to")), Accuse)
    ((_, waiting),) = sends(rig.tick(), Waiting)
    assert waiting.unreached == ("c",)
    rig.do(ContributionArrived(attempt(rig.peer.log), "c", 2))
    ((_, waiting),) = sends(rig.tick(), Waiting)
    assert waiting.unreached == ()


def test_nobody_is_accused_between_two_attempts() -> None:
    rig = at_second().trained().averaging()
    back_to_ready(rig)
    evidence = evidence_against_c(rig.peer.log)
    effects = rig.do(BadBlocks(attempt(rig.peer.log), "c", 2, "code -128", evidence))
    assert [(dropped.peer, dropped.what) for dropped in of(effects, Dropped)] == [("c", "contribution")]
    assert not sends(effects, Accuse)


def test_a_leader_stays_in_office_for_as_long_as_it_said_the_attempt_may_take() -> None:
    rig = at_second().trained()
    begin = rig.begin().model_copy(update={"seconds": 3 * TIMING.round_timeout})
    rig.hear("a", begin)
    began = rig.now
    while rig.is_in(State.AVERAGING):
        rig.see(state=PeerState.AVERAGING)
        rig.tick(1.0)
    assert rig.now - began == pytest.approx(begin.seconds + SCHEDULE.death, abs=1.1)


def test_no_leader_stays_in_office_for_ever() -> None:
    rig = at_second().trained()
    rig.hear("a", rig.begin().model_copy(update={"seconds": 1e6}))
    began = rig.now
    while rig.is_in(State.AVERAGING):
        rig.see(state=PeerState.AVERAGING)
        rig.tick(1.0)
    assert rig.now - began <= SCHEDULE.longest_attempt + SCHEDULE.death + 2


def test_an_unreachable_member_is_gone_when_it_stays_so() -> None:
    rig = leading()
    rig.do(Undelivered("c"))
    assert not sends(rig.tick(0.0), Begin)
    rig.see(others="b", state=PeerState.AVERAGING)
    begin = sends(rig.tick(TIMING.heartbeat), Begin)[0][1]
    assert begin.round.lost == ("c",)


def test_an_unreachable_member_that_is_heard_again_is_not_gone() -> None:
    rig = leading()
    rig.do(Undelivered("c"))
    rig.tick(0.0)
    rig.hear("c", Waiting(attempt=rig.attempt(), missing=("b",), moved=0, unreached=()))
    rig.see(others="b", state=PeerState.AVERAGING)
    assert not sends(rig.tick(TIMING.heartbeat), Begin)


def test_a_dead_leader_is_succeeded_in_roster_order() -> None:
    rig = at_second().trained().averaging()
    rig.do(Undelivered("a"))
    rig.tick()
    assert rig.is_in(State.READY)
    rig.hear("c", ready(rig.peer.log, "c", last_attempt=2))
    rig.see(others="c", state=PeerState.READY)
    for _ in range(3):
        rig.do(Undelivered("a"))
        effects = rig.tick() + rig.hear("c", ready(rig.peer.log, "c", last_attempt=rig.peer.slot.acceptor.last_attempt))
        if sends(effects, Begin):
            break
    assert [to for to, _ in sends(effects, Begin)] == ["c"]


def test_a_leader_that_never_concludes_is_given_up() -> None:
    rig = at_second().trained().averaging()
    started = rig.now
    while rig.is_in(State.AVERAGING):
        rig.see(state=PeerState.AVERAGING)
        rig.tick(1.0)
        assert rig.now - started <= 2 * TIMING.round_timeout + 2
    assert sends(rig.effects, Ready) == [], "it is pledged to itself now"
    assert rig.peer.slot.acceptor.pledged_to == "b"


def test_a_leader_that_never_begins_is_given_up() -> None:
    rig = at_second().trained()
    patience = TIMING.grace + TIMING.partition_grace + 2 * TIMING.round_timeout
    started = rig.now
    while rig.peer.slot.acceptor.pledged_to == "a":
        rig.see(state=PeerState.READY)
        rig.tick(1.0)
        assert rig.now - started <= patience + 2


def test_a_leader_that_was_given_up_gets_twice_the_time() -> None:
    """Else peers that give up at different times could go round from leader to leader, never all with one of them."""
    rig = at_second().trained()
    slot, waited = rig.peer.slot, list[float]()
    for _ in range(2):
        while slot.acceptor.pledged_to != "a":
            rig.see(state=PeerState.READY)
            rig.tick(1.0)
        slot._patience.begin()
        since = rig.now
        while slot.acceptor.pledged_to == "a":
            rig.see(state=PeerState.READY)
            rig.tick(1.0)
        waited.append(rig.now - since)
    assert waited[1] > 1.9 * waited[0]


# Leaving -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [State.JOINING, State.FETCHING, State.REPLAYING, State.TRAINING, State.READY])
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
    assert of(rig.step(last), Stop)


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
    for event in (Tick(), LeaveRequested(), Applied(HEADER), TrainingDone(trained(()))):
        assert rig.do(event) == []


def test_after_a_goodbye_the_others_go_on_at_once() -> None:
    rig = leading()
    effects = rig.hear("c", leaving(rig.peer.log, "c", 1))
    (to, begin), *more = sends(effects, Begin)
    assert (to, begin.round.lost, more) == ("b", ("c",), [])
    assert [to for to, _ in sends(effects, Abort)] == ["c"]
    assert rig.is_in(State.AVERAGING)


def test_the_first_entry_is_not_made_by_fewer_than_the_minimum() -> None:
    rig = leading_first()
    effects = rig.hear("c", leaving(LOG, "c", 0))
    assert [to for to, _ in sends(effects, Abort)] == ["b", "c"]
    assert rig.is_in(State.READY)


@pytest.mark.parametrize(("incarnation", "departure", "counts"), [(0, 1, False), (0, 2, True), (7, 1, True)])
def test_who_leaves_counts_in_quorums_before_its_departure(incarnation: int, departure: int, counts: bool) -> None:
    """It alone may know what was committed there, so that the one who stays is no majority. Nor does it leave in the
    name of another start of the same peer."""
    rig = leading()
    rig.hear("c", leaving(rig.peer.log, "c", departure, incarnation))
    rig.hear("b", leaving(rig.peer.log, "b", 1))
    if counts:
        rig.tick(TIMING.grace)
    assert rig.is_in(State.READY if counts else State.AVERAGING)


def test_who_leaves_says_up_to_where_it_has_held_entries() -> None:
    assert at_second().peer.goodbye.departure == 1
    assert at_second().trained().averaging().holding().peer.goodbye.departure == 2


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
    held = holding(header, which, draw.choice("az"))
    digest = draw.choice([STATE, PAYLOAD, here.position.head])
    name = draw.choice([which, rig.peer.exchange.name if rig.peer.exchange else which])
    lost = draw.choice([(), (), ("c",), ("a", "b", "c"), ("z",)])
    chunks = draw.choice([None, None, [0, 0, 0], [0, 6, 0], [2**62 - 1] * 3])
    round = round_of(name, draw.choice([roster, rig.roster(), rig.roster()]), lost, chunks)
    missed = draw.choice([(), (("c", 2),), (("c", 2**62 - 1), ("z", 1)), tuple((peer, SIZE.chunks) for peer in "abc")])
    mask = draw.choice([b"", b"\x3f", b"\xff" * 100])
    messages: list[Message] = [
        LeaseRequest(position=position, state_digest=digest, relayed=(), unreached=()),
        LeaseGrant(position=position, samples=(SampleRange(0, draw.choice([20, 2**62 - 1])),), steps=number),
        ready(
            log,
            "x",
            samples,
            state_digest=digest,
            tokens=tokens,
            last_attempt=number,
            held=draw.choice([None, held]),
            round=draw.choice([None, round]),
            rate=draw.choice([0, 1, 2**62 - 1]),
        ),
        Begin(
            attempt=which,
            round=round,
            seconds=draw.choice([0.1, 20.0, 1e6]),
            open=draw.choice([False, True]),
            commitments=draw.choice([(), commitments(round)]),
        ),
        rig.begin(number, leader),
        rig.begin(number, leader, draw.choice(["", "c"]), name),
        Adopt(attempt=which, header=header, holders=holders_of(held, draw.choice(["", "a", "bz", "aa"])), seconds=20.0),
        Holding(attempt=which, chunks=mask),
        Want(attempt=which, reduced=mask, own=draw.choice([b"", mask])),
        Waiting(attempt=which, missing=("a", "z"), moved=0, unreached=()),
        Accuse(attempt=which, accused=draw.choice("abz"), reason="x"),
        Complete(attempt=which, payload=digest, missed=missed, entry=digest, signature=bytes(64)),
        Commit(header=header, certificate=None),
        Abort(attempt=which, reason="x"),
        Refuse(position=position, state_digest=STATE, reason="x"),
        Inquire(position=position),
        Elsewhere(position=position),
        Leaving(
            position=position,
            incarnation=draw.choice([0, 7]),
            departure=draw.choice([0, 1, 2**61]),
            signature=bytes(64),
        ),
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
    if rig.peer.replica.undigested is not None and rig.peer.replica.undigested.last and draw.random() < 0.5:
        return Digested(rig.peer.replica.undigested.last, STATE)
    if state is State.APPLYING and rig.peer.replica.undigested is None and rig.peer.log.last:
        return Applied(rig.peer.log.last)
    if state is State.FETCHING:
        restored = SnapshotRestored("a", rig.peer.log.last, STATE)
        return restored if draw.random() < 0.5 else SnapshotFailed("a", "")
    if state is State.REPLAYING and rig.peer.replica.replaying:
        header = rig.peer.replica.replaying
        return PayloadFetched(header) if draw.random() < 0.5 else PayloadNotFetched(header, "")
    if state is State.TRAINING:
        return TrainingDone(trained(rig.lease))
    if rig.peer.slot.adopting and draw.random() < 0.5:
        return PayloadFetched(rig.peer.slot.adopting.header)
    if rig.peer.exchange:
        return exchange_event(rig.peer.exchange.name, rig, draw)
    return Tick()


def exchange_event(name: Attempt, rig: Rig, draw: random.Random) -> Event:
    """Something that moved, as far as the exchange let it."""
    exchange, chunk, sender = rig.peer.exchange, draw.randrange(SIZE.chunks), draw.choice("abc")
    assert exchange is not None
    events: list[Event] = [
        ChunkSent(name, sender, chunk, True),
        ChunksUnsent(name, sender, (0, 1), True),
    ]
    if exchange.wants_contribution(sender, chunk):
        events += [ContributionArrived(name, sender, chunk), BadBlocks(name, sender, chunk, "x")]
    if exchange.wants_reduced(sender, chunk):
        events.append(ReducedArrived(name, sender, chunk, draw.choice([(), ("c",), ("a", "b")])))
    if len(exchange._here) == SIZE.chunks or draw.random() < 0.2:
        events.append(PayloadAssembled(name, draw.choice([PAYLOAD, OTHER])))
    return draw.choice(events)


@pytest.mark.parametrize("seed", range(60))
def test_no_message_makes_a_peer_fall(seed: int) -> None:
    draw = random.Random(seed)
    rig = draw.choice([at_second, Rig, at_second().trained, at_second().trained().averaging])()
    rig = Rig("a", "bc", replace(SETTINGS, minimum_peers=1)) if seed % 5 == 0 else rig
    for _ in range(200):
        dice = draw.random()
        if dice < 0.6:
            rig.hear(draw.choice("abcz"), hostile_messages(rig, draw), draw.choice([0.0, 0.1]))
        elif dice < 0.7:
            rig.see(state=draw.choice([PeerState.TRAINING, PeerState.READY, PeerState.JOINING]))
        elif dice < 0.95:
            rig.do(own_event(rig, draw), draw.choice([0.0, 1.0, 30.0]))
        else:
            rig.tick(draw.choice([0.5, 5.0, 150.0]))
    assert rig.peer.state in State
