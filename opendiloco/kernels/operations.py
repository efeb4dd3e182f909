"""The operations: from floats to payloads, and from payloads to floats; and the instruction set that does them.

They work on any range of blocks: slice the arrays at multiples of the format's `block_values`, its payload at multiples
of `block_bytes`. Arguments must not overlap; arguments of the wrong kind or length raise ValueError. `threads` is the
most that a call uses, its own included; they end with it. After an error, what was to be written is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco._kernels import ffi, lib
from opendiloco.errors import MachineError
from opendiloco.kernels.payloads import (
    CorruptPayloadError,
    Floats,
    FloatView,
    NonFiniteError,
    Payload,
    view_floats,
)

# Instruction sets -----------------------------------------------------------------------------------------------------
ENVIRONMENT_VARIABLE = "DILOCO_KERNELS"
KERNEL_SETS = ("scalar", "avx2", "avx512", "neon")


def supported_kernels() -> tuple[str, ...]:
    """Return the sets that this processor and this build have."""
    return tuple(name for name in KERNEL_SETS if lib.diloco_kernels_are_supported(name.encode()))


def chosen_kernels() -> str:
    """Return the set that operations use."""
    return ffi.string(lib.diloco_kernels_name()).decode()


def choose_kernels(name: str) -> None:
    """Use a set from now on, in the whole process; "" is the fastest. Raises: MachineError."""
    if name and name not in supported_kernels():
        known = "this machine does not have it" if name in KERNEL_SETS else "there is no such set"
        choices = ", ".join(supported_kernels())
        raise MachineError(
            f"{ENVIRONMENT_VARIABLE} = {name!r}: {known}.", f"Unset it for the fastest, or use one of: {choices}."
        )
    lib.diloco_choose_kernels(name.encode())


# Operations -----------------------------------------------------------------------------------------------------------
_LARGEST_FLOAT, _SMALLEST_FLOAT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
LARGEST_WEIGHT = 2.0**63
"""Of all weights of an average together: so no sum of sound payloads overflows."""


@dataclass(frozen=True)
class Rounding:
    """To the nearest code, or by chance to one of the two around (`stochastic`).

    The chance is a function of `seed`, of the block's index (that of the first is `first_block`) and of the value's
    place in its block, so that a payload can be made again, block by block.
    """

    is_stochastic: bool
    seed: int = 0
    first_block: int = 0


NEAREST = Rounding(is_stochastic=False)


def stochastic(seed: int, first_block: int = 0) -> Rounding:
    """Round by chance. `seed` is taken modulo 2^64."""
    return Rounding(True, seed % 2**64, first_block)


def quantize(values: Floats, payload: Payload, rounding: Rounding = NEAREST, threads: int = 1) -> None:
    """Encode `values`. Raises: NonFiniteError for the first block that can't be encoded."""
    source = view_floats("values", values)
    _check_target(payload, source)
    _encode(lib.diloco_quantize, payload, rounding, source.address, source.size, payload.address, threads)


def quantize_difference(
    theta: Floats,
    local: Floats,
    payload: Payload,
    rounding: Rounding = NEAREST,
    residual: Floats | None = None,
    threads: int = 1,
) -> None:
    """Encode the pseudo-gradient `theta - local`, without a temporary array.

    With error feedback, `residual` is what earlier payloads left out: it is added to the difference, and becomes what
    this payload leaves out. Raises: NonFiniteError, as `quantize` does, also where only the difference overflows.
    """
    minuend = view_floats("theta", theta)
    subtrahend = view_floats("local", local)
    _check_length("local", subtrahend, minuend)
    _check_target(payload, minuend)
    left_out = 0
    if residual is not None:
        remainder = view_floats("residual", residual, writable=True)
        _check_length("residual", remainder, minuend)
        left_out = remainder.address
    sources = minuend.address, subtrahend.address, False, left_out, minuend.size  # False: local is not bfloat16
    _encode(lib.diloco_quantize_difference, payload, rounding, *sources, payload.address, threads)


def finish_average(
    accumulator: Floats, total_weight: float, payload: Payload, rounding: Rounding = NEAREST, threads: int = 1
) -> None:
    """Encode the weighted average `accumulator / total_weight`.

    `total_weight` is the sum of the weights that were accumulated and must be positive. Raises: NonFiniteError, as
    `quantize` does.
    """
    if not _SMALLEST_FLOAT <= total_weight <= LARGEST_WEIGHT:
        raise ValueError(f"total_weight is {total_weight}; it must be positive, and at most 2^63")
    source = view_floats("accumulator", accumulator)
    _check_target(payload, source)
    arguments = source.address, total_weight, source.size, payload.address, threads
    _encode(lib.diloco_finish_average, payload, rounding, *arguments)


