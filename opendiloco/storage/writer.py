"""The writer process, which writes a checkpoint from shared memory to disk or completes a file of moments, and then
copies the file to a remote folder.

It is started as `python -m opendiloco.storage.writer`, with a job as JSON on its standard input and a checkpoint's
state as an inherited descriptor. It reports its outcome in one line on stderr and in its exit status (SAVED and so on).
If it is killed, the earlier files stay, and the next writer removes its partial file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opendiloco.child_processes import NICENESS
from opendiloco.errors import RemoteError
from opendiloco.storage.files import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    file_header,
    file_name,
    kept,
    moments_name,
    prune,
    sweep,
)
from opendiloco.storage.remote import RateLimit, Remote
from opendiloco.training.moments_file import digest_place, read_header
from peers.values.system import PARTIAL, make_private_folder, sync_folder

SAVED, NOT_SENT, NOT_SAVED = 0, 5, 6
"""Exit statuses of the writer process. NOT_SENT: the file is saved, but not at the remote. Python uses 1 and 2."""
PIECE = 4 << 20  # most bytes that one system call copies
FLUSH = 64 << 20  # bytes of a checkpoint that are written between two flushes to the disk


@dataclass(frozen=True)
class KeepingPlan:
    """The settings for a run's checkpoints and moments on this machine: how many are kept, and where. Each rate is in
    bytes a second, or None for no limit."""

    folder: Path
    """The path of a `RunFolder`."""
    keep_newest: int = 2
    keep_every: int = 0
    rate: float | None = None
    remote: str | None = None
    remote_rate: float | None = None
    moments: Literal["none", "local", "remote"] = "local"
    """Places where the inner optimizer's moments are kept: nowhere, on this machine, or also at the remote."""
    disk_limit: int | None = None
    """Most bytes that the folder may take; None: no limit."""

    @property
    def run(self) -> str:
        return self.folder.parent.name

    @property
    def peer_id(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS_FOLDER

    def keeps(self, index: int) -> bool:
        """Return True if the plan keeps a new checkpoint of outer step `index`."""
        return index in kept([index], self.keep_newest, self.keep_every)


def main() -> int:
    """Read a job from the standard input and run it. Return the writer process's exit status."""
    kind, values = json.load(sys.stdin)
    plan = values.pop("plan")
    job = JOBS[kind](KeepingPlan(**plan | {"folder": Path(plan["folder"])}), **values)
    os.nice(NICENESS)
    began = time.monotonic()
    try:
        size = job.write()
    except (OSError, ValueError) as error:
        return _end(NOT_SAVED, f"{job.path} cannot be written: {job.cause(error)}")
    saved = f"{job.path} ({size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s)"
    if job.remote is None:
        return _end(SAVED, saved)
    try:
        job.send(Remote(f"{job.remote.rstrip('/')}/{job.plan.run}"))
    except RemoteError as error:
        return _end(NOT_SENT, f"{saved} is not at the remote: {error}")
    return _end(SAVED, f"{saved}, also at the remote after {time.monotonic() - began:.1f} s")


def _end(status: int, line: str) -> int:
    with suppress(OSError):  # the parent process, which reads stderr, may have ended
        print(line, file=sys.stderr, flush=True)
    return status


# Checkpoints ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CheckpointJob:
    """The job of writing one checkpoint, whose state is in the memory file `descriptor`."""

    plan: KeepingPlan
    index: int
    metadata: dict[str, str]
    descriptor: int
    state_bytes: int

    @property
    def path(self) -> Path:
        return self.plan.checkpoints / file_name(self.index)

    @property
    def remote(self) -> str | None:
        return self.plan.remote

    def write(self) -> int:
        """Write the checkpoint, and remove the checkpoints that the plan does not keep. Return the state's size in
        bytes. Raises: OSError; ValueError if the limit on disk space does not allow the checkpoint."""
        plan, limit = self.plan, self.plan.disk_limit
        if limit is not None and folder_bytes(plan.folder) + self.state_bytes > limit:
            raise ValueError(
                f"{self.state_bytes / 1e6:.0f} MB more exceed --max-disk, {limit / 1e9:g} GB. "
                "Keep fewer with --keep, or raise --max-disk"
            )
        _write_checkpoint(self.path, self.descriptor, self.state_bytes, self.metadata, plan.rate)
        prune(plan.checkpoints, plan.keep_newest, plan.keep_every, self.index)
        return self.state_bytes

    def send(self, remote: Remote) -> None:
        """Copy the checkpoint to the run's remote folder, and remove the checkpoints there that the plan does not keep.
        Raises: RemoteError."""
        plan, manifest = self.plan, self.plan.folder / MANIFEST
        if manifest.exists():
            remote.send(manifest, MANIFEST)
        remote.send_whole(self.path, self.path.name, plan.peer_id, plan.remote_rate)
        remote.prune(plan.keep_newest, plan.keep_every, self.index)

    def cause(self, error: Exception) -> str:
        """Return the reason why the checkpoint was not written, and the remedy, as a text for the operator."""
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            reason = getattr(error, "strerror", None) or error
            return f"{reason}. Training goes on; without checkpoints only the run's peers have its state."
        free = shutil.disk_usage(self.path.parent).free
        return (
            f"{self.path.parent} has no room: a checkpoint needs {self.state_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB "
            "are free. Make room, keep fewer with --keep, or name a folder on another disk with --state."
        )


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes on disk that all files in a folder and its subfolders take."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may have removed the file
            found += path.lstat().st_blocks * 512
    return found


def _write_checkpoint(
    path: Path, descriptor: int, state_bytes: int, metadata: Mapping[str, str], rate: float | None = None
) -> None:
    """Write a checkpoint file of `metadata` and the first `state_bytes` bytes of the memory file `descriptor`, and name
    it `path` when it is complete on disk. The kernel copies the bytes, so memory never holds a second copy of the
    state. Raises: OSError."""
    header = file_header(state_bytes, metadata)
    make_private_folder(path.parent)
    sweep(path.parent)
    if shutil.disk_usage(path.parent).free < len(header) + state_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # refuses to fill the disk, which other programs need
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)  # empties the file only under the lock, because another process may be writing it
            file.write(header)
            _copy(descriptor, file.fileno(), state_bytes, RateLimit(rate))
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BlockingIOError:
        raise  # keeps the partial file, which another process has locked and is writing
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _copy(source: int, target: int, count: int, limit: RateLimit) -> None:
    """Copy the first `count` bytes of the descriptor `source` to the current position of `target`. The offset in
    `source` is explicit, because this process and its parent share the descriptor's own offset."""
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


