"""A folder of tokens that were made beforehand: two files of token ids and `about.json`, which says what they are.

`diloco-peer tokenize` makes one. Its files are mapped into memory as they are, so a run that reads one begins at once.
What is wrong with a folder is found when it is opened, once on each machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.config.section import Digest
from opendiloco.data.token_cache import TokenCache
from opendiloco.data.token_files import ABOUT, PARTS, Piece, Tokens, digest_of_parts, map_part, write_parts
from opendiloco.data.tokenizer import TokenArray, Tokenizer, digest_of_tokenizer
from opendiloco.errors import DataError, MachineError, first_line
from opendiloco.stages import passing
from peers.values.private_folders import make_private_folder

FORMAT: Literal["diloco-peer tokens, version 1"] = "diloco-peer tokens, version 1"
CHECKED_AT_ONCE = 1 << 24
"""Tokens."""
ANEW = "Make the folder anew with `diloco-peer tokenize`, or copy it again."
Count = Annotated[int, Field(ge=0)]


class AboutPart(BaseModel):
    """What `about.json` says of one file: how many tokens it has, and the BLAKE3 digest of its bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tokens: Count
    digest: Digest


class About(BaseModel):
    """`about.json`. `vocabulary` is the number of token ids, `end` the one that closes each document, `tokenizer` the
    digest of the tokenizer. `split` is the fraction of documents that is held out, where it is known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["diloco-peer tokens, version 1"]
    dtype: Literal["<u2", "<u4"]
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    end: Count
    tokenizer: Digest
    split: float | None
    training: AboutPart
    held_out: AboutPart

    @property
    def digest(self) -> str:
        """Return what `digest_of_tokens` does of the tokens."""
        return digest_of_parts((self.dtype, part.tokens, part.digest) for part in (self.training, self.held_out))


def is_token_folder(source: str) -> bool:
    """Return whether a source is a folder of tokens: it has an `about.json` of ours beside a file of tokens."""
    return all((Path(source) / name).is_file() for name in (ABOUT, PARTS[0]))


def kind_of_tokens(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """Return the type of a tokenizer's ids."""
    kind: type[np.unsignedinteger] = tokenizer.encode_document(b"").dtype.type
    return kind


def write_token_folder(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, split: float | None = None
) -> About:
    """Write tokens into a new folder, whose `about.json` comes last.

    Raises: MachineError when the folder cannot be written; DataError when an id is not in the tokenizer's vocabulary.
    """
    dtype = np.dtype(kind_of_tokens(tokenizer)).newbyteorder("<")
    checked = ((part, _in_vocabulary(tokens, tokenizer.size, str(folder))) for part, tokens in pieces)
    try:
        make_private_folder(folder)
        training, held_out = write_parts(folder, dtype, checked).values()
        about = About(
            format=FORMAT,
            dtype="<u2" if dtype.itemsize == 2 else "<u4",
            vocabulary=tokenizer.size,
            end=tokenizer.end,
            tokenizer=digest_of_tokenizer(tokenizer),
            split=split,
            training=AboutPart(**vars(training)),
            held_out=AboutPart(**vars(held_out)),
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
    for path, part in zip(paths, (about.training, about.held_out), strict=True):
        _check_size(path, part.tokens * np.dtype(about.dtype).itemsize)
    key = blake3(json.dumps([about.model_dump_json(), *map(_state_of, paths)]).encode()).hexdigest(16)
    cache.once(str(key), lambda: _check_values(folder, about))
    return Tokens(*(map_part(path, np.dtype(about.dtype)) for path in paths), known_digest=about.digest)


def read_about(folder: Path) -> About:
    """Raises: DataError when `about.json` cannot be read, or is not ours."""
    path = folder / ABOUT
    try:
        return About.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Correct its permissions.") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "it"
        raise DataError(f"{path}: {where} is {str(wrong['input'])[:80]!r}: {wrong['msg']}.", ANEW) from error


def _check_fits(folder: Path, about: About, tokenizer: Tokenizer, split: float) -> None:
    expected = {
        "dtype": np.dtype(kind_of_tokens(tokenizer)).newbyteorder("<").str,
        "vocabulary": tokenizer.size,
        "end": tokenizer.end,
        "tokenizer": digest_of_tokenizer(tokenizer),
        "split": split if about.split is not None else None,
    }
    for field, wanted in expected.items():
        if (found := getattr(about, field)) != wanted:
            what = "data.held_out" if field == "split" else "tokenizer"
            raise DataError(
                f"{folder / ABOUT}: {field} = {found!r}; with the run's {what} it is {wanted!r}.",
                "Tokenize the text anew with the run's run.toml: `diloco-peer tokenize`.",
            )


def _check_size(path: Path, wanted: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}", ANEW) from error
    if found != wanted:
        raise DataError(f"{path} has {found} bytes; {ABOUT} says {wanted}.", ANEW)


def _check_values(folder: Path, about: About) -> None:
    """Read all of it once: ids and digests. Raises: DataError."""
    for name, part in zip(PARTS, (about.training, about.held_out), strict=True):
        path, digest = folder / name, blake3(max_threads=blake3.AUTO)
        tokens = map_part(path, np.dtype(about.dtype))
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
