"""What is true of this machine now: its heat, its GPUs' power, its battery, and what other programs use.

Temperatures come from psutil, what concerns NVIDIA's GPUs from NVML. What cannot be read is left out.
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
"""What Linux calls the sensors of processors; others belong to disks and network cards."""
PLAUSIBLE = range(1, 126)
"""Degrees Celsius. Sensors that are not connected say other numbers."""


@dataclass(frozen=True)
class Sensor:
    """A temperature of the machine itself; `critical` is where its hardware says that it is too hot."""

    name: str
    celsius: float
    critical: float | None = None


@dataclass(frozen=True)
class GpuState:
    """What a GPU's driver says of heat and power, in watts; None: it does not say."""

    name: str
    celsius: float | None
    watts: float | None = None
    limit: float | None = None
    default_limit: float | None = None
    is_slowed_by_heat: bool = False
    is_slowed_by_power: bool = False


def read_sensors() -> tuple[Sensor, ...]:
    """Return the temperatures of the hardware monitors; without any, those of thermal zones."""
    return tuple(
        Sensor(name, reading.current, reading.critical or None)
        for name, readings in psutil.sensors_temperatures().items()
        for reading in readings
        if -50 < reading.current < 200  # what is not connected says other numbers
    )


def is_on_battery(root: Path = POWER_SUPPLIES) -> bool:
    """Return whether a battery of this machine itself is being used up. psutil takes a wireless mouse's for it."""
    return any(
        _text(supply / "type") == "Battery"
        and _text(supply / "scope") != "Device"
        and _text(supply / "status") == "Discharging"
        for supply in root.glob("*")
    )


def read_gpus() -> tuple[GpuState, ...]:
    """Return what NVIDIA's driver says of each GPU; nothing where there is no driver."""
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
    """Raises: pynvml.NVMLError when the GPU is lost."""
    import pynvml

    def asked(question: Callable[..., int], *about: int) -> int | None:
        with suppress(pynvml.NVMLError):  # this GPU does not say
            return question(gpu, *about)
        return None

    def watts(question: Callable[..., int]) -> float | None:
        found = asked(question)
        return None if found is None else found / 1000  # it says milliwatts

    slowed = asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    by_heat = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    return GpuState(
        pynvml.nvmlDeviceGetName(gpu),
        celsius=asked(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
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
    """One look at a machine. `others` is the share of its cores that programs other than ours use, 0 to 1.

    `celsius` has the hottest processor or GPU; None: no sensor can be read. `programs` are the names of all processes,
    casefolded.
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
    """Return what can be read of this machine's temperature and its GPUs' power, in words; it may be nothing."""
    gpus = read_gpus()
    celsius = _hottest_of(gpus)
    said = [] if celsius is None else [f"{celsius:.0f} °C"]
    watts, limits = ([getattr(gpu, name) or 0.0 for gpu in gpus] for name in ("watts", "limit"))
    said += [f"GPUs {sum(watts):.0f} of {sum(limits):.0f} W"] if any(watts) else []
    return ", ".join(said)


def _seconds_of_family() -> float:
    """Return the processor time that this process and its descendants have taken, also those that have ended: whoever
    waits for a child's end has its time."""
    found = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def _hottest_of(gpus: Sequence[GpuState]) -> float | None:
    """Return the temperature of the hottest processor or GPU."""
    read = [sensor.celsius for sensor in read_sensors() if sensor.name in PROCESSORS]
    read += [gpu.celsius for gpu in gpus if gpu.celsius is not None]
    return max((celsius for celsius in read if int(celsius) in PLAUSIBLE), default=None)