def average(
    contributions: Sequence[tuple[Payload, float]],
    payload: Payload,
    rounding: Rounding = NEAREST,
    threads: int = 1,
    total_weight: float | None = None,
) -> None:
    """Encode the weighted average of decoded payloads, each with its weight; they are added up in this order.

    The same bytes as with `accumulate` into zeros and `finish_average`, with no array for the sum. The weights must be
    at least 0. Their sum is divided by `total_weight`, by default the sum of the weights, which must be positive.

    Raises: CorruptPayloadError, as `check_payload` does of the first contribution that doesn't pass; NonFiniteError, as
    `quantize` does.
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
    """Raises: CorruptPayloadError for the first block that no encoder makes; what passes decodes to finite values."""
    _raise_corrupt(lib.diloco_check_payload(payload.format.index, payload.address, payload.values, threads))


def squared_norm(payload: Payload) -> float:
    """Return the sum of the squares of the decoded values, in double: the same bits on every machine.

    Raises: CorruptPayloadError, as `check_payload` does.
    """
    squared = ffi.new("double *")
    _raise_corrupt(lib.diloco_squared_norm(payload.format.index, payload.address, payload.values, squared))
    return squared[0]


def dequantize(payload: Payload, values: Floats, threads: int = 1) -> None:
    """Decode into `values`. Raises: CorruptPayloadError, as `check_payload` does."""
    target = view_floats("values", values, writable=True)
    _check_source(payload, "values", target)
    _raise_corrupt(lib.diloco_dequantize(payload.format.index, payload.address, target.size, target.address, threads))


def accumulate(payload: Payload, weight: float, accumulator: Floats, threads: int = 1) -> None:
    """Add the decoded payload times `weight` (tokens, rounded to fp32): `accumulator += weight * decoded`.

    Raises: CorruptPayloadError, as `check_payload` does; the blocks before the corrupt one may have been added.
    """
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise ValueError(f"weight is {weight}; it must be between 0 and 2^63")
    target = view_floats("accumulator", accumulator, writable=True)
    _check_source(payload, "accumulator", target)
    _raise_corrupt(
        lib.diloco_accumulate(payload.format.index, payload.address, weight, target.size, target.address, threads)
    )


def gradient_step(payload: Payload, theta: Floats, learning_rate: float, threads: int = 1) -> None:
    """Plain gradient descent on the decoded pseudo-gradient, in place: `theta = theta - learning_rate * decoded`.

    Raises: CorruptPayloadError, as `outer_step` does.
    """
    _check_scalar("learning_rate", learning_rate)
    parameters = view_floats("theta", theta, writable=True)
    _check_source(payload, "theta", parameters)
    arguments = payload.format.index, payload.address, -learning_rate, parameters.size, parameters.address, threads
    _raise_corrupt(lib.diloco_accumulate(*arguments))


def outer_step(
    payload: Payload,
    theta: Floats,
    momentum: Floats,
    learning_rate: float,
    momentum_coefficient: float,
    threads: int = 1,
) -> None:
    """Take a step of DiLoCo's outer optimizer (Algorithm 1, line 14), in place: Nesterov SGD on the decoded g.

        momentum = momentum_coefficient * momentum + g
        theta    = theta - learning_rate * (g + momentum_coefficient * momentum)

    This is torch.optim.SGD(nesterov=True) with a momentum that starts at zero. Raises: CorruptPayloadError, as
    `check_payload` does; a step that must be all or nothing is checked before.
    """
    _check_scalar("learning_rate", learning_rate)
    _check_scalar("momentum_coefficient", momentum_coefficient)
    parameters, velocity = view_floats("theta", theta, writable=True), view_floats("momentum", momentum, writable=True)
    _check_source(payload, "theta", parameters)
    _check_length("momentum", velocity, parameters)
    _raise_corrupt(
        lib.diloco_outer_step(
            payload.format.index,
            payload.address,
            parameters.address,
            velocity.address,
            parameters.size,
            learning_rate,
            momentum_coefficient,
            threads,
        )
    )


def _encode(function: Callable[..., int], payload: Payload, rounding: Rounding, *arguments: object) -> None:
    """Call a C function that fills a payload. Raises: NonFiniteError for the first block that it refuses."""
    if not payload.is_writable:
        raise ValueError("the payload is written to, but its bytes are read-only")
    format = payload.format
    if rounding.is_stochastic and not format.is_stochastic:
        raise ValueError(f"{format.name} has no stochastic rounding; use NEAREST")
    refused = function(format.index, rounding.is_stochastic, rounding.seed, rounding.first_block, *arguments)
    if refused:
        raise NonFiniteError(refused - 1, format.block_values)


def _check_target(payload: Payload, source: FloatView) -> None:
    if payload.values != source.size:
        raise ValueError(f"the payload is for {payload.values} values, not for {source.size}")


def _check_source(payload: Payload, name: str, target: FloatView) -> None:
    if payload.values != target.size:
        raise ValueError(f"{name} has {target.size} values, the payload {payload.values}")


def _check_length(name: str, view: FloatView, theta: FloatView) -> None:
    if view.size != theta.size:
        raise ValueError(f"{name} has {view.size} values, theta has {theta.size}")


def _check_scalar(name: str, value: float) -> None:
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:  # not so for NaN, either
        raise ValueError(f"{name} is {value}; it must be a finite fp32 number")


def _raise_corrupt(refused: int) -> None:
    if refused:
        raise CorruptPayloadError(refused - 1, "its header or a code is one that no encoder makes")
