"""Token ids in files: a cache of those that were made here, and folders of those that were made beforehand.

There is a file for training and one held out. Each has a BLAKE3 digest, by which they are known.
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
from opendiloco.data.tokenizer import TokenArray, Tokenizer, digest_of_tokenizer
from opendiloco.errors import DataError, MachineError, first_line
from opendiloco.stages import at_stage, passing
from peers.values.system import make_private_folder

PARTS = ("training", "held_out")
"""The files' names."""
ABOUT = "about.json"
"""The file beside them, which says what they hold."""

Piece = tuple[bool, TokenArray]
"""Whether a document is held out, and its tokens."""


@dataclass(frozen=True)
class Tokens:
    """A source's documents, or a shard's, one after another; and `digest_of_tokens`, where it has been read already."""

    training: TokenArray
    held_out: TokenArray
    known_digest: str | None = field(default=None, kw_only=True)


Dtype = Literal["<u2", "<u4"]
Count = Annotated[int, Field(ge=0)]


class _AboutPart(Section):
    """What `about.json` says of one file: how many tokens it has, and the BLAKE3 digest of its bytes."""

    tokens: Count
    digest: Digest


class _Files(Section):
    """What `about.json` says of both files."""

    dtype: Dtype
    training: _AboutPart
    held_out: _AboutPart

    @property
    def parts(self) -> dict[str, _AboutPart]:
        return {"training": self.training, "held_out": self.held_out}

    @property
    def digest(self) -> str:
        """Return what `digest_of_tokens` does of the tokens."""
        return _digest_of_parts((self.dtype, part.tokens, part.digest) for part in self.parts.values())


def _write_parts(folder: Path, dtype: Dtype, pieces: Iterable[Piece]) -> _Files:
    """Write two files of little-endian tokens into a folder that is there. Raises: OSError."""
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
    """Return a file's tokens, mapped into memory. Raises: OSError; ValueError when it has another digest."""
    if digest is not None and blake3().update_mmap(path).hexdigest() != digest:
        raise ValueError(f"{path.name} has another digest")
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, np.dtype(dtype))
    tokens: TokenArray = np.memmap(path, np.dtype(dtype), mode="r")
    return tokens


def digest_of_tokens(tokens: Tokens) -> str:
    """Return 64 hexadecimal digits, of all tokens of a source and of which of them are held out.

    It is that of the bytes in files, so the same whether the tokens lie in files, in memory, or on another machine.
    """
    if tokens.known_digest is not None:
        return tokens.known_digest
    parts = [part.astype(part.dtype.newbyteorder("<"), copy=False) for part in (tokens.training, tokens.held_out)]
    digests = (blake3(part.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest() for part in parts)
    return _digest_of_parts((part.dtype.str, part.size, digest) for part, digest in zip(parts, digests, strict=True))


def _digest_of_parts(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return the same of files by their types, counts and digests."""
    return str(blake3(repr([tuple(part) for part in parts]).encode()).hexdigest())


# The cache ------------------------------------------------------------------------------------------------------------
# An entry is a folder that appears whole or not at all. Processes of one machine that need the same entry wait for the
# first of them to write it.

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
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder or caches / "diloco-peer" / "tokens"
        self._few = few
        self._kept_bytes = kept_bytes
        self._is_shared = is_shared

    def tokens(self, key: str, dtype: Dtype, read: Callable[[], Iterator[Piece]], is_costly: bool = False) -> Tokens:
        """Return what is kept under a key, or else what `read` gives, which is kept from now on if it is much.

        Raises: MachineError when it does not fit on the disk; what `read` raises.
        """
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
            if (kept := self._open(key)) is not None:  # another process may have written it meanwhile
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
            logger.warning("the tokens in %s are damaged (%s); the text is tokenized again", folder, first_line(error))
            return None
        with suppress(OSError):
            os.utime(folder)  # it was opened last now
        return tokens

    def _write(self, key: str, dtype: Dtype, pieces: Iterator[Piece]) -> Tokens:
        folder, partial = self._folder / key, self._folder / f"{key}{PARTIAL}"
        logger.info("tokens are written to %s", folder)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of somebody who was killed
            make_private_folder(partial)
            about = _write_parts(partial, dtype, pieces)
            (partial / ABOUT).write_text(about.model_dump_json(), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # it was damaged
            partial.rename(folder)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return Tokens(*(_map_part(folder / part, about.dtype) for part in PARTS), known_digest=about.digest)

    @contextmanager
    def _locked(self, key: str, waits: bool = True) -> Iterator[None]:
        """Hold a key's lock. Raises: BlockingIOError, unless it `waits`, when another process has it; MachineError."""
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


def _age(path: Path) -> float:
    """Seconds since it was made or last opened; what is already gone is oldest."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


# Folders made beforehand ----------------------------------------------------------------------------------------------
# `diloco-peer tokenize` makes them. Their files are mapped into memory as they are, so a run that reads one begins at
# once. What is wrong with a folder is found when it is opened, once on each machine.

FORMAT: Literal["diloco-peer tokens, version 1"] = "diloco-peer tokens, version 1"
CHECKED_AT_ONCE = 1 << 24  # tokens, so that a check takes no memory to speak of
ANEW = "Make the folder anew with `diloco-peer tokenize`, or copy it again."


class _About(_Files):
    """`about.json`. `vocabulary` is the number of token ids, `end` the one that closes each document, `tokenizer` the
    digest of the tokenizer. `split` is the fraction of documents that is held out, where it is known."""

    format: Literal["diloco-peer tokens, version 1"]
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    end: Count
    tokenizer: Digest
    split: float | None


def is_token_folder(source: str) -> bool:
    """Return whether a source is a folder of tokens: it has an `about.json` of ours beside a file of tokens."""
    return all((Path(source) / name).is_file() for name in (ABOUT, PARTS[0]))


def dtype_of_tokens(tokenizer: Tokenizer) -> Dtype:
    """Return the type of a tokenizer's ids in files."""
    return "<u2" if tokenizer.size <= 2**16 else "<u4"


def write_token_folder(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, split: float | None = None
) -> _About:
    """Write tokens into a new folder, whose `about.json` comes last.

    Raises: MachineError when the folder cannot be written; DataError when an id is not in the tokenizer's vocabulary.
    """
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
    """Map a folder's tokens, of a run with this tokenizer and this fraction held out.

    Raises: DataError when they are not what `about.json` says, or not of this tokenizer.
    """
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
    """Raises: DataError when `about.json` cannot be read, or is not ours."""
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
            what = "data.held_out" if key == "split" else "tokenizer"
            raise DataError(
                f"{folder / ABOUT}: {key} = {found!r}; with the run's {what} it is {wanted!r}.",
                "Tokenize the text anew with the run's run.toml: `diloco-peer tokenize`.",
            )


def _check_values(folder: Path, about: _About) -> None:
    """Read all of it once: ids and digests. Raises: DataError."""
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
    """Return the tokens. Raises: DataError when one of them is no token id."""
    if len(tokens) and int(tokens.max()) >= size:
        place = int(np.argmax(tokens >= size))
        raise DataError(
            f"{where}: token {start + place} is {int(tokens[place])}; the tokenizer has ids below {size}.",
            "Use the tokenizer that made these ids, or tokenize the text anew.",
        )
    return tokens


def _state_of(path: Path) -> tuple[str, int, int, int]:
    """Return what changes when a file does."""
    fact = os.stat(path)
    return str(path.absolute()), fact.st_size, fact.st_mtime_ns, fact.st_ino
