"""The leader of one position: when it begins, when it commits, whom it leaves out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from peers.election import ATTEMPT_LEAP
from peers.events import Dropped, Effect
from peers.leader import OVERTAKING_LIMIT, Leader
from peers.leases import SampleRange
from peers.log import MEMBER_LIMIT, LogState
from peers.messages import (
    Abort,
    Accuse,
    Begin,
    Commit,
    Complete,
    Held,
    LeaseGrant,
    LeaseRequest,
    Refuse,
    Waiting,
)
from peers.wire import digest_of
from tests.peers.builders import LOG as EMPTY
from tests.peers.builders import PAYLOAD, SETTINGS, STATE, TIMING, attempt, beats, first_log, member, of, ready, sends

LOG = first_log()
OTHER = digest_of(b"another payload")


class Lead:
    """The leader a at the position after the first entry, and the messages that it sends."""

    def __init__(self, log: LogState = LOG) -> None:
        self.log = log
        self.leader = Leader("a", log, STATE, SETTINGS)
        self.now = 0.0

    def ready(self, names: str, **changes: Any) -> list[Effect]:
        return [
            effect
            for name in names
            for effect in self.leader.on_ready(name, ready(self.log, name, **changes), self.now)
        ]

    def tick(self, live: str = "bc", after: float = 0.0, left: Collection[str] = ()) -> list[Effect]:
        self.now += after
        return self.leader.tick(self.now, beats(self.log, live), left)

    def begun(self, names: str = "abc", live: str = "bc") -> Begin:
        self.ready(names)
        begin: Begin = sends(self.tick(live), Begin)[0][1]
        return begin

    def complete(self, peer: str, begin: Begin, payload: bytes = PAYLOAD) -> list[Effect]:
        return self.leader.on_complete(peer, Complete(attempt=begin.attempt, payload=payload), self.now)


def test_begins_when_everybody_is_ready() -> None:
    lead = Lead()
    lead.ready("ab")
    assert lead.tick() == []
    lead.ready("c")
    begins = sends(lead.tick(), Begin)
    assert [peer for peer, _ in begins] == ["a", "b", "c"]
    begin = begins[0][1]
    assert begin.attempt == attempt(LOG, 1)
    assert [member.peer for member in begin.roster] == ["a", "b", "c"]
    assert begin.adopted is None


def test_grace_ends_the_wait_for_those_who_still_train() -> None:
    lead = Lead()
    lead.ready("ab")
    assert lead.tick(after=TIMING.grace - 1) == []
    assert [peer for peer, _ in sends(lead.tick(after=1), Begin)] == ["a", "b"]


def test_the_dead_are_not_waited_for() -> None:
    lead = Lead()
    lead.ready("ab")
    assert [peer for peer, _ in sends(lead.tick(live="b"), Begin)] == ["a", "b"]


def test_a_minority_waits_for_the_partition_grace() -> None:
    lead = Lead()
    lead.ready("a")
    assert lead.tick(live="", after=TIMING.partition_grace - 1) == []
    assert [peer for peer, _ in sends(lead.tick(live="", after=1), Begin)] == ["a"]


def test_polite_leavers_do_not_count() -> None:
    lead = Lead()
    lead.ready("a")
    assert lead.tick(live="", left={"b"}) == []
    assert sends(lead.tick(live="", left={"b", "c"}), Begin)


def test_those_who_may_have_forgotten_do_not_count() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("bc", incumbent=False)
    assert lead.tick() == []
    lead.ready("c")
    assert sends(lead.tick(), Begin)


def test_the_first_entry_needs_the_minimum_of_peers() -> None:
    lead = Lead(EMPTY)
    for place, name in enumerate("ab"):
        lead.ready(name, samples=(SampleRange(20 * place, 20 * place + 20),))
    assert lead.tick("b") == []
    lead.ready("c", samples=(SampleRange(40, 60),))
    assert len(sends(lead.tick(), Begin)) == 3


def test_joiners_with_a_lease_are_waited_for() -> None:
    lead = Lead()
    request = LeaseRequest(position=LOG.position, state_digest=STATE)
    (_, grant), *_ = sends(lead.leader.on_lease_request("z", request, inner_step=4), LeaseGrant)
    assert grant.samples == (SampleRange(120, 140),)
    assert grant.steps == 6
    again = sends(lead.leader.on_lease_request("z", request, inner_step=30), LeaseGrant)[0][1]
    assert again.samples == grant.samples, "asked twice, granted once"
    assert again.steps == 1
    another = sends(lead.leader.on_lease_request("y", request, inner_step=0), LeaseGrant)[0][1]
    assert another.samples == (SampleRange(140, 160),)
    lead.ready("abc")
    assert lead.tick("bcz") == []
    lead.ready("z", samples=grant.samples, incumbent=False)
    assert [peer for peer, _ in sends(lead.tick("bcz"), Begin)] == ["a", "b", "c", "z"]


def test_a_peer_with_another_state_is_refused() -> None:
    lead = Lead()
    assert sends(lead.ready("b", state_digest=OTHER), Refuse)
    request = LeaseRequest(position=LOG.position, state_digest=OTHER)
    assert sends(lead.leader.on_lease_request("z", request, 0), Refuse)


def test_commits_when_all_are_complete_and_not_before() -> None:
    lead = Lead()
    begin = lead.begun()
    assert lead.complete("a", begin) == []
    assert lead.complete("a", begin) == []
    assert lead.complete("b", begin) == []
    commits = sends(lead.complete("c", begin), Commit)
    assert [peer for peer, _ in commits] == ["a", "b", "c"]
    header = commits[0][1].header
    assert LOG.append(header).position.index == 2
    assert header.payload == PAYLOAD


def test_who_says_ready_again_gets_the_running_attempt() -> None:
    lead = Lead()
    begin = lead.begun()
    assert sends(lead.ready("b"), Begin) == [("b", begin)]


def test_a_member_that_left_the_attempt_ends_it() -> None:
    lead = Lead()
    lead.begun()
    assert [peer for peer, _ in sends(lead.ready("b", last_attempt=1), Abort)] == ["a", "b", "c"]
    assert not lead.leader.running


def test_time_is_up_and_the_next_attempt_goes_without_the_culprit() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin)
    lead.leader.on_waiting("b", Waiting(attempt=begin.attempt, missing=("c",)))
    assert lead.tick(after=TIMING.round_timeout) == []
    aborts = sends(lead.tick(after=1), Abort)
    assert [peer for peer, _ in aborts] == ["a", "b", "c"]
    assert "held up by c" in aborts[0][1].reason
    lead.ready("abc", last_attempt=1)
    second = sends(lead.tick(), Begin)
    assert [peer for peer, _ in second] == ["a", "b"]
    assert second[0][1].attempt.number == 2
    lead.complete("a", second[0][1])
    assert len(sends(lead.complete("b", second[0][1]), Commit)) == 2


def test_the_barred_may_come_back() -> None:
    lead = Lead()
    lead.begun()
    lead.tick(after=TIMING.round_timeout + 1)  # b and c said nothing
    lead.ready("abc", last_attempt=1)
    assert lead.tick() == []
    lead.now += TIMING.round_timeout
    lead.ready("abc", last_attempt=1)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["left", "expired"])
def test_a_members_death_ends_the_attempt(how: str) -> None:
    lead = Lead()
    lead.begun()
    effects = lead.leader.gone("c") if how == "left" else lead.tick(live="b")
    assert [peer for peer, _ in sends(effects, Abort)] == ["a", "b", "c"]


def test_who_sends_bad_blocks_is_left_out() -> None:
    lead = Lead()
    begin = lead.begun()
    accuse = Accuse(attempt=begin.attempt, accused="c", reason="code -128")
    assert len(sends(lead.leader.on_accuse("b", accuse, 0.0), Abort)) == 3
    lead.ready("abc", last_attempt=1)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


def test_strangers_have_no_say_in_an_attempt() -> None:
    """Regression: anybody could accuse a member, or say what it waited for."""
    lead = Lead()
    begin = lead.begun()
    assert lead.leader.on_accuse("z", Accuse(attempt=begin.attempt, accused="c", reason=""), 0.0) == []
    assert lead.leader.on_waiting("z", Waiting(attempt=begin.attempt, missing=("b",))) == []
    assert sends(lead.complete("z", begin), Abort) == [
        ("z", Abort(attempt=begin.attempt, reason="this attempt is over"))
    ]
    for peer in "abc":
        effects = lead.complete(peer, begin)
    assert len(sends(effects, Commit)) == 3


def test_messages_about_an_attempt_that_is_over_are_answered_with_abort() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.tick(after=TIMING.round_timeout + 1)
    assert sends(lead.complete("b", begin), Abort)
    assert sends(lead.leader.on_waiting("b", Waiting(attempt=begin.attempt, missing=())), Abort)
    assert lead.leader.on_accuse("b", Accuse(attempt=begin.attempt, accused="c", reason=""), 0.0) == []


def test_overlapping_samples_are_refused() -> None:
    lead = Lead()
    lead.ready("ab")
    assert sends(lead.ready("c", samples=LOG.leases["b"]), Refuse)
    assert sends(lead.ready("z", samples=(SampleRange(100, 101),)), Refuse), "the lease of c, who is not ready yet"
    assert not sends(lead.ready("c"), Refuse)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": (SampleRange(120, 141),)},
        {"samples": (SampleRange(120, 121), SampleRange(122, 123))},
        {"samples": (SampleRange(120, 140),), "tokens": 2001},
        {"samples": (SampleRange(120, 140),), "tokens": 2**62 - 1},
        {"samples": (), "tokens": 1},
    ],
    ids=["more than a lease", "scattered", "more tokens than samples", "all the tokens", "tokens of nothing"],
)
def test_what_no_lease_gives_is_refused_and_its_sender_named(changes: dict[str, Any]) -> None:
    """Regression: 2^62 - 1 tokens of one Ready made every attempt impossible; scattered samples froze everybody."""
    lead = Lead()
    lead.ready("ab")
    effects = lead.ready("z", **changes)
    assert [(dropped.peer, dropped.what) for dropped in of(effects, Dropped)] == [("z", "ready")]
    assert sends(effects, Refuse)
    lead.ready("c")
    begin = sends(lead.tick(), Begin)[0][1]
    assert [member.peer for member in begin.roster] == ["a", "b", "c"]


def test_what_an_earlier_leader_granted_is_good() -> None:
    lead = Lead()
    assert not sends(lead.ready("z", samples=(SampleRange(140, 160),)), Refuse)
    request = LeaseRequest(position=LOG.position, state_digest=STATE)
    grants = [sends(lead.leader.on_lease_request(peer, request, 0), LeaseGrant)[0][1] for peer in "xy"]
    assert [grant.samples for grant in grants] == [(SampleRange(120, 140),), (SampleRange(160, 180),)]
    assert sends(lead.ready("w", samples=(SampleRange(160, 180),)), Refuse), "that is y's"


def test_no_more_joiners_than_an_entry_takes() -> None:
    leader = Leader("a", LOG, STATE, SETTINGS)
    request = LeaseRequest(position=LOG.position, state_digest=STATE)
    for number in range(MEMBER_LIMIT):
        assert leader.on_lease_request(f"joiner{number}", request, 0)
    assert leader.on_lease_request("late", request, 0) == []
    for number, grant in enumerate(LOG.grants):
        leader.on_ready(f"joiner{number}", ready(LOG, "z", samples=grant[:0], tokens=0), 0.0)
    assert leader.on_ready("late", ready(LOG, "z", samples=(), tokens=0), 0.0) == []


def test_an_attempt_needs_somebody_who_has_trained() -> None:
    """Regression: an attempt of peers that had trained nothing raised LogError when it was complete."""
    lead = Lead()
    lead.ready("abc", samples=(), tokens=0)
    assert lead.tick() == []
    lead.ready("c")
    assert sends(lead.tick(), Begin)


def test_who_holds_another_payload_is_left_out() -> None:
    """Regression: one member that said another digest each time stopped the run for good."""
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin)
    lead.complete("b", begin, OTHER)
    aborts = sends(lead.complete("c", begin), Abort)
    assert aborts[0][1].reason == "b hold another payload"
    lead.ready("abc", last_attempt=1)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "c"]


def held(number: int, payload: bytes, leader: str = "a") -> Held:
    roster = [member("a", 60, 80), member("b", 80, 100)]
    return Held(attempt=attempt(LOG, number, leader), header=LOG.next_header(roster, payload))


def test_the_latest_entry_held_is_handed_on() -> None:
    lead = Lead()
    lead.ready("a", last_attempt=2)
    lead.ready("b", last_attempt=2, held=held(1, OTHER))
    lead.ready("c", last_attempt=2, held=held(2, PAYLOAD))
    begin = sends(lead.tick(), Begin)[0][1]
    assert begin.attempt.number == 3
    assert begin.adopted == held(2, PAYLOAD)
    assert begin.holders == ("c",)
    for peer in "abc":
        effects = lead.complete(peer, begin)
    assert sends(effects, Commit)[0][1].header == held(2, PAYLOAD).header


def test_what_does_not_follow_from_the_log_is_not_handed_on() -> None:
    lead = Lead()
    forged = held(1, PAYLOAD).header.model_copy(update={"cursor": 7})
    lead.ready("ab")
    lead.ready("c", held=Held(attempt=attempt(LOG), header=forged))
    assert sends(lead.tick(), Begin)[0][1].adopted is None


def test_a_holder_that_hands_on_something_else_is_left_out() -> None:
    lead = Lead()
    lead.ready("ab", last_attempt=1)
    lead.ready("c", last_attempt=1, held=held(1, PAYLOAD))
    begin = sends(lead.tick(), Begin)[0][1]
    lead.complete("c", begin)
    lead.complete("a", begin, OTHER)
    assert sends(lead.complete("b", begin, OTHER), Abort)
    lead.ready("abc", last_attempt=2)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


class TestPromises:
    """Every Ready of an attempt names the number before it; otherwise a member that promised long ago may meanwhile
    have completed another leader's attempt, which this one would then undo."""

    def test_a_ready_for_an_earlier_attempt_is_asked_for_again(self) -> None:
        lead = Lead()
        lead.ready("a", last_attempt=3)
        effects = lead.ready("b", last_attempt=1)
        assert [(peer, abort.attempt) for peer, abort in sends(effects, Abort)] == [("b", attempt(LOG, 3))]
        lead.ready("c", last_attempt=3)
        assert lead.tick() == []
        lead.ready("b", last_attempt=3)
        assert sends(lead.tick(), Begin)[0][1].attempt.number == 4

    def test_the_others_are_asked_again_when_one_is_further(self) -> None:
        lead = Lead()
        lead.ready("ab")
        effects = lead.ready("c", last_attempt=5)
        assert [(peer, abort.attempt.number) for peer, abort in sends(effects, Abort)] == [("a", 5), ("b", 5)]
        lead.ready("ab", last_attempt=5)
        assert {ready.attempt.number for _, ready in sends(lead.tick(), Begin)} == {6}

    def test_nobody_uses_the_numbers_up(self) -> None:
        """Regression: a Ready with the last possible number raised pydantic's error at the next attempt."""
        lead = Lead()
        lead.ready("ab")
        for beyond in (2**62 - 1, ATTEMPT_LEAP + 1):
            effects = lead.ready("c", last_attempt=beyond)
            assert sends(effects, Refuse), "c starts again from our state, and from the number 0"
            assert of(effects, Dropped)
        assert lead.tick() == []
        lead.ready("c")
        assert sends(lead.tick(), Begin)

    def test_nobody_makes_the_others_say_ready_for_ever(self) -> None:
        """Regression: a peer whose every Ready named a higher number kept everybody from beginning."""
        lead = Lead()
        for number in range(1, OVERTAKING_LIMIT + 2):
            lead.ready("ab", last_attempt=number - 1)
            effects = lead.ready("c", last_attempt=number)
        assert [dropped.peer for dropped in of(effects, Dropped)] == ["c"]
        assert lead.ready("c", last_attempt=OVERTAKING_LIMIT + 2) == []
        assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


def test_readies_of_peers_without_heartbeat_are_dropped() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("xyz", samples=())
    lead.tick("bc")
    lead.ready("bc")
    assert [peer for peer, _ in sends(lead.tick("bc"), Begin)] == ["a", "b", "c"]
