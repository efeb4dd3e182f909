"""The loading of a run's state from this machine's disk: checkpoints, moments, and the replay of the log."""

from __future__ import annotations

import asyncio
import logging
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from opendiloco.errors import CheckpointError
from opendiloco.quantities import VALUE_BYTES
from opendiloco.storage.files import FORMAT, DamagedFileError, file_name, index_of, indices_in, read_file_header
from opendiloco.training.moments_file import read_header
from peers.errors import quoted
from peers.log.folder import RunLog
from peers.log.header import NO_PAYLOAD, Header, cycle_head
from peers.log.state import LogError, LogState
from peers.transfer.following import step
from peers.transfer.snapshots import Snapshot
from peers.transfer.storage import empty
from peers.values.chunks import chunk_digests, digest_of_chunks
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, WireError, pack, unpack
from peers.values.workload import BadBlocksError, SnapshotError, Workload

logger = logging.getLogger(__name__)

FIELDS = {"format", "run", "last", "head", "ends", "state_digest"}


@dataclass(eq=False)
class Checkpoint(Snapshot):
    """A snapshot whose data are mapped from the checkpoint file at `path`: the momentum, then theta. The digest has
    been checked, but values may be infinite or NaN."""

    path: Path = field(kw_only=True)


def metadata_of(run: str, last: Header | None, state_digest: bytes, ends: Sequence[bytes] = ()) -> dict[str, str]:
    """Return the metadata of a checkpoint file. `last` is the header of the last entry before the state; `ends` are the
    digests of the last cycle's entries."""
    head = b"" if last is None else cycle_head(ends or (last.digest,))
    return {
        "format": FORMAT,
        "run": run,
        "last": "" if last is None else pack(last).hex(),
        "head": head.hex(),
        "ends": b"".join(ends).hex(),
        "state_digest": state_digest.hex(),
    }


@dataclass(frozen=True)
class Checkpoints:
    """The reader of a run's checkpoint files in `folder`, which need not exist. `run` is the run's id."""

    folder: Path
    run: str

    def indices(self) -> list[int]:
        """Return the outer steps of all checkpoints, intact or damaged, newest first. Raises: CheckpointError if the
        folder is unreadable."""
        try:
            return indices_in(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the folder {self.folder} cannot be read: {error.strerror}.", "Correct its name or its permissions."
            ) from error

    def load_newest(self, at_most: int | None = None) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there is none. With `at_most`, ignore checkpoints of later
        outer steps. Raises: CheckpointError if the folder is unreadable."""
        return self.load_first(index for index in self.indices() if at_most is None or index <= at_most)

    def load_first(self, indices: Iterable[int]) -> Checkpoint | None:
        """Return the first intact checkpoint among those of the outer steps `indices`, or None if all are damaged. Log
        a warning for each damaged checkpoint before it."""
        for index in indices:
            try:
                return load_checkpoint(self.folder / file_name(index), self.run)
            except CheckpointError as error:
                logger.warning("%s The file is skipped; another checkpoint is used if there is one.", error.message)
        return None


def load_checkpoint(path: Path, run: str) -> Checkpoint:
    """Return the checkpoint in a file. Raises: CheckpointError if the file is unreadable or damaged, or if its state is
    of another run than `run` or of another outer step than the file's name states."""
    try:
        with path.open("rb") as file:
            metadata, offset = read_file_header(file)
            last, state_digest, ends = _read_metadata(metadata, run)
            state = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[offset:]
        found = Checkpoint(last, state_digest, chunk_digests([state]), state, ends, path=path)
        if index_of(path.name) not in (None, found.index):
            raise DamagedFileError(f"holds the state after {found.index} outer steps, which its name contradicts")
        if digest_of_chunks(found.chunk_digests) != state_digest:
            raise DamagedFileError("holds values that do not match its digest")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}.", "Correct its name or permissions."
        ) from error
    except DamagedFileError as error:
        raise CheckpointError(f"{path} {error}.", "Use another checkpoint.") from error
    return found


def _read_metadata(metadata: Mapping[str, str], run: str) -> tuple[Header | None, bytes, tuple[bytes, ...]]:
    """Return, from a checkpoint's metadata, the last entry's header, the state's digest, and the digests of the last
    cycle's entries. Raises: DamagedFileError if the metadata are invalid."""
    if metadata.get("format") != FORMAT or metadata.keys() != FIELDS:
        raise DamagedFileError(f"is not of the format {FORMAT!r}")
    if metadata["run"] != run:
        raise DamagedFileError(f"belongs to the run {quoted(metadata['run'], 120)}, not to {run}")
    try:
        state_digest, packed = bytes.fromhex(metadata["state_digest"]), bytes.fromhex(metadata["last"])
        last = unpack(Header, packed, MESSAGE_LIMIT) if packed else None
        digests = bytes.fromhex(metadata["ends"])
    except (WireError, ValueError) as error:
        raise DamagedFileError(f"has metadata that cannot be read ({error})") from error
    ends = tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
    is_of_run = last is None or (last.run == run and ends[-1:] in ((), (last.digest,)))
    if metadata_of(run, last, state_digest, ends) != metadata or not is_of_run:
        raise DamagedFileError("has metadata that contradicts itself")
    return last, state_digest, ends or (() if last is None else (last.digest,))


