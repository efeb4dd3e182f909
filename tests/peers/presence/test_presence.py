"""The peers that are there: whose life and reach count, and whether they are enough."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.settings import RunSettings
from peers.log.state import LogState, Quorum
from peers.presence.heartbeat import PeerState
from peers.presence.presence import LINKS_PATIENCE, Presence
from peers.values.wire import Reach, digest_of
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, first_log, member, next_header

EXPIRY, PAUSE = 10.0, 40.0
AHEAD = first_log()


def any_farewell(peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
    return True


def seeing(log: LogState = AHEAD, names: str = "ac", **more: Any) -> Presence:
    """Return what b knows, who hears the others at this place in the log."""
    presence = Presence("b", EXPIRY, PAUSE, 0.0, any_farewell)
    presence.membership.observe([beat(name, log, **more) for name in names], 0.0)
    return presence


def here(patience: float = EXPIRY, now: float = 0.0, ours: int = 1, **more: Any) -> set[str]:
    presence = seeing(**more)
    presence.now = now
    return presence.voters_here(AHEAD, ours, patience)


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.TRAINING, PeerState.READY, PeerState.AVERAGING])
def test_a_voter_that_is_heard_of_is_here_whatever_it_does(state: PeerState) -> None:
    assert here(state=state) == {"a", "c"}


@pytest.mark.parametrize(
    "more",
    [
        {"trouble": "the leader says that it leaves this peer out"},
        {"head": digest_of(b"another branch")},
        {"index": 2},
        {"index": 40, "head": digest_of(b"ahead")},
        {"unreached": ("peer0two", "peerfour")},
    ],
)
def test_what_liars_can_bring_about_takes_nobody_its_say(more: dict[str, Any]) -> None:
    """Regression: who said of itself that it had a trouble, or could not reach a member, had no say any more."""
    assert here(**more) == {"a", "c"}


def test_who_has_left_or_started_again_is_not_here_as_what_it_was() -> None:
    assert here(state=PeerState.LEAVING) == set()
    assert here(incarnation=1) == set()


def test_who_is_silent_is_here_for_as_long_as_one_is_patient() -> None:
    assert here(now=EXPIRY) == {"a", "c"}
    assert here(now=EXPIRY + 1) == set()
    assert here(now=EXPIRY + 1, patience=EXPIRY + 4) == {"a", "c"}


def test_we_are_here_as_the_start_that_has_a_say() -> None:
    assert here(ours=0) == {"a", "b", "c"}


def test_strangers_are_no_voters() -> None:
    assert here(names="acz") == {"a", "c"}


def test_a_newcomer_first_looks_for_ways_to_those_who_live() -> None:
    presence = seeing()
    presence.reachability.observe({}, {}, frozenset({"c"}))
    assert presence.seeks_links
    presence.now = LINKS_PATIENCE
    assert not presence.seeks_links


def test_the_speeds_that_count_are_of_those_at_work_that_have_a_lease() -> None:
    """Regression: what a stranger said of its speed made everybody's leases the smallest."""
    presence, log = seeing(names=""), first_log()
    for peer, state, speed in (("a", PeerState.JOINING, 900.0), ("b", PeerState.TRAINING, 0.0)):
        presence.membership.observe([beat(peer, log, state, speed=speed)], 0.0)
    assert presence.speeds(log) == [], "it joins, and it does not know"
    presence.membership.observe([beat("c", log, speed=500.0), beat("stranger", log, speed=1e300)], 0.0)
    assert presence.speeds(log) == [500.0]
    assert presence.speeds(LOG) == [1e300, 500.0], "nobody has one yet"


@pytest.mark.parametrize(
    ("speeds", "usual"),
    [((), 0.0), ((5.0,), 5.0), ((1e12, 5.0), 5.0), ((1e12, 5.0, 4.0), 5.0), ((1e12, 1e12, 3.0, 2.0), 3.0)],
)
def test_less_than_half_cannot_boast_for_all(speeds: tuple[float, ...], usual: float) -> None:
    """Regression: whoever was late once stopped, if it was much slower than one said that it is."""
    presence = seeing(names="")
    presence.membership.observe([beat(f"peer{n}", AHEAD, speed=speed) for n, speed in enumerate(speeds)], 0.0)
    assert presence.usual(LOG) == usual


def test_strangers_do_not_say_what_speed_is_usual() -> None:
    """Regression: as many as were at work kept whoever was late once from training for half an hour."""
    presence, log = seeing(names=""), first_log()
    presence.membership.observe([beat("c", log, speed=500.0)], 0.0)
    presence.membership.observe([beat(f"stranger{n}", log, speed=1e300) for n in range(3)], 0.0)
    assert presence.usual(log) == 500.0


@pytest.mark.parametrize(
    ("quorum", "here", "left", "is_enough"),
    [
        (Quorum.MAJORITY, "abc", "", True),
        (Quorum.MAJORITY, "ab", "", False),
        (Quorum.MAJORITY, "ab", "c", True),
        (Quorum.MAJORITY, "bz", "acd", True),
        (Quorum.TWO_THIRDS, "abc", "", True),
        (Quorum.TWO_THIRDS, "ab", "c", False),
        (Quorum.TWO_THIRDS, "ab", "cd", True),
    ],
)
def test_a_quorum_is_of_the_voters_that_have_not_left(quorum: Quorum, here: str, left: str, is_enough: bool) -> None:
    empty = RunSettings(LOG.run, LOG.manifest_digest, 10, 20, 5, minimum_peers=3, quorum=quorum).empty_log
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcd")]
    log = empty.append(next_header(empty, roster))
    presence = seeing(log, names="acd")
    for peer in left:
        presence.membership.departs(peer, 0, 0, b"")
    assert presence.is_quorum(log, here) is is_enough


def test_r21_those_that_are_no_further_or_did_not_go_along_are_here() -> None:
    assert seeing(names="a").are_most_here(AHEAD, 0), "we are one of two, of three"
    assert not seeing(names="a").are_most_here(AHEAD, 1), "our other incarnation is"
    assert seeing(names="ac", index=2).are_most_here(AHEAD, 0), "they have gone on otherwise"
    assert not seeing(names="ac", index=2).are_most_here(AHEAD, 0, "ac")
    assert not seeing(names="ac", incarnation=1).are_most_here(AHEAD, 0)
    assert not seeing(names="").are_all_gone(AHEAD)
    assert seeing(LOG, names="").are_all_gone(LOG), "there never were any"


def test_who_reaches_less_than_half_of_the_others_says_that_it_cannot_lead() -> None:
    presence = seeing(names="acde")
    presence.membership.observe([beat("archive", AHEAD, PeerState.ARCHIVING)], 0.0)
    for unreached, can_lead in (("", True), ("ac", True), ("acd", False)):
        presence.reachability.observe(dict.fromkeys(unreached, Reach.NONE), {})
        assert presence.can_lead is can_lead
    presence.now = EXPIRY + 1
    assert presence.can_lead, "nobody is there to be reached"
