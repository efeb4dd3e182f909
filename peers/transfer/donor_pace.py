"""How fast each donor gives: how long it may still take, and when it is too slow to be waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from peers.network.channel import LONGEST_HELD

LEAST = 60.0  # seconds that a donor has for what it was asked, however fast others are: it may be in a round
MOST = LONGEST_HELD  # seconds after which it is given up, however slow all are
SLOWER = 8  # times as slow as the others on average is too slow
UNKNOWN = 10.0  # seconds that a donor needs, as long as it has given nothing


@dataclass(frozen=True)
class Request:
    """Something that a donor was asked for."""

    donor: str
    size: int  # bytes
    at: float  # seconds
    given_then: Counter[str]


@dataclass
class DonorPace:
    """What donors have given. `at_once` is how many requests each answers beside one another."""

    at_once: int
    given: Counter[str] = field(default_factory=Counter)
    """Bytes by donor."""
    _seconds_per_byte: dict[str, float] = field(default_factory=dict)

    def ask(self, donor: str, size: int, now: float) -> Request:
        return Request(donor, size, now, self.given.copy())

    def answered(self, request: Request, now: float) -> None:
        """A donor has given what it was asked for."""
        latest = (now - request.at) / max(1, request.size)
        known = self._seconds_per_byte.get(request.donor, latest)
        self._seconds_per_byte[request.donor] = (known + latest) / 2

    def seconds(self, donor: str, size: int) -> float:
        """Return how long a donor takes for so many bytes, as far as it is known."""
        return size * self._seconds_per_byte[donor] if donor in self._seconds_per_byte else UNKNOWN

    def seconds_left(self, request: Request, now: float) -> float:
        """Return how long a donor will probably still take.

        One that has taken twice as long as it does usually, or has given nothing so far, will take as long again.
        """
        elapsed, usual = now - request.at, request.size * self._seconds_per_byte.get(request.donor, 0.0)
        return elapsed if elapsed > 2 * usual else max(0.0, usual - elapsed)

    def is_too_slow(self, request: Request, now: float) -> bool:
        """Return whether the others have given several times as much meanwhile.

        What they gave before does not count: when a round is under way, all give little.
        """
        if now - request.at < LEAST:
            return False
        meanwhile = self.given - request.given_then
        meanwhile.pop(request.donor, None)
        return bool(meanwhile) and meanwhile.total() >= SLOWER * self.at_once * request.size * len(meanwhile)
