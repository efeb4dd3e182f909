"""Whom a peer does not take for its leader for a while: longer each time, and longer than what the failure cost."""

from __future__ import annotations

from peers.presence.standing import FORGIVEN

DOUBLINGS = 4
"""How often the time is doubled, at most."""


class Distrust:
    """Of one peer. Whoever fails once costs the others one delay; one that does so on purpose has ever fewer turns."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for how long the first failure counts, at least."""
        self._seconds = seconds
        self._times: dict[str, tuple[int, float]] = {}
        """How often each has failed, and until when that is remembered."""
        self._until: dict[str, float] = {}

    def failed(self, peer: str, now: float, cost: float = 0.0) -> None:
        """Distrust a peer, twice as long as the last time. While it is distrusted anyway it does not fail again.

        Args:
            cost: seconds that were lost; what is distrusted for less would be asked again too soon.
        """
        times, remembered = self._times.get(peer, (0, now))
        if now >= remembered:
            times = 0
        times += times == 0 or not self.is_on(peer, now)
        seconds = max(self._seconds, cost) * 2.0 ** min(times - 1, DOUBLINGS)
        self._until[peer] = max(self._until.get(peer, now), now + seconds)
        self._times[peer] = times, self._until[peer] + FORGIVEN

    def is_on(self, peer: str, now: float) -> bool:
        return now < self._until.get(peer, now)

    def of(self, now: float) -> frozenset[str]:
        """Return those who failed a short while ago."""
        if not self._until:
            return frozenset()
        self._until = {peer: until for peer, until in self._until.items() if now < until}
        return frozenset(self._until)

    def lift(self, peer: str | None = None) -> None:
        """Have nothing against a peer for now, or against anybody. How often each has failed is not forgotten."""
        if peer is None:
            self._until.clear()
        else:
            self._until.pop(peer, None)
