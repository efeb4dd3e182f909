"""Allowances of bytes or seconds for each sender, so that none can make a peer listen or send without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SENDERS_LIMIT = 1024  # senders with an allowance of their own
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
        """Return whether anything may be spent now. The amount spent may exceed the amount left."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left > 0.0

    def spend(self, amount: float) -> None:
        self._left -= amount


class Allowances:
    """An allowance for each sender, and one for all together that is `together` times as large, since identities cost
    nothing."""

    def __init__(self, burst: float, rate: float, together: int) -> None:
        self._burst = burst
        self._rate = rate
        self._all = Allowance(together * burst, together * rate)
        self._senders: dict[str, Allowance] = {}  # in the order of their last use

    def has_some(self, sender: str, now: float) -> bool:
        """Return whether a sender may spend anything now."""
        allowance = self._senders.pop(sender, None)
        if allowance is None:
            allowance = Allowance(self._burst, self._rate)
            if len(self._senders) >= SENDERS_LIMIT:
                del self._senders[next(iter(self._senders))]
        self._senders[sender] = allowance
        return allowance.has_some(now) and self._all.has_some(now)

    def spend(self, sender: str, amount: float) -> None:
        """Subtract an amount from the sender's allowance, and from that of all."""
        self._all.spend(amount)
        if sender in self._senders:
            self._senders[sender].spend(amount)

    @contextmanager
    def spending(self, sender: str, clock: Callable[[], float]) -> Iterator[None]:
        """Spend the seconds that the body takes, measured by this clock."""
        began = clock()
        try:
            yield
        finally:
            self.spend(sender, clock() - began)
