"""The arithmetic of pseudo-gradients: int8 blocks in, the same bits out on every machine.

A payload holds n fp32 values in blocks of 1024 (the last may be shorter). A block is its scale (fp32, little-endian)
and then one int8 code a value, so block i starts at byte 1028 * i. For a block with the largest magnitude `absmax`,

    scale = absmax / 127        code = round(value * (127 / absmax)), ties to even        value ≈ scale * code

with every operation rounded to fp32. A block whose scale would be subnormal (absmax below 1.5e-36) is encoded as
zeros. A payload that passes `check_payload` decodes to finite values.

Float arguments are one-dimensional, contiguous, aligned float32 arrays; payloads are bytes, bytearrays, memoryviews
or uint8 arrays at any alignment. The number of values is the float array's length, and any range of blocks can be
worked on by slicing arrays at multiples of `BLOCK` and payloads at multiples of `BLOCK_BYTES`. Arguments must not
overlap. Arguments of the wrong kind or length raise ValueError. The interpreter's lock is released during the work.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from opendiloco._kernels import ffi, lib
from peers.errors import DilocoPeerError

Floats: TypeAlias = npt.NDArray[np.float32]
Payload: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

BLOCK = 1024
BLOCK_BYTES = 4 + BLOCK
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class KernelError(DilocoPeerError):
    """A block that can't be encoded or decoded. `block` is its index in the arrays that were passed."""

    exit_code = 8

    def __init__(self, block: int, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.block = block


class NonFiniteError(KernelError):
    """Values to be encoded hold a NaN, an infinity, or a magnitude that would be decoded as one."""

    def __init__(self, block: int) -> None:
        values = f"values {block * BLOCK} to {(block + 1) * BLOCK - 1}"
        super().__init__(
            block,
            f"block {block} ({values}) holds NaN, infinity or a magnitude beyond fp32.",
            "Training has diverged: lower the learning rate, or go back to an earlier snapshot.",
        )


class CorruptPayloadError(KernelError):
    """A payload that no encoder of ours produces."""

    def __init__(self, block: int, defect: str) -> None:
        super().__init__(block, f"payload block {block}: {defect}.", "Drop the payload; fetch it from another peer.")


def block_count(values: int) -> int:
    """The number of blocks for so many values, the ragged one included."""
    return -(-values // BLOCK)


def payload_size(values: int) -> int:
    """The bytes that so many values take when encoded."""
    return values + (BLOCK_BYTES - BLOCK) * block_count(values)


def quantize(values: Floats, out: Payload) -> None:
    """Encode `values` into `out` (`payload_size` bytes).

    Raises NonFiniteError for the first block that can't be encoded; that block and those after it aren't written.
    """
    source = _floats("values", values)
    with _payload("out", out, values.size, writable=True) as target:
        refused = lib.diloco_quantize(source, values.size, _address(target))
    _raise_non_finite(refused)


def quantize_difference(theta: Floats, local: Floats, out: Payload) -> None:
    """Encode the pseudo-gradient `theta - local` into `out`, without a temporary array.

    Raises NonFiniteError, as `quantize` does, also where only the difference overflows.
    """
    minuend, subtrahend = _floats("theta", theta), _floats("local", local)
    _same_length("local", local, theta)
    with _payload("out", out, theta.size, writable=True) as target:
        refused = lib.diloco_quantize_difference(minuend, subtrahend, theta.size, _address(target))
    _raise_non_finite(refused)


def finish_average(accumulator: Floats, total_weight: float, out: Payload) -> None:
    """Encode the weighted average `accumulator / total_weight` into `out`.

    `total_weight` is the sum of the weights that were accumulated and must be positive. Raises NonFiniteError, as
    `quantize` does.
    """
    divisor = _scalar("total_weight", total_weight)
    if divisor <= 0:
        raise ValueError(f"total_weight is {total_weight}; it must be positive")
    source = _floats("accumulator", accumulator)
    with _payload("out", out, accumulator.size, writable=True) as target:
        refused = lib.diloco_finish_average(source, divisor, accumulator.size, _address(target))
    _raise_non_finite(refused)


def check_payload(payload: Payload, values: int) -> None:
    """Refuse bytes that aren't a payload of so many values.

    Raises CorruptPayloadError for a wrong length, a scale that is negative, not finite or too large for finite
    values, or the code -128. A wrong length is blamed on the first block that is incomplete or superfluous.
    """
    with _bytes(payload) as view:
        if view.nbytes != payload_size(values):
            block = min(view.nbytes // BLOCK_BYTES, block_count(values))
            raise CorruptPayloadError(
                block, f"{view.nbytes} bytes came for {values} values, which take {payload_size(values)}"
            )
    with _payload("payload", payload, values) as source:
        refused = lib.diloco_check_payload(_address(source), values)
    _raise_corrupt(refused)


def dequantize(payload: Payload, out: Floats) -> None:
    """Decode `payload` into `out`. Raises CorruptPayloadError as `check_payload` does, with `out` unchanged."""
    target = _floats("out", out, writable=True)
    with _payload("payload", payload, out.size) as source:
        refused = lib.diloco_dequantize(_address(source), out.size, target)
    _raise_corrupt(refused)


def accumulate(payload: Payload, weight: float, accumulator: Floats) -> None:
    """Add the decoded payload, times `weight`, to `accumulator`: `accumulator += (weight * scale) * code`.

    `weight` (tokens) is rounded to fp32, and the bracket is rounded once a block. Raises CorruptPayloadError as
    `check_payload` does, and where the weighted values overflow, with `accumulator` unchanged.
    """
    factor = _scalar("weight", weight)
    if factor < 0:
        raise ValueError(f"weight is {weight}; it must not be negative")
    target = _floats("accumulator", accumulator, writable=True)
    with _payload("payload", payload, accumulator.size) as source:
        refused = lib.diloco_accumulate(_address(source), factor, accumulator.size, target)
    _raise_corrupt(refused)


def outer_step(
    payload: Payload, theta: Floats, momentum: Floats, learning_rate: float, momentum_coefficient: float
) -> None:
    """The outer optimizer of DiLoCo (Algorithm 1, line 14): Nesterov SGD on the decoded pseudo-gradient g, in place.

        momentum = momentum_coefficient * momentum + g
        theta    = theta - learning_rate * (g + momentum_coefficient * momentum)

    This is torch.optim.SGD(nesterov=True) with a momentum that starts at zero. Raises CorruptPayloadError as
    `check_payload` does, with both arrays unchanged.
    """
    rate = _scalar("learning_rate", learning_rate)
    coefficient = _scalar("momentum_coefficient", momentum_coefficient)
    parameters, velocity = _floats("theta", theta, writable=True), _floats("momentum", momentum, writable=True)
    _same_length("momentum", momentum, theta)
    with _payload("payload", payload, theta.size) as source:
        refused = lib.diloco_outer_step(_address(source), parameters, velocity, theta.size, rate, coefficient)
    _raise_corrupt(refused)


def _floats(name: str, array: Floats, writable: bool = False) -> int:
    """The address of a float array, which the caller keeps alive."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional float32 array, not {_kind(array)}")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise ValueError(f"{name} must be contiguous and aligned")
    if writable and not flags.writeable:
        raise ValueError(f"{name} is written to, but is read-only")
    return array.ctypes.data


def _payload(name: str, buffer: Payload, values: int, writable: bool = False) -> memoryview:
    """A view of a payload's bytes. While it is held, the buffer (think of a bytearray) can't be resized."""
    view = _bytes(buffer)
    if view.itemsize != 1 or not view.c_contiguous:
        raise ValueError(f"{name} must be contiguous bytes, not {_kind(buffer)}")
    if view.nbytes != payload_size(values):
        raise ValueError(f"{name} has {view.nbytes} bytes; {values} values take {payload_size(values)}")
    if writable and view.readonly:
        raise ValueError(f"{name} is written to, but is read-only")
    return view


def _bytes(buffer: Payload) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


def _same_length(name: str, array: Floats, theta: Floats) -> None:
    if array.size != theta.size:
        raise ValueError(f"{name} has {array.size} values, theta has {theta.size}")


def _scalar(name: str, value: float) -> float:
    """The value, which must be a finite fp32 number, rounded to fp32."""
    if not (math.isfinite(value) and abs(value) <= _LARGEST_FLOAT):
        raise ValueError(f"{name} is {value}; it must be a finite fp32 number")
    return float(np.float32(value))


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__


def _raise_non_finite(refused: int) -> None:
    if refused:
        raise NonFiniteError(refused - 1)


def _raise_corrupt(refused: int) -> None:
    if refused:
        raise CorruptPayloadError(refused - 1, "its scale or a code is out of range")
