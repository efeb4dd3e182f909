"""A safetensors file with the state of an inner optimizer, for any optimizer and any number of workers.

Each tensor is whole, and its name joins its parameter's name and torch's name for it, as in
"model.norm.weight/exp_avg". Workers write and read their own rows. This module uses only the standard library, because
the process that finishes a file must start quickly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from opendiloco.model.layout import Layout, Parameter
from opendiloco.quantities import VALUE_BYTES

FORMAT = "diloco-peer inner optimizer, version 1"
HEADER_LIMIT = 64 << 20  # maximum size of a header in bytes; thousands of tensors need about one MiB
UNSEALED = "0" * 64
"""The digest in the header until all values are written."""
NO_STEP = "its inner optimizer has not made a step"
"""The reason why there is no file yet: a machine that has joined and not yet trained."""


def header_of(tensors: Iterable[Parameter], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a moments file: all bytes that precede the first value."""
    content: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    for tensor in tensors:
        bounds = [VALUE_BYTES * tensor.offset, VALUE_BYTES * (tensor.offset + tensor.size)]
        content[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": bounds}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO) -> tuple[dict[str, str], Layout, int]:
    """Return a moments file's metadata, the layout of its tensors, and its header's length in bytes.

    Raises: ValueError when the file is not as this project's workers write it; OSError.
    """
    file_bytes = file.seek(0, 2)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= HEADER_LIMIT:
        raise ValueError("it does not begin like a safetensors file of diloco-peer")
    text = file.read(length)
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__")
        tensors = Layout([(name, tuple(map(int, about["shape"]))) for name, about in content.items()])
        expected = header_of(tensors, metadata)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it has no safetensors header that can be read") from error
    if start + text != expected or any(min(tensor.shape, default=0) < 0 for tensor in tensors):
        raise ValueError("it has a header that diloco-peer does not write")
    wanted = len(expected) + VALUE_BYTES * tensors.size
    if file_bytes != wanted:
        raise ValueError(f"it has {file_bytes} bytes instead of {wanted}")
    return metadata, tensors, len(expected)


def digest_place(header: bytes) -> int:
    """Return the byte offset of the values' digest in a header. Raises: ValueError if the header has no digest."""
    name = b'"digest":"'
    return header.index(name) + len(name)
