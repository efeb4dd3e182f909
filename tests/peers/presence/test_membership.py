"""Who is there: judged by heartbeats that advance, on our own clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.presence.heartbeat import PeerState
from peers.presence.membership import FORGOTTEN, Membership
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, first_log, next_header


def any_farewell(peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
    return True


def membership_of() -> Membership:
    return Membership("me", 10.0, any_farewell)


def seen(now: float = 0.0) -> Membership:
    membership = membership_of()
    membership.observe([beat("a", LOG), beat("b", LOG), beat("me", LOG)], now)
    return membership


def test_others_are_live_and_we_are_not_among_them() -> None:
    membership = membership_of()
    assert not membership.polled
    assert membership.live(0.0) == {}
    assert seen().polled
    assert list(seen().live(0.0)) == ["a", "b"]


def test_heartbeats_expire_on_our_clock() -> None:
    membership = seen(now=100.0)
    assert list(membership.live(110.0)) == ["a", "b"]
    assert membership.live(110.1) == {}


def test_the_same_heartbeat_again_keeps_nobody_alive() -> None:
    membership = seen()
    membership.observe([beat("a", LOG, sequence=1), beat("b", LOG, sequence=2)], 8.0)
    assert list(membership.live(15.0)) == ["b"]


def test_the_roll_is_a_new_one_only_when_somebody_says_something_new() -> None:
    membership = membership_of()
    membership.observe([beat("a", LOG, sequence=1), beat("b", LOG, sequence=1)], 0.0)
    roll = membership.live(0.0)
    membership.observe([beat("a", LOG, sequence=2), beat("b", LOG, sequence=2)], 8.0)
    assert membership.live(8.0) is roll
    membership.observe([beat("a", LOG, PeerState.READY, sequence=3), beat("b", LOG, sequence=3)], 9.0)
    assert membership.live(9.0)["a"].state is PeerState.READY
    assert membership.live(18.5) == membership.live(9.0), "both have been heard of 9.5 seconds ago"
    assert not membership.live(19.5)


def test_an_older_heartbeat_changes_nothing() -> None:
    membership = seen()
    membership.observe([beat("a", LOG, PeerState.READY, sequence=5)], 1.0)
    membership.observe([beat("a", LOG, PeerState.LEAVING, sequence=4)], 2.0)
    assert membership.live(2.0)["a"].state is PeerState.READY


def test_unreachable_until_the_next_heartbeat() -> None:
    membership = seen()
    membership.unreachable("a")
    membership.unreachable("stranger")
    membership.observe([beat("a", LOG, sequence=1)], 1.0)
    assert list(membership.live(1.0)) == ["b"]
    membership.observe([beat("a", LOG, sequence=2)], 1.0)
    assert list(membership.live(1.0)) == ["a", "b"]


def test_a_message_is_as_good_as_a_heartbeat() -> None:
    membership = seen()
    membership.unreachable("a")
    membership.heard_from("a", 9.0)
    membership.heard_from("stranger", 9.0)
    assert list(membership.live(15.0)) == ["a"]


def test_what_one_says_to_us_alone_is_no_sign_of_life_for_everybody() -> None:
    """Regression: a voter kept its say with messages to those who were to sign, of which the leader never heard."""
    membership = seen()
    membership.heard_from("a", 9.0)
    membership.observe([beat("b", LOG, sequence=2)], 9.0, {"b": 1.0})
    assert [one.peer for one in membership.spoke_within(10.0, 15.0)] == ["b"]
    assert [one.peer for one in membership.spoke_within(10.0, 18.1)] == []
    assert list(membership.live(18.1)) == ["a"]


def test_leavers_are_not_live_until_they_are_back() -> None:
    membership = seen()
    membership.departs("a", 0, 1, b"")
    membership.observe([beat("b", LOG, PeerState.LEAVING, sequence=2)], 1.0)
    assert membership.live(1.0) == {}
    membership.heard_from("a", 2.0)
    membership.observe([beat("a", LOG, PeerState.JOINING, sequence=2)], 3.0)
    assert membership.live(3.0) == {}, "what was under way when it said goodbye brings it not back"
    membership.observe([beat("a", LOG, PeerState.JOINING, sequence=3, incarnation=1)], 4.0)
    assert list(membership.live(4.0)) == ["a"]


def test_who_left_does_not_count_from_its_departure_on() -> None:
    """As the start that was in the roster: the next one of the same peer is not there for it."""
    membership, first = seen(), first_log()
    second = first.append(next_header(first, [first.expected(peer) for peer in "abc"]))
    membership.departs("a", 0, 2, b"")
    membership.departs("b", 7, 0, b"")
    assert membership.departed(LOG) == membership.departed(first) == frozenset()
    assert membership.departed(second) == {"a"}
    membership.observe([beat("a", LOG, PeerState.JOINING, sequence=9, incarnation=1)], 4.0)
    assert membership.departed(second) == {"a"}


def test_nothing_grows_for_ever() -> None:
    """Regression: strangers' goodbyes and peers of long ago were kept."""
    membership = seen()
    first = first_log()
    for number in range(100):
        membership.departs(f"stranger{number}", 0, 0, b"")
        membership.departs("b", number, 0, b"")
    membership.departs("a", 0, 0, b"")
    assert membership.departed(first) == {"a"}
    membership.observe([beat("c", LOG)], FORGOTTEN + 1)
    assert membership.departed(first) == frozenset()
    assert list(membership.live(FORGOTTEN + 1)) == ["c"]


def test_no_more_peers_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.presence.membership.SEEN_LIMIT", 5)
    membership = seen()
    membership.observe([beat(f"made{number}", LOG) for number in range(100)], 3.0, {"made99": 1.0})
    membership.observe([beat("a", LOG, sequence=2)], 4.0)
    assert len(membership.met) == 6
    assert {"me", "a"} <= set(membership.met)
    assert "b" not in membership.met, "it is silent for longest"


KINDS = ("observe", "unreachable", "heard_from", "left", "nothing")
DEEDS = st.tuples(st.sampled_from(KINDS), st.sampled_from("abc"), st.floats(0, 6))


@given(st.lists(DEEDS, max_size=20))
def test_who_lives_is_found_anew_whenever_it_may_have_changed(deeds: list[tuple[str, str, float]]) -> None:
    """In between it is the same object."""
    asked, now = seen(), 0.0
    for number, (deed, peer, seconds) in enumerate(deeds):
        now += seconds
        match deed:
            case "observe":
                asked.observe([beat(peer, LOG, sequence=number)], now)
            case "heard_from":
                asked.heard_from(peer, now)
            case "unreachable":
                asked.unreachable(peer)
            case "left":
                asked.departs(peer, 0, 0, b"")
        live = asked.live(now)
        assert set(live) == {one for one in "abc" if asked.is_live(one, now)}
        assert asked.live(now) is live


def test_a_roll_says_who_does_what() -> None:
    membership = membership_of()
    states = {"a": PeerState.READY, "b": PeerState.TRAINING, "c": PeerState.JOINING, "d": PeerState.ARCHIVING}
    membership.observe([beat(name, LOG, state) for name, state in states.items()], 0.0)
    roll = membership.live(0.0)
    assert [one.peer for one in roll.trainers] == ["a", "b", "c"]
    assert [one.peer for one in roll.at_work] == ["a", "b"]
    assert roll.ready == ("a",)
    membership.observe([beat("a", LOG, PeerState.TRAINING, sequence=2)], 1.0)
    assert membership.live(1.0).ready == ()
