"""The tables of a peer's parts: what is legal in which state, where it leads, and that all of it happens."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar

import pytest

from peers.errors import LocalProtocolError
from peers.log.certificate import Ballot, Phase
from peers.log.header import Member, cycle_head
from peers.log.lineage import Lineage
from peers.presence.presence import Presence
from peers.protocol.diagrams import PARTS, diagram
from peers.protocol.effects import Apply
from peers.protocol.events import Applied, PayloadFetched
from peers.protocol.internal import Behind, EntryMade, NoneAhead
from peers.protocol.replica import Replica
from peers.protocol.state_machine import Row, StateMachine, Table
from peers.protocol.states import State
from tests.peers.builders import Rig, certified, context, follower_at_second, of, propose
from tests.peers.logs import SETTINGS, STATE, TOKENS, member, next_header
from tests.peers.protocol.test_peer import IN_STATE, MOVES

EVENTS = {event for part in PARTS for rows in part.TABLE.values() for event in rows}


def named(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def part_of(rig: Rig, kind: type[StateMachine]) -> StateMachine:
    return next(part for part in (rig.peer.trainer, rig.peer.replica, rig.peer.round) if isinstance(part, kind))


@pytest.mark.parametrize(("part", "state"), [(part, state) for part in PARTS for state in part.TABLE], ids=named)
def test_what_is_not_in_the_table_is_our_mistake_or_late(part: type[StateMachine], state: StrEnum) -> None:
    """All pairs of state and event: each has a row, or raises, or changes nothing."""
    for event in EVENTS:
        row = part.TABLE[state].get(event)
        if row is not None:
            assert callable(getattr(part, row.method))
            assert set(row.leads_to) <= set(part.TABLE)
            continue
        rig = Rig()
        one = part_of(rig, part)
        one.state = state
        bare: object = object.__new__(event)  # nothing in it is looked at
        if event in part.EXACT:
            with pytest.raises(LocalProtocolError, match=f"that is {state}"):
                one.take(bare)
        else:
            one.take(bare, "a")
        assert one.state is state, event


@pytest.mark.parametrize("part", PARTS, ids=named)
def test_every_state_is_in_the_table(part: type[StateMachine]) -> None:
    assert set(type(next(iter(part.TABLE)))) == set(part.TABLE)


def test_no_part_goes_where_its_table_does_not_lead() -> None:
    class Lamp(StateMachine):
        TABLE: ClassVar[Table] = {
            State.JOINING: {int: Row("_on", {State.READY: "switched on"}), str: Row("_on")},
            State.READY: {},
        }

        def _on(self, event: object) -> None:
            self._enter(State.READY)

    lamp = Lamp(State.JOINING)
    with pytest.raises(LocalProtocolError, match="a lamp that is joining can't become ready now"):
        lamp.take("by a way that its row does not name")
    lamp.take(1)
    assert lamp.state is State.READY
    assert diagram(Lamp).endswith("joining --> ready: switched on")


# Cycles of several fragments -----------------------------------------------------------------------------------
def replica_of(fragments: int) -> tuple[Replica, Any]:
    here = context("b", replace(SETTINGS, fragments=fragments))
    presence = Presence("b", 10.0, 10.0, 0.0, here.is_farewell)
    return Replica(here, presence, Lineage(here.settings.empty_log), STATE), here


OFFER = [Member(peer="a", tokens=TOKENS, samples=())]


def makes_two_entries_at_once() -> None:
    """Of the two fragments of a cycle: the second waits until the first is applied."""
    replica, here = replica_of(2)
    log = replica.log
    closing = next_header(log.of(1), [member("a", 0, 20)])
    first = next_header(log, OFFER)
    for header in (closing, first):
        replica.take(EntryMade(header, None, keeps_work=False))
    assert replica.log.position == log.position
    replica.take(Applied(closing))
    assert [effect.header for effect in of(here.take_effects(), Apply)] == [closing, first]
    assert (replica.log.position.index, replica.log.last) == (1, closing)
    assert replica.log.position.head == cycle_head([first.digest, closing.digest])


def makes_an_entry_while_another_cannot_be_replayed() -> None:
    replica, here = replica_of(3)
    first, second = (next_header(replica.log.of(fragment), OFFER) for fragment in (0, 1))
    replica.take(Behind(first, None, ("a",)))
    replica.take(EntryMade(second, None, keeps_work=True))
    replica.take(NoneAhead())
    assert of(here.take_effects(), Apply) == [Apply(second, True)]


def takes_the_entry_while_it_trains() -> None:
    """It has fetched the payload of what was prepared, as it was asked for vote 1."""
    rig = follower_at_second()
    log, header = rig.log, rig.next_header()
    prepared = certified(log, header, Phase.PREPARE, "ab")
    rig.hear("b", propose(header, Ballot(view=0, attempt=2), prepared.certificate))
    rig.do(PayloadFetched(header))
    assert of(rig.hear("b", certified(log, header, by="ab")), Apply)


def test_every_way_in_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set[tuple[type[StateMachine], StrEnum, StrEnum]]()
    enter = StateMachine._enter

    def watched(self: StateMachine, state: StrEnum) -> None:
        taken.add((type(self), self.state, state))
        enter(self, state)

    monkeypatch.setattr(StateMachine, "_enter", watched)
    for (first, _), way in MOVES.items():
        way(IN_STATE[first]())
    makes_two_entries_at_once()
    makes_an_entry_while_another_cannot_be_replayed()
    takes_the_entry_while_it_trains()
    ways = {
        (part, state, after)
        for part in PARTS
        for state, rows in part.TABLE.items()
        for row in rows.values()
        for after in row.leads_to
    }
    assert {(part.__name__, *way) for part, *way in ways - taken} == set()
