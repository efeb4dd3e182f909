"""An inner optimizer's state as a safetensors file, whichever optimizer it is and however many workers share it.

Each tensor is named after its parameter and what torch calls it there, as in "model.norm.weight/exp_avg", and is whole:
workers write and read their own rows. Standard library alone: the process that finishes a file must start at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from opendiloco.model.layout import Layout, Parameter
from opendiloco.quantities import VALUE_BYTES

FORMAT = "diloco-peer inner optimizer, version 1"
HEADER_LIMIT = 64 << 20  # bytes: names and shapes of tensors; thousands of them take one MiB
UNSEALED = "0" * 64
"""The digest of the values until all are written."""
NO_STEP = "its inner optimizer has not made a step"
"""The reason why there is no file yet: a machine that has joined, and has not trained."""


def header_of(tensors: Iterable[Parameter], metadata: Mapping[str, str]) -> bytes:
    """Return all of a file that comes before the values."""
    content: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    for tensor in tensors:
        bounds = [VALUE_BYTES * tensor.offset, VALUE_BYTES * (tensor.offset + tensor.size)]
        content[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": bounds}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO) -> tuple[dict[str, str], Layout, int]:
    """Return the metadata, the tensors, and the offset of the first value in bytes.

    Raises: ValueError when our workers would not have written it; OSError.
    """
    file_bytes = file.seek(0, 2)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= HEADER_LIMIT:
        raise ValueError("it does not begin as a safetensors file of ours does")
    text = file.read(length)
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__")
        tensors = Layout([(name, tuple(map(int, about["shape"]))) for name, about in content.items()])
        expected = header_of(tensors, metadata)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it has no safetensors header that can be read") from error
    if start + text != expected or any(min(tensor.shape, default=0) < 0 for tensor in tensors):
        raise ValueError("it has a header that we would not write")
    wanted = len(expected) + VALUE_BYTES * tensors.size
    if file_bytes != wanted:
        raise ValueError(f"it has {file_bytes} bytes instead of {wanted}")
    return metadata, tensors, len(expected)


def digest_place(header: bytes) -> int:
    """Return where in the header the digest of the values is. Raises: ValueError when there is none."""
    name = b'"digest":"'
    return header.index(name) + len(name)
