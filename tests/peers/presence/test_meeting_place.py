"""When a peer leaves its heartbeat in the DHT, above all while somebody makes up peers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from peers.presence.beats import Beats
from peers.presence.meeting_place import ARRIVAL, ELDERS, SAMPLE, MeetingPlace
from peers.values.identity import Identity
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

RUN = "tiny-" + "a" * 32
WALL = 1.8e9
LIFETIME = 600.0
CROWD = [Identity.generate() for _ in range(3 * SAMPLE)]


class Peer:
    """One that beats, and what it has heard."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.beats = Beats(identity.peer_id, RUN)
        self.place = MeetingPlace(self.beats)

    def live(self, now: float, others: Iterable[Identity]) -> None:
        """Say something, and hear these others."""
        self.beats.say(signed(self.identity, now), now)
        for other in others:
            self.beats.found(signed(other, now), now, WALL + now)

    def stores(self, now: float) -> bool:
        return self.place.is_to_be_stored(now, WALL + now)


def signed(identity: Identity, now: float) -> bytes:
    return beat(identity.peer_id, LOG, sequence=int(1000 * (WALL + now)), run=RUN, lifetime=LIFETIME).sign(identity)


@pytest.mark.parametrize("earlier", [ELDERS - 1, ELDERS])
def test_those_that_came_first_store_however_many_peers_are_made_up(earlier: int) -> None:
    """Whom a peer hears of within its first minute may have been there before it."""
    peer = Peer(CROWD[0])
    peer.live(0.0, [])
    peer.live(ARRIVAL, CROWD[1 : 1 + earlier])
    peer.live(ARRIVAL + 1.0, CROWD[1 + earlier :])
    stores = [peer.stores(ARRIVAL + second) for second in range(1, int(LIFETIME / 2), 10)]
    assert all(stores) is (earlier < ELDERS)


def test_in_a_large_run_as_many_peers_store_as_a_newcomer_needs() -> None:
    """They come one after another, and all hear each other."""
    crowd = [Peer(identity) for identity in CROWD[: SAMPLE + 8]]
    now = 0.0
    for number, peer in enumerate(crowd):
        now += 2 * ARRIVAL
        peer.live(now, [one.identity for one in crowd[:number]])
    now += 2 * ARRIVAL
    for peer in crowd:
        peer.live(now, [one.identity for one in crowd])
    for minute in range(4):
        storing = [peer.stores(now + 60.0 * minute) for peer in crowd]
        assert all(storing[:ELDERS])
        assert ELDERS < sum(storing) <= SAMPLE
