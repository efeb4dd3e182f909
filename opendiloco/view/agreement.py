"""Do the peers agree? Two peers at one place in the log must name the same digests, now or at any time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from peers.presence.heartbeat import Heartbeat, PeerState


class Agreement:
    """What every peer has said about every place in the log."""

    def __init__(self) -> None:
        self._peers: dict[int, set[str]] = defaultdict(set)
        self._digests: dict[int, set[tuple[bytes, bytes]]] = defaultdict(set)

    def observe(self, heartbeats: Iterable[Heartbeat]) -> None:
        for beat in heartbeats:
            if beat.state is PeerState.ARCHIVING:
                continue  # it has no state to compare
            self._peers[beat.index].add(beat.peer)
            self._digests[beat.index].add((beat.head, beat.state_digest))

    @property
    def compared(self) -> int:
        """Places in the log that more than one peer has been seen at."""
        return sum(len(peers) > 1 for peers in self._peers.values())

    @property
    def disagreements(self) -> tuple[int, ...]:
        """The places at which different digests were named."""
        return tuple(sorted(index for index, digests in self._digests.items() if len(digests) > 1))

    @property
    def verdict(self) -> bool | None:
        """Whether the peers agree; None: no two of them have been seen at one place."""
        if self.disagreements:
            return False
        return True if self.compared else None

    def __str__(self) -> str:
        if self.disagreements:
            places = ", ".join(str(index) for index in self.disagreements)
            return f"the peers DISAGREE at outer step {places}: their log or state digests differ"
        if not self.compared:
            return "no two peers have been seen at the same outer step yet: nothing to compare"
        plural = "s" if self.compared > 1 else ""
        return f"all log and state digests agree ({self.compared} outer step{plural} compared)"
