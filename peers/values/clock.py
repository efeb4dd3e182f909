"""The clock of a peer: seconds since some moment, also those in which the machine slept; and what it numbers."""

from __future__ import annotations

import time


def now() -> float:
    """Return the time. A laptop's lid stops the monotonic clock, while for all others time goes on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def next_sequence(*last: int) -> int:
    """Return the sequence of a peer's next heartbeat: milliseconds since the epoch, but above each of the `last` ones
    of its key, also where the clock was set back or two come within a millisecond."""
    return max(time.time_ns() // 1_000_000, *(one + 1 for one in last))
