"""The outer loop's state: the parameters theta and their momentum m, the same bits on every peer. This module imports
no torch.

An outer step of DiLoCo (Algorithm 1, lines 12 to 14 of arXiv 2311.08105) with Nesterov's method as outer optimizer:

    g     = average of theta - local over the round's members, weighted by tokens    (arrives as a payload)
    m     = mu * m + g
    theta = theta - learning_rate * (g + mu * m)

The learning rate and mu come from the manifest, or from the amendment in force. They must be the same bits on every
machine. Schedules therefore use only float64 operations that IEEE 754 rounds in one way: division, multiplication,
differences and square roots, but not the cosine of a C library.

In a run that streams, each fragment takes its own outer steps (Algorithm 2, line 20, of arXiv 2501.18512).

With a delayed momentum, only the last of N outer steps moves theta by the momentum (`OuterState.apply`):

    m     = mu * m + the sum of the N averages
    theta = theta - learning_rate / N * g                in each of them
    theta = theta - learning_rate / N * mu * m           in the last one
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco import kernels
from opendiloco.config.optimizers import OuterOptimizerSection, OuterScheduleSection
from opendiloco.config.overrides import NO_OVERRIDES, Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.host_memory import STATE_BYTES
from opendiloco.kernels import Payload
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import BlockCodec, decoded
from peers.values.chunks import digest_of_state
from peers.values.manifest import Amendment
from peers.values.workload import Blocks, SnapshotError


# Learning rate --------------------------------------------------------------------------------------------------------
def learning_rate_factor(schedule: OuterScheduleSection, done: int, decayed: float | None = None) -> float:
    """Return a step's learning rate as a fraction of its peak. After the step, `done` steps, or tokens if the schedule
    counts tokens, are done. `decayed` is the finished share of an amendment's decay; None: the schedule's own applies.

    `done` is at least 1. Warmup rises linearly and reaches 1 at its last step. Decay reaches `final_fraction` at its
    last step, and stays there.
    """
    warmup, stable, decay = schedule.phases
    if done <= warmup:
        return done / warmup
    if decayed is None:
        since = done - warmup - stable
        if since <= 0 or schedule.kind == "constant":
            return 1.0
        decayed = min(1.0, since / decay) if decay else 1.0
    return 1.0 - _SHAPES[schedule.shape](decayed) * (1.0 - schedule.final_fraction)


def inner_learning_rate_factor(config: RunConfig, overrides: Overrides, step: int, tokens: int) -> float:
    """Return the inner learning rate, as a fraction of its peak, in inner step `step` of the run, counted from 0.
    `tokens` is the number of tokens that the run has trained after this step."""
    done, decay = tokens if config.schedule.unit == "tokens" else step + 1, overrides.decay
    decayed = None if decay is None else decay.fraction(config.training.inner_steps, step + 1)
    factor, lowered = learning_rate_factor(config.schedule, done, decayed), overrides.inner_learning_rate_factor
    return factor if lowered is None else factor * lowered


def _half_cosine(fraction: float) -> float:
    """Return (1 - cos(pi * fraction)) / 2 by the cosine's power series, whose bits are the same on all machines."""
    if fraction >= 1.0:
        return 1.0
    square, cosine = (math.pi * fraction) * (math.pi * fraction), 1.0
    for power in range(30, 0, -2):
        cosine = 1.0 - square / (power * (power - 1)) * cosine
    return (1.0 - cosine) / 2.0


_SHAPES: dict[str, Callable[[float], float]] = {"linear": float, "cosine": _half_cosine, "sqrt": math.sqrt}


# State ----------------------------------------------------------------------------------------------------------------
PIECE = 1 << 20  # number of values checked for NaN and infinity at once, to use little memory


