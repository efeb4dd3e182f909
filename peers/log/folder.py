"""The entries of a run that one peer stores, so that it can resume, send them to other peers, and read them later.

On disk a log is a folder with `entries.jsonl` and `payloads/<index>-<digest>.payload`. Its beginning is missing if the
peer joined in the middle of the run, and so are payloads that a checkpoint covers. The first line of the file names the
run, and the settings that its entries depend on. Each further line is an entry in brief with a checksum, so that every
flipped bit is noticed. A file is replaced by renaming a complete new one, so that it is always whole. The code does not
wait for the disk: checksums and digests reveal data that a power failure took, and other peers still have it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from peers.errors import DilocoPeerError, remedy_for
from peers.log.certificate import Certificate
from peers.log.chain import HEADER_LIMIT, Chain, Entry, Outcome, Stretch, newest
from peers.log.header import Fault, Header, cycle_head
from peers.log.lineage import Lineage
from peers.log.state import LogError, LogState, Quorum
from peers.log.votes import REMEDY
from peers.values.chunks import KEPT_BYTES, ChunkedPayload, KeptPayloads
from peers.values.system import PARTIAL, make_private_folder, write_whole
from peers.values.wire import DIGEST_BYTES, digest_of, unpack

ENTRIES = "entries.jsonl"
PAYLOADS = "payloads"
PROOFS = "proofs"
SUFFIX = ".payload"
PROOF_SUFFIX = ".proof"
RULES = (
    *("samples_per_lease", "tokens_per_sample", "staleness", "fragments", "probation", "exclusion", "organiser"),
    "quorum",
)
"""The fields of `LogState` that a run's entries depend on, besides the manifest."""
NO_RUN = LogState("", bytes(DIGEST_BYTES), samples_per_lease=1, tokens_per_sample=1)


def _write_line(fields: dict[str, object]) -> bytes:
    """Return one line of entries.jsonl: the fields as JSON, with their checksum."""
    checksum = digest_of(json.dumps(fields).encode()).hex()[:16]
    return json.dumps(fields | {"checksum": checksum}).encode() + b"\n"


def _first_line(log: LogState) -> bytes:
    """Return the first line of entries.jsonl: the settings that all entries of a run depend on, so that the file can be
    read without the manifest."""
    fields = {"run": log.run, "manifest": log.manifest_digest.hex()}
    return _write_line(fields | {name: getattr(log, name) for name in RULES})


def _read_first_line(line: bytes) -> LogState:
    """Return a run's log before its first entry, from the first line of entries.jsonl. Raises: LogError unless
    `_first_line` has written the line."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        fields = json.loads(line)
        rules = {name: fields[name] for name in RULES} | {"quorum": Quorum(fields["quorum"])}
        log = LogState(fields["run"], bytes.fromhex(fields["manifest"]), **rules)
        if _first_line(log) == line:
            return log
    raise LogError("it is corrupt, cut short, or of another version")


def _entry_line(entry: Entry) -> bytes:
    return _write_line(
        {
            "index": entry.index,
            "header" if entry.is_whole else "outcome": entry.packed.hex(),
            "digest": entry.digest.hex(),
            "state_digest": None if entry.state_digest is None else entry.state_digest.hex(),
            "certificate": None if entry.certificate is None else entry.certificate.hex(),
        }
    )


def _read_entry(line: bytes) -> Entry:
    """Return the entry in a line of entries.jsonl. Raises: LogError unless `_entry_line` has written these bytes."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        fields = json.loads(line)
        is_whole = "header" in fields
        packed, digest = (bytes.fromhex(fields[name]) for name in ("header" if is_whole else "outcome", "digest"))
        content = unpack(Header, packed, HEADER_LIMIT) if is_whole else unpack(Outcome, packed, HEADER_LIMIT)
        state_digest = bytes.fromhex(fields["state_digest"] or "") or None
        certificate = bytes.fromhex(fields["certificate"] or "") or None
        entry = Entry(fields["index"], digest, packed, is_whole, state_digest, certificate, content.fragment)
        _ = entry.proof
        if _entry_line(entry) == line:
            return entry
    raise LogError("it is corrupt, or cut short")


