"""A model replica and its inner loop: the k-th worker of DiLoCo's Algorithm 1, lines 3 to 9 (arXiv 2311.08105).

    inner_steps = replica.inner_steps(theta, index, lease, steps)
    for step in inner_steps:
        print(step.number, step.loss)
    tokens = inner_steps.trained.tokens

The worker process and the one-process reference both train through this module, so that they do the same arithmetic.
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
    """The results of one inner step: the batch's mean loss in nats per token, and the gradient's norm before clipping.
    If the loss or the norm is not finite, the step has changed nothing.

    `number` counts from 1; `samples` is the number of samples trained up to and including this step.
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
    """The results of an inner loop. `loss` is the mean over the inner steps that were not skipped, in nats per token.

    `skipped` of the `inner_steps` changed nothing, because their loss or gradient was not finite. `gradient_norm` is
    the mean over the others, before clipping. `waited_seconds` is the time that the loop waited for data.
    """

    inner_steps: int
    gradient_norm: float
    skipped: int
    waited_seconds: float


class InnerSteps:
    """An iterable over a lease's inner steps: each step is taken when the caller asks for the next item. The property
    `trained` has the results of the steps taken."""

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
        """Create the iterable. `take` trains on one batch; `index`, `lease`, `steps` and `tokens` are as in
        `ModelReplica.inner_steps`.

        `take(batch, step, tokens)` trains on a batch of shape (windows, window_length). `step` is the run's number of
        the inner step, and `tokens` the number of tokens that the run has trained after it. It returns the loss, the
        gradient's norm, and whether a worker wants all to stop.
        """
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
        """The planned number of inner steps, the number of tokens in them, and their samples, if no worker wants to
        stop."""
        self._taken: list[InnerStep] = []
        self._samples_done = 0

    def __iter__(self) -> Iterator[InnerStep]:
        """Return an iterator that takes the inner steps and yields those that changed the weights. Raises: WorkerError
        when training diverges."""
        return (taken for taken in self.every() if taken.is_finite)

    def every(self) -> Iterator[InnerStep]:
        """Take the inner steps and yield each, including those that changed nothing.

        The last batch may be smaller, so that a short lease is trained whole. A lease longer than `steps` batches is
        trained only that far.

        Raises: WorkerError when the losses or gradients of more than half of the inner steps are not finite.
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
                    "more than half of this training, were skipped for this reason.",
                    "Training diverged: lower inner_optimizer.learning_rate or gradient_clip in a new run.",
                )
            yield taken
            if is_last:
                break

    @property
    def trained(self) -> ReplicaTrained:
        """The results of the inner steps taken so far."""
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
"""Free memory that a copy of all moments requires, as a multiple of its size, because the peer process allocates,
too."""
LONG_AGO = 64
"""Age of kept moments, in outer steps, beyond which the learning rate is warmed up again. Older moments belong to a
very different theta."""


class LossScale:
    """The factor by which the loss is multiplied in fp16 training, so that small gradients do not become zero.

    When gradients overflow, it is halved and the batch is computed again. It is doubled after `STEADY` inner steps
    without an overflow.
    """

    STEADY = 200
    ATTEMPTS = 4
    """Number of times that a batch is computed again. If it still overflows, it is skipped like any batch whose
    gradient is not finite, because a smaller factor may not help."""
    LARGEST = 2.0**24

    def __init__(self, factor: float = 2.0**16) -> None:
        """Create the scale with its first `factor`. All factors are powers of two, so that dividing gradients by a
        factor rounds nothing."""
        self.factor = factor
        self._steps = 0  # number of inner steps since the factor changed
        self._attempts = 0  # number of times that the current batch has overflowed

    def overflows(self, loss: float, norm: float) -> bool:
        """Record a batch's loss and its gradient's norm. Return True if the factor was halved and the caller must
        compute the batch again."""
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
    """A model with its inner optimizer. The optimizer keeps its state when theta replaces the weights at each outer
    step.

    The workers of one machine together have one replica. Each has a shard of the `model` (see `shard_model` in team.py)
    and trains on its piece of a batch, at most `micro_batch` windows at once (None: the whole piece). All make the same
    calls in the same order, and get the same loss at the same inner step.
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
        """Create the replica and its inner optimizer. If `reduces_once`, workers sum their gradients only after the
        last micro-batch of a batch. By default, `layout` is made from the model and the run's settings.

        Raises: MachineError when the optimizer's state cannot be kept as `optimizer_state` asks.
        """
        self.model = model
        self.layout = layout_of(model, config.streaming) if layout is None else layout
        self.micro_batch = micro_batch
        self.uncompiled_micro_batch: int | None = None  # most windows in an uncompiled micro-batch; None: micro_batch
        self.attention: str | None = None  # name of the attention used in training; None: the model's own
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
        self._warmed_up: int | None = None  # number of inner steps of the learning rate's rewarmup so far
        self._kept_at: int | None = None  # the run's number of outer steps when the loaded moments were written

    @property
    def window_length(self) -> int:
        """The number of tokens in a window, one more than the number that the model predicts in it."""
        return self._config.training.sequence_length + 1

    @property
    def codec(self) -> CodecSection:
        return self._config.codec

    @property
    def optimizer_state(self) -> OptimizerState:
        """The place where the inner optimizer's state is kept between two steps: "device", "host" or "8bit"."""
        return kept_state(self._optimizer)

    @property
    def learning_rate(self) -> float:
        """The learning rate that the last inner step used for the optimizer's first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def load(self, theta: Vector) -> None:
        self._shards.load(theta, self._parameters())

    @contextmanager
    def showing(self, theta: Vector) -> Iterator[Any]:
        """Load theta into the model for the `with` block. At its end restore the trained weights, if the next training
        continues from them.

        The copy of the present weights takes the memory of the gradients, which are no longer needed.
        """
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
        """Write this worker's part of the weights (all, or one fragment's) to the vector `flat`. Workers outside the
        first replica write nothing."""
        if self._team.is_in_first_replica:
            self._shards_of(fragment).store(self._parameters(), flat)

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        """Replace this worker's part of a fragment's weights w by alpha * w + (1 - alpha) * theta."""
        self._shards_of(fragment).merge(theta, self._parameters(), alpha)

    def keep_moments(self, path: Path, run: str, index: int) -> Callable[[], None]:
        """Return a function that writes this worker's part of the inner optimizer's state, as of this call, to a file
        while training continues. Workers outside the first replica write nothing. `index` is the number of the run's
        outer steps so far.

        Raises: SnapshotError when there is no state yet, or a file cannot hold its form; OSError.
        """
        metadata = self._kept_by(run) | {"index": str(index), "warmed_up": str(self._warmed_up or 0)}
        has_room = self._team.smallest(available_memory() >= ROOM_OF_COPY * MOMENTS_BYTES * self.layout.size)
        if not self._team.is_in_first_replica:
            return lambda: None
        return write_state(path, self._optimizer, self._parameters(), self._shards, metadata, bool(has_room))

    def recall_moments(self, path: Path, run: str) -> None:
        """Load the inner optimizer's state from a file that `keep_moments` wrote. All workers must call this together.

        If another worker cannot read the file, this worker begins with fresh moments, too, because moments of different
        times do not fit together.

        Raises: SnapshotError, without a change, when the file does not fit; OSError.
        """
        has_read = False
        try:
            metadata = read_state(path, self._optimizer, self._parameters(), self._shards, self._kept_by(run))
            has_read = True
        finally:
            all_have_read = self._team.smallest(has_read)
        if all_have_read:
            self._warmed_up, self._kept_at = int(metadata["warmed_up"]), int(metadata["index"])
        else:
            self._optimizer.zero_grad(set_to_none=True)
            self._optimizer.state.clear()
            self._warmed_up = self._kept_at = None

    def _kept_by(self, run: str) -> dict[str, str]:
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
        """Load theta, and return an iterator that takes at most `steps` inner steps of outer step `index`, each on the
        lease's next batch. If theta is None, the weights stay unchanged.

        `tokens` is the number that all peers have trained before this outer step, for schedules in tokens.
        `stop_wanted` is called in each inner step before the weights change; all workers stop after the first inner
        step in which it is true on one of them. `overrides` apply in this outer step.
        """
        if self._warmed_up is None:  # outer step 0 has the schedule's own warmup and needs no rewarmup
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
        """Load theta, take at most `steps` inner steps of outer step `index` on the lease, and return their results.
        Raises: WorkerError when training diverges."""
        inner_steps = self.inner_steps(theta, index, lease, steps, tokens)
        for _ in inner_steps:
            pass
        return inner_steps.trained

    def _inner_step(
        self, stop_wanted: Callable[[], bool], overrides: Overrides, batch: NDArray[np.int64], step: int, tokens: int
    ) -> tuple[float, float, bool]:
        """Train on a batch as inner step `step` of the run, counted from 0. The run has trained `tokens` tokens after
        this step. Return the loss, the gradient's norm, and True if a worker wants to stop."""
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
            # All replicas have the same gradients, so the norm is summed over the first replica's workers alone.
            own_square = own_norm.double().square() if self._team.is_in_first_replica else 0.0
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
        torch.nn.utils.clip_grads_with_norm_(parameters, self._config.training.gradient_clip, total_norm.float())

    def loss(self, windows: torch.Tensor, slope: float | None = None) -> torch.Tensor:
        """Return the mean training loss, in nats per token. `windows` are token ids of shape (batch, window_length).
        `slope` is the number by which the caller multiplies the loss before the backward pass (see `window_loss`)."""
        z_loss, end = self._config.training.z_loss, self._samples.document_end
        router_loss = router_loss_weight(self.model)
        with self.precision(), packing_known(end is not None):
            return window_loss(self.model, windows, end, z_loss, router_loss, slope, self.compiled_loss)

    def add_gradient(self, batch: NDArray[np.int64]) -> torch.Tensor:
        """Add the gradient of this worker's piece of a batch to the parameters' gradients. Return the part of the
        batch's mean loss that this piece contributes, as a tensor on the device.

        FSDP2 averages the workers' gradients, so each worker multiplies its own by their number. This function does not
        wait for the device, unless the model does, so that the device is always busy.
        """
        end = self._samples.document_end
        predicted, tried_sizes = predicted_tokens(batch, end), self.tried_sizes
        losses = []
        # This outer context, although disabled, makes autocast keep its casts of the weights from one micro-batch to
        # the next.
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
        """Yield each micro-batch of this worker's piece of a batch, with True for the last one and False for the
        others.

        All workers have the same number of parts, because each forward pass is a collective. Some parts may be empty;
        the caller then trains on other windows, which do not count.

        A batch smaller than the run's ends with a number of windows that was not tried. Those are computed uncompiled,
        so their parts are smaller.
        """
        count = len(batch)
        own, largest = batch[self._team.piece(count)], self._team.largest_piece(count)
        size = self.micro_batch or largest
        rest = size if count == self._config.training.batch_size else self.uncompiled_micro_batch or size
        filled = count // self._team.size // size * size  # number of each worker's windows in full micro-batches
        starts = [*range(0, filled, size), *range(filled, largest, rest)]
        for start, end in pairwise([*starts, largest]):
            yield own[start:end], end == largest

    @property
    def tried_sizes(self) -> tuple[int, ...]:
        """The sizes, in windows, of a whole batch's first micro-batch and, if the batch has several, of its last.
        Compiled blocks and attention are tried with these sizes. All workers have the same number of sizes."""
        batch_size = self._config.training.batch_size
        own, largest = self._team.piece(batch_size), self._team.largest_piece(batch_size)
        size = self.micro_batch or largest
        last_start = (largest - 1) // size * size
        first, last = (max(1, min(size, own.stop - own.start - start)) for start in (0, last_start))
        return (first, last) if last_start else (first,)

    @contextmanager
    def _as_tried(self, is_tried: bool) -> Iterator[None]:
        """Let the model compute inside the `with` block with compiled blocks and the chosen attention if `is_tried`: a
        trial before training had as many windows as the next micro-batch. Otherwise let it compute uncompiled.

        The last batch of a lease may have any number of windows, and nothing should be compiled in the middle of
        training.
        """
        if is_tried:
            with attending_by(self.model, self.attention):
                yield
        else:
            with torch.compiler.set_stance("force_eager"):
                yield

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the model computes in the run's precision.

        FSDP2 sets the precision of a sharded model; autocast sets it in all other cases, on the CPU as on a GPU.
        """
        if self._team.mesh is None and self._config.training.precision == "bf16":
            return torch.autocast(self._team.device.type, self._team.half)
        return nullcontext()

    def _shards_of(self, fragment: int | None) -> Shards:
        return self._shards if fragment is None else self._shards.of(self.layout.fragment(fragment))

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the trained parameters by name, sharded as in the optimizer."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps some weights gathered after a forward pass without a backward pass
        return trainable(self.model)

    def _rewarmup(self) -> float:
        """Count an inner step, and return the factor by which its learning rate is multiplied. The factor is below 1 in
        the first steps with fresh moments."""
        steps = self._config.inner_optimizer.rewarmup_steps
        self._warmed_up = min(steps, (self._warmed_up or 0) + 1)
        return self._warmed_up / steps if steps else 1.0


def _on_device(windows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of windows on a device. A copy to a GPU goes through pinned memory, so that the host does not wait
    for it."""
    if device.type != "cuda":
        return windows.to(device)
    return windows.pin_memory().to(device, non_blocking=True)
