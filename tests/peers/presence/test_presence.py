"""Who is there, alone: whom a peer believes, who is further on, and whom it takes for its leader."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import LINKS_PATIENCE, Presence
from peers.values.reach import Reach
from peers.values.wire import digest_of
from tests.peers.builders import LOG, PAYLOAD, beat, first_log, member

EXPIRY, DISTRUST = 10.0, 40.0
AHEAD = first_log()


def seeing(log: LogState = AHEAD, names: str = "ac", **more: Any) -> Presence:
    """b, who hears of the others at this place in the log."""
    presence = Presence("b", EXPIRY, DISTRUST, bar=20.0, now=0.0)
    presence.membership.observe([beat(name, log, **more) for name in names], 0.0)
    return presence


def claimant(presence: Presence, log: LogState) -> str | None:
    return presence.claimant(log, Lineage(log))


def test_who_says_that_it_has_trained_most_is_looked_at_first() -> None:
    assert claimant(seeing(), LOG) == "c", "the greater id of two that are as far"
    assert claimant(seeing(), AHEAD) is None
    assert claimant(seeing(names="a"), LOG) == "a"


def test_who_says_that_it_is_where_our_log_does_not_lead_is_looked_at_though_it_is_no_further() -> None:
    other = LOG.append(LOG.next_header(AHEAD.last.roster if AHEAD.last else (), b"\0" * 32))
    for theirs, ours in ((AHEAD, other), (other, AHEAD)):
        presence = seeing(theirs, names="a")
        assert claimant(presence, ours) == "a"
        assert not presence.is_behind(ours, Lineage(ours)), "it says nothing that is to be waited for"


def test_who_has_said_in_vain_that_it_is_further_comes_last_for_longer_and_longer() -> None:
    presence = seeing(names="a")
    for seconds in (EXPIRY, 2 * EXPIRY, DISTRUST, DISTRUST):
        presence.pass_over("a")
        assert claimant(presence, LOG) is None
        presence.now += seconds - 0.1
        presence.membership.observe([beat("a", AHEAD, sequence=int(10 * presence.now))], presence.now)
        assert claimant(presence, LOG) is None
        presence.now += 0.1
        assert claimant(presence, LOG) == "a"


@pytest.mark.parametrize(
    ("names", "further", "waits"), [("ac", "ac", True), ("ac", "a", True), ("acd", "a", False), ("acd", "z", False)]
)
def test_half_of_the_roster_that_is_here_may_say_that_we_are_behind(names: str, further: str, waits: bool) -> None:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcd")]
    log = LOG.append(LOG.next_header(roster, PAYLOAD))
    presence = Presence("b", EXPIRY, DISTRUST, bar=20.0, now=0.0)
    ahead: dict[str, Any] = {"index": 2, "head": digest_of(b"the next")}
    beats = [beat(name, log, **(ahead if name in further else {})) for name in {*names, *further}]
    presence.membership.observe(beats, 0.0)
    assert presence.is_behind(log, Lineage(log)) is waits


def test_who_joins_or_is_not_reached_or_failed_us_has_nothing_to_give() -> None:
    assert claimant(seeing(state=PeerState.JOINING), LOG) is None
    presence = seeing()
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert claimant(presence, LOG) == "a"
    presence.distrust("a")
    assert claimant(presence, LOG) is None
    assert presence.donors() == {"c"}
    presence.now = DISTRUST
    assert presence.distrusted == frozenset()
    presence.distrust("c")
    presence.ask_again("c")
    assert presence.distrusted == frozenset()


def test_who_gave_nothing_may_lead() -> None:
    presence = seeing()
    presence.gave_nothing("a")
    assert presence.donors() == {"c"}
    assert presence.elect(AHEAD, ()) == "a"
    presence.ask_again("a")
    assert presence.donors() == {"a", "c"}
    presence.gave_nothing("a")
    presence.now = DISTRUST
    assert presence.unhelpful == frozenset()


def test_the_dead_are_no_donors() -> None:
    presence = seeing()
    presence.now = EXPIRY + 1
    assert (presence.live(), claimant(presence, LOG), presence.is_live("a")) == ({}, None, False)


def test_the_first_of_the_last_roster_that_works_leads() -> None:
    assert seeing().elect(AHEAD, ()) == "a"
    assert seeing(names="c").elect(AHEAD, ()) == "c"
    assert seeing(names="c").elect(AHEAD, ("b",)) == "b", "we are at work, too, and before it in the roster"
    assert seeing(state=PeerState.JOINING).elect(AHEAD, ("b", "c")) == "b"
    assert seeing(LOG, state=PeerState.JOINING).elect(LOG, ()) == "a", "of those that join, before the first entry"
    assert seeing(names="c").elect(AHEAD, ("z",)) == "c", "nobody whom we do not hear"


def test_who_cannot_talk_with_others_leads_last() -> None:
    presence = seeing()
    presence.reachability.observe({"a": Reach.NONE}, {})
    assert presence.elect(AHEAD, ("b",)) == "c"


def test_a_newcomer_first_looks_for_ways_to_those_who_live() -> None:
    presence = seeing()
    presence.reachability.observe({}, {}, frozenset({"c"}))
    assert presence.seeks_links
    presence.now = LINKS_PATIENCE
    assert not presence.seeks_links


def test_the_fastest_is_one_that_works() -> None:
    presence = seeing(speed=500.0)
    presence.membership.observe([beat("d", AHEAD, PeerState.JOINING, speed=900.0)], 0.0)
    assert presence.fastest == 500.0
    assert seeing(names="").fastest == 0.0


def test_what_was_found_out_is_found_out_anew_when_what_it_depends_on_changes() -> None:
    presence = seeing()
    assert presence.elect(AHEAD, ()) == presence.elect(AHEAD, ()) == "a"
    assert presence.elect(LOG, ()) == "a"
    presence.distrust("a")
    assert presence.elect(AHEAD, ()) == "c"
    assert presence.elect(AHEAD, ("b",)) == "b"
    presence.now = DISTRUST + 1
    presence.membership.observe([beat("a", AHEAD, sequence=2), beat("c", AHEAD, sequence=2)], presence.now)
    assert presence.elect(AHEAD, ()) == "a", "it is believed again"
    assert claimant(presence, LOG) == "c"
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert claimant(presence, LOG) == "a"
    assert claimant(presence, AHEAD) is None
    presence.membership.unreachable("a")
    assert claimant(presence, LOG) is None
    assert presence.elect(AHEAD, ()) == "c"
