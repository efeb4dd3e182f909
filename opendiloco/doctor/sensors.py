"""Heat and power, as far as Linux and NVIDIA's own tool show them. What cannot be read is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from opendiloco.doctor.facts import GpuState, Sensor
from opendiloco.owner import nvidia_smi

SYS = Path("/sys/class")
QUERY = (
    "name",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "clocks_throttle_reasons.active",
)
QUERY_SECONDS = 10.0
SLOWED_BY_HEAT, SLOWED_BY_POWER = 0x20 | 0x40, 0x80
"""Bits of NVML's reasons for slower clocks: thermal slowdowns by software and hardware; the power supply's brake."""


def read_sensors(root: Path = SYS) -> tuple[Sensor, ...]:
    """Return the temperatures of the hardware monitors; without any, those of thermal zones."""
    return tuple(_monitors(root / "hwmon")) or tuple(_zones(root / "thermal"))


def is_on_battery(root: Path = SYS) -> bool:
    """Return whether a battery of this machine itself, and not of its mouse, is being used up."""
    return any(
        _text(supply / "type") == "Battery"
        and _text(supply / "scope") != "Device"
        and _text(supply / "status") == "Discharging"
        for supply in (root / "power_supply").glob("*")
    )


def query_gpus() -> tuple[GpuState, ...]:
    """Return what nvidia-smi says of each GPU; nothing without it."""
    return parse_gpus(nvidia_smi.query(QUERY, QUERY_SECONDS))


def parse_gpus(text: str) -> tuple[GpuState, ...]:
    """Return the GPUs of nvidia-smi's table, one a line. Fields that it does not know, such as "[N/A]", are None."""
    found = []
    for name, celsius, watts, limit, default, reasons in nvidia_smi.rows(text, QUERY):
        bits = 0
        with suppress(ValueError):
            bits = int(reasons, 16)
        found.append(
            GpuState(
                name,
                celsius=nvidia_smi.number(celsius),
                watts=nvidia_smi.number(watts),
                limit=nvidia_smi.number(limit),
                default_limit=nvidia_smi.number(default),
                is_slowed_by_heat=bool(bits & SLOWED_BY_HEAT),
                is_slowed_by_power=bool(bits & SLOWED_BY_POWER),
            )
        )
    return tuple(found)


def _monitors(folder: Path) -> Iterator[Sensor]:
    for path in sorted(folder.glob("hwmon*/temp*_input")):
        celsius = _degrees(path)
        if celsius is not None:
            critical = _degrees(path.with_name(path.name.replace("_input", "_crit")))
            yield Sensor(_text(path.with_name("name")) or path.parent.name, celsius, critical or None)


def _zones(folder: Path) -> Iterator[Sensor]:
    for zone in sorted(folder.glob("thermal_zone*")):
        celsius = _degrees(zone / "temp")
        if celsius is not None:
            points = [_text(point) for point in zone.glob("trip_point_*_type")]
            number = next((n for n, _ in enumerate(points) if _text(zone / f"trip_point_{n}_type") == "critical"), None)
            critical = None if number is None else _degrees(zone / f"trip_point_{number}_temp")
            yield Sensor(_text(zone / "type") or zone.name, celsius, critical or None)


def _degrees(path: Path) -> float | None:
    """Return a temperature, which Linux counts in thousandths; None where a sensor has none."""
    with suppress(ValueError):
        celsius = int(_text(path)) / 1000
        return celsius if -50 < celsius < 200 else None
    return None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""
