"""What must hold of a whole swarm, checked from outside after every step of a simulation."""

from __future__ import annotations

from peers.log.header import Header
from peers.log.state import LogState


class InvariantError(AssertionError):
    """What must never happen has happened; the message names it, the trace leads there."""


class History:
    """Every entry and every state that any peer of a swarm has had.

    `one_child`: whether a second entry at a position is an error, as it is until a partition grace has run out.
    """

    def __init__(self, one_child: bool = True) -> None:
        self.one_child = one_child
        self.states: dict[tuple[bytes, tuple[bytes, ...]], bytes] = {}
        self.children: dict[tuple[bytes, int], bytes] = {}
        self.trained: dict[bytes, set[int]] = {}
        self.longest = 0
        self.smallest_roster = 0

    def record(self, header: Header, log: LogState) -> None:
        """An entry is applied, which leads to this log. One child per place, and no sample twice in a lineage.

        Raises: InvariantError.
        """
        known = self.children.setdefault((header.previous, header.fragment), header.digest)
        if self.one_child and known != header.digest:
            raise InvariantError(f"two entries at index {header.index}: {known.hex()[:8]}, {header.digest.hex()[:8]}")
        head, closing = log.position.head, log.last
        if log.made or closing is None or head in self.trained:
            return  # in the midst of a cycle, or another peer was here before: it is checked
        before = self.trained.get(closing.previous, set())
        whole = [member for member in closing.roster if not member.missed]
        samples = [n for member in whole for piece in member.samples for n in range(piece.start, piece.stop)]
        if len(set(samples)) != len(samples) or before & set(samples):
            raise InvariantError(f"entry {closing.index} trains a sample twice")
        self.trained[head] = before | set(samples)
        self.longest = max(self.longest, closing.index + 1)
        self.smallest_roster = min(self.smallest_roster or len(closing.roster), len(closing.roster))

    def check(self, peer: str, log: LogState, state: bytes) -> None:
        """A peer is at the end of this log with a state. One state per place. Raises: InvariantError."""
        place = log.position.head, tuple(header.digest for header in log.made)
        if self.states.setdefault(place, state) != state:
            raise InvariantError(f"{peer} has another state at {log.position}")
