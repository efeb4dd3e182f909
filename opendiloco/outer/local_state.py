"""The run's state on this machine, which the log drives: all that following a run takes. No worker, and no torch."""

from __future__ import annotations

import asyncio

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.outer.codec import BlockCodec
from opendiloco.outer.state import OuterState
from opendiloco.shared_memory import Vector
from peers.transfer.state_chunks import digest_of_state
from peers.values.workload import Blocks, SnapshotError

PIECE = 1 << 20  # values checked at once, so that it takes no memory to speak of


class LocalState:
    """Implements `peers.values.workload.ReplicatedState`. Arithmetic runs in
    threads, so that the event loop never waits."""

    def __init__(self, theta: Vector, config: RunConfig) -> None:
        """`theta` is used in place; momentum begins as zeros."""
        self._state = OuterState(theta, config.outer_optimizer)
        self._codec = BlockCodec(kernels.FORMATS[config.codec.kind], theta.size)

    @property
    def parameter_count(self) -> int:
        return self._state.theta.size

    @property
    def block_count(self) -> int:
        return self._codec.block_count

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return self._codec.byte_range(first_block, last_block)

    async def apply(self, payload: Blocks, index: int) -> None:
        """Raises: BadBlocksError, and changes nothing."""
        await asyncio.to_thread(self._apply, payload, index)

    async def state_digest(self) -> bytes:
        return await asyncio.to_thread(self._state.digest)

    @property
    def state_size(self) -> int:
        return 8 * self.parameter_count

    async def copy_state(self, out: memoryview) -> None:
        await asyncio.to_thread(self._state.copy_to, out)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Raises: SnapshotError, and changes nothing."""
        await asyncio.to_thread(self._restore, state, state_digest)

    def _apply(self, payload: Blocks, index: int) -> None:
        self._state.apply(self._codec.checked(payload), index)

    def _restore(self, state: Blocks, state_digest: bytes) -> None:
        if len(state) != self.state_size or digest_of_state([state]) != state_digest:
            raise SnapshotError("it is not the state with that digest")
        momentum, theta = np.frombuffer(state, np.float32).reshape(2, -1)
        for name, vector in (("momentum", momentum), ("theta", theta)):
            if not all(np.isfinite(vector[start : start + PIECE]).all() for start in range(0, vector.size, PIECE)):
                raise SnapshotError(f"{name} holds NaN or infinity")
        self._state.replace(theta, momentum)
