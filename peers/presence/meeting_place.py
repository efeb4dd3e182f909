"""The DHT as a place to meet: when a peer leaves its heartbeat there, and when it looks for those of others.

A few of a run's peers keep their heartbeats in the DHT, for newcomers to begin with, and all look there now and then,
so that two halves that were parted find each other again. Half of these few are the ones that came first: made-up
peers, however many, cannot take their turn, and DHT nodes keep what has been there for long.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.beats import REFRESH_SHARE, Beats
from peers.presence.heartbeat_store import NEVER
from peers.values.wire import digest_of

SAMPLE = 32  # peers whose heartbeats are kept in the DHT; all, while there are no more
ELDERS = 16  # of these, that came first
SAMPLE_PERIOD = 60.0  # seconds after which the rest of them are others
ARRIVAL = 60.0  # seconds after it came itself, within which a peer hears of all that were there before
STORE_SHARE = REFRESH_SHARE  # of a heartbeat's lifetime, from one that goes into the DHT to the next
SEARCH_SHARE = 0.25  # of a heartbeat's lifetime, from one search of the DHT to the next
SEARCH_CALM, SEARCH_UNEASY = 0.5, 0.05  # seconds besides, for each other peer
SEARCH_LAST = 300.0  # seconds


class MeetingPlace:
    """The times at which one peer of a run, or a visitor who only looks, uses the DHT."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._stored_at = self._searched_at = NEVER

    def is_to_be_stored(self, now: float, wall: float) -> bool:
        """Return whether the DHT should have our heartbeat: always while we hear nobody, else often enough for
        newcomers; in a large run, if we came early or are drawn."""
        if self._is_settled(now) and now - self._stored_at < STORE_SHARE * self._beats.lifetime:
            return False
        others = self._beats.others(now)
        if len(others) < SAMPLE or self._is_elder(others):
            return True
        period = str(int(wall / SAMPLE_PERIOD))
        mine = _place(self._beats.me, period)
        return sum(_place(other, period) < mine for other in others) < SAMPLE - ELDERS

    def _is_elder(self, others: Iterable[str]) -> bool:
        """Return whether few of the others were there when we came."""
        own = self._beats.own
        came = float("inf") if own is None else own.first_at + ARRIVAL
        return sum(self._beats.known_since(other) <= came for other in others) < ELDERS

    def is_search_due(self, now: float) -> bool:
        """Return whether it is time to look for others."""
        others = len(self._beats.others(now))
        pause = SEARCH_UNEASY * others
        if others and (self._beats.own is None or self._is_settled(now)):
            pause = max(SEARCH_SHARE * self._beats.lifetime, SEARCH_CALM * others)
        return now - self._searched_at >= min(SEARCH_LAST, pause)

    def stored(self, now: float) -> None:
        self._stored_at = now

    def searched(self, now: float) -> None:
        self._searched_at = now

    def _is_settled(self, now: float) -> bool:
        """Return whether we hear another peer over its link."""
        return now - self._beats.linked_at <= self._beats.lifetime / 2


def _place(peer: str, period: str) -> bytes:
    """Return a peer's place in a period's order, which nobody can choose."""
    return digest_of(f"{period} {peer}".encode())
