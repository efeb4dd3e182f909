"""Reach of the other peers, as one peer knows it from its links, and from chunks that arrived or did not."""

from __future__ import annotations

from collections.abc import Mapping

from peers.values.wire import Reach

SEEN_LIMIT = 64
"""Peers whose rates one Ready reports: enough to check the rates that they claim, and few in a large swarm."""
DOUBT = 300.0
"""Seconds for which as little data as possible is exchanged with a peer that chunks did not reach."""


class Reachability:
    """Reach of each other peer of a run. A peer counts as reachable until the links or failed chunks show otherwise."""

    def __init__(self, patience: float) -> None:
        """Create an object that doubts a peer after chunks have failed to reach it for `patience` seconds."""
        self._patience = patience
        self._reach: dict[str, Reach] = {}
        self.unreached: frozenset[str] = frozenset()
        """Peers with which no data can be exchanged, according to the links."""
        self.relayed: frozenset[str] = frozenset()
        """Peers that are reached only through a relay, according to the links."""
        self.sought: frozenset[str] = frozenset()
        """Peers to which a link is still looked for."""
        self._rates: dict[str, int] = {}
        # by peer and fragment: the time, on our clock, of the first chunk that failed since one last arrived
        self._first_failures: dict[tuple[str, int], float] = {}
        self._doubted_until: dict[str, float] = {}

    def observe(
        self, reach: Mapping[str, Reach], rates: Mapping[str, int], sought: frozenset[str] = frozenset()
    ) -> bool:
        """Store the reach of all peers, the bytes a second at which their data arrived (`rates`), and the peers to
        which a link is still looked for (`sought`). Return True if any peer's reach has changed."""
        self.sought = sought
        changed = {peer for peer in self._reach.keys() | reach.keys() if self._reach.get(peer) != reach.get(peer)}
        self._reach, self._rates = dict(reach), dict(rates)
        self.unreached = frozenset(peer for peer, way in reach.items() if way is Reach.NONE)
        self.relayed = frozenset(peer for peer, way in reach.items() if way is Reach.RELAYED)
        for peer in changed:
            self.passed(peer)
        return bool(changed)

    def failed(self, peer: str, now: float, fragment: int = 0) -> None:
        """Record that a chunk of this fragment's round did not reach the peer, although it is live."""
        if now - self._first_failures.setdefault((peer, fragment), now) >= self._patience:
            self._doubted_until[peer] = now + DOUBT

    def passed(self, peer: str) -> None:
        """Record that a chunk has reached the peer, or its link has changed."""
        self._first_failures = {failing: since for failing, since in self._first_failures.items() if failing[0] != peer}
        self._doubted_until.pop(peer, None)

    def round_begins(self, fragment: int = 0) -> None:
        """Forget the failed chunks of this fragment: only failures within one round raise a doubt about a peer."""
        self._first_failures = {
            failing: since for failing, since in self._first_failures.items() if failing[1] != fragment
        }

    def doubted(self, now: float) -> frozenset[str]:
        """Return the peers that chunks did not reach lately. They still take part, because they may only be slow."""
        return frozenset(peer for peer, until in self._doubted_until.items() if now < until)

    def detours(self, now: float) -> frozenset[str]:
        """Return the peers with which as little data as possible should be exchanged: their link goes through a relay,
        is doubted, or is not found yet."""
        return self.doubted(now) | self.relayed | self.sought

    def seen(self, me: str) -> tuple[tuple[str, int], ...]:
        """Return the bytes a second at which data of other peers arrived in recent rounds, for up to SEEN_LIMIT peers.
        They are the next ones after us in the order of ids, so that in a large swarm equally many report on each."""
        peers = sorted(peer for peer, rate in self._rates.items() if rate > 0 and peer != me)
        after = sum(peer < me for peer in peers)
        return tuple((peer, self._rates[peer]) for peer in (peers[after:] + peers[:after])[:SEEN_LIMIT])
