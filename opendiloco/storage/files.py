"""Checkpoints as files: their names, their format, and which of them are kept.

A checkpoint is one safetensors file with the tensors momentum and theta, so that the bytes behind its header are those
of the state, in the state's order. Standard library alone: the process that writes one must start at once.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from peers.values.system import PARTIAL

FORMAT = "diloco-peer checkpoint, version 1"
NAME = re.compile(r"outer-step-(\d{6,18})\.safetensors")
HEADER_LIMIT = 4 << 20  # bytes; the log's header, of at most 1 MiB, is in it in hexadecimal


class DamagedFileError(ValueError):
    """A file that is not what our writer makes. The message ends a sentence that begins with its name."""


def file_name(index: int) -> str:
    """Of the checkpoint after `index` outer steps."""
    return f"outer-step-{index:06}.safetensors"


def index_of(name: str) -> int | None:
    """How many outer steps were taken when this checkpoint was; None: it is no checkpoint's name."""
    match = NAME.fullmatch(name)
    return None if match is None else int(match[1])


def indices_in(names: Iterable[str]) -> list[int]:
    """Of all checkpoints among these names, the newest first."""
    found = {index for name in names if (index := index_of(name)) is not None and file_name(index) == name}
    return sorted(found, reverse=True)


def kept(indices: Iterable[int], keep_newest: int, keep_every: int) -> set[int]:
    """The newest so many, and every one whose index is a multiple of `keep_every` (0: no others)."""
    newest_first = sorted(indices, reverse=True)
    multiples = {index for index in newest_first if keep_every and index % keep_every == 0}
    return multiples | set(newest_first[:keep_newest])


def prune(folder: Path, keep_newest: int, keep_every: int, last: int | None = None) -> None:
    """Remove the checkpoints that are not to be kept. Raises: OSError.

    `last` is the one just written. What comes after it is of a lineage that was left for a heavier one, and goes, too.
    """
    indices = indices_in(path.name for path in folder.iterdir())
    lineage = [index for index in indices if last is None or index <= last]
    for index in set(indices) - kept(lineage, keep_newest, keep_every):
        (folder / file_name(index)).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what writers that died have left. A living one has its file locked. Raises: OSError."""
    for path in folder.glob(f"*{PARTIAL}"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def file_header(state_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """All of a file that comes before the state: safetensors' length (8 bytes, little-endian) and its JSON, padded."""
    half = state_bytes // 2
    tensors = {
        name: {"dtype": "F32", "shape": [half // 4], "data_offsets": [start, start + half]}
        for name, start in (("momentum", 0), ("theta", half))
    }
    content = {"__metadata__": dict(sorted(metadata.items())), **tensors}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned where the file is mapped
    return len(text).to_bytes(8, "little") + text


def read_file_header(file: BinaryIO) -> tuple[dict[str, str], int]:
    """The metadata, and the offset of the state's first byte. Whatever our writer would not have written is refused.

    Raises: DamagedFileError, OSError.
    """
    file_bytes = file.seek(0, 2)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= HEADER_LIMIT:
        raise DamagedFileError("does not begin as a safetensors file of ours does")
    text = file.read(length)
    try:
        content = json.loads(text)
        metadata, state_bytes = content["__metadata__"], content["theta"]["data_offsets"][1]
        expected = file_header(state_bytes, metadata)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError("has no safetensors header with the tensors momentum and theta") from error
    if start + text != expected or any(not isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError("has a header that we would not write")
    if file_bytes != len(expected) + state_bytes:
        raise DamagedFileError(f"has {file_bytes} bytes instead of {len(expected) + state_bytes}")
    return metadata, len(expected)
