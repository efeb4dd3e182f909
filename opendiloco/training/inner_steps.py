"""The inner loop of one outer step: DiLoCo's Algorithm 1, lines 5 to 8 (arXiv 2311.08105).

inner_steps = replica.inner_steps(theta, index, lease, steps)
for step in inner_steps:
    print(step.number, step.loss)
tokens = inner_steps.trained.tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from opendiloco.config.run_config import TrainingSection
from opendiloco.data.sample_order import Batches, SampleOrder, numbers_of
from opendiloco.errors import WorkerError
from peers.values.leases import SampleRange, prefix
from peers.values.workload import Trained


class StepTaken(NamedTuple):
    """A batch's mean loss, and its gradient's norm before clipping. If either is not finite, nothing has changed."""

    loss: float
    gradient_norm: float
    is_last: bool
    """Whether a worker wants all to stop after this step."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TakeStep(Protocol):
    """Takes one inner step."""

    def __call__(self, batch: NDArray[np.int64], step: int, tokens: int) -> StepTaken:
        """Train on a batch of shape (windows, window_length): step `step` of the run, after which the run has `tokens`
        tokens."""


class InnerStep(NamedTuple):
    """An inner step that changed the weights. `number` counts from 1; `samples` are those trained up to here."""

    number: int
    loss: float
    gradient_norm: float
    samples: int


@dataclass(frozen=True)
class ReplicaTrained(Trained):
    """What came of an inner loop. `loss` is the mean over its inner steps, in nats per token.

    `skipped`: how many of the `inner_steps` changed nothing, since their loss or gradient was not finite.
    `gradient_norm` is the mean over the others, before clipping; `waited_seconds` is how long they waited for data.
    """

    inner_steps: int
    gradient_norm: float
    skipped: int
    waited_seconds: float


class InnerSteps:
    """Takes an inner step for each turn of a loop over it; after that, `trained` says what came of them."""

    def __init__(
        self,
        take: TakeStep,
        samples: SampleOrder,
        training: TrainingSection,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        tokens: int,
    ) -> None:
        """See `ModelReplica.inner_steps`."""
        self._take = take
        self._training = training
        self._first_step = index * training.inner_steps
        self._tokens = tokens
        self._lease = lease
        numbers = numbers_of(lease)[: steps * training.batch_size]
        samples.expect(numbers)
        self._batches = Batches(samples, numbers, training.batch_size)
        self.planned = math.ceil(len(numbers) / training.batch_size)
        self.planned_tokens = len(numbers) * training.sequence_length
        self.planned_samples = prefix(lease, len(numbers))
        """How many inner steps there will be, how many tokens in them, and which samples, if nobody wants to stop."""
        self._taken: list[StepTaken] = []
        self._samples_done = 0

    def __iter__(self) -> Iterator[InnerStep]:
        """Yield each inner step that changed the weights. Raises: see `every`."""
        for taken in self.every():
            if taken.is_finite:
                yield self.latest

    def every(self) -> Iterator[StepTaken]:
        """Yield each inner step, also those that changed nothing.

        The last batch may be smaller, so that a short lease is trained whole; a lease longer than `steps` batches is
        trained up to there. Raises: WorkerError when the losses or gradients of more than half of the inner steps are
        not finite.
        """
        for batch in self._batches:
            self._samples_done += len(batch)
            step = self._first_step + len(self._taken)
            taken = self._take(batch, step, self._tokens + self._tokens_done)
            self._taken.append(taken)
            if not taken.is_finite and 2 * self._skipped > self.planned:
                raise _divergence(step, taken, self._skipped)
            yield taken
            if taken.is_last:
                break

    @property
    def latest(self) -> InnerStep:
        """Return the last inner step that was taken."""
        taken = self._taken[-1]
        return InnerStep(len(self._taken), taken.loss, taken.gradient_norm, self._samples_done)

    @property
    def trained(self) -> ReplicaTrained:
        """Return what came of the inner steps so far."""
        good = [taken for taken in self._taken if taken.is_finite]
        return ReplicaTrained(
            samples=prefix(self._lease, self._samples_done),
            tokens=self._tokens_done,
            loss=_mean([taken.loss for taken in good]),
            inner_steps=len(self._taken),
            gradient_norm=_mean([taken.gradient_norm for taken in good]),
            skipped=self._skipped,
            waited_seconds=self._batches.waited,
        )

    @property
    def _tokens_done(self) -> int:
        return self._samples_done * self._training.sequence_length

    @property
    def _skipped(self) -> int:
        return sum(not taken.is_finite for taken in self._taken)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _divergence(step: int, taken: StepTaken, skipped: int) -> WorkerError:
    return WorkerError(
        f"inner step {step}: the loss is {taken.loss}, its gradient's norm {taken.gradient_norm}; "
        f"{skipped} inner steps, more than half of this training, were skipped for that.",
        "Training diverged: lower inner_optimizer.learning_rate or gradient_clip in a new run.",
    )
