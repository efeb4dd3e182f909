"""The leader of one position, in a round: how it begins and commits, and how it goes on when somebody is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from peers.log.certificate import Proof
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState, _grants
from peers.presence.election import highest_attempt
from peers.presence.heartbeat import Heartbeat
from peers.presence.standing import Standing
from peers.protocol.barred import PARDONS
from peers.protocol.certifier import Certifier
from peers.protocol.claims import is_disclaimed
from peers.protocol.commitment import Evidence
from peers.protocol.effects import Dropped, Effect
from peers.protocol.gathering import OVERTAKING_LIMIT
from peers.protocol.leader import Leader
from peers.protocol.messages import (
    Abort,
    Accuse,
    Adopt,
    Begin,
    Commit,
    Compare,
    Complete,
    LeaseGrant,
    LeaseRequest,
    Prepared,
    Refuse,
    Waiting,
)
from peers.protocol.rounds import Held
from peers.protocol.schedule import MARGIN, Schedule
from peers.values.leases import SampleRange
from peers.values.wire import digest_of
from tests.peers.builders import (
    LOG as EMPTY,
)
from tests.peers.builders import (
    PAYLOAD,
    SETTINGS,
    SIZE,
    STATE,
    TIMING,
    attempt,
    beat,
    commitment,
    complete,
    evidence,
    first_log,
    holders_of,
    holding,
    judge,
    member,
    of,
    ready,
    round_of,
    sends,
)
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
OTHER = digest_of(b"another payload")
SCHEDULE = Schedule(TIMING)
STEP = TIMING.heartbeat
"""Seconds between two ticks, if nothing else is to be seen."""
ROSTER = (member("a", 60, 80), member("b", 80, 100), member("c", 100, 120))


class Lead:
    """The leader a at the position after the first entry, and the messages that it sends."""

    def __init__(self, log: LogState = LOG, settings: RunSettings = SETTINGS) -> None:
        self.log = log
        self.leader = Leader(
            "a",
            log,
            STATE,
            settings,
            SIZE,
            Standing(SCHEDULE.bar),
            Certifier(SimulatedKeys("a"), log, dict),
            judge(log),
        )
        self.now = 0.0
        self.starts: dict[str, int] = {}
        self.silent = ""
        """Who lives, and says no more that it is ready, or waits."""
        self._waits: dict[str, Waiting] = {}

    def live(self, names: str) -> dict[str, Heartbeat]:
        return {name: beat(name, self.log, incarnation=self.starts.get(name, 0)) for name in names}

    def ready(self, names: str, **changes: Any) -> list[Effect]:
        self.starts |= dict.fromkeys(names, changes.get("incarnation", 0))
        return [
            effect
            for name in names
            for effect in self.leader.on_ready(name, ready(self.log, name, **changes), self.now)
        ]

    def tick(self, live: str = "bc", after: float = 0.0, departed: Collection[str] = ()) -> list[Effect]:
        """Time passes as on a machine that is awake."""
        effects: list[Effect] = []
        while after > STEP:
            after -= STEP
            effects += self._pass(STEP, live, departed)
        return effects + self._pass(after, live, departed)

    def _pass(self, seconds: float, live: str, departed: Collection[str]) -> list[Effect]:
        """Those who live and are ready, or wait, say so again and again."""
        self.now += seconds
        for name, waiting in self._waits.items():
            if self.leader._is_running(waiting.attempt) and name not in self.silent and not waiting.unreached:
                assert self.leader.on_waiting(name, waiting, self.now) == []
        if not self.leader.running:
            for name, said in list(self.leader._ready.items()):
                if name not in self.silent:
                    assert self.leader.on_ready(name, said, self.now) == []
        return self.leader.tick(self.now, self.live(live), departed)

    def begun(self, names: str = "abc", live: str = "bc", **changes: Any) -> Begin:
        self.ready(names, **changes)
        begin: Begin = sends(self.tick(live), Begin)[0][1]
        return begin

    def complete(
        self, peer: str, running: Begin | Adopt, payload: bytes = PAYLOAD, missed: tuple[tuple[str, int], ...] = ()
    ) -> list[Effect]:
        try:
            header = running.header if isinstance(running, Adopt) else self.header(running, payload, missed)
            said = complete(header, running.attempt, peer, missed).model_copy(update={"payload": payload})
        except LogError:
            said = Complete(attempt=running.attempt, payload=payload, missed=missed, entry=payload, signature=bytes(64))
        return self.leader.on_complete(peer, said, self.now)

    def header(self, begin: Begin, payload: bytes, missed: tuple[tuple[str, int], ...]) -> Header:
        return self.log.next_header(begin.round.entry_roster(dict(missed)), payload)

    def all_complete(self, peers: str, running: Begin | Adopt, payload: bytes = PAYLOAD) -> list[Effect]:
        for peer in peers:
            effects = self.complete(peer, running, payload)
        return effects

    def waiting(
        self, peer: str, running: Begin | Adopt, missing: str, moved: int = 0, unreached: str = ""
    ) -> list[Effect]:
        waiting = Waiting(attempt=running.attempt, missing=tuple(missing), moved=moved, unreached=tuple(unreached))
        self._waits[peer] = waiting
        return self.leader.on_waiting(peer, waiting, self.now)

    def accuse(self, peer: str, running: Begin | Adopt, accused: str, shown: Evidence | None = None) -> list[Effect]:
        accuse = Accuse(attempt=running.attempt, accused=accused, reason="code -128", evidence=shown)
        return self.leader.on_accuse(peer, accuse, self.now)

    def gone(self, peer: str) -> list[Effect]:
        return self.leader.gone(peer, self.now)

    def aborted(self, names: str = "abc", **changes: Any) -> list[Effect]:
        """A member leaves the running attempt, which ends it; then all say Ready for the next."""
        number = self.leader._last_number
        assert sends(self.ready("a", last_attempt=number), Abort)
        return self.ready(names, last_attempt=number, **changes)


def goes_on(effects: list[Effect], names: str, lost: str) -> Begin:
    """The attempt in which these members go on without the lost ones."""
    begins = sends(effects, Begin)
    assert [peer for peer, _ in begins] == list(names)
    begin: Begin = begins[0][1]
    assert begin.round.lost == tuple(lost)
    return begin


def test_begins_when_everybody_is_ready() -> None:
    lead = Lead()
    lead.ready("ab")
    assert lead.tick() == []
    lead.ready("c")
    begins = sends(lead.tick(), Begin)
    assert [peer for peer, _ in begins] == ["a", "b", "c"]
    begin = begins[0][1]
    assert begin.attempt == attempt(LOG, 1)
    assert begin.round == round_of(begin.attempt, ROSTER)


def test_faster_links_reduce_more() -> None:
    lead = Lead()
    for name, rate in (("a", 1000), ("b", 4000), ("c", 1000)):
        lead.ready(name, rate=rate)
    begin = sends(lead.tick(), Begin)[0][1]
    assert [share.chunks for share in begin.round.shares] == [1, 4, 1]


def test_only_who_has_trained_reduces() -> None:
    lead = Lead()
    lead.ready("ac", rate=1000)
    lead.ready("b", rate=1000, samples=(), tokens=0)
    begin = sends(lead.tick(), Begin)[0][1]
    assert [share.chunks for share in begin.round.shares] == [3, 0, 3]


def test_grace_ends_the_wait_for_those_who_still_train() -> None:
    lead = Lead()
    lead.ready("ab")
    assert lead.tick(after=TIMING.grace - 1) == []
    assert [peer for peer, _ in sends(lead.tick(after=1), Begin)] == ["a", "b"]


def test_an_asynchronous_run_begins_with_enough_but_never_without_most_voters() -> None:
    def lead_with(names: str) -> Lead:
        lead = Lead(settings=replace(SETTINGS, contributions=0.1))
        lead.leader.awaited.slack = 0.0
        lead.ready(names)
        return lead

    assert [peer for peer, _ in sends(lead_with("ab").tick(), Begin)] == ["a", "b"]
    assert sends(lead_with("a").tick(after=TIMING.grace), Begin) == [], "one of three is no quorum"


def test_a_leader_remembers_how_long_its_round_took() -> None:
    lead = Lead()
    lead.ready("abc")
    begin = sends(lead.tick(), Begin)[0][1]
    lead.now += 7.0
    lead.all_complete("abc", begin)
    assert lead.leader._standing.round_seconds == 7.0


def test_the_dead_are_not_waited_for() -> None:
    lead = Lead()
    lead.ready("ab")
    assert [peer for peer, _ in sends(lead.tick(live="b"), Begin)] == ["a", "b"]


def test_a_minority_waits_for_the_partition_grace() -> None:
    lead = Lead()
    lead.ready("a")
    assert lead.tick(live="", after=TIMING.partition_grace - 1) == []
    assert [peer for peer, _ in sends(lead.tick(live="", after=1), Begin)] == ["a"]


def test_a_majority_that_still_trains_is_no_partition() -> None:
    """Regression: who was a partition grace faster than the others went on alone."""
    lead = Lead()
    lead.ready("a")
    assert lead.tick(live="bc", after=3 * TIMING.partition_grace) == []
    assert lead.tick(live="", after=TIMING.partition_grace - 1) == []
    assert [peer for peer, _ in sends(lead.tick(live="", after=1 + STEP), Begin)] == ["a"]


def test_a_leader_that_has_forgotten_does_not_count_itself_as_somebody_to_wait_for() -> None:
    lead = Lead()
    lead.ready("a", incarnation=9)
    lead.ready("b")
    assert sends(lead.tick(live="b", after=TIMING.partition_grace + STEP), Begin)


def test_who_seems_to_train_for_ever_is_not_waited_for() -> None:
    lead = Lead()
    lead.ready("a")
    assert sends(lead.tick(live="bc", after=SCHEDULE.hopeless), Begin)


@pytest.mark.parametrize("seconds", [2 * TIMING.partition_grace, 2 * SCHEDULE.hopeless])
def test_who_was_stopped_for_long_does_not_go_on_alone_at_once(seconds: float) -> None:
    """Regression: it had heard of nobody for so long, since it had not listened; after an hour all seemed hopeless."""
    lead = Lead()
    lead.ready("a")
    lead.tick()
    lead.now += seconds
    assert lead.tick(live="") == []
    assert sends(lead.tick(live="", after=TIMING.partition_grace), Begin)


def test_polite_leavers_do_not_count() -> None:
    lead = Lead()
    lead.ready("a")
    assert lead.tick(live="", departed={"b"}) == []
    assert sends(lead.tick(live="", departed={"b", "c"}), Begin)


def test_those_who_may_have_forgotten_do_not_count() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("bc", incarnation=9)
    assert lead.tick() == []
    lead.ready("c")
    assert sends(lead.tick(), Begin)


def test_two_machines_with_one_key_are_one_member_and_only_that_of_the_roster_counts() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("b", incarnation=9)
    lead.ready("b")
    assert sends(lead.tick(), Begin) == [], "they still wait for c"
    lead.ready("b", incarnation=9)
    assert lead.tick(after=TIMING.grace) == [], "the copy does not count, and has taken the place of the one that did"
    lead.ready("c")
    begin = sends(lead.tick(), Begin)[0][1]
    assert [one.peer for one in begin.round.roster] == ["a", "b", "c"]


def forgetful() -> Lead:
    """Two of three have said that they have forgotten what they held."""
    lead = Lead()
    lead.ready("a")
    lead.ready("bc", incarnation=9)
    return lead


def test_most_who_are_there_go_on_together_though_they_have_forgotten() -> None:
    """Regression: each of two leaders went on with those who were left to it, and made an entry of its own."""
    lead = forgetful()
    begin = sends(lead.tick(after=TIMING.partition_grace), Begin)[0][1]
    goes_on(lead.gone("c"), "ab", lost="c")
    effects = lead.gone("b")
    assert begin.round.lost == ()
    assert not sends(effects, Begin)
    assert sends(effects, Abort)


def test_one_who_counts_does_not_go_on_without_those_who_have_forgotten() -> None:
    """They say Ready to another leader, perhaps. That they are at work does not mean that they will count."""
    lead = forgetful()
    for name in "bc":
        del lead.leader._ready[name]
    assert lead.tick(after=2 * TIMING.partition_grace) == []
    lead.ready("b", incarnation=9)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


def test_who_had_most_beside_it_waits_for_the_partition_grace_anew() -> None:
    """Regression: one message was lost in the moment in which the grace was over, and two went on alone, each. And of
    three, of whom one had forgotten and two did not reach each other, the one was cut off for fifteen seconds."""
    lead = Lead()
    lead.ready("a")
    lead.starts["b"] = 9  # it has forgotten
    assert lead.tick(live="b", after=2 * TIMING.partition_grace) == []
    lead.leader.unreached = {"b"}
    assert lead.tick(live="b") == []
    assert lead.tick(live="b", after=TIMING.partition_grace - 2 * STEP) == []
    assert sends(lead.tick(live="b", after=2 * STEP), Begin), "it is gone"


def test_one_who_counts_goes_on_without_the_forgetful_when_they_are_gone() -> None:
    lead = forgetful()
    assert sends(lead.tick(live="", after=TIMING.partition_grace), Begin)


def test_the_first_entry_needs_the_minimum_of_peers() -> None:
    lead = Lead(EMPTY)
    for place, name in enumerate("ab"):
        lead.ready(name, samples=(SampleRange(20 * place, 20 * place + 20),))
    assert lead.tick("b") == []
    lead.ready("c", samples=(SampleRange(40, 60),))
    assert len(sends(lead.tick(), Begin)) == 3


def test_a_founding_by_too_few_has_all_who_are_here() -> None:
    """Regression: a leader whose members were to say Ready again founded the run with those two that had said it, while
    the others founded it with another leader."""
    lead = Lead(EMPTY, replace(SETTINGS, minimum_peers=4))
    for place, name in enumerate("ab"):
        lead.ready(name, samples=(SampleRange(20 * place, 20 * place + 20),))
    assert lead.tick("bc", after=2 * TIMING.partition_grace) == []
    lead.ready("c", samples=(SampleRange(40, 60),))
    assert len(sends(lead.tick("bc"), Begin)) == 3
    alone = Lead(EMPTY, replace(SETTINGS, minimum_peers=4))
    alone.ready("a", samples=(SampleRange(0, 20),))
    assert alone.tick("bc", after=SCHEDULE.hopeless - 1) == []
    assert sends(alone.tick("bc", after=2.0), Begin), "who seems to be at work for ever keeps nobody for ever"


def test_joiners_with_a_lease_are_waited_for() -> None:
    lead = Lead()
    request = LeaseRequest(position=LOG.position, state_digest=STATE, relayed=(), unreached=())
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
    lead.ready("z", samples=grant.samples, incarnation=9)
    assert [peer for peer, _ in sends(lead.tick("bcz"), Begin)] == ["a", "b", "c", "z"]


def test_a_peer_with_another_state_is_refused() -> None:
    lead = Lead()
    assert sends(lead.ready("b", state_digest=OTHER), Refuse)
    request = LeaseRequest(position=LOG.position, state_digest=OTHER, relayed=(), unreached=())
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


def test_a_member_that_leaves_one_attempt_after_another_ends_none_of_them() -> None:
    lead = Lead()
    lead.begun()
    lead.ready("b", last_attempt=1)
    lead.ready("ac", last_attempt=1)
    [attempt] = {begin.attempt for _, begin in sends(lead.tick(), Begin)}
    effects = lead.ready("b", last_attempt=attempt.number)
    assert [peer for peer, _ in sends(effects, Abort)] == ["b"]
    assert {begin.round.lost for _, begin in sends(effects, Begin)} == {("b",)}


def test_one_that_says_again_that_it_holds_something_else_has_nobody_left_out() -> None:
    """Regression: it had just been asked what it has, so that nothing was left to be sent; then all others were taken
    for liars, who did not sign what it said last."""
    lead = Lead()
    begin = lead.begun()
    lead.all_complete("ab", begin)
    assert sends(lead.complete("c", begin, OTHER), Compare)
    assert lead.complete("c", begin, OTHER) == []
    lead.now += TIMING.heartbeat_expiry
    goes_on(lead.complete("c", begin, OTHER), "ab", lost="c")
    assert lead.leader._standing.barred(lead.now) == {"c"}


def test_members_that_differ_before_their_leader_has_a_payload_are_asked_when_it_has_one() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.complete("b", begin)
    assert lead.complete("c", begin, OTHER) == []
    assert [peer for peer, _ in sends(lead.complete("a", begin), Compare)] == ["c"]


# Somebody is lost ----------------------------------------------------------------------------------------------
HELD_UP = SCHEDULE.stall + 1


def dies(lead: Lead, begin: Begin) -> list[Effect]:
    assert lead.tick(live="b") == []
    return lead.tick(live="b", after=TIMING.heartbeat)


def leaves(lead: Lead, begin: Begin) -> list[Effect]:
    return lead.gone("c")


def spoils(lead: Lead, begin: Begin) -> list[Effect]:
    return lead.accuse("b", begin, "c", evidence(lead.log, "c"))


def accuses_without_evidence(lead: Lead, begin: Begin) -> list[Effect]:
    return lead.accuse("c", begin, "b")


def accuses_with_what_shows_nothing(lead: Lead, begin: Begin) -> list[Effect]:
    return lead.accuse("c", begin, "b", evidence(lead.log, "b", honest=True))


def accuses_with_anothers_lie(lead: Lead, begin: Begin) -> list[Effect]:
    return lead.accuse("c", begin, "b", evidence(lead.log, "c"))


def lags(lead: Lead, begin: Begin) -> list[Effect]:
    lead.waiting("a", begin, "c")
    lead.waiting("b", begin, "c")
    assert lead.tick(after=SCHEDULE.stall) == []
    return lead.tick(after=1)


def differs(lead: Lead, begin: Begin) -> list[Effect]:
    lead.complete("a", begin)
    lead.complete("b", begin)
    compared = sends(lead.complete("c", begin, OTHER), Compare)
    assert [to for to, _ in compared] == ["c"], "it may show who gave it that"
    lead.now += TIMING.heartbeat_expiry
    return lead.complete("b", begin)


FALSELY = [accuses_without_evidence, accuses_with_what_shows_nothing, accuses_with_anothers_lie]
WAYS = pytest.mark.parametrize("way", [dies, leaves, spoils, lags, differs, *FALSELY])


@WAYS
def test_the_others_go_on_with_the_same_round(way: Callable[[Lead, Begin], list[Effect]]) -> None:
    lead = Lead()
    begin = lead.begun()
    effects = way(lead, begin)
    second = goes_on(effects, "ab", lost="c")
    assert second.round == begin.round.without("c")
    assert second.attempt == attempt(LOG, 2)
    assert [(peer, abort.attempt) for peer, abort in sends(effects, Abort)] == [("c", begin.attempt)]
    assert lead.complete("a", second) == []
    commits = sends(lead.complete("b", second), Commit)
    assert [peer for peer, _ in commits] == ["a", "b"]
    assert commits[0][1].header.peers == ("a", "b", "c"), "what had arrived of c counts"


def test_one_after_another_may_be_lost_while_enough_remain() -> None:
    log = LOG.append(LOG.next_header([*ROSTER, member("d", 120, 140), member("e", 140, 160)], PAYLOAD))
    lead = Lead(log)
    begin = lead.begun("abcde", live="bcde")
    goes_on(lead.gone("b"), "acde", lost="b")
    second = goes_on(lead.gone("e"), "acd", lost="be")
    assert second.round.name == begin.attempt
    assert second.attempt.number == 3
    effects = lead.gone("d")
    assert [peer for peer, _ in sends(effects, Abort)] == ["a", "c", "d"]
    assert not lead.leader.running


def test_several_who_die_together_are_lost_together() -> None:
    log = LOG.append(LOG.next_header([*ROSTER, member("d", 120, 140), member("e", 140, 160)], PAYLOAD))
    lead = Lead(log)
    lead.begun("abcde", live="bcde")
    lead.tick(live="be")
    goes_on(lead.tick(live="be", after=TIMING.heartbeat), "abe", lost="cd")


@WAYS
def test_without_a_quorum_the_attempt_is_over(way: Callable[[Lead, Begin], list[Effect]]) -> None:
    """Who may have forgotten what it held does not count, so two of three that are left are not enough."""
    lead = Lead()
    lead.ready("ac")
    begin = lead.begun("b", incarnation=9)
    effects = way(lead, begin)
    assert [peer for peer, _ in sends(effects, Abort)] == ["a", "b", "c"]
    assert not sends(effects, Begin)
    assert not lead.leader.running


def test_a_minority_that_was_let_go_on_may_lose_more() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("bc", incarnation=9)
    begin = sends(lead.tick(after=TIMING.partition_grace), Begin)[0][1]
    goes_on(lead.gone("c"), "ab", lost="c")
    assert begin.round.lost == ()


def test_a_peer_must_be_gone_for_a_heartbeats_time() -> None:
    """One message that got lost, or one late heartbeat, costs nothing."""
    lead = Lead()
    lead.begun()
    assert lead.tick(live="b") == []
    assert lead.tick(live="b", after=TIMING.heartbeat - 0.1) == []
    assert lead.tick(live="bc") == []
    assert lead.tick(live="b", after=TIMING.heartbeat) == []
    assert lead.tick(live="b", after=TIMING.heartbeat / 2) == []
    assert sends(lead.tick(live="b", after=TIMING.heartbeat / 2), Begin)


def test_a_round_whose_reducers_are_all_lost_begins_anew() -> None:
    """Here a and b have trained nothing, and c alone reduces."""
    lead = Lead()
    lead.ready("ab", samples=(), tokens=0)
    lead.begun("c")
    effects = lead.gone("c")
    assert [peer for peer, _ in sends(effects, Abort)] == ["a", "b", "c"]
    lead.ready("ab", last_attempt=1)
    begin = goes_on(lead.tick(live="b"), "ab", lost="")
    assert begin.round.name == attempt(LOG, 2)


def test_who_lacks_in_how_many_chunks_is_in_the_header() -> None:
    lead = Lead()
    lead.begun()
    second = goes_on(lead.gone("c"), "ab", lost="c")
    lead.complete("a", second, missed=(("c", 4),))
    header = sends(lead.complete("b", second, missed=(("c", 4),)), Commit)[0][1].header
    assert [(one.peer, one.missed) for one in header.roster] == [("a", 0), ("b", 0), ("c", 4)]
    assert LOG.append(header).last == header


def test_who_lacks_in_all_chunks_is_not_in_the_entry() -> None:
    lead = Lead()
    lead.begun()
    second = goes_on(lead.gone("c"), "ab", lost="c")
    lead.complete("a", second, missed=(("c", SIZE.chunks),))
    header = sends(lead.complete("b", second, missed=(("c", SIZE.chunks),)), Commit)[0][1].header
    assert header.peers == ("a", "b")


def test_members_must_agree_on_who_lacks() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin)
    lead.complete("b", begin)
    goes_on(lead.complete("c", begin, missed=(("b", 1),)), "ab", lost="c")


def test_who_has_given_what_is_looked_for_before_anybody_signs() -> None:
    lead = Lead()
    begin = lead.begun()
    said = Prepared(attempt=begin.attempt, payload=PAYLOAD, missed=(), entry=PAYLOAD)
    other = said.model_copy(update={"payload": OTHER})
    assert lead.leader.on_prepared("a", said, lead.now) == []
    assert lead.leader.on_prepared("b", said, lead.now) == []
    assert [to for to, _ in sends(lead.leader.on_prepared("c", other, lead.now), Compare)] == ["c"]
    assert lead.leader.on_prepared("c", said, lead.now) == [], "it was behind by a message"
    effects = lead.all_complete("abc", begin)
    assert sends(effects, Commit), "who says it is still to sign it"


def test_who_says_nothing_keeps_nobody_from_showing_what_it_was_given() -> None:
    """Regression: a reducer that gave the leader another average, and said no word, was never looked for."""
    lead = Lead()
    begin = lead.begun()
    said = Prepared(attempt=begin.attempt, payload=PAYLOAD, missed=(), entry=PAYLOAD)
    lead.leader.on_prepared("a", said, lead.now)
    other = said.model_copy(update={"payload": OTHER})
    assert [to for to, _ in sends(lead.leader.on_prepared("b", other, lead.now), Compare)] == ["b"]
    assert not lead.leader.on_prepared("b", other, lead.now), "who repeats itself is asked once in a while"
    lead.now += TIMING.heartbeat_expiry
    assert sends(lead.leader.on_prepared("b", other, lead.now), Compare), "nobody is lost before all have spoken"
    assert lead.leader.running


def test_what_is_said_of_another_attempt_is_set_right() -> None:
    lead = Lead()
    begin = lead.begun()
    late = Prepared(attempt=attempt(LOG, 7), payload=PAYLOAD, missed=(), entry=PAYLOAD)
    assert [message for _, message in sends(lead.leader.on_prepared("b", late, lead.now), Begin)] == [begin]


def test_a_leader_that_holds_another_payload_than_the_others_ends_the_attempt() -> None:
    """It can't leave itself out, and waiting for the time to be up helps nobody."""
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin, OTHER)
    for peer in "bc":
        assert [to for to, _ in sends(lead.complete(peer, begin), Compare)] == [peer]
    lead.now += TIMING.heartbeat_expiry
    assert len(sends(lead.complete("c", begin), Abort)) == 3


