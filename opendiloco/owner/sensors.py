"""Heat and power of this machine: temperatures by psutil, NVIDIA's GPUs by NVML. What cannot be read is left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

POWER_SUPPLIES = Path("/sys/class/power_supply")
PROCESSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz", "x86_pkg_temp"})
"""What Linux calls the sensors of processors; others belong to disks and network cards."""
MILLIWATTS = 1000


@dataclass(frozen=True)
class Sensor:
    """A temperature of the machine itself; `critical` is where its hardware says that it is too hot."""

    name: str
    celsius: float
    critical: float | None = None

    @property
    def is_of_processor(self) -> bool:
        return self.name in PROCESSORS


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
        return None if found is None else found / MILLIWATTS

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
