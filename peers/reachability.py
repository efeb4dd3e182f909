"""How one peer reaches the others, as far as it knows: what its links say, and what became of the chunks it sent."""

from __future__ import annotations

from collections.abc import Mapping

from peers.reach import Reach

SEEN_LIMIT = 64
"""Peers whose rate one Ready tells: enough to check a claim, and small in a swarm of a thousand."""
DOUBT = 60.0
"""Seconds for which a peer that chunks did not reach counts as not reached, unless links say otherwise meanwhile."""


class Reachability:
    """Outlives positions. Of a peer that nothing is known of, it is believed that it can be reached."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds for which no chunk must reach a peer before we doubt that any can."""
        self._patience = patience
        self._reach: dict[str, Reach] = {}
        self._rates: dict[str, int] = {}
        self._failing_since: dict[str, float] = {}
        self._doubted_until: dict[str, float] = {}

    def observe(self, reach: Mapping[str, Reach], rates: Mapping[str, int]) -> bool:
        """Take in what the links say. Returns whether anything changed in how peers are reached."""
        changed = {peer for peer in self._reach.keys() | reach.keys() if self._reach.get(peer) != reach.get(peer)}
        self._reach, self._rates = dict(reach), dict(rates)
        for peer in changed:
            self.passed(peer)
        return bool(changed)

    def failed(self, peer: str, now: float) -> None:
        """A chunk did not reach the peer, which is alive."""
        since = self._failing_since.setdefault(peer, now)
        if now - since > DOUBT:
            self._failing_since[peer] = now  # long ago: another matter
        elif now - since >= self._patience:
            self._doubted_until[peer] = now + DOUBT

    def passed(self, peer: str) -> None:
        """The peer has got something of ours, or we of its."""
        self._failing_since.pop(peer, None)
        self._doubted_until.pop(peer, None)

    def unreached(self, now: float) -> frozenset[str]:
        """Peers with which no data can be exchanged."""
        doubted = {peer for peer, until in self._doubted_until.items() if now < until}
        return frozenset(doubted | {peer for peer, reach in self._reach.items() if reach is Reach.NONE})

    @property
    def relayed(self) -> frozenset[str]:
        """Peers that are reached only through a relay."""
        return frozenset(peer for peer, reach in self._reach.items() if reach is Reach.RELAYED)

    def seen(self, me: str) -> tuple[tuple[str, int], ...]:
        """Bytes a second that came from others in recent rounds: from the peers next to us in the order of ids, so
        that in a large swarm as many speak of each."""
        peers = sorted(peer for peer, rate in self._rates.items() if rate > 0 and peer != me)
        after = sum(peer < me for peer in peers)
        return tuple((peer, self._rates[peer]) for peer in (peers[after:] + peers[:after])[:SEEN_LIMIT])