def read_chain(
    path: Path,
    empty_log: LogState | None = None,
    see: Callable[[Entry, Header, LogState], None] = lambda entry, header, before: None,
) -> tuple[Chain, str | None]:
    """Read the whole cycles of entries.jsonl, up to the first line that is corrupt or does not follow from the lines
    before. Return the cycles as a chain, and an error that names that line (None if all lines are right).

    The first cycle may be from the middle of the run; then only its headers vouch for the entries before it.

    Args:
        empty_log: the run's log before its first entry; by default the one that the file names.
        see: called with each entry, its header, and the log before it. All headers at once may be too large to keep.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        lines = enumerate(file, 1)
        first = next(lines, (1, b""))[1]
        try:
            named = _read_first_line(first)
            if empty_log and _first_line(empty_log) != first:
                raise LogError(f"it is of the run {named.run}, or of another version of its manifest")
        except LogError as error:
            return Chain(empty_log or NO_RUN), f"{path}, line 1: {error}" if first else None
        chain, cycle, problem = Chain(named), list[tuple[Entry, Header, LogState]](), None
        for number, line in lines:
            before = chain.end
            try:
                entry = chain.add(_read_entry(line))
            except LogError as error:
                problem = f"{path}, line {number}: {error}"
                break
            cycle.append((entry, newest(chain.end), before))
            if not chain.end.made:
                for read in cycle:
                    see(*read)
                cycle.clear()
        if cycle:
            chain.cut(chain.next_index)
            problem = problem or f"{path}: the last outer step is cut short"
    return chain, problem


def payload_path(folder: Path, index: int, digest: bytes) -> Path:
    """Return the path of a payload in `folder`, the folder of payloads, given its entry's index and its own digest."""
    return folder / f"{index}-{digest.hex()[:8]}{SUFFIX}"


def proof_path(folder: Path, digest: bytes) -> Path:
    """Return the path of the proof with this digest. `folder` is the log's folder."""
    return folder / PROOFS / f"{digest.hex()}{PROOF_SUFFIX}"


def read_payload(path: Path, block_bytes: int) -> ChunkedPayload:
    """Map a payload's file into memory, and return the payload with the digests of its chunks. The caller must check
    the payload's own digest.

    Args:
        block_bytes: size of each block of the payload; the last one may be shorter.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        empty = os.fstat(file.fileno()).st_size == 0  # an empty file cannot be mapped
        data = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return ChunkedPayload.cut(data, block_bytes)


logger = logging.getLogger(__name__)


class LogFolderError(DilocoPeerError):
    """Error of a log's folder: it does not exist, or the process has no permission or no space to write there."""

    exit_code = 6


