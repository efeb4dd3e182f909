"""Whether this machine has slept: the one clock that goes on meanwhile has jumped ahead of the other."""

from __future__ import annotations

import time

NOTICED = 2.0
"""Seconds. Two clocks that are read one after the other differ a little."""


def awake() -> float:
    """Return seconds that do not count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def since_start() -> float:
    """Return seconds since the machine was started, also those in which it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SleepWatch:
    """Compares the clocks, now and then."""

    def __init__(self) -> None:
        self._asleep: float | None = None

    def tick(self, awake: float, since_start: float) -> float:
        """Return for how many seconds the machine has slept since the tick before; 0: it has not."""
        asleep = since_start - awake
        slept = 0.0 if self._asleep is None else asleep - self._asleep
        self._asleep = asleep
        return slept if slept >= NOTICED else 0.0
