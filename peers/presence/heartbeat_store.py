"""The newest signed heartbeat of each peer of a run, and the time at which the peer itself was last heard.

A heartbeat is stored only if it is newer than the one before it, and its time is plausible. A peer is heard when a
message or a new heartbeat comes from the peer itself, or from its record in the DHT. Heartbeats that other peers hand
out are stored, too, but are no signs of life (R20).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peers.presence.heartbeat import Heartbeat, PeerState

PEERS_LIMIT = 10_000  # maximum number of peers that are remembered
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours
HEARTBEATS_AT_ONCE = 4.0  # maximum number of signed heartbeats that a peer may send without a pause
SECONDS_PER_HEARTBEAT = 0.5  # seconds after which a peer may send one more signed heartbeat
HEARTBEAT_BYTES = 1024  # a heartbeat N times as large counts as N of HEARTBEATS_AT_ONCE, a smaller one as 1
NEVER = -float("inf")


@dataclass(eq=False)
class Kept:
    """The last heartbeats and beats of one peer, and the number of heartbeats that it may still send at once. `signed`
    has the bytes and the signature of `heartbeat`. Times are in seconds on our clock."""

    heartbeat: Heartbeat
    """The newest signed heartbeat."""
    signed: bytes
    newest: Heartbeat
    """The newest signed heartbeat, updated by the beats since then."""
    taken_at: float
    """The time at which the signed heartbeat came."""
    first_at: float
    """The time at which the peer first became known."""
    heard_at: float = NEVER
    """The last time at which the peer itself was heard."""
    allowance: float = HEARTBEATS_AT_ONCE
    """Signed heartbeats that the peer may still send at once, as of `allowed_at`."""
    allowed_at: float = NEVER

    def is_fresh(self, now: float) -> bool:
        """Return True if the peer was heard, or a heartbeat of it received, within the lifetime of its heartbeats."""
        return now - max(self.taken_at, self.heard_at) <= self.heartbeat.lifetime

    def is_heard(self, now: float) -> bool:
        """Return True if the peer itself was heard within the run's expiry, half of its heartbeats' lifetime."""
        return now - self.heard_at <= self.heartbeat.lifetime / 2

    def is_present(self, now: float) -> bool:
        """Return True if the peer is fresh and not leaving, so that calls to it make sense."""
        return self.is_fresh(now) and self.heartbeat.state is not PeerState.LEAVING

    def may_send(self, now: float) -> bool:
        """Return True if the peer's allowance permits one signed heartbeat now, of any size."""
        return self._left(now) >= 1.0

    def _left(self, now: float) -> float:
        since = max(0.0, now - self.allowed_at)
        return min(HEARTBEATS_AT_ONCE, self.allowance + since / SECONDS_PER_HEARTBEAT)

    def spend(self, size: int, now: float) -> None:
        """Subtract a signed heartbeat of `size` bytes from the peer's allowance."""
        cost = max(1.0, size / HEARTBEAT_BYTES)
        self.allowance, self.allowed_at = max(0.0, self._left(now) - cost), now


class HeartbeatStore:
    """The last heartbeats and beats of all peers of one run. The peer known for longest is the first.

    `now` is on this peer's own clock, `wall` is the common wall clock.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, peer: str) -> Kept | None:
        return self._kept.get(peer)

    def all(self) -> list[Kept]:
        """Return the records of all remembered peers, also of peers that are gone."""
        return list(self._kept.values())

    def fresh(self, now: float) -> Iterator[Kept]:
        """Return the records of all peers that were heard, or whose signed heartbeat was received, within the lifetime
        of their heartbeats."""
        return (kept for kept in self._kept.values() if kept.is_fresh(now))

    def take(self, heartbeat: Heartbeat, signed: bytes, now: float, wall: float) -> bool:
        """Store a verified signed heartbeat if it is newer than the peer's last one. Return True if it was stored."""
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
        """Record that a message of the peer itself was received at the time `now`."""
        if peer in self._kept:
            self._kept[peer].heard_at = now

    def drop(self, peer: str) -> None:
        """Delete a peer's record, even if its heartbeat has not expired."""
        self._kept.pop(peer, None)

    # Limits ---------------------------------------------------------------------------------------------------
    def _has_room(self, wall: float) -> bool:
        """Return True if one more peer can be remembered. If necessary, drop outdated peers first."""
        if len(self._kept) >= PEERS_LIMIT:
            self.forget(wall)
        return len(self._kept) < PEERS_LIMIT

    def forget(self, wall: float) -> None:
        """Drop peers whose newest heartbeat is outdated. If dropped earlier, a copy of that heartbeat would seem
        new."""
        for kept in self.all():
            if not _is_of_our_time(kept.newest.sequence, kept.heartbeat.lifetime, wall):
                del self._kept[kept.heartbeat.peer]


def is_from_the_future(sequence: int, wall: float) -> bool:
    """Return True if a heartbeat's or beat's time is more than CLOCK_TOLERANCE seconds after `wall`."""
    return sequence / 1000 - CLOCK_TOLERANCE > wall


def _is_of_our_time(sequence: int, lifetime: float, wall: float) -> bool:
    """Return True if a heartbeat is neither from the future, nor expired by more than CLOCK_TOLERANCE seconds."""
    return not is_from_the_future(sequence, wall) and wall <= sequence / 1000 + lifetime + CLOCK_TOLERANCE
