"""The arithmetic of pseudo-gradients: encoding floats as payloads, and decoding and averaging payloads, with the same
bits on every machine.

This is the only interface to the C library in native/, whose formats.h defines each byte of a format. Operations work
on numpy arrays and payloads, and on any range of blocks of both: slice arrays at multiples of the format's
`block_values`, its payload at multiples of `block_bytes`. Arguments must not overlap. Arguments of the wrong type or
length raise ValueError. `threads` is the most threads that a call uses, including the calling one. They end with the
call, and Python's global lock is released meanwhile. After an error, the content of the output is undefined.

Other rooms import:
the room: FORMATS, Format, NEAREST, NonFiniteError, Payload, Rounding, SPARSE, dequantize, quantize_difference,
    stochastic
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from opendiloco.errors import MachineError
from peers.errors import DilocoPeerError

try:
    from opendiloco._kernels import ffi, lib
except ImportError as error:
    if not (error.name or "").startswith("opendiloco"):  # another package is missing
        raise
    raise MachineError(
        f"the C kernels are not built in {Path(__file__).parents[2]}: {error}.",
        "Run `make venv` there and use .venv/bin/python, or start Python in another folder.",
    ) from error


# Errors ---------------------------------------------------------------------------------------------------------------
class KernelError(DilocoPeerError):
    """The error for a block that cannot be encoded or decoded. `block` is the block's index in the arguments of the
    call."""

    exit_code = 8

    def __init__(self, block: int, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.block = block


class NonFiniteError(KernelError):
    """The error for values with a NaN, an infinity, or a magnitude beyond the format's range, which cannot be
    encoded."""

    def __init__(self, block: int, block_values: int) -> None:
        values = f"values {block * block_values} to {(block + 1) * block_values - 1}"
        super().__init__(
            block,
            f"block {block} ({values}) holds NaN, infinity or a magnitude too large to be encoded.",
            "Training has diverged: lower the learning rate, or go back to an earlier snapshot.",
        )


class CorruptPayloadError(KernelError):
    """The error for a payload that the encoder cannot have produced."""

    def __init__(self, block: int, defect: str) -> None:
        super().__init__(block, f"payload block {block}: {defect}.", "Drop the payload; fetch it from another peer.")


# Formats --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Format:
    """A format that encodes each block of `block_values` floats in `block_bytes` bytes; the last block may be shorter.
    `is_stochastic` is True if the format supports stochastic rounding. `index` is the C library's number of the
    format."""

    index: int
    name: str
    block_values: int
    block_bytes: int
    is_stochastic: bool

    def __str__(self) -> str:
        return self.name

    def block_count(self, values: int) -> int:
        """Return the number of blocks that `values` values take, including a short last block."""
        return -(-values // self.block_values)

    def payload_size(self, values: int) -> int:
        """Return the number of bytes in a payload of `values` values."""
        return _payload_size(self.index, values)

    def byte_range(self, first_block: int, last_block: int, values: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of the blocks [first_block, last_block) in a payload of `values`
        values."""
        size = self.payload_size(values)
        return min(first_block * self.block_bytes, size), min(last_block * self.block_bytes, size)


@lru_cache
def _payload_size(index: int, values: int) -> int:
    """Return the number of bytes in a payload, from the C library. The result is cached, because a call releases
    Python's global lock, and a busy process waits long to get the lock back."""
    return lib.diloco_payload_size(index, values)


def _format(index: int) -> Format:
    name, block = ffi.string(lib.diloco_format_name(index)).decode(), lib.diloco_block_bytes(index)
    return Format(index, name, lib.diloco_block_values(index), block, bool(lib.diloco_format_is_stochastic(index)))


FORMATS: dict[str, Format] = {each.name: each for each in map(_format, range(7))}
"""All formats by name."""

INT8, UINT4, E2M1_BLOCK32, E2M1, E3M0, FP16, SPARSE = FORMATS.values()


