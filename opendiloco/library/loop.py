"""A training loop of one's own as a peer: `DiLoCo` counts its inner steps, and lends it theta at each outer step."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from opendiloco.config.run_config import StreamingSection
from opendiloco.data.ahead import Ahead
from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.data.sample_order import numbers_of
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import TokenizeAhead, TrainingData, load_data
from opendiloco.errors import LoopError, first_line
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library.model import LoopReplica, TokenCounter, check_own_model
from opendiloco.library.swarm import LoopWorker, OuterStep, SwarmThread
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.training.streaming import Cycles
from opendiloco.view.curves import configuration_of
from opendiloco.volunteer.interrupts import RememberedInterrupt
from opendiloco.workers.trackers import Choice, tracking
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Invite

logger = logging.getLogger(__name__)

BEFORE_EXIT: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
"""Has Python call a function before it ends; `atexit` alone does so when executors, which leaving needs, have ended."""


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
        self._taken = 0
        self.planned = 0

    def begin(self, planned: int, goes_on: bool, is_last: bool) -> None:
        """Begin a cycle of so many inner steps; see `Cycles.begin`."""
        self.planned, self._taken = planned, 0
        self._noted = {}
        nothing = np.empty(0, np.float32)
        self._cycles.begin(planned, self._steps(), self._overlap, goes_on, is_last)
        for fragment in range(self._fragments):
            self._cycles.train_up_to(fragment, nothing)
            self._cycles.store(nothing, fragment)
        self._cycles.train_to_the_end(nothing)

    def after(self, steps: int) -> Sequence[BetweenSteps]:
        """Return what is done after so many inner steps of the cycle."""
        return self._noted.get(steps, ())

    def _steps(self) -> Iterator[None]:
        for taken in range(1, self.planned + 1):
            self._taken = taken
            yield

    def _note_store(self, flat: Vector, fragment: int) -> None:
        self._noted.setdefault(self._taken, []).append(BetweenSteps(fragment, None))

    def _note_merge(self, flat: Vector, fragment: int, alpha: float) -> None:
        self._noted.setdefault(self._taken, []).append(BetweenSteps(fragment, alpha))


class DiLoCo:
    """A peer of a run whose inner loop is the caller's. A context: entering it joins the run, leaving it leaves.

    `model` is any module with the run's trainable parameters (same shapes, same order), whole, in one process; its
    weights are replaced by theta at each outer step. They may be in half precision (see `LoopReplica`): updates that
    are too small for it are lost, as in any such loop. `inner_optimizer` steps it.

    An outer step has as many inner steps as it has for every peer, whatever the loop trains in each. Its contribution
    is weighted by the tokens that it has trained: those of `batches`, or else those that passed through the model (see
    `TokenCounter`), or those that `report` says. Where they are fewer than the lease has, the rest of the lease goes
    back to the run; where they are more, they count as the lease.

    It takes its turns to evaluate theta on the run's held-out text, where that can be read here, the model holds theta
    as it is, and is called as transformers' models are.

    Raises: LoopError for a model that is sharded, or in one of several processes. Entering raises:
    ManifestError, AdmissionError, CopiedKeyError, SwarmUnreachableError, LocalNetworkError, MachineError; and leaves no
    thread behind, also when it is interrupted. What goes wrong later is raised by the inner step during which it is
    noticed, and so is a KeyboardInterrupt that Python has lost.
    """

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
        self.finished = False
        """Whether the run has had its last outer step. The model then holds the run's final weights."""
        check_own_model(model)
        self._model = model
        self._inner_optimizer = inner_optimizer
        self._data = data
        self._loss: float | None = None
        self._tokens = TokenCounter()
        self._text: TrainingData | None = None
        self._evaluates = evaluates
        self._until_leaving = ExitStack()
        self._interrupt = RememberedInterrupt()
        self._outer_step: OuterStep | None = None
        self._swarm = SwarmThread(Invite.parse(run), identity or Identity.generate(), ticket, own, model, is_abandoned)

    def __enter__(self) -> Self:
        self._until_leaving.enter_context(self._interrupt)
        self._until_leaving.callback(self._tokens.watch(self._model).remove)
        BEFORE_EXIT(_leave_before_exit, weakref.ref(self._swarm))
        self._swarm.start()
        try:
            joined = self._swarm.joined.result()
            self._replica = LoopReplica(self._model, joined.worker.layout)
            self._itinerary = Itinerary(len(joined.worker.fragments), joined.run.config.streaming)
            self._begin_outer_step()
        except BaseException:
            with self._until_leaving:
                self._swarm.give_up()
            raise
        self._until_leaving.callback(self._inner_optimizer.register_step_post_hook(self._after_inner_step).remove)
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self._swarm.leave()
        except BaseException:  # whoever is interrupted now does not want to wait for the round under way
            self._swarm.give_up()
            raise
        finally:
            self._until_leaving.close()

    @property
    def run(self) -> Run:
        return self._swarm.joined.result().run

    @property
    def _worker(self) -> LoopWorker:
        return self._swarm.joined.result().worker

    @property
    def outer_step(self) -> int:
        """Outer steps that the run has taken."""
        return self.run.config.total_outer_steps if self._outer_step is None else self._outer_step.work.index

    @property
    def inner_step(self) -> int:
        """Inner steps since the last outer step."""
        return 0 if self._outer_step is None else self._outer_step.steps_done

    @property
    def lease(self) -> tuple[SampleRange, ...]:
        """Return the samples of the present outer step: numbers in the run's endless order, for this peer alone."""
        return () if self._outer_step is None else self._outer_step.work.samples

    def track(self, choice: str) -> None:
        """Draw curves until it leaves, in "tensorboard:FOLDER" or "wandb:PROJECT". Raises: ValueError, MachineError."""
        chosen = [Choice.parse(choice)]
        peer = self._swarm.identity.peer_id
        opened = self._until_leaving.enter_context(tracking(chosen, self.run.run_id, peer))
        configuration = configuration_of(self.run, peer, self._worker.device)
        self._worker.telemetry.track_with(opened, configuration)

    def report(self, loss: torch.Tensor | float, tokens: int | None = None) -> None:
        """Take the loss of the inner step under way, to be shown to others; and its tokens, where the model's calls do
        not show them."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if tokens is not None:
            self._tokens.say(tokens)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the run's text, batch by batch, until the run is over: token ids of shape (batch_size,
        sequence_length + 1).

        Each batch is for one inner step. The next shard of a source with shards is tokenized meanwhile, by a process
        that ends with this iterator, or when the loop leaves. Raises: DataError.
        """
        run = self.run.with_data(self._data)
        with closing(Ahead(run.config)) as ahead:
            self._until_leaving.callback(ahead.close)  # an iterator may outlive its loop
            data, training = self._read(run, ahead.tokenize), run.config.training
            size = training.batch_size
            while (outer_step := self._outer_step) is not None:
                self._interrupt.raise_again()
                lease, first = numbers_of(outer_step.work.samples), outer_step.steps_done * size
                data.samples.expect(lease)
                windows = data.samples.read(lease[first : first + size])
                self._tokens.say(len(windows) * training.sequence_length)
                yield torch.from_numpy(windows)

    def _read(self, run: Run, tokenize_ahead: TokenizeAhead | None = None) -> TrainingData:
        """Open the text of a run, as this machine may read it. Raises: DataError, MachineError."""
        tokenizer = build_tokenizer(run.config.tokenizer)
        self._text = load_data(run.config, tokenizer, None, tokenize_ahead)
        per_token = self._text.held_out.bytes_per_token(run.config.evaluation.windows, tokenizer)
        self._worker.telemetry.bytes_per_token = per_token
        return self._text

    def _begin_outer_step(self) -> None:
        """Wait for the swarm, which may have theta evaluated first, and take over theta, unless the loop goes on."""
        training, total = self.run.config.training, self.run.config.total_outer_steps
        while True:
            outer_step = self._outer_step = self._worker.next_outer_step(self._evaluate)
            self._tokens.take()  # what has passed through the model until now is trained no more
            if outer_step is None:
                self._replica.load(self._worker.vectors.theta)
                self.finished = True
                return
            if outer_step.begin_with is not None:
                self._replica.load(outer_step.begin_with)
            planned, is_last = outer_step.planned_steps(training.batch_size), outer_step.work.index + 1 == total
            self._itinerary.begin(planned, outer_step.begin_with is None, is_last)
            if self._goes_on(outer_step):
                return

    def _goes_on(self, outer_step: OuterStep) -> bool:
        """Store and merge fragments before the next inner step. Return whether there is one."""
        planned, length = self._itinerary.planned, self.run.config.training.sequence_length
        trained = outer_step.claim(planned, length, self._loss)
        if outer_step.steps_done == planned:
            self._worker.all_taken(outer_step, trained)
        for fragment, alpha in self._itinerary.after(outer_step.steps_done):
            if alpha is None:
                publish = partial(self._replica.store, fragment=fragment)
                self._worker.store(outer_step, fragment, publish, trained)
            elif self._worker.is_changed(outer_step, fragment):
                self._replica.merge(self._worker.vectors.local, fragment, alpha)
        return not outer_step.is_void and outer_step.steps_done < planned

    def _after_inner_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        outer_step = self._outer_step
        self._interrupt.raise_again()
        if outer_step is None:
            return  # the run is over; what is trained now is the caller's alone
        if not outer_step.is_void:
            training = self.run.config.training
            batch_tokens = training.batch_size * training.sequence_length
            outer_step.step_taken(self._tokens_of_inner_step(), self._loss, batch_tokens)
            if self._goes_on(outer_step):
                return
        self._begin_outer_step()

    def _tokens_of_inner_step(self) -> int:
        """Return how many tokens the inner step has trained. Raises: LoopError when nothing shows that."""
        tokens = self._tokens.take()
        if tokens <= 0:
            raise LoopError(
                f"inner step {self.inner_step + 1} of outer step {self.outer_step} has trained {tokens} tokens, as far "
                "as the model's calls show.",
                "Call the model in training mode with token ids, as its first argument or as input_ids; or say how "
                "many there are: diloco.report(loss, tokens=…).",
            )
        return tokens

    def _evaluate(self) -> HeldOut | None:
        """Return theta's loss on the run's held-out text, read at the first turn; None if the loop takes no turns."""
        if not self._evaluates or self._replica.rounds:
            return None
        try:
            if self._text is None:
                logger.info(
                    "reading the run's text to evaluate theta on what is held out; evaluates=False leaves it out"
                )
            run = self.run.with_data(self._data)
            section, held_out = run.config.evaluation, (self._text or self._read(run)).held_out
            is_bf16, device = run.config.training.precision == "bf16", next(self._model.parameters()).device.type
            precision = partial(torch.autocast, device, torch.bfloat16, enabled=is_bf16)
            with self._replica.showing(self._worker.vectors.theta, not run.config.streaming.is_plain) as model:
                loss, _ = held_out_loss(model, held_out, section.windows, EVALUATED_AT_ONCE, precision)
            is_runs_text = run.has_runs_text and section.digest in (None, held_out.digest(section.windows))
            return HeldOut(loss, is_runs_text)
        except Exception as error:  # a model may be called in other ways than transformers'
            logger.warning("this loop takes no turns to evaluate theta: %s", first_line(error))
            self._evaluates = False
            return None


def _leave_before_exit(reference: weakref.ref[SwarmThread]) -> None:
    """Leave the run if nobody has: a program may end right after its training has raised, still in the context."""
    swarm = reference()
    if swarm is not None and swarm.is_alive():
        swarm.leave()
