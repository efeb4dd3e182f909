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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from blake3 import blake3

from opendiloco.data.tokenizer import TokenArray
from opendiloco.errors import MachineError

logger = logging.getLogger(__name__)

FEW_TOKENS = 1 << 26
"""So many of a source's tokens, and fewer, stay in memory: at most 256 MB."""
PARTS = ("training", "held_out")
ABOUT = "about.json"

Piece = tuple[bool, TokenArray]
"""Whether a document is held out, and its tokens."""


@dataclass(frozen=True)
class Tokens:
    """A source's documents, or a shard's, one after another."""

    training: TokenArray
    held_out: TokenArray


def default_cache_folder() -> Path:
    """`~/.cache/diloco-peer/tokens`, or where XDG_CACHE_HOME says."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "diloco-peer" / "tokens"


class TokenCache:
    """Tokens under keys. A key names all that determines them."""

    def __init__(self, folder: Path | None = None, few: int = FEW_TOKENS) -> None:
        self._folder = default_cache_folder() if folder is None else folder
        self._few = few

    def tokens(self, key: str, kind: type[np.unsignedinteger], read: Callable[[], Iterator[Piece]]) -> Tokens:
        """What is kept under a key, or else what `read` gives, which is kept from now on if it is much.

        Raises: MachineError when it does not fit on the disk; what `read` raises.
        """
        kept = self._open(key)
        if kept is not None:
            return kept
        pieces, few = read(), (bytearray(), bytearray())
        dtype = np.dtype(kind).newbyteorder("<")
        for held_out, tokens in pieces:
            few[held_out].extend(tokens.astype(dtype).tobytes())
            if len(few[0]) + len(few[1]) > self._few * dtype.itemsize:
                break
        else:
            return Tokens(*(np.frombuffer(part, dtype) for part in few))
        begun = ((bool(part), np.frombuffer(few[part], dtype)) for part in (0, 1))
        with self._locked(key):
            kept = self._open(key)  # another process may have written it meanwhile
            return kept if kept is not None else self._write(key, dtype, chain(begun, pieces))

    def drop_all_but(self, prefix: str, number: int) -> None:
        """Remove the entries whose keys begin with `prefix`, but for the newest so many. Who reads them reads on."""
        entries = [path for path in self._folder.glob(f"{prefix}*") if path.is_dir() and not path.suffix]
        for path in sorted(entries, key=_age)[number:]:
            shutil.rmtree(path, ignore_errors=True)

    def _open(self, key: str) -> Tokens | None:
        folder = self._folder / key
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            dtype = np.dtype(about["dtype"])
            if dtype not in (np.dtype("<u2"), np.dtype("<u4")):
                raise ValueError(f"tokens of type {dtype}")
            return Tokens(*(_map(folder / part, dtype, about["digests"][part]) for part in PARTS))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the tokens in %s are damaged (%s); the text is tokenized again", folder, error)
            return None

    def _write(self, key: str, dtype: np.dtype[np.unsignedinteger], pieces: Iterator[Piece]) -> Tokens:
        folder, partial = self._folder / key, self._folder / f"{key}.partial"
        logger.info("more than %d tokens: they are written to %s", self._few, folder)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of somebody who was killed
            partial.mkdir()
            digests = [blake3(), blake3()]
            with (partial / PARTS[0]).open("wb") as training, (partial / PARTS[1]).open("wb") as held_out:
                files = (training, held_out)
                for part, tokens in pieces:
                    data = tokens.astype(dtype).tobytes()
                    files[part].write(data)
                    digests[part].update(data)
            named = dict(zip(PARTS, (digest.hexdigest() for digest in digests), strict=True))
            (partial / ABOUT).write_text(json.dumps({"dtype": dtype.str, "digests": named}), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # it was damaged
            partial.rename(folder)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return Tokens(*(_mapped(folder / part, dtype) for part in PARTS))

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """A source's shards share one lock. Its file stays: else two processes could lock two files of one name."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (self._folder / f"{key.partition('-')[0]}.lock").open("wb")
        except OSError as error:
            raise self._unusable(error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _unusable(self, error: OSError) -> MachineError:
        return MachineError(
            f"the folder {self._folder} for tokens cannot be written: {error.strerror}.",
            "Free some space, or name a folder on a disk that has it: XDG_CACHE_HOME=FOLDER.",
        )


def _map(path: Path, dtype: np.dtype[np.unsignedinteger], digest: str) -> TokenArray:
    """Raises: OSError; ValueError when it is not what was written."""
    found = blake3().update_mmap(path).hexdigest()
    if found != digest:
        raise ValueError(f"{path.name} has another digest")
    return _mapped(path, dtype)


def _mapped(path: Path, dtype: np.dtype[np.unsignedinteger]) -> TokenArray:
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    tokens: TokenArray = np.memmap(path, dtype, mode="r")
    return tokens


def _age(path: Path) -> float:
    """Seconds since it was made, up to a constant; what is already gone is oldest."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