class OuterState:
    """Holds the vectors theta and momentum, fp32 of shape (n,), and applies outer steps to both. theta is the caller's
    array, not a copy, so that it may lie in shared memory."""

    def __init__(
        self, theta: Vector, optimizer: OuterOptimizerSection, fragments: Sequence[slice] | None = None
    ) -> None:
        """Create the state with a momentum of zeros. `fragments` has each fragment's slice of theta; by default all of
        theta is one fragment."""
        self.theta = theta
        self.fragments = tuple(fragments or [slice(0, theta.size)])
        self.momentum: Vector = np.zeros_like(theta)
        self._optimizer = optimizer

    def apply(
        self, payload: kernels.Payload, index: int, fragment: int = 0, overrides: Overrides = NO_OVERRIDES
    ) -> None:
        """Take outer step `index` of one fragment with the average in `payload`. Outer steps are counted from 0.

        The payload must be a whole one of the fragment, checked by `BlockCodec.checked`. `overrides` apply in this
        outer step.
        """
        coefficient, every, part = self.coefficient(overrides), self._optimizer.momentum_every, self.fragments[fragment]
        rate, theta, momentum = self.learning_rate(index, overrides) / every, self.theta[part], self.momentum[part]
        if (index + 1) % every == 0:
            kernels.outer_step(payload, theta, momentum, rate, coefficient)
            return
        kernels.gradient_step(payload, theta, rate)
        if coefficient:
            # The next outer step that applies the momentum first multiplies it by the momentum coefficient. The
            # division makes up for that, so that this average counts in full.
            kernels.accumulate(payload, 1 / coefficient, momentum)

    def learning_rate(self, index: int, overrides: Overrides = NO_OVERRIDES) -> float:
        """Return the learning rate of outer step `index` with these overrides, the same bits on every machine."""
        peak, schedule = overrides.outer_learning_rate, self._optimizer.schedule
        peak = self._optimizer.learning_rate if peak is None else peak
        return peak if schedule is None else peak * learning_rate_factor(schedule, index + 1)

    def coefficient(self, overrides: Overrides = NO_OVERRIDES) -> float:
        """Return mu, the factor of the outer momentum, with these overrides."""
        return self._optimizer.momentum if overrides.outer_momentum is None else overrides.outer_momentum

    def replace(self, theta: Vector, momentum: Vector) -> None:
        self.theta[:] = theta
        self.momentum[:] = momentum

    def copy_to(self, out: memoryview) -> None:
        """Write the momentum's bytes, then theta's, to `out`. numpy copies them, because Python's own copying would
        block the event loop."""
        momentum, theta = np.frombuffer(out, np.float32).reshape(2, -1)
        momentum[:], theta[:] = self.momentum, self.theta

    def digest(self) -> bytes:
        return digest_of_state(self.vectors)

    @property
    def vectors(self) -> tuple[memoryview, memoryview]:
        """The bytes of the momentum and of theta, in the order of snapshots."""
        return self.momentum.view(np.uint8).data, self.theta.view(np.uint8).data


class LocalState:
    """This machine's outer state, to which the log's entries are applied. A peer that only follows the run needs no
    other state.

    It implements `peers.values.workload.ReplicatedState`. Arithmetic runs in threads, so that the event loop never
    waits.
    """

    def __init__(self, theta: Vector, config: RunConfig, fragments: Sequence[slice] | None = None) -> None:
        """Create the state. `theta` and `fragments` are as in `OuterState`; outer steps change `theta` in place."""
        self.outer = OuterState(theta, config.outer_optimizer, fragments)
        self._config = config
        self.fragments = [BlockCodec.of(config.codec, part.stop - part.start) for part in self.outer.fragments]

    async def apply(
        self, payload: Blocks, index: int, fragment: int = 0, *, amendment: Amendment | None = None
    ) -> None:
        """Take a fragment's outer step with the bytes of an average. Raises: BadBlocksError, AmendmentError, both
        without changing the state."""
        overrides = Overrides.of(amendment, self._config)
        await asyncio.to_thread(
            lambda: self.outer.apply(self.fragments[fragment].checked(payload), index, fragment, overrides)
        )

    async def state_digest(self) -> bytes:
        return await asyncio.to_thread(self.outer.digest)

    @property
    def state_size(self) -> int:
        return STATE_BYTES * self.outer.theta.size

    async def copy_state(self, out: memoryview) -> None:
        await asyncio.to_thread(self.outer.copy_to, out)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Replace the state by a snapshot's bytes. Raises: SnapshotError, without changing the state, unless the bytes
        have this digest and all values are finite."""
        await asyncio.to_thread(self._restore, state, state_digest)

    def _restore(self, state: Blocks, state_digest: bytes) -> None:
        if len(state) != self.state_size or digest_of_state([state]) != state_digest:
            raise SnapshotError("it is not the state with that digest")
        momentum, theta = np.frombuffer(state, np.float32).reshape(2, -1)
        for name, vector in (("momentum", momentum), ("theta", theta)):
            if not all(np.isfinite(vector[start : start + PIECE]).all() for start in range(0, vector.size, PIECE)):
                raise SnapshotError(f"{name} holds NaN or infinity")
        self.outer.replace(theta, momentum)


# Statistics -----------------------------------------------------------------------------------------------------------
TILE_BLOCKS = 128
"""Number of blocks decoded at once, small enough for their values to stay in the processor's cache."""


