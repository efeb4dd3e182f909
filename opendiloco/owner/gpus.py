"""NVIDIA's GPUs as `nvidia-smi` has them: temperature, power, and the limit of it."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from opendiloco.errors import MachineError
from opendiloco.owner import nvidia_smi

logger = logging.getLogger(__name__)

SECONDS = 20.0
COLUMNS = ("index", "temperature.gpu", "power.draw", "power.limit")


@dataclass(frozen=True)
class Gpu:
    """One GPU, and what can be read of it. Power is in watts."""

    index: str
    celsius: float | None
    watts: float | None
    limit: float | None


def look_at_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi sees; none where it is missing or fails."""
    return parse_gpus(nvidia_smi.query(COLUMNS, SECONDS))


def parse_gpus(text: str) -> list[Gpu]:
    """Return what nvidia-smi has said, a GPU a line."""
    return [Gpu(index, *map(nvidia_smi.number, cells)) for index, *cells in nvidia_smi.rows(text, COLUMNS)]


def used_indices(device: str, gpus: int | None, seen: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return which of the GPUs that nvidia-smi has `seen` a volunteer with these settings trains on."""
    visible = [one for one in environment.get("CUDA_VISIBLE_DEVICES", ",".join(seen)).split(",") if one]
    _, _, number = device.partition(":")
    if number.isdigit():
        return visible[int(number) : int(number) + 1]
    return [] if device == "cpu" else visible[:gpus]


@contextmanager
def power_limit(watts: int | None, device: str, gpus: int | None) -> Iterator[None]:
    """Have the GPUs that are trained on draw no more power meanwhile; without `watts`, as they like.

    Raises: MachineError when that cannot be had.
    """
    before: list[tuple[str, float]] = []
    try:
        if watts is not None:
            for index, limit in _limits(device, gpus):
                _limit(index, watts)
                before.append((index, limit))
        yield
    finally:
        for index, limit in before:
            with suppress(MachineError):
                _limit(index, limit)


def _limits(device: str, gpus: int | None) -> list[tuple[str, float]]:
    seen = look_at_gpus()
    used = used_indices(device, gpus, [gpu.index for gpu in seen], os.environ)
    limits = [(gpu.index, gpu.limit) for gpu in seen if gpu.index in used and gpu.limit is not None]
    if not limits:
        raise MachineError(
            f"--gpu-power-limit: {nvidia_smi.PROGRAM} names no GPU with a power limit that is trained on here.",
            "Leave the option out, or see what nvidia-smi says.",
        )
    return limits


def _limit(index: str, watts: float) -> None:
    """Raises: MachineError."""
    try:
        nvidia_smi.ask("-i", index, "-pl", f"{watts:g}", seconds=SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = [*(getattr(error, "stdout", None) or "").strip().splitlines(), str(error)][0].rstrip(".")
        raise MachineError(
            f"the power limit of GPU {index} cannot be set to {watts:g} W: {said}.",
            "Most drivers let only root do that: set it with `sudo nvidia-smi -pl`, and leave --gpu-power-limit out.",
        ) from error
    logger.info("GPU %s may draw %g W", index, watts)
