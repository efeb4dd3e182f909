"""When what this peer trains could not count: it is told so, and does not train in vain.

Too slow: not even the smallest share of a lease is done before it is too old. The peer sees that itself, by the speeds
in heartbeats, and stops when a lease was in vain. Cut off: the peer whom all take for their leader can't be reached; or
the leader says that rounds go on without us. In each case the peer waits without a lease, and looks again when links or
speeds change, and after some time.
"""

from __future__ import annotations

import math

from peers.presence.heartbeat import PeerState
from peers.presence.membership import PARTICIPATING
from peers.protocol.core import Hindrance, PeerCore
from peers.protocol.events import Trouble
from peers.protocol.states import State

TOLD_AFTER = 12.0  # seconds: links come and go, and the first inner steps are slow
LOOK_AGAIN = 60.0  # seconds, where asking costs one message
TRAIN_AGAIN = 1800.0  # seconds, where finding out costs a lease that may be in vain
REACH_REMEDY = "let the router forward this peer's data port, or use a bootstrap node that relays"


class Troubled(PeerCore):
    """A peer that knows when its work is in vain."""

    def _look_for_trouble(self) -> None:
        """Tell what keeps our work from counting, once it has lasted, and stop what would be in vain."""
        found = self._find_trouble()
        if found is None or self._hindrance is None or found.kind != self._hindrance.kind:
            self._hindered_since = self._now
        self._hindrance = found
        has_lasted = self._now - self._hindered_since >= TOLD_AFTER or bool(self._excluded)
        told = found if has_lasted else None
        self._is_aside = told is not None and told.is_vain
        if self._is_aside and self.state in (State.TRAINING, State.READY) and self._held is None:
            self._stand_aside()
        if not self._is_aside:
            self._aside_since = self._now
        elif self._now - self._aside_since >= TRAIN_AGAIN:
            self._leases_in_vain = 0
        self._tell(told)

    def _find_trouble(self) -> Hindrance | None:
        if self._excluded:
            return Hindrance("left out", f"{self._excluded}; {REACH_REMEDY}", is_vain=True)
        return self._unreachable() or self._too_slow()

    def _unreachable(self) -> Hindrance | None:
        """Whether we can talk to nobody, or not to the one whom all others take for their leader."""
        unreached = self.unreached
        others = {peer for peer, beat in self._live().items() if beat.state is not PeerState.ARCHIVING}
        if not unreached & others:
            return None
        leader = self._elect()
        was_cut_off = (
            self._hindrance is not None and self._hindrance.kind == "cut off"
        )  # being behind is no cure for it
        if leader in unreached and (self._is_aside or was_cut_off or self._furthest() is None):
            return Hindrance("cut off", f"the leader {leader} can't be reached; {REACH_REMEDY}", is_vain=True)
        if others <= unreached:
            reason = "no other peer can be reached, and what is trained here may count nothing in the end"
            return Hindrance("alone", f"{reason}; {REACH_REMEDY}", is_vain=False)
        return None

    def _too_slow(self) -> Hindrance | None:
        """Whether the smallest lease takes us longer than a lease stays ours while the fastest peers go on."""
        fastest = max((beat.speed for beat in self._live().values() if beat.state in PARTICIPATING), default=0.0)
        whole = self.settings.inner_steps
        least = math.ceil(self.settings.smallest_share * whole) / whole
        if not self.speed or self.speed * (1 + self.settings.staleness) >= least * fastest:
            return None
        reason = (
            f"this peer trains {self.speed:.3g} tokens a second, the fastest {fastest:.3g}: not even the smallest lease"
            f" is done in time; use a faster device, or a run with a smaller rounds.smallest_share"
        )
        return Hindrance("too slow", reason, is_vain=self._leases_in_vain > 0)

    def _furthest(self) -> str | None:
        raise NotImplementedError

    def _stand_aside(self) -> None:
        """Stop training, and wait without a lease. What we promised at this position is forgotten."""
        if self.state is State.READY:
            self._joined_at = self.log.position.head
        self._drop_work()
        self._enter(State.JOINING)

    def _tell(self, told: Hindrance | None) -> None:
        kind = told.kind if told else None
        if kind != self._told_kind:
            self._told_kind = kind
            self.trouble = told.reason if told else ""
            self._emit(Trouble(self.trouble))

    def _left_out(self, reason: str) -> None:
        """The leader goes on without us."""
        if self.state in (State.JOINING, State.READY) and self._held is None:
            self._excluded = reason
            self._ask_at = self._now + LOOK_AGAIN
            self._look_for_trouble()

    def _links_changed(self) -> None:
        self._ask_at = self._now
        self._look_for_trouble()

    def _taken_in(self) -> None:
        """The leader has given us a lease."""
        if self._excluded:
            self._excluded = ""
            self._look_for_trouble()

    @property
    def _may_ask(self) -> bool:
        """Whether to ask for a lease: not while it would be in vain, but the leader may think better of it."""
        return not self._is_aside or (bool(self._excluded) and self._now >= self._ask_at)
