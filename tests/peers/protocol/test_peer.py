"""One peer as a whole: its way from state to state, where messages go, what convicts, and how it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peers.errors import LocalProtocolError
from peers.log.certificate import Ballot, Departure, Phase
from peers.log.header import Header
from peers.messages.messages import (
    Begin,
    Certified,
    Elsewhere,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Part,
    Proof,
    Propose,
    Ready,
    Refuse,
    Unread,
    Vote,
    Want,
)
from peers.messages.packing import Packer
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Apply, Dropped, Note, SendChunk, Stop, StopTraining
from peers.protocol.events import (
    Applied,
    AverageRefuted,
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    Digested,
    Event,
    LeaveRequested,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    ReducedArrived,
    SnapshotFailed,
    SnapshotRestored,
    TrainingDone,
    Undelivered,
)
from peers.protocol.hindrance import SHOWN_AFTER
from peers.protocol.states import State
from peers.values.wire import Reach, WireError, digest_of
from tests.peers.builders import (
    LEASES,
    Rig,
    ahead,
    at_second,
    averaged,
    begin_of,
    certified,
    choice,
    commitment,
    follower_at_second,
    of,
    propose,
    ready,
    roster,
    round_of,
    sends,
    trained,
    two_votes,
    vote,
)
from tests.peers.logs import LOG, PAYLOAD, RUN, SETTINGS, STATE, TIMING, next_header
from tests.simulator.simulated_keys import SimulatedKeys

OTHER = digest_of(b"another payload")


def waiting() -> Rig:
    """It has started long enough ago to have heard of all who wait, too."""
    rig = Rig("c", "ab")
    rig.now = TIMING.heartbeat_expiry
    return rig


def sees_far_ahead(rig: Rig) -> Rig:
    theirs = ahead(rig.log, SETTINGS.snapshot_every + 1)
    rig.see(theirs)
    rig.shown(theirs)
    return rig


def is_told(rig: Rig) -> Rig:
    """The others have made the next entry, and one of them says so."""
    log = rig.log
    rig.see(ahead(log))
    rig.hear("a", certified(log, next_header(log, roster(log)), by="ab"))
    return rig


def leaves(rig: Rig) -> Rig:
    rig.do(LeaveRequested(at_once=True))
    return rig


IN_STATE: dict[State, Callable[[], Rig]] = {
    State.JOINING: waiting,
    State.TRAINING: follower_at_second,
    State.READY: lambda: follower_at_second().trained(),
    State.AVERAGING: lambda: follower_at_second().trained().exchanging(),
    State.APPLYING: lambda: follower_at_second().trained().exchanging().whole().applying(),
    State.FETCHING: lambda: sees_far_ahead(follower_at_second()),
    State.REPLAYING: lambda: is_told(follower_at_second()),
    State.LEFT: lambda: leaves(follower_at_second()),
}


@pytest.mark.parametrize("state", IN_STATE)
def test_every_state_is_reached(state: State) -> None:
    assert IN_STATE[state]().peer.state is state


# From state to state ----------------------------------------------------------------------------------------------
def is_cut_off(rig: Rig) -> None:
    """Its links say for a while that none of the others can be reached."""
    rig.do(ReachSeen(dict.fromkeys(rig.others, Reach.NONE), {}))
    rig.see()
    rig.now += SHOWN_AFTER
    rig.see()


def takes_the_step_out_of_it(rig: Rig) -> None:
    """b has gone on to the entry after this one, so that the lease is no good."""
    last = rig.peer.log.last
    assert last is not None
    rig.see(ahead(rig.log), others="b")
    rig.step(last)


def replayed(rig: Rig) -> Header:
    assert rig.peer.replica.replaying is not None
    return rig.peer.replica.replaying


def gets_no_payload_of_the_dead(rig: Rig) -> None:
    for name in rig.others:
        rig.do(Undelivered(name))
    rig.do(PayloadNotFetched(replayed(rig), "gone"))


def goes_on_with_what_it_trained(rig: Rig) -> None:
    """It is ready when the others have made the third entry without it, which leaves it its lease."""
    rig.applied().trained()
    log = rig.log
    header = next_header(log, roster(log, "ab"))
    rig.see(ahead(log))
    rig.hear("a", certified(log, header, by="ab"))
    rig.do(PayloadFetched(header))
    assert rig.peer.state is State.APPLYING
    rig.step(header)


def hears_late_of_the_commit(rig: Rig) -> None:
    """It has all averages; then the view is over."""
    rig.exchanging().whole()
    rig.waits(int(SETTINGS.timing.heartbeat_expiry) + 2, others="a")
    assert rig.peer.state is State.READY
    header = rig.next_header(leader="b")
    rig.hear("b", propose(header, round=_round(rig), marks=rig.marks))
    rig.hear("a", certified(rig.log, header, Phase.PREPARE, "ab"))
    rig.hear("a", certified(rig.log, header, by="ab"))


def _round(rig: Rig) -> Any:
    assert rig.peer.exchange is not None
    return rig.peer.exchange.round


Way = Callable[[Rig], object]
MOVES: dict[tuple[State, State], Way] = {
    (State.TRAINING, State.JOINING): is_cut_off,
    (State.READY, State.JOINING): is_cut_off,
    (State.JOINING, State.FETCHING): sees_far_ahead,
    (State.JOINING, State.REPLAYING): is_told,
    (State.JOINING, State.TRAINING): lambda rig: rig.joined(),
    (State.FETCHING, State.JOINING): lambda rig: rig.do(SnapshotFailed("a", "gone")),
    (State.REPLAYING, State.APPLYING): lambda rig: rig.do(PayloadFetched(replayed(rig))),
    (State.REPLAYING, State.JOINING): gets_no_payload_of_the_dead,
    (State.REPLAYING, State.FETCHING): lambda rig: rig.do(PayloadNotFetched(replayed(rig), "gone")),
    (State.TRAINING, State.READY): lambda rig: rig.trained(),
    (State.TRAINING, State.FETCHING): sees_far_ahead,
    (State.TRAINING, State.REPLAYING): is_told,
    (State.READY, State.AVERAGING): lambda rig: rig.exchanging(),
    (State.READY, State.APPLYING): hears_late_of_the_commit,
    (State.READY, State.FETCHING): sees_far_ahead,
    (State.READY, State.REPLAYING): is_told,
    (State.AVERAGING, State.READY): lambda rig: rig.waits(int(TIMING.heartbeat_expiry) + 2, others="a"),
    (State.AVERAGING, State.APPLYING): lambda rig: rig.whole().applying(),
    (State.AVERAGING, State.FETCHING): sees_far_ahead,
    (State.AVERAGING, State.REPLAYING): is_told,
    (State.APPLYING, State.TRAINING): lambda rig: rig.applied(),
    (State.APPLYING, State.JOINING): takes_the_step_out_of_it,
    (State.APPLYING, State.READY): goes_on_with_what_it_trained,
}
MOVES |= {(state, State.LEFT): leaves for state in State if state is not State.LEFT}


@pytest.mark.parametrize(("first", "second"), MOVES, ids=str)
def test_every_way_from_state_to_state(first: State, second: State) -> None:
    rig = IN_STATE[first]()
    MOVES[first, second](rig)
    assert rig.peer.state is second


# One round of a member ---------------------------------------------------------------------------------------------
def test_r3_to_r6_a_whole_round_of_a_member() -> None:
    """Ready, Begin, blocks and averages, Part, Propose, Vote 1, Vote 2, Apply, and the next lease."""
    rig = follower_at_second()
    log, lease = rig.log, rig.peer.log.leases["c"]
    ((to, said),) = sends(rig.do(TrainingDone(trained(lease))), Ready)
    assert (to, said.samples, said.commitment) == ("b", lease, commitment("c", log))
    rig.exchanging()
    assert {effect.to for effect in of(rig.effects, SendChunk)} == {"a", "b"}, "to each reducer what it averages"
    rig.whole()
    assert [to for to, _ in sends(rig.effects, Part)] == ["b"]
    header = rig.next_header()
    votes = sends(rig.hear("b", propose(header, round=_round(rig), marks=rig.marks)), Vote)
    assert {to for to, _ in votes} == {"a", "b"}
    assert {said.choice for _, said in votes} == {choice(header, Phase.PREPARE)}
    votes = sends(rig.hear("a", vote("a", log, choice(header, Phase.PREPARE))), Vote)
    assert {said.choice for _, said in votes} == {choice(header, Phase.COMMIT)}, "two of three have prepared it"
    assert of(rig.hear("b", vote("b", log, choice(header, Phase.COMMIT))), Apply)[0].header == header
    rig.applied()
    assert (rig.peer.state, rig.peer.log.last, rig.peer.state_digest) == (State.TRAINING, header, STATE)


# What is illegal, and what is merely late ----------------------------------------------------------------------
HEADER = next_header(LOG, roster(LOG))
ILLEGAL: list[tuple[Event, State]] = [
    *((Applied(HEADER), state) for state in State if state not in (State.APPLYING, State.LEFT)),
    *((Digested(HEADER, STATE), state) for state in State if state is not State.LEFT),
    *((SnapshotRestored("a", None, STATE), state) for state in State if state not in (State.FETCHING, State.LEFT)),
    *((SnapshotFailed("a", ""), state) for state in State if state not in (State.FETCHING, State.LEFT)),
]


@pytest.mark.parametrize(("event", "state"), ILLEGAL, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_events_that_were_not_asked_for_are_mistakes_of_ours(event: Event, state: State) -> None:
    rig = IN_STATE[state]()
    log = rig.peer.log
    with pytest.raises(LocalProtocolError):
        rig.do(event)
    assert rig.peer.log == log


def test_unknown_events_are_mistakes_of_ours() -> None:
    with pytest.raises(LocalProtocolError, match="unknown event"):
        Rig().do("surprise")  # type: ignore[arg-type]


LATE = round_of(LOG, ballot=Ballot(view=7, attempt=9)).name
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
    AverageRefuted(LATE, "b", 0),
]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", LATE_NEWS, ids=lambda event: type(event).__name__)
def test_late_news_is_void(state: State, event: Event) -> None:
    rig = IN_STATE[state]()
    log = rig.peer.log
    assert not [effect for effect in rig.do(event) if isinstance(effect, Apply | SendChunk)]
    if state is not State.TRAINING:
        assert not sends(rig.do(TrainingDone(trained(LEASES["c"]))), Ready)
    assert (rig.peer.state, rig.peer.log) == (state, log)


# Where messages go --------------------------------------------------------------------------------------------------
def about(log: Any) -> dict[str, Message | Unread]:
    """Return a message of each kind about the position at the end of a log, as another peer may send it."""
    header, round = next_header(log, roster(log)), round_of(log, leader="b")
    position = log.position
    return {
        "LeaseRequest": LeaseRequest(position=position, state_digest=STATE),
        "LeaseGrant": LeaseGrant(position=position, samples=LEASES["a"], steps=3),
        "Refuse": Refuse(position=position, state_digest=STATE, reason="no"),
        "Ready": ready(log, "a"),
        "Begin": begin_of(round, log),
        "Part": Part(round=round.name, averages=(averaged(round, "a", 0),)),
        "Want": Want(round=round.name, averages=b"\x01", blocks=b""),
        "Propose": propose(header, round=round),
        "Vote": vote("a", log, choice(header, Phase.PREPARE)),
        "Certified": certified(log, header, Phase.PREPARE),
        "Proof": Proof(position=position, fault="votes", proof=b"nothing"),
        "Inquire": Inquire(position=position),
        "Elsewhere": Elsewhere(position=position),
        "Unread": Unread(position=position),
    }


SETTLED = {"LeaseGrant", "Refuse", "Vote", "Certified", "Proof", "Elsewhere"}


@pytest.mark.parametrize("kind", about(LOG))
def test_a_message_about_a_position_that_we_have_left_is_answered_with_what_followed_there(kind: str) -> None:
    rig = at_second()
    answers = [effect for effect in rig.hear("a", about(LOG)[kind]) if not isinstance(effect, Dropped)]
    told = sends(answers, Certified)
    assert len(told) == len(answers)
    assert [(to, message.header) for to, message in told] == ([] if kind in SETTLED else [("a", rig.peer.log.last)])


@pytest.mark.parametrize("kind", about(LOG))
def test_a_message_about_an_unknown_position_is_not_answered_but_an_inquiry(kind: str) -> None:
    rig = at_second()
    answers = [effect for effect in rig.hear("a", about(ahead(rig.log))[kind]) if not isinstance(effect, Dropped)]
    elsewhere = Elsewhere(position=rig.peer.log.position)
    assert sends(answers, Elsewhere) == ([("a", elsewhere)] if kind == "Inquire" else [])
    assert len(answers) == (kind == "Inquire")


@pytest.mark.parametrize("kind", ["LeaseRequest", "Ready", "Part", "Refuse", "LeaseGrant"])
def test_a_stranger_and_a_peer_that_does_not_lead_change_nothing(kind: str) -> None:
    """A leader answers peers that it hears; a member believes the leader of its view."""
    rig = IN_STATE[State.READY]()
    state = rig.peer.state
    for sender in ("z", "a"):
        assert not rig.hear(sender, about(rig.log)[kind])
    assert rig.peer.state is state


# What convicts (R9) -------------------------------------------------------------------------------------------------
def farewell(peer: str, index: int) -> Leaving:
    signature = SimulatedKeys(peer).sign(Departure(run=RUN, peer=peer, incarnation=0, index=index).text)
    return Leaving(position=LOG.position, incarnation=0, departure=index, signature=signature)


def two_of(kind: str, rig: Rig) -> list[Message]:
    log = rig.log
    first, second = two_votes("a", log)
    other = commitment("a", log).model_copy(update={"squares": 2.0})
    author = other.author("a", 0, log.position)
    signed = other.model_copy(update={"signature": SimulatedKeys("a").sign(other.text(author))})
    pairs: dict[str, list[Message]] = {
        "votes": [first, second],
        "farewell": [farewell("a", log.position.index), first],
        "vote, then farewell": [first, farewell("a", log.position.index)],
        "commitments": [ready(log, "a"), ready(log, "a", commitment=signed)],
    }
    return pairs[kind]


@pytest.mark.parametrize("kind", ["votes", "farewell", "vote, then farewell", "commitments"])
def test_r9_statements_that_contradict_each_other_convict_whoever_leads(kind: str) -> None:
    rig = IN_STATE[State.READY]()
    first, second = two_of(kind, rig)
    assert not of(rig.hear("a", first), Note)
    assert [note.text for note in of(rig.hear("a", second), Note)] == [
        f"a is proven to lie: {kind if kind == 'commitments' else 'votes'}"
    ]


def test_r9_a_false_proof_is_dropped_with_its_senders_name() -> None:
    rig = IN_STATE[State.READY]()
    (dropped,) = of(rig.hear("a", Proof(position=rig.log.position, fault="votes", proof=b"nothing")), Dropped)
    assert (dropped.peer, dropped.what) == ("a", "proof")
    assert not rig.hear("a", Proof(position=rig.log.position, fault="votes", proof=b"more")), "no more of it is read"


# Leaving ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [State.JOINING, State.TRAINING, State.READY, State.FETCHING, State.REPLAYING])
def test_it_leaves_at_once_where_nothing_is_under_way(state: State) -> None:
    rig = IN_STATE[state]()
    effects = rig.do(LeaveRequested())
    assert effects[-1] == Stop()
    assert bool(of(effects, StopTraining)) == (state is State.TRAINING)
    assert rig.peer.state is State.LEFT


def test_a_round_under_way_is_finished_and_its_entry_noted_down_first() -> None:
    rig = IN_STATE[State.AVERAGING]()
    assert not of(rig.do(LeaveRequested()), Stop)
    rig.whole().applying()
    header = rig.peer.log.last
    assert header is not None
    assert not of(rig.do(Applied(header)), Stop)
    assert of(rig.do(Digested(header, STATE)), Stop)


def test_a_round_that_its_view_ends_is_left() -> None:
    rig = IN_STATE[State.AVERAGING]()
    rig.do(LeaveRequested())
    assert of(rig.waits(int(TIMING.heartbeat_expiry) + 2, others="a"), Stop)


def test_patience_with_a_round_under_way_ends() -> None:
    rig = IN_STATE[State.AVERAGING]()
    rig.do(LeaveRequested())
    assert not of(rig.tick(TIMING.leave - 1), Stop)
    assert of(rig.tick(1.0), Stop)
    assert of(leaves(IN_STATE[State.AVERAGING]()).effects, Stop), "nor is there any if it must be at once"


def test_r11_who_has_left_does_nothing_and_its_farewell_names_the_first_index_without_its_votes() -> None:
    rig = IN_STATE[State.AVERAGING]().whole()
    header = rig.next_header()
    assert sends(rig.hear("b", propose(header, round=_round(rig), marks=rig.marks)), Vote)
    leaves(rig)
    said = rig.peer.goodbye
    assert said is not None
    assert said.departure == rig.log.position.index + 1
    departure = Departure(run=RUN, peer="c", incarnation=0, index=said.departure)
    assert SimulatedKeys("a").verify("c", departure.text, said.signature)
    assert rig.tick(100.0) == rig.hear("b", begin_of(_round(rig), rig.log)) == []
    fresh = leaves(Rig("c", "ab").joined()).peer.goodbye
    assert fresh is not None
    assert fresh.departure == 0, "it has voted nowhere"


def test_r12_after_farewells_a_smaller_quorum_decides_at_once() -> None:
    """Two of three have left: what is ready goes on without them."""
    rig = at_second().trained()
    for peer in "ac":
        rig.hear(peer, farewell(peer, 1))
    rig.tick()
    assert (_round(rig).peers, _round(rig).group) == (("b",), ()), "no minority: those who left are counted out"


# Anything at all --------------------------------------------------------------------------------------------------
def own_event(rig: Rig, draw: random.Random) -> Event:
    """Draw something that happens here, which may be late."""
    exchange, chunk, sender = rig.peer.exchange, draw.randrange(6), draw.choice("abc")
    name = exchange.name if exchange else LATE
    events: list[Event] = [
        ChunkSent(name, sender, chunk, True),
        ChunksUnsent(name, sender, (0, 1), True),
        ContributionArrived(name, sender, chunk),
        BadBlocks(name, sender, chunk, "x", reduced=draw.random() < 0.5),
        Undelivered(sender),
        LeaveRequested() if draw.random() < 0.01 else RateMeasured(5),
        ReachSeen({sender: draw.choice(list(Reach))}, {sender: 10}),
        PayloadFetched(next_header(rig.log, roster(rig.log))),
        TrainingDone(trained(rig.peer.log.leases.get(rig.peer.me, LEASES[rig.peer.me]))),
    ]
    if exchange and exchange.wants_own(chunk):
        events.append(ReducedArrived(name, rig.peer.me, chunk, (), digest_of(b"average")))
    if exchange and exchange.wants_average(chunk):
        average = averaged(exchange.round, sender, chunk)
        events.append(ReducedArrived(name, sender, chunk, (), average.digest, average.origin))
    if exchange and exchange.averages.are_whole:
        events.append(PayloadAssembled(name, draw.choice([PAYLOAD, OTHER])))
    if rig.peer.replica.undigested is None and rig.peer.state is State.APPLYING and rig.peer.log.last:
        events = [Applied(rig.peer.log.last)]
    elif rig.peer.replica.undigested is not None and rig.peer.log.last:
        events.append(Digested(rig.peer.log.last, STATE))
    elif rig.peer.state is State.FETCHING:
        events.append(SnapshotFailed("a", "gone"))
    return draw.choice(events)


def hostile(rig: Rig, draw: random.Random) -> Message | Unread | None:
    """Draw a message about here, or a place near here, of which some bytes were changed."""
    log = draw.choice([rig.log, LOG, ahead(rig.log)])
    message = draw.choice(list(about(log).values()))
    if isinstance(message, Begin | Propose) and draw.random() < 0.7:
        message = message.model_copy(update={"ballot": Ballot(view=draw.randrange(3), attempt=draw.randrange(1, 4))})
    packer = Packer(rig.peer)
    if log is not rig.log or isinstance(message, Unread) or draw.random() < 0.5:
        return message
    packed = bytearray(packer.pack(message))
    packed[draw.randrange(len(packed))] = draw.randrange(256)
    try:
        return packer.unpack("a", bytes(packed))
    except WireError:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_no_message_makes_a_peer_fall_and_the_same_events_have_the_same_effects(seed: int) -> None:
    def lives() -> list[object]:
        draw = random.Random(seed)
        ways: list[Callable[[], Rig]] = [at_second, Rig, *(IN_STATE[state] for state in State if state != State.LEFT)]
        rig = draw.choice(ways)() if seed % 5 else Rig("a", "bc", replace(SETTINGS, minimum_peers=1))
        effects: list[object] = []
        for _ in range(200):
            dice = draw.random()
            if dice < 0.6:
                if (message := hostile(rig, draw)) is not None:
                    effects += rig.hear(draw.choice("abcz"), message, draw.choice([0.0, 0.1]))
            elif dice < 0.7:
                effects += rig.see(state=draw.choice([PeerState.TRAINING, PeerState.READY, PeerState.JOINING]))
            elif dice < 0.95:
                effects += rig.do(own_event(rig, draw), draw.choice([0.0, 1.0, 30.0]))
            else:
                effects += rig.tick(draw.choice([0.5, 5.0, 150.0]))
        return [*effects, rig.peer.state]

    assert lives() == lives()
