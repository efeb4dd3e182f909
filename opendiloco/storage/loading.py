"""The checkpoints of a run in a folder: found, and held against what they say of themselves before they are used."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendiloco.errors import CheckpointError
from opendiloco.storage.files import (
    FORMAT,
    DamagedFileError,
    file_name,
    index_of,
    indices_in,
    prune,
    read_file_header,
    sweep,
)
from peers.errors import quoted
from peers.log.header import Header, cycle_head
from peers.values.chunks import chunk_digests, digest_of_chunks
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, WireError, pack, unpack

logger = logging.getLogger(__name__)

FIELDS = {"format", "run", "last", "head", "state_digest"}
ENDS = "ends"
"""A further field where a cycle has several entries: their digests."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state whose bytes are those that its digest was taken of, and the entry that closes the last cycle that led to
    it, whose entries have the digests `ends`.

    `state` is mapped from the file: momentum's bytes, then theta's. Whether the values are finite has not been checked.
    """

    path: Path
    last: Header | None
    state: memoryview
    state_digest: bytes
    chunk_digests: tuple[bytes, ...]
    ends: tuple[bytes, ...] = ()

    @property
    def index(self) -> int:
        """Outer steps taken."""
        return index_after(self.last)


def index_after(last: Header | None) -> int:
    """Outer steps taken once this entry of the log, its last, is applied."""
    return 0 if last is None else last.index + 1


def metadata_of(run: str, last: Header | None, state_digest: bytes, ends: Sequence[bytes] = ()) -> dict[str, str]:
    """What a checkpoint says of itself."""
    head = b"" if last is None else cycle_head(ends or (last.digest,))
    more = {ENDS: b"".join(ends).hex()} if len(ends) > 1 else {}
    return {
        "format": FORMAT,
        "run": run,
        "last": "" if last is None else pack(last).hex(),
        "head": head.hex(),
        "state_digest": state_digest.hex(),
        **more,
    }


@dataclass(frozen=True)
class Checkpoints:
    """Those of one run (by its id) in a folder, which need not exist."""

    folder: Path
    run: str

    def indices(self) -> list[int]:
        """Of all that are there, good or not, the newest first. Raises: CheckpointError: the folder is unreadable."""
        try:
            return indices_in(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the folder {self.folder} cannot be read: {error.strerror}.", "Correct its name or its permissions."
            ) from error

    def load_newest(self, at_most: int | None = None) -> Checkpoint | None:
        """The newest good one, or the newest after at most so many outer steps; each that is not good is named in the
        log. None: there is no good one.

        Raises: CheckpointError when the folder is unreadable.
        """
        return self.load_first(index for index in self.indices() if at_most is None or index <= at_most)

    def load_first(self, indices: Iterable[int]) -> Checkpoint | None:
        """Return the first good one of these; each that is not good is named in the log. None: none is good."""
        for index in indices:
            try:
                return self.load(index)
            except CheckpointError as error:
                logger.warning("%s It is skipped; another checkpoint is used if there is one.", error.message)
        return None

    def load(self, index: int) -> Checkpoint:
        """The one after `index` outer steps. Raises: CheckpointError when it is missing, damaged or of another run."""
        path = self.folder / file_name(index)
        if not path.exists():
            there = ", ".join(map(str, self.indices())) or "none"
            raise CheckpointError(
                f"{self.folder} has no checkpoint after {index} outer steps.", f"Choose one that is there: {there}."
            )
        return load_checkpoint(path, self.run)

    def prune(self, keep_newest: int = 2, keep_every: int = 0) -> None:
        """Remove all but the newest so many and every one whose index is a multiple of `keep_every`, and what writers
        that died have left. Raises: OSError."""
        sweep(self.folder)
        prune(self.folder, keep_newest, keep_every)


def load_checkpoint(path: Path, run: str) -> Checkpoint:
    """Raises: CheckpointError when it is unreadable, damaged, or not what its name says, of the run with this id."""
    try:
        with path.open("rb") as file:
            metadata, offset = read_file_header(file)
            last, state_digest, ends = _read_metadata(metadata, run)
            state = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[offset:]
        if index_of(path.name) not in (None, index_after(last)):
            raise DamagedFileError(f"holds the state after {index_after(last)} outer steps, not what its name says")
        digests = chunk_digests([state])
        if digest_of_chunks(digests) != state_digest:
            raise DamagedFileError("holds values that are not those it was written with")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}.", "Correct its name or permissions."
        ) from error
    except DamagedFileError as error:
        raise CheckpointError(f"{path} {error}.", "Use another checkpoint.") from error
    return Checkpoint(path, last, state, state_digest, digests, ends)


def _read_metadata(metadata: Mapping[str, str], run: str) -> tuple[Header | None, bytes, tuple[bytes, ...]]:
    """The log's last header, the state digest, and the digests of all entries of the last cycle.

    Raises: DamagedFileError."""
    if metadata.get("format") != FORMAT or metadata.keys() - {ENDS} != FIELDS:
        raise DamagedFileError(f"is not of the format {FORMAT!r}")
    if metadata["run"] != run:
        raise DamagedFileError(f"belongs to the run {quoted(metadata['run'], 120)}, not to {run}")
    try:
        state_digest, packed = bytes.fromhex(metadata["state_digest"]), bytes.fromhex(metadata["last"])
        last = unpack(Header, packed, MESSAGE_LIMIT) if packed else None
        told = bytes.fromhex(metadata.get(ENDS, ""))
    except (WireError, ValueError) as error:
        raise DamagedFileError(f"has metadata that cannot be read ({error})") from error
    ends = tuple(told[at : at + DIGEST_BYTES] for at in range(0, len(told), DIGEST_BYTES))
    is_of_run = last is None or (last.run == run and ends[-1:] in ((), (last.digest,)))
    if metadata_of(run, last, state_digest, ends) != metadata or not is_of_run:
        raise DamagedFileError("has metadata that contradicts itself")
    return last, state_digest, ends or (() if last is None else (last.digest,))
