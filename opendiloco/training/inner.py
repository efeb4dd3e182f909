"""One replica: the k-th worker of DiLoCo's Algorithm 1, lines 3 to 9 (arXiv 2311.08105), and its inner loop.

inner_steps = replica.inner_steps(theta, index, lease, steps)
for step in inner_steps:
    print(step.number, step.loss)
tokens = inner_steps.trained.tokens

The worker process and the one-process reference both train through this module, so they do the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule

from opendiloco.config.overrides import NO_OVERRIDES, Overrides
from opendiloco.config.run_config import CodecSection, RunConfig, TrainingSection
from opendiloco.data.sample_order import Batches, SampleOrder, numbers_of
from opendiloco.errors import WorkerError
from opendiloco.host_memory import MOMENTS_BYTES
from opendiloco.model.layout import Layout
from opendiloco.model.loss import CompiledLoss, packing_known, predicted_tokens, router_loss_weight, window_loss
from opendiloco.model.parameters import STAGED_VALUES, Shards, layout_of, local_part, trainable
from opendiloco.quantities import OptimizerState
from opendiloco.shared_memory import Vector, available_memory
from opendiloco.training.optimizers import (
    build_inner_optimizer,
    kept_state,
    read_state,
    step_if,
    steps_without_waiting,
    write_state,
)
from opendiloco.training.outer import inner_learning_rate_factor
from opendiloco.training.team import Team, read_later
from opendiloco.training.trials import attending_by, compiled_blocks
from peers.values.leases import SampleRange, prefix
from peers.values.workload import Trained


# Inner steps ----------------------------------------------------------------------------------------------------------
class InnerStep(NamedTuple):
    """A batch's mean loss, and its gradient's norm before clipping. If either is not finite, nothing has changed.

    `number` counts from 1; `samples` are those trained up to here.
    """

    number: int
    loss: float
    gradient_norm: float
    samples: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


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
        take: Callable[[NDArray[np.int64], int, int], tuple[float, float, bool]],
        samples: SampleOrder,
        training: TrainingSection,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        tokens: int,
    ) -> None:
        """`take` trains on a batch of shape (windows, window_length): inner step so-and-so of the run, after which the
        run has so many tokens. It returns the loss, the gradient's norm, and whether a worker wants all to stop. For
        all else see `ModelReplica.inner_steps`."""
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
        self._taken: list[InnerStep] = []
        self._samples_done = 0

    def __iter__(self) -> Iterator[InnerStep]:
        """Return the inner steps that change the weights, as they are taken. Raises: see `every`."""
        return (taken for taken in self.every() if taken.is_finite)

    def every(self) -> Iterator[InnerStep]:
        """Yield each inner step, also those that changed nothing.

        The last batch may be smaller, so that a short lease is trained whole; a lease longer than `steps` batches is
        trained up to there. Raises: WorkerError when the losses or gradients of more than half of the inner steps are
        not finite.
        """
        for batch in self._batches:
            self._samples_done += len(batch)
            step = self._first_step + len(self._taken)
            loss, norm, is_last = self._take(batch, step, self._tokens + self._tokens_done)
            taken = InnerStep(len(self._taken) + 1, loss, norm, self._samples_done)
            self._taken.append(taken)
            if not taken.is_finite and 2 * self._skipped > self.planned:
                raise WorkerError(
                    f"inner step {step}: the loss is {loss}, its gradient's norm {norm}; {self._skipped} inner steps, "
                    "more than half of this training, were skipped for that.",
                    "Training diverged: lower inner_optimizer.learning_rate or gradient_clip in a new run.",
                )
            yield taken
            if is_last:
                break

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


# The replica ----------------------------------------------------------------------------------------------------------
ROOM_OF_COPY = 2
"""Times the bytes of a copy of all moments, which must be free before it is made: the peer process takes some, too."""
LONG_AGO = 64
"""Outer steps. Moments that were kept before them are of quite another theta, so the first steps are smaller."""


class LossScale:
    """The factor by which the loss is multiplied where gradients are in fp16, whose smallest ones would be zero. It is
    halved where they overflow, and the batch is computed again; it is doubled after `STEADY` inner steps without."""

    STEADY = 200
    ATTEMPTS = 4
    """Times that a batch is computed again. One that overflows even then is skipped, like any whose gradient is not
    finite: no factor may help it."""
    LARGEST = 2.0**24

    def __init__(self, factor: float = 2.0**16) -> None:
        """All factors are powers of two, so that dividing by them rounds nothing."""
        self.factor = factor
        self._steps = 0  # since it changed
        self._attempts = 0  # at the present batch

    def overflows(self, loss: float, norm: float) -> bool:
        """Take in a batch's loss and its gradient's norm. Return whether it is to be computed again, with less."""
        if math.isfinite(loss) and not math.isfinite(norm):
            self._steps, self._attempts = 0, self._attempts + 1
            if self.factor > 1 and self._attempts <= self.ATTEMPTS:
                self.factor /= 2
                return True
            self._attempts = 0
            return False
        self._steps, self._attempts = self._steps + 1, 0
        if self._steps == self.STEADY:
            self.factor, self._steps = min(2 * self.factor, self.LARGEST), 0
        return False


class ModelReplica:
    """A model with its inner optimizer's state, which persists while theta replaces the weights at each outer step.

    The workers of one machine have one replica together: the `model` of each is sharded (see `shard_model` in team.py),
    and each trains on its piece of a batch, at most `micro_batch` windows at once (None: all of it). All make the same
    calls in the same order, and arrive at the same inner step with the same loss.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Any,
        samples: SampleOrder,
        team: Team | None = None,
        micro_batch: int | None = None,
        reduces_once: bool = False,
        layout: Layout | None = None,
        optimizer_state: OptimizerState = "device",
    ) -> None:
        """With `reduces_once`, workers sum their gradients after a batch's last windows only. `layout` is by default
        the run's. Raises: MachineError when the `optimizer_state` cannot be kept so."""
        self.model = model
        self.layout = layout_of(model, config.streaming) if layout is None else layout
        self.micro_batch = micro_batch
        self.uncompiled_micro_batch: int | None = None  # where fewer fit uncompiled; see enlarge_micro_batch
        self.attention: str | None = None  # to train with, if not the model's own; see document_attention
        self.compiled_loss = CompiledLoss() if compiled_blocks(model) else None
        self._config = config
        self._samples = samples
        self._team = team or Team(torch.device("cpu"))
        self.reduces_once = reduces_once and isinstance(model, FSDPModule)
        staging = torch.empty(STAGED_VALUES, pin_memory=True) if self._team.device.type == "cuda" else None
        self._shards = Shards(self.layout, self._team.shard, self._team.shards, staging)
        self._optimizer = build_inner_optimizer(self.model, config.inner_optimizer, optimizer_state)
        is_fp16 = config.training.precision == "bf16" and self._team.half == torch.float16
        self._loss_scale = LossScale() if is_fp16 else None
        self._warmed_up: int | None = None  # inner steps of `rewarmup_steps`
        self._kept_at: int | None = None  # outer steps taken when the moments that it goes on with were kept

    @property
    def window_length(self) -> int:
        """Return the tokens of a window: one more than are predicted."""
        return self._config.training.sequence_length + 1

    @property
    def codec(self) -> CodecSection:
        """Return how the run encodes what is averaged."""
        return self._config.codec

    @property
    def optimizer_state(self) -> OptimizerState:
        """Return how the inner optimizer's state is kept between two steps."""
        return kept_state(self._optimizer)

    @property
    def learning_rate(self) -> float:
        """Return that of the last inner step, for the optimizer's first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])

    def load(self, theta: Vector) -> None:
        self._shards.load(theta, self._parameters())

    @contextmanager
    def showing(self, theta: Vector) -> Iterator[Any]:
        """Have the model show theta for a while. Where training goes on from the present weights, they come back: a
        copy of them takes the memory of the gradients, which are of no use any more."""
        kept: list[torch.Tensor] = []
        if not self._config.streaming.is_plain and self._warmed_up is not None:
            self._optimizer.zero_grad(set_to_none=True)
            kept = [local_part(tensor).detach().clone() for tensor in self._parameters().values()]
        self.load(theta)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for tensor, own in zip(self._parameters().values(), kept, strict=False):
                    local_part(tensor).copy_(own)

    def store(self, flat: Vector, fragment: int | None = None) -> None:
        """Store this worker's part of the weights, or of a fragment's, unless another replica does."""
        if self._team.is_in_first_replica:
            self._shards_of(fragment).store(self._parameters(), flat)

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        """Merge theta into this worker's part of a fragment's weights, which keep a share of `alpha`; see `merge`."""
        self._shards_of(fragment).merge(theta, self._parameters(), alpha)

    def keep_moments(self, path: Path, run: str, index: int) -> Callable[[], None]:
        """Return a function that writes the inner optimizer's present state into a file, after `index` outer steps of a
        run: this worker's part of it, unless another replica does. Training may go on meanwhile.

        Raises: SnapshotError when there is none, or torch has it in a form that no file holds; OSError.
        """
        said = self._kept_by(run) | {"index": str(index), "warmed_up": str(self._warmed_up or 0)}
        has_room = self._team.smallest(available_memory() >= ROOM_OF_COPY * MOMENTS_BYTES * self.layout.size)
        if not self._team.is_in_first_replica:
            return lambda: None
        return write_state(path, self._optimizer, self._parameters(), self._shards, said, bool(has_room))

    def recall_moments(self, path: Path, run: str) -> None:
        """Go on with what such a file has. Where another worker cannot read it, this one begins anew, too: otherwise
        they would go on with moments of different times. Workers call this together.

        Raises: SnapshotError when it does not fit, and changes nothing; OSError.
        """
        has_read = False
        try:
            said = read_state(path, self._optimizer, self._parameters(), self._shards, self._kept_by(run))
            has_read = True
        finally:
            all_have_read = self._team.smallest(has_read)
        if all_have_read:
            self._warmed_up, self._kept_at = int(said["warmed_up"]), int(said["index"])
        else:
            self._optimizer.zero_grad(set_to_none=True)
            self._optimizer.state.clear()
            self._warmed_up = self._kept_at = None

    def _kept_by(self, run: str) -> dict[str, str]:
        """Return what a file of moments must say of itself."""
        return {"run": run, "optimizer": self._config.inner_optimizer.model_dump_json()}

    def inner_steps(
        self,
        theta: Vector | None,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        tokens: int = 0,
        stop_wanted: Callable[[], bool] = lambda: False,
        overrides: Overrides = NO_OVERRIDES,
    ) -> InnerSteps:
        """Load theta, and return at most `steps` inner steps of outer step `index`, each on the lease's next batch.
        Without a theta, the weights go on from where they are.

        `tokens` is what all peers have trained before this outer step, for schedules that go by it. All workers stop
        after the first inner step in which `stop_wanted` to any of them, asked before the weights change. `overrides`
        are in force in this outer step.
        """
        if self._warmed_up is None:  # from the run's beginning its schedule has a warmup of its own
            self._warmed_up = 0 if index else self._config.inner_optimizer.rewarmup_steps
        if self._kept_at is not None and index - self._kept_at > LONG_AGO:
            self._warmed_up = 0
        self._kept_at = None
        if theta is not None:
            self.load(theta)
        self.model.train()
        take = partial(self._inner_step, stop_wanted, overrides)
        return InnerSteps(take, self._samples, self._config.training, index, lease, steps, tokens)

    def train(
        self, theta: Vector, index: int, lease: tuple[SampleRange, ...], steps: int, tokens: int = 0
    ) -> ReplicaTrained:
        """Take all of these inner steps, and return what came of them. Raises: WorkerError."""
        inner_steps = self.inner_steps(theta, index, lease, steps, tokens)
        for _ in inner_steps:
            pass
        return inner_steps.trained

    def _inner_step(
        self, stop_wanted: Callable[[], bool], overrides: Overrides, batch: NDArray[np.int64], step: int, tokens: int
    ) -> tuple[float, float, bool]:
        """Take inner step `step` of the run, counted from 0, after which `tokens` are trained."""
        factor = inner_learning_rate_factor(self._config, overrides, step, tokens) * self._rewarmup()
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        waits = not steps_without_waiting(self._optimizer)
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            own_loss = self.add_gradient(batch)
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            gradients = [local_part(parameter.grad) for parameter in parameters]
            if self._loss_scale is not None:
                torch._foreach_mul_(gradients, 1 / self._loss_scale.factor)
            own_norm = torch.nn.utils.get_total_norm(gradients)
            own_square = own_norm.double().square() if self._team.is_in_first_replica else 0.0  # others have the same
            numbers = self._team.sums_on_device([own_loss, own_square, stop_wanted()])
            total_norm = numbers[1].sqrt_()
            read = read_later(numbers)
            if not waits:
                self._clip(parameters, total_norm)
                step_if(self._optimizer, numbers[:2].isfinite().all())
            loss, norm, stop = read()
            if self._loss_scale is None or not self._loss_scale.overflows(loss, norm) or stop:
                break
        if waits and math.isfinite(loss) and math.isfinite(norm):
            self._clip(parameters, total_norm)
            self._optimizer.step()
        return loss, norm, stop > 0

    def _clip(self, parameters: Sequence[torch.nn.Parameter], total_norm: torch.Tensor) -> None:
        """Clip the gradient by its norm, a number on the device."""
        torch.nn.utils.clip_grads_with_norm_(parameters, self._config.training.gradient_clip, total_norm.float())

    def loss(self, windows: torch.Tensor, slope: float | None = None) -> torch.Tensor:
        """Return the mean training loss of windows of token ids, of shape (batch, window_length). For `slope` see
        `window_loss`."""
        z_loss, end = self._config.training.z_loss, self._samples.document_end
        router_loss = router_loss_weight(self.model)
        with self.precision(), packing_known(end is not None):
            return window_loss(self.model, windows, end, z_loss, router_loss, slope, self.compiled_loss)

    def add_gradient(self, batch: NDArray[np.int64]) -> torch.Tensor:
        """Backward passes on this worker's piece of a batch; returns its part of the batch's mean loss.

        FSDP2 averages the gradients of the workers, so each has its own times their number. Nothing here waits for the
        device, so that it always has something to do, unless the model itself does.
        """
        end = self._samples.document_end
        predicted, tried_sizes = predicted_tokens(batch, end), self.tried_sizes
        losses = []
        # What autocast has cast for one part is there for the next: it forgets weights when its outermost context ends.
        with torch.autocast(self._team.device.type, enabled=False):
            for part, is_last in self._micro_batches(batch):
                if self.reduces_once:
                    self.model.set_requires_gradient_sync(is_last)
                share = predicted_tokens(part, end) / predicted if len(part) else 0.0
                read = part if len(part) else batch[:1]
                windows = _on_device(torch.from_numpy(read), self._team.device)
                with self._as_tried(len(read) in tried_sizes):
                    slope = share * self._team.size * (1.0 if self._loss_scale is None else self._loss_scale.factor)
                    loss = self.loss(windows, slope)
                    (loss * slope).backward()
                losses.append(loss.detach() * share)
        return torch.stack(losses).double().sum()

    def _micro_batches(self, batch: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Yield this worker's piece in parts, and whether each is the last. Workers have as many parts each, since each
        forward pass is a collective; some are empty. What is trained on in place of an empty one counts nothing.

        A batch that is smaller than the run's ends with windows of which no such number was tried. They are computed
        uncompiled, so there are fewer of them in a part.
        """
        count = len(batch)
        own, largest = batch[self._team.piece(count)], self._team.largest_piece(count)
        size = self.micro_batch or largest
        rest = size if count == self._config.training.batch_size else self.uncompiled_micro_batch or size
        filled = count // self._team.size // size * size  # windows of each worker in parts that all of them fill
        starts = [*range(0, filled, size), *range(filled, largest, rest)]
        for start, end in pairwise([*starts, largest]):
            yield own[start:end], end == largest

    @property
    def tried_sizes(self) -> tuple[int, ...]:
        """Return how many windows go through the model first and last of a whole batch: compiled blocks and attention
        are tried with them. Each worker has as many of these numbers."""
        batch_size = self._config.training.batch_size
        own, largest = self._team.piece(batch_size), self._team.largest_piece(batch_size)
        size = self.micro_batch or largest
        last_start = (largest - 1) // size * size
        first, last = (max(1, min(size, own.stop - own.start - start)) for start in (0, last_start))
        return (first, last) if last_start else (first,)

    @contextmanager
    def _as_tried(self, is_tried: bool) -> Iterator[None]:
        """Have windows computed as was found to work; if that was not tried with as many, then without, so that nothing
        is compiled in the midst of training. The last batch of a lease may have any number of them."""
        if is_tried:
            with attending_by(self.model, self.attention):
                yield
        else:
            with torch.compiler.set_stance("force_eager"):
                yield

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which the model computes in the run's precision.

        FSDP2 sees to it where the model is sharded; elsewhere autocast does, on the CPU as on a GPU.
        """
        if self._team.mesh is None and self._config.training.precision == "bf16":
            return torch.autocast(self._team.device.type, self._team.half)
        return nullcontext()

    def _shards_of(self, fragment: int | None) -> Shards:
        return self._shards if fragment is None else self._shards.of(self.layout.fragment(fragment))

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are trained, as the optimizer knows them."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without a backward pass FSDP2 keeps some weights whole
        return trainable(self.model)

    def _rewarmup(self) -> float:
        """Return a factor of the learning rate: a replica whose moments are fresh takes smaller steps at first."""
        steps = self._config.inner_optimizer.rewarmup_steps
        self._warmed_up = min(steps, (self._warmed_up or 0) + 1)
        return self._warmed_up / steps if steps else 1.0


def _on_device(windows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy windows to a device. To a GPU they go by pinned memory, for which nobody waits."""
    if device.type != "cuda":
        return windows.to(device)
    return windows.pin_memory().to(device, non_blocking=True)
