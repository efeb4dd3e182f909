"""What must hold of a whole swarm, checked from outside after every step of a simulation."""

from __future__ import annotations

from peers.log.header import Header, Position


class InvariantError(AssertionError):
    """What must never happen has happened; the message names it, the trace leads there."""


class History:
    """Every entry and every state that any peer of a swarm has had.

    `one_child`: whether a second entry at a position is an error, as it is until a partition grace has run out.
    """

    def __init__(self, one_child: bool = True) -> None:
        self.one_child = one_child
        self.states: dict[bytes, bytes] = {}
        self.children: dict[bytes, bytes] = {}
        self.trained: dict[bytes, set[int]] = {}
        self.longest = 0
        self.smallest_roster = 0

    def record(self, header: Header) -> None:
        """An entry is applied. One child per position, and no sample twice in a lineage. Raises: InvariantError."""
        known = self.children.setdefault(header.previous, header.digest)
        if self.one_child and known != header.digest:
            raise InvariantError(f"two entries at index {header.index}: {known.hex()[:8]}, {header.digest.hex()[:8]}")
        if header.digest in self.trained:
            return  # another peer applied it before: it is checked
        before = self.trained.get(header.previous, set())
        whole = [member for member in header.roster if not member.missed]
        samples = [n for member in whole for piece in member.samples for n in range(piece.start, piece.stop)]
        if len(set(samples)) != len(samples) or before & set(samples):
            raise InvariantError(f"entry {header.index} trains a sample twice")
        self.trained[header.digest] = before | set(samples)
        self.longest = max(self.longest, header.index + 1)
        self.smallest_roster = min(self.smallest_roster or len(header.roster), len(header.roster))

    def check(self, peer: str, position: Position, state: bytes) -> None:
        """A peer is at a position with a state. One state per position. Raises: InvariantError."""
        if self.states.setdefault(position.head, state) != state:
            raise InvariantError(f"{peer} has another state at {position}")
