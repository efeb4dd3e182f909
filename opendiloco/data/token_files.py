"""Token ids in files: a cache of the tokens that this machine makes, and folders that `diloco-peer tokenize` makes.

A cache entry and a folder have a file for training and a held-out file, both with a BLAKE3 digest.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
from blake3 import blake3
from pydantic import Field, ValidationError

from opendiloco.config.data import TokenizerSection
from opendiloco.config.section import Digest, Section
from opendiloco.data.hub import folder_bytes
from opendiloco.data.own_files import cache_folder
from opendiloco.data.tokenizer import TokenArray, Tokenizer, digest_of_tokenizer
from opendiloco.errors import DataError, MachineError, first_line
from opendiloco.stages import at_stage, passing
from peers.values.system import make_private_folder

PARTS = ("training", "held_out")
"""Names of the two token files of a source."""
ABOUT = "about.json"
"""The file that describes the two token files."""

Piece = tuple[bool, TokenArray]
"""True for a held-out part of a document, False for a training part; and the part's tokens."""


@dataclass(frozen=True)
class Tokens:
    """The token ids of a source or a shard: those for training and those held out. `known_digest` is the result of
    `digest_of_tokens` for them, if known already."""

    training: TokenArray
    held_out: TokenArray
    known_digest: str | None = field(default=None, kw_only=True)


Dtype = Literal["<u2", "<u4"]
Count = Annotated[int, Field(ge=0)]


class _AboutPart(Section):
    """The description of one token file in about.json: its number of tokens, and the BLAKE3 digest of its bytes."""

    tokens: Count
    digest: Digest


class _Files(Section):
    """The description in about.json of two token files, with the training tokens and the held-out tokens."""

    dtype: Dtype
    training: _AboutPart
    held_out: _AboutPart

    @property
    def parts(self) -> dict[str, _AboutPart]:
        return {"training": self.training, "held_out": self.held_out}

    @property
    def digest(self) -> str:
        """The result of `digest_of_tokens` for the two token files, computed from their recorded digests, without
        reading the files."""
        return _digest_of_parts((self.dtype, part.tokens, part.digest) for part in self.parts.values())


def _write_parts(folder: Path, dtype: Dtype, pieces: Iterable[Piece]) -> _Files:
    """Write the token ids of training and of held-out documents to two little-endian files in an existing folder, and
    return the description of the files. Raises: OSError."""
    digests, counts = [blake3(), blake3()], [0, 0]
    with (folder / PARTS[0]).open("wb") as training, (folder / PARTS[1]).open("wb") as held_out:
        files = (training, held_out)
        for part, tokens in pieces:
            data = tokens.astype(dtype).tobytes()
            files[part].write(data)
            digests[part].update(data)
            counts[part] += len(tokens)
    parts = (_AboutPart(tokens=count, digest=digest.hexdigest()) for count, digest in zip(counts, digests, strict=True))
    return _Files(dtype=dtype, **dict(zip(PARTS, parts, strict=True)))


def _map_part(path: Path, dtype: Dtype, digest: str | None = None) -> TokenArray:
    """Return the token ids of a file, memory-mapped. Raises: OSError; ValueError if `digest` is given and is not the
    file's BLAKE3 digest."""
    if digest is not None and blake3().update_mmap(path).hexdigest() != digest:
        raise ValueError(f"{path.name} does not match its digest")
    if path.stat().st_size == 0:  # numpy cannot map an empty file
        return np.empty(0, np.dtype(dtype))
    tokens: TokenArray = np.memmap(path, np.dtype(dtype), mode="r")
    return tokens


