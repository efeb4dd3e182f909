"""Reach of the other peers, as one peer knows it: by its links, and by the chunks that arrived or did not."""

from __future__ import annotations

from collections.abc import Mapping

from peers.values.wire import Reach

SEEN_LIMIT = 64
"""Peers whose rate one Ready tells: enough to check a claim, and small in a swarm of a thousand."""
DOUBT = 300.0
"""Seconds for which data had better not go straight to a peer that chunks did not reach."""


class Reachability:
    """Outlives positions. Of a peer that nothing is known of, it is believed that it can be reached."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds for which no chunk must reach a peer before we doubt that any can."""
        self._patience = patience
        self._reach: dict[str, Reach] = {}
        self.unreached: frozenset[str] = frozenset()
        """Peers with which no data can be exchanged, as links say."""
        self.relayed: frozenset[str] = frozenset()
        """Peers that are reached only through a relay, as links say."""
        self.sought: frozenset[str] = frozenset()
        """Peers to which a way is still looked for."""
        self._rates: dict[str, int] = {}
        self._failing_since: dict[tuple[str, int], float] = {}  # by peer and fragment
        self._doubted_until: dict[str, float] = {}

    def observe(
        self, reach: Mapping[str, Reach], rates: Mapping[str, int], sought: frozenset[str] = frozenset()
    ) -> bool:
        """Take in what the links say. Returns whether anything changed in how peers are reached."""
        self.sought = sought
        changed = {peer for peer in self._reach.keys() | reach.keys() if self._reach.get(peer) != reach.get(peer)}
        self._reach, self._rates = dict(reach), dict(rates)
        self.unreached = frozenset(peer for peer, way in reach.items() if way is Reach.NONE)
        self.relayed = frozenset(peer for peer, way in reach.items() if way is Reach.RELAYED)
        for peer in changed:
            self.passed(peer)
        return bool(changed)

    def failed(self, peer: str, now: float, fragment: int = 0) -> None:
        """A chunk of this fragment's round did not reach the peer, which is alive."""
        if now - self._failing_since.setdefault((peer, fragment), now) >= self._patience:
            self._doubted_until[peer] = now + DOUBT

    def passed(self, peer: str) -> None:
        """A chunk has reached the peer, or its link has changed."""
        self._failing_since = {failing: since for failing, since in self._failing_since.items() if failing[0] != peer}
        self._doubted_until.pop(peer, None)

    def round_begins(self, fragment: int = 0) -> None:
        """What failed of this fragment before was of another round, which the peer may not have been in."""
        self._failing_since = {
            failing: since for failing, since in self._failing_since.items() if failing[1] != fragment
        }

    def doubted(self, now: float) -> frozenset[str]:
        """Peers that chunks did not reach lately. Nobody is left out for that: they may have been slow."""
        return frozenset(peer for peer, until in self._doubted_until.items() if now < until)

    def detours(self, now: float) -> frozenset[str]:
        """Peers with which as little data as possible should be exchanged: through a relay, or perhaps not at all, or
        in a way that is not found yet."""
        return self.doubted(now) | self.relayed | self.sought

    def seen(self, me: str) -> tuple[tuple[str, int], ...]:
        """Bytes a second that came from others in recent rounds: from the peers next to us in the order of ids, so
        that in a large swarm as many speak of each."""
        peers = sorted(peer for peer, rate in self._rates.items() if rate > 0 and peer != me)
        after = sum(peer < me for peer in peers)
        return tuple((peer, self._rates[peer]) for peer in (peers[after:] + peers[:after])[:SEEN_LIMIT])
