"""What the members of an attempt say has come of it, as its leader hears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from peers.protocol.messages import Complete, Prepared


class Tally:
    """Of one attempt."""

    def __init__(self) -> None:
        self.complete: dict[str, Complete] = {}
        """Who has signed what it says."""
        self._said: dict[str, Prepared | Complete] = {}

    def hear(self, sender: str, said: Prepared | Complete) -> bool:
        """Take in what a member says. Returns whether it is its first word."""
        is_first = sender not in self._said
        if isinstance(said, Complete):
            self.complete[sender] = said
        if isinstance(said, Complete) or sender not in self.complete:
            self._said[sender] = said
        return is_first

    def is_complete(self, members: Collection[str]) -> bool:
        """Return whether all members have signed."""
        return len(self.complete) >= len(members)

    def differing(self, members: Collection[str]) -> list[str]:
        """Return those who say something else than most do, once all have spoken."""
        if len(self._said) < len(members):
            return []
        (usual, _), *_ = Counter(said.outcome for said in self._said.values()).most_common(1)
        return [peer for peer, said in self._said.items() if said.outcome != usual]

    def unlike(self, member: str) -> list[str] | None:
        """Return those who say something else than this member; None: it says nothing itself."""
        if member not in self._said:
            return None
        mine = self._said[member].outcome
        return [peer for peer, said in self._said.items() if said.outcome != mine]
