"""Do the peers agree? Two peers at one place in the log must name the same digests, now or at any time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from peers.heartbeat import Heartbeat


class Agreement:
    """What every peer has said about every place in the log."""

    def __init__(self) -> None:
        self._claims: dict[int, dict[str, tuple[bytes, bytes]]] = defaultdict(dict)

    def observe(self, heartbeats: Iterable[Heartbeat]) -> None:
        for beat in heartbeats:
            self._claims[beat.index][beat.peer] = (beat.head, beat.state_digest)

    @property
    def compared(self) -> int:
        """Places in the log that more than one peer has been seen at."""
        return sum(len(claims) > 1 for claims in self._claims.values())

    @property
    def disagreements(self) -> tuple[int, ...]:
        """The places at which two peers named different digests."""
        return tuple(sorted(index for index, claims in self._claims.items() if len(set(claims.values())) > 1))

    def __str__(self) -> str:
        if self.disagreements:
            places = ", ".join(str(index) for index in self.disagreements)
            return f"the peers DISAGREE at outer step {places}: their log or state digests differ"
        if not self.compared:
            return "no two peers have been seen at the same outer step yet: nothing to compare"
        plural = "s" if self.compared > 1 else ""
        return f"all log and state digests agree ({self.compared} outer step{plural} compared)"
