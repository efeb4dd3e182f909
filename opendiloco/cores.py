"""The number of CPU cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

THREADS_OF_CORE = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
CPU_LIMIT = "/sys/fs/cgroup/cpu.max"


def usable_cores() -> int:
    """Return the number of CPU cores on which this process may run, at most as many as its container may use.

    Threads that share a core count once, because both together compute no faster than one.
    """
    cores = {_read(THREADS_OF_CORE.format(number)) or str(number) for number in os.sched_getaffinity(0)}
    quota, _, period = (_read(CPU_LIMIT) or "max").partition(" ")
    return max(1, min(len(cores), len(cores) if quota == "max" else int(quota) // int(period)))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
