"""The factor of a learning rate over the run.

That of the outer step must be the same bits on every machine. So there are only operations that IEEE 754 rounds in one
way, in float64: division, multiplication, differences and square roots, but no cosine of a C library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from opendiloco.config.optimizers import OuterScheduleSection


def learning_rate_factor(schedule: OuterScheduleSection, done: int) -> float:
    """What the peak learning rate is multiplied by in the step that brings the count of steps, or tokens, to `done`.

    Warmup rises linearly and reaches 1 at its last step; decay reaches `final_fraction` at its last step, where the
    factor stays. `done` is 1 or more.
    """
    warmup, stable, decay = schedule.phases
    if done <= warmup:
        return done / warmup
    decayed = done - warmup - stable
    if decayed <= 0 or schedule.kind == "constant":
        return 1.0
    fraction = min(1.0, decayed / decay) if decay else 1.0
    return 1.0 - _SHAPES[schedule.shape](fraction) * (1.0 - schedule.final_fraction)


def _linear(fraction: float) -> float:
    return fraction


def _half_cosine(fraction: float) -> float:
    """(1 - cos(pi * fraction)) / 2, by the cosine's series, whose last term here is below the last bit."""
    if fraction >= 1.0:
        return 1.0
    square, cosine = (math.pi * fraction) * (math.pi * fraction), 1.0
    for power in range(30, 0, -2):
        cosine = 1.0 - square / (power * (power - 1)) * cosine
    return (1.0 - cosine) / 2.0


_SHAPES: dict[str, Callable[[float], float]] = {"linear": _linear, "cosine": _half_cosine, "sqrt": math.sqrt}
