"""How a peer hears of the organiser's amendments, tells of them, and takes them into entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.protocol.amending import Amending
from peers.protocol.effects import Apply, Dropped, Note, OpenRound
from peers.protocol.events import AmendmentSeen, HeartbeatsSeen
from peers.protocol.messages import Begin, Complete
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from tests.peers.builders import PAYLOAD, RUN, SETTINGS, STATE, Rig, beat, commit, complete, of, sends

ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
AMENDABLE = replace(SETTINGS, organiser=ORGANISER.peer_id)


def amendment(number: int = 1, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign(RUN, number, learning_rate, 0.9, by)


def log_with(taken_in: Amendment | None) -> LogState:
    log = AMENDABLE.empty_log
    first = Rig(settings=AMENDABLE).roster()
    return log.append(log.next_header(first, PAYLOAD, amendment=taken_in))


def test_the_newest_one_waits_until_the_log_has_it() -> None:
    known = Amending(RUN, ORGANISER.peer_id)
    assert known.proposed(log_with(None)) is None
    assert known.hear(amendment(2))
    assert not known.hear(amendment(1))
    assert not known.hear(amendment(2, 0.5)), "of two with one number the first counts"
    assert not known.hear(None)
    assert not known.hear(amendment(3, by=STRANGER))
    assert known.proposed(log_with(None)) == known.proposed(log_with(amendment(1))) == amendment(2)
    assert known.proposed(log_with(amendment(2))) is known.proposed(log_with(amendment(2, 0.5))) is None
    assert known.proposed(log_with(amendment(3))) is None


def seen(rig: Rig, **said: Any) -> None:
    """c's heartbeat tells of these."""
    rig.sequence += 1
    rig.do(HeartbeatsSeen((beat("c", rig.peer.log, sequence=rig.sequence, **said),)))


@pytest.mark.parametrize("field", ["amendment", "proposed"])
def test_a_peer_hears_of_it_in_heartbeats(field: str) -> None:
    rig = Rig(settings=AMENDABLE).joined()
    seen(rig, **{field: amendment(by=STRANGER)})
    assert rig.peer.proposed_amendment is None
    seen(rig, **{field: amendment()})
    assert rig.peer.proposed_amendment == amendment()
    assert any("it waits for an entry" in note.text for note in of(rig.effects, Note))
    seen(rig, **{field: amendment()})
    assert not of(rig.effects, Note), "it is said once"


def test_it_is_given_to_a_peer_by_its_own_machine() -> None:
    rig = Rig(settings=AMENDABLE).joined()
    rig.do(AmendmentSeen(amendment()))
    assert rig.peer.proposed_amendment == amendment()


def begins_with(rig: Rig, taken_in: Amendment) -> Begin:
    begin = rig.begin()
    return begin.model_copy(update={"round": begin.round.model_copy(update={"amendment": taken_in})})


def test_a_member_signs_what_the_organiser_has_signed_though_it_hears_of_it_in_the_round() -> None:
    rig = Rig(settings=AMENDABLE).joined().trained()
    assert of(rig.hear("a", begins_with(rig, amendment())), OpenRound)
    rig.holding()
    header = rig.peer.log.in_state(STATE).next_header(rig.roster(), PAYLOAD, amendment=amendment())
    (said,) = [message for _, message in sends(rig.effects, Complete)]
    assert said == complete(header, rig.attempt(), "b")
    rig.hear("a", commit(rig.peer.log, header))
    (apply,) = of(rig.effects, Apply)
    assert apply.amendment is None, "it was not in force in this cycle"
    rig.applied()
    assert rig.peer.log.amendment == amendment()
    rig.trained().averaging().holding()
    rig.hear("a", rig.commit())
    (apply,) = of(rig.effects, Apply)
    assert apply.amendment == amendment()


def test_a_member_takes_no_part_where_it_is_forged() -> None:
    rig = Rig(settings=AMENDABLE).joined().trained()
    (dropped,) = of(rig.hear("a", begins_with(rig, amendment(by=STRANGER))), Dropped)
    assert dropped.reason == "its attempt can lead to no entry"


def test_heartbeats_carry_both() -> None:
    here = log_with(amendment())
    said = beat("c", here, amendment=here.amendment, proposed=amendment(2))
    assert Heartbeat(**dict(said)) == said
    assert not said.repeats(beat("c", here, amendment=here.amendment))
