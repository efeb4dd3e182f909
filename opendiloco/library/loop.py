"""A peer around the caller's own training loop. `DiLoCo` counts the loop's inner steps, and loads theta into the loop's
model at each outer step."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from opendiloco.config.overrides import Overrides, mixture_phases
from opendiloco.config.run_config import StreamingSection
from opendiloco.data.ahead import AheadTokenizer
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.data.sample_order import numbers_of
from opendiloco.errors import DataError, LoopError
from opendiloco.library.model import LoopReplica, TokenCounter, check_own_model
from opendiloco.library.ranks import Ranks
from opendiloco.library.swarm import LoopWorker, OuterStep, SwarmThread
from opendiloco.library.text import RunsText
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import trainable
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import inner_learning_rate_factor
from opendiloco.training.streaming import FragmentSchedule
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.interrupts import RememberedInterrupt
from opendiloco.workers.trackers import TrackerSpec, tracking
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, Trained

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

BEFORE_EXIT: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
"""Registers a function that Python calls at its end, while executors still run: leaving needs them, and `atexit` would
call it too late."""


MOST_DRAWS = 20
"""Most times that a batch is repeated without an inner step, as after a step that a gradient scaler has skipped."""


class BetweenSteps(NamedTuple):
    """An action on a fragment between two inner steps. If `alpha` is None, the fragment's weights are stored; otherwise
    they are set to alpha * weights + (1 - alpha) * average."""

    fragment: int
    alpha: float | None


class CyclePlan:
    """Plans the actions on fragments in one cycle, by inner step. `FragmentSchedule` computes the plan in advance,
    without training, because the caller's code takes the inner steps."""

    def __init__(self, fragments: int, streaming: StreamingSection) -> None:
        self._cycles = FragmentSchedule(self._record_store, self._record_merge, fragments, streaming)
        self._fragments = fragments
        self._overlap = streaming.overlap
        self._actions: dict[int, list[BetweenSteps]] = {}
        self._step = 0
        self.planned = 0
        self.steps_done = 0
        """Inner steps of this cycle: planned, and taken so far."""

    def begin(self, planned: int, goes_on: bool, is_last: bool) -> None:
        """Plan a cycle of `planned` inner steps. With `goes_on`, the model continues from the previous cycle's end,
        else from theta. `is_last` is True for the run's last cycle."""
        self.planned, self.steps_done = planned, 0
        self._actions, self._step = {}, 0
        nothing = np.empty(0, np.float32)
        self._cycles.begin(planned, self._steps(), self._overlap, goes_on, is_last)
        for fragment in range(self._fragments):
            self._cycles.train_up_to(fragment, nothing)
            self._cycles.store(nothing, fragment)
        self._cycles.train_to_the_end(nothing)

    @property
    def is_over(self) -> bool:
        """True if the loop has taken all inner steps of the cycle."""
        return self.steps_done >= self.planned

    def now(self) -> Sequence[BetweenSteps]:
        """Return the actions on fragments that are due between the last inner step taken and the next."""
        return self._actions.get(self.steps_done, ())

    def _steps(self) -> Iterator[None]:
        for taken in range(1, self.planned + 1):
            self._step = taken
            yield

    def _record_store(self, flat: Vector, fragment: int) -> None:
        self._actions.setdefault(self._step, []).append(BetweenSteps(fragment, None))

    def _record_merge(self, flat: Vector, fragment: int, alpha: float) -> None:
        self._actions.setdefault(self._step, []).append(BetweenSteps(fragment, alpha))


