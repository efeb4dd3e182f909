"""What a worker does when it is told to train: inner steps, and at its offsets each fragment's part in Algorithm 2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from opendiloco.config.run_config import RunConfig
from opendiloco.shared_memory import SharedVectors, Vector
from opendiloco.training.inner import InnerStep, InnerSteps, ModelReplica, StepTaken
from opendiloco.training.streaming import Cycles
from opendiloco.training.team import Team, forget_peak_memory, peak_memory
from opendiloco.workers.control import (
    Average,
    ControlMessage,
    FragmentStored,
    InnerLoopDone,
    InnerStepDone,
    RunInnerLoop,
)


class Channel(Protocol):
    """The worker's end of the control channel."""

    stopped_number: int
    """The newest training that is to end."""

    def send(self, message: ControlMessage) -> None: ...

    def is_held(self, number: int) -> bool:
        """Wait for a moment for a pause to end; return whether the next step of training `number` still has to wait."""

    def average_of(self, fragment: int) -> Average | None:
        """Return what was said last of a fragment."""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once this holds; it is asked anew whenever something was heard."""


class InnerLoops:
    """One after the other. `carry_out_asides` is called between inner steps, and while this worker waits."""

    def __init__(
        self,
        config: RunConfig,
        replica: ModelReplica,
        team: Team,
        vectors: SharedVectors,
        channel: Channel,
        carry_out_asides: Callable[[], None],
    ) -> None:
        streaming = config.streaming
        self._window = config.training.sequence_length
        self._outer_steps = config.total_outer_steps
        self._replica, self._team, self._vectors, self._channel = replica, team, vectors, channel
        self._carry_out_asides = carry_out_asides
        self._cycles = Cycles(self.store, self.merge, len(replica.layout.fragments), streaming)
        self._stored_in: dict[int, int] = {}  # in which training each fragment was stored last
        self._stored_at: dict[int, float] = {}
        self._number = 0
        self._idled = 0.0

    def idled(self, seconds: float) -> None:
        """Hear for how long the worker had nothing to do since its last training."""
        self._idled += seconds

    def run(self, command: RunInnerLoop) -> InnerLoopDone:
        """Train. Whoever goes on has waited until now for the average of the last fragment of the cycle before."""
        self._waited = self._idled if command.goes_on else 0.0  # seconds, as are those that follow
        self._held = self._idled = self._longest_average = 0.0
        self._number, self._began, self._late = command.number, time.monotonic() - self._waited, 0
        forget_peak_memory(self._team.device)
        begin_with = self._vectors.local if command.from_local else self._vectors.theta
        inner_steps = self._replica.inner_steps(
            None if command.goes_on else begin_with,
            *(command.index, command.samples, command.steps, command.tokens),
            self._is_stopped,
        )
        is_last = command.index + 1 == self._outer_steps
        self._cycles.begin(inner_steps.planned, self._told(inner_steps), command.overlap, command.goes_on, is_last)
        self._wait_while_held()
        self._pass_through(inner_steps)
        trained = inner_steps.trained
        return InnerLoopDone(
            tokens=trained.tokens,
            inner_steps=trained.inner_steps,
            loss=trained.loss,
            gradient_norm=trained.gradient_norm,
            learning_rate=self._replica.learning_rate,
            skipped=trained.skipped,
            seconds=time.monotonic() - self._began - self._held,
            waited_seconds=trained.waited_seconds,
            peak_memory_bytes=peak_memory(self._team.device),
            late_averages=self._late,
            average_wait_seconds=self._waited,
            longest_average_seconds=self._longest_average,
            overlap=command.overlap,
        )

    def _pass_through(self, inner_steps: InnerSteps) -> None:
        """Take all inner steps, and store each fragment on the way; the last one also if we were told to stop."""
        last = len(self._replica.layout.fragments) - 1
        local = self._vectors.local
        is_whole = True
        for fragment in range(last + 1):
            is_whole = is_whole and self._cycles.train_up_to(fragment, local)
            if is_whole or fragment == last:
                self._cycles.store(local, fragment)
                self._channel.send(self._stored(fragment, inner_steps, is_whole))
        if is_whole:
            self._cycles.train_to_the_end(local)

    @staticmethod
    def _stored(fragment: int, inner_steps: InnerSteps, is_whole: bool) -> FragmentStored:
        done = inner_steps.trained
        samples, tokens = done.samples, done.tokens
        if is_whole:
            samples, tokens = inner_steps.planned_samples, inner_steps.planned_tokens
        return FragmentStored(fragment=fragment, samples=samples, tokens=tokens, loss=done.loss)

    def store(self, flat: Vector, fragment: int) -> None:
        self._replica.store(flat, fragment)
        self._stored_in[fragment], self._stored_at[fragment] = self._number, time.monotonic()

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        """Merge what was averaged, once it is there; and nothing, if there is nothing new or all are to stop."""
        number, began = self._stored_in[fragment], time.monotonic()

        def is_decided() -> bool:
            if self._team.size == 1:
                self._carry_out_asides()
            return self._has_average(fragment, number) or self._is_stopped()

        if not self._has_average(fragment, number):
            self._late += 1
            self._channel.wait_until(is_decided)
            self._waited += time.monotonic() - began
        average = self._channel.average_of(fragment)
        if average is not None and average.number == number:
            self._longest_average = max(self._longest_average, average.heard_at - self._stored_at[fragment])
            if average.is_changed:
                self._replica.merge(theta, fragment, alpha)

    def _has_average(self, fragment: int, number: int) -> bool:
        average = self._channel.average_of(fragment)
        return average is not None and average.number == number

    def _is_stopped(self) -> bool:
        return self._number <= self._channel.stopped_number

    def _tell(self, step: InnerStep) -> None:
        """Report an inner step that changed the weights, and do what fits between two of them."""
        if self._team.rank == 0:
            idle = self._held + self._waited
            progress = InnerStepDone(
                inner_step=step.number,
                loss=step.loss,
                gradient_norm=step.gradient_norm,
                learning_rate=self._replica.learning_rate,
                tokens_per_second=step.samples * self._window / (time.monotonic() - self._began - idle),
            )
            self._channel.send(progress)
        if self._team.size == 1:
            self._carry_out_asides()
        self._wait_while_held()

    def _wait_while_held(self) -> None:
        """Wait while the owner wants a pause, and this training is not to end."""
        began = time.monotonic()
        while self._channel.is_held(self._number):
            if self._team.size == 1:
                self._carry_out_asides()
        self._held += time.monotonic() - began

    def _told(self, inner_steps: InnerSteps) -> Iterator[StepTaken]:
        """Take inner steps, and tell of each that changed the weights."""
        for taken in inner_steps.every():
            if taken.is_finite:
                self._tell(inner_steps.latest)
            yield taken
