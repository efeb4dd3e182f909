"""Memory that another process can be given: a file without a name, so that nothing is left behind whoever dies."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Self


class MemoryFile:
    """`size` bytes, mapped at `data`. The memory is given back once it is closed and nobody looks at it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes over the descriptor. Raises: OSError when there is no room."""
        self.descriptor = descriptor
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            self.data = memoryview(mmap.mmap(descriptor, max(size, 1)))[:size]
        except OSError:
            self.close()
            raise

    @classmethod
    def in_memory(cls, size: int) -> Self:
        return cls(os.memfd_create("diloco-peer"), size)

    @classmethod
    def on_disk(cls, size: int, folder: Path) -> Self:
        with tempfile.TemporaryFile(dir=folder) as file:
            return cls(os.dup(file.fileno()), size)

    def close(self) -> None:
        """Other processes that have inherited the descriptor keep the bytes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()
