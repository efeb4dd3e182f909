"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"
"""What the name of a file ends in while it is written. A process that is killed leaves it behind."""


def write_whole(path: Path, pieces: Iterable[bytes | memoryview], is_durable: bool = False) -> None:
    """Put a file in its place, whole or not at all. One that `is_durable` is whole after a loss of power, too, which
    takes the disk's time. Raises: OSError."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.writelines(pieces)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
        if is_durable:
            sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Have the disk know the new names of files, too. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
