"""The leader, when some pairs can't talk: who reduces, who is left out and told, and what becomes of a round."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.state import LogState
from peers.presence.standing import REPLANS, Standing
from peers.protocol.certifier import OPEN_LIMIT, Certifier
from peers.protocol.effects import Effect
from peers.protocol.leader import Leader
from peers.protocol.messages import Abort, Begin, Excluded, LeaseGrant, LeaseRequest, Waiting
from peers.protocol.schedule import Schedule
from tests.peers.builders import LOG as EMPTY
from tests.peers.builders import PAYLOAD, SETTINGS, SIZE, STATE, TIMING, beats, judge, member, ready, sends
from tests.simulator.simulated_keys import SimulatedKeys

SCHEDULE = Schedule(TIMING)


def log_of(names: str) -> LogState:
    """These have made the first entry."""
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate(names)]
    return EMPTY.append(EMPTY.next_header(roster, PAYLOAD))


class Lead:
    """The leader a, and what the others say of whom they reach."""

    def __init__(self, names: str = "abcd", standing: Standing | None = None, roster: str = "") -> None:
        self.names = names
        self.log = log_of(roster or names)
        self.standing = standing or Standing(SCHEDULE.bar)
        self.leader = Leader(
            "a",
            self.log,
            STATE,
            SETTINGS,
            SIZE,
            self.standing,
            Certifier(SimulatedKeys("a"), self.log, dict),
            judge(self.log),
        )
        self.now = 0.0

    def ready(self, name: str, **changes: Any) -> list[Effect]:
        return self.leader.on_ready(name, ready(self.log, name, **changes), self.now)

    def tick(self, after: float = 0.0) -> list[Effect]:
        self.now += after
        for name, said in list(self.leader._ready.items()) if not self.leader.running else ():
            assert self.leader.on_ready(name, said, self.now) == []  # it says so again and again
        others = "".join(name for name in self.names if name != "a")
        return self.leader.tick(self.now, beats(self.log, others), ())

    def grace_is_over(self) -> list[Effect]:
        """What the leader does then; it has not slept meanwhile."""
        effects = [self.tick(after=1.0) for _ in range(int(TIMING.grace) + 1)]
        assert not any(effects[:-2])
        return effects[-2] or effects[-1]

    def begun(self, **reach: dict[str, Any]) -> list[Effect]:
        for name in self.names:
            self.ready(name, **reach.get(name, {}))
        return self.tick()

    def waits(self, name: str, unreached: str, running: Begin) -> list[Effect]:
        waiting = Waiting(attempt=running.attempt, missing=(), moved=1, unreached=tuple(unreached))
        return self.leader.on_waiting(name, waiting, self.now)


def shares(effects: list[Effect]) -> dict[str, int]:
    begin: Begin = sends(effects, Begin)[0][1]
    return {share.member.peer: share.chunks for share in begin.round.shares}


def test_who_is_reached_by_all_reduces() -> None:
    assert shares(Lead().begun(b={"unreached": ("c",)})) == {"a": 3, "b": 0, "c": 0, "d": 3}
    assert shares(Lead().begun(c={"relayed": ("b",)})) == {"a": 3, "b": 0, "c": 0, "d": 3}


def test_who_is_left_out_is_told_and_the_others_go_on() -> None:
    effects = Lead().begun(d={"unreached": ("a", "b", "c")})
    [(to, excluded)] = sends(effects, Excluded)
    assert to == "d"
    assert "a, b, c" in excluded.reason
    assert shares(effects) == {"a": 2, "b": 2, "c": 2}


def test_who_is_left_out_is_told_also_where_the_others_are_too_few() -> None:
    lead = Lead("ab")
    effects = lead.begun(b={"unreached": ("a",)})
    assert [to for to, _ in sends(effects, Excluded)] == ["b"]
    assert not sends(effects, Begin)


def test_a_joiner_that_could_take_part_in_no_round_gets_no_lease() -> None:
    lead = Lead()
    lead.ready("a")
    lead.tick()
    request = LeaseRequest(position=lead.log.position, state_digest=STATE, relayed=(), unreached=("a", "b", "c", "d"))
    assert sends(lead.leader.on_lease_request("z", request, 0), Excluded)
    request = request.model_copy(update={"unreached": ("d",)})
    assert sends(lead.leader.on_lease_request("z", request, 0), LeaseGrant), "the others reach it"


def test_a_pair_that_breaks_in_a_round_has_another_one_begun() -> None:
    lead = Lead()
    first: Begin = sends(lead.begun(), Begin)[0][1]
    assert lead.waits("b", "", first) == []
    assert lead.waits("b", "c", first) == [], "if it is dead, its heartbeats stop, and the round goes on without it"
    lead.now += TIMING.heartbeat_expiry
    assert lead.waits("b", "c", first) == [], "nothing has been heard of it meanwhile"
    assert lead.waits("c", "", first) == []
    effects = lead.waits("b", "c", first)
    assert [to for to, _ in sends(effects, Abort)] == ["a", "b", "c", "d"]
    for name in "abcd":
        detour = {"relayed": ("c",)} if name == "b" else {}
        lead.ready(name, last_attempt=1, round=first.round, **detour)
    effects = lead.tick()
    assert sends(effects, Begin)[0][1].round.name.number == 2
    assert shares(effects) == {"a": 3, "b": 0, "c": 0, "d": 3}


def test_a_dead_member_is_not_taken_for_one_that_some_cannot_reach() -> None:
    """Regression: its last heartbeat counted for as long as those were heard who did not reach it any more."""
    lead = Lead()
    begin: Begin = sends(lead.begun(), Begin)[0][1]
    step, effects = TIMING.heartbeat / 4, list[Effect]()
    alive = TIMING.heartbeat_expiry + TIMING.heartbeat  # the last heartbeat was sent, and came, as late as it can
    while not effects and lead.now < 10 * alive:
        lead.now += step
        effects = lead.waits("b", "c", begin) + lead.waits("d", "c", begin)
        effects += lead.leader.tick(lead.now, beats(lead.log, "bcd" if lead.now < alive else "bd"), ())
    assert [to for to, _ in sends(effects, Abort)] == ["c"]
    assert {begin.round.lost for _, begin in sends(effects, Begin)} == {("c",)}, "the round goes on"


def test_a_pair_that_need_not_talk_changes_nothing() -> None:
    lead = Lead()
    begin: Begin = sends(lead.begun(b={"unreached": ("c",)}), Begin)[0][1]
    assert lead.waits("b", "c", begin) == []
    assert lead.waits("b", "z", begin) == [], "a stranger"


def test_nobody_has_rounds_planned_anew_for_ever() -> None:
    """Else who names another peer each time keeps everybody from an entry."""
    standing = Standing(SCHEDULE.bar)
    ends: list[list[str]] = []
    for _ in range(REPLANS + 1):
        lead = Lead(standing=standing)
        begin: Begin = sends(lead.begun(), Begin)[0][1]
        assert lead.waits("d", "b", begin) == []
        lead.now += TIMING.heartbeat_expiry
        assert lead.waits("b", "", begin) == []
        ends.append([to for to, _ in sends(lead.waits("d", "b", begin), Abort)])
    assert ends == REPLANS * [["a", "b", "c", "d"]] + [["d"]], "in the end it is the one who is left out"


def test_strikes_last_beyond_the_position() -> None:
    """Regression: who held rounds up cost every position a time limit."""
    standing = Standing(SCHEDULE.bar)
    standing.bar("d", 0.0)
    assert shares(Lead(standing=standing).begun()) == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("names", "incumbent", "is_open"), [("abc", True, True), ("abc", False, False)], ids=["a majority", "a minority"]
)
def test_only_a_majoritys_attempt_is_open(names: str, incumbent: bool, is_open: bool) -> None:
    lead = Lead(names)
    for name in names:
        lead.ready(name, incarnation=0 if incumbent else 9)
    effects: list[Effect] = []
    while not sends(effects, Begin):
        effects = lead.tick(after=TIMING.heartbeat)
    assert sends(effects, Begin)[0][1].open is is_open


def test_a_large_attempt_is_not_open() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    for count, is_open in ((OPEN_LIMIT, True), (OPEN_LIMIT + 1, False)):
        lead = Lead(names[:count])
        assert sends(lead.begun(), Begin)[0][1].open is is_open


def test_claims_are_capped_by_what_others_saw() -> None:
    honest = {name: {"rate": 1000, "seen": (("d", 400),)} for name in "abc"}
    parts = shares(Lead().begun(**honest, d={"rate": 10**9, "seen": (("a", 300),)}))
    assert parts["d"] < SIZE.chunks, "it says that its link carries everything"