class RunLog:
    """One peer's log: consecutive cycles of one lineage, from cycle `first` on, as outcomes (see `Chain`), and the
    entries of the cycle that is still incomplete.

    This class keeps them in memory, with the newest payloads: `kept_bytes` of them, but at least a few. It keeps no
    proofs.
    """

    is_on_disk = False

    def __init__(self, empty_log: LogState, kept_bytes: int = KEPT_BYTES) -> None:
        self.empty_log, self._chain = empty_log, Chain(empty_log)
        self._payloads = KeptPayloads(kept_bytes)
        self._made: dict[int, tuple[Entry, Header]] = {}  # entries and headers of the incomplete cycle, by fragment

    def __len__(self) -> int:
        return len(self._chain)

    @property
    def first(self) -> int:
        """The index of the first cycle in this log; 0 for an empty log."""
        return self._chain.first

    @property
    def next_index(self) -> int:
        """The index of the cycle after this log's last whole one."""
        return self._chain.next_index

    def headers(self, first: int, last: int) -> list[Header]:
        """Return the headers of this log's entries in the cycles [first, last), in order of cycles and fragments."""
        return list(self._chain.headers(first, last))

    def heads(self, first: int, last: int) -> list[bytes]:
        """Return the head of the log after each cycle in [first, last) that this log has."""
        entries, fragments = self._chain.cycles(first, last), self._chain.fragments
        cycles = (entries[start : start + fragments] for start in range(0, len(entries), fragments))
        return [cycle_head([entry.digest for entry in cycle]) for cycle in cycles]

    def faults(self, first: int, last: int) -> list[Fault]:
        """Return the faults that this log's entries in the cycles [first, last) name."""
        return [fault for entry in self._chain.cycles(first, last) for fault in entry.content.faults]

    def heads_at(self, indices: Iterable[int]) -> dict[int, bytes]:
        """Return the head of the log after each of these numbers of cycles, by number. Unknown heads are left out."""
        found = {index: self._chain.head(index - 1) for index in indices}
        return {index: head for index, head in found.items() if head is not None}

    def header_at(self, index: int, fragment: int | None = None) -> Header | None:
        """Return the header of the entry of cycle `index` for this fragment (if None, the closing entry). Return None
        if this log has no such cycle."""
        headers = list(self._chain.headers(index, index + 1))
        return headers[-1 if fragment is None else fragment] if headers else None

    def state_digest_at(self, index: int) -> bytes | None:
        """Return the digest of the state after cycle `index`; None if this log does not know it."""
        entry = self._chain.entry(index)
        return None if entry is None else entry.state_digest

    def certificate_at(self, index: int, fragment: int | None = None) -> Certificate | None:
        """Return the certificate of the entry of cycle `index` for this fragment (if None, of the closing entry).
        Return None if this log does not know it."""
        entry = self._chain.entry(index, fragment)
        return None if entry is None else entry.proof

    def log_after(self, index: int) -> LogState | None:
        """Return the log after `index` cycles; None if this log does not have them."""
        return self._chain.after(index - 1)

    def states_after(self, log: LogState) -> Iterator[tuple[Entry, LogState]]:
        """Yield the entries of this log that come after `log`, which ends with a whole cycle (all if it is empty), each
        with the log that ends after it. Raises: LogError when an entry does not follow."""
        for entry in self._chain.cycles(log.position.index, self.next_index):
            log = entry.after(log)
            yield entry, log

    def lineage(self, end: LogState) -> Lineage:
        """Return the last entries up to `end` as a `Lineage`; one without entries if this log does not have `end`. Read
        the certificates of all entries, since the last entry that a minority made may be old."""
        lineage = Lineage(self.empty_log if self.first == 0 else end)
        for index, log in self._chain.states(self.first, end.position.index):
            header = newest(log)
            entry = self._chain.entry(index, header.fragment)
            if 0 < index == self.first:
                lineage = Lineage(log)
            elif entry is not None:
                lineage.append(header, log, entry.proof)
        return lineage if lineage.log.position == end.position else Lineage(end)

    def stretch(self, first: int, last: int, is_whole: bool) -> Stretch:
        """Return as many of the cycles [first, last) as a stretch may have; none if `first` is missing. With
        `is_whole`, the first cycle's entries are headers, for a receiver that does not know the log before them."""
        return self._chain.stretch(first, last, is_whole)

    def append(
        self,
        header: Header,
        state_digest: bytes | None,
        payload: ChunkedPayload | None,
        certificate: Certificate | None = None,
    ) -> None:
        """Add an applied entry. If this log already has the entry, add only its certificate and state digest.
        `state_digest` is the digest of the state after the entry's cycle, and may be given with any entry of the cycle.

        A whole cycle of another lineage replaces all cycles from its index on. If the cycle before it is not here, the
        log begins anew with it.

        Raises:
            LogError: the payload is not the entry's, or the entry does not follow.
            LogFolderError: the disk does not take the entry. It is in the log in memory, and the next call writes it
                again.
        """
        if payload is not None and payload.digest != header.payload:
            raise LogError(f"the payload is not that of entry {header.index}")
        try:
            self._add(Entry.whole(header, state_digest, certificate), header)
        finally:
            if payload is not None:
                self.keep_payload(header.index, payload)

    def prepend(self, stretch: Stretch) -> None:
        """Add earlier cycles, which end where this log begins. Any peer may send them: this log's digests prove them.

        Raises:
            LogError: they do not lead up to it; nothing is changed.
            LogFolderError: the disk does not take them.
        """
        if stretch.contents:
            self._chain = self._chain.led_up_to(stretch)
            self._save()

    def follow(self, chain: Chain, end: int) -> None:
        """Replace this log's entries by those of `chain`, another peer's log that was checked, up to cycle `end`
        (exclusive). Raises: LogFolderError."""
        for header in chain.headers(chain.first, end):
            entry = chain.entry(header.index, header.fragment)
            self.append(header, None, None, entry.proof if entry else None)
        if self.next_index > end:
            self._chain.cut(end)
            self._save()

    def payload(self, digest: bytes) -> ChunkedPayload | None:
        """Return the payload with this digest; None if this log does not have it. This takes time, because a payload on
        the disk is digested again."""
        return self._payloads.get(digest)

    def keep_payload(self, index: int, payload: ChunkedPayload) -> None:
        """Store the payload of an entry voted for or applied by this peer. Thread-safe. Raises: LogFolderError."""
        self._payloads.keep(payload)

    def prune(self, before: int) -> None:
        """Delete the payloads of entries with an index less than `before` from the disk. Raises: LogFolderError."""

    def keep_proofs(self, proofs: Iterable[bytes]) -> None:
        """Store the proofs of the faults that an entry notes, if this log is on a disk. Raises: LogFolderError."""

    def has_proof(self, digest: bytes) -> bool:
        """Return True if this log's folder has the proof with this digest."""
        return False

    def proof(self, digest: bytes) -> bytes | None:
        """Return the proof with this digest; None if this log does not have it."""
        return None

    def _save(self, appended: Sequence[Entry] = ()) -> None:
        """Write the log to the disk, if it is on a disk: append the entries `appended`, or if there are none, write all
        entries anew."""

    def _add(self, entry: Entry, header: Header) -> None:
        known = self._chain.entry(header.index, header.fragment)
        if (is_known := known is not None and known.digest == header.digest) and self._chain.complete(entry):
            self._save()
        if any(other.previous != header.previous for _, other in self._made.values()):
            if is_known:
                return
            self._made.clear()
        # Collect the whole cycle, even stored entries: it may differ from the stored cycle in a later fragment only.
        self._made[header.fragment] = entry, header
        if len(self._made) == self._chain.fragments:
            made, self._made = [self._made[fragment] for fragment in sorted(self._made)], {}
            if self._chain.head(header.index) != cycle_head([entry.digest for entry, _ in made]):
                self._add_cycle(header.index, [entry for entry, _ in made], [header for _, header in made])

    def _add_cycle(self, index: int, cycle: list[Entry], headers: Sequence[Header]) -> None:
        """Add the entries of one cycle, in the order of fragments. Any entry may have the digest of the state after the
        cycle, which is stored in the last entry."""
        state_digest = next((entry.state_digest for entry in cycle if entry.state_digest), None)
        cycle = [replace(entry, state_digest=None) for entry in cycle]
        cycle[-1] = replace(cycle[-1], state_digest=state_digest)
        if self._chain.head(index - 1) != headers[0].previous:
            chain = Chain(self.empty_log)
            for entry in cycle:
                chain.add(entry)
            self._chain = chain
            self._save()
            return
        log = self._chain.after(index - 1)
        assert log is not None
        for header in headers:  # an invalid entry raises here, before `cut` removes stored cycles
            log = log.append(header)
        is_new = self._chain.entry(index) is None
        if not is_new:
            self._chain.cut(index)
        added = [self._chain.add(entry) for entry in cycle]
        self._save(added if is_new else ())


