"""The peers that one peer beats to: all others of a small swarm; of a large one the voters first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

AUDIENCE_LIMIT = 128  # peers
NEW_AT_ONCE = 64  # of them that are told something first: made-up peers cost a call each
PAUSE_FIRST, PAUSE_LAST = 1.0, 30.0  # seconds for which a peer that did not answer is left alone


class Audience:
    """The peers to beat to, what each of them has of us, and which of them do not answer."""

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._in_turn: tuple[str, ...] = ()
        self._told: dict[str, int] = {}  # the sequence of our signed heartbeat that each has confirmed
        self._under_way: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and for how long

    def choose(self, others: Sequence[str], voters: Collection[str]) -> None:
        """Choose from the others that seem to be there: voters, then those that answer, the one known for longest
        first. A flood of made-up peers comes later or does not answer, so it displaces nobody."""
        chosen = sorted(others, key=lambda peer: (peer not in voters, peer in self._pauses))[:AUDIENCE_LIMIT]
        self._in_turn, self.peers = tuple(chosen), frozenset(chosen)
        present = frozenset(others)
        self._pauses = {peer: pause for peer, pause in self._pauses.items() if peer in present}
        self._told = {peer: sequence for peer, sequence in self._told.items() if peer in self.peers}

    def due(self, now: float) -> list[str]:
        """Return the peers to tell something now: those that are not being told, and not left alone."""
        idle = [peer for peer in self._in_turn if peer not in self._under_way]
        due = [peer for peer in idle if now >= self._pauses.get(peer, (now, 0.0))[0]]
        room = NEW_AT_ONCE - sum(peer not in self._told for peer in self._under_way)
        new = [peer for peer in due if peer not in self._told][: max(0, room)]
        return [peer for peer in due if peer in self._told] + new

    # What each has --------------------------------------------------------------------------------------------
    def has(self, peer: str, sequence: int) -> bool:
        """Return whether a peer has confirmed our signed heartbeat of this sequence."""
        return self._told.get(peer) == sequence

    def begins(self, peer: str) -> None:
        """Note that a peer is being told something."""
        self._under_way.add(peer)

    def answered(self, peer: str, sequence: int | None, wants: bool) -> None:
        """Note that a peer has answered to our signed heartbeat of this sequence, or to a beat (None); it `wants` the
        signed one again if it lacks it."""
        self._under_way.discard(peer)
        self._pauses.pop(peer, None)
        if wants:
            self._told.pop(peer, None)
        elif sequence is not None and peer in self.peers:
            self._told[peer] = sequence

    # Pauses ---------------------------------------------------------------------------------------------------
    def failed(self, peer: str, now: float) -> None:
        """Leave a peer alone for a while, longer each time it does not answer. It may have started anew meanwhile."""
        self._under_way.discard(peer)
        self._told.pop(peer, None)
        length = min(PAUSE_LAST, 2 * self._pauses.get(peer, (0.0, PAUSE_FIRST / 2))[1])
        if peer in self.peers:
            self._pauses[peer] = now + length, length

    def end_pause(self, peer: str) -> None:
        """Note that a peer has spoken to us."""
        self._pauses.pop(peer, None)
