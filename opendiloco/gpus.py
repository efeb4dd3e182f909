"""NVIDIA's GPUs as Linux and their driver show them, and what a person is told where torch cannot use them.

Imports no torch, but in `usable_gpus`. `join`, the workers and the doctor say the same here.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PCI, NVIDIA_DRIVER = Path("/sys/bus/pci/devices"), Path("/proc/driver/nvidia")
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Of NVIDIA's driver on Linux, and of any driver of Windows in WSL 2, where a GPU is on no bus."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""A vendor's number on the PCI bus, and how the classes of its graphics and compute cards begin."""
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""The oldest drivers for each major version of CUDA, by its compatibility table."""
TURING = (7, 5)
"""Compute capability of the oldest GPUs that builds for CUDA 13 have kernels for."""
OLD_CARDS = (
    "Builds of torch for CUDA 13 have no kernels for GPUs older than Turing. Install the build for CUDA 12.6 instead: "
    "pip uninstall torch; pip install 'torch<2.15' --index-url with the address that pytorch.org names for it."
)
INSTALL_TORCHAO = "Install it: pip install torchao; or use --optimizer-state host."
INSTALL_TORCH = "Install a build of torch for this GPU (pytorch.org says how), into the environment of diloco-peer."
ON_CPU = "Or train on the CPU: --device cpu."
DEVICE_FAILURE = re.compile(
    r"\b(cuda error(?!.*device-side assert)|xid \d|ecc error|cu(blas|dnn)_status_(execution_failed|internal_error))",
    re.IGNORECASE,
)
"""How CUDA's libraries begin to say that a GPU, its driver or a kernel on it has failed."""
NO_KERNELS = re.compile(r"kernel image|\bptx\b", re.I)
"""How CUDA says that a program was built for other GPUs."""
LOOK_AT_DEVICE = (
    "Look at `nvidia-smi -q` (ECC errors, heat, other processes) and at the kernel's log (`dmesg`: lines with Xid). "
    "If it comes again: restart the machine, check power and cooling, or train without this GPU."
)


@dataclass(frozen=True)
class Cards:
    """GPUs of this machine, usable or not. `driver` is the version of NVIDIA's, where it can be read. `is_driven`: a
    process here can reach it, so its device file or nvidia-smi is there; in a container they may be missing."""

    names: tuple[str, ...] = ()
    driver: str | None = None
    is_driven: bool = False

    @property
    def are_reachable(self) -> bool:
        """Return whether torch should see them."""
        return bool(self.names) and self.is_driven

    def are_too_old_for(self, platform: str | None) -> bool:
        """Return whether the driver's version is too old for what torch was built for, such as "CUDA 13.0"."""
        least = _least_driver(platform)
        return least is not None and self.driver is not None and int(self.driver.partition(".")[0]) < least

    def hidden_from(self, version: str, platform: str | None, said: str) -> tuple[str, str]:
        """Return what to say where this torch sees none of them, of which it has `said` why; and the remedy."""
        driver = f" with driver {self.driver}" if self.driver else ""
        built, why = platform or "CPUs alone", f": {said}" if said else ""
        found = f"{', '.join(self.names)} is here{driver}, but torch {version}, built for {built}, cannot use it{why}"
        least = _least_driver(platform)
        if least is None:
            return found, f"{INSTALL_TORCH} {ON_CPU}"
        remedy = (
            f"Update NVIDIA's driver to {least} or newer, or install a build of torch for this driver (pytorch.org)."
        )
        return found, f"{remedy} {ON_CPU}"


def _least_driver(platform: str | None) -> int | None:
    name, _, version = (platform or "").partition(" ")
    return LEAST_DRIVER.get(version.partition(".")[0]) if name == "CUDA" else None


def unusable(name: str, capability: tuple[int, int], version: str, said: str) -> tuple[str, str]:
    """Return what to say of a GPU that this torch sees and cannot compute on, of which it has `said` why; and the
    remedy."""
    found = f"torch {version} cannot compute on {name} (compute capability {'.'.join(map(str, capability))}): {said}"
    if capability < TURING:
        return found, f"{OLD_CARDS} {ON_CPU}"
    return found, f"{INSTALL_TORCH if NO_KERNELS.search(said) else LOOK_AT_DEVICE} {ON_CPU}"


def usable_gpus() -> tuple[int, str]:
    """Return how many GPUs torch can use, and what it says where that is none. `torch.cuda.device_count` alone also
    counts those whose driver is too old."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return torch.cuda.device_count(), ""
    return 0, first_sentence(said[-1].message if said else "")


def first_sentence(message: object) -> str:
    """Return the beginning of what a library says at length."""
    return str(message).strip().partition(". ")[0].partition("\n")[0][:200]


# What is there --------------------------------------------------------------------------------------------------------
def read_cards(pci: Path = PCI, driver: Path = NVIDIA_DRIVER, devices: tuple[Path, ...] = DEVICE_FILES) -> Cards:
    """Return NVIDIA's cards: by name where its driver tells it, else those on the PCI bus. Those that the owner keeps
    from all programs (CUDA_VISIBLE_DEVICES) are left out."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Cards()
    has_tool = shutil.which("nvidia-smi") is not None
    native, windows = (path.exists() for path in devices)
    names = [_model(path) for path in sorted(driver.glob("gpus/*/information"))]
    names = names or ["an NVIDIA GPU" for path in pci.glob("*") if _is_card(path)]
    names = names or ["an NVIDIA GPU"] * (windows and has_tool)
    version = None
    with suppress(OSError, IndexError):
        first = (driver / "version").read_text(encoding="utf-8").splitlines()[0]
        version = next((word for word in first.split() if word[0].isdigit() and "." in word), None)
    return Cards(tuple(names), version, native or has_tool)


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
