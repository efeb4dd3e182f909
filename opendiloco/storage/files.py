"""Checkpoint files: names, format, and the rule by which old checkpoints are removed.

A checkpoint is a safetensors file with the tensors momentum and theta, so that the bytes after its header are the
state's bytes in order. This module imports fast, because the writer process must start fast.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from opendiloco.model.layout import Parameter
from opendiloco.training.moments_file import header_of, read_header
from peers.values.system import PARTIAL

MANIFEST, CHECKPOINTS_FOLDER = "run.manifest", "checkpoints"
"""Names in a run's folder: the signed manifest, and the folder of checkpoints."""
FORMAT = "diloco-peer checkpoint, version 1"
NAME = re.compile(r"outer-step-(\d{6,18})\.safetensors")


class DamagedFileError(ValueError):
    """Error: a checkpoint file is damaged. The message is the rest of a sentence that begins with the file's name."""


def file_name(index: int) -> str:
    """Return the file name of the checkpoint after `index` outer steps."""
    return f"outer-step-{index:06}.safetensors"


def moments_name(index: int, peer_id: str) -> str:
    """Return the file name of a peer's optimizer moments after `index` outer steps. The name contains the peer's id,
    because moments differ between peers."""
    return f"outer-step-{index:06}.{peer_id}.moments.safetensors"


def index_of(name: str) -> int | None:
    """Return the number of outer steps in a checkpoint's file name; None if `name` is not a checkpoint's name."""
    match = NAME.fullmatch(name)
    return None if match is None else int(match[1])


def indices_in(names: Iterable[str]) -> list[int]:
    """Return the outer steps of all checkpoints among these file names, newest first."""
    found = {index for name in names if (index := index_of(name)) is not None and file_name(index) == name}
    return sorted(found, reverse=True)


def kept(indices: Iterable[int], keep_newest: int, keep_every: int) -> set[int]:
    """Return the outer steps whose checkpoints are kept: the `keep_newest` largest, and multiples of `keep_every` (0:
    none)."""
    newest_first = sorted(indices, reverse=True)
    multiples = {index for index in newest_first if keep_every and index % keep_every == 0}
    return multiples | set(newest_first[:keep_newest])


def prune(folder: Path, keep_newest: int, keep_every: int, last: int | None = None) -> None:
    """Remove all checkpoints after outer step `last`, if given, because they belong to an abandoned branch of the log.
    Of the others, keep the `keep_newest` newest, and each multiple of `keep_every` (0: none). Raises: OSError."""
    indices = indices_in(path.name for path in folder.iterdir())
    lineage = [index for index in indices if last is None or index <= last]
    for index in set(indices) - kept(lineage, keep_newest, keep_every):
        (folder / file_name(index)).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove partial files of writers that have died; a live writer holds a lock on its file. Raises: OSError."""
    for path in folder.glob(f"*{PARTIAL}"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _tensors(values: int) -> tuple[Parameter, Parameter]:
    return Parameter("momentum", (values,), 0), Parameter("theta", (values,), values)


def file_header(state_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """Return the header of a checkpoint file, with `metadata`, for a state of `state_bytes` bytes."""
    return header_of(_tensors(state_bytes // 8), metadata)


def read_file_header(file: BinaryIO) -> tuple[dict[str, str], int]:
    """Return a checkpoint file's metadata, and the offset of its state in bytes. Raises: DamagedFileError if the header
    is not as the writer produces it; OSError."""
    try:
        metadata, tensors, start = read_header(file)
    except ValueError as error:
        raise DamagedFileError(str(error).removeprefix("it ")) from error
    if tuple(tensors) != _tensors(tensors.size // 2) or any(not isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError("has a header that the writer does not produce")
    return metadata, start
