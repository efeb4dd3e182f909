"""The DHT as a place to meet: when a peer leaves its heartbeat there, and when it looks who else has.

Gossip needs somebody to begin with. So a few of a run's peers keep their heartbeats in the DHT, and all look there now
and then, so that two halves that were parted find each other again. Half of these few are the ones that came first:
made-up peers, however many, cannot take their turn, and DHT nodes keep what has been there for long.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.gossip import FROM_DHT, Gossip
from peers.values.wire import digest_of

SAMPLE = 32  # peers whose heartbeats are kept in the DHT; all, while there are no more
ELDERS = 16  # of these, that came first
SAMPLE_PERIOD = 60.0  # seconds after which the rest of them are others
ARRIVAL = 60.0  # seconds after it came itself, within which a peer hears of all that were there before
STORE_SHARE = 0.4  # of a heartbeat's lifetime, from one that goes into the DHT to the next
SEARCH_SHARE = 0.25  # of a heartbeat's lifetime, from one search of the DHT to the next
SEARCH_CALM, SEARCH_UNEASY = 0.5, 0.05  # seconds besides, for each other peer
SEARCH_LAST = 300.0  # seconds


class MeetingPlace:
    """When one peer of a run, or somebody who only looks, uses the DHT."""

    def __init__(self, gossip: Gossip, lifetime: float) -> None:
        """lifetime: seconds, of heartbeats in this run."""
        self.lifetime = lifetime
        self._gossip = gossip
        self._stored_at = self._searched_at = -float("inf")

    def is_to_be_stored(self, now: float, wall: float) -> bool:
        """Whether the DHT should have our heartbeat: always while gossip does not reach everybody, else often enough
        for newcomers; in a large run, if we came early or are drawn."""
        if self._is_settled(now) and now - self._stored_at < STORE_SHARE * self.lifetime:
            return False
        others = self._gossip.others(now)
        if len(others) < SAMPLE or self._is_elder(others):
            return True
        period = str(int(wall / SAMPLE_PERIOD))
        mine = _place(self._gossip.me, period)
        return sum(_place(other, period) < mine for other in others) < SAMPLE - ELDERS

    def _is_elder(self, others: Iterable[str]) -> bool:
        """Whether few of the others were there when we came."""
        came = float("inf") if self._gossip.own is None else self._gossip.own.first_at + ARRIVAL
        return sum(self._gossip.known_since(other) <= came for other in others) < ELDERS

    def is_search_due(self, now: float) -> bool:
        others = len(self._gossip.others(now))
        pause = SEARCH_UNEASY * others
        if others and (self._gossip.own is None or self._is_settled(now)):
            pause = max(SEARCH_SHARE * self.lifetime, SEARCH_CALM * others)
        return now - self._searched_at >= min(SEARCH_LAST, pause)

    def stored(self, now: float) -> None:
        self._stored_at = now

    def searched(self, now: float) -> None:
        self._searched_at = now

    def _is_settled(self, now: float) -> bool:
        """Whether gossip works, and nobody is only known from the DHT."""
        recent = now - self.lifetime / 2
        strays = (word for word in self._gossip.heard.fresh(now) if word.source == FROM_DHT and word.at > recent)
        return self._gossip.answered_at > recent and next(strays, None) is None


def _place(peer: str, period: str) -> bytes:
    """Return a peer's place in a period's order, which nobody can choose."""
    return digest_of(f"{period} {peer}".encode())
