"""Other machines that use our key: a copied disk or container image contains the same identity file."""

from __future__ import annotations

from dataclasses import dataclass

from peers.presence.heartbeat import Heartbeat, PeerState

LIVES_LIMIT = 8  # maximum number of lives (process starts) with our key that are remembered
SILENCE_SHARE = 0.6
"""Fraction of a heartbeat's lifetime without a newer one, after which a process with our key counts as ended. Signed
heartbeats come after four tenths of the lifetime, and reach us within two tenths."""


@dataclass
class _Life:
    """A life: one start of another process with our key. `baseline` is the sequence of the last heartbeat that may
    already have been sent when we first heard of the life."""

    first_at: float
    baseline: int
    newest: Heartbeat
    advanced_at: float

    def may_go_on(self, now: float) -> bool:
        """Return True if this process, which is not ours but uses our key, may still be running."""
        return self.newest.state is not PeerState.LEAVING and now - self.advanced_at <= _silence(self.newest)


class Copies:
    """The other processes with our key from which a heartbeat was received: on a copied disk, or before a restart. Each
    process is called a life.

    A former life left heartbeats behind, at other peers and in the DHT. They have a last one, so a life is over when no
    newer one comes for a while. A life goes on if newer ones come so much later, by the life's own clock, that they
    cannot have been on their way already. So clocks are never compared with each other.
    """

    def __init__(self) -> None:
        self.ours: tuple[int, int] | None = None
        """The life of this process, as in Heartbeat; None before its first heartbeat."""
        self._lives: dict[tuple[int, int], _Life] = {}

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat that our key has signed, unless this process made it."""
        if heartbeat.life == self.ours:
            return
        life = self._lives.get(heartbeat.life)
        if life is None:
            self._lives[heartbeat.life] = _Life(now, heartbeat.sequence, heartbeat, now)
            if len(self._lives) > LIVES_LIMIT:
                del self._lives[next(iter(self._lives))]
        elif heartbeat.sequence > life.newest.sequence:
            life.newest, life.advanced_at = heartbeat, now
            if now - life.first_at <= _silence(heartbeat):
                life.baseline = heartbeat.sequence

    @property
    def highest(self) -> int:
        """The highest sequence in the heartbeats of other processes with our key; 0 if there are none. The sequence of
        our own heartbeats must be higher."""
        return max((life.newest.sequence for life in self._lives.values()), default=0)

    def may_live(self, now: float) -> bool:
        """Return True if any other process with our key may still be running."""
        return any(life.may_go_on(now) for life in self._lives.values())

    def living(self, now: float) -> Heartbeat | None:
        """Return the last heartbeat of another process with our key that certainly runs; None if there is none."""
        for life in self._lives.values():
            is_new = life.newest.sequence - life.baseline > 1000 * life.newest.lifetime
            if is_new and life.may_go_on(now):
                return life.newest
        return None


def _silence(heartbeat: Heartbeat) -> float:
    """Return the seconds without a newer heartbeat, after which another process with our key counts as ended."""
    return SILENCE_SHARE * heartbeat.lifetime
