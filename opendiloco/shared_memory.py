"""Flat fp32 vectors that the peer process and its workers all see.

They live in an anonymous memory file, inherited as a descriptor: it has no name, so nothing can be left behind in
/dev/shm whoever dies, and Docker's small default /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from opendiloco.errors import MachineError

Vector = NDArray[np.float32]
VALUE_BYTES = 4
MORE_MEMORY = "Stop other programs or use a machine with more memory."
CGROUP = Path("/sys/fs/cgroup")


class SharedVectors:
    """`theta` (the outer parameters) and `local` (the workers' weights), each of `size` fp32 values.

    The views keep the mapping alive; it is returned to the system when the last of them is gone.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        memory = mmap.mmap(descriptor, 2 * VALUE_BYTES * size)
        self.data = memoryview(memory)
        """All bytes of both, as other processes see them; `theta_part` and `local_part` say where each lies."""
        self.theta_part = 0, VALUE_BYTES * size
        self.local_part = VALUE_BYTES * size, 2 * VALUE_BYTES * size
        both = np.frombuffer(memory, np.float32)
        self.theta: Vector = both[:size]
        self.local: Vector = both[size:]

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
    """Take memory for two vectors of `size` values now, so that no later write can fail.

    Raises: MachineError when there is not enough.
    """
    needed = 2 * VALUE_BYTES * size
    check_available("The run's shared vectors", needed)
    try:
        os.posix_fallocate(descriptor, 0, needed)
    except OSError as error:
        raise MachineError(
            f"{needed / 2**20:.0f} MiB of shared memory cannot be had ({error.strerror}).", MORE_MEMORY
        ) from error


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """By numpy, which lets other threads run meanwhile."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def check_available(what: str, needed: int) -> None:
    """Raises: MachineError when there are fewer than `needed` bytes; it says what needs them."""
    available = available_memory()
    if needed > available:
        raise MachineError(
            f"{what}: {needed / 2**20:.0f} MiB are needed, {available / 2**20:.0f} MiB are free.", MORE_MEMORY
        )


def available_memory() -> int:
    """Bytes this process can still take: the kernel's estimate, or what the container's limit leaves.

    What a container used last for files it has read counts against its limit, but is given back when it is needed.
    """
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return available
    cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return available if limit == "max" else min(available, int(limit) - used + cached)