def test_what_can_be_no_entry_is_not_committed() -> None:
    """All chunks without anybody's blocks: nobody can have averaged that."""
    lead = Lead()
    begin = lead.begun()
    effects = list[Effect]()
    for peer in "abc":
        effects += lead.complete(peer, begin, missed=tuple((name, SIZE.chunks) for name in "abc"))
    assert not sends(effects, Commit)
    assert not lead.leader.running


def test_who_does_without_blocks_of_members_that_are_here_is_lost() -> None:
    lead = Lead()
    begin = lead.begun()
    assert lead.complete("a", begin) == []
    goes_on(lead.complete("b", begin, missed=(("c", 1),)), "ac", lost="b")


def test_of_the_lost_blocks_may_lack() -> None:
    lead = Lead()
    lead.begun()
    second = goes_on(lead.gone("c"), "ab", lost="c")
    assert lead.complete("a", second, missed=(("c", 2),)) == []
    assert len(sends(lead.complete("b", second, missed=(("c", 2),)), Commit)) == 2


def test_the_lost_may_come_back_at_the_next_attempt_that_begins_anew() -> None:
    lead = Lead()
    lead.begun()
    lead.gone("c")
    assert sends(lead.ready("c", last_attempt=1), Abort)[0][1].attempt.number == 2, "its promise is too old"
    assert lead.ready("c", last_attempt=2) == []
    lead.aborted("abc")
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b", "c"]


