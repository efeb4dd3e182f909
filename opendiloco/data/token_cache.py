"""Where tokens lie: in memory while they are few, else in files that are mapped into memory and outlive the process.

An entry is a folder that appears whole or not at all: two files of little-endian tokens, and their digests. Processes
of one machine that need the same entry wait for the first of them to write it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from opendiloco.config.data import TokenizerSection
from opendiloco.data.token_files import ABOUT, PARTS, Piece, Tokens, digest_of_parts, map_part, write_parts
from opendiloco.errors import MachineError
from opendiloco.stages import at_stage
from peers.values.system import make_private_folder

logger = logging.getLogger(__name__)

FEW_TOKENS = 1 << 24
"""So many of a source's tokens, and fewer, stay in memory: at most 64 MB."""
FEW_SHARED_TOKENS = 1 << 20
"""The same where several workers would make them, each for itself; of bytes, which cost nothing, as many as ever."""
KEPT_BYTES = 200 << 30
"""Of all entries together. The one that was just written stays, however large it is."""
CHECKS_KEPT = 1000
"""Files without content, each of which says that a folder of tokens was checked."""
CHECKED, LOCK, PARTIAL = ".checked", ".lock", ".partial"


def default_cache_folder() -> Path:
    """`~/.cache/diloco-peer/tokens`, or where XDG_CACHE_HOME says."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "diloco-peer" / "tokens"


def few_tokens(section: TokenizerSection, workers: int) -> int:
    """Return how many tokens each of a machine's workers keeps in its own memory."""
    return FEW_TOKENS if workers == 1 or section.kind == "bytes" else FEW_SHARED_TOKENS


class TokenCache:
    """Tokens under keys. A key names all that determines them.

    Up to `few` tokens stay in memory, unless they are costly to make and the cache is shared, because several processes
    need the same tokens at once. When an entry is written, the ones that were not opened for longest are removed,
    until all take at most `kept_bytes`. A process that has a removed entry open reads on.
    """

    def __init__(
        self, folder: Path | None = None, few: int = FEW_TOKENS, kept_bytes: int = KEPT_BYTES, is_shared: bool = False
    ) -> None:
        self._folder = default_cache_folder() if folder is None else folder
        self._few = few
        self._kept_bytes = kept_bytes
        self._is_shared = is_shared

    def tokens(
        self,
        key: str,
        kind: type[np.unsignedinteger],
        read: Callable[[], Iterator[Piece]],
        is_costly: bool = False,
    ) -> Tokens:
        """Return what is kept under a key, or else what `read` gives, which is kept from now on if it is much.

        Raises: MachineError when it does not fit on the disk; what `read` raises.
        """
        kept = self._open(key)
        if kept is not None:
            return kept
        pieces, few = read(), (bytearray(), bytearray())
        dtype = np.dtype(kind).newbyteorder("<")
        if self._few and not (is_costly and self._is_shared):
            for held_out, tokens in pieces:
                few[held_out].extend(tokens.astype(dtype).tobytes())
                if len(few[0]) + len(few[1]) > self._few * dtype.itemsize:
                    break
            else:
                return Tokens(*(np.frombuffer(part, dtype) for part in few))
        begun = ((bool(part), np.frombuffer(few[part], dtype)) for part in (0, 1))
        with self._locked(key):
            kept = self._open(key)  # another process may have written it meanwhile
            if kept is not None:
                return kept
            written = self._write(key, dtype, chain(begun, pieces))
        self._make_room(key)
        return written

    def once(self, key: str, check: Callable[[], None]) -> None:
        """Run a check that takes long, unless it has passed before on this machine, for what the key names.

        Raises: what `check` raises; MachineError when the folder cannot be written.
        """
        passed = self._folder / f"{key}{CHECKED}"
        if passed.exists():
            return
        with self._locked(key):
            if passed.exists():
                return
            check()
            passed.touch()
        for old in sorted(self._folder.glob(f"*{CHECKED}"), key=_age)[CHECKS_KEPT:]:
            old.unlink(missing_ok=True)

    def drop_all_but(self, prefix: str, number: int) -> None:
        """Remove the entries whose keys begin with `prefix`, but for the newest so many. Who reads them reads on."""
        entries = [path for path in self._entries() if path.name.startswith(prefix)]
        for path in sorted(entries, key=_age)[number:]:
            shutil.rmtree(path, ignore_errors=True)

    def _entries(self) -> list[Path]:
        return [path for path in self._folder.glob("*") if path.is_dir() and not path.suffix]

    def _make_room(self, key: str) -> None:
        """Remove what writers that were killed have left, and the entries that were not opened for longest."""
        for partial in self._folder.glob(f"*{PARTIAL}"):
            with suppress(BlockingIOError, MachineError), self._locked(partial.stem, waits=False):
                shutil.rmtree(partial, ignore_errors=True)
        entries = sorted((path for path in self._entries() if path.name != key), key=_age)
        room = self._kept_bytes - _size(self._folder / key)
        for path in entries:
            room -= _size(path)
            if room < 0:
                shutil.rmtree(path, ignore_errors=True)

    def _open(self, key: str) -> Tokens | None:
        folder = self._folder / key
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            dtype = np.dtype(about["dtype"])
            if dtype not in (np.dtype("<u2"), np.dtype("<u4")):
                raise ValueError(f"tokens of type {dtype}")
            parts = [map_part(folder / part, dtype, about["digests"][part]) for part in PARTS]
            facts = [(dtype.str, part.size, about["digests"][name]) for part, name in zip(parts, PARTS, strict=True)]
            tokens = Tokens(*parts, known_digest=digest_of_parts(facts))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the tokens in %s are damaged (%s); the text is tokenized again", folder, error)
            return None
        with suppress(OSError):
            os.utime(folder)  # it was opened last now
        return tokens

    def _write(self, key: str, dtype: np.dtype[np.unsignedinteger], pieces: Iterator[Piece]) -> Tokens:
        folder, partial = self._folder / key, self._folder / f"{key}{PARTIAL}"
        logger.info("tokens are written to %s", folder)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of somebody who was killed
            make_private_folder(partial)
            digests = {name: part.digest for name, part in write_parts(partial, dtype, pieces).items()}
            (partial / ABOUT).write_text(json.dumps({"dtype": dtype.str, "digests": digests}), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # it was damaged
            partial.rename(folder)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return Tokens(*(map_part(folder / part, dtype) for part in PARTS))

    @contextmanager
    def _locked(self, key: str, waits: bool = True) -> Iterator[None]:
        """Hold the lock of a key, whose file is there only for so long. Raises: BlockingIOError without `waits`, when
        another process has it; MachineError."""
        path = self._folder / f"{key}{LOCK}"
        file = self._lock(path, waits)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            file.close()

    def _lock(self, path: Path, waits: bool) -> BinaryIO:
        while True:
            try:
                make_private_folder(self._folder)
                file = path.open("wb")
            except OSError as error:
                raise self._unusable(error) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    file.close()
                    raise
                at_stage("waiting for tokens that another process of this machine makes")
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    return file
            file.close()  # the one before us has removed it: two processes must not lock two files of one name

    def _unusable(self, error: OSError) -> MachineError:
        return MachineError(
            f"the folder {self._folder} for tokens cannot be written: {error.strerror}.",
            "Free some space, or name a folder on a disk that has it: XDG_CACHE_HOME=FOLDER.",
        )


def _size(folder: Path) -> int:
    """Bytes of a folder's files, as far as they are still there."""
    size = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size


def _age(path: Path) -> float:
    """Seconds since it was made or last opened; what is already gone is oldest."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