@dataclass(frozen=True)
class OuterStatistics:
    """Norms of an outer step's average, of the momentum after the step, and of this peer's own pseudo-gradient.
    `cosine` is that of the angle between average and pseudo-gradient. Without the latter, its norm and cosine are NaN.
    """

    average_norm: float
    momentum_norm: float
    pseudo_gradient_norm: float = math.nan
    cosine: float = math.nan

    @classmethod
    def measured(cls, average: Payload, momentum: Vector, own: Payload | None = None) -> OuterStatistics:
        """Return the statistics of a fragment's outer step from its average, the momentum, and this peer's own
        contribution. Both payloads must have been checked."""
        tile = TILE_BLOCKS * average.format.block_values
        first, second = np.empty((2, tile), np.float32)
        average_square = momentum_square = own_square = product = 0.0
        for start in range(0, average.values, tile):
            momenta = momentum[start : start + tile]
            momentum_square += _dot(momenta, momenta)
            averages = decoded(average, start, first)
            average_square += _dot(averages, averages)
            if own is not None:
                owns = decoded(own, start, second)
                own_square += _dot(owns, owns)
                product += _dot(averages, owns)
        norms = math.sqrt(average_square), math.sqrt(momentum_square)
        if own is None:
            return cls(*norms)
        both = math.sqrt(average_square * own_square)
        return cls(*norms, math.sqrt(own_square), product / both if both else math.nan)

    @classmethod
    def together(cls, parts: Sequence[OuterStatistics]) -> OuterStatistics:
        """Return the statistics of a whole outer step, combined from those of its fragments."""
        if len(parts) == 1:
            return parts[0]
        average, momentum, own = (
            math.hypot(*(getattr(part, name) for part in parts))
            for name in ("average_norm", "momentum_norm", "pseudo_gradient_norm")
        )
        product = sum(part.cosine * part.average_norm * part.pseudo_gradient_norm for part in parts)
        return cls(average, momentum, own, product / (average * own) if average * own else math.nan)


@dataclass(frozen=True)
class OuterStepTaken:
    """A finished outer step. `pause_seconds` is the time from the end of training to the new theta, or NaN if training
    did not pause."""

    index: int
    learning_rate: float
    momentum: float
    pause_seconds: float
    statistics: OuterStatistics


class OuterStepMeter:
    """Measures outer steps in the background. It reads the state's momentum and the `contributions` (one for each
    fragment), so callers must await `finished` before changing them."""

    def __init__(
        self, state: OuterState, contributions: Sequence[Callable[[], Payload]], trains_on: bool = False
    ) -> None:
        """Create the measurer. `contributions` return each fragment's newest payload. If workers train during outer
        steps (`trains_on`), there is no pause to measure."""
        self.on_outer_step: Callable[[OuterStepTaken], None] | None = None
        """Called with each outer step once all of its fragments are measured."""
        self._state = state
        self._contributions = contributions
        self._trains_on = trains_on
        self._trained_at: dict[int, float] = {}  # by fragment: monotonic time at which its training ended
        self._index = 0
        self._parts: dict[int, OuterStatistics] = {}  # by fragment: its statistics in the current outer step
        self._measuring: asyncio.Task[None] | None = None

    def trained(self, fragment: int) -> None:
        """Record that this machine has now trained a fragment for the next outer step."""
        self._trained_at[fragment] = time.monotonic()

    def forget(self) -> None:
        """Delete the times at which fragments' training ended, because no outer step will use that training."""
        self._trained_at.clear()

    def taken(self, average: Payload, index: int, fragment: int, keeps_work: bool, overrides: Overrides) -> None:
        """Start to compute the norms of the outer step that a fragment has just taken. Once all fragments are measured,
        call `on_outer_step` with them; if it is None, compute nothing.

        If this machine `keeps_work` for a later cycle, the step does not include its contribution.
        """
        is_last = fragment == len(self._contributions) - 1
        trained_at = None if keeps_work and is_last else self._trained_at.pop(fragment, None)
        if (on_outer_step := self.on_outer_step) is None:
            return
        pause = math.nan if trained_at is None or self._trains_on else time.monotonic() - trained_at
        own = None if trained_at is None else self._contributions[fragment]()
        momentum = self._state.momentum[self._state.fragments[fragment]]
        if index != self._index:
            self._index, self._parts = index, {}

        async def measure() -> None:
            self._parts[fragment] = await asyncio.to_thread(OuterStatistics.measured, average, momentum, own)
            if len(self._parts) == len(self._contributions):
                statistics = OuterStatistics.together(list(self._parts.values()))
                rate, coefficient = self._state.learning_rate(index, overrides), self._state.coefficient(overrides)
                on_outer_step(OuterStepTaken(index, rate, coefficient, pause, statistics))

        self._measuring = asyncio.create_task(measure())

    async def finished(self) -> None:
        """Wait until no measurement reads the momentum and the contributions any more."""
        if self._measuring is not None:
            await asyncio.wait([self._measuring])
            self._measuring = None


def _dot(first: Vector, second: Vector) -> float:
    """Return the dot product of two vectors. BLAS is not used, because its threads would compete with training."""
    return float(np.einsum("i,i->", first, second))