def test_who_says_the_same_again_changes_nothing() -> None:
    lead = Lead()
    assert lead.ready("ab") == []
    lead.tick(after=5.0)
    assert lead.ready("b") == []
    assert sends(lead.ready("b", last_attempt=1), Abort), "a later attempt is something else: a must say Ready again"


def test_a_later_number_from_outside_changes_nothing_for_those_who_are_in_an_attempt() -> None:
    """They have promised, and go on when one of them dies, whoever else says Ready meanwhile."""
    lead = Lead()
    lead.begun()
    lead.ready("z", samples=(), tokens=0, last_attempt=5)
    goes_on(lead.gone("c"), "ab", lost="c")


def test_the_silent_are_those_who_hold_an_attempt_up() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin)
    lead.waiting("b", begin, missing="c")
    effects = lead.tick(after=HELD_UP)
    goes_on(effects, "ab", lost="c")
    assert "held up by c" in sends(effects, Abort)[0][1].reason


def test_who_said_once_that_it_waits_is_silent_too() -> None:
    """Regression: a member that has concluded, and tells nobody, was believed for as long as the attempt lasted. The
    leader took itself for the one that holds it up."""
    lead = Lead()
    begin = lead.begun()
    lead.silent = "c"
    lead.waiting("c", begin, missing="a")
    lead.complete("a", begin)
    lead.complete("b", begin)
    goes_on(lead.tick(after=HELD_UP), "ab", lost="c")


