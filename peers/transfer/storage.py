"""Memory for large data: payloads, snapshots that a peer serves, and the snapshot that a joiner fetches."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

MADV_POPULATE_WRITE = 23  # madvise option of Linux 5.14, for which Python has no name
PIECE = 1 << 24  # bytes that one madvise call reserves; few, because no other thread runs during the call
SUFFIX = ".state"
IN_MEMORY = 1 << 26  # maximum bytes of a snapshot that FolderStorage keeps in memory


def empty(size: int) -> memoryview:
    """Return `size` bytes of memory, if possible in huge pages. The system provides a page when it is first written."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


class MemoryFile:
    """A file of `size` bytes, mapped into memory as `data`. The memory is released when the file is closed and no view
    of it is left."""

    def __init__(self, descriptor: int, size: int, is_reserved: bool = True) -> None:
        """Create the object, which then owns `descriptor`. The system allocates all bytes now if `is_reserved`,
        otherwise each page when it is first written.

        Raises: OSError when there is no room.
        """
        self.descriptor = descriptor
        self.is_new = os.fstat(descriptor).st_size == 0
        """True if the file was empty before."""
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
        """Create a file in memory whose pages the system provides on the first write."""
        return cls(os.memfd_create("diloco-peer"), size, is_reserved=False)

    @classmethod
    def ready_in_memory(cls, size: int) -> Self:
        """Create a file in memory with all pages provided now. Best called in a thread, since this is slow."""
        file = cls(os.memfd_create("diloco-peer"), size)
        with suppress(OSError):  # an older kernel provides the pages on the first write
            for start in range(0, size, PIECE):  # one call for each piece, so that other threads run in between
                file._mapping.madvise(MADV_POPULATE_WRITE, start, min(PIECE, size - start))
        return file

    @classmethod
    def on_disk(cls, size: int, folder: Path) -> Self:
        with tempfile.TemporaryFile(dir=folder) as file:
            return cls(os.dup(file.fileno()), size)

    def close(self) -> None:
        """Close the descriptor. Other processes that have inherited it can still read the bytes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


logger = logging.getLogger(__name__)


class Storage:
    """Memory for snapshots and downloads. A download that was interrupted starts again from the beginning."""

    def snapshot(self, size: int) -> MemoryFile:
        """Return memory for a frozen state of `size` bytes. Raises: OSError when there is no room."""
        return MemoryFile.ready_in_memory(size)

    def download(self, digest: bytes, size: int) -> MemoryFile:
        """Return memory for fetching the state with this digest. In FolderStorage, it contains the part of the state
        that was fetched before a restart. Raises: OSError."""
        return MemoryFile.in_memory(size)

    def downloaded(self) -> None:
        """Delete the files of the completed download. The memory that `download` returned stays readable."""


class FolderStorage(Storage):
    """Storage in a folder, for snapshots over 64 MiB, and for downloads, which can then continue after a restart."""

    def __init__(self, folder: Path, available_memory: Callable[[], int]) -> None:
        self._folder = folder
        self._available_memory = available_memory

    def snapshot(self, size: int) -> MemoryFile:
        """Return memory for a frozen state: a file in the folder if it is over 64 MiB and the disk has room, else RAM.
        Raises: OSError when the disk has no room, and less than `2 * size` bytes of RAM are free."""
        if size > IN_MEMORY:
            try:
                return MemoryFile.on_disk(size, self._folder)
            except OSError as error:
                if 2 * size > self._available_memory():
                    raise
                logger.warning("a snapshot of %d MiB is kept in memory, not in %s: %s", size >> 20, self._folder, error)
        return MemoryFile.ready_in_memory(size)

    def download(self, digest: bytes, size: int) -> MemoryFile:
        """Open the folder's file for fetching this state, and delete the files of other states. Raises: OSError."""
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
