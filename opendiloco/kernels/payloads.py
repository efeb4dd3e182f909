"""Payloads: the formats that they can have, and the arrays and bytes that operations work on.

native/formats.h says what each byte of a format means; the numbers here come from there. Checking an array and finding
its address takes longer than encoding a block of it: code that calls often on the same memory keeps a `FloatView` and a
`Payload`; other code passes plain arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from opendiloco._kernels import ffi, lib
from peers.errors import DilocoPeerError


# Errors ---------------------------------------------------------------------------------------------------------------
class KernelError(DilocoPeerError):
    """A block that can't be encoded or decoded. `block` is its index in the arrays that were passed."""

    exit_code = 8

    def __init__(self, block: int, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.block = block


class NonFiniteError(KernelError):
    """Values to be encoded hold a NaN, an infinity, or a magnitude beyond the format's."""

    def __init__(self, block: int, block_values: int) -> None:
        values = f"values {block * block_values} to {(block + 1) * block_values - 1}"
        super().__init__(
            block,
            f"block {block} ({values}) holds NaN, infinity or a magnitude too large to be encoded.",
            "Training has diverged: lower the learning rate, or go back to an earlier snapshot.",
        )


class CorruptPayloadError(KernelError):
    """A payload that no encoder of ours produces."""

    def __init__(self, block: int, defect: str) -> None:
        super().__init__(block, f"payload block {block}: {defect}.", "Drop the payload; fetch it from another peer.")


# Formats --------------------------------------------------------------------------------------------------------------
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
        """Return the number of blocks for so many values, the short one included."""
        return -(-values // self.block_values)

    def payload_size(self, values: int) -> int:
        """Return the bytes that so many values take."""
        return _payload_size(self.index, values)

    def byte_range(self, first_block: int, last_block: int, values: int) -> tuple[int, int]:
        """Return where blocks [first_block, last_block) lie in a payload of so many values: bytes [start, stop)."""
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


# Arrays ---------------------------------------------------------------------------------------------------------------
FloatArray: TypeAlias = npt.NDArray[np.float32]
PayloadBytes: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class FloatView:
    """A one-dimensional, contiguous, aligned array of float32, and its address. Raises: ValueError for any other."""

    __slots__ = ("_array", "address", "is_writable", "size")

    def __init__(self, array: FloatArray, name: str = "the array") -> None:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.float32:
            raise ValueError(f"{name} must be a one-dimensional float32 array, not {_kind(array)}")
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ValueError(f"{name} must be contiguous and aligned")
        self._array = array
        self.size: int = array.size
        self.is_writable: bool = flags.writeable
        self.address = _address(array.data) if array.size else 0


Floats: TypeAlias = FloatView | FloatArray


class Payload:
    """`values` floats in a format. `buffer` holds its bytes, at any alignment; without one, a bytearray is made.

    While a payload exists, its buffer can't be resized. Raises: ValueError if the buffer is no contiguous bytes,
    CorruptPayloadError if their number is wrong; it is blamed on the first block that is incomplete or superfluous.
    """

    __slots__ = ("address", "buffer", "format", "is_writable", "values")

    def __init__(self, format: Format, values: int, buffer: PayloadBytes | None = None) -> None:
        size = format.payload_size(values)
        given = bytearray(size) if buffer is None else buffer
        view = given.data if isinstance(given, np.ndarray) else memoryview(given)
        if view.itemsize != 1 or not view.c_contiguous:
            raise ValueError(f"a payload must be contiguous bytes, not {_kind(buffer)}")
        if view.nbytes != size:
            block = min(view.nbytes // format.block_bytes, format.block_count(values))
            raise CorruptPayloadError(block, f"{view.nbytes} bytes came for {values} values, which take {size}")
        self.format = format
        self.values = values
        self.buffer = view
        self.is_writable = not view.readonly
        # The view alone keeps the buffer as it is. What cffi exports from a memoryview must not outlive this call:
        # Python before 3.12.7 crashes when it collects a cycle of both, and comes by the view first
        # (python/cpython#77894).
        self.address = _address(view)

    def __bytes__(self) -> bytes:
        return bytes(self.buffer)


def view_floats(name: str, array: Floats, writable: bool = False) -> FloatView:
    """Return a checked float32 array. Raises: ValueError, which names the argument."""
    view = array if isinstance(array, FloatView) else FloatView(array, name)
    if writable and not view.is_writable:
        raise ValueError(f"{name} is written to, but is read-only")
    return view


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__