def test_each_attempt_has_its_time() -> None:
    lead = Lead()
    lead.begun()
    lead.now += SCHEDULE.stall
    lead.gone("c")
    assert lead.tick(live="b", after=SCHEDULE.stall) == []
    assert lead.tick(live="b", after=1) != []


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        ((0, 0, 0), TIMING.round_timeout),
        ((10**6, 0, 10**6), SCHEDULE.stall),
        ((500, 0, 500), MARGIN * 2 * SIZE.bytes / 500),
        ((500, 4000, 1000), MARGIN * 2 * SIZE.bytes / 500),
        ((1, 10**6, 10**6), SCHEDULE.longest_attempt),
    ],
    ids=["not measured", "one not measured", "one not measured, others slow", "the slowest link", "too slow a link"],
)
def test_the_time_limit_follows_from_measured_rates(rates: tuple[int, ...], limit: float) -> None:
    """Chunks move all the time; and members are told how long it may take."""
    lead = Lead()
    for name, rate in zip("abc", rates, strict=True):
        lead.ready(name, rate=rate)
    begin = sends(lead.tick(), Begin)[0][1]
    assert begin.seconds == limit
    until = lead.now + limit
    for moved in range(1, 1000):
        lead.waiting("b", begin, "c", moved)
        if lead.now + STEP > until:
            break
        assert lead.tick(after=STEP) == []
    assert lead.tick(after=until - lead.now) == []
    assert lead.tick(after=0.1) != []


def test_where_nothing_moves_nobody_waits_for_the_time_limit() -> None:
    """Regression: who stated a slow link and sent nothing held everybody up for ten times the manifest's limit."""
    lead = Lead()
    lead.ready("ab", rate=10**6)
    begin = lead.begun("c", rate=1)
    assert begin.seconds == SCHEDULE.longest_attempt
    lead.waiting("a", begin, "c", moved=4)
    lead.waiting("b", begin, "c", moved=4)
    assert lead.tick(after=SCHEDULE.stall) == []
    goes_on(lead.tick(after=1), "ab", lost="c")


def apart(lead: Lead, begin: Begin, moved: int = 0) -> list[Effect]:
    """Two of three wait for each other; a lacks nothing, and has signed."""
    lead.complete("a", begin)
    lead.waiting("b", begin, "c", moved)
    lead.waiting("c", begin, "b", moved)
    return lead.tick(after=STEP)


def test_two_that_wait_for_each_other_begin_another_round_with_the_others() -> None:
    """Regression: both were barred, and the others were too few."""
    lead = Lead()
    begin = lead.begun(rate=10**9)
    apart(lead, begin)
    lead.tick(after=SCHEDULE.death)
    assert not lead.leader.running
    assert not lead.leader._standing.barred(lead.now)
    lead.ready("abc", last_attempt=1)
    second: Begin = sends(lead.tick(), Begin)[0][1]
    assert second.round == round_of(second.attempt, ROSTER)


def test_two_between_which_data_moves_go_on_with_their_round() -> None:
    """Regression: on a busy machine, whose time was up while they still exchanged, they began another one."""
    lead = Lead()
    begin = lead.begun(rate=10**9)
    apart(lead, begin)
    lead.tick(after=SCHEDULE.death - 2 * STEP)
    assert lead.leader.running
    apart(lead, begin, moved=3)
    lead.tick(after=STEP)
    assert not lead.leader.running
    assert begin.round.name not in lead.leader._spoiled


def is_lost(lead: Lead, number: int) -> None:
    """All but c sign, and when the time is up the others go on without it."""
    lead.ready("abc", last_attempt=number, rate=10**9)
    begin: Begin = sends(lead.tick(), Begin)[0][1]
    lead.complete("a", begin)
    lead.complete("b", begin)
    lead.waiting("c", begin, "a")
    effects = lead.tick(after=SCHEDULE.death + STEP)
    goes_on(effects, "ab", lost="c")


