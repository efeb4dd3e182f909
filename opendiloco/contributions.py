"""What each peer has contributed to a run, by the log that this machine has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from peers.log.folder import RunLog

READ_AT_ONCE = 1000  # headers


@dataclass(frozen=True)
class Contribution:
    """One peer's: tokens, and outer steps that have some of them; its `rank` of so many `peers`, 1 the largest."""

    tokens: int
    rounds: int
    share: float
    rank: int
    peers: int


class Contributions:
    """Adds up the log's entries, each once. A log that begins in the middle of the run has those since."""

    def __init__(self) -> None:
        self._tokens = Counter[str]()
        self._rounds = Counter[str]()
        self._next = 0

    def read(self, log: RunLog) -> None:
        """Take in the entries that are new. A log that others' has replaced is read anew."""
        if log.next_index < self._next:
            self._tokens, self._rounds, self._next = Counter(), Counter(), 0
        while (first := max(self._next, log.first)) < log.next_index:
            self._next = min(first + READ_AT_ONCE, log.next_index)
            for header in log.headers(first, self._next):
                for member in header.roster:
                    self._tokens[member.peer] += member.tokens
                    self._rounds[member.peer] += member.tokens > 0

    def of(self, peer: str) -> Contribution | None:
        """Return what a peer has contributed; None where nobody has."""
        whole = self._tokens.total()
        if not whole:
            return None
        own = self._tokens[peer]
        rank = 1 + sum(tokens > own for tokens in self._tokens.values())
        return Contribution(own, self._rounds[peer], own / whole, rank, len({*self._tokens, peer}))
