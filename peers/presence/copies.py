"""Other machines that speak with our key: a copied disk or container image has the same identity file."""

from __future__ import annotations

from dataclasses import dataclass

from peers.presence.heartbeat import Heartbeat, PeerState

LIVES_LIMIT = 8  # of our key that are remembered
SILENCE_SHARE = 0.6
"""Of a heartbeat's lifetime, without a newer one, after which a life is over: signed ones come after four tenths of it,
and two tenths later they were heard."""


@dataclass
class _Life:
    """One start of this key that we did not make. `baseline` is the latest sequence that may have been on its way when
    the life was first heard."""

    first_at: float
    baseline: int
    newest: Heartbeat
    advanced_at: float

    def may_go_on(self, now: float) -> bool:
        """Return whether it is too early to say that this life is over."""
        return self.newest.state is not PeerState.LEAVING and now - self.advanced_at <= _silence(self.newest)


class Copies:
    """The lives of our own key that are not ours, as far as they were heard.

    A former life of ours left heartbeats behind, with others and in the DHT. They come from one clock and end with one
    that is the last, whatever that clock says: so a life is over when nothing newer comes for a while. It goes on when
    newer ones come that are further apart than anything that was still on its way can be. No clock is compared with
    another.
    """

    def __init__(self) -> None:
        self.ours: tuple[int, int] | None = None
        """The life that we speak as; None: we have said nothing."""
        self._lives: dict[tuple[int, int], _Life] = {}

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a heartbeat with our own signature."""
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
        """Return the latest sequence in which our key was heard; 0: in none. What we say must come after it."""
        return max((life.newest.sequence for life in self._lives.values()), default=0)

    def may_live(self, now: float) -> bool:
        """Return whether it is too early to say that all other lives of this key are over."""
        return any(life.may_go_on(now) for life in self._lives.values())

    def living(self, now: float) -> Heartbeat | None:
        """Return what another machine with our key said last, if there certainly is one."""
        for life in self._lives.values():
            is_new = life.newest.sequence - life.baseline > 1000 * life.newest.lifetime
            if is_new and life.may_go_on(now):
                return life.newest
        return None


def _silence(heartbeat: Heartbeat) -> float:
    """Return the seconds without a newer heartbeat after which a life is over."""
    return SILENCE_SHARE * heartbeat.lifetime
