"""An outer step in numbers, for curves: how long its vectors are, and how far a pseudo-gradient and the average agree.

Each is measured as this machine takes it, a moment after, beside whatever comes next. Nothing is decided by these
numbers, and their last bits may differ from machine to machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco.kernels import Payload, dequantize
from opendiloco.shared_memory import Vector
from opendiloco.training.state import OuterState
from peers.values.manifest import Amendment
from peers.values.workload import Blocks

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


@dataclass(frozen=True)
class OuterStepTaken:
    """An outer step's statistics; `pause_seconds` from the end of training to the new theta, NaN where this machine
    trained on meanwhile."""

    index: int
    learning_rate: float
    momentum: float
    pause_seconds: float
    statistics: OuterStatistics


class Measuring:
    """Reads a state's momentum and `contributions`, one for each fragment, while nobody changes them: `finished`."""

    def __init__(self, state: OuterState, contributions: Sequence[Payload], trains_on: bool = False) -> None:
        """With `trains_on`, workers do not wait for outer steps."""
        self.on_outer_step: Callable[[OuterStepTaken], None] | None = None
        """Told of each outer step, once all of its fragments are measured."""
        self._state = state
        self._contributions = contributions
        self._trains_on = trains_on
        self._trained_at: dict[int, float] = {}  # when what was trained that no outer step has had yet
        self._index = 0
        self._parts: dict[int, OuterStatistics] = {}  # what is measured of the present outer step
        self._measuring: asyncio.Task[None] | None = None

    def trained(self, fragment: int) -> None:
        """This machine has trained a fragment, and encodes its contribution to the next outer step."""
        self._trained_at[fragment] = time.monotonic()

    def forget(self) -> None:
        """No outer step takes what has been trained."""
        self._trained_at.clear()

    def taken(
        self, payload: Blocks, index: int, fragment: int, keeps_work: bool, amendment: Amendment | None = None
    ) -> None:
        """Measure the outer step that a fragment has just taken, if somebody listens. One that `keeps_work` until a
        later cycle does not take our contribution."""
        is_last = fragment == len(self._contributions) - 1
        trained_at = None if keeps_work and is_last else self._trained_at.pop(fragment, None)
        if self.on_outer_step is None:
            return
        pause = math.nan if trained_at is None or self._trains_on else time.monotonic() - trained_at
        own = None if trained_at is None else self._contributions[fragment]
        self._measuring = asyncio.create_task(self._measure(payload, index, fragment, own, amendment, pause))

    async def finished(self) -> None:
        """Wait until nobody reads the momentum and the contributions of the last outer step any more."""
        if self._measuring is not None:
            await asyncio.wait([self._measuring])
            self._measuring = None

    async def _measure(
        self,
        payload: Blocks,
        index: int,
        fragment: int,
        own: Payload | None,
        amendment: Amendment | None,
        pause: float,
    ) -> None:
        own_or_any = self._contributions[fragment]
        average = Payload(own_or_any.format, own_or_any.values, payload)
        momentum = self._state.momentum[self._state.fragments[fragment]]
        if index != self._index:
            self._index, self._parts = index, {}
        self._parts[fragment] = await asyncio.to_thread(measure, average, momentum, own)
        if len(self._parts) == len(self._contributions) and self.on_outer_step is not None:
            statistics = together(list(self._parts.values()))
            rate, coefficient = self._state.learning_rate(index, amendment), self._state.coefficient(amendment)
            self.on_outer_step(OuterStepTaken(index, rate, coefficient, pause, statistics))


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
