"""The process that finishes a file of moments, which workers have written: digest, disk, name, and a remote folder.

Started as `python -m opendiloco.storage.moments_writer`, with a job, as JSON, on its standard input. It says in one
line on stderr what came of it, and in its exit status, as writer.py does. Killed at any moment, it leaves the file that
was there before, and perhaps a partial one that the next writer removes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from opendiloco.storage.remote import RateLimit, Remote
from opendiloco.storage.writer import FLUSH, NICENESS, NOT_SAVED, PIECE, end, end_sent
from opendiloco.training.moments_file import digest_place, read_header
from peers.values.system import PARTIAL, sync_folder


@dataclass(frozen=True)
class MomentsJob:
    """One file to finish; rates are in bytes a second, None: as fast as it goes. The partial one has PARTIAL at its
    name's end. Others of the same `owner`, whose names end in `ending`, are removed."""

    path: str
    ending: str
    run: str
    owner: str
    rate: float | None = None
    remote: str | None = None
    remote_rate: float | None = None


def main() -> int:
    """Do the job that is on the standard input. Returns the exit status."""
    job = MomentsJob(**json.load(sys.stdin))
    os.nice(NICENESS)
    path, began = Path(job.path), time.monotonic()
    try:
        size = finish(path, job.rate)
        for old in path.parent.glob(f"*{job.ending}"):
            if old != path:
                old.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
        return end(NOT_SAVED, f"{path} cannot be written: {error}")
    saved = f"{path} ({size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s)"
    return end_sent(saved, began, None if job.remote is None else lambda: send(path, job))


def finish(path: Path, rate: float | None) -> int:
    """Write the digest into the partial file, have it on the disk, and give it its name. Returns its bytes.

    Raises: OSError; ValueError when it is not what workers write.
    """
    from blake3 import blake3

    partial, digest, limit = path.with_name(path.name + PARTIAL), blake3(), RateLimit(rate)
    with partial.open("r+b") as file:
        _, _, start = read_header(file)
        file.seek(0)
        place = digest_place(file.read(start))
        done = flushed = 0
        while data := file.read(limit.piece(PIECE)):
            digest.update(data)
            done += len(data)
            if done - flushed >= FLUSH:
                os.fdatasync(file.fileno())
                flushed = done
            limit.passed(done)
        os.pwrite(file.fileno(), digest.hexdigest().encode(), place)
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
    return start + done


def send(path: Path, job: MomentsJob) -> None:
    """To the run's folder at the remote, where it takes the place of the owner's last one. Raises: RemoteError."""
    assert job.remote is not None
    remote = Remote(job.remote).folder(job.run)
    remote.send_whole(path, path.name, job.owner, job.remote_rate)
    for name in remote.names():
        if name.endswith(job.ending) and name != path.name:
            remote.remove(name)


if __name__ == "__main__":
    sys.exit(main())
