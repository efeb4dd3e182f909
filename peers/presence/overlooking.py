"""Leaders that leave out a voter that is ready, entry after entry.

Whoever holds a round up may hold up its leader alone, so that nobody else sees why it is left out. But one that leaves
out the same peer for long lets others lead: one of them may find no fault with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

OFTEN = 16
"""Entries without a peer, though it was ready, after which it is another one's turn. Each leader has to find out for
itself who holds rounds up, which costs an entry's time."""


class Overlooking:
    """What one peer remembers of it for as long as it runs."""

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()  # by leader, and who was left out
        self._turns: Counter[str] = Counter()

    def entry_made(self, leader: str, ready: Collection[str], members: Collection[str]) -> None:
        """Take note of an entry. `ready` are voters that could have been in it, `members` those that were."""
        for pair in list(self._times):
            if pair[1] not in ready or (pair[0] == leader and pair[1] in members):
                del self._times[pair]
        overlooked = [(leader, peer) for peer in ready if peer not in members and peer != leader]
        self._times.update(overlooked)
        if any(self._times[pair] >= OFTEN for pair in overlooked):
            self._turns[leader] += 1
            for pair in overlooked:
                del self._times[pair]

    @property
    def turns(self) -> frozenset[tuple[str, int]]:
        """How often it was another one's turn after that of a peer, for each of which it ever was."""
        return frozenset(self._turns.items())

    def order(self, members: Sequence[str]) -> Sequence[str]:
        """Return the order in which these lead: whoever overlooked others more often comes later."""
        return sorted(members, key=lambda peer: self._turns[peer]) if self._turns else members
