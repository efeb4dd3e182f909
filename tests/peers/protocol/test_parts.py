"""The tables of a peer's parts: what is legal in which state, where it leads, and that all of it happens."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar

import pytest

from peers.errors import LocalProtocolError
from peers.log.header import Member, cycle_head
from peers.log.lineage import Lineage
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.diagrams import PARTS, diagram
from peers.protocol.effects import Apply
from peers.protocol.events import Applied, PayloadFetched
from peers.protocol.internal import EntryMade
from peers.protocol.part import Part, Row, Table
from peers.protocol.replica import Replica
from peers.protocol.states import State
from tests.peers.builders import PAYLOAD, PAYLOADS, SETTINGS, STATE, TOKENS, Rig, complete, member, of
from tests.peers.protocol.test_peer import IN_STATE, MOVES, at_second
from tests.simulator.simulated_keys import SimulatedKeys

EVENTS = {event for part in PARTS for rows in part.TABLE.values() for event in rows}
STATES = [(part, state) for part in PARTS for state in part.TABLE]


def part_of(rig: Rig, kind: type[Part]) -> Part:
    return next(part for part in (rig.peer.trainer, rig.peer.replica, rig.peer.slot) if isinstance(part, kind))


def named(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("part", "state"), STATES, ids=named)
def test_what_is_not_in_the_table_is_ours_to_mend_or_late(part: type[Part], state: StrEnum) -> None:
    """All pairs of state and event: each has a row, or raises, or changes nothing."""
    wrong = {}
    for event in EVENTS:
        try:
            has_a_row_or_is_out_of_turn(part, state, event)
        except (Exception, pytest.fail.Exception) as error:
            wrong[event.__name__] = repr(error)
    assert not wrong


def has_a_row_or_is_out_of_turn(part: type[Part], state: StrEnum, event: type) -> None:
    row = part.TABLE[state].get(event)
    if row is not None:
        assert callable(getattr(part, row.method))
        assert set(row.leads_to) <= set(part.TABLE)
        return
    rig = Rig()
    one = part_of(rig, part)
    one.state = state
    bare: object = object.__new__(event)  # nobody looks at what is in it
    if event in part.EXACT:
        with pytest.raises(LocalProtocolError, match=f"that is {state}"):
            one.take(bare)
    else:
        one.take(bare, "a")
    assert one.state is state
    assert not rig.peer.handle(PayloadFetched(rig.next_header()), rig.now), "and nothing was said"


@pytest.mark.parametrize("part", PARTS, ids=named)
def test_every_state_is_in_the_table(part: type[Part]) -> None:
    states = {state for rows in part.TABLE.values() for row in rows.values() for state in row.leads_to}
    assert states <= set(part.TABLE)
    assert set(type(next(iter(part.TABLE)))) == set(part.TABLE)


def test_no_part_goes_where_its_table_does_not_lead() -> None:
    class Lamp(Part):
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


def hands_an_entry_on(rig: Rig) -> None:
    """Of its own round, which another leader begins anew."""
    rig.averaging().holding()
    rig.hear("a", rig.adopt(2, rig.held(1), holders="b"))


def makes_two_entries_at_once() -> None:
    """Of the two fragments of a cycle: the second waits until the first is applied."""
    log = replace(SETTINGS, fragments=2).empty_log
    desk = Desk("b", SETTINGS, PAYLOADS, 0.0, incarnation=0, keys=SimulatedKeys("b"))
    replica = Replica(desk, Presence("b", 10.0, 10.0, bar=10.0, now=0.0), Lineage(log), STATE)
    closing = log.of(1).next_header([member("a", 0, 20)], PAYLOAD)
    first = log.next_header([Member(peer="a", tokens=TOKENS, samples=())], PAYLOAD)
    for header in (closing, first):
        replica.take(EntryMade(header, None, keeps_work=False))
    assert replica.log.position == log.position
    replica.take(Applied(closing))
    assert [effect.header for effect in of(desk.take_effects(), Apply)] == [closing, first]
    assert (replica.log.position.index, replica.log.last) == (1, closing)
    assert replica.log.position.head == cycle_head([first.digest, closing.digest])


def is_told_by_all(rig: Rig) -> None:
    """In an open attempt, whose leader dies before it commits."""
    begin = rig.begin().model_copy(update={"open": True})
    rig.hear("a", begin)
    rig.holding()
    for name in "ac":
        rig.hear(name, complete(rig.next_header(), begin.attempt, name))


def test_every_way_in_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set[tuple[type[Part], StrEnum, StrEnum]]()
    enter = Part._enter

    def watched(self: Part, state: StrEnum) -> None:
        taken.add((type(self), self.state, state))
        enter(self, state)

    monkeypatch.setattr(Part, "_enter", watched)
    for first, way in [(first, way) for (first, _), way in MOVES.items()]:
        way(IN_STATE[first]())
    makes_two_entries_at_once()
    is_told_by_all(at_second().trained())
    hands_an_entry_on(at_second().trained())
    ways: set[Any] = {
        (part, state, after)
        for part in PARTS
        for state, rows in part.TABLE.items()
        for row in rows.values()
        for after in row.leads_to
    }
    assert not ways - taken
