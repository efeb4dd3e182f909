"""Allowances of bytes or seconds for each sender, so that none can make a peer listen or send without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SENDERS_LIMIT = 1024  # that are told apart
STRANGER = "stranger"
"""The one sender that all strangers are, where they are to share an allowance: names are made up for nothing."""


class Allowance:
    """Bytes or seconds that may be spent: `burst` at once, and `rate` a second in the long run."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst = burst
        self._rate = rate
        self._left = burst
        self._at = 0.0

    def has_some(self, now: float) -> bool:
        """Return whether anything may be spent now. What is spent may exceed what is left."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left > 0.0

    def spend(self, amount: float) -> None:
        self._left -= amount


class Allowances:
    """Each sender has an allowance, and all together have one that is `together` times as large: identities are made up
    for nothing."""

    def __init__(self, burst: float, rate: float, together: int) -> None:
        self._burst = burst
        self._rate = rate
        self._all = Allowance(together * burst, together * rate)
        self._senders: dict[str, Allowance] = {}  # the one used last at the end

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
        """Take from what a sender has left, and from what all have."""
        self._all.spend(amount)
        if sender in self._senders:
            self._senders[sender].spend(amount)

    @contextmanager
    def spending(self, sender: str, clock: Callable[[], float]) -> Iterator[None]:
        """Spend the seconds that the body takes by this clock."""
        began = clock()
        try:
            yield
        finally:
            self.spend(sender, clock() - began)