class DiLoCo:
    """A peer of a run whose inner loop is the caller's code, as a context manager: entering joins the run, exiting
    leaves it.

    `model` is any module with the run's trainable parameters (same shapes, same order). Its weights are replaced by
    theta at each outer step. They may be in half precision (see `LoopReplica`), but half precision loses updates that
    are too small, as in any such loop. `inner_optimizer` steps the model.

    Processes that share the model, by FSDP2 or DistributedDataParallel, are one peer. All of them use their `DiLoCo`
    alike and take the same inner steps. The first process joins the run, and reports the loss.

    The number of inner steps in an outer step follows from the lease, whatever text the loop trains on. The
    contribution is weighted by its trained tokens: those of `batches`, or else those that passed through the model (see
    `TokenCounter`), or those that `report` names. Tokens beyond the lease do not count; an unused rest of the lease
    goes back to the run.

    The peer takes turns with others to evaluate theta on the run's held-out text, if this machine can read that text,
    and if the model holds all of theta exactly and is called like transformers' models.

    Raises: LoopError for a model that cannot be trained this way. Entering raises: ManifestError, AdmissionError,
    IdentityFileError, InUseError, CopiedKeyError, SwarmUnreachableError, LocalNetworkError, MachineError; it then
    leaves no thread behind, also when it is interrupted. Later errors are raised by the next inner step, in all
    processes, and so is a KeyboardInterrupt that Python has lost.
    """

    run: Run

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        run: str,
        data: Sequence[str | Path] | str | Path = (),
        identity: Identity | str | Path | None = None,
        ticket: str | None = None,
        evaluates: bool = True,
        own: OwnFiles = NONE,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a peer for the run of the invite `run`. A run by invitation needs a `ticket`: its text, or a file's
        path. `data` names folders that replace the run's local sources, and `own` the local files of its model and
        tokenizer. `identity` is the peer's key or its file, which is created if missing; by default each peer has a new
        key. If `evaluates`, this peer takes turns with others to evaluate theta. `is_abandoned` returns True if
        training ended without an exit from the `with` block of this object; the peer then leaves the run by itself."""
        check_own_model(model)
        self._model = model
        self._inner_optimizer = getattr(inner_optimizer, "optimizer", inner_optimizer)  # accelerate wraps the optimizer
        if not isinstance(self._inner_optimizer, torch.optim.Optimizer):
            raise LoopError(
                f"the inner optimizer is a {type(self._inner_optimizer).__name__}, not one of torch.optim.",
                "Give the optimizer whose step() trains the model.",
            )
        stepped = {id(each) for group in self._inner_optimizer.param_groups for each in group["params"]}
        if stepped.isdisjoint(map(id, trainable(model).values())):
            raise LoopError(
                "the inner optimizer has none of the model's trainable parameters, so nothing would be trained.",
                "Create it from the parameters of this model, after the model was copied, converted or sharded.",
            )
        self._ranks = Ranks()
        folders = [Path(each) for each in ([data] if isinstance(data, str | Path) else data)]
        missing = [str(folder) for folder in folders if not folder.exists()]
        if missing and self._ranks.is_first:
            raise DataError(f"data: there is no {missing[0]!r}.", "Name folders of this machine: data=[FOLDER].")
        self._text = RunsText(folders, evaluates and self._ranks.size == 1)
        self._loss: float | None = None
        self._tokens = TokenCounter()
        self._until_leaving = ExitStack()
        self._interrupt = RememberedInterrupt()
        self._work: InnerLoop | None = None
        self._over_after: int | None = None  # the run's number of outer steps, once the run is over
        self._outer_step: OuterStep | None = None
        key = Path(identity) if isinstance(identity, str) else identity or Identity.generate()
        self._swarm = SwarmThread(Invite.parse(run), key, ticket, own, model, is_abandoned, folders)

    def __enter__(self) -> Self:
        self._until_leaving.enter_context(self._interrupt)
        self._until_leaving.callback(self._tokens.watch(self._model).remove)
        try:
            self._ranks.meet()
            self.run, layout = self._ranks.from_first(self._join)
            self._replica = LoopReplica(self._model, layout, self._ranks)
            self._cycle = CyclePlan(len(layout.fragments), self.run.config.streaming)
            self._begin_outer_step()
        except BaseException:
            with self._until_leaving:
                self._ranks.part()
                if self._swarm.is_alive():
                    self._swarm.give_up()
            raise
        if self.finished and self._ranks.is_first:
            over = "run %s is over (%d outer steps): nothing is trained; the model has its final weights"
            logger.warning(over, self.run.run_id, self.outer_step)
        self._until_leaving.callback(self._inner_optimizer.register_step_post_hook(self._after_inner_step).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *raised: object) -> None:
        try:
            if kind is None:
                self._ranks.from_first(self._swarm.leave)
            else:
                self._ranks.part()  # other processes that wait for this process get an error before the peer leaves
                if self._ranks.is_first:
                    self._swarm.leave()
        except BaseException:  # after an interrupt, leave at once, not at the round's end
            if self._ranks.is_first:
                self._swarm.give_up()
            raise
        finally:
            self._ranks.part()
            self._until_leaving.close()

    def _join(self) -> tuple[Run, Layout]:
        BEFORE_EXIT(_leave_before_exit, weakref.ref(self._swarm))
        self._swarm.start()
        joined = self._swarm.joined.result()
        return joined.run, joined.worker.layout

    def _entered(self) -> Run:
        if not hasattr(self, "run"):
            raise LoopError("DiLoCo has not joined its run.", "Use it in a with block: `with DiLoCo(…) as diloco:`.")
        return self.run

    @property
    def _worker(self) -> LoopWorker:
        """The `LoopWorker` of the first process. The other processes have none."""
        return self._swarm.joined.result().worker

    @property
    def finished(self) -> bool:
        """True if the run has taken its last outer step. The model then has the run's final weights."""
        return self._over_after is not None

    @property
    def outer_step(self) -> int:
        """The number of outer steps that the run has taken."""
        return self._over_after or 0 if self._work is None else self._work.index

    @property
    def inner_step(self) -> int:
        """The number of inner steps that the loop has taken since the last outer step."""
        return 0 if self._work is None else self._cycle.steps_done

    @property
    def lease(self) -> tuple[SampleRange, ...]:
        """The numbers of the samples that only this peer trains in the present outer step, as ranges in the run's
        sample order."""
        return () if self._work is None else self._work.samples

    @property
    def learning_rate_factor(self) -> float:
        """The factor by which the loop must multiply its inner learning rate in the next inner step, from the run's
        schedule and amendments. It is 0 when the run is over."""
        run = self._entered()
        if (work := self._work) is None:
            return 0.0
        config, steps_done = run.config, self._cycle.steps_done
        step = work.index * config.training.inner_steps + steps_done
        tokens = work.tokens + (steps_done + 1) * config.training.batch_size * config.training.sequence_length
        return inner_learning_rate_factor(config, Overrides.of(work.amendment, config), step, tokens)

    def track(self, choice: str) -> None:
        """Send the run's curves to "tensorboard:FOLDER" or "wandb:PROJECT" until this peer leaves; only the first
        process sends. Raises: ValueError, MachineError."""
        run, chosen = self._entered(), [TrackerSpec.parse(choice)]
        if self._ranks.is_first:
            peer = self._swarm.identity.peer_id
            opened = self._until_leaving.enter_context(tracking(chosen, run.run_id, peer))
            configuration = configuration_of(run, peer, self._worker.device)
            self._worker.telemetry.track_with(opened, configuration)

    def report(self, loss: torch.Tensor | float, tokens: int | None = None) -> None:
        """Record the loss of the present inner step, which is shown to other peers. `tokens` is the number of tokens
        that this process trained in that step; give it if the model's calls do not receive the token ids."""
        self._entered()
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._loss = value if math.isfinite(value) else None
        if tokens is not None:
            self._tokens.say(tokens)

    def batches(self) -> Iterator[torch.Tensor]:
        """Open the run's text, and return an iterator of its batches until the run is over: token ids of shape
        (batch_size, sequence_length + 1).

        Processes that share the model get equal shares of each batch, which the first process reads. If a batch cannot
        be divided, some windows are in two shares.

        A batch is for one inner step, and is repeated until the optimizer has taken one. Meanwhile a separate process
        tokenizes the next shard of a source with shards; it ends with this iterator, or when the loop leaves.

        Raises: DataError. The iterator raises LoopError if no step is ever taken.
        """
        run = self._entered().with_data(self._text.folders)
        ahead = AheadTokenizer(run.config)
        self._until_leaving.callback(ahead.close)  # so that leaving the run ends the tokenizing process in any case
        self._ranks.from_first(lambda: self._open_text(run, ahead))
        return self._batches(run, ahead)

    def _batches(self, run: Run, ahead: AheadTokenizer) -> Iterator[torch.Tensor]:
        with closing(ahead):
            step, draws = (-1, -1), 0
            while self._work is not None:
                self._interrupt.raise_again()
                now = self.outer_step, self.inner_step
                step, draws = now, draws + 1 if now == step else 1
                if draws > MOST_DRAWS:
                    raise LoopError(
                        f"batches() has yielded {draws - 1} batches for inner step {self.inner_step + 1} of outer step "
                        f"{self.outer_step}, but the inner optimizer has taken no step.",
                        "Each batch is for one step: call inner_optimizer.step() for each, and accumulate gradients "
                        "within a batch. If the loss is not finite, lower the learning rate or clip gradients.",
                    )
                if draws > 1 and self._ranks.from_first(self._is_void):
                    self._begin_outer_step()
                    continue
                windows = self._ranks.from_first(self._next_windows)
                is_counted = self._ranks.is_first  # the first process counts the batch, so no window counts twice
                self._tokens.say(len(windows) * run.config.training.sequence_length if is_counted else 0)
                yield self._ranks.piece(windows)

    def _is_void(self) -> bool:
        """Return True if the present outer step is void, so that its training does not count. Only the first process
        can call this method."""
        return self._outer_step is not None and self._outer_step.is_void

    def _open_text(self, run: Run, ahead: AheadTokenizer) -> None:
        self._text.open(run, self._worker, ahead.tokenize)

    def _next_windows(self) -> torch.Tensor:
        assert self._text.opened is not None
        assert self._work is not None
        samples, size = self._text.opened.samples, self.run.config.training.batch_size
        samples.mix(mixture_phases(self._work.amendments, self.run.config))
        lease, first = numbers_of(self.lease), self.inner_step * size
        samples.expect(lease)
        return torch.from_numpy(samples.read(lease[first : first + size]))

    # Outer steps ------------------------------------------------------------------------------------------------------
    # All processes call the following methods together. Only the first process has an `_outer_step` and flat vectors.

    def _begin_outer_step(self) -> None:
        """Wait for the swarm's next outer step, and evaluate theta if the swarm asks for a loss. Then load the weights
        that the step begins with, unless the loop continues from its present weights."""
        while True:
            self._work, goes_on, planned, over_after = self._ranks.from_first(self._next_outer_step)
            self._tokens.take()  # discards tokens counted before this outer step
            if not goes_on:
                self._replica.load(self._on_first(lambda: self._begin_with))
            if self._work is None:
                self._over_after = over_after
                return
            overrides = Overrides.of(self._work.amendment, self.run.config)
            is_last = self._work.index + 1 == overrides.total_outer_steps(self.run.config)
            self._cycle.begin(planned, goes_on, is_last)
            self._between_steps()
            if not self._cycle.is_over:
                return

    def _next_outer_step(self) -> tuple[InnerLoop | None, bool, int, int]:
        """Return the next outer step's work (None at the end of the run), True if the loop continues from its present
        weights, the number of inner steps, and the run's number of outer steps (0 before its end)."""
        worker, training = self._worker, self.run.config.training
        outer_step = worker.next_outer_step(lambda: self._text.evaluate(self.run, worker, self._replica))
        self._outer_step = outer_step
        if outer_step is None:
            return None, False, 0, worker.outer_steps_taken
        planned = outer_step.planned_steps(training.batch_size)
        return outer_step.work, outer_step.begin_with is None, planned, 0

    @property
    def _begin_with(self) -> Vector:
        outer_step = self._outer_step
        begin_with = outer_step.begin_with if outer_step is not None else None
        return self._worker.vectors.theta if begin_with is None else begin_with

    def _after_inner_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._interrupt.raise_again()
        if self._work is None:
            return  # the run is over, and inner steps no longer count
        tokens = self._ranks.sum(self._tokens.take())
        if self._ranks.from_first(lambda: self._is_taken(tokens)):
            self._cycle.steps_done += 1
            self._between_steps()
            if not self._cycle.is_over:
                return
        self._begin_outer_step()

    def _is_taken(self, tokens: int) -> bool:
        """Report to the swarm an inner step that trained `tokens` tokens. Return True unless the outer step is void.
        Raises: LoopError if `tokens` is 0, because the model's calls received no token ids."""
        outer_step, training = self._outer_step, self.run.config.training
        if outer_step is None or outer_step.is_void:
            return False
        if tokens <= 0:
            raise LoopError(
                f"inner step {self.inner_step + 1} of outer step {self.outer_step} has trained {tokens} tokens, by the "
                "model's calls.",
                "Call the model in training mode with token ids, as its first argument or as input_ids; or give their "
                "number: diloco.report(loss, tokens=…).",
            )
        outer_step.step_taken(tokens, self._loss, training.batch_size * training.sequence_length)
        return True

    def _between_steps(self) -> None:
        """Store and merge the fragments that are due between the last inner step taken and the next."""
        if self._cycle.is_over and self._outer_step is not None:
            self._worker.all_taken(self._outer_step, self._claim(self._outer_step))
        for fragment, alpha in self._cycle.now():
            if alpha is None:
                with ExitStack() as storing:
                    self._replica.store(self._on_first(partial(self._local_of, fragment, storing)), fragment)
                    self._ranks.from_first(partial(self._check_finite, fragment))
            elif self._ranks.from_first(partial(self._is_changed, fragment)):
                self._replica.merge(self._on_first(lambda: self._worker.vectors.local), fragment, alpha)

    def _claim(self, outer_step: OuterStep) -> Trained:
        return outer_step.claim(self._cycle.planned, self.run.config.training.sequence_length, self._loss)

    def _local_of(self, fragment: int, storing: ExitStack) -> Vector | None:
        """Return the flat vector to write a fragment's weights into, or None if the outer step is void. Unless it is
        void, the fragment is published for averaging when the exit stack `storing` closes."""
        assert self._outer_step is not None
        claim = self._claim(self._outer_step)
        return storing.enter_context(self._worker.storing(self._outer_step, fragment, claim))

    def _check_finite(self, fragment: int) -> None:
        """Raise LoopError if a fragment's stored weights hold NaN or infinity, because such weights must not be
        averaged."""
        if not np.isfinite(self._worker.vectors.local[self._worker.fragments[fragment]]).all():
            raise LoopError(
                f"the model's weights hold NaN or infinity in inner step {self.inner_step} of outer step "
                f"{self.outer_step}.",
                "Lower the learning rate, clip gradients, or skip the step when the loss or a gradient is not finite.",
            )

    def _is_changed(self, fragment: int) -> bool:
        assert self._outer_step is not None
        return self._worker.is_changed(self._outer_step, fragment)

    def _on_first(self, find: Callable[[], Found]) -> Found | None:
        return find() if self._ranks.is_first else None


def _leave_before_exit(reference: weakref.ref[SwarmThread]) -> None:
    """Leave the run if the caller's program ends without leaving the run, for example after its training has raised
    inside the context."""
    swarm = reference()
    if swarm is not None and swarm.is_alive():
        swarm.leave()
