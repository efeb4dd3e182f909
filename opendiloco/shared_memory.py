"""Flat fp32 vectors in memory that the peer process shares with its worker processes.

The vectors are in an anonymous memory file, whose descriptor the workers inherit. The file has no name, so a process
that dies leaves nothing in /dev/shm, and Docker's small default /dev/shm does not matter.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import psutil
from numpy.typing import NDArray

from opendiloco.errors import MachineError
from opendiloco.quantities import GIGABYTE, VALUE_BYTES

Vector = NDArray[np.float32]
MORE_MEMORY = "Stop other programs or use a machine with more memory."
CGROUP = Path("/sys/fs/cgroup")


class SharedVectors:
    """Two vectors of `size` fp32 values in shared memory: `theta` (the outer parameters) and `local` (the workers'
    weights).

    The views keep the mapping alive; the system frees it with the last view.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        memory = mmap.mmap(descriptor, 2 * VALUE_BYTES * size)
        self.both: Vector = np.frombuffer(memory, np.float32)
        self.theta: Vector = self.both[:size]
        self.local: Vector = self.both[size:]

    @classmethod
    def create(cls, size: int) -> Self:
        """Return vectors of `size` values each, for a process without workers. Raises: MachineError if too little
        memory is free."""
        descriptor = create_memory_file()
        try:
            reserve(descriptor, size)
            return cls(descriptor, size)
        finally:
            os.close(descriptor)  # the memory stays mapped without the descriptor


def create_memory_file() -> int:
    """Return the descriptor of a new, empty memory file. The caller closes it after all processes have mapped it."""
    return os.memfd_create("diloco-peer")


def reserve(descriptor: int, size: int) -> None:
    """Allocate memory for two vectors of `size` fp32 values, so that no later write fails. Raises: MachineError."""
    needed = 2 * VALUE_BYTES * size
    check_available("The run's shared vectors", needed)
    try:
        os.posix_fallocate(descriptor, 0, needed)
    except OSError as error:
        raise MachineError(
            f"{needed / 2**20:.0f} MiB of shared memory cannot be allocated ({error.strerror}).", MORE_MEMORY
        ) from error


def check_available(what: str, needed: int) -> None:
    """Raise MachineError if fewer than `needed` bytes of memory are available for the purpose `what`."""
    available = available_memory()
    if needed > available:
        raise MachineError(
            f"{what}: {needed / 2**20:.0f} MiB are needed, {available / 2**20:.0f} MiB are free.", memory_remedy(needed)
        )


def memory_remedy(needed: int) -> str:
    """Return the remedy, as text for the owner, if `needed` bytes of memory are not available."""
    if _cap is None or needed > _free_memory():
        return MORE_MEMORY
    used = _used_by_family()
    least = math.ceil(10 * (used + needed) / GIGABYTE) / 10
    return f"The program itself uses {used / 2**20:.0f} MiB: raise --max-memory to {least:g} or more, or leave it out."


_cap: tuple[int, int] | None = None
"""The limit in bytes, and the process to which it applies together with its descendants."""


def cap_memory(limit: int | None, family: int | None = None) -> None:
    """Limit `available_memory` to `limit` bytes for the process with the id `family` (default: this process) and its
    descendants together.

    Memory that several of them share counts once. None removes the limit.
    """
    global _cap
    _cap = None if limit is None else (limit, family or os.getpid())


def _used_by(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _used_by_family() -> int:
    """Return the bytes of memory in use by the process that `cap_memory` limits and by its descendants."""
    assert _cap is not None
    root = psutil.Process(_cap[1])
    return sum(map(_used_by, (root, *root.children(recursive=True))))


def available_memory() -> int:
    """Return the bytes that this process can still allocate: the free memory, or less if `cap_memory` limits it."""
    free = _free_memory()
    if _cap is None:
        return free
    return max(0, min(free, _cap[0] - _used_by_family()))


def _free_memory() -> int:
    """Return the free memory in bytes as the kernel estimates it, or less if the container's limit leaves less.

    Memory that holds recently read files counts against a container's limit, but the kernel frees it on demand.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return available
    cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return available if limit == "max" else min(available, int(limit) - used + cached)
