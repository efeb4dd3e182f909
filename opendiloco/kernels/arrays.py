"""What operations work on: float arrays and payloads, checked once, with the addresses that C needs.

Checking an array and finding its address takes longer than encoding a block of it. Whoever calls often on the same
memory keeps a `FloatView` and a `Payload`; whoever doesn't passes plain arrays.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from opendiloco._kernels import ffi
from opendiloco.kernels.errors import CorruptPayloadError
from opendiloco.kernels.formats import Format

FloatArray: TypeAlias = npt.NDArray[np.float32]
BFloat16s: TypeAlias = npt.NDArray[np.uint16]
"""The upper halves of floats, which is what bfloat16 is; numpy has no name for it."""
PayloadBytes: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

_FLOAT, _BFLOAT16 = np.dtype(np.float32), np.dtype(np.uint16)


class FloatView:
    """A one-dimensional, contiguous, aligned array of float32 (or bfloat16, as uint16), and where it lies.

    Raises: ValueError for any other array.
    """

    __slots__ = ("_array", "address", "is_bfloat16", "is_writable", "size")

    def __init__(self, array: FloatArray | BFloat16s, name: str = "the array", allow_bfloat16: bool = True) -> None:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in (_FLOAT, _BFLOAT16):
            raise ValueError(f"{name} must be a one-dimensional float32 array, not {_kind(array)}")
        if array.dtype == _BFLOAT16 and not allow_bfloat16:
            raise ValueError(f"{name} must be float32, not {_kind(array)}")
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ValueError(f"{name} must be contiguous and aligned")
        self._array = array
        self.size: int = array.size
        self.is_bfloat16: bool = array.dtype == _BFLOAT16
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
        view = _bytes(bytearray(size) if buffer is None else buffer)
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
    """A checked float32 array. Raises: ValueError, which names the argument."""
    view = array if type(array) is FloatView else FloatView(array, name, allow_bfloat16=False)  # type: ignore[arg-type]
    if view.is_bfloat16:
        raise ValueError(f"{name} must be float32, not bfloat16")
    if writable and not view.is_writable:
        raise ValueError(f"{name} is written to, but is read-only")
    return view


def _bytes(buffer: PayloadBytes) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__
