"""Checkpoints as files: their names, their format, and which of them are kept.

A checkpoint is one safetensors file with the tensors momentum and theta, so that the bytes behind its header are those
of the state, in the state's order. Nothing here takes long to import: the process that writes one must start at once.
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
"""In the folder of a run and peer: the run's signed manifest, and the folder of its checkpoints."""
FORMAT = "diloco-peer checkpoint, version 1"
NAME = re.compile(r"outer-step-(\d{6,18})\.safetensors")


class DamagedFileError(ValueError):
    """A file that is not what our writer makes. The message ends a sentence that begins with its name."""


def file_name(index: int) -> str:
    """Of the checkpoint after `index` outer steps."""
    return f"outer-step-{index:06}.safetensors"


def moments_name(index: int, peer_id: str) -> str:
    """Return the name of a peer's moments after `index` outer steps: unlike checkpoints, they are its own."""
    return f"outer-step-{index:06}.{peer_id}.moments.safetensors"


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


def _tensors(values: int) -> tuple[Parameter, Parameter]:
    """Return a state's tensors, of so many values each."""
    return Parameter("momentum", (values,), 0), Parameter("theta", (values,), values)


def file_header(state_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """Return all of a file that comes before the state."""
    return header_of(_tensors(state_bytes // 8), metadata)


def read_file_header(file: BinaryIO) -> tuple[dict[str, str], int]:
    """Return the metadata, and where the state begins. Raises: DamagedFileError when we would not write it; OSError."""
    try:
        metadata, tensors, start = read_header(file)
    except ValueError as error:
        raise DamagedFileError(str(error).removeprefix("it ")) from error
    if tuple(tensors) != _tensors(tensors.size // 2) or any(not isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError("has a header that we would not write")
    return metadata, start
