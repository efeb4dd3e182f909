"""DiLoCo in one process, with the swarm's codec: Algorithm 2 of arXiv 2501.18512 (Streaming DiLoCo) as a loop over
replicas. With one fragment and no overlap it is Algorithm 1 (DiLoCo, arXiv 2311.08105), by the same code.

It is what a swarm must agree with, bit for bit, when given the same leases.

A cycle, or outer step, is H inner steps of each replica, in which each fragment is synchronised once. Where the paper
leaves something open:

- Fragments are spread evenly over a cycle: `Cycles` says after which inner step each is synchronised and merged.
- The theta that a pseudo-gradient is taken from is the one after the fragment's last outer step (line 15).
- Averages are weighted by the tokens of the cycle's leases; in an asynchronous run old ones count less (`aged`).
- A replica that took no part in the cycle before begins with theta, and nothing is left to be merged into it.
- A replica with no more inner steps than its overlap merges a fragment before that is synchronised again.
- A replica may be so slow that its inner steps take several of the others' cycles. Each of its fragments is then part
  of the first outer step of that fragment that is taken once it is stored. If there was one before, which it missed,
  nothing is awaited: what comes back is theta as it is when the fragment is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco import kernels
from opendiloco.config.overrides import NO_OVERRIDES, Overrides, mixture_phases
from opendiloco.config.run_config import RunConfig, StreamingSection
from opendiloco.data.tokenizer import Tokenizer, build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.model.build import build_model
from opendiloco.model.layout import Layout
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import Residual, RunRounding
from opendiloco.training.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.training.inner import ModelReplica
from opendiloco.training.outer import OuterState
from opendiloco.training.streaming import Cycles
from peers.protocol.weights import aged
from peers.values.leases import SampleRange
from peers.values.manifest import LoggedAmendment


@dataclass(frozen=True)
class Work:
    """One replica's part in one outer step. `overlap` is its own τ (the paper's section 3.3.2), if not the run's.

    `age` is how many outer steps were taken since the replica began, and `fragments` are those that it brings; None:
    all. Work that takes several outer steps is in the roster of each that it brings fragments into."""

    replica: str
    samples: tuple[SampleRange, ...]
    steps: int
    overlap: int | None = None
    age: int = 0
    fragments: tuple[int, ...] | None = None

    def brings(self, fragment: int) -> bool:
        """Return whether a fragment of this outer step has what the replica has learned of it."""
        return self.fragments is None or fragment in self.fragments


class Member:
    """One replica on its way through the cycles that it takes part in."""

    work: Work

    def __init__(self, replica: ModelReplica, streaming: StreamingSection, error_feedback: float) -> None:
        self.replica = replica
        self.cycles = Cycles(replica.store, replica.merge, len(replica.layout.fragments), streaming)
        self.residuals = [Residual(error_feedback, part.stop - part.start) for part in replica.layout.fragments]
        self.base: Vector = np.zeros(replica.layout.size, np.float32)
        """The theta that what it learns of each fragment counts from."""
        self.returned = self.base.copy()
        """What has come back of each fragment, to be merged."""
        self.began_at = -1
        """The outer step for which it trains, once it does."""
        self._ended_at: int | None = None
        self._streams = len(replica.layout.fragments) > 1 or not streaming.is_plain

    def take_part(
        self, work: Work, theta: Vector, tokens: int, overrides: Overrides, index: int, overlap: int, config: RunConfig
    ) -> None:
        """Begin with a lease, or go on with it; without the cycle before, from `theta`. After `tokens` of the run, and
        with `overrides` in force: those of the outer step that it begins in."""
        self.work, began_at = work, index - work.age
        if began_at == self.began_at:
            return
        self.began_at = began_at
        was_there = self._ended_at is not None and began_at == self._ended_at + 1
        goes_on = was_there and self._streams
        if not was_there:
            for residual in self.residuals:
                residual.forget()
        if not goes_on:
            self.base[:] = theta
        begin_with = None if goes_on else theta
        steps = self._inner_steps = self.replica.inner_steps(
            begin_with, began_at, work.samples, work.steps, tokens, overrides=overrides
        )
        is_last = began_at + 1 == overrides.total_outer_steps(config)
        self.cycles.begin(steps.planned, steps.every(), overlap, goes_on, is_last)

    def bring(self, fragment: int) -> None:
        """Take the inner steps before a fragment is stored."""
        assert self.cycles.train_up_to(fragment, self.returned), "there are fewer inner steps than planned"

    def get_back(self, part: slice, theta: Vector) -> None:
        """Go on with a fragment that was stored: with what has come back of it, from which all counts from now on."""
        self.base[part] = self.returned[part] = theta

    def end(self, index: int) -> None:
        """Take the inner steps that are left, and have the work end with this outer step."""
        assert self.cycles.train_to_the_end(self.returned), "there are fewer inner steps than planned"
        self.cycles.merge_what_is_due(self.returned)
        self._ended_at = index

    @property
    def tokens(self) -> int:
        """Return how many tokens this cycle's inner steps train."""
        return self._inner_steps.planned_tokens


