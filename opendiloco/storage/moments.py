"""The inner optimizer's state beside a machine's checkpoints: the newest file of it, found and checked.

It is the machine's own, unlike a checkpoint, which is the same on every peer: so the file's name has its peer's id.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from blake3 import blake3

from opendiloco.training.moments_file import VALUE_BYTES, read_header
from peers.values.workload import SnapshotError

NAME = re.compile(r"outer-step-(\d{6,18})\.(\w+)\.moments\.safetensors")
CHECKED_AT_ONCE = 1 << 22
"""Values."""


def moments_name(index: int, peer_id: str) -> str:
    """Return the name of a peer's file after `index` outer steps."""
    return f"outer-step-{index:06}.{peer_id}.moments.safetensors"


def newest_moments(folder: Path, peer_id: str) -> Path | None:
    """Return a peer's newest file; None if there is none."""
    try:
        found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    except OSError:
        return None
    return max(
        ((index, path) for index, path in found if path.name == moments_name(index, peer_id)), default=(0, None)
    )[1]


def check_moments_file(path: Path) -> None:
    """Hold a file against its digest, and its values against what is no number.

    Raises: SnapshotError; OSError.
    """
    with path.open("rb") as file:
        try:
            metadata, _, start = read_header(file)
        except ValueError as error:
            raise SnapshotError(str(error)) from error
        file.seek(start)
        digest = blake3(max_threads=blake3.AUTO)
        while data := file.read(VALUE_BYTES * CHECKED_AT_ONCE):
            digest.update(data)
            if not np.isfinite(np.frombuffer(data, np.float32)).all():
                raise SnapshotError("it holds NaN or infinity")
    if digest.hexdigest() != metadata.get("digest"):
        raise SnapshotError("it holds values that are not those it was written with")