# Moments --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MomentsJob:
    """The job of completing a file of moments that the workers wrote with the suffix PARTIAL: add the digest, rename
    the file, and remove the peer's older files of moments."""

    plan: KeepingPlan
    index: int

    @property
    def path(self) -> Path:
        return self.plan.checkpoints / moments_name(self.index, self.plan.peer_id)

    @property
    def remote(self) -> str | None:
        return self.plan.remote if self.plan.moments == "remote" else None

    @property
    def _ending(self) -> str:
        return self.path.name.removeprefix(f"outer-step-{self.index:06}")

    def write(self) -> int:
        """Complete the file of moments, remove the peer's older files of moments, and return the new file's size in
        bytes. Raises: OSError, ValueError."""
        size = _finish(self.path, self.plan.rate)
        for old in self.plan.checkpoints.glob(f"*{self._ending}"):
            if old != self.path:
                old.unlink(missing_ok=True)
        return size

    def send(self, remote: Remote) -> None:
        """Copy the file of moments to the run's remote folder, and remove the peer's older files of moments there.
        Raises: RemoteError."""
        remote.send_whole(self.path, self.path.name, self.plan.peer_id, self.plan.remote_rate)
        for name in remote.names():
            if name.endswith(self._ending) and name != self.path.name:
                remote.remove(name)

    def cause(self, error: Exception) -> str:
        return str(error)


def _finish(path: Path, rate: float | None) -> int:
    """Write the digest of its data into the partial file of moments, and rename the file to `path`. Return its size in
    bytes. Read at most `rate` bytes a second (None: no limit). Raises: OSError; ValueError if its header is invalid."""
    from blake3 import blake3

    partial, digest = path.with_name(path.name + PARTIAL), blake3()
    with partial.open("r+b") as file:
        _, _, start = read_header(file)
        file.seek(0)
        place = digest_place(file.read(start))
        for data in RateLimit(rate).read(file, PIECE):
            digest.update(data)
        os.pwrite(file.fileno(), digest.hexdigest().encode(), place)
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    partial.replace(path)
    sync_folder(path.parent)
    return size


JOBS: dict[str, type[CheckpointJob | MomentsJob]] = {kind.__name__: kind for kind in (CheckpointJob, MomentsJob)}

if __name__ == "__main__":
    sys.exit(main())