class StreamingDiLoCo:
    """The algorithm, whatever its replicas train. A replica is made when its name first appears."""

    def __init__(
        self, config: RunConfig, layout: Layout, theta: Vector, new_replica: Callable[[], ModelReplica]
    ) -> None:
        """`theta` is used in place, and begins with zeros in the padding."""
        self.config = config
        self.layout = layout
        self.state = OuterState(theta, config.outer_optimizer, layout.fragments)
        self.members: dict[str, Member] = {}
        self._rounding = RunRounding(config.codec)
        self._is_asynchronous = config.rounds.enough is not None
        self._beginnings = deque[tuple[Vector, int, Overrides]](maxlen=1 + config.rounds.staleness)
        """Theta, the run's tokens and what was in force as the last outer steps began."""
        self.index = 0
        self.tokens = 0
        self.overrides: Overrides = NO_OVERRIDES
        """Those that are in force from the next outer step on."""
        self._new_replica = new_replica
        self._local = np.zeros_like(theta)

    def outer_step(self, roster: Sequence[Work]) -> bytes:
        """One outer step, its members in roster order (the order matters to the last bit). Returns the state digest.

        Raises: IndexError for work that is older than any that counts.
        """
        members = self.begin(roster)
        for fragment, part in enumerate(self.state.fragments):
            present = [member for member in members if member.work.brings(fragment)]
            before = self.state.theta[part].copy()
            for member in present:
                member.bring(fragment)
            if present:
                self.synchronise(fragment, present)
            for member in present:  # late ones did not wait for this
                member.get_back(part, before if member.work.age else self.state.theta[part])
        return self.end(present)

    def begin(self, roster: Sequence[Work]) -> list[Member]:
        """Begin an outer step. Raises: IndexError for work that is older than any that counts."""
        self._beginnings.append((self.state.theta.copy(), self.tokens, self.overrides))
        streaming, members = self.config.streaming, []
        for work in roster:
            if work.replica not in self.members:
                member = Member(self._new_replica(), streaming, self.config.codec.error_feedback)
                self.members[work.replica] = member
            members.append(self.members[work.replica])
            overlap = streaming.overlap if work.overlap is None else work.overlap
            members[-1].take_part(work, *self._beginnings[-1 - work.age], self.index, overlap, self.config)
        return members

    def end(self, members: Sequence[Member]) -> bytes:
        """End an outer step, and the work of those that bring its last fragment. Returns the state digest."""
        for member in members:
            member.end(self.index)
        self.index += 1
        self.tokens += sum(member.tokens for member in members)
        return self.state.digest()

    def synchronise(self, fragment: int, members: Sequence[Member]) -> None:
        """Average a fragment's pseudo-gradients, each quantized, by their weights, and take its outer step."""
        part = self.state.fragments[fragment]
        theta, local = self.state.theta[part], self._local[part]
        format = kernels.FORMATS[self.config.codec.kind]
        payloads = [kernels.Payload(format, theta.size) for _ in members]
        average, accumulator = kernels.Payload(format, theta.size), np.zeros_like(theta)
        for member, payload in zip(members, payloads, strict=True):
            member.cycles.store(self._local, fragment)
            rounding = self._rounding.of_contribution(member.began_at, fragment, member.work.samples)
            kernels.quantize_difference(
                member.base[part], local, payload, rounding, member.residuals[fragment].to_add()
            )
            kernels.accumulate(payload, self._weight(member), accumulator)
        rounding = self._rounding.of_average(self.index, fragment)
        kernels.finish_average(accumulator, sum(map(self._weight, members)), average, rounding)
        for member, payload in zip(members, payloads, strict=True):
            member.residuals[fragment].take_back(payload, average)
        self.state.apply(average, self.index, fragment, self.overrides)

    def _weight(self, member: Member) -> float:
        return aged(member.tokens, member.work.age) if self._is_asynchronous else member.tokens

    def run(self, outer_steps: Sequence[Sequence[Work]]) -> Iterator[bytes]:
        """Yield the state digest after each outer step."""
        yield from map(self.outer_step, outer_steps)


class Reference(StreamingDiLoCo):
    """A run with all its replicas on this CPU, each with an inner optimizer of its own."""

    def __init__(self, config: RunConfig) -> None:
        self._tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self._data: TrainingData = load_data(config, self._tokenizer)
        self.config = config
        self._judge = self.build_replica()
        theta: Vector = np.zeros(self._judge.layout.size, np.float32)
        self._judge.store(theta)
        super().__init__(config, self._judge.layout, theta, self.build_replica)

    def amend(self, amendments: Sequence[LoggedAmendment]) -> None:
        """Go on with what the log has taken in until now: with the values of the last one, and the mixtures of all."""
        self.overrides = Overrides.of(amendments[-1].amendment if amendments else None, self.config)
        self._data.samples.mix(mixture_phases(amendments, self.config))

    def held_out_loss(self) -> float:
        """Return the loss of theta in nats per token, on the windows that a swarm evaluates on."""
        self._judge.load(self.state.theta)
        model, windows, precision = self._judge.model, self.config.evaluation.windows, self._judge.precision
        at_once = min(self.config.training.batch_size, EVALUATED_AT_ONCE)
        return held_out_loss(model, self._data.held_out, windows, at_once, precision)[0]

    def build_replica(self) -> ModelReplica:
        """Return a replica with the run's initial weights and an inner optimizer of its own."""
        return ModelReplica(self.config, build_model(self.config, self._tokenizer), self._data.samples)
