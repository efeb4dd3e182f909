"""The operating system and the event loop, as the swarm uses them: a clock that runs on while the machine sleeps,
folders that only this user may enter whatever the umask, files that are there whole or not at all, and tasks whose
exceptions are seen.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from peers.errors import DilocoPeerError

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)
T = TypeVar("T")
UNSEEN_SECONDS = 1.0  # after its end, in which a task's owner takes its exception; who awaits it does so at once
PARTIAL = ".partial"
"""What the name of a file ends in while it is written. A process that is killed leaves it behind."""


def now() -> float:
    """Return the time. A laptop's lid stops the monotonic clock, while for all others time goes on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task. Its exception is logged where no caller takes it: all tasks outside of a TaskGroup begin here."""
    import asyncio  # here, since the checkpoints' writer, which needs none, is to start fast

    task = asyncio.create_task(work)
    task.add_done_callback(_look_later)
    return task


def _look_later(task: asyncio.Task[Any]) -> None:
    if task._log_traceback:  # asyncio's note of an exception that no one has taken; it logs it only at the task's end
        # Weakly: its traceback has the frames, and with them the memory, of what may be over. asyncio reports the rest.
        task.get_loop().call_later(UNSEEN_SECONDS, _report_unseen, weakref.ref(task))


def _report_unseen(reference: weakref.ref[asyncio.Task[Any]]) -> None:
    task = reference()
    if task is not None and task._log_traceback:
        logger.error("a task has failed: %s", task.get_coro(), exc_info=task.exception())


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these tasks, and return when all have ended. One that had failed before is logged, unless a caller has
    taken its exception; what others raise while they are cancelled is of interest only to developers."""
    import asyncio

    failed = [task for task in tasks if task.done() and task._log_traceback]
    for task in tasks:
        task.cancel()
    for task, end in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if isinstance(end, Exception):
            is_fault = task in failed and not isinstance(end, DilocoPeerError | OSError | EOFError)
            logger.log(logging.ERROR if is_fault else logging.DEBUG, "a task has failed: %s", task, exc_info=end)


def next_sequence(*last: int) -> int:
    """Return the sequence of a peer's next heartbeat: milliseconds since the epoch, but above each of the `last` ones
    of its key, also where the clock was set back or two come within a millisecond."""
    return max(time.time_ns() // 1_000_000, *(one + 1 for one in last))


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
        with suppress(FileNotFoundError), _held(folder) as is_ours:
            if is_ours and folder.exists():  # else it was swept before it was held
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
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
                with _held(folder) as is_deserted:
                    if is_deserted:
                        shutil.rmtree(folder)


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
