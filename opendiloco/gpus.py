"""NVIDIA GPUs as Linux and NVIDIA's driver list them, and the error texts for GPUs that torch cannot use.

Only `usable_gpus` imports torch. `join`, the workers and the doctor all use these texts.
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
"""Device files of NVIDIA's driver on Linux, and of any Windows driver in WSL 2, where a GPU is on no bus."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""NVIDIA's vendor number on the PCI bus, and the prefixes of the class numbers of graphics and compute cards."""
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""The oldest driver for each major version of CUDA, from NVIDIA's compatibility table."""
TURING = (7, 5)
"""Compute capability of the oldest GPUs for which builds for CUDA 13 have kernels."""
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
"""Texts with which CUDA's libraries report that a GPU, its driver or a kernel on it has failed."""
NO_KERNELS = re.compile(r"kernel image|\bptx\b", re.I)
"""Texts with which CUDA reports that a program was built for other GPUs."""
LOOK_AT_DEVICE = (
    "Look at `nvidia-smi -q` (ECC errors, heat, other processes) and at the kernel's log (`dmesg`: lines with Xid). "
    "If it happens again: restart the machine, check power and cooling, or train without this GPU."
)


@dataclass(frozen=True)
class Cards:
    """The NVIDIA GPUs of this machine, including those that torch cannot use.

    `driver` is the version of NVIDIA's driver, if it can be read. `is_driven` is true if a process here can reach the
    driver: its device file or nvidia-smi exists. In a container both may be missing.
    """

    names: tuple[str, ...] = ()
    driver: str | None = None
    is_driven: bool = False

    @property
    def are_reachable(self) -> bool:
        """True if this machine has NVIDIA GPUs and this process can reach their driver, so torch should find them."""
        return bool(self.names) and self.is_driven

    def are_too_old_for(self, platform: str | None) -> bool:
        """Return True if NVIDIA's driver is too old for torch's build platform, such as "CUDA 13.0"."""
        least = _least_driver(platform)
        return least is not None and self.driver is not None and int(self.driver.partition(".")[0]) < least

    def hidden_from(self, version: str, platform: str | None, reason: str) -> tuple[str, str]:
        """Return an error text and a remedy for GPUs that this torch does not find. `reason` is torch's message."""
        driver = f" with driver {self.driver}" if self.driver else ""
        built, why = platform or "CPUs alone", f": {reason}" if reason else ""
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


def unusable(name: str, capability: tuple[int, int], version: str, reason: str) -> tuple[str, str]:
    """Return an error text and a remedy for a GPU that torch finds but cannot compute on. `reason` is torch's
    message."""
    found = f"torch {version} cannot compute on {name} (compute capability {'.'.join(map(str, capability))}): {reason}"
    if capability < TURING:
        return found, f"{OLD_CARDS} {ON_CPU}"
    return found, f"{INSTALL_TORCH if NO_KERNELS.search(reason) else LOOK_AT_DEVICE} {ON_CPU}"


def usable_gpus() -> tuple[int, str]:
    """Return the number of GPUs that torch can use and, if it is 0, torch's message.

    `torch.cuda.device_count` alone is not enough, because it also counts GPUs whose driver is too old.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return torch.cuda.device_count(), ""
    return 0, first_sentence(caught[-1].message if caught else "")


def first_sentence(message: object) -> str:
    """Return the first sentence of a library's message, cut to 200 characters."""
    return str(message).strip().partition(". ")[0].partition("\n")[0][:200]


# Detection -----------------------------------------------------------------------------------------------------------
def read_cards(pci: Path = PCI, driver: Path = NVIDIA_DRIVER, devices: tuple[Path, ...] = DEVICE_FILES) -> Cards:
    """Return this machine's NVIDIA GPUs, with model names if NVIDIA's driver lists them, otherwise without names, as
    the PCI bus shows them.

    If the owner hides the cards from all programs (CUDA_VISIBLE_DEVICES), return none.
    """
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
