"""Flat fp32 vectors that the peer process and its workers all see.

They live in an anonymous memory file, inherited as a descriptor: it has no name, so nothing can be left behind in
/dev/shm whoever dies, and Docker's small default /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import psutil
from numpy.typing import NDArray

from opendiloco.errors import MachineError
from opendiloco.quantities import VALUE_BYTES

Vector = NDArray[np.float32]
MORE_MEMORY = "Stop other programs or use a machine with more memory."
CGROUP = Path("/sys/fs/cgroup")


class SharedVectors:
    """`theta` (the outer parameters) and `local` (the workers' weights), each of `size` fp32 values.

    The views keep the mapping alive; it is returned to the system when the last of them is gone.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        memory = mmap.mmap(descriptor, 2 * VALUE_BYTES * size)
        self.both: Vector = np.frombuffer(memory, np.float32)
        self.theta: Vector = self.both[:size]
        self.local: Vector = self.both[size:]

    @classmethod
    def create(cls, size: int) -> Self:
        """For this process alone. Raises: MachineError when there is not enough memory."""
        descriptor = create_memory_file()
        try:
            reserve(descriptor, size)
            return cls(descriptor, size)
        finally:
            os.close(descriptor)  # the mapping needs it no more


def create_memory_file() -> int:
    """Descriptor of a new, empty memory file. Close it when all have inherited and mapped it."""
    return os.memfd_create("diloco-peer")


def reserve(descriptor: int, size: int) -> None:
    """Take memory for two vectors of `size` values, so that no later write fails. Raises: MachineError."""
    needed = 2 * VALUE_BYTES * size
    check_available("The run's shared vectors", needed)
    try:
        os.posix_fallocate(descriptor, 0, needed)
    except OSError as error:
        raise MachineError(
            f"{needed / 2**20:.0f} MiB of shared memory cannot be had ({error.strerror}).", MORE_MEMORY
        ) from error


def check_available(what: str, needed: int) -> None:
    """Raises: MachineError when there are fewer than `needed` bytes; it says what needs them."""
    available = available_memory()
    if needed > available:
        remedy = (
            "Raise --max-memory, or leave it out." if _cap is not None and needed <= _free_memory() else MORE_MEMORY
        )
        raise MachineError(
            f"{what}: {needed / 2**20:.0f} MiB are needed, {available / 2**20:.0f} MiB are free.", remedy
        )


_cap: tuple[int, int] | None = None
"""Bytes, and the process that takes no more of them together with its descendants."""


def cap_memory(limit: int | None, family: int | None = None) -> None:
    """Have `available_memory` keep to so many bytes for a process and all its descendants; by default this process.

    Memory that several of them see counts once. None: there is no cap.
    """
    global _cap
    _cap = None if limit is None else (limit, family or os.getpid())


def _used_by(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def available_memory() -> int:
    """Return the bytes that this process can still take: what is free, or what its owner's cap leaves of that."""
    free = _free_memory()
    if _cap is None:
        return free
    limit, root = _cap[0], psutil.Process(_cap[1])
    return max(0, min(free, limit - sum(map(_used_by, (root, *root.children(recursive=True))))))


def _free_memory() -> int:
    """Return the kernel's estimate, or what the container's limit leaves.

    What a container used last for files it has read counts against its limit, but is given back when it is needed.
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