class LogFolder(RunLog):
    """One peer's log in a folder on the disk. Only one process may open it. Not thread-safe, except `payload` and
    `keep_payload`."""

    is_on_disk = True

    def __init__(self, path: Path, chain: Chain, block_bytes: int) -> None:
        super().__init__(chain.empty_log)
        self._chain = chain
        self.path = path
        self._block_bytes = block_bytes
        self._is_behind = False  # True while entries.jsonl does not have all entries of the chain
        self._keeping = Lock()

    @classmethod
    def open(cls, path: Path, empty_log: LogState, block_bytes: int) -> LogFolder:
        """Return the log in the folder `path`, which is created if missing. Entries from the first corrupt line on are
        removed, with a warning. `block_bytes` is the size of each block of a payload except the last. Raises:
        LogFolderError."""
        file = path / ENTRIES
        with _usable(path):
            make_private_folder(path / PAYLOADS)
            for pattern in (ENTRIES, f"{PAYLOADS}/*{SUFFIX}", f"{PROOFS}/*{PROOF_SUFFIX}"):
                for partial in list(path.glob(f"{pattern}{PARTIAL}")):
                    partial.unlink()
            file.touch()
            chain, problem = read_chain(file, empty_log)
            log = cls(path, chain, block_bytes)
            if problem:
                damaged = file.with_suffix(".damaged")
                shutil.copyfile(file, damaged)
                logger.warning(
                    "%s. The log now ends before this line. The damaged file was copied to %s", problem, damaged
                )
                log._save()
        return log

    def payload(self, digest: bytes) -> ChunkedPayload | None:
        """Read the payload with this digest from the disk, and check its digest. Return None if there is no valid file.
        Remove a corrupt file, with a warning."""
        for path in (self.path / PAYLOADS).glob(f"*-{digest.hex()[:8]}{SUFFIX}"):
            try:
                payload = read_payload(path, self._block_bytes)
                if payload.digest == digest:
                    return payload
                path.unlink(missing_ok=True)
                logger.warning("removed %s: its bytes do not have the digest that its entry names", path)
            except OSError as error:
                logger.warning("cannot read %s: %s", path, error.strerror or error)
        return None

    def prune(self, before: int) -> None:
        with _usable(self.path):
            for path in (self.path / PAYLOADS).glob(f"*{SUFFIX}"):
                index = path.name.partition("-")[0]
                if index.isdecimal() and int(index) < before:
                    path.unlink(missing_ok=True)

    def keep_proofs(self, proofs: Iterable[bytes]) -> None:
        with _usable(self.path):
            for proof in proofs:
                path = proof_path(self.path, digest_of(proof))
                make_private_folder(path.parent)
                write_whole(path, [proof])

    def has_proof(self, digest: bytes) -> bool:
        with suppress(OSError):
            return proof_path(self.path, digest).exists()
        return False

    def proof(self, digest: bytes) -> bytes | None:
        """Read the proof with this digest from the disk, and check its digest. Return None if there is no valid file.
        Remove a corrupt file, with a warning."""
        path = proof_path(self.path, digest)
        try:
            proof = path.read_bytes()
            if digest_of(proof) == digest:
                return proof
            path.unlink(missing_ok=True)
            logger.warning("removed %s: its bytes do not have the digest that its entry names", path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot read %s: %s", path, error.strerror or error)
        return None

    def keep_payload(self, index: int, payload: ChunkedPayload) -> None:
        path = payload_path(self.path / PAYLOADS, index, payload.digest)
        with self._keeping, _usable(self.path):
            if not path.exists():
                write_whole(path, [payload.data])

    def _save(self, appended: Sequence[Entry] = ()) -> None:
        file = self.path / ENTRIES
        whole = not appended or self._is_behind or len(self) == 1
        self._is_behind = True
        with _usable(self.path):
            if whole:
                entries = map(_entry_line, self._chain.entries)
                write_whole(file, (_first_line(self.empty_log), *entries))
            else:
                before = file.stat().st_size
                try:
                    with file.open("ab") as lines:
                        lines.write(b"".join(map(_entry_line, appended)))
                except OSError:  # remove the partly written line, since it would count as damage
                    os.truncate(file, before)
                    raise
        self._is_behind = False


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Replace an OSError that is raised in the context by a LogFolderError."""
    try:
        yield
    except OSError as error:
        raise LogFolderError(
            f"cannot keep the run's log in {folder}: {error.strerror or error}.",
            remedy_for(error, REMEDY),
        ) from error
