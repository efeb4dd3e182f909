"""Memory that another process can be given: a file without a name, so that nothing is left behind whoever dies."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
PIECE = 1 << 24  # bytes


class MemoryFile:
    """`size` bytes, mapped at `data`. The memory is given back once it is closed and nobody looks at it."""

    def __init__(self, descriptor: int, size: int, is_reserved: bool = True) -> None:
        """Takes over the descriptor. With `is_reserved` all of it is taken from the system now.

        Raises: OSError when there is no room.
        """
        self.descriptor = descriptor
        self.is_new = os.fstat(descriptor).st_size == 0
        """Whether there was nothing in it before."""
        try:
            (os.posix_fallocate if is_reserved else _extend)(descriptor, 0, max(size, 1))
            self._mapping = mmap.mmap(descriptor, max(size, 1))
            self.data = memoryview(self._mapping)[:size]
        except OSError:
            self.close()
            raise

    @classmethod
    def in_memory(cls, size: int) -> Self:
        """Taken from the system bit by bit, as it is written to."""
        return cls(os.memfd_create("diloco-peer"), size, is_reserved=False)

    @classmethod
    def ready_in_memory(cls, size: int) -> Self:
        """Taken now, which takes longer than the writing: best in a thread."""
        file = cls(os.memfd_create("diloco-peer"), size)
        with suppress(OSError):  # an older kernel maps it when it is written to
            for start in range(0, size, PIECE):  # between two pieces other threads run
                file._mapping.madvise(MADV_POPULATE_WRITE, start, min(PIECE, size - start))
        return file

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


def _extend(descriptor: int, offset: int, size: int) -> None:
    os.ftruncate(descriptor, offset + size)
