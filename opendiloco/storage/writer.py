"""The process that brings a checkpoint from memory to the disk, and from there to a remote folder.

Started as `python -m opendiloco.storage.writer`, with the state's descriptor inherited and a job, as JSON, on its
standard input. It says in one line on stderr what came of it, and in its exit status (SAVED and so on). Killed at any
moment, it leaves the checkpoints that were there before, and perhaps a partial file that the next writer removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opendiloco.errors import RemoteError
from opendiloco.storage.files import file_header, file_name, prune, sweep
from opendiloco.storage.remote import RateLimit, Remote
from peers.values.system import PARTIAL, make_private_folder, sync_folder

SAVED, NOT_SENT, NOT_SAVED = 0, 5, 6
NICENESS = 19
PIECE = 4 << 20  # bytes copied at once
FLUSH = 64 << 20  # bytes; what is not on the disk yet, and the page cache, are kept below about so many


class DiskLimitError(Exception):
    """The owner gives no more room; its words say how to get some."""


@dataclass(frozen=True)
class Job:
    """One checkpoint to write; rates are in bytes a second, None: as fast as it goes."""

    descriptor: int
    state_bytes: int
    index: int
    metadata: dict[str, str]
    folder: str
    keep_newest: int
    keep_every: int
    rate: float | None = None
    remote: str | None = None
    remote_rate: float | None = None
    owner: str = ""
    manifest: str | None = None
    """A file that is to be beside the remote checkpoints, if it is there."""
    disk_limit: int | None = None
    """Bytes that the folder above the checkpoints may take."""


def main() -> int:
    """Do the job that is on the standard input. Returns the exit status."""
    job = Job(**json.load(sys.stdin))
    os.nice(NICENESS)
    path, began = Path(job.folder) / file_name(job.index), time.monotonic()
    try:
        check_disk_limit(path.parent.parent, job.state_bytes, job.disk_limit)
        write_checkpoint(path, job.descriptor, job.state_bytes, job.metadata, job.rate)
        prune(path.parent, job.keep_newest, job.keep_every, job.index)
    except DiskLimitError as error:
        return end(NOT_SAVED, str(error))
    except OSError as error:
        return end(NOT_SAVED, f"{path} cannot be written: {_cause(error, path.parent, job.state_bytes)}")
    saved = f"{path} ({job.state_bytes / 1e6:.1f} MB in {time.monotonic() - began:.1f} s)"
    return end_sent(saved, began, None if job.remote is None else lambda: send(path, job))


def check_disk_limit(folder: Path, needed: int, limit: int | None) -> None:
    """Raises: DiskLimitError when so many bytes more are more than the folder may take."""
    if limit is not None and folder_bytes(folder) + needed > limit:
        raise DiskLimitError(
            f"{needed / 1e6:.0f} MB more are more than the {limit / 1e9:g} GB of --max-disk. Keep fewer with "
            "--keep, or raise --max-disk."
        )


def folder_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was removed meanwhile
            found += path.lstat().st_blocks * 512
    return found


def write_checkpoint(
    path: Path, descriptor: int, state_bytes: int, metadata: Mapping[str, str], rate: float | None = None
) -> None:
    """Write the state that begins at offset 0 of `descriptor`. It is on the disk, whole, when the name is there.

    The kernel copies from memory file to file: no second copy of the state is ever in memory. Raises: OSError.
    """
    header = file_header(state_bytes, metadata)
    make_private_folder(path.parent)
    sweep(path.parent)
    if shutil.disk_usage(path.parent).free < len(header) + state_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # now, and not once the disk is full for everybody
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)  # not before it is ours
            file.write(header)
            _copy(descriptor, file.fileno(), state_bytes, RateLimit(rate))
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BlockingIOError:
        raise  # another process is writing it
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def send(path: Path, job: Job) -> None:
    """To the run's folder at the remote, which is then pruned by the same rule. Raises: RemoteError."""
    assert job.remote is not None
    remote = Remote(job.remote).folder(job.metadata["run"])
    if job.manifest is not None and Path(job.manifest).exists():
        remote.send(Path(job.manifest), Path(job.manifest).name)
    remote.send_whole(path, path.name, job.owner, job.remote_rate)
    remote.prune(job.keep_newest, job.keep_every, job.index)


def _copy(source: int, target: int, count: int, limit: RateLimit) -> None:
    """The first `count` bytes of a file to where another one is. Offsets are ours: both processes share the file's."""
    done = flushed = 0
    while done < count:
        copied = os.sendfile(target, source, done, min(limit.piece(PIECE), count - done))
        if copied == 0:
            raise OSError(errno.EIO, "the memory ends before the state does")
        done += copied
        if done - flushed >= FLUSH:
            os.fdatasync(target)
            os.posix_fadvise(target, 0, done, os.POSIX_FADV_DONTNEED)
            flushed = done
        limit.passed(done)


def _cause(error: OSError, folder: Path, state_bytes: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror or error}. Training goes on; without checkpoints the run lives in its peers alone."
    free = shutil.disk_usage(folder).free
    return (
        f"{folder} has no room: a checkpoint needs {state_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free. "
        "Make room, keep fewer with --keep, or name a folder on another disk with --state."
    )


def end_sent(saved: str, began: float, send: Callable[[], None] | None) -> int:
    """Send what is `saved`, where it is to be sent, and say what came of it. Returns the exit status."""
    if send is None:
        return end(SAVED, saved)
    try:
        send()
    except RemoteError as error:
        return end(NOT_SENT, f"{saved} is not at the remote: {error}")
    return end(SAVED, f"{saved}, also at the remote after {time.monotonic() - began:.1f} s")


def end(status: int, line: str) -> int:
    with suppress(OSError):  # nobody may be there to read it
        print(line, file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
