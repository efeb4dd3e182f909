"""The inner optimizer's state as bytes, as one peer gives it to another: a step count, and then its moments.

A moment is a vector of fp32 values, one for each value of theta and in theta's order. Both processes of a peer see them
through this module; optimizer_state.py has torch's side.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from opendiloco.config.optimizers import AdamWSection
from opendiloco.shared_memory import VALUE_BYTES, Vector
from peers.values.workload import SnapshotError

NAMES = ("exp_avg", "exp_avg_sq")
"""What torch calls AdamW's two moments."""
STEPS_BYTES = 8
STEPS_LIMIT = 1 << 24  # torch counts in fp32, and no further
PIECE = 1 << 20  # values that are checked at once
ROUNDING = 1.01

Steps: TypeAlias = NDArray[np.uint64]


class Moments:
    """A view of such bytes. `steps` has the step count as its only value, `vectors` the moments by torch's names."""

    def __init__(self, data: memoryview) -> None:
        self.steps: Steps = np.frombuffer(data, np.uint64, 1)
        both: Vector = np.frombuffer(data, np.float32, offset=STEPS_BYTES)
        self.vectors: dict[str, Vector] = dict(zip(NAMES, both.reshape(len(NAMES), -1), strict=True))


def moments_size(parameters: int) -> int:
    """Bytes of the moments of so many parameters."""
    return STEPS_BYTES + VALUE_BYTES * len(NAMES) * parameters


def check_moments(data: memoryview, section: AdamWSection, gradient_clip: float) -> None:
    """Whether gradients, clipped to this norm, can lead to these moments: others could do harm, or hold up training.

    Raises: SnapshotError.
    """
    moments = Moments(data)
    if not 0 < moments.steps[0] <= STEPS_LIMIT:
        raise SnapshotError(f"its inner optimizer has made {moments.steps[0]} steps")
    first, second = moments.vectors["exp_avg"], moments.vectors["exp_avg_sq"]
    limit, total = ROUNDING * largest_ratio(*section.betas), 0.0
    for start in range(0, first.size, PIECE):
        mean, square = first[start : start + PIECE], second[start : start + PIECE]
        if not (np.isfinite(mean).all() and np.isfinite(square).all()):
            raise SnapshotError("its moments hold NaN or infinity")
        if (square < 0).any():
            raise SnapshotError("its second moment is negative")
        if (np.abs(mean) > limit * (np.sqrt(square) + section.epsilon)).any():
            raise SnapshotError("its first moment is larger than its second one lets it be")
        total += float(square.sum(dtype=np.float64))
    if total > ROUNDING * gradient_clip**2:
        raise SnapshotError("its second moment is larger than gradient_clip lets it be")


def largest_ratio(beta1: float, beta2: float) -> float:
    """The most by which AdamW's first moment can exceed the root of its second, if beta1^2 < beta2.

    With weights w = (1 - beta1) beta1^k and u = (1 - beta2) beta2^k for the gradient k steps ago, the Cauchy-Schwarz
    inequality gives |sum w g| <= sqrt(sum w^2 / u) sqrt(sum u g^2). So no moments that pass move a weight by more than
    a few learning rates a step.
    """
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