def test_who_never_signs_is_lost_when_enough_have_signed() -> None:
    """Regression: whoever said that it waits for its leader had leader after leader given up. It may be right, and is
    barred only when it says so again and again."""
    lead = Lead()
    is_lost(lead, 0)
    assert not lead.leader._standing.barred(lead.now)
    for _ in range(2):
        number = lead.leader._last_number
        lead.leader._abort("it begins again")
        is_lost(lead, number)
    assert lead.leader._standing.barred(lead.now) == {"c"}


def test_who_neither_signs_nor_waits_is_barred_when_enough_have_signed() -> None:
    lead = Lead()
    begin = lead.begun(rate=10**9)
    lead.complete("a", begin)
    lead.complete("b", begin)
    goes_on(lead.tick(after=SCHEDULE.death + STEP), "ab", lost="c")
    assert lead.leader._standing.barred(lead.now) == {"c"}


def test_nobody_is_lost_for_those_who_sign_different_entries() -> None:
    lead = Lead()
    begin = lead.begun(rate=10**9)
    lead.complete("a", begin)
    lead.complete("b", begin, OTHER)
    lead.waiting("c", begin, "a")
    effects = lead.tick(after=SCHEDULE.death + STEP)
    assert len(sends(effects, Abort)) == 3


def test_on_fast_links_a_death_is_noticed_before_the_time_is_up() -> None:
    """Else a dead member is one of many that wait for each other, and all of them are left out for a while."""
    lead = Lead()
    begin = lead.begun(rate=10**9)
    for peer, missing in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        lead.waiting(peer, begin, missing)
    assert lead.tick(after=TIMING.heartbeat_expiry) == [], "c is dead, and its last heartbeat expires now"
    assert lead.tick(live="b", after=0.1) == []
    goes_on(lead.tick(live="b", after=TIMING.heartbeat), "ab", lost="c")


@pytest.mark.parametrize("way", [spoils, lags, differs, *FALSELY])
def test_the_barred_are_left_out_for_a_while(way: Callable[[Lead, Begin], list[Effect]]) -> None:
    lead = Lead()
    way(lead, lead.begun())
    lead.aborted("abc")
    assert goes_on(lead.tick(), "ab", lost="").round.name.number == 3
    lead.now += TIMING.round_timeout
    lead.aborted("abc")
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b", "c"]


def test_the_barred_are_taken_in_when_the_others_are_too_few() -> None:
    """Regression: a run whose minimum was all its peers waited until the bar of one with a slow link was over."""
    lead = Lead(EMPTY)
    first = {name: (SampleRange(20 * place, 20 * place + 20),) for place, name in enumerate("abc")}
    for name in "abc":
        lead.ready(name, samples=first[name])
    begin: Begin = sends(lead.tick(), Begin)[0][1]
    spoils(lead, begin)
    for name in "abc":
        lead.ready(name, samples=first[name], last_attempt=begin.attempt.number)
    begins = sends(lead.tick(after=STEP), Begin)
    assert [peer for peer, _ in begins] == ["a", "b", "c"]


def test_the_barred_are_not_taken_in_where_the_others_may_go_on_alone() -> None:
    """Regression: who held every attempt up kept the others for ever from going on as a minority."""
    lead = Lead()
    spoils(lead, lead.begun())
    lead.ready("ac", last_attempt=2)
    assert lead.tick(after=STEP) == [], "two of three would be enough"
    assert "c" not in lead.leader._ready


def test_the_barred_are_taken_in_for_each_attempt_that_needs_them() -> None:
    """Regression (seeds 11014, 60657): taken in once, then left out for the rest of its bar, it kept a run whose
    minimum was all its peers from ever making its first entry."""
    lead = Lead(EMPTY)
    first = {name: (SampleRange(20 * place, 20 * place + 20),) for place, name in enumerate("abc")}
    number = 0
    for _ in range(3):
        for name in "abc":
            lead.ready(name, samples=first[name], last_attempt=number)
        begins = sends(lead.tick(), Begin)
        assert [peer for peer, _ in begins] == ["a", "b", "c"]
        spoils(lead, begins[0][1])
        number = begins[0][1].attempt.number


def test_a_voter_that_is_barred_is_taken_in_where_a_majority_needs_it() -> None:
    """Regression: whoever was away for some seconds was left out for minutes, though no entry was made without it. One
    that holds every attempt up keeps the others from going on as a minority a few times only."""
    lead = Lead()
    begins = sends(lead.ready("ac") + lead.tick("c"), Begin)
    for _ in range(PARDONS):
        assert [peer for peer, _ in begins] == ["a", "c"]
        lead.leader._leave_behind(["c"], "hold the attempt up", lead.now)
        lead.ready("ac", last_attempt=begins[0][1].attempt.number)
        begins = sends(lead.tick("c"), Begin)
    assert [peer for peer, _ in begins] == ["a", "c"], "the first attempt needed no pardon"
    lead.leader._leave_behind(["c"], "hold the attempt up", lead.now)
    lead.ready("ac", last_attempt=begins[0][1].attempt.number)
    assert sends(lead.tick("c"), Begin) == []


def test_a_pardon_leaves_the_grace_to_those_who_still_train() -> None:
    """Regression: where the first was ready long ago, an attempt began as soon as a barred one was ready, too."""
    lead = Lead()
    lead.ready("a")
    for _ in range(int((TIMING.grace + SCHEDULE.death) / STEP)):
        assert lead.tick(after=STEP) == []
    lead.leader._bar("c", lead.now)
    lead.ready("c")
    assert lead.tick(after=STEP) == []
    assert lead.tick(after=STEP) == []
    lead.ready("b")
    assert [peer for peer, _ in sends(lead.tick(after=STEP), Begin)] == ["a", "b"]


def test_one_that_is_ready_early_makes_a_pardon_no_sooner() -> None:
    """Regression: two liars, of which one was barred, had each entry made with the fastest of the others alone."""
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcde")]
    lead = Lead(EMPTY.append(EMPTY.next_header(roster, digest_of(b"payload"))))
    others = "bcde"
    for _ in range(4):
        lead.leader._bar("e", lead.now)  # longer each time
    lead.ready("d")
    for _ in range(int((TIMING.grace + SCHEDULE.death) / STEP) + 1):
        lead.ready("e")
        lead.tick(others, after=STEP)
    lead.ready("a")
    assert lead.tick(others, after=STEP) == []
    lead.ready("bc")
    assert [peer for peer, _ in sends(lead.tick(others, after=STEP), Begin)] == list("abcd")


def test_who_is_refused_where_it_is_needed_is_refused_once() -> None:
    """Regression: it was pardoned at each tick, and each of its Readys cost a tick."""
    lead = Lead()
    lead.leader._bar("c", lead.now)
    lead.ready("a")
    lead.ready("c", state_digest=OTHER)
    said = [effect for _ in range(5) for effect in lead.tick("c", after=STEP)]
    assert [to for to, _ in sends(said, Refuse)] == ["c"]


def test_who_has_started_again_is_not_taken_in_for_what_it_said_before() -> None:
    lead = Lead()
    lead.leader._bar("c", lead.now)
    lead.ready("ac")
    lead.starts["c"] = 1
    assert lead.tick("c") == []


def test_a_pardon_is_taken_back_where_no_attempt_begins() -> None:
    """Regression: whoever was taken in stayed, though a majority came without it."""
    lead = Lead()
    lead.leader._bar("c", lead.now)
    lead.ready("a")
    lead.ready("c", last_attempt=5)
    [(asked, _)] = sends(lead.tick("c"), Abort)
    assert asked == "a"
    lead.ready("ab", last_attempt=5)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


def test_who_is_ready_for_another_leader_by_now_is_not_waited_for_in_an_attempt() -> None:
    """Regression (seed 60657): a leader began with peers that had given it up, which then counted as silent."""
    lead = Lead()
    lead.ready("ab")
    lead.silent = "b"
    assert sends(lead.tick(after=TIMING.grace), Begin) == []
    lead.silent = ""
    lead.ready("b")
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b"]


