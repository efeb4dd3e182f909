"""A training side without a model: theta is a vector, and training moves it by noise drawn from the samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.kernels import INT8
from opendiloco.outer.codec import BlockCodec
from opendiloco.outer.state import OuterState
from peers.transfer.state_chunks import digest_of_state
from peers.values.leases import sample_count
from peers.values.workload import (
    Blocks,
    InnerLoop,
    OnCaptured,
    Progress,
    Reduction,
    SnapshotError,
    Trained,
    captures_nothing,
)

VALUES = 5000


class VectorWorkload:
    """Real kernels, a real outer step, and inner steps that take no time unless `may_train` is cleared."""

    def __init__(self, values: int = VALUES) -> None:
        self.values = values
        self.codec = BlockCodec(INT8, values)
        self.fragments = (self.codec,)
        self.state_size = 8 * values
        theta = np.random.default_rng(0).standard_normal(values).astype(np.float32)
        self.state = OuterState(theta, OuterOptimizerSection(learning_rate=0.7, momentum=0.6))
        self.base = self.local = theta.copy()
        self.may_train = asyncio.Event()
        self.may_train.set()

    async def train(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        await self.may_train.wait()
        random = np.random.default_rng([work.index, work.samples[0].start])
        noise = random.standard_normal(self.values).astype(np.float32)
        self.base = self.state.theta.copy()
        self.local = self.base + noise / np.float32(100)
        on_progress(Progress(work.steps, 1.0, 1.0))
        return Trained(work.samples, 8 * sample_count(work.samples), 1.0)

    async def contribution(self, fragment: int = 0) -> bytes:
        payload = self.codec.empty_payload()
        self.codec.encode_difference(self.base, self.local, payload)
        return bytes(payload)

    async def reduce(self, reduction: Reduction) -> Blocks:
        return self.codec.average(reduction.contributions, reduction.first_block, None, reduction.tokens)

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0) -> float:
        return self.codec.squared_norm(blocks, first_block)

    async def apply(self, payload: Blocks, index: int, fragment: int = 0, keeps_work: bool = False) -> None:
        self.state.apply(self.codec.checked(payload), index)

    async def unchanged(self, index: int, fragment: int) -> None:
        """Nobody waits for it."""

    async def state_digest(self) -> bytes:
        return self.state.digest()

    async def copy_state(self, out: memoryview) -> None:
        momentum, theta = self.state.vectors
        out[:] = bytes(momentum) + bytes(theta)

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        if digest_of_state([state]) != state_digest:
            raise SnapshotError("not that state")
        momentum, theta = np.frombuffer(state, np.float32).reshape(2, -1)
        self.state.replace(theta, momentum)
