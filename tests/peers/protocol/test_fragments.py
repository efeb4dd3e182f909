"""One peer in a cycle of several entries: what becomes of the others when one of them was made without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.header import NO_PAYLOAD, Header, Member
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.events import (
    Applied,
    Apply,
    Captured,
    FetchPayload,
    PayloadFetched,
    PayloadNotFetched,
    StopTraining,
    TokensLost,
)
from peers.protocol.internal import Behind, EntryMade, NobodyAhead
from peers.protocol.messages import Begin, Commit
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.slot import SlotState
from peers.protocol.states import State
from peers.values.workload import Trained
from tests.peers.builders import PAYLOAD, SETTINGS, SIZE, STATE, TIMING, TOKENS, Rig, attempt, of, round_of

TWO = replace(SETTINGS, fragments=2)
THREE = replace(SETTINGS, fragments=3)
CAPTURED = Trained((), TOKENS, 1.0)
OFFERS = tuple(Member(peer=name, tokens=TOKENS, samples=()) for name in "abc")


def entry(rig: Rig, fragment: int = 0) -> Header:
    return rig.peer.log.of(fragment).next_header(OFFERS, PAYLOAD)


def told_of_an_entry() -> tuple[Rig, Header]:
    """b trains, and is in a round of the first fragment; its leader has made the entry without it."""
    rig = Rig(settings=THREE).joined()
    rig.do(Captured(0, CAPTURED))
    rig.do(Captured(1, CAPTURED))
    rig.see(state=PeerState.READY)
    header = entry(rig)
    [fetch] = of(rig.hear("a", Commit(header=header)), FetchPayload)
    assert fetch.donors == ("a", "c"), "of who is in the cycle heartbeats do not tell which entries it has"
    assert rig.is_in(State.REPLAYING)
    return rig, header


def test_an_entry_that_cannot_be_replayed_costs_neither_work_nor_promises() -> None:
    """Regression: who had heard of an entry from a leader that died forgot what it held of the cycle's others, and
    dropped what it trained: two of four were left that counted, and waited for ever."""
    rig, header = told_of_an_entry()
    before = dict(rig.peer.slots)
    effects = rig.do(PayloadNotFetched(header, "nobody has it"))
    assert not of(effects, StopTraining) + of(effects, TokensLost)
    assert rig.is_in(State.TRAINING)
    assert rig.peer.slots == before
    assert before[0].acceptor.pledged_to == "a"
    assert of(rig.hear("a", Commit(header=header)), FetchPayload), "it is told again"


def test_an_entry_that_was_replayed_ends_its_slot_alone() -> None:
    rig, header = told_of_an_entry()
    others = [rig.peer.slots[fragment] for fragment in (1, 2)]
    rig.do(PayloadFetched(header))
    rig.do(Applied(header))
    assert list(rig.peer.slots.values()) == others
    assert others[0].state is SlotState.READY


def replica_of_two(fragments: int = 2) -> tuple[Replica, Desk]:
    desk = Desk("b", TWO, SIZE, 0.0)
    log = replace(TWO, fragments=fragments).empty_log
    return Replica(desk, Presence("b", 10.0, 10.0, bar=10.0, now=0.0), log, STATE), desk


def test_what_is_made_while_another_entry_cannot_be_replayed_is_applied() -> None:
    replica, desk = replica_of_two(fragments=3)
    first, second = (replica.log.of(fragment).next_header(OFFERS, PAYLOAD) for fragment in (0, 1))
    replica.take(Behind(first, ("a",), with_us=False))
    replica.take(EntryMade(second, keeps_work=True))
    replica.take(NobodyAhead())
    assert replica.state is ReplicaState.APPLYING
    assert of(desk.take_effects(), Apply) == [Apply(second, True)]


@pytest.mark.parametrize(
    ("first_with_us", "closing_with_us"), [(False, False), (True, False), (False, True)], ids=["none", "first", "last"]
)
def test_who_was_in_a_round_of_the_cycle_counts_in_the_next_one(first_with_us: bool, closing_with_us: bool) -> None:
    """It cannot have been in the next cycle before, and have forgotten what it held there."""
    replica, _ = replica_of_two()
    first = replica.log.next_header([Member(peer="a", tokens=0, samples=())], NO_PAYLOAD)
    closing = replica.log.of(1).next_header([OFFERS[0].model_copy(update={"samples": replica.log.grants[0]})], PAYLOAD)
    for header, with_us in ((first, first_with_us), (closing, closing_with_us)):
        assert not replica.is_incumbent
        replica.take(Behind(header, ("a",), with_us))
        replica.take(EntryMade(header, keeps_work=False))
        replica.take(Applied(header))
    assert replica.is_incumbent is (first_with_us or closing_with_us)


def test_who_was_in_a_round_knows_its_entry() -> None:
    rig = Rig(settings=TWO).joined()
    rig.do(Captured(0, CAPTURED))
    name, log, slot = attempt(rig.peer.log), rig.peer.log, rig.peer.slots[0]
    of_the_round = log.next_header([OFFERS[0], OFFERS[1].lacking(2)], PAYLOAD)
    assert not slot.was_in(of_the_round)
    rig.hear("a", Begin(attempt=name, round=round_of(name, OFFERS), seconds=TIMING.round_timeout, open=False))
    assert slot.was_in(of_the_round)
    assert not slot.was_in(log.next_header(OFFERS[:1], PAYLOAD)), "without us"
    stranger = Member(peer="d", tokens=TOKENS, samples=())
    assert not slot.was_in(log.next_header([*OFFERS, stranger], PAYLOAD)), "of another round"
