"""Folders that only this user may enter, whatever the umask, and files that only this user may read."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. One that is there stays as it is.

    Raises: OSError.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Open a file that, if it is made now, only this user may read: the `opener` of secrets. Raises: OSError."""
    return os.open(path, flags, 0o600)


@contextmanager
def temporary_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A new private folder for as long as the context lasts. A killed process leaves it to `sweep_folders`."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with suppress(FileNotFoundError), held(folder) as is_ours:
            if is_ours and folder.exists():  # else it was swept before it was held
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold a folder meanwhile, if no living process does: the kernel releases those of a dead one. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def sweep_folders(base: Path, prefix: str) -> None:
    """Remove the temporary folders that killed processes of this user left behind."""
    for folder in base.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                with held(folder) as is_deserted:
                    if is_deserted:
                        shutil.rmtree(folder)
