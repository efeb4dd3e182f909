"""The inner optimizer's state as the swarm sees it: a companion of the run's state, which a joiner may copy."""

from __future__ import annotations

import asyncio

from opendiloco.config.optimizers import AdamWSection
from opendiloco.config.run_config import RunConfig
from opendiloco.inner.moments import check_moments, moments_size
from opendiloco.shared_memory import available_memory
from opendiloco.workers.moments import WorkersMoments
from peers.values.workload import SnapshotError


class InnerState:
    """Implements `peers.values.workload.CompanionState`. The state itself is in the workers, on their devices."""

    def __init__(self, moments: WorkersMoments, values: int, config: RunConfig) -> None:
        """`values` is the length of theta."""
        assert isinstance(config.inner_optimizer, AdamWSection)
        self._moments = moments
        self._optimizer = config.inner_optimizer
        self._gradient_clip = config.training.gradient_clip
        self.size = moments_size(values)

    async def copy(self, out: memoryview) -> None:
        """Raises: SnapshotError while the moments are not yet warm; OSError without room."""
        self._check_room()
        await self._moments.store(out)

    async def restore(self, companion: memoryview) -> None:
        """The worker needs no re-warmup then. Raises: SnapshotError, and changes nothing, when these are not moments,
        or the worker's own are worth as much; OSError without room."""
        if len(companion) != self.size:
            raise SnapshotError(f"it has {len(companion)} bytes, not {self.size}")
        await asyncio.to_thread(check_moments, companion, self._optimizer, self._gradient_clip)
        self._check_room()
        await self._moments.load(companion)

    def _check_room(self) -> None:
        """On its way to or from the worker there are two of it."""
        if self.size > available_memory():
            raise SnapshotError(f"{self.size >> 20} MiB of memory for it cannot be had")
