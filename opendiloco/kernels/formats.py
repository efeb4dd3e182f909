"""The formats that a payload can have. native/formats.h says what each byte means; the numbers here come from there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from opendiloco._kernels import ffi, lib


@dataclass(frozen=True)
class Format:
    """How floats are encoded: `block_values` of them at a time, in `block_bytes` bytes; the last block may be short.

    `is_stochastic` tells whether it can be rounded by chance. `index` is the C library's number for it.
    """

    index: int
    name: str
    block_values: int
    block_bytes: int
    is_stochastic: bool

    def __str__(self) -> str:
        return self.name

    def block_count(self, values: int) -> int:
        """The number of blocks for so many values, the short one included."""
        return -(-values // self.block_values)

    def payload_size(self, values: int) -> int:
        """Return the bytes that so many values take."""
        return _payload_size(self.index, values)

    def byte_range(self, first_block: int, last_block: int, values: int) -> tuple[int, int]:
        """Where blocks [first_block, last_block) lie in a payload of so many values: bytes [start, stop)."""
        size = self.payload_size(values)
        return min(first_block * self.block_bytes, size), min(last_block * self.block_bytes, size)


@lru_cache
def _payload_size(index: int, values: int) -> int:
    """Ask C only once: a call gives the interpreter's lock away, and in a busy process waits long to have it back."""
    return lib.diloco_payload_size(index, values)


def _format(index: int) -> Format:
    return Format(
        index,
        ffi.string(lib.diloco_format_name(index)).decode(),
        lib.diloco_block_values(index),
        lib.diloco_block_bytes(index),
        bool(lib.diloco_format_is_stochastic(index)),
    )


INT8, UINT4, E2M1_BLOCK32, E2M1, E3M0, FP16, SPARSE = (_format(index) for index in range(7))

FORMATS: dict[str, Format] = {each.name: each for each in (INT8, UINT4, E2M1_BLOCK32, E2M1, E3M0, FP16, SPARSE)}
"""All of them, by name."""
