"""What is true of this machine now, as far as an owner's conditions ask for it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import psutil

from opendiloco.owner.sensors import GpuState, is_on_battery, read_gpus, read_sensors

PLAUSIBLE = range(1, 126)
"""Degrees Celsius. Sensors that are not connected say other numbers."""


@dataclass(frozen=True)
class Facts:
    """One look at a machine. `others` is the share of its cores that programs other than ours use, 0 to 1.

    `celsius` has the hottest processor or GPU; None: no sensor can be read. `programs` are the names of all processes.
    """

    now: datetime
    on_battery: bool = False
    others: float = 0.0
    celsius: float | None = None
    programs: frozenset[str] = frozenset()


class Observer:
    """Looks at this machine; at its heat only if somebody asks, since that wakes GPUs. What programs use is told as of
    the look before."""

    def __init__(self, with_heat: bool = True) -> None:
        self._with_heat = with_heat
        self._before: tuple[float, float, float] | None = None

    def look(self) -> Facts:
        """Return the facts. It takes some tens of milliseconds."""
        names = (process.info["name"] for process in psutil.process_iter(["name"]))
        return Facts(
            now=datetime.now(),
            on_battery=is_on_battery(),
            others=self._share_of_others(),
            celsius=_hottest_of(read_gpus()) if self._with_heat else None,
            programs=frozenset(name for name in names if name),
        )

    def _share_of_others(self) -> float:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        now, ours = time.monotonic(), seconds_of_family()
        before, self._before = self._before, (now, idle, ours)
        if before is None:
            return 0.0
        seconds = (now - before[0]) * (psutil.cpu_count() or 1)
        return share_of_others(seconds, idle - before[1], max(0.0, ours - before[2]))


def machine_line() -> str:
    """Return what can be read of this machine's temperature and its GPUs' power, in words; it may be nothing."""
    gpus = read_gpus()
    celsius = _hottest_of(gpus)
    said = [] if celsius is None else [f"{celsius:.0f} °C"]
    watts, limits = ([getattr(gpu, name) or 0.0 for gpu in gpus] for name in ("watts", "limit"))
    said += [f"GPUs {sum(watts):.0f} of {sum(limits):.0f} W"] if any(watts) else []
    return ", ".join(said)


def share_of_others(seconds: float, idle: float, own: float) -> float:
    """Return the share of so many seconds of all cores that was neither idle nor ours."""
    return min(max(0.0, seconds - idle - own) / seconds, 1.0) if seconds > 0 else 0.0


def hottest(processors: Iterable[float], gpus: Iterable[float]) -> float | None:
    """Return the highest temperature that can be one."""
    return max((value for value in (*processors, *gpus) if int(value) in PLAUSIBLE), default=None)


def seconds_of_family() -> float:
    """Return the processor time that this process and its descendants have taken, also those that have ended: whoever
    waits for a child's end has its time."""
    found = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def _hottest_of(gpus: Iterable[GpuState]) -> float | None:
    """Return the temperature of the hottest processor or GPU."""
    processors = [sensor.celsius for sensor in read_sensors() if sensor.is_of_processor]
    return hottest(processors, [gpu.celsius for gpu in gpus if gpu.celsius is not None])
