"""The outer loop's state: parameters theta and momentum m, the same bits on every peer.

An outer step of DiLoCo (Algorithm 1, lines 12 to 14 of arXiv 2311.08105) with Nesterov's method as outer optimizer:

    g     = average of theta - local over the round's members, weighted by tokens    (arrives as a payload)
    m     = mu * m + g
    theta = theta - learning_rate * (g + mu * m)
"""

from __future__ import annotations

import numpy as np

from opendiloco import kernels
from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.inner.learning_rate import learning_rate_factor
from opendiloco.shared_memory import Vector
from peers.transfer.state_chunks import digest_of_state


class OuterState:
    """theta and momentum, fp32 of shape (n,). theta is used in place, so that it may lie in shared memory."""

    def __init__(self, theta: Vector, optimizer: OuterOptimizerSection) -> None:
        self.theta = theta
        self.momentum: Vector = np.zeros_like(theta)
        self._optimizer = optimizer

    def apply(self, payload: kernels.Payload, index: int) -> None:
        """Outer step `index` of the run, counted from 0, with an average: a whole payload that is known to be one
        (`BlockCodec.checked`)."""
        rate, coefficient = self.learning_rate(index), self._optimizer.momentum
        kernels.outer_step(payload, self.theta, self.momentum, rate, coefficient)

    def learning_rate(self, index: int) -> float:
        """Of outer step `index`, the same bits on every machine."""
        peak, schedule = self._optimizer.learning_rate, self._optimizer.schedule
        return peak if schedule is None else peak * learning_rate_factor(schedule, index + 1)

    def replace(self, theta: Vector, momentum: Vector) -> None:
        """Take over another peer's state."""
        self.theta[:] = theta
        self.momentum[:] = momentum

    def copy_to(self, out: memoryview) -> None:
        """Write momentum's bytes, then theta's. By numpy, which lets other threads run meanwhile: bytes copied by
        Python itself would keep the event loop waiting."""
        momentum, theta = np.frombuffer(out, np.float32).reshape(2, -1)
        momentum[:], theta[:] = self.momentum, self.theta

    def digest(self) -> bytes:
        return digest_of_state(self.vectors)

    @property
    def vectors(self) -> tuple[memoryview, memoryview]:
        """The state's bytes, in the order of snapshots: momentum, theta."""
        return self.momentum.view(np.uint8).data, self.theta.view(np.uint8).data
