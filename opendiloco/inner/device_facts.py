"""What a worker's device is called, and how much memory it has taken."""

from __future__ import annotations

import resource

import torch


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver says it, such as "NVIDIA A100-SXM4-80GB"; else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def forget_peak_memory(device: torch.device) -> None:
    """`peak_memory` counts from now on. That of the CPU cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU, what tensors have taken at most since it was forgotten; of the CPU, this process ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
