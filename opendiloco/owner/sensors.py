"""Heat and power of the machine itself, as far as Linux shows them. What cannot be read is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SYS = Path("/sys/class")
PROCESSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz", "x86_pkg_temp"})
"""What Linux calls the sensors of processors; others belong to disks and network cards."""


@dataclass(frozen=True)
class Sensor:
    """A temperature of the machine itself; `critical` is where its hardware says that it is too hot."""

    name: str
    celsius: float
    critical: float | None = None

    @property
    def is_of_processor(self) -> bool:
        return self.name in PROCESSORS


def read_sensors(root: Path = SYS) -> tuple[Sensor, ...]:
    """Return the temperatures of the hardware monitors; without any, those of thermal zones."""
    return tuple(_monitors(root / "hwmon")) or tuple(_zones(root / "thermal"))


def is_on_battery(root: Path = SYS) -> bool:
    """Return whether a battery of this machine itself, and not of its mouse, is being used up."""
    if not root.is_dir():  # this is not Linux
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return battery is not None and battery.power_plugged is False
    return any(
        _text(supply / "type") == "Battery"
        and _text(supply / "scope") != "Device"
        and _text(supply / "status") == "Discharging"
        for supply in (root / "power_supply").glob("*")
    )


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
