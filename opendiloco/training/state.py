"""The outer loop's state: parameters theta and momentum m, the same bits on every peer. No worker, and no torch.

An outer step of DiLoCo (Algorithm 1, lines 12 to 14 of arXiv 2311.08105) with Nesterov's method as outer optimizer:

    g     = average of theta - local over the round's members, weighted by tokens    (arrives as a payload)
    m     = mu * m + g
    theta = theta - learning_rate * (g + mu * m)

The learning rate and mu are the manifest's, or those of the organiser's amendment that the log has in force.

Of a run that streams, each fragment takes its own (Algorithm 2, line 20, of arXiv 2501.18512).

With a momentum that is delayed, of N outer steps only the last one moves theta by it (`OuterState.apply`):

    m     = mu * m + the sum of the N averages
    theta = theta - learning_rate / N * g                in each of them
    theta = theta - learning_rate / N * mu * m           in the last one
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from opendiloco import kernels
from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.host_memory import STATE_BYTES
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import BlockCodec
from opendiloco.training.learning_rate import learning_rate_factor
from peers.values.chunks import digest_of_state
from peers.values.manifest import Amendment
from peers.values.workload import Blocks, SnapshotError

PIECE = 1 << 20  # values checked at once, so that it takes no memory to speak of


class OuterState:
    """theta and momentum, fp32 of shape (n,). theta is used in place, so that it may lie in shared memory."""

    def __init__(
        self, theta: Vector, optimizer: OuterOptimizerSection, fragments: Sequence[slice] | None = None
    ) -> None:
        """`fragments` says where each lies in theta; by default there is one."""
        self.theta = theta
        self.fragments = tuple(fragments or [slice(0, theta.size)])
        self.momentum: Vector = np.zeros_like(theta)
        self._optimizer = optimizer

    def apply(
        self, payload: kernels.Payload, index: int, fragment: int = 0, amendment: Amendment | None = None
    ) -> None:
        """Take outer step `index` of the run, counted from 0, of one fragment, with an average: a whole payload of the
        fragment that is known to be one (`BlockCodec.checked`). `amendment` is the one that the log has in force."""
        coefficient, every, part = self.coefficient(amendment), self._optimizer.momentum_every, self.fragments[fragment]
        rate, theta, momentum = self.learning_rate(index, amendment) / every, self.theta[part], self.momentum[part]
        if (index + 1) % every == 0:
            kernels.outer_step(payload, theta, momentum, rate, coefficient)
            return
        kernels.gradient_step(payload, theta, rate)
        if coefficient:  # with which all that is here is multiplied in the last one
            kernels.accumulate(payload, 1 / coefficient, momentum)

    def learning_rate(self, index: int, amendment: Amendment | None = None) -> float:
        """Return the learning rate of outer step `index`, with this amendment in force. Bit-identical on every
        machine."""
        peak, schedule = (amendment or self._optimizer).learning_rate, self._optimizer.schedule
        return peak if schedule is None else peak * learning_rate_factor(schedule, index + 1)

    def coefficient(self, amendment: Amendment | None = None) -> float:
        """Return mu, with this amendment in force. A delayed one stays as it is: what was averaged in a period is
        scaled by it."""
        return (self._optimizer if self._optimizer.momentum_every > 1 else amendment or self._optimizer).momentum

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


class LocalState:
    """The outer state of this machine, which the log drives: all that following a run takes.

    Implements `peers.values.workload.ReplicatedState`. Arithmetic runs in threads, so that the event loop never waits.
    """

    def __init__(self, theta: Vector, config: RunConfig, fragments: Sequence[slice] | None = None) -> None:
        """`theta` is used in place; momentum begins as zeros. `fragments` are the layout's; by default there is one."""
        self.outer = OuterState(theta, config.outer_optimizer, fragments)
        format = kernels.FORMATS[config.codec.kind]
        self.fragments = [BlockCodec(format, part.stop - part.start) for part in self.outer.fragments]

    async def apply(
        self, payload: Blocks, index: int, fragment: int = 0, *, amendment: Amendment | None = None
    ) -> None:
        """Raises: BadBlocksError, and changes nothing."""
        await asyncio.to_thread(
            lambda: self.outer.apply(self.fragments[fragment].checked(payload), index, fragment, amendment)
        )

    async def state_digest(self) -> bytes:
        return await asyncio.to_thread(self.outer.digest)

    @property
    def state_size(self) -> int:
        return STATE_BYTES * self.outer.theta.size

    async def copy_state(self, out: memoryview) -> None:
        await asyncio.to_thread(self.outer.copy_to, out)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Raises: SnapshotError, and changes nothing."""
        await asyncio.to_thread(self._restore, state, state_digest)

    def _restore(self, state: Blocks, state_digest: bytes) -> None:
        if len(state) != self.state_size or digest_of_state([state]) != state_digest:
            raise SnapshotError("it is not the state with that digest")
        momentum, theta = np.frombuffer(state, np.float32).reshape(2, -1)
        for name, vector in (("momentum", momentum), ("theta", theta)):
            if not all(np.isfinite(vector[start : start + PIECE]).all() for start in range(0, vector.size, PIECE)):
                raise SnapshotError(f"{name} holds NaN or infinity")
        self.outer.replace(theta, momentum)