def digest_of_tokens(tokens: Tokens) -> str:
    """Return a digest, 64 hexadecimal digits, of the little-endian bytes of a source's training and held-out tokens.
    The digest is the same on every machine, for tokens in files and in memory."""
    if tokens.known_digest is not None:
        return tokens.known_digest
    parts = [part.astype(part.dtype.newbyteorder("<"), copy=False) for part in (tokens.training, tokens.held_out)]
    digests = (blake3(part.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest() for part in parts)
    return _digest_of_parts((part.dtype.str, part.size, digest) for part, digest in zip(parts, digests, strict=True))


def _digest_of_parts(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return a source's digest. `parts` are the type, number of tokens and BLAKE3 digest of each of its token files."""
    return str(blake3(repr([tuple(part) for part in parts]).encode()).hexdigest())


# The token cache ------------------------------------------------------------------------------------------------------
# An entry is a folder that is written under another name and then renamed, so that no process reads an incomplete
# entry. Of the processes that need the same entry, the first writes the entry, and the others wait.

logger = logging.getLogger(__name__)

FEW_TOKENS = 1 << 24
"""Most tokens of a source that stays in memory, where it takes at most 64 MB."""
FEW_SHARED_TOKENS = 1 << 20
"""Most tokens of a source that stays in memory if each of several workers must tokenize the source itself."""
KEPT_BYTES = 200 << 30
"""Most bytes of all cache entries together. The newest entry stays at any size."""
CHECKS_KEPT = 1000
"""Most marker files. Each records that a folder of tokens has passed its check."""
CHECKED, LOCK, PARTIAL = ".checked", ".lock", ".partial"


def most_tokens_in_memory(section: TokenizerSection, workers: int) -> int:
    """Return the most tokens that a source may have to stay in each worker's memory, not in files. It is lower if
    several workers have a slow tokenizer, because each of them tokenizes a source that stays in memory."""
    return FEW_TOKENS if workers == 1 or section.kind == "bytes" else FEW_SHARED_TOKENS


class TokenCache:
    """A cache of token ids on this machine. An entry's key is computed from everything that determines its token ids.

    Up to `few` tokens stay in memory, unless they are costly and several processes share the cache. When an entry is
    written, the least recently opened ones are removed until all take at most `kept_bytes`. A process that has a
    removed entry open can still read it.
    """

    def __init__(
        self, folder: Path | None = None, few: int = FEW_TOKENS, kept_bytes: int = KEPT_BYTES, is_shared: bool = False
    ) -> None:
        self._folder = folder or cache_folder() / "tokens"
        self._few = few
        self._kept_bytes = kept_bytes
        self._is_shared = is_shared

    def tokens(self, key: str, dtype: Dtype, read: Callable[[], Iterator[Piece]], is_costly: bool = False) -> Tokens:
        """Return the tokens of the cache entry `key`. If there is no such entry, return the tokens that `read` yields,
        and write them as an entry to disk unless they are few. Raises: MachineError if the cache cannot be written;
        exceptions of `read`."""
        if (kept := self._open(key)) is not None:
            return kept
        pieces, few = read(), (bytearray(), bytearray())
        if self._few and not (is_costly and self._is_shared):
            for held_out, tokens in pieces:
                few[held_out].extend(tokens.astype(dtype).tobytes())
                if len(few[0]) + len(few[1]) > self._few * np.dtype(dtype).itemsize:
                    break
            else:
                return Tokens(*(np.frombuffer(part, dtype) for part in few))
        begun = ((bool(part), np.frombuffer(few[part], dtype)) for part in (0, 1))
        with self._locked(key):
            if (kept := self._open(key)) is not None:  # another process wrote the entry while this process waited
                return kept
            written = self._write(key, dtype, chain(begun, pieces))
        self._make_room(key)
        return written

    def once(self, key: str, check: Callable[[], None]) -> None:
        """Call `check`, unless a check with the same `key` has already passed on this machine. Raises: the exceptions
        of `check`; MachineError if the cache folder cannot be written."""
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
        """Delete the cache entries whose keys begin with `prefix`, except the `number` most recently used. A process
        that has opened a deleted entry can still read it."""
        entries = [path for path in self._entries() if path.name.startswith(prefix)]
        for path in sorted(entries, key=_age)[number:]:
            shutil.rmtree(path, ignore_errors=True)

    def _entries(self) -> list[Path]:
        return [path for path in self._folder.glob("*") if path.is_dir() and not path.suffix]

    def _make_room(self, key: str) -> None:
        """Delete unfinished entries of killed processes. Delete the least recently opened entries until all take at
        most `kept_bytes`, but never the entry `key`."""
        for partial in self._folder.glob(f"*{PARTIAL}"):
            with suppress(BlockingIOError, MachineError), self._locked(partial.stem, waits=False):
                shutil.rmtree(partial, ignore_errors=True)
        entries = sorted((path for path in self._entries() if path.name != key), key=_age)
        room = self._kept_bytes - folder_bytes(self._folder / key)
        for path in entries:
            room -= folder_bytes(path)
            if room < 0:
                shutil.rmtree(path, ignore_errors=True)

    def _open(self, key: str) -> Tokens | None:
        folder = self._folder / key
        try:
            about = _Files.model_validate_json((folder / ABOUT).read_bytes())
            parts = [_map_part(folder / name, about.dtype, part.digest) for name, part in about.parts.items()]
            tokens = Tokens(*parts, known_digest=about.digest)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("tokens in %s are damaged (%s); the text is tokenized again", folder, first_line(error))
            return None
        with suppress(OSError):
            os.utime(folder)  # the modification time records when the entry was last opened
        return tokens

    def _write(self, key: str, dtype: Dtype, pieces: Iterator[Piece]) -> Tokens:
        folder, partial = self._folder / key, self._folder / f"{key}{PARTIAL}"
        logger.info("writing tokens to %s", folder)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # an unfinished entry of a killed process
            make_private_folder(partial)
            about = _write_parts(partial, dtype, pieces)
            (partial / ABOUT).write_text(about.model_dump_json(), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # a damaged entry, if there is one
            partial.rename(folder)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return Tokens(*(_map_part(folder / part, about.dtype) for part in PARTS), known_digest=about.digest)

    @contextmanager
    def _locked(self, key: str, waits: bool = True) -> Iterator[None]:
        """Hold the lock of the entry `key` during the `with` block. Raises: MachineError if the lock file cannot be
        created; BlockingIOError if another process holds the lock and `waits` is False."""
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
            file.close()  # the last holder has deleted this lock file, and another process may have locked a new one

    def _unusable(self, error: OSError) -> MachineError:
        return MachineError(
            f"the folder {self._folder} for tokens cannot be written: {error.strerror}.",
            "Free some space, or name a folder on a disk that has it: XDG_CACHE_HOME=FOLDER.",
        )


def _age(path: Path) -> float:
    """Return the seconds since a cache entry was written or last opened; infinity if it no longer exists."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


# Token folders --------------------------------------------------------------------------------------------------------
# `diloco-peer tokenize` writes token folders. Their files are memory-mapped, so a run that reads them begins at once.
# A folder is checked when it is first opened on a machine.

FORMAT: Literal["diloco-peer tokens, version 1"] = "diloco-peer tokens, version 1"
CHECKED_AT_ONCE = 1 << 24  # number of tokens that a check reads at once, to limit its memory
ANEW = "Create the folder again with `diloco-peer tokenize`, or copy it again."


class _About(_Files):
    """The content of about.json. `vocabulary` is the number of token ids, `end` the id that ends a document,
    `tokenizer` the digest of the tokenizer, and `split` the held-out fraction, or None if the folder's maker did not
    know it."""

    format: Literal["diloco-peer tokens, version 1"]
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    end: Count
    tokenizer: Digest
    split: float | None


def is_token_folder(source: str) -> bool:
    """Return True if the path `source` is a token folder, which has an about.json and a file of training tokens."""
    return all((Path(source) / name).is_file() for name in (ABOUT, PARTS[0]))


def dtype_of_tokens(tokenizer: Tokenizer) -> Dtype:
    """Return the type in which files store a tokenizer's token ids: 16 bits if all ids fit, else 32 bits."""
    return "<u2" if tokenizer.size <= 2**16 else "<u4"


def write_token_folder(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, split: float | None = None
) -> _About:
    """Write training and held-out tokens to a folder, about.json last, and return the content of about.json. Raises:
    MachineError if the folder cannot be written; DataError if an id is not in the tokenizer's vocabulary."""
    checked = ((part, _in_vocabulary(tokens, tokenizer.size, str(folder))) for part, tokens in pieces)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about = _About(
            **dict(_write_parts(folder, dtype_of_tokens(tokenizer), checked)),
            format=FORMAT,
            vocabulary=tokenizer.size,
            end=tokenizer.end,
            tokenizer=digest_of_tokenizer(tokenizer),
            split=split,
        )
        (folder / ABOUT).write_text(about.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except BaseException as error:
        with suppress(OSError):
            for name in (*PARTS, ABOUT):
                (folder / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            remedy = "Give a new folder on a disk with space."
            raise MachineError(f"{folder} cannot be written: {error.strerror}.", remedy) from error
        raise
    return about


def open_token_folder(source: str, tokenizer: Tokenizer, split: float, cache: TokenCache) -> Tokens:
    """Return the memory-mapped tokens of a token folder, for a run with this tokenizer and the held-out fraction
    `split`. Raises: DataError if about.json does not match the files, the tokenizer or the fraction."""
    folder = Path(source)
    about = read_about(folder)
    _check_fits(folder, about, tokenizer, split)
    paths = [folder / part for part in PARTS]
    for path, part in zip(paths, about.parts.values(), strict=True):
        wanted = part.tokens * np.dtype(about.dtype).itemsize
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}", ANEW) from error
        if found != wanted:
            raise DataError(f"{path} has {found} bytes; {ABOUT} says {wanted}.", ANEW)
    key = blake3(json.dumps([about.model_dump_json(), *map(_state_of, paths)]).encode()).hexdigest(16)
    cache.once(str(key), lambda: _check_values(folder, about))
    return Tokens(*(_map_part(path, about.dtype) for path in paths), known_digest=about.digest)


def read_about(folder: Path) -> _About:
    """Return the content of a token folder's about.json. Raises: DataError if the file cannot be read or is invalid."""
    path = folder / ABOUT
    try:
        return _About.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Correct its permissions.") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "it"
        raise DataError(f"{path}: {where} is {str(wrong['input'])[:80]!r}: {wrong['msg']}.", ANEW) from error


def _check_fits(folder: Path, about: _About, tokenizer: Tokenizer, split: float) -> None:
    expected = {
        "dtype": dtype_of_tokens(tokenizer),
        "vocabulary": tokenizer.size,
        "end": tokenizer.end,
        "tokenizer": digest_of_tokenizer(tokenizer),
        "split": split if about.split is not None else None,
    }
    for key, wanted in expected.items():
        if (found := getattr(about, key)) != wanted:
            setting = "data.held_out" if key == "split" else "tokenizer"
            raise DataError(
                f"{folder / ABOUT}: {key} = {found!r}; the run's {setting} needs {wanted!r}.",
                "Tokenize the text again with the run's run.toml: `diloco-peer tokenize`.",
            )


def _check_values(folder: Path, about: _About) -> None:
    """Read all files of a token folder. Raise DataError if they contain an id outside of the vocabulary, or do not
    match the digests in `about`."""
    for name, part in about.parts.items():
        path, digest = folder / name, blake3(max_threads=blake3.AUTO)
        tokens = _map_part(path, about.dtype)
        starts = range(0, len(tokens), CHECKED_AT_ONCE)
        for start in passing(starts, f"checking {path}", len(starts)):
            piece = tokens[start : start + CHECKED_AT_ONCE]
            digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
            _in_vocabulary(piece, about.vocabulary, str(path), start)
        if digest.hexdigest() != part.digest:
            raise DataError(
                f"{path} has the digest {digest.hexdigest()}; {ABOUT} says {name}.digest = {part.digest}.", ANEW
            )


def _in_vocabulary(tokens: TokenArray, size: int, where: str, start: int = 0) -> TokenArray:
    """Return `tokens` unchanged. Raises: DataError if a token id is not less than `size`, the number of token ids."""
    if len(tokens) and int(tokens.max()) >= size:
        place = int(np.argmax(tokens >= size))
        raise DataError(
            f"{where}: token {start + place} is {int(tokens[place])}; the tokenizer has ids below {size}.",
            "Use the tokenizer that made these ids, or tokenize the text again.",
        )
    return tokens


def _state_of(path: Path) -> tuple[str, int, int, int]:
    """Return a file's path, size in bytes, modification time in nanoseconds and inode, to recognise a changed file."""
    fact = os.stat(path)
    return str(path.absolute()), fact.st_size, fact.st_mtime_ns, fact.st_ino