# Arrays ---------------------------------------------------------------------------------------------------------------
FloatArray: TypeAlias = npt.NDArray[np.float32]
PayloadBytes: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class FloatView:
    """A one-dimensional, contiguous, aligned float32 array, with its memory address. Raises: ValueError for any other
    array.

    Checking an array and finding its address takes longer than encoding a block. Code that calls often with the same
    memory keeps a view; other code passes plain arrays.
    """

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
    """A payload that encodes `values` floats in a format. `buffer` holds the payload's bytes, at any alignment; the
    default is a new bytearray.

    While the payload exists, its buffer cannot be resized. Raises: ValueError if the buffer is not contiguous bytes;
    CorruptPayloadError if it has the wrong length, with the first incomplete or superfluous block.
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
            raise CorruptPayloadError(block, f"it has {view.nbytes} bytes; {values} values take {size}")
        self.format = format
        self.values = values
        self.buffer = view
        self.is_writable = not view.readonly
        # Only `view` keeps the memory alive. cffi's export of `view` must not outlive this call: Python before 3.12.7
        # crashes when it collects a cycle of the view and the export, and clears the view first (python/cpython#77894).
        self.address = _address(view)

    def __bytes__(self) -> bytes:
        return bytes(self.buffer)


def _view(name: str, array: Floats, payload: Payload, writable: bool = False) -> FloatView:
    """Return a view of the argument `name`, after checking that the array has as many values as the payload. Raises:
    ValueError that names the argument."""
    view = array if isinstance(array, FloatView) else FloatView(array, name)
    if writable and not view.is_writable:
        raise ValueError(f"{name} is read-only, but must be writable")
    if view.size != payload.values:
        raise ValueError(f"{name} has {view.size} values, the payload {payload.values}")
    return view


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__


# Instruction sets -----------------------------------------------------------------------------------------------------
ENVIRONMENT_VARIABLE = "DILOCO_KERNELS"
KERNEL_SETS = ("scalar", "avx2", "avx512", "neon")


def supported_kernels() -> tuple[str, ...]:
    """Return the names of the instruction sets that both this processor and this build of the kernels support."""
    return tuple(name for name in KERNEL_SETS if lib.diloco_kernels_are_supported(name.encode()))


def chosen_kernels() -> str:
    """Return the name of the instruction set that the kernels use."""
    return ffi.string(lib.diloco_kernels_name()).decode()


def choose_kernels(name: str) -> None:
    """Make the kernels of the whole process use the instruction set `name`; "" selects the fastest. Raises:
    MachineError if this machine does not support the set."""
    if name and name not in supported_kernels():
        known = "this machine does not have it" if name in KERNEL_SETS else "there is no such set"
        choices = ", ".join(supported_kernels())
        raise MachineError(
            f"{ENVIRONMENT_VARIABLE} = {name!r}: {known}.", f"Unset it for the fastest, or use one of: {choices}."
        )
    lib.diloco_choose_kernels(name.encode())


choose_kernels(os.environ.get(ENVIRONMENT_VARIABLE, ""))


# Operations -----------------------------------------------------------------------------------------------------------
_LARGEST_FLOAT, _SMALLEST_FLOAT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
LARGEST_WEIGHT = 2.0**63
"""Largest sum of the weights of an average, so that no sum of valid payloads overflows."""


@dataclass(frozen=True)
class Rounding:
    """A rounding of values to codes: to the nearest code, or stochastically to one of the two neighbouring codes.

    The random choice depends only on `seed`, on the block's index (the first has `first_block`) and on the value's
    place in its block, so that a payload can be produced again, block by block.
    """

    is_stochastic: bool
    seed: int = 0
    first_block: int = 0


NEAREST = Rounding(is_stochastic=False)


def stochastic(seed: int, first_block: int = 0) -> Rounding:
    """Return a stochastic rounding with the given seed, modulo 2^64, for a payload that begins with block
    `first_block`."""
    return Rounding(True, seed % 2**64, first_block)


def quantize(values: Floats, payload: Payload, rounding: Rounding = NEAREST, threads: int = 1) -> None:
    """Encode `values` into `payload`. Raises: NonFiniteError for the first block that cannot be encoded."""
    source = _view("values", values, payload)
    _encode(lib.diloco_quantize, payload, rounding, source.address, source.size, payload.address, threads)


def quantize_difference(
    theta: Floats,
    local: Floats,
    payload: Payload,
    rounding: Rounding = NEAREST,
    residual: Floats | None = None,
    threads: int = 1,
) -> None:
    """Encode the pseudo-gradient `theta - local` into `payload`, without a temporary array.

    With error feedback, `residual` holds the error of earlier payloads. It is added to the difference, and becomes the
    error of this payload. Raises: NonFiniteError as in `quantize`, also if only the difference overflows.
    """
    minuend, subtrahend = _view("theta", theta, payload), _view("local", local, payload)
    feedback = 0 if residual is None else _view("residual", residual, payload, writable=True).address
    sources = minuend.address, subtrahend.address, False, feedback, minuend.size  # False: subtrahend is not bfloat16
    _encode(lib.diloco_quantize_difference, payload, rounding, *sources, payload.address, threads)


def finish_average(
    accumulator: Floats, total_weight: float, payload: Payload, rounding: Rounding = NEAREST, threads: int = 1
) -> None:
    """Encode the weighted average `accumulator / total_weight` into `payload`. `total_weight` is the sum of the weights
    that were given to `accumulate`, and must be positive. Raises: NonFiniteError as in `quantize`."""
    if not _SMALLEST_FLOAT <= total_weight <= LARGEST_WEIGHT:
        raise ValueError(f"total_weight is {total_weight}; it must be positive, and at most 2^63")
    source = _view("accumulator", accumulator, payload)
    arguments = source.address, total_weight, source.size, payload.address, threads
    _encode(lib.diloco_finish_average, payload, rounding, *arguments)


def average(
    contributions: Sequence[tuple[Payload, float]],
    payload: Payload,
    rounding: Rounding = NEAREST,
    threads: int = 1,
    total_weight: float | None = None,
) -> None:
    """Encode the weighted average of contributions into `payload`. Each contribution is a payload and its weight. They
    are added in the order of `contributions`.

    The bytes are the same as with `accumulate` into zeros and `finish_average`, but there is no array for the sum.
    Weights must be at least 0. The sum is divided by `total_weight`, by default the sum of the weights, which must be
    positive.

    Raises: CorruptPayloadError for the first corrupt contribution, as in `check_payload`; NonFiniteError as in
    `quantize`.
    """
    weights = [weight for _, weight in contributions]
    total = sum(weights) if total_weight is None else total_weight
    if not (_SMALLEST_FLOAT <= total <= LARGEST_WEIGHT and min(weights) >= 0):
        raise ValueError(
            f"the weights are {weights} of {total}; none may be negative, and the total must be between 0 and 2^63"
        )
    for contribution, _ in contributions:
        if (contribution.format, contribution.values) != (payload.format, payload.values):
            raise ValueError(f"a contribution has {contribution.values} values, the average {payload.values}")
    addresses = [contribution.address for contribution, _ in contributions]
    sizes = len(contributions), total, payload.values
    try:
        _encode(lib.diloco_average, payload, rounding, addresses, weights, *sizes, payload.address, threads)
    except NonFiniteError:
        for contribution, _ in contributions:
            check_payload(contribution, threads)
        raise


def check_payload(payload: Payload, threads: int = 1) -> None:
    """Check that the encoder could have produced a payload, so that all decoded values are finite. Raises:
    CorruptPayloadError for the first corrupt block."""
    _decode(lib.diloco_check_payload, payload, payload.values, threads)


def squared_norm(payload: Payload) -> float:
    """Return the sum of the squares of a payload's decoded values, in double precision, with the same bits on every
    machine. Raises: CorruptPayloadError as in `check_payload`."""
    squared = ffi.new("double *")
    _decode(lib.diloco_squared_norm, payload, payload.values, squared)
    return squared[0]


def dequantize(payload: Payload, values: Floats, threads: int = 1) -> None:
    """Decode `payload` into `values`. Raises: CorruptPayloadError as in `check_payload`."""
    target = _view("values", values, payload, writable=True)
    _decode(lib.diloco_dequantize, payload, target.size, target.address, threads)


def accumulate(payload: Payload, weight: float, accumulator: Floats, threads: int = 1) -> None:
    """Add a payload's decoded values times `weight` (a number of tokens, rounded to fp32): `accumulator += weight *
    decoded`. Raises: CorruptPayloadError as in `check_payload`; blocks before the corrupt block may have been added."""
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise ValueError(f"weight is {weight}; it must be between 0 and 2^63")
    target = _view("accumulator", accumulator, payload, writable=True)
    _decode(lib.diloco_accumulate, payload, weight, target.size, target.address, threads)


def gradient_step(payload: Payload, theta: Floats, learning_rate: float, threads: int = 1) -> None:
    """Update theta in place by plain gradient descent with a payload's decoded pseudo-gradient: `theta = theta -
    learning_rate * decoded`. Raises: CorruptPayloadError as in `outer_step`."""
    _check_scalar("learning_rate", learning_rate)
    parameters = _view("theta", theta, payload, writable=True)
    _decode(lib.diloco_accumulate, payload, -learning_rate, parameters.size, parameters.address, threads)


def outer_step(
    payload: Payload,
    theta: Floats,
    momentum: Floats,
    learning_rate: float,
    momentum_coefficient: float,
    threads: int = 1,
) -> None:
    """Update theta and momentum in place by DiLoCo's outer optimizer (Algorithm 1, line 14): Nesterov SGD with g, a
    payload's decoded pseudo-gradient.

        momentum = momentum_coefficient * momentum + g
        theta    = theta - learning_rate * (g + momentum_coefficient * momentum)

    This is torch.optim.SGD(nesterov=True) with a momentum that starts at zero. Raises: CorruptPayloadError as in
    `check_payload`; blocks before the corrupt one may have been updated, so check the payload first.
    """
    _check_scalar("learning_rate", learning_rate)
    _check_scalar("momentum_coefficient", momentum_coefficient)
    parameters = _view("theta", theta, payload, writable=True)
    velocity = _view("momentum", momentum, payload, writable=True)
    arguments = parameters.address, velocity.address, parameters.size, learning_rate, momentum_coefficient, threads
    _decode(lib.diloco_outer_step, payload, *arguments)


def _encode(function: Callable[..., int], payload: Payload, rounding: Rounding, *arguments: object) -> None:
    """Call a C function that encodes values into a payload. Raises: NonFiniteError for the first block that cannot be
    encoded."""
    if not payload.is_writable:
        raise ValueError("the payload's bytes are read-only, but must be writable")
    format = payload.format
    if rounding.is_stochastic and not format.is_stochastic:
        raise ValueError(f"{format.name} has no stochastic rounding: use NEAREST")
    refused = function(format.index, rounding.is_stochastic, rounding.seed, rounding.first_block, *arguments)
    if refused:
        raise NonFiniteError(refused - 1, format.block_values)


def _check_scalar(name: str, value: float) -> None:
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:  # the comparison is False for NaN, too
        raise ValueError(f"{name} is {value}; it must be a finite fp32 number")


def _decode(function: Callable[..., int], payload: Payload, *arguments: object) -> None:
    """Call a C function that decodes a payload. Raises: CorruptPayloadError for the first corrupt block."""
    refused = function(payload.format.index, payload.address, *arguments)
    if refused:
        raise CorruptPayloadError(refused - 1, "its header or a code is one that the encoder does not produce")


# Self-test ------------------------------------------------------------------------------------------------------------
# The self-test compares all instruction sets' results with the scalar set's, bit for bit, and measures the speed. This
# takes two seconds.

COMPARED_VALUES = 100 * 1024 + 77  # values that the self-test encodes: whole blocks, and 77 more
TIMED_VALUES = 8 << 20  # values in 32 MiB of floats, more than most caches hold
SECONDS_PER_OPERATION = 0.3  # seconds for which each of four operations is timed


def differing_sets() -> list[str]:
    """Return the names of this machine's instruction sets whose results differ from the scalar set's in any bit.
    Without a bug, the list is empty."""
    before = chosen_kernels()
    values = _values(COMPARED_VALUES)
    try:
        results = {name: _results(name, values) for name in supported_kernels()}
    finally:
        choose_kernels(before)
    return [name for name, result in results.items() if result != results["scalar"]]


def measure_speeds(threads: int) -> dict[str, float]:
    """Measure the operations in int8, with the chosen instruction set, on arrays larger than caches. Return the GB/s
    that each operation reads and writes, by name."""
    values, theta, momentum = _values(TIMED_VALUES), _values(TIMED_VALUES), np.zeros(TIMED_VALUES, np.float32)
    payload = Payload(INT8, TIMED_VALUES)
    floats, codes = 4 * TIMED_VALUES, INT8.payload_size(TIMED_VALUES)
    operations: list[tuple[str, int, Callable[[], None]]] = [
        ("quantize", floats + codes, lambda: quantize(values, payload, threads=threads)),
        ("dequantize", floats + codes, lambda: dequantize(payload, values, threads)),
        ("accumulate", 2 * floats + codes, lambda: accumulate(payload, 1.0, momentum, threads)),
        ("outer step", 4 * floats + codes, lambda: outer_step(payload, theta, momentum, 0.0, 0.9, threads)),
    ]
    return {name: size / _fastest(operation) / 1e9 for name, size, operation in operations}


def _fastest(operation: Callable[[], None]) -> float:
    """Return the seconds of the operation's fastest call within SECONDS_PER_OPERATION. A first call, to warm up, is not
    timed."""
    operation()
    fastest, end = float("inf"), time.perf_counter() + SECONDS_PER_OPERATION
    while fastest == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        operation()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _results(name: str, values: FloatArray) -> list[bytes]:
    choose_kernels(name)
    results: list[bytes] = []
    for format in FORMATS.values():
        for rounding in (NEAREST, stochastic(7)) if format.is_stochastic else (NEAREST,):
            payload, theta, momentum = Payload(format, values.size), values.copy(), values.copy()
            quantize(values, payload, rounding)
            accumulate(payload, 12345.0, momentum)
            outer_step(payload, theta, momentum, 0.7, 0.9)
            results += [bytes(payload), theta.tobytes(), momentum.tobytes()]
    return results


def _values(count: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal(count, np.float32)
