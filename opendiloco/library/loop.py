"""A training loop of one's own as a peer: `DiLoCo` counts its inner steps, and lends it theta at each outer step."""

from __future__ import annotations

import atexit
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
from opendiloco.data.ahead import Ahead
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.data.sample_order import numbers_of
from opendiloco.errors import LoopError
from opendiloco.library.model import LoopReplica, TokenCounter, check_own_model
from opendiloco.library.ranks import Ranks
from opendiloco.library.swarm import LoopWorker, OuterStep, SwarmThread
from opendiloco.library.text import RunsText
from opendiloco.model.layout import Layout
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import inner_learning_rate_factor
from opendiloco.training.streaming import Cycles
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.interrupts import RememberedInterrupt
from opendiloco.workers.trackers import TrackerSpec, tracking
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, Trained

Found = TypeVar("Found")

BEFORE_EXIT: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
"""Has Python call a function before it ends; `atexit` alone does so when executors, which leaving needs, have ended."""


MOST_DRAWS = 20
"""Times that a batch comes again while no inner step is taken, as when a gradient scaler skips some."""


class BetweenSteps(NamedTuple):
    """What is done with a fragment between two inner steps: it is stored, or merged with this share of its own."""

    fragment: int
    alpha: float | None


class Itinerary:
    """One cycle of `Cycles`, gone through in advance: the caller's own code takes the inner steps."""

    def __init__(self, fragments: int, streaming: StreamingSection) -> None:
        self._cycles = Cycles(self._note_store, self._note_merge, fragments, streaming)
        self._fragments = fragments
        self._overlap = streaming.overlap
        self._noted: dict[int, list[BetweenSteps]] = {}
        self._foreseen = 0
        self.planned = 0
        self.steps_done = 0
        """Inner steps that the loop has planned in this cycle, and has taken."""

    def begin(self, planned: int, goes_on: bool, is_last: bool) -> None:
        """Begin a cycle of so many inner steps; see `Cycles.begin`."""
        self.planned, self.steps_done = planned, 0
        self._noted, self._foreseen = {}, 0
        nothing = np.empty(0, np.float32)
        self._cycles.begin(planned, self._steps(), self._overlap, goes_on, is_last)
        for fragment in range(self._fragments):
            self._cycles.train_up_to(fragment, nothing)
            self._cycles.store(nothing, fragment)
        self._cycles.train_to_the_end(nothing)

    @property
    def is_over(self) -> bool:
        """Return whether all inner steps are taken."""
        return self.steps_done >= self.planned

    def now(self) -> Sequence[BetweenSteps]:
        """Return what is done before the next inner step."""
        return self._noted.get(self.steps_done, ())

    def _steps(self) -> Iterator[None]:
        for taken in range(1, self.planned + 1):
            self._foreseen = taken
            yield

    def _note_store(self, flat: Vector, fragment: int) -> None:
        self._noted.setdefault(self._foreseen, []).append(BetweenSteps(fragment, None))

    def _note_merge(self, flat: Vector, fragment: int, alpha: float) -> None:
        self._noted.setdefault(self._foreseen, []).append(BetweenSteps(fragment, alpha))


