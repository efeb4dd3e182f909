"""Memory for much data: payloads, the snapshots that a peer gives, and the one that it is fetching."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
PIECE = 1 << 24  # bytes that are reserved at once: no other thread runs meanwhile
SUFFIX = ".state"
IN_MEMORY = 1 << 26  # bytes of a snapshot that lies in memory, although there is a folder


def empty(size: int) -> memoryview:
    """Memory that is taken from the system as it is written to, in huge pages: small ones take longer to get."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


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
            if is_reserved:
                os.posix_fallocate(descriptor, 0, max(size, 1))
            else:
                os.ftruncate(descriptor, max(size, 1))
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


logger = logging.getLogger(__name__)


class Storage:
    """Memory only: a download that breaks off is begun anew."""

    def snapshot(self, size: int) -> MemoryFile:
        """Return memory for a frozen state. Raises: OSError when there is no room."""
        return MemoryFile.ready_in_memory(size)

    def download(self, digest: bytes, size: int) -> MemoryFile:
        """Return memory for the state with this digest; what was fetched of it before is in it. Raises: OSError."""
        return MemoryFile.in_memory(size)

    def downloaded(self) -> None:
        """Hear that the download is complete: nothing of it is needed after the memory is closed."""


class FolderStorage(Storage):
    """Small snapshots in memory, larger ones in the folder; downloads in the folder, to outlive a restart."""

    def __init__(self, folder: Path, available_memory: Callable[[], int]) -> None:
        self._folder = folder
        self._available_memory = available_memory

    def snapshot(self, size: int) -> MemoryFile:
        """In the folder if there is room; else in memory, if that has twice as much: training needs some, too."""
        if size > IN_MEMORY:
            try:
                return MemoryFile.on_disk(size, self._folder)
            except OSError as error:
                if 2 * size > self._available_memory():
                    raise
                logger.warning("a snapshot of %d MiB lies in memory, not in %s: %s", size >> 20, self._folder, error)
        return MemoryFile.ready_in_memory(size)

    def download(self, digest: bytes, size: int) -> MemoryFile:
        """Another state's remains are dropped."""
        path = self._folder / f"{digest.hex()}{SUFFIX}"
        self._drop(but=path)
        return MemoryFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), size)

    def downloaded(self) -> None:
        self._drop()

    def _drop(self, but: Path | None = None) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path != but:
                with suppress(OSError):
                    path.unlink()
