"""Who is there, alone: whom a peer believes, who is further on, and whom it takes for its leader."""

from __future__ import annotations

from typing import Any

from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import LINKS_PATIENCE, Presence
from peers.values.reach import Reach
from tests.peers.builders import LOG, beat, first_log

EXPIRY, DISTRUST = 10.0, 40.0
AHEAD = first_log()


def seeing(log: LogState = AHEAD, names: str = "ac", **more: Any) -> Presence:
    """b, who hears of the others at this place in the log."""
    presence = Presence("b", EXPIRY, DISTRUST, bar=20.0, now=0.0)
    presence.membership.observe([beat(name, log, **more) for name in names], 0.0)
    return presence


def test_who_has_the_heavier_lineage_is_further_on() -> None:
    assert seeing().furthest(LOG) == "c", "the greater id of two that are as far"
    assert seeing().furthest(AHEAD) is None
    assert seeing(names="a").furthest(LOG) == "a"


def test_of_two_lineages_of_one_weight_the_smaller_digest_wins() -> None:
    other = LOG.append(LOG.next_header(AHEAD.last.roster if AHEAD.last else (), b"\0" * 32))
    small, large = sorted([AHEAD, other], key=lambda log: log.position.head)
    assert seeing(small, names="a").furthest(large) == "a"
    assert seeing(large, names="a").furthest(small) is None


def test_who_joins_or_is_not_reached_or_failed_us_has_nothing_to_give() -> None:
    assert seeing(state=PeerState.JOINING).furthest(LOG) is None
    presence = seeing()
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert presence.furthest(LOG) == "a"
    presence.distrust("a")
    assert presence.furthest(LOG) is None
    assert presence.donors() == {"c"}
    presence.now = DISTRUST
    assert presence.distrusted == frozenset()
    presence.distrust("c")
    presence.trust("c")
    assert presence.distrusted == frozenset()


def test_the_dead_are_no_donors() -> None:
    presence = seeing()
    presence.now = EXPIRY + 1
    assert (presence.live(), presence.furthest(LOG), presence.is_live("a")) == ({}, None, False)


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
    assert presence.furthest(LOG) == "c"
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert presence.furthest(LOG) == "a"
    assert presence.furthest(AHEAD) is None
    presence.membership.unreachable("a")
    assert presence.furthest(LOG) is None
    assert presence.elect(AHEAD, ()) == "c"
