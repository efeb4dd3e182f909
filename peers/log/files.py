"""How a run's log lies in files: entries as lines of JSON, and each payload in a file of its own.

A line is exactly what `Entry.line` writes, checksum included, so that any flipped bit shows. Files that are replaced
are written under another name first, and so are there whole or not at all. Nothing waits for the disk: what a power
failure takes is found out by checksums and digests, and other peers have it still.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peers.log.header import Header
from peers.log.payload import Payload
from peers.log.state import LogError, LogState
from peers.values.wire import digest_of, pack, unpack

ENTRIES = "entries.jsonl"
PAYLOADS = "payloads"
SUFFIX = ".payload"
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Entry:
    """A header, packed, since a run can have many of them; and the digest of the state after it, if it is known."""

    index: int
    packed: bytes
    state_digest: bytes | None

    @classmethod
    def of(cls, header: Header, state_digest: bytes | None) -> Entry:
        return cls(header.index, pack(header), state_digest)

    @property
    def header(self) -> Header:
        return unpack(Header, self.packed)

    @property
    def digest(self) -> bytes:
        """The header's digest, its name in the chain."""
        return digest_of(self.packed)

    def line(self) -> bytes:
        """As it is written to the file, digests in hexadecimal."""
        fields = {
            "index": self.index,
            "header": self.packed.hex(),
            "state_digest": None if self.state_digest is None else self.state_digest.hex(),
            "checksum": digest_of(self.packed + (self.state_digest or b"")).hex()[:16],
        }
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        """Raises: LogError unless the line is one that `line` has written, to the last bit."""
        try:
            fields = json.loads(line)
            header, state_digest = (bytes.fromhex(fields[name] or "") for name in ("header", "state_digest"))
            entry = cls.of(unpack(Header, header), state_digest or None)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LogError("it is corrupt, or cut short") from error
        if entry.line() != line:
            raise LogError("it is corrupt, or cut short")
        return entry


def read_entries(path: Path, empty_log: LogState | None = None) -> tuple[list[Entry], str | None]:
    """The entries of a file of lines, up to the first that is corrupt or does not follow; and what is wrong there.

    Without the run's `empty_log` only each line by itself is checked. The first entry may be from the middle of the
    run: what came before is vouched for by its header alone. Raises: OSError.
    """
    entries: list[Entry] = []
    log: LogState | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = Entry.from_line(line)
                if empty_log is not None:
                    log = _following(log or empty_log, entry.header)
            except LogError as error:
                return entries, f"{path}, line {number}: {error}"
            entries.append(entry)
    return entries, None


def _following(log: LogState, header: Header) -> LogState:
    """Raises: LogError, which says in words what is most likely wrong."""
    if header.run != log.run:
        raise LogError(f"entry {header.index} is of the run {header.run}")
    if log.last is None and header.index > 0:
        return log.at(header)
    if (header.index, header.previous) != (log.position.index, log.position.head):
        raise LogError(f"entry {header.index} does not follow from {log.position}")
    return log.append(header)


def payload_path(folder: Path, index: int, digest: bytes) -> Path:
    """The file of an entry's payload, in the folder of payloads."""
    return folder / f"{index}-{digest.hex()[:8]}{SUFFIX}"


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left of a log's files. Raises: OSError."""
    for path in (*folder.glob(f"{ENTRIES}{PARTIAL}"), *folder.glob(f"{PAYLOADS}/*{SUFFIX}{PARTIAL}")):
        path.unlink()


def index_of(path: Path) -> int | None:
    """The entry whose payload a file is; None if it is none."""
    index = path.name.partition("-")[0]
    return int(index) if index.isdecimal() and path.suffix == SUFFIX else None


def read_payload(path: Path, block_bytes: int) -> Payload:
    """Map a payload's file, and digest its chunks anew; whether they are the wanted ones is for the caller to see.

    Args:
        block_bytes: of each of the payload's blocks but the last, which may be shorter.

    Raises: OSError.
    """
    with path.open("rb") as file:
        empty = os.fstat(file.fileno()).st_size == 0  # which cannot be mapped
        data = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return Payload.cut(data, block_bytes)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Put a file in its place, whole or not at all. Raises: OSError."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.writelines(pieces)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
