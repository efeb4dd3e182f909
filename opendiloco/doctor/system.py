"""The facts of this machine, read from where Linux keeps them. In milliseconds, but for what is asked of GPUs."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from opendiloco.checkpoints.run_folder import default_state_folder
from opendiloco.cores import usable_cores
from opendiloco.doctor.facts import Cards, Folder, Kernels, Machine
from opendiloco.doctor.machine_checks import python_version
from opendiloco.doctor.torch_probe import installed_torch, probed_torch
from opendiloco.owner.controls import Request, ask, sockets
from opendiloco.owner.sensors import is_on_battery, read_gpus, read_sensors
from opendiloco.shared_memory import available_memory

PCI, NVIDIA_DRIVER, SHM = Path("/sys/bus/pci/devices"), Path("/proc/driver/nvidia"), Path("/dev/shm")
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""A vendor's number on the PCI bus, and how the classes of its graphics and compute cards begin."""


def quick_machine(state: Path | None = None) -> Machine:
    """Return what is known at once: nothing is imported, started or asked."""
    return Machine(
        python=python_version(),
        cores=usable_cores(),
        torch=installed_torch(),
        cards=read_cards(),
        has_compiler=any(map(shutil.which, [*filter(None, [os.environ.get("CC")]), "gcc", "clang"])),
        memory=available_memory(),
        shm=free_shm(),
        folder=look_at_folder(default_state_folder() if state is None else state),
        is_on_battery=is_on_battery(),
    )


def has_volunteer(state: Path | None) -> bool:
    """Whether a volunteer runs on this machine that keeps what outlives it there."""
    folder = default_state_folder() if state is None else state
    return any(ask(socket, Request(do="look")) is not None for socket in sockets(folder))


def whole_machine(state: Path | None = None) -> Machine:
    """Return the same with what torch and the sensors say. Takes seconds."""
    quick = quick_machine(state)
    return replace(quick, torch=probed_torch(quick.torch), sensors=read_sensors(), gpu_states=read_gpus())


def read_cards(pci: Path = PCI, driver: Path = NVIDIA_DRIVER) -> Cards:
    """Return NVIDIA's cards: by name where its driver tells it, else those on the PCI bus."""
    names = [_model(path) for path in sorted(driver.glob("gpus/*/information"))]
    if not names:
        names = ["an NVIDIA GPU" for path in sorted(pci.glob("*")) if _is_card(path)]
    version = None
    with suppress(OSError, IndexError):
        first = (driver / "version").read_text(encoding="utf-8").splitlines()[0]
        version = next((word for word in first.split() if word[0].isdigit() and "." in word), None)
    return Cards(tuple(names), version)


def look_at_folder(path: Path) -> Folder:
    """Return whether a folder, or the nearest one above it that is there, can be written to. Leaves nothing there."""
    there = path.absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Folder(path, 0, error.strerror or str(error))
    return Folder(path, free)


def free_shm(path: Path = SHM) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def try_kernels() -> Kernels:
    """Run the kernels' self-test: two seconds."""
    try:
        from opendiloco import kernels
        from opendiloco.kernels.self_test import differing_sets, measure_speeds

        speeds = {speed.operation: speed.gigabytes_per_second for speed in measure_speeds(threads=1)}
        return Kernels(kernels.chosen_kernels(), tuple(differing_sets()), speeds)
    except Exception as error:  # whatever an extension that does not load, or a wrong DILOCO_KERNELS, raises
        return Kernels("", (), {}, " ".join(str(error).split()))


def _model(information: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "an NVIDIA GPU"


def _is_card(device: Path) -> bool:
    with suppress(OSError):
        vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        return vendor == NVIDIA and kind.startswith(DISPLAYS)
    return False
