"""Facts about this machine: its temperature, its GPUs' power, its battery, and the processor use of other programs.

psutil reads temperatures, and NVML reads NVIDIA's GPUs. A value that cannot be read is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

POWER_SUPPLIES = Path("/sys/class/power_supply")
PROCESSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz", "x86_pkg_temp"})
"""Linux's names for processor sensors; other sensors belong to disks and network cards."""
PLAUSIBLE = range(1, 126)
"""Degrees Celsius that a working sensor reports; an unconnected one reports other numbers."""


@dataclass(frozen=True)
class Sensor:
    """A sensor's temperature and the hardware's critical limit for it, in degrees Celsius."""

    name: str
    celsius: float
    critical: float | None = None


@dataclass(frozen=True)
class GpuState:
    """A GPU's temperature in degrees Celsius and its power in watts, as its driver reports them; None: not reported."""

    name: str
    celsius: float | None
    watts: float | None = None
    limit: float | None = None
    default_limit: float | None = None
    is_slowed_by_heat: bool = False
    is_slowed_by_power: bool = False


def read_sensors() -> tuple[Sensor, ...]:
    """Return the readings of this machine's temperature sensors. Impossible readings are left out."""
    return tuple(
        Sensor(name, reading.current, reading.critical or None)
        for name, readings in psutil.sensors_temperatures().items()
        for reading in readings
        if -50 < reading.current < 200  # degrees Celsius; an unconnected sensor reports other numbers
    )


def is_on_battery(root: Path = POWER_SUPPLIES) -> bool:
    """Return True if a battery of this machine is discharging. psutil is not used, because it also counts the battery
    of a wireless mouse."""
    return any(
        _text(supply / "type") == "Battery"
        and _text(supply / "scope") != "Device"
        and _text(supply / "status") == "Discharging"
        for supply in root.glob("*")
    )


def read_gpus() -> tuple[GpuState, ...]:
    """Return the state of each NVIDIA GPU, or an empty tuple if there is no driver."""
    import pynvml

    found = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for number in range(pynvml.nvmlDeviceGetCount()):
                found.append(_state_of(pynvml.nvmlDeviceGetHandleByIndex(number)))
        finally:
            pynvml.nvmlShutdown()
    return tuple(found)


def _state_of(gpu: Any) -> GpuState:
    """Return the state of one GPU. Raises: pynvml.NVMLError if the GPU is lost."""
    import pynvml

    def query(function: Callable[..., int], *arguments: int) -> int | None:
        with suppress(pynvml.NVMLError):  # this GPU does not report the value
            return function(gpu, *arguments)
        return None

    def watts(function: Callable[..., int]) -> float | None:
        milliwatts = query(function)
        return None if milliwatts is None else milliwatts / 1000

    slowed = query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    by_heat = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    return GpuState(
        pynvml.nvmlDeviceGetName(gpu),
        celsius=query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        watts=watts(pynvml.nvmlDeviceGetPowerUsage),
        limit=watts(pynvml.nvmlDeviceGetPowerManagementLimit),
        default_limit=watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        is_slowed_by_heat=bool(slowed & by_heat),
        is_slowed_by_power=bool(slowed & pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
    )


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


@dataclass(frozen=True)
class Facts:
    """The facts about this machine at the time `now` on which the conditions for a pause depend.

    `others` is the share of its processor cores that other programs use, 0 to 1. `celsius` is the temperature of the
    hottest processor or GPU, None if no sensor can be read. `programs` are the casefolded names of all processes.
    """

    now: datetime
    on_battery: bool = False
    others: float = 0.0
    celsius: float | None = None
    programs: frozenset[str] = frozenset()


class Observer:
    """Reads the facts about this machine. Temperatures are read only if `with_heat`, because reading them wakes GPUs.
    The processor use of other programs is the mean since the preceding call of `look`."""

    def __init__(self, with_heat: bool = True) -> None:
        self._with_heat = with_heat
        self._before: tuple[float, float, float] | None = None

    def look(self) -> Facts:
        """Read and return the machine's present facts, which takes some tens of milliseconds."""
        names = (process.info["name"] for process in psutil.process_iter(["name"]))
        return Facts(
            now=datetime.now(),
            on_battery=is_on_battery(),
            others=self._share_of_others(),
            celsius=_hottest_of(read_gpus()) if self._with_heat else None,
            programs=frozenset(name.casefold() for name in names if name),
        )

    def _share_of_others(self) -> float:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        now, ours = time.monotonic(), _seconds_of_family()
        before, self._before = self._before, (now, idle, ours)
        if before is None:
            return 0.0
        seconds = (now - before[0]) * (psutil.cpu_count() or 1)
        others = seconds - (idle - before[1]) - max(0.0, ours - before[2])
        return min(max(0.0, others) / seconds, 1.0) if seconds > 0 else 0.0


def machine_line() -> str:
    """Return the temperature of this machine and the power of its GPUs in words; empty if neither can be read."""
    gpus = read_gpus()
    celsius = _hottest_of(gpus)
    parts = [] if celsius is None else [f"{celsius:.0f} °C"]
    watts, limits = ([getattr(gpu, name) or 0.0 for gpu in gpus] for name in ("watts", "limit"))
    parts += [f"GPUs {sum(watts):.0f} of {sum(limits):.0f} W"] if any(watts) else []
    return ", ".join(parts)


def _seconds_of_family() -> float:
    """Return the processor seconds of this process and its descendants. A parent's count includes children that have
    ended and were waited for."""
    found = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # the process has ended
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def _hottest_of(gpus: Sequence[GpuState]) -> float | None:
    """Return the temperature of the hottest processor or GPU in degrees Celsius, or None if no sensor can be read."""
    read = [sensor.celsius for sensor in read_sensors() if sensor.name in PROCESSORS]
    read += [gpu.celsius for gpu in gpus if gpu.celsius is not None]
    return max((celsius for celsius in read if int(celsius) in PLAUSIBLE), default=None)
