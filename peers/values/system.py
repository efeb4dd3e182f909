"""The operating system and the event loop, as peers use them: a clock that also counts while the machine sleeps,
private folders whatever the umask, files that are whole or missing, and tasks whose exceptions are logged."""

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
UNSEEN_SECONDS = 1.0  # seconds from a task's failure until its exception is logged, unless a caller has retrieved it
PARTIAL = ".partial"
"""The suffix of a file's name while it is written. A killed process leaves the file behind."""


def now() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task, and log its exception if no caller retrieves it. All tasks outside of a TaskGroup must be started
    by this function."""
    import asyncio  # imported late: the process that writes checkpoints needs no asyncio and must start fast

    task = asyncio.create_task(work)
    task.add_done_callback(_look_later)
    return task


def _look_later(task: asyncio.Task[Any]) -> None:
    # `_log_traceback` is true while no caller has retrieved the exception; asyncio itself logs it only when the task is
    # deleted.
    if task._log_traceback:
        # The timer refers to the task only weakly, since the exception keeps the failed functions' variables in memory.
        # If the task is deleted before the timer ends, asyncio logs the exception.
        task.get_loop().call_later(UNSEEN_SECONDS, _report_unseen, weakref.ref(task))


def _report_unseen(reference: weakref.ref[asyncio.Task[Any]]) -> None:
    task = reference()
    if task is not None and task._log_traceback:
        logger.error("a task has failed: %s", task.get_coro(), exc_info=task.exception())


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these tasks, and return when all have ended. If a task had failed before and no caller has retrieved its
    error, log the error. Log errors during the cancellation for debugging only."""
    import asyncio

    failed = [task for task in tasks if task.done() and task._log_traceback]
    for task in tasks:
        task.cancel()
    for task, end in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        if isinstance(end, Exception):
            is_fault = task in failed and not isinstance(end, DilocoPeerError | OSError | EOFError)
            logger.log(logging.ERROR if is_fault else logging.DEBUG, "a task has failed: %s", task, exc_info=end)


def next_sequence(*last: int) -> int:
    """Return the sequence number of a peer's next heartbeat: milliseconds since the epoch, but above each of its `last`
    numbers, even if the clock was set back or two heartbeats are sent within a millisecond."""
    return max(time.time_ns() // 1_000_000, *(one + 1 for one in last))


def make_private_folder(folder: Path) -> None:
    """Create a folder, and missing parents, that only this user may enter; keep an existing one. Raises: OSError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Open a file, and return its descriptor. If the file is created now, only this user may read it. Used as `opener`
    for secrets. Raises: OSError."""
    return os.open(path, flags, 0o600)


@contextmanager
def temporary_folder(base: Path, prefix: str) -> Iterator[Path]:
    """Create a private folder, and remove it at the end of the context. If the process is killed, `sweep_folders`
    removes the folder later."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with suppress(FileNotFoundError), _held(folder) as is_ours:
            if is_ours and folder.exists():  # otherwise another process has removed the folder before it was locked
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder for the context, and yield True. If a living process has locked it, yield False; locks of dead
    processes do not count, since the kernel releases them. Raises: OSError."""
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


@contextmanager
def shared_folder(folder: Path) -> Iterator[None]:
    """Create a private folder, or use an existing one together with other processes. The last process to leave the
    context removes the folder, and folders beside it that killed processes left behind."""
    while (descriptor := _shared(folder)) is None:
        pass  # another process has just removed the folder, so try again
    try:
        yield
    finally:
        os.close(descriptor)
        sweep_folders(folder.parent, "")


def _shared(folder: Path) -> int | None:
    """Return a descriptor that locks a folder against removal; None if another process removed it. Raises: OSError."""
    make_private_folder(folder)
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)
    return None


def sweep_folders(base: Path, prefix: str) -> None:
    """Remove folders in `base` that killed processes of this user left behind, if their names begin with `prefix`."""
    for folder in base.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                with _held(folder) as is_deserted:
                    if is_deserted:
                        shutil.rmtree(folder)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview], is_durable: bool = False) -> None:
    """Write a file, whole or not at all. With `is_durable` wait for the disk, so that the file survives a power
    failure. Raises: OSError."""
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
    """Write the names of a folder's new files to the disk. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
