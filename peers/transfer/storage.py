"""Where a peer puts what is too large to hold twice: snapshots that it gives, and the one that it is fetching."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from peers.transfer.memory_file import MemoryFile

logger = logging.getLogger(__name__)

SUFFIX = ".state"
IN_MEMORY = 1 << 26  # bytes of a snapshot that lies in memory, although there is a folder


class Storage(Protocol):
    def snapshot(self, size: int) -> MemoryFile:
        """Memory for a frozen state. Raises: OSError when there is no room."""

    def download(self, digest: bytes, size: int) -> MemoryFile:
        """For the state with this digest; what was fetched of it before is in it. Raises: OSError."""

    def downloaded(self) -> None:
        """The download is complete: nothing of it is needed after the memory is closed."""


class MemoryStorage:
    """Memory only: a download that breaks off is begun anew."""

    def snapshot(self, size: int) -> MemoryFile:
        return MemoryFile.ready_in_memory(size)

    def download(self, digest: bytes, size: int) -> MemoryFile:
        return MemoryFile.in_memory(size)

    def downloaded(self) -> None:
        pass


class FolderStorage:
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
