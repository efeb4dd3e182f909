"""One replica's inner loop: the k-th worker of DiLoCo's Algorithm 1, lines 3 to 9 (arXiv 2311.08105).

The worker process and the one-process reference both train through this class, so they do the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opendiloco.batches import Batches
from opendiloco.config import RunConfig
from opendiloco.errors import WorkerError
from opendiloco.learning_rate import learning_rate_factor
from opendiloco.model import layout_of, load_weights, store_weights
from opendiloco.moments import Moments
from opendiloco.optimizer_state import load_moments, step_count, store_moments
from opendiloco.optimizers import build_inner_optimizer
from opendiloco.packing import window_loss
from opendiloco.sample_order import SampleOrder
from opendiloco.shared_memory import Vector
from peers.leases import SampleRange, prefix
from peers.workload import SnapshotError, Trained

InnerStepDone = Callable[[int, float, int], bool]
"""Called after each inner step with (steps done, its loss, samples done); returns whether to go on."""


def go_on(inner_step: int, loss: float, samples: int) -> bool:
    return True


class Replica:
    """A model with its inner optimizer's state, which persists while theta replaces the weights at each outer step."""

    def __init__(self, config: RunConfig, model: Any, samples: SampleOrder, device: torch.device) -> None:
        self.model = model.to(device)
        self.layout = layout_of(self.model)
        self._config = config
        self._samples = samples
        self._device = device
        self._optimizer = build_inner_optimizer(self.model, config.inner_optimizer)
        self._warmed_up: int | None = None  # inner steps of `rewarmup_steps`

    def load(self, theta: Vector) -> None:
        load_weights(self.model, self.layout, theta)

    def store(self, flat: Vector) -> None:
        store_weights(self.model, self.layout, flat)

    def store_moments(self, out: Moments) -> None:
        """The inner optimizer's state, as of the last inner step. Raises: SnapshotError while it is worth little."""
        if step_count(self._optimizer) == 0 or self._warmed_up != self._config.inner_optimizer.rewarmup_steps:
            raise SnapshotError("its inner optimizer has only just begun")
        store_moments(self._optimizer, self.model, self.layout, out)

    def load_moments(self, moments: Moments) -> None:
        """Go on with another replica's. There is no more re-warmup. Raises: SnapshotError when ours are as good."""
        if step_count(self._optimizer) >= moments.steps[0]:
            raise SnapshotError(f"its inner optimizer has made {moments.steps[0]} steps; ours as many")
        load_moments(self._optimizer, self.model, self.layout, moments)
        self._warmed_up = self._config.inner_optimizer.rewarmup_steps

    def train(
        self,
        theta: Vector,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        after_step: InnerStepDone = go_on,
        tokens: int = 0,
    ) -> Trained:
        """From theta, at most `steps` inner steps of outer step `index`, each on the lease's next batch.

        `tokens` is what all peers have trained before this outer step, for schedules that go by it.

        The last batch may be smaller, so that a short lease is trained whole; a lease longer than `steps` batches is
        trained up to there. `loss` is the mean over the inner steps, in nats per token.

        Raises: WorkerError when a loss or gradient is not finite.
        """
        if self._warmed_up is None:  # from the run's beginning its schedule has a warmup of its own
            self._warmed_up = 0 if index else self._config.inner_optimizer.rewarmup_steps
        self.load(theta)
        self.model.train()
        batch_size = self._config.training.batch_size
        losses: list[float] = []
        done = 0
        for batch in Batches(self._samples, _numbers(lease)[: steps * batch_size], batch_size):
            done += len(batch)
            step = index * self._config.training.inner_steps + len(losses)
            losses.append(self._inner_step(batch, step, tokens + done * self._config.training.sequence_length))
            if not after_step(len(losses), losses[-1], done):
                break
        mean_loss = sum(losses) / len(losses) if losses else 0.0
        return Trained(prefix(lease, done), done * self._config.training.sequence_length, mean_loss)

    def _inner_step(self, batch: NDArray[np.int64], step: int, tokens: int) -> float:
        """Inner step `step` of the run, counted from 0, after which `tokens` are trained."""
        schedule = self._config.schedule
        done = tokens if schedule.unit == "tokens" else step + 1
        factor = learning_rate_factor(schedule, done) * self._rewarmup()
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self._optimizer.zero_grad(set_to_none=True)
        windows = torch.from_numpy(batch).to(self._device)
        loss = window_loss(self.model, windows, self._samples.document_end, self._config.training.z_loss)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.training.gradient_clip)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            raise WorkerError(
                f"inner step {step}: the loss is {value}, its gradient's norm {norm.item()}.",
                "Training diverged: lower inner_optimizer.learning_rate or gradient_clip in a new run.",
            )
        self._optimizer.step()
        return value

    def _rewarmup(self) -> float:
        """Who joins in the middle has fresh moments: the first steps are smaller, until they mean something."""
        steps = self._config.inner_optimizer.rewarmup_steps
        self._warmed_up = min(steps, (self._warmed_up or 0) + 1)
        return self._warmed_up / steps if steps else 1.0


def _numbers(lease: Iterable[SampleRange]) -> NDArray[np.int64]:
    parts = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in lease]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
