"""The DHT as a meeting place: when a peer stores its heartbeat there, and when it searches for other peers there.

A few of a run's peers keep their heartbeats in the DHT, so that newcomers find the run. All peers search there now and
then, so that two parts of a swarm find each other again after a partition. Half of these few are the oldest peers. So
made-up peers, however many, cannot displace them, and DHT nodes keep records that have been there for long.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.beats import REFRESH_SHARE, Beats
from peers.presence.heartbeat_store import NEVER
from peers.values.wire import digest_of

SAMPLE = 32  # number of a run's peers whose heartbeats are in the DHT; all of a smaller run
ELDERS = 16  # peers of the SAMPLE that are the run's oldest; the others are drawn by lot
SAMPLE_PERIOD = 60.0  # seconds after which a new draw by lot chooses peers to keep their heartbeats in the DHT
ARRIVAL = 60.0  # seconds after a peer's start in which it learns of all older peers
STORE_SHARE = REFRESH_SHARE  # fraction of a heartbeat's lifetime after which a newer one is stored in the DHT
# Pause between two searches of the DHT by the same peer: this many seconds, times the number of other peers that it
# knows. A peer of the run that has lately heard no other peer over a link uses UNEASY, any other searcher CALM.
CALM_SECONDS_PER_PEER, UNEASY_SECONDS_PER_PEER = 0.5, 0.05
SEARCH_SHARE = 0.25  # shortest pause between DHT searches while a peer hears others, in heartbeat lifetimes
SEARCH_LAST = 300.0  # maximum number of seconds between two searches of the DHT


class MeetingPlace:
    """The times at which one peer stores its heartbeat in the DHT, and searches the DHT for other peers."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._stored_at = self._searched_at = NEVER

    def is_to_be_stored(self, now: float, wall: float) -> bool:
        """Return True if our heartbeat is to be stored in the DHT: always while we hear no peer; otherwise often enough
        for newcomers, and in a large run only if we are among the oldest peers or are drawn by lot."""
        if self._is_settled(now) and now - self._stored_at < STORE_SHARE * self._beats.lifetime:
            return False
        others = self._beats.others(now)
        if len(others) < SAMPLE or self._is_elder(others):
            return True
        period = str(int(wall / SAMPLE_PERIOD))
        mine = _place(self._beats.me, period)
        return sum(_place(other, period) < mine for other in others) < SAMPLE - ELDERS

    def _is_elder(self, others: Iterable[str]) -> bool:
        """Return True if fewer than ELDERS of the other peers were in the run before us."""
        own = self._beats.own
        came = float("inf") if own is None else own.first_at + ARRIVAL
        return sum(self._beats.known_since(other) <= came for other in others) < ELDERS

    def is_search_due(self, now: float) -> bool:
        """Return True if it is time to search the DHT for other peers."""
        others = len(self._beats.others(now))
        pause = UNEASY_SECONDS_PER_PEER * others
        if others and (self._beats.own is None or self._is_settled(now)):
            pause = max(SEARCH_SHARE * self._beats.lifetime, CALM_SECONDS_PER_PEER * others)
        return now - self._searched_at >= min(SEARCH_LAST, pause)

    def stored(self, now: float) -> None:
        self._stored_at = now

    def searched(self, now: float) -> None:
        self._searched_at = now

    def _is_settled(self, now: float) -> bool:
        """Return True if another peer was heard over a link within the run's expiry."""
        return now - self._beats.linked_at <= self._beats.lifetime / 2


def _place(peer: str, period: str) -> bytes:
    """Return a peer's lot for a `period`: the peers with the smallest lots keep their heartbeats in the DHT. A lot is a
    hash, so no peer can choose its own."""
    return digest_of(f"{period} {peer}".encode())