class DiLoCo:
    """A peer of a run whose inner loop is the caller's. A context: entering it joins the run, leaving it leaves.

    `model` is any module with the run's trainable parameters (same shapes, same order); its weights are replaced by
    theta at each outer step. They may be in half precision (see `LoopReplica`): updates that are too small for it are
    lost, as in any such loop. `inner_optimizer` steps it.

    Processes that share the model, by FSDP2 or DistributedDataParallel, are one peer: all of them do the same with
    their `DiLoCo`, and take the same inner steps. The first one joins the run, and reports the loss.

    An outer step has as many inner steps as it has for every peer, whatever the loop trains in each. Its contribution
    is weighted by the tokens that it has trained: those of `batches`, or else those that passed through the model (see
    `TokenCounter`), or those that `report` says. Where they are fewer than the lease has, the rest of the lease goes
    back to the run; where they are more, they count as the lease.

    It takes its turns to evaluate theta on the run's held-out text, where that can be read here, the model holds theta
    as it is, whole, and is called as transformers' models are.

    Raises: LoopError for a model that cannot be trained so. Entering raises: ManifestError, AdmissionError,
    CopiedKeyError, SwarmUnreachableError, LocalNetworkError, MachineError; and leaves no thread behind, also when it is
    interrupted. What goes wrong later is raised by the inner step during which it is noticed, in all processes, and so
    is a KeyboardInterrupt that Python has lost.
    """

    run: Run

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        run: str,
        data: Sequence[Path] = (),
        identity: Identity | None = None,
        ticket: str | None = None,
        evaluates: bool = True,
        own: OwnFiles = NONE,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """`run` is an invite; one by invitation needs a `ticket`, too: its text, or a file's path. `data` are folders
        to read instead of sources that are local to this machine, `own` the run's model and tokenizer where these are.
        With `evaluates`, it takes its turns to evaluate. `is_abandoned` says whether the loop has ended without leaving
        this context: the run is then left all the same."""
        check_own_model(model)
        self._model = model
        self._inner_optimizer = getattr(inner_optimizer, "optimizer", inner_optimizer)  # accelerate wraps it
        if not isinstance(self._inner_optimizer, torch.optim.Optimizer):
            raise LoopError(
                f"the inner optimizer is a {type(self._inner_optimizer).__name__}, not one of torch.optim.",
                "Give the optimizer whose step() trains the model.",
            )
        self._ranks = Ranks()
        self._text = RunsText(data, evaluates and self._ranks.size == 1)
        self._loss: float | None = None
        self._tokens = TokenCounter()
        self._until_leaving = ExitStack()
        self._interrupt = RememberedInterrupt()
        self._work: InnerLoop | None = None
        self._over_after: int | None = None  # outer steps of the run, when it is over
        self._outer_step: OuterStep | None = None
        self._swarm = SwarmThread(Invite.parse(run), identity or Identity.generate(), ticket, own, model, is_abandoned)

    def __enter__(self) -> Self:
        self._until_leaving.enter_context(self._interrupt)
        self._until_leaving.callback(self._tokens.watch(self._model).remove)
        try:
            self._ranks.meet()
            self.run, layout = self._ranks.from_first(self._join)
            self._replica = LoopReplica(self._model, layout, self._ranks)
            self._itinerary = Itinerary(len(layout.fragments), self.run.config.streaming)
            self._begin_outer_step()
        except BaseException:
            with self._until_leaving:
                self._ranks.part()
                if self._swarm.is_alive():
                    self._swarm.give_up()
            raise
        self._until_leaving.callback(self._inner_optimizer.register_step_post_hook(self._after_inner_step).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *raised: object) -> None:
        try:
            if kind is None:
                self._ranks.from_first(self._swarm.leave)
            else:
                self._ranks.part()  # at once: others may wait for this process
                if self._ranks.is_first:
                    self._swarm.leave()
        except BaseException:  # whoever is interrupted now does not want to wait for the round under way
            if self._ranks.is_first:
                self._swarm.give_up()
            raise
        finally:
            self._ranks.part()
            self._until_leaving.close()

    def _join(self) -> tuple[Run, Layout]:
        """Join the run; return it, and where the model's parameters lie in its vectors."""
        BEFORE_EXIT(_leave_before_exit, weakref.ref(self._swarm))
        self._swarm.start()
        joined = self._swarm.joined.result()
        return joined.run, joined.worker.layout

    @property
    def _worker(self) -> LoopWorker:
        """Of the first process."""
        return self._swarm.joined.result().worker

    @property
    def finished(self) -> bool:
        """Return whether the run has had its last outer step. The model then holds the run's final weights."""
        return self._over_after is not None

    @property
    def outer_step(self) -> int:
        """Outer steps that the run has taken."""
        return self._over_after or 0 if self._work is None else self._work.index

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer step."""
        return 0 if self._work is None else self._itinerary.steps_done

    @property
    def lease(self) -> tuple[SampleRange, ...]:
        """Return the samples of the present outer step: numbers in the run's endless order, for this peer alone."""
        return () if self._work is None else self._work.samples

    @property
    def learning_rate_factor(self) -> float:
        """Return the factor that the run's schedule and amendments give the inner learning rate in the next inner step;
        0 when the run is over. It is the loop that multiplies its rate with it."""
        if (work := self._work) is None:
            return 0.0
        config, steps_done = self.run.config, self._itinerary.steps_done
        step = work.index * config.training.inner_steps + steps_done
        tokens = work.tokens + (steps_done + 1) * config.training.batch_size * config.training.sequence_length
        return inner_learning_rate_factor(config, Overrides.of(work.amendment, config), step, tokens)

    def track(self, choice: str) -> None:
        """Draw curves until it leaves, in "tensorboard:FOLDER" or "wandb:PROJECT"; the first process does. Raises:
        ValueError, MachineError."""
        chosen = [TrackerSpec.parse(choice)]
        if self._ranks.is_first:
            peer = self._swarm.identity.peer_id
            opened = self._until_leaving.enter_context(tracking(chosen, self.run.run_id, peer))
            configuration = configuration_of(self.run, peer, self._worker.device)
            self._worker.telemetry.track_with(opened, configuration)

    def report(self, loss: torch.Tensor | float, tokens: int | None = None) -> None:
        """Take the loss of the inner step under way, to be shown to others; and this process's tokens, where the
        model's calls do not show them."""
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._loss = value if math.isfinite(value) else None
        if tokens is not None:
            self._tokens.say(tokens)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the run's text, batch by batch, until the run is over: token ids of shape (batch_size,
        sequence_length + 1). Processes that share the model get equal shares of each batch, of which the first one
        reads all; where it cannot be divided, a share has a window of another one.

        Each batch is for one inner step, and comes again until the optimizer has taken one. The next shard of a source
        with shards is tokenized meanwhile, by a process that ends with this iterator, or when the loop leaves. Raises:
        DataError; LoopError when no step is ever taken.
        """
        run = self.run.with_data(self._text.folders)
        with closing(Ahead(run.config)) as ahead:
            self._until_leaving.callback(ahead.close)  # an iterator may outlive its loop
            self._ranks.from_first(lambda: self._open_text(run, ahead))
            place, draws = (-1, -1), 0
            while self._work is not None:
                self._interrupt.raise_again()
                here = self.outer_step, self.inner_step
                place, draws = here, draws + 1 if here == place else 1
                if draws > MOST_DRAWS:
                    raise LoopError(
                        f"batches() was asked {draws} times for inner step {self.inner_step + 1} of outer step "
                        f"{self.outer_step}, and the inner optimizer has taken no step.",
                        "Each batch is for one step: call inner_optimizer.step() for each, and accumulate gradients "
                        "within a batch. If the loss is not finite, lower the learning rate or clip gradients.",
                    )
                if draws > 1 and self._ranks.from_first(self._is_passed_over):
                    self._begin_outer_step()
                    continue
                windows = self._ranks.from_first(self._next_windows)
                is_counted = self._ranks.is_first  # for all: what is in two shares counts once
                self._tokens.say(len(windows) * run.config.training.sequence_length if is_counted else 0)
                yield self._ranks.piece(windows)

    def _is_passed_over(self) -> bool:
        """Return whether the swarm has moved on, in the first process."""
        return self._outer_step is not None and self._outer_step.is_void

    def _open_text(self, run: Run, ahead: Ahead) -> None:
        self._text.open(run, self._worker, ahead.tokenize)

    def _next_windows(self) -> torch.Tensor:
        """Read the run's text for the next inner step."""
        assert self._text.opened is not None
        assert self._work is not None
        samples, size = self._text.opened.samples, self.run.config.training.batch_size
        samples.mix(mixture_phases(self._work.amendments, self.run.config))
        lease, first = numbers_of(self.lease), self.inner_step * size
        samples.expect(lease)
        return torch.from_numpy(samples.read(lease[first : first + size]))

    # Outer steps ------------------------------------------------------------------------------------------------------
    # What follows is done by all processes together. The first one alone has an `_outer_step`, and flat vectors.

    def _begin_outer_step(self) -> None:
        """Wait for the swarm, which may have theta evaluated first, and take over theta, unless the loop goes on."""
        while True:
            self._work, goes_on, planned, over_after = self._ranks.from_first(self._next_outer_step)
            self._tokens.take()  # what has passed through the model until now is trained no more
            if not goes_on:
                self._replica.load(self._on_first(lambda: self._begin_with))
            if self._work is None:
                self._over_after = over_after
                return
            overrides = Overrides.of(self._work.amendment, self.run.config)
            is_last = self._work.index + 1 == overrides.total_outer_steps(self.run.config)
            self._itinerary.begin(planned, goes_on, is_last)
            self._between_steps()
            if not self._itinerary.is_over:
                return

    def _next_outer_step(self) -> tuple[InnerLoop | None, bool, int, int]:
        """Return what is to be trained next, whether the loop goes on from where it is, and for how many steps; when
        the run is over, after how many outer steps."""
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
            return  # the run is over; what is trained now is the caller's alone
        tokens = self._ranks.sum(self._tokens.take())
        if self._ranks.from_first(lambda: self._is_taken(tokens)):
            self._itinerary.steps_done += 1
            self._between_steps()
            if not self._itinerary.is_over:
                return
        self._begin_outer_step()

    def _is_taken(self, tokens: int) -> bool:
        """Tell the swarm of an inner step with so many tokens. Return whether it counts. Raises: LoopError when nothing
        shows that it has trained anything."""
        outer_step, training = self._outer_step, self.run.config.training
        if outer_step is None or outer_step.is_void:
            return False
        if tokens <= 0:
            raise LoopError(
                f"inner step {self.inner_step + 1} of outer step {self.outer_step} has trained {tokens} tokens, as far "
                "as the model's calls show.",
                "Call the model in training mode with token ids, as its first argument or as input_ids; or say how "
                "many there are: diloco.report(loss, tokens=…).",
            )
        outer_step.step_taken(tokens, self._loss, training.batch_size * training.sequence_length)
        return True

    def _between_steps(self) -> None:
        """Store and merge fragments, as it is time for."""
        if self._itinerary.is_over and self._outer_step is not None:
            self._worker.all_taken(self._outer_step, self._claim(self._outer_step))
        for fragment, alpha in self._itinerary.now():
            if alpha is None:
                with ExitStack() as storing:
                    self._replica.store(self._on_first(partial(self._local_of, fragment, storing)), fragment)
            elif self._ranks.from_first(partial(self._is_changed, fragment)):
                self._replica.merge(self._on_first(lambda: self._worker.vectors.local), fragment, alpha)

    def _claim(self, outer_step: OuterStep) -> Trained:
        return outer_step.claim(self._itinerary.planned, self.run.config.training.sequence_length, self._loss)

    def _local_of(self, fragment: int, storing: ExitStack) -> Vector | None:
        """Return where a fragment is written, if it counts. It is averaged when `storing` ends."""
        assert self._outer_step is not None
        claim = self._claim(self._outer_step)
        return storing.enter_context(self._worker.storing(self._outer_step, fragment, claim))

    def _is_changed(self, fragment: int) -> bool:
        assert self._outer_step is not None
        return self._worker.is_changed(self._outer_step, fragment)

    def _on_first(self, find: Callable[[], Found]) -> Found | None:
        """Return what the first process finds; None in others."""
        return find() if self._ranks.is_first else None


def _leave_before_exit(reference: weakref.ref[SwarmThread]) -> None:
    """Leave the run if nobody has: a program may end right after its training has raised, still in the context."""
    swarm = reference()
    if swarm is not None and swarm.is_alive():
        swarm.leave()
