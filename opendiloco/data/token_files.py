"""Token ids in plain files: one for training, one held out. Each has a BLAKE3 digest, by which they are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from opendiloco.data.tokenizer import TokenArray

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


@dataclass(frozen=True)
class PartFacts:
    """How many tokens are in a file, and the digest of its bytes."""

    tokens: int
    digest: str


def write_parts(folder: Path, dtype: np.dtype[np.unsignedinteger], pieces: Iterable[Piece]) -> Mapping[str, PartFacts]:
    """Write two files of little-endian tokens into a folder that is there. Returns what each holds. Raises: OSError."""
    digests, counts = [blake3(), blake3()], [0, 0]
    with (folder / PARTS[0]).open("wb") as training, (folder / PARTS[1]).open("wb") as held_out:
        files = (training, held_out)
        for part, tokens in pieces:
            data = tokens.astype(dtype).tobytes()
            files[part].write(data)
            digests[part].update(data)
            counts[part] += len(tokens)
    return {name: PartFacts(counts[place], digests[place].hexdigest()) for place, name in enumerate(PARTS)}


def map_part(path: Path, dtype: np.dtype[np.unsignedinteger], digest: str | None = None) -> TokenArray:
    """Return a file's tokens, mapped into memory. Raises: OSError; ValueError when it has another digest."""
    if digest is not None and blake3().update_mmap(path).hexdigest() != digest:
        raise ValueError(f"{path.name} has another digest")
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    tokens: TokenArray = np.memmap(path, dtype, mode="r")
    return tokens


def digest_of_tokens(tokens: Tokens) -> str:
    """Return 64 hexadecimal digits, of all tokens of a source and of which of them are held out.

    It is that of the bytes in files, so the same whether the tokens lie in files, in memory, or on another machine.
    """
    if tokens.known_digest is not None:
        return tokens.known_digest
    parts = [
        (part.dtype.newbyteorder("<").str, part.size, _digest(part)) for part in (tokens.training, tokens.held_out)
    ]
    return digest_of_parts(parts)


def digest_of_parts(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return the same of files by their types, counts and digests."""
    return str(blake3(repr([tuple(part) for part in parts]).encode()).hexdigest())


def _digest(part: TokenArray) -> str:
    little = part.astype(part.dtype.newbyteorder("<"), copy=False)
    return str(blake3(little.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest())