def test_who_waits_for_the_others_does_not_wait_for_those_who_have_started_again() -> None:
    """Regression: a lone volunteer, or a whole swarm after a power cut, waited for ever, for nobody."""
    for names, incarnation, begins in (("abc", 7, True), ("a", 0, False)):
        lead = Lead(settings=replace(SETTINGS, goes_on_alone=False))
        lead.ready(names, incarnation=incarnation)
        live = "".join(sorted(set(names) - {"a"}))
        effects = lead.tick(live, after=TIMING.partition_grace + TIMING.grace)
        assert bool(sends(effects, Begin)) is begins


def test_strangers_have_no_say_in_an_attempt() -> None:
    """Regression: anybody could accuse a member, or say what it waited for."""
    lead = Lead()
    begin = lead.begun()
    assert lead.accuse("z", begin, "c") == []
    assert lead.accuse("b", begin, "z") == []
    assert lead.waiting("z", begin, missing="b") == []
    assert sends(lead.complete("z", begin), Abort) == [
        ("z", Abort(attempt=begin.attempt, reason="this attempt is over"))
    ]
    assert lead.gone("z") == []
    assert len(sends(lead.all_complete("abc", begin), Commit)) == 3


def test_messages_about_an_attempt_that_is_over_are_answered_with_abort() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.ready("b", last_attempt=1)
    assert not lead.leader.running
    assert sends(lead.complete("b", begin), Abort)
    assert sends(lead.waiting("b", begin, missing=""), Abort)
    assert lead.accuse("b", begin, "c") == []


def test_a_member_that_has_not_heard_of_the_present_attempt_is_told() -> None:
    lead = Lead()
    begin = lead.begun()
    second = goes_on(lead.gone("c"), "ab", lost="c")
    assert sends(lead.waiting("b", begin, missing="c"), Begin) == [("b", second)]
    assert sends(lead.complete("b", begin), Begin) == [("b", second)]
    assert sends(lead.ready("b", last_attempt=1), Begin) == [("b", second)]
    assert sends(lead.waiting("c", begin, missing="a"), Abort) == [
        ("c", Abort(attempt=begin.attempt, reason="this attempt is over"))
    ]
    assert lead.accuse("b", begin, "a") == []


@pytest.mark.parametrize(
    "changes",
    [{"commitment": None}, {"commitment": commitment("c", 0, LOG.position)}, {"tokens": 0}],
    ids=["none", "another's", "to what is not contributed"],
)
def test_who_has_not_signed_what_it_contributes_is_refused(changes: dict[str, Any]) -> None:
    lead = Lead()
    lead.ready("ac")
    said = {"commitment": commitment("b", 0, LOG.position)} | changes
    assert sends(lead.ready("b", **said), Refuse)


def test_those_who_reduce_are_told_what_all_have_committed_to() -> None:
    lead = Lead()
    lead.ready("ab")
    begins = dict(sends(lead.ready("c", tokens=0, samples=()) + lead.tick(), Begin))
    assert begins["a"].commitments == tuple(commitment(peer, 0, LOG.position).contribution for peer in "ab")
    assert begins["c"] == begins["a"].model_copy(update={"commitments": ()}), "it averages nothing"
    again = dict(sends(lead.ready("a") + lead.ready("c", tokens=0, samples=()), Begin))
    assert again == {peer: begins[peer] for peer in "ac"}, "whoever has not heard of it is told no more, either"


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
    assert begin.round.peers == ("a", "b", "c")


def test_what_an_earlier_leader_granted_is_good() -> None:
    lead = Lead()
    assert not sends(lead.ready("z", samples=(SampleRange(140, 160),)), Refuse)
    request = LeaseRequest(position=LOG.position, state_digest=STATE, relayed=(), unreached=())
    grants = [sends(lead.leader.on_lease_request(peer, request, 0), LeaseGrant)[0][1] for peer in "xy"]
    assert [grant.samples for grant in grants] == [(SampleRange(120, 140),), (SampleRange(160, 180),)]
    assert sends(lead.ready("w", samples=(SampleRange(160, 180),)), Refuse), "that is y's"


def test_a_leader_with_the_last_grant_gives_those_before_it() -> None:
    """Regression: whoever was given the last one of all could give none to anybody."""
    lead = Lead(EMPTY)
    grants = EMPTY.grants
    lead.leader.lease = grants[len(grants) - 2]
    request = LeaseRequest(position=EMPTY.position, state_digest=STATE, relayed=(), unreached=())
    given = [sends(lead.leader.on_lease_request(peer, request, 0), LeaseGrant)[0][1].samples for peer in "xyz"]
    assert given == [grants[len(grants) - 1], grants[0], grants[1]]


def test_nobody_is_ready_with_the_leaders_own_samples() -> None:
    """Regression: a stranger could name them before the leader did, whose own Ready was refused ever after."""
    lead = Lead(EMPTY)
    lead.leader.lease = (SampleRange(0, 20),)
    assert sends(lead.ready("z", samples=(SampleRange(0, 20),)), Refuse)
    assert not sends(lead.ready("a", samples=(SampleRange(0, 20),)), Refuse)


def test_a_leader_takes_back_what_it_trained_itself() -> None:
    """It has given samples, and got the same from another leader, which it could not know of yet."""
    lead = Lead(EMPTY)
    request = LeaseRequest(position=EMPTY.position, state_digest=STATE, relayed=(), unreached=())
    lease = sends(lead.leader.on_lease_request("b", request, 0), LeaseGrant)[0][1].samples
    assert not sends(lead.ready("b", samples=lease), Refuse)
    assert not sends(lead.ready("a", samples=lease), Refuse)
    assert sends(lead.ready("b", samples=lease), Refuse)
    lead.ready("b", samples=(SampleRange(20, 40),))
    lead.ready("c", samples=(SampleRange(40, 60),))
    begins = sends(lead.tick(), Begin)
    assert [peer for peer, _ in begins] == ["a", "b", "c"]


def test_no_more_joiners_than_an_entry_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 5
    for module in ("log.state", "protocol.gathering"):
        monkeypatch.setattr(f"peers.{module}.MEMBER_LIMIT", limit)
    _grants.cache_clear()  # as many as an entry took before
    try:
        lead = Lead(LOG.at(first_log().last))  # which has not dealt its grants yet
        request = LeaseRequest(position=LOG.position, state_digest=STATE, relayed=(), unreached=())
        for number in range(limit):
            assert lead.leader.on_lease_request(f"joiner{number}", request, 0)
        assert lead.leader.on_lease_request("late", request, 0) == []
        for number in range(limit):
            lead.leader.on_ready(f"joiner{number}", ready(LOG, "z", samples=(), tokens=0), 0.0)
        assert lead.leader.on_ready("late", ready(LOG, "z", samples=(), tokens=0), 0.0) == []
        assert len(lead.leader._ready) == limit
    finally:
        _grants.cache_clear()


def test_an_attempt_needs_somebody_who_has_trained() -> None:
    """Regression: an attempt of peers that had trained nothing raised LogError when it was complete."""
    lead = Lead()
    lead.ready("abc", samples=(), tokens=0)
    assert lead.tick() == []
    lead.ready("c")
    assert sends(lead.tick(), Begin)


# What was begun before us, and what is held --------------------------------------------------------------------
EARLIER = round_of(attempt(LOG, 1, "c"), ROSTER)


def test_the_next_leader_goes_on_with_the_round() -> None:
    """The leader c has died in it."""
    lead = Lead()
    lead.ready("ab", last_attempt=1, round=EARLIER)
    effects = lead.tick(live="b")
    begin = goes_on(effects, "ab", lost="c")
    assert begin.round == EARLIER.without("c")
    assert begin.attempt == attempt(LOG, 2)
    assert sends(lead.all_complete("ab", begin), Commit)


def test_nobody_is_lost_only_because_the_leader_changed() -> None:
    lead = Lead()
    lead.ready("abc", last_attempt=1, round=EARLIER)
    assert goes_on(lead.tick(), "abc", lost="").round == EARLIER


