"""Which device a worker has, what it is called, and how much memory it has taken."""

from __future__ import annotations

import os
import re
import resource
import shutil

import torch

from opendiloco.errors import MachineError, first_line

TRITON_CAPABILITY = (7, 0)
"""Compute capability of the oldest GPUs that it compiles for."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def choose_device(wanted: str) -> torch.device:
    """The device for "auto" (a GPU if torch sees one, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises: MachineError when it is none of these, or torch cannot use it.
    """
    if not DEVICE.fullmatch(wanted):
        raise MachineError(f"--device {wanted} is nothing to train on.", "Use auto, cpu, cuda, or cuda:1 and so on.")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
        if device.index is not None:
            torch.cuda.set_device(device)  # so that nothing is put on another GPU for want of a name
    except (RuntimeError, AssertionError) as error:
        raise MachineError(
            f"--device {wanted} cannot be used by torch {torch.__version__}: {first_line(error)}",
            "Use --device cpu, or install a torch that supports this GPU.",
        ) from error
    return device


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver says it, such as "NVIDIA A100-SXM4-80GB"; else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compiling_lacks(device: torch.device) -> str | None:
    """Return what torch.compile would lack on a GPU: Triton has a C compiler make its launchers. None: nothing."""
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return f"a {device_name(device)} is too old for it"
    compilers = [*filter(None, [os.environ.get("CC")]), "gcc", "clang"]
    return None if any(map(shutil.which, compilers)) else "there is no C compiler here; install gcc"


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bf16 itself. GPUs older than Ampere convert each value, and are slower."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def forget_peak_memory(device: torch.device) -> None:
    """`peak_memory` counts from now on. That of the CPU cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU, what tensors have taken at most since it was forgotten; of the CPU, this process ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
