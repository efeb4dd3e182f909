"""Measures each outer step as this machine takes it, a moment after, beside whatever comes next."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendiloco import kernels
from opendiloco.outer.state import OuterState
from opendiloco.outer.statistics import OuterStatistics, measure, together
from peers.values.amendments import Amendment
from peers.values.workload import Blocks


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

    def __init__(self, state: OuterState, contributions: Sequence[kernels.Payload], trains_on: bool = False) -> None:
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
        own: kernels.Payload | None,
        amendment: Amendment | None,
        pause: float,
    ) -> None:
        own_or_any = self._contributions[fragment]
        average = kernels.Payload(own_or_any.format, own_or_any.values, payload)
        momentum = self._state.momentum[self._state.fragments[fragment]]
        if index != self._index:
            self._index, self._parts = index, {}
        self._parts[fragment] = await asyncio.to_thread(measure, average, momentum, own)
        if len(self._parts) == len(self._contributions) and self.on_outer_step is not None:
            statistics = together(list(self._parts.values()))
            rate, coefficient = self._state.learning_rate(index, amendment), self._state.coefficient(amendment)
            self.on_outer_step(OuterStepTaken(index, rate, coefficient, pause, statistics))
