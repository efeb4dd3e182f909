"""A training side without a model: theta is a vector, and training moves it by noise drawn from the samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.config.overrides import Overrides
from opendiloco.kernels import E2M1, INT8, SPARSE, Payload, quantize_difference
from opendiloco.training.codec import BlockCodec
from opendiloco.training.outer import OuterState
from peers.log.header import Header
from peers.values.chunks import digest_of_state
from peers.values.leases import sample_count
from peers.values.manifest import Amendment
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
TOKENS = 8  # of a sample
TRAINING_SECONDS = 0.2
THINNER = (E2M1, SPARSE)
FRAGMENT = 2048  # values of each fragment but the last, where there are several


class VectorWorkload:
    """Real kernels, a real outer step, and inner steps that take no time unless `may_train` is cleared.

    Of several fragments, the worker waits for each one's entry before it goes on.
    """

    def __init__(self, values: int = VALUES, fragments: int = 1) -> None:
        self.values = values
        starts = [FRAGMENT * fragment for fragment in range(fragments)]
        self.parts = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], values], strict=True)]
        self.fragments = [BlockCodec(INT8, part.stop - part.start, THINNER) for part in self.parts]
        self.state_size = 8 * values
        theta = np.random.default_rng(0).standard_normal(values).astype(np.float32)
        self.state = OuterState(theta, OuterOptimizerSection(learning_rate=0.7, momentum=0.6), self.parts)
        self.base = self.local = theta.copy()
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.waits_to_train = False
        self.may_go_on = [asyncio.Event() for _ in self.parts]

    @property
    def codec(self) -> BlockCodec:
        """Of the first fragment; often there is no other."""
        return self.fragments[0]

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        self.waits_to_train = True
        await self.may_train.wait()
        self.waits_to_train = False
        random = np.random.default_rng([work.index, work.samples[0].start])
        noise = random.standard_normal(self.values).astype(np.float32)
        self.base = self.state.theta.copy()
        self.local = self.base + noise / np.float32(100)
        on_progress(Progress(work.steps, 1.0, 1.0))
        for fragment in range(len(self.fragments) - 1):
            await self.take_inner_steps()
            self.may_go_on[fragment].clear()
            await on_captured(fragment)
            await self.may_go_on[fragment].wait()
        await self.take_inner_steps()
        return Trained(work.samples, TOKENS * sample_count(work.samples), 1.0)

    async def take_inner_steps(self) -> None:
        """Those before the next fragment's offset. They take no time."""

    async def contribution(self, fragment: int = 0, format: int = 0) -> bytes:
        codec, part = self.fragments[fragment], self.parts[fragment]
        payload = Payload(codec.formats[format], codec.values)
        quantize_difference(self.base[part], self.local[part], payload)
        return bytes(payload)

    async def reduce(self, reduction: Reduction) -> Blocks:
        codec = self.fragments[reduction.fragment]
        return codec.average(
            reduction.contributions, reduction.first_block, None, reduction.tokens, formats=reduction.formats
        )

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        return self.fragments[fragment].squared_norm(blocks, first_block, format)

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        self.state.apply(self.fragments[fragment].checked(payload), index, fragment, Overrides.read(amendment))
        self.may_go_on[fragment].set()

    async def unchanged(self, index: int, fragment: int) -> None:
        self.may_go_on[fragment].set()

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


class UnhurriedWorkload(VectorWorkload):
    """Its trainings take a moment: a newcomer catches up only where entries take longer than to replay one."""

    def __init__(self, values: int = VALUES, seconds: float = TRAINING_SECONDS) -> None:
        super().__init__(values)
        self._seconds = seconds

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        trained = await super().run_inner_loop(work, on_progress, on_captured)
        await asyncio.sleep(self._seconds)
        return trained


def whole_members(header: Header) -> list[str]:
    """Return the members whose work is whole in an entry, absent from no chunk (R14)."""
    return [member.peer for member in header.roster if member.tokens == TOKENS * sample_count(member.samples)]
