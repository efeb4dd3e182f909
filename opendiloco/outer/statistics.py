"""An outer step in numbers, for curves: how long its vectors are, and how far a pseudo-gradient and the average agree.

Nothing is decided by these numbers, and their last bits may differ from machine to machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco.kernels import Payload, dequantize
from opendiloco.shared_memory import Vector

TILE_BLOCKS = 128
"""Blocks that are decoded at once: few enough for their values to stay in the processor's cache."""


@dataclass(frozen=True)
class OuterStatistics:
    """Norms of the averaged pseudo-gradient, of one peer's own, and of the momentum after the step.

    `cosine` is that of the angle between the average and the peer's own. Both are NaN where the peer has none.
    """

    average_norm: float
    momentum_norm: float
    pseudo_gradient_norm: float = math.nan
    cosine: float = math.nan


def measure(average: Payload, momentum: Vector, own: Payload | None = None) -> OuterStatistics:
    """Return an outer step's statistics, from whole payloads that were checked before."""
    tile = TILE_BLOCKS * average.format.block_values
    first, second = np.empty((2, tile), np.float32)
    average_square = momentum_square = own_square = product = 0.0
    for start in range(0, average.values, tile):
        momenta = momentum[start : start + tile]
        momentum_square += _dot(momenta, momenta)
        averages = _decode(average, start, first)
        average_square += _dot(averages, averages)
        if own is not None:
            owns = _decode(own, start, second)
            own_square += _dot(owns, owns)
            product += _dot(averages, owns)
    norms = math.sqrt(average_square), math.sqrt(momentum_square)
    if own is None:
        return OuterStatistics(*norms)
    both = math.sqrt(average_square * own_square)
    return OuterStatistics(*norms, math.sqrt(own_square), product / both if both else math.nan)


def together(parts: Sequence[OuterStatistics]) -> OuterStatistics:
    """Return the statistics of an outer step from those of its fragments."""
    if len(parts) == 1:
        return parts[0]
    average, momentum, own = (
        math.hypot(*(getattr(part, name) for part in parts))
        for name in ("average_norm", "momentum_norm", "pseudo_gradient_norm")
    )
    product = sum(part.cosine * part.average_norm * part.pseudo_gradient_norm for part in parts)
    return OuterStatistics(average, momentum, own, product / (average * own) if average * own else math.nan)


def _decode(payload: Payload, start: int, out: Vector) -> Vector:
    """Return the values from `start` on, a multiple of a block's: as many as `out` has room for."""
    format, values = payload.format, min(out.size, payload.values - start)
    block = start // format.block_values
    first, last = format.byte_range(block, block + format.block_count(values), payload.values)
    dequantize(Payload(format, values, payload.buffer[first:last]), out[:values])
    return out[:values]


def _dot(first: Vector, second: Vector) -> float:
    """Return the sum of products. (BLAS would start threads for it, beside those that train.)"""
    return float(np.einsum("i,i->", first, second))
