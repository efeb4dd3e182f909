"""Who has given members of an attempt different averages is found out by a leader that has none itself, too."""

from __future__ import annotations

import pytest

from peers.protocol.averages import Averages
from peers.protocol.effects import Effect, Note
from peers.protocol.messages import Abort, Accuse, Begin, Compare, Marked
from peers.simulator.simulated_keys import SimulatedKeys
from tests.peers.builders import PAYLOAD, TIMING, of, sends
from tests.peers.protocol.test_leader import OTHER, Lead


class LateLead(Lead):
    """The leader a, late for its own round: b and c have come to different payloads, since b reduced a chunk twice."""

    def __init__(self) -> None:
        super().__init__()
        self.ready("bc")
        self.begin = sends(self.tick("bc", after=TIMING.grace), Begin)[0][1]
        assert self.begin.round.peers == ("b", "c")
        self.complete("b", self.begin)
        self.asked = self.complete("c", self.begin, OTHER)

    def marked(self, peer: str, marks: bytes) -> list[Effect]:
        return self.leader.on_marked(peer, Marked(attempt=self.begin.attempt, marks=marks), self.now)

    def shows(self, peer: str, digest: bytes, chunk: int = 0) -> list[Effect]:
        """What b has signed to this peer."""
        averages = Averages("b", self.begin.round.name, SimulatedKeys("b"), terms=self.begin.round.terms)
        averages.sign(chunk, digest, ())
        shown = averages.signed(chunk)
        accuse = Accuse(attempt=self.begin.attempt, accused="b", reason="two averages", average=shown)
        return self.leader.on_accuse(peer, accuse, self.now)


def test_a_leader_that_is_no_member_has_two_of_its_members_compare() -> None:
    """Regression: it looked for what it held itself, and fell over that; then it ended attempt after attempt."""
    lead = LateLead()
    attempt, late = lead.begin.attempt, TIMING.resend
    assert sends(lead.asked, Compare) == [(peer, Compare(attempt=attempt, marks=None)) for peer in "bc"]
    assert lead.leader.on_marked("z", Marked(attempt=attempt, marks=b""), lead.now) == []
    assert sends(lead.marked("c", b"his marks"), Compare) == [("b", Compare(attempt=attempt, marks=None))]
    asked = sends(lead.marked("b", b"her marks"), Compare)
    assert {peer: compare.marks for peer, compare in asked} == {"b": b"his marks", "c": b"her marks"}
    assert lead.marked("b", b"others") == [], "it has said so"
    assert lead.shows("c", OTHER) == [], "the other one is still to show what it has"
    lead.now += late
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
