"""Limits on the bytes or seconds that a peer spends on each sender of messages, so that no sender overloads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SENDERS_LIMIT = 1024  # maximum number of senders with a stored limit; a further one replaces the longest unused
STRANGER = "stranger"
"""The one sender that stands for all strangers where they share an allowance, since identities cost nothing."""


class Allowance:
    """Bytes or seconds that may be spent: `burst` at once, and `rate` a second in the long run."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst = burst
        self._rate = rate
        self._left = burst
        self._at = 0.0

    def has_some(self, now: float) -> bool:
        """Return True if some of the allowance is left at the time `now`, even if the next amount spent is larger."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left > 0.0

    def spend(self, amount: float) -> None:
        self._left -= amount


class Allowances:
    """The bytes, seconds or messages that each sender may use up at once and per second. A larger limit holds for all
    senders together, because a peer can invent senders."""

    def __init__(self, burst: float, rate: float, together: int) -> None:
        """Allow each sender `burst` at once and `rate` a second, and all senders `together` times as much."""
        self._burst = burst
        self._rate = rate
        self._all = Allowance(together * burst, together * rate)
        self._senders: dict[str, Allowance] = {}  # each sender's own allowance; the one used last is at the end

    def has_some(self, sender: str, now: float) -> bool:
        """Return True if something is left of both the sender's allowance and that of all senders together."""
        allowance = self._senders.pop(sender, None)
        if allowance is None:
            allowance = Allowance(self._burst, self._rate)
            if len(self._senders) >= SENDERS_LIMIT:
                del self._senders[next(iter(self._senders))]
        self._senders[sender] = allowance
        return allowance.has_some(now) and self._all.has_some(now)

    def spend(self, sender: str, amount: float) -> None:
        """Subtract bytes, seconds or a count from the sender's allowance, and from that of all senders together. Either
        may fall below zero."""
        self._all.spend(amount)
        if sender in self._senders:
            self._senders[sender].spend(amount)

    @contextmanager
    def spending(self, sender: str, clock: Callable[[], float]) -> Iterator[None]:
        """Subtract from the sender's allowance the seconds for which the body of the `with` statement runs."""
        began = clock()
        try:
            yield
        finally:
            self.spend(sender, clock() - began)
