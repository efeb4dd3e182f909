"""Memory for much data."""

from __future__ import annotations

import mmap
from contextlib import suppress


def empty(size: int) -> memoryview:
    """Memory that is taken from the system as it is written to, in huge pages: small ones take longer to get."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]