def test_whoever_any_of_them_has_lost_is_lost() -> None:
    log = LOG.append(LOG.next_header([*ROSTER, member("d", 120, 140), member("e", 140, 160)], PAYLOAD))
    lead = Lead(log)
    roster = [member(name, lease[0].start, lease[0].stop) for name, lease in log.leases.items()]
    earlier = round_of(attempt(log, 1, "e"), roster)
    for name in "abcd":
        lead.ready(name, last_attempt=2, round=earlier.without("d") if name == "b" else earlier)
    goes_on(lead.tick(live="bcd"), "abc", lost="de")


def new_round(lead: Lead, live: str = "bc") -> bool:
    begin: Begin = sends(lead.tick(live), Begin)[0][1]
    return begin.round.name == begin.attempt


def test_a_round_that_too_few_are_in_begins_anew() -> None:
    lead = Lead()
    lead.ready("a", last_attempt=1, round=EARLIER)
    lead.ready("bc", last_attempt=1)
    assert new_round(lead)


def test_a_round_that_we_are_not_in_begins_anew() -> None:
    for mine in (None, EARLIER.without("a")):
        lead = Lead()
        lead.ready("a", last_attempt=1, round=mine)
        lead.ready("bc", last_attempt=1, round=EARLIER)
        assert new_round(lead)


def test_a_round_whose_reducers_are_gone_begins_anew() -> None:
    lead = Lead()
    only_c = round_of(EARLIER.name, ROSTER, chunks=[0, 0, 6])
    lead.ready("ab", last_attempt=1, round=only_c)
    assert new_round(lead, live="b")


def test_who_is_in_another_round_is_lost_to_this_one() -> None:
    lead = Lead()
    lead.ready("ab", last_attempt=1, round=EARLIER)
    lead.ready("c", last_attempt=1, round=round_of(EARLIER.name, ROSTER, chunks=[1, 1, 4]))
    goes_on(lead.tick(), "ab", lost="c")


def test_a_round_that_came_to_two_ends_is_not_gone_on_with() -> None:
    lead = Lead()
    lead.ready("ac")
    begin = lead.begun("b", incarnation=9)
    lead.complete("a", begin)
    lead.complete("b", begin)
    assert sends(lead.complete("c", begin, OTHER), Compare)
    lead.now += TIMING.heartbeat_expiry
    assert len(sends(lead.complete("b", begin), Abort)) == 3
    lead.now += TIMING.round_timeout + 1
    lead.ready("abc", last_attempt=1, round=begin.round)
    assert new_round(lead)


def test_a_round_that_stalled_is_not_gone_on_with_when_all_are_needed() -> None:
    """Regression: one had forgotten what came to it, and was taken into the same round again: it stalled for ever."""
    lead = Lead()
    lead.ready("ac")
    begin = lead.begun("b", incarnation=9)
    assert len(sends(lags(lead, begin), Abort)) == 3
    lead.now += TIMING.round_timeout + 1
    lead.ready("abc", last_attempt=1, round=begin.round)
    assert new_round(lead)


def test_an_aborted_round_is_gone_on_with() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.aborted("abc", round=begin.round)
    assert not new_round(lead)


def held(number: int, payload: bytes, leader: str = "a", by: str = "c") -> Held:
    return holding(LOG.next_header(ROSTER[:2], payload), attempt(LOG, number, leader), by)


def hold(lead: Lead, names: str, number: int, payload: bytes, last: int, leader: str = "a", **changes: Any) -> None:
    """These say Ready, and that they hold an entry since this attempt."""
    for name in names:
        lead.ready(name, last_attempt=last, held=held(number, payload, leader, name), **changes)


def adopts(effects: list[Effect]) -> tuple[str, Adopt]:
    found = sends(effects, Adopt)
    return "".join(peer for peer, _ in found), found[0][1]


def handing_on(holders: str = "bc", names: str = "abc") -> tuple[Lead, Adopt]:
    lead = Lead()
    lead.ready([name for name in names if name not in holders], last_attempt=1)  # type: ignore[arg-type]
    hold(lead, holders, 1, PAYLOAD, last=1)
    return lead, adopts(lead.tick(live=names.replace("a", "")))[1]


def test_the_latest_entry_held_is_handed_on() -> None:
    lead = Lead()
    hold(lead, "a", 1, OTHER, last=2)
    hold(lead, "b", 2, PAYLOAD, last=2)
    to, adopt = adopts(lead.tick(live="b"))
    assert to == "ab"
    assert (adopt.attempt, adopt.header) == (attempt(LOG, 3), held(2, PAYLOAD).header)
    assert adopt.holders == holders_of(held(2, PAYLOAD), "b")
    assert adopt.seconds == TIMING.round_timeout
    assert sends(lead.all_complete("ab", adopt), Commit)[0][1].header == held(2, PAYLOAD).header


def test_whoever_holds_what_is_handed_on_is_shown_nobodys_signatures() -> None:
    """In a large swarm they are long, and as a rule everybody holds it."""
    lead, adopt = handing_on("bc")
    assert [holder.peer for holder in adopt.holders] == ["b", "c"], "to a, who lacks it"
    short = adopt.model_copy(update={"holders": ()})
    assert sends(lead.ready("a", last_attempt=1), Adopt) == [("a", adopt)]
    again = lead.leader.on_ready("b", ready(LOG, "b", last_attempt=1, held=held(1, PAYLOAD, "a", "b")), lead.now)
    assert sends(again, Adopt) == [("b", short)]
    assert sends(lead.ready("b", last_attempt=1), Adopt) == [("b", adopt)], "it has started again, and forgotten"


def test_an_entry_that_may_be_committed_goes_before_a_round_that_could_go_on() -> None:
    lead = Lead()
    lead.ready("a", last_attempt=1, round=EARLIER)
    hold(lead, "bc", 1, PAYLOAD, last=1, leader="c", round=EARLIER)
    assert adopts(lead.tick())[0] == "abc"


def test_a_round_goes_on_if_what_few_hold_of_it_was_not_committed() -> None:
    """Two of three say that they have not signed it, and will not. The third has its whole payload to give."""
    lead = Lead()
    lead.ready("ab", last_attempt=1, round=EARLIER)
    hold(lead, "c", 1, PAYLOAD, last=1, leader="c", round=EARLIER)
    goes_on(lead.tick(), "abc", lost="")


def test_who_holds_what_was_not_committed_is_shown_so() -> None:
    lead = Lead()
    lead.ready("ab", last_attempt=1)
    hold(lead, "c", 1, PAYLOAD, last=1)
    begins = sends(lead.tick(), Begin)
    assert [peer for peer, _ in begins] == ["a", "b", "c"]
    certifier = Certifier(SimulatedKeys("c"), LOG, dict)
    assert is_disclaimed(certifier, LOG, held(1, PAYLOAD), begins[0][1])


def test_where_nobody_holds_anything_nothing_is_shown() -> None:
    assert Lead().begun().disclaimers == ()


def test_a_leader_knows_that_what_it_alone_holds_was_not_committed() -> None:
    lead = Lead()
    hold(lead, "a", 1, PAYLOAD, last=1)
    lead.ready("bc", last_attempt=1)
    assert [peer for peer, _ in sends(lead.tick(), Begin)] == ["a", "b", "c"]


def test_a_claim_without_a_good_signature_is_none() -> None:
    for forged in (held(1, PAYLOAD, by="b"), held(1, PAYLOAD).model_copy(update={"attempt": attempt(LOG, 2)})):
        lead = Lead()
        lead.ready("a", last_attempt=1)
        lead.ready("c", last_attempt=1, held=forged)
        assert sends(lead.tick(live="c"), Begin)


def test_no_single_signature_makes_an_entry_late() -> None:
    """What one liar has signed in a late attempt, and another peer in an early one, gives way to what two hold since an
    attempt between."""
    log = LOG.append(LOG.next_header([*ROSTER, member("d", 120, 140), member("e", 140, 160)], PAYLOAD))
    lead = Lead(log)
    entries = [log.next_header([log.expected("a")], payload) for payload in (PAYLOAD, OTHER)]
    for name, number, header in (
        ("a", 5, entries[0]),
        ("b", 5, entries[0]),
        ("c", 3, entries[1]),
        ("d", 9, entries[1]),
    ):
        lead.ready(name, last_attempt=9, held=holding(header, attempt(log, number), name))
    assert adopts(lead.tick(live="bcd"))[1].header == entries[0]