# Moments --------------------------------------------------------------------------------------------------------------
MOMENTS_NAME = re.compile(r"outer-step-(\d{6,18})\.(\w+)\.moments\.safetensors")
CHECKED_AT_ONCE = 1 << 22  # number of values that a check reads at a time, which limits its memory


def newest_moments(folder: Path, peer_id: str) -> Path | None:
    """Return the path of a peer's newest file of moments; None if there is no such file."""
    paths = folder.glob(f"*.{peer_id}.moments.safetensors")
    found = {int(match[1]): path for path in paths if (match := MOMENTS_NAME.fullmatch(path.name))}
    return found[max(found)] if found else None


def check_moments_file(path: Path) -> None:
    """Check that a file of moments matches its digest and has finite values. Raises: SnapshotError, OSError."""
    with path.open("rb") as file:
        try:
            metadata, _, start = read_header(file)
        except ValueError as error:
            raise SnapshotError(str(error)) from error
        file.seek(start)
        digest = blake3(max_threads=blake3.AUTO)
        while data := file.read(VALUE_BYTES * CHECKED_AT_ONCE):
            digest.update(data)
            if not np.isfinite(np.frombuffer(data, np.float32)).all():
                raise SnapshotError("it holds NaN or infinity")
    if digest.hexdigest() != metadata.get("digest"):
        raise SnapshotError("it holds values that do not match its digest")


# Replay ---------------------------------------------------------------------------------------------------------------
async def resume(
    workload: Workload, log: RunLog, checkpoint: Snapshot | None = None, until: int | None = None
) -> LogState:
    """Restore a workload from `checkpoint`, or begin with the run's initial state if there is none. Then apply the
    later entries of the log, up to outer step `until` or the log's end.

    Each state is compared with the digest that was recorded when it was first reached. If an entry or its payload is
    missing, or gives another state, a warning names the entry, and the workload keeps the state before it.

    Return the log at the state that was reached, which may be before the end of `log`.

    Raises: SnapshotError, with the workload unchanged, if the checkpoint is not a state of this model.
    """
    stop = log.next_index if until is None else min(log.next_index, until)
    if checkpoint is None:
        if stop == 0:
            return log.empty_log
        state = empty(workload.state_size)
        await workload.copy_state(state)
        checkpoint = Snapshot(None, await workload.state_digest(), (), state)
    else:
        await workload.restore(checkpoint.data, checkpoint.state_digest)
    while True:
        reached, wrong = await _replay(workload, log, log.empty_log.at(checkpoint.last, checkpoint.ends), stop)
        if wrong is None:
            return reached
        stop = wrong
        await workload.restore(checkpoint.data, checkpoint.state_digest)  # undoes the cycle that led to a wrong state


async def _replay(workload: Workload, log: RunLog, at: LogState, stop: int) -> tuple[LogState, int | None]:
    """Apply the log's cycles to the workload, from the state `at` to outer step `stop` or the first unusable cycle.
    Return the log at the last right state, and the index of a cycle that led to a wrong state, or None without one.

    A cycle that is missing or damaged is unusable. After a wrong cycle, the workload has the wrong state.
    """
    while at.position.index < stop:
        index = at.position.index
        headers = log.headers(index, index + 1)
        if not headers:
            logger.warning("entry %d is not in this machine's log: the replay ends before it", index)
            break
        try:
            after = at
            for header in headers:
                after = after.append(header)
            named = [header for header in headers if header.payload != NO_PAYLOAD]
            kept = {one.fragment: await asyncio.to_thread(log.payload, one.payload) for one in named}
            payloads = {fragment: payload.data for fragment, payload in kept.items() if payload}
            if len(payloads) < len(named):
                logger.warning("the payload of entry %d is missing: the replay ends before it", index)
                break
            await step(workload, index, payloads, at.amendment)
            state_digest = await workload.state_digest()
        except (LogError, BadBlocksError) as error:
            logger.warning("entry %d of this machine's log cannot be replayed: %s", index, error)
            break
        if log.state_digest_at(index) not in (None, state_digest):
            logger.warning("entry %d leads to another state than the recorded one: the replay ends before it", index)
            return at, index
        at = after
    return at, None
