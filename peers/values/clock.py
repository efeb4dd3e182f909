"""The clock of a peer: seconds since some moment, also those in which the machine slept."""

from __future__ import annotations

import time


def now() -> float:
    """Return the time. A laptop's lid stops the monotonic clock, while for all others time goes on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
