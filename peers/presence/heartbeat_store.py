"""The newest signed heartbeat of each peer of a run, and when the peer itself was last heard.

A heartbeat is taken in only if it is newer than the one before it, and of our time. What a peer says comes from itself,
or lies where it left it, in the DHT; heartbeats that others hand out are its words too, and no signs of life (R20).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peers.presence.heartbeat import Heartbeat, PeerState

PEERS_LIMIT = 10_000  # that are remembered at most
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours
HEARTBEATS_AT_ONCE = 4.0  # signed ones that a peer may send one after another
SECONDS_PER_HEARTBEAT = 0.5  # in the long run
HEARTBEAT_BYTES = 1024  # that count as one heartbeat; a larger one counts as several
NEVER = -float("inf")


@dataclass(eq=False)
class Kept:
    """The last words of one peer. Times are on our clock."""

    heartbeat: Heartbeat
    """The newest signed one."""
    signed: bytes
    newest: Heartbeat
    """The same, with what its beats have said since."""
    taken_at: float
    """When the signed one came."""
    first_at: float
    """When anything was first known of the peer."""
    heard_at: float = NEVER
    """When the peer itself was last heard."""
    allowance: float = HEARTBEATS_AT_ONCE
    """Signed heartbeats that the peer may still send at once, as of `allowed_at`."""
    allowed_at: float = NEVER

    def is_fresh(self, now: float) -> bool:
        """Return whether anything was learned of the peer within its heartbeats' lifetime."""
        return now - max(self.taken_at, self.heard_at) <= self.heartbeat.lifetime

    def is_heard(self, now: float) -> bool:
        """Return whether the peer itself was heard within half of that, which is the run's expiry."""
        return now - self.heard_at <= self.heartbeat.lifetime / 2

    def is_present(self, now: float) -> bool:
        """Return whether the peer seems to be there, so that it can be told something."""
        return self.is_fresh(now) and self.heartbeat.state is not PeerState.LEAVING

    def may_send(self, now: float) -> bool:
        """Return whether the peer may send a signed heartbeat now, however large."""
        return self._left(now) >= 1.0

    def _left(self, now: float) -> float:
        since = max(0.0, now - self.allowed_at)
        return min(HEARTBEATS_AT_ONCE, self.allowance + since / SECONDS_PER_HEARTBEAT)

    def spend(self, size: int, now: float) -> None:
        """Count a signed heartbeat of so many bytes."""
        cost = max(1.0, size / HEARTBEAT_BYTES)
        self.allowance, self.allowed_at = max(0.0, self._left(now) - cost), now


class HeartbeatStore:
    """The words of all peers of one run, the one known for longest first. `now` is our clock, `wall` everybody's."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, peer: str) -> Kept | None:
        return self._kept.get(peer)

    def all(self) -> list[Kept]:
        """Return all that is remembered, of peers that are long gone, too."""
        return list(self._kept.values())

    def fresh(self, now: float) -> Iterator[Kept]:
        """Return the peers of which anything was learned lately."""
        return (kept for kept in self._kept.values() if kept.is_fresh(now))

    def take(self, heartbeat: Heartbeat, signed: bytes, now: float, wall: float) -> bool:
        """Take in a signed heartbeat, which has been verified. Returns whether it is newer than the last one."""
        kept = self._kept.get(heartbeat.peer)
        if not _is_of_our_time(heartbeat.sequence, heartbeat.lifetime, wall):
            return False
        if kept is None:
            if not self._has_room(wall):
                return False
            self._kept[heartbeat.peer] = Kept(heartbeat, signed, heartbeat, taken_at=now, first_at=now)
            return True
        if heartbeat.sequence <= kept.heartbeat.sequence:
            return False
        last = kept.newest.sequence
        if heartbeat.sequence < last:
            if heartbeat.incarnation != kept.newest.incarnation:
                return False
            kept.newest = heartbeat.model_copy(update={"sequence": last})
        else:
            kept.newest = heartbeat
        kept.heartbeat, kept.signed, kept.taken_at = heartbeat, signed, now
        return True

    def heard(self, peer: str, now: float) -> None:
        """Note that a peer itself was heard."""
        if peer in self._kept:
            self._kept[peer].heard_at = now

    def drop(self, peer: str) -> None:
        """Forget a peer at once."""
        self._kept.pop(peer, None)

    # Bounds ---------------------------------------------------------------------------------------------------
    def _has_room(self, wall: float) -> bool:
        """Return whether one more peer can be remembered, if need be in the place of others that are long gone."""
        if len(self._kept) >= PEERS_LIMIT:
            self.forget(wall)
        return len(self._kept) < PEERS_LIMIT

    def forget(self, wall: float) -> None:
        """Drop what is too old to be taken in again. It is kept for so long, so that it is not taken for news."""
        for kept in self.all():
            if not _is_of_our_time(kept.newest.sequence, kept.heartbeat.lifetime, wall):
                del self._kept[kept.heartbeat.peer]


def is_from_the_future(sequence: int, wall: float) -> bool:
    """Return whether a heartbeat or beat claims to be later than clocks differ."""
    return sequence / 1000 - CLOCK_TOLERANCE > wall


def _is_of_our_time(sequence: int, lifetime: float, wall: float) -> bool:
    """Return whether it is neither from the future, nor so old that its peer may be gone for long."""
    return not is_from_the_future(sequence, wall) and wall <= sequence / 1000 + lifetime + CLOCK_TOLERANCE
