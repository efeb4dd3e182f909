"""Temperatures as psutil has them, batteries as Linux has them, and GPUs of an NVML that is played."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from opendiloco.owner.facts import GpuState, Sensor, is_on_battery, machine_line, read_gpus, read_sensors

Reading = namedtuple("Reading", "label current high critical")  # as psutil's
HEAT, BRAKE, LOST = 0x40, 0x80, "lost"


class NVMLError(Exception):
    """As pynvml's."""


class PlayedNvml(SimpleNamespace):
    """A driver with these GPUs: of each what it says, by the names of pynvml's questions. Without any, no driver."""

    def __init__(self, *gpus: Mapping[str, Any]) -> None:
        super().__init__(
            NVMLError=NVMLError,
            NVML_TEMPERATURE_GPU=0,
            nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
            nvmlClocksThrottleReasonHwThermalSlowdown=HEAT,
            nvmlClocksThrottleReasonHwPowerBrakeSlowdown=BRAKE,
        )
        self.gpus = gpus
        self.users = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.gpus:
            raise NVMLError("NVML Shared Library Not Found")
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Mapping[str, Any]:  # noqa: N802
        if self.gpus[number].get("Name") == LOST:
            raise NVMLError("GPU is lost")
        gpu: Mapping[str, Any] = self.gpus[number]
        return gpu

    def __getattr__(self, name: str) -> Any:
        def answer(gpu: Mapping[str, Any], *about: int) -> Any:
            if name.removeprefix("nvmlDeviceGet") not in gpu:
                raise NVMLError("Not Supported")
            return gpu[name.removeprefix("nvmlDeviceGet")]

        return answer


H100: dict[str, Any] = {
    "Name": "NVIDIA H100 80GB HBM3",
    "Temperature": 41,
    "PowerUsage": 120_500,
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "CurrentClocksThrottleReasons": 0,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PlayedNvml:
    played = PlayedNvml(*request.param)
    monkeypatch.setitem(sys.modules, "pynvml", played)
    return played


@pytest.mark.parametrize(
    ("nvml", "states"),
    [
        ([], ()),
        ([H100], (GpuState("NVIDIA H100 80GB HBM3", 41, 120.5, 700.0, 700.0),)),
        (
            [{"Name": "Old"}, H100 | {"CurrentClocksThrottleReasons": HEAT}],
            (GpuState("Old", None), GpuState(H100["Name"], 41, 120.5, 700.0, 700.0, is_slowed_by_heat=True)),
        ),
        (
            [{"Name": "T4", "CurrentClocksThrottleReasons": BRAKE}, {"Name": LOST}],
            (GpuState("T4", None, is_slowed_by_power=True),),
        ),
    ],
    indirect=["nvml"],
)
def test_what_the_driver_does_not_say_is_left_out(nvml: PlayedNvml, states: tuple[GpuState, ...]) -> None:
    assert read_gpus() == states
    assert nvml.users == 0


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("nvml", "line"), [([], "61 °C"), ([H100, H100], "61 °C, GPUs 241 of 1400 W")], indirect=["nvml"]
)
def test_the_hottest_of_processors_and_gpus_and_the_power_of_all(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"coretemp": [Reading("", 61.0, None, 100.0)], "nvme": [Reading("", 71.0, None, None)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: readings)
    assert machine_line() == line


def test_sensors_that_are_not_connected_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"coretemp": [Reading("", 61.0, None, 100.0)], "nvme": [Reading("", -273.1, None, None)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: readings)
    assert read_sensors() == (Sensor("coretemp", 61.0, 100.0),)


def test_a_mouses_battery_is_not_the_machines(tmp_path: Path) -> None:
    def supply(name: str, **files: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        for file, text in files.items():
            (tmp_path / name / file).write_text(f"{text}\n")

    assert not is_on_battery(tmp_path / "not there")
    supply("hidpp_battery_0", type="Battery", scope="Device", status="Discharging")
    supply("BAT0", type="Battery", status="Charging")
    assert not is_on_battery(tmp_path)
    supply("BAT0", status="Discharging")
    assert is_on_battery(tmp_path)
