"""How a run's log lies in files: entries as lines of JSON, and each payload in a file of its own.

The first line names the run, and the numbers that its entries depend on. Each line after it is exactly what
`entry_line` writes, checksum included, so that any flipped bit shows. A line is as long as what happened in its round:
the header is derived from the entries before. Files that are replaced
are written under another name first, and so are there whole or not at all. Nothing waits for the disk: what a power
failure takes is found out by checksums and digests, and other peers have it still.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from peers.log.chain import HEADER_LIMIT, Chain, Entry, newest
from peers.log.header import Header
from peers.log.outcome import Outcome
from peers.log.payload import Payload
from peers.log.state import LogError, LogState
from peers.values.whole_files import PARTIAL
from peers.values.wire import DIGEST_BYTES, digest_of, unpack

ENTRIES = "entries.jsonl"
PAYLOADS = "payloads"
PROOFS = "proofs"
SUFFIX = ".payload"
PROOF_SUFFIX = ".proof"
NO_RUN = LogState("", bytes(DIGEST_BYTES), samples_per_lease=1, tokens_per_sample=1)


def write_line(fields: dict[str, object]) -> bytes:
    """One line of the file: these fields, and a checksum of them."""
    checksum = digest_of(json.dumps(fields).encode()).hex()[:16]
    return json.dumps(fields | {"checksum": checksum}).encode() + b"\n"


def first_line(log: LogState) -> bytes:
    """What all entries of a run depend on, so that the file can be read by itself."""
    return write_line(
        {
            "run": log.run,
            "manifest": log.manifest_digest.hex(),
            "samples_per_lease": log.samples_per_lease,
            "tokens_per_sample": log.tokens_per_sample,
            "staleness": log.staleness,
            "fragments": log.fragments,
            "probation": log.probation,
            "exclusion": log.exclusion,
            "organiser": log.organiser,
        }
    )


def read_first_line(line: bytes) -> LogState:
    """Return a run's log before its first entry. Raises: LogError unless `first_line` has written the line."""
    try:
        fields = json.loads(line)
        names = ("samples_per_lease", "tokens_per_sample", "staleness", "fragments", "probation", "exclusion")
        besides = (fields[name] for name in (*names, "organiser"))
        log = LogState(fields["run"], bytes.fromhex(fields["manifest"]), *besides)
        is_ours = first_line(log) == line
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError("it is corrupt, cut short, or of an older version") from error
    if not is_ours:
        raise LogError("it is corrupt, cut short, or of an older version")
    return log


def entry_line(entry: Entry) -> bytes:
    """One entry as it is written to the file, bytes in hexadecimal."""
    return write_line(
        {
            "index": entry.index,
            "header" if entry.is_whole else "outcome": entry.told.hex(),
            "digest": entry.digest.hex(),
            "state_digest": None if entry.state_digest is None else entry.state_digest.hex(),
            "certificate": None if entry.certificate is None else entry.certificate.hex(),
        }
    )


def read_entry(line: bytes) -> Entry:
    """Raises: LogError unless the line is one that `entry_line` has written, to the last bit."""
    try:
        fields = json.loads(line)
        is_whole = "header" in fields
        told, digest = (bytes.fromhex(fields[name]) for name in ("header" if is_whole else "outcome", "digest"))
        content = unpack(Header, told, HEADER_LIMIT) if is_whole else unpack(Outcome, told, HEADER_LIMIT)
        state_digest = bytes.fromhex(fields["state_digest"] or "") or None
        certificate = bytes.fromhex(fields["certificate"] or "") or None
        entry = Entry(fields["index"], digest, told, is_whole, state_digest, certificate, content.fragment)
        _ = entry.proof
        is_ours = entry_line(entry) == line
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError("it is corrupt, or cut short") from error
    if not is_ours:
        raise LogError("it is corrupt, or cut short")
    return entry


def read_chain(
    path: Path,
    empty_log: LogState | None = None,
    see: Callable[[Entry, Header, LogState], None] = lambda entry, header, before: None,
) -> tuple[Chain, str | None]:
    """Read the whole cycles of a file, up to the first that is corrupt or does not follow. Returns what is wrong there,
    too.

    The first cycle may be from the middle of the run: what came before is vouched for by its headers alone.

    Args:
        empty_log: of the run; by default the one that the file names.
        see: is told each entry with its header, and the log before it. All headers at once may be too large to keep.

    Raises: OSError.
    """
    with path.open("rb") as file:
        lines = enumerate(file, 1)
        first = next(lines, (1, b""))[1]
        try:
            named = read_first_line(first)
            if empty_log and first_line(empty_log) != first:
                raise LogError(f"it is of the run {named.run}, or of another manifest")
        except LogError as error:
            return Chain(empty_log or NO_RUN), f"{path}, line 1: {error}" if first else None
        chain, cycle, problem = Chain(named), list[tuple[Entry, Header, LogState]](), None
        for number, line in lines:
            before = chain.end
            try:
                entry = chain.add(read_entry(line))
            except LogError as error:
                problem = f"{path}, line {number}: {error}"
                break
            cycle.append((entry, newest(chain.end), before))
            if not chain.end.made:
                for told in cycle:
                    see(*told)
                cycle.clear()
        if cycle:
            chain.cut(chain.next_index)
            problem = problem or f"{path}: the last outer step is cut short"
    return chain, problem


def payload_path(folder: Path, index: int, digest: bytes) -> Path:
    """The file of an entry's payload, in the folder of payloads."""
    return folder / f"{index}-{digest.hex()[:8]}{SUFFIX}"


def proof_path(folder: Path, digest: bytes) -> Path:
    """The file of what proves a fault, in a log's folder."""
    return folder / PROOFS / f"{digest.hex()}{PROOF_SUFFIX}"


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left of a log's files. Raises: OSError."""
    patterns = (ENTRIES, f"{PAYLOADS}/*{SUFFIX}", f"{PROOFS}/*{PROOF_SUFFIX}")
    for path in [path for pattern in patterns for path in folder.glob(f"{pattern}{PARTIAL}")]:
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
