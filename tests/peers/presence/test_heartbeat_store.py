"""The words of each peer that are kept: newer ones only, of our time, and no more than there is room for."""

from __future__ import annotations

from typing import Any

import pytest

from peers.presence import heartbeat_store as module
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.heartbeat_store import CLOCK_TOLERANCE, HEARTBEATS_AT_ONCE, HeartbeatStore, Kept
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

WALL = 1_800_000_000.0
LIFETIME = 20.0


class Place:
    """A store, and a clock."""

    def __init__(self) -> None:
        self.store = HeartbeatStore()
        self.now = 100.0

    @property
    def wall(self) -> float:
        return WALL + self.now

    def said(self, peer: str = "a", ago: float = 0.0, **more: Any) -> Heartbeat:
        return beat(peer, LOG, sequence=int(1000 * (self.wall - ago)), lifetime=LIFETIME, **more)

    def takes(self, heartbeat: Heartbeat) -> bool:
        return self.store.take(heartbeat, b"signed", self.now, self.wall)

    def kept(self, peer: str = "a") -> Kept:
        kept = self.store.get(peer)
        assert kept is not None
        return kept


@pytest.fixture
def place() -> Place:
    return Place()


def test_newer_words_replace_older_ones(place: Place) -> None:
    first = place.said()
    assert place.takes(first)
    assert not place.takes(first)
    assert not place.takes(place.said(ago=1.0, index=7))
    place.now += 1.0
    assert place.takes(place.said(index=7))
    assert place.kept().newest.index == 7
    assert (place.kept().first_at, place.kept().taken_at) == (100.0, 101.0)


def test_a_heartbeat_that_is_older_than_a_beat_brings_its_words_and_takes_no_time_back(place: Place) -> None:
    place.takes(place.said(ago=2.0))
    place.kept().newest = place.said(inner_step=9)
    late = place.said(ago=1.0, index=7)
    assert place.takes(late)
    assert (place.kept().newest.index, place.kept().newest.sequence) == (7, place.said().sequence)
    assert not place.takes(place.said(ago=0.5, incarnation=1)), "what spoke since is another incarnation"


@pytest.mark.parametrize(
    ("ago", "is_taken"),
    [
        (-CLOCK_TOLERANCE, True),
        (-CLOCK_TOLERANCE - 1.0, False),
        (LIFETIME + CLOCK_TOLERANCE, True),
        (LIFETIME + CLOCK_TOLERANCE + 1.0, False),
    ],
)
def test_neither_the_far_future_nor_the_far_past_is_believed(place: Place, ago: float, is_taken: bool) -> None:
    assert place.takes(place.said(ago=ago)) is is_taken


def test_a_peer_is_there_until_its_heartbeats_lifetime_is_over_and_heard_for_half_of_it(place: Place) -> None:
    place.takes(place.said())
    assert (place.kept().is_present(place.now), place.kept().is_heard(place.now)) == (True, False)
    place.store.heard("a", place.now)
    place.store.heard("stranger", place.now)
    for seconds, expected in ((10.0, (True, True)), (20.0, (True, False)), (20.1, (False, False))):
        assert (place.kept().is_present(100.0 + seconds), place.kept().is_heard(100.0 + seconds)) == expected
    assert [kept.heartbeat.peer for kept in place.store.fresh(120.0)] == ["a"]
    assert list(place.store.fresh(120.1)) == []
    place.takes(place.said(ago=-1.0, state=PeerState.LEAVING))
    assert not place.kept().is_present(place.now)


def test_a_few_heartbeats_may_come_at_once_and_two_a_second_in_the_long_run(place: Place) -> None:
    place.takes(place.said())
    kept, taken = place.kept(), 0
    for step in range(1000):
        now = place.now + step / 100
        if kept.may_send(now):
            kept.spend(300, now)
            taken += 1
    assert HEARTBEATS_AT_ONCE + 18 <= taken <= HEARTBEATS_AT_ONCE + 20


def test_a_large_heartbeat_counts_as_several(place: Place) -> None:
    place.takes(place.said())
    place.kept().spend(4096, place.now)
    assert not place.kept().may_send(place.now + 0.4)
    assert place.kept().may_send(place.now + 0.5)


def test_no_more_peers_are_remembered_than_there_is_room_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PEERS_LIMIT", 10)
    for number in range(20):
        assert place.takes(place.said(f"peer{number}")) is (number < 10)
    assert place.takes(place.said("peer3", ago=-0.1)), "who is known is still heard"
    place.now += LIFETIME + CLOCK_TOLERANCE + 1.0
    assert place.takes(place.said("new")), "in the place of those that are long gone"
    assert len(place.store) == 1


def test_whoever_is_silent_is_not_forgotten_while_its_words_could_be_taken_for_news(place: Place) -> None:
    last = place.said()
    place.takes(last)
    for seconds in (1.0, LIFETIME, CLOCK_TOLERANCE - 2.0):
        place.now += seconds
        place.store.forget(place.wall)
        assert not place.takes(last)
    place.now += 2.0
    place.store.forget(place.wall)
    assert (len(place.store), place.takes(last)) == (0, False)
