"""The power limit of the GPUs that a volunteer trains on, and what it was before.

What it was is kept in a folder, so that the next volunteer can set it back after one that was killed. A lock on each
GPU's file says that the volunteer whose limit it is still runs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from opendiloco.errors import MachineError
from opendiloco.owner import nvidia_smi
from opendiloco.owner.gpus import Gpu, look_at_gpus, used_gpus
from peers.values.private_folders import make_private_folder

logger = logging.getLogger(__name__)

FOLDER = "power_limits"
SECONDS = 20.0


@contextmanager
def power_limit(watts: int | None, device: str, gpus: int | None, state: Path) -> Iterator[None]:
    """Have the GPUs that are trained on draw no more power meanwhile; without `watts`, as they like.

    `state` is the folder for what outlives the process. Raises: MachineError when that cannot be had.
    """
    with ExitStack() as limited:
        if watts is not None:
            for gpu, limit in _limits(device, gpus):
                limited.enter_context(_limited(state / FOLDER / gpu.index, gpu.index, limit, watts))
        yield


def set_limits_back(state: Path) -> None:
    """Set back the limits of volunteers that were killed. One that cannot be set back is logged, and tried again."""
    for path in sorted((state / FOLDER).glob("*")):
        with suppress(OSError), path.open("r+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the volunteer runs
            _set_back(path, path.name, _watts_in(file))


@contextmanager
def _limited(path: Path, index: str, limit: float, watts: int) -> Iterator[None]:
    """Limit one GPU, whose limit is kept in a file meanwhile. Raises: MachineError."""
    with ExitStack() as opened:
        try:
            make_private_folder(path.parent)
            file = opened.enter_context(path.open("a+", encoding="ascii"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = _watts_in(file)  # by a volunteer that was killed: the GPU has that one's limit
            before = limit if left is None else left
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{before:g}".encode())
        except BlockingIOError as error:
            raise MachineError(
                f"another volunteer on this machine limits the power of GPU {index}.",
                "Leave --gpu-power-limit out, or train on another GPU.",
            ) from error
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error.strerror}.", "Name a folder with --state.") from error
        try:
            _limit(index, watts)
        except MachineError:
            if left is None:
                path.unlink(missing_ok=True)
            raise
        try:
            yield
        finally:
            _set_back(path, index, before)


def _set_back(path: Path, index: str, watts: float | None) -> None:
    try:
        if watts is not None:
            _limit(index, watts)
        path.unlink(missing_ok=True)
    except (MachineError, OSError) as error:
        logger.warning("%s The next `join` tries it again.", error)


def _watts_in(file: TextIO) -> float | None:
    """Return what a file says; None where it says nothing, or nonsense."""
    file.seek(0)
    return nvidia_smi.number(file.read())


def _limits(device: str, gpus: int | None) -> list[tuple[Gpu, float]]:
    used = used_gpus(device, gpus, look_at_gpus(), os.environ)
    limits = [(gpu, gpu.limit) for gpu in used if gpu.limit is not None]
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
