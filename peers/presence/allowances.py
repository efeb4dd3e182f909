"""How many bytes are given to whom in answers, so that nobody can make a peer send without end."""

from __future__ import annotations

from dataclasses import dataclass

SENDERS_LIMIT = 1024  # that are told apart


@dataclass
class _Account:
    left: float
    at: float


class Allowances:
    """Each sender may have `burst` bytes at once, and `rate` bytes a second in the long run."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst = burst
        self._rate = rate
        self._accounts: dict[str, _Account] = {}  # the one used last at the end

    def has_some(self, sender: str, now: float) -> bool:
        """Whether a sender may be given anything now. What it is given may exceed what is left."""
        account = self._accounts.pop(sender, None)
        if account is None:
            account = _Account(self._burst, now)
            if len(self._accounts) >= SENDERS_LIMIT:
                del self._accounts[next(iter(self._accounts))]
        self._accounts[sender] = account
        account.left = min(self._burst, account.left + (now - account.at) * self._rate)
        account.at = now
        return account.left > 0.0

    def spend(self, sender: str, amount: float) -> None:
        """Take what a sender was given from what it has left."""
        if sender in self._accounts:
            self._accounts[sender].left -= amount
