"""Who has given members of an attempt different averages is found out by a leader that has none itself, too."""

from __future__ import annotations

import pytest

from peers.log.state import LogState
from peers.protocol.averages import Averages
from peers.protocol.effects import Effect, Note
from peers.protocol.messages import Abort, Accuse, Begin, Compare, Marked
from tests.peers.builders import LOG as EMPTY
from tests.peers.builders import PAYLOAD, TIMING, member, of, sends
from tests.peers.protocol.test_leader import OTHER, Lead
from tests.simulator.simulated_keys import SimulatedKeys


def log_of(peers: str) -> LogState:
    """These have made the first entry."""
    roster = [member(peer, 20 * place, 20 * place + 20) for place, peer in enumerate(peers)]
    return EMPTY.append(EMPTY.next_header(roster, PAYLOAD))


class LateLead(Lead):
    """The leader a, late for its own round: b and c have come to different payloads, since b reduced a chunk twice."""

    def __init__(self, members: str = "bc") -> None:
        super().__init__(log_of("a" + members))
        self.ready(members)
        self.begin = sends(self.tick(members, after=TIMING.grace), Begin)[0][1]
        assert self.begin.round.peers == tuple(members)
        self.complete("b", self.begin)
        self.asked = self.complete("c", self.begin, OTHER)

    def marked(self, peer: str, marks: bytes) -> list[Effect]:
        return self.leader.on_marked(peer, Marked(attempt=self.begin.attempt, marks=marks), self.now)

    def shows(self, peer: str, digest: bytes, chunk: int = 0, by: str = "b") -> list[Effect]:
        """What b, or another one, has signed to this peer."""
        averages = Averages(by, self.begin.round.name, SimulatedKeys(by), terms=self.begin.round.terms)
        averages.sign(chunk, digest, ())
        shown = averages.signed(chunk)
        accuse = Accuse(attempt=self.begin.attempt, accused=by, reason="two averages", average=shown)
        return self.leader.on_accuse(peer, accuse, self.now)


def test_a_leader_that_is_no_member_has_two_of_its_members_compare() -> None:
    """Regression: it looked for what it held itself, and fell over that; then it ended attempt after attempt."""
    lead = LateLead()
    attempt = lead.begin.attempt
    assert sends(lead.asked, Compare) == [(peer, Compare(attempt=attempt, marks=None)) for peer in "bc"]
    assert lead.leader.on_marked("z", Marked(attempt=attempt, marks=b""), lead.now) == []
    assert lead.marked("c", b"his marks") == [], "b was asked a moment ago"
    asked = sends(lead.marked("b", b"her marks"), Compare)
    assert {peer: compare.marks for peer, compare in asked} == {"b": b"his marks", "c": b"her marks"}
    assert lead.marked("b", b"others") == [], "it has said so"
    assert lead.shows("c", OTHER) == [], "the other one is still to show what it has"
    lead.now += TIMING.resend
    again = sends(lead.complete("c", lead.begin, OTHER), Compare)
    assert [peer for peer, _ in again] == ["b"]
    effects = lead.shows("b", PAYLOAD)
    assert [note.text for note in of(effects, Note)] == [f"attempt {attempt} failed: b gave b another average"]
    assert lead.leader._standing.barred(lead.now) == {"b"}


@pytest.mark.parametrize("chunk", [0, 1])
def test_what_does_not_fit_together_convicts_nobody(chunk: int) -> None:
    lead = LateLead()
    lead.shows("c", PAYLOAD)
    assert lead.shows("b", PAYLOAD, chunk) == []
    lead.now += TIMING.heartbeat_expiry
    effects = lead.complete("c", lead.begin, OTHER)
    assert {to for to, _ in sends(effects, Abort)} == {"b", "c"}
    assert not lead.leader.running
    assert not lead.leader._standing.barred(lead.now)


def test_whoever_was_asked_what_it_has_may_answer_when_others_are_asked_by_then() -> None:
    """Regression: one of the two said something else than before, so that others were asked; then the answer of the
    other one was taken for an accusation without evidence, and it was barred."""
    lead = LateLead("bcde")
    lead.complete("d", lead.begin)
    lead.complete("e", lead.begin, OTHER)
    lead.marked("c", b"marks of c")
    assert ("b", b"marks of c") in [(peer, asked.marks) for peer, asked in sends(lead.marked("b", b"hers"), Compare)]
    asked = [peer for peer, _ in sends(lead.complete("c", lead.begin), Compare)]
    assert "e" in asked
    assert "b" not in asked
    assert lead.shows("b", PAYLOAD, by="d") == []
    assert not lead.leader._standing.barred(lead.now)
    lead.marked("e", b"marks of e")
    lead.shows("e", OTHER, by="d")
    assert lead.leader._standing.barred(lead.now) == {"d"}, "what it has shown is remembered"


def test_one_that_is_first_to_say_something_else_does_not_keep_others_from_comparing() -> None:
    """Regression: the first two that differed were asked for as long as the attempt lasted, in each attempt."""
    lead = LateLead("bcde")
    lead.complete("d", lead.begin, PAYLOAD)
    lead.complete("e", lead.begin, OTHER)
    silent, asked = "c", set[str]()  # which spoke before d and e
    for _ in range(int(TIMING.heartbeat_expiry / TIMING.resend)):
        lead.now += TIMING.resend
        for peer, compare in sends(lead.complete("d", lead.begin), Compare):
            asked.add(peer)
            if peer != silent and compare.marks is None:
                lead.marked(peer, f"marks of {peer}".encode())
    assert "e" in asked, "it and b or d hold what was given to them"