def test_others_that_are_at_work_are_waited_for_if_they_may_not_hold_it() -> None:
    """What one of two holds may be committed, if the third holds it; and is not, if it does not."""
    lead = Lead()
    lead.ready("a", last_attempt=1)
    hold(lead, "b", 1, PAYLOAD, last=1)
    lead.leader.awaited.grace = 0.0
    assert lead.tick(live="bc") == []
    assert lead.tick(live="bc", after=SCHEDULE.hopeless - STEP) == []
    assert adopts(lead.tick(live="bc", after=STEP))[0] == "ab"


def test_all_who_hold_an_entry_are_named() -> None:
    lead = Lead()
    lead.ready("a", last_attempt=2)
    hold(lead, "b", 1, PAYLOAD, last=2, leader="b")
    hold(lead, "c", 2, PAYLOAD, last=2, leader="c")
    assert adopts(lead.tick())[1].donors == ("b", "c")


def test_a_higher_leader_breaks_the_tie_between_attempts() -> None:
    lead = Lead()
    hold(lead, "a", 1, OTHER, last=1, leader="a")
    hold(lead, "b", 1, PAYLOAD, last=1, leader="b")
    assert adopts(lead.tick(live="b"))[1].header == held(1, PAYLOAD, "b").header


def test_what_does_not_follow_from_the_log_is_not_handed_on() -> None:
    lead = Lead()
    forged = held(1, PAYLOAD).header.model_copy(update={"cursor": 7})
    lead.ready("a")
    lead.ready("c", held=holding(forged, attempt(LOG), "c"))
    effects = lead.tick(live="c")
    assert sends(effects, Begin)
    assert not sends(effects, Adopt)


def test_who_says_complete_when_an_entry_is_handed_on_means_that_entry() -> None:
    """Each fetched the payload by its digest; what else a message may say is of no weight."""
    lead, adopt = handing_on()
    lead.complete("a", adopt)
    lead.complete("b", adopt, OTHER)
    commits = sends(lead.complete("c", adopt), Commit)
    assert [commit.header for _, commit in commits] == 3 * [held(1, PAYLOAD).header]


def test_an_entry_is_handed_on_without_who_is_lost() -> None:
    lead, adopt = handing_on(holders="bc")
    assert adopt.donors == ("b", "c")
    effects = lead.gone("c")
    to, second = adopts(effects)
    assert (to, second.attempt.number) == ("ab", 3)
    assert second.holders == adopt.holders, "what c has signed still shows that it may have been committed"
    assert [peer for peer, _ in sends(effects, Abort)] == ["c"]
    assert len(sends(lead.all_complete("ab", second), Commit)) == 2


def test_without_a_holder_the_attempt_is_over() -> None:
    lead, _ = handing_on(holders="c", names="ac")
    assert [peer for peer, _ in sends(lead.gone("c"), Abort)] == ["a", "c"]
    assert not lead.leader.running


def test_handing_on_has_the_manifests_time() -> None:
    """How large a part of it is to be fetched by how many is not foreseen."""
    lead = Lead()
    lead.ready("a", last_attempt=1, rate=10**9)
    hold(lead, "bc", 1, PAYLOAD, last=1, rate=10**9)
    _, adopt = adopts(lead.tick())
    lead.complete("a", adopt)
    lead.complete("c", adopt)
    assert lead.tick(after=TIMING.round_timeout) == []
    assert adopts(lead.tick(after=1))[0] == "ac"


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
        for beyond in (2**62 - 1, highest_attempt(lead.now) + 1):
            effects = lead.ready("c", last_attempt=beyond)
            assert not sends(effects, Refuse), "a liar may have brought it there: its work is good"
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

    def test_who_is_needed_is_taken_in_all_the_same(self) -> None:
        """Regression (seed 11199): of two, one said a higher number after each of many attempts, for good reasons, and
        was never heard again at that position."""
        lead = Lead()
        for number in range(1, OVERTAKING_LIMIT + 2):
            lead.ready("a", last_attempt=number - 1)
            lead.ready("b", last_attempt=number)
        begun, asked = list[tuple[str, Begin]](), number - 1
        while not begun and lead.now < SCHEDULE.distrust:
            lead.ready("a", last_attempt=asked)
            effects = lead.ready("b", last_attempt=number) + lead.tick("b", after=STEP)
            begun = sends(effects, Begin)
            asked = max([asked, *(abort.attempt.number for peer, abort in sends(effects, Abort) if peer == "a")])
        assert [peer for peer, _ in begun] == ["a", "b"]


def test_readies_of_peers_without_heartbeat_are_dropped() -> None:
    lead = Lead()
    lead.ready("a")
    lead.ready("xyz", samples=())
    lead.tick("bc")
    lead.ready("bc")
    assert [peer for peer, _ in sends(lead.tick("bc"), Begin)] == ["a", "b", "c"]


def test_who_signs_something_else_is_lost_where_a_signature_is_missing() -> None:
    lead = Lead()
    begin = lead.begun()
    lead.complete("a", begin)
    for name in "bc":
        said = complete(lead.header(begin, OTHER, ()), begin.attempt, name)
        said = said.model_copy(update={"payload": PAYLOAD, "entry": lead.header(begin, PAYLOAD, ()).digest})
        effects = lead.leader.on_complete(name, said, lead.now)
    assert not sends(effects, Commit)
    assert [peer for peer, _ in sends(effects, Abort)] == ["a", "b", "c"]
    assert lead.leader._standing.barred(lead.now) == {"b", "c"}


def test_a_commit_has_the_signatures_of_its_members() -> None:
    lead = Lead()
    begin = lead.begun()
    [commit] = {message for _, message in sends(lead.all_complete("abc", begin), Commit)}
    assert commit.certificate is not None
    certifier = Certifier(SimulatedKeys("z"), LOG, dict)
    assert certifier.proof(commit.header, commit.certificate) == Proof(True, 3), "each sees what the others have signed"


def test_who_started_again_need_not_sign_as_the_one_that_it_was() -> None:
    lead = Lead()
    lead.ready("ac")
    begin = lead.begun("b", incarnation=9, live="bc")
    lead.complete("a", begin)
    lead.complete("c", begin)
    entry = lead.header(begin, PAYLOAD, ()).digest
    stranger = Complete(attempt=begin.attempt, payload=PAYLOAD, missed=(), entry=entry, signature=bytes(64))
    [commit] = {message for _, message in sends(lead.leader.on_complete("b", stranger, lead.now), Commit)}
    assert Certifier(SimulatedKeys("z"), LOG, dict).proof(commit.header, commit.certificate) == Proof(True, 2)


def held_by(lead: Lead, number: int, payload: bytes, alone: bool) -> Held:
    at = attempt(LOG, number, "c").model_copy(update={"alone": alone})
    return holding(lead.log.next_header(ROSTER, payload), at, "b" if alone else "a")


def test_what_a_majority_may_have_committed_is_handed_on_before_what_a_minority_holds() -> None:
    """Regression: three had signed an entry, and two who were cut off another one, in a later attempt. When they met
    again without those who knew, the later one was handed on, and certified, too."""
    lead = Lead()
    for name, held in (("a", held_by(lead, 1, PAYLOAD, alone=False)), ("b", held_by(lead, 7, OTHER, alone=True))):
        lead.ready(name, held=held, last_attempt=7)
    adopt = sends(lead.tick(live="b"), Adopt)[0][1]
    assert (adopt.header.payload, adopt.donors) == (PAYLOAD, ("a",))


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_minoritys_attempt_says_that_it_is_one(is_alone: bool) -> None:
    lead = Lead()
    lead.ready("a" if is_alone else "abc")
    begin = sends(lead.tick(live="" if is_alone else "bc", after=TIMING.partition_grace), Begin)[0][1]
    assert begin.attempt.alone is begin.round.name.alone is is_alone
