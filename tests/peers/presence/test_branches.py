"""The branches that others name: who is further on, whom to ask, and what most of them say."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import UNKNOWN_STATE
from peers.log.lineage import Branch, Lineage
from peers.log.state import LogState
from peers.presence.branches import VAIN, reported_state
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.presence import Presence
from peers.values.leases import SampleRange
from peers.values.wire import Reach, digest_of
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, STATE, member, next_header
from tests.peers.presence.test_presence import AHEAD, EXPIRY, PAUSE, any_farewell, seeing


def claimant(presence: Presence, log: LogState) -> str | None:
    return presence.branches.claimant(log, Lineage(log))


def test_who_says_that_it_has_trained_most_is_looked_at_first() -> None:
    assert claimant(seeing(), LOG) == "c", "the greater id of two that are as far"
    assert claimant(seeing(), AHEAD) is None
    assert claimant(seeing(names="a"), LOG) == "a"


def test_who_says_that_it_is_where_our_log_does_not_lead_is_looked_at_though_it_is_no_further() -> None:
    other = LOG.append(next_header(LOG, AHEAD.last.roster if AHEAD.last else (), b"\0" * 32))
    for theirs, ours in ((AHEAD, other), (other, AHEAD)):
        presence = seeing(theirs, names="a")
        assert claimant(presence, ours) == "a"
        assert not presence.branches.is_behind(ours, Lineage(ours)), "it says nothing that is to be waited for"


def test_who_went_on_alone_and_is_far_ahead_looks_at_the_others_all_the_same() -> None:
    """Regression: it remembered no more what it had made where they are, and took that for its own; and counted them on
    both sides."""
    ours = LOG
    for _ in range(2):
        samples = ours.leases.get("b", (SampleRange(0, 20),))
        ours = ours.append(next_header(ours, [member("b", samples[0].start, samples[0].stop)], b"\1" * 32))
    assert not Lineage(ours).lacks(1, AHEAD.position.head), "it does not know"
    presence = seeing(AHEAD)
    assert claimant(presence, ours) == "c"
    theirs = Branch(LOG, AHEAD, heads={1: AHEAD.position.head})
    assert presence.branches.are_more_there(theirs, ours, Lineage(ours)) is True
    presence.membership.observe([beat("a", ours, sequence=2)], 0.0)
    assert claimant(presence, ours) is None, "somebody is where we are"


def test_who_has_said_in_vain_that_it_is_further_comes_last_for_longer_and_longer() -> None:
    presence = seeing(names="a")
    for seconds in (EXPIRY, 2 * EXPIRY, PAUSE, PAUSE):
        presence.branches.pass_over("a")
        assert claimant(presence, LOG) is None
        presence.now += seconds - 0.1
        presence.membership.observe([beat("a", AHEAD, sequence=int(10 * presence.now))], presence.now)
        assert claimant(presence, LOG) is None
        presence.now += 0.1
        assert claimant(presence, LOG) == "a"


def test_a_few_that_claim_most_do_not_take_turns_for_ever() -> None:
    """Regression: six that each took a look of a minute were looked at one after the other, and nobody else ever."""
    presence, honest, looks = seeing(names=""), digest_of(b"honest"), 0
    liars = [f"liar{number}" for number in range(6)]
    while True:
        presence.now += 60.0
        claims = [beat(name, AHEAD, lineage_tokens=10**15, sequence=looks + 1) for name in liars]
        real = beat("a", AHEAD, head=honest, sequence=looks + 1)
        presence.membership.observe([*claims, real], presence.now)
        looked_at = claimant(presence, LOG)
        if looked_at == "a":
            break
        assert looked_at is not None
        presence.branches.pass_over(looked_at)
        looks += 1
        assert looks <= VAIN * len(liars), "each of them is looked at twice at most before the others"


@pytest.mark.parametrize(
    ("names", "further", "waits"), [("ac", "ac", True), ("ac", "a", True), ("acd", "a", False), ("acd", "z", False)]
)
def test_half_of_the_roster_that_is_here_may_say_that_we_are_behind(names: str, further: str, waits: bool) -> None:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcd")]
    log = LOG.append(next_header(LOG, roster))
    presence = Presence("b", EXPIRY, PAUSE, 0.0, any_farewell)
    ahead: dict[str, Any] = {"index": 2, "head": digest_of(b"the next")}
    beats = [beat(name, log, **(ahead if name in further else {})) for name in {*names, *further}]
    presence.membership.observe(beats, 0.0)
    assert presence.branches.is_behind(log, Lineage(log)) is waits


def test_who_joins_or_is_not_reached_has_nothing_to_give() -> None:
    assert claimant(seeing(state=PeerState.JOINING), LOG) is None
    presence = seeing()
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert claimant(presence, LOG) == "a"
    assert claimant(presence, AHEAD) is None


def test_who_gave_nothing_is_not_asked_for_a_while() -> None:
    presence = seeing()
    branches = presence.branches
    branches.gave_nothing("c")
    assert (claimant(presence, LOG), branches.donors(), set(branches.unhelpful)) == ("a", {"a"}, {"c"})
    branches.gave_nothing("a")
    assert claimant(presence, LOG) is None
    branches.ask_again("a")
    assert branches.donors() == {"a"}
    branches.gave_nothing("a")
    presence.now = PAUSE
    assert branches.unhelpful == frozenset()


def test_the_dead_are_no_donors() -> None:
    presence = seeing()
    presence.now = EXPIRY + 1
    assert (presence.live(), claimant(presence, LOG), presence.is_live("a")) == ({}, None, False)


FALSE = digest_of(b"false")


@pytest.mark.parametrize(
    ("beats", "told"),
    [
        ([beat("a", AHEAD), beat("b", AHEAD), beat("c", AHEAD, state_digest=FALSE)], STATE),
        ([beat("a", LOG), beat("b", LOG), beat("c", AHEAD, state_digest=FALSE)], UNKNOWN_STATE),
        ([beat("a", AHEAD), beat("c", AHEAD, state_digest=FALSE)], UNKNOWN_STATE),
        ([beat("a", AHEAD), beat("stranger", AHEAD, state_digest=FALSE)], STATE),
        ([beat("a", LOG)], UNKNOWN_STATE),
        ([beat("stranger", AHEAD, state_digest=FALSE), beat("a", AHEAD, incarnation=7)], None),
    ],
)
def test_most_of_the_roster_who_are_here_tell_what_the_state_is(beats: list[Heartbeat], told: bytes | None) -> None:
    assert reported_state(Branch(LOG, AHEAD), beats, AHEAD) == told


def test_voters_on_another_branch_do_not_tell_what_the_state_is_on_this_one() -> None:
    """Regression (R21): after a fork those on the lesser branch, if they were most, could never go over."""
    other = LOG.append(next_header(LOG, AHEAD.last.roster if AHEAD.last else (), b"\0" * 32))
    here, parted = beat("a", AHEAD), [beat("b", other, state_digest=FALSE), beat("c", other, state_digest=FALSE)]
    assert reported_state(Branch(LOG, AHEAD), [here, *parted], AHEAD) == STATE
    assert reported_state(Branch(LOG, AHEAD), parted, AHEAD) == UNKNOWN_STATE, "and not just any state"


def test_whoever_has_gone_on_from_a_place_had_the_state_that_its_next_entry_names() -> None:
    further = AHEAD.append(next_header(AHEAD, [AHEAD.expected("a"), AHEAD.expected("b")]))
    heads = {log.position.index: log.position.head for log in (AHEAD, further)}
    branch = Branch(LOG, further, heads=heads, claimed={AHEAD.position.index: FALSE})
    assert reported_state(branch, [beat("a", AHEAD), beat("b", AHEAD), beat("c", further)], AHEAD) == STATE
    assert reported_state(branch, [beat("a", AHEAD), beat("b", further), beat("c", further)], AHEAD) == FALSE


def test_the_state_of_most_is_that_of_more_than_half_of_the_voters() -> None:
    branches = seeing().branches
    assert branches.state_of_most(AHEAD, FALSE, 0) == STATE, "two of three"
    assert seeing(names="a").branches.state_of_most(AHEAD, FALSE, 0) is None
    assert seeing(names="a").branches.state_of_most(AHEAD, STATE, 0) == STATE
    assert seeing(names="a").branches.state_of_most(AHEAD, STATE, 1) is None, "as this incarnation we are no voter"


def test_most_are_elsewhere_if_a_quorum_is_where_the_branch_does_not_lead() -> None:
    further = AHEAD.append(next_header(AHEAD, [AHEAD.expected("a"), AHEAD.expected("b")]))
    heads = {log.position.index: log.position.head for log in (AHEAD, further)}
    branch = Branch(AHEAD, further, heads=heads)
    assert seeing(AHEAD).branches.are_most_elsewhere(AHEAD, branch, 0) is True
    assert seeing(further).branches.are_most_elsewhere(AHEAD, branch, 0) is False
    assert seeing(further, index=7).branches.are_most_elsewhere(AHEAD, branch, 0) is None, "it depends on them"


def test_what_was_found_is_found_anew_when_what_it_depends_on_changes() -> None:
    presence, lineage = seeing(), Lineage(LOG)
    branches = presence.branches
    assert branches.claimant(LOG, lineage) == branches.claimant(LOG, lineage) == "c"
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert branches.claimant(LOG, lineage) == "a"
    assert branches.furthest(LOG, lineage) == "a"
    branches.pass_over("a")
    assert branches.claimant(LOG, lineage) is None
    branches.look_again()
    assert branches.claimant(LOG, lineage) == "a"
    presence.membership.unreachable("a")
    assert branches.claimant(LOG, lineage) is None
