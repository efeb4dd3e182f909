"""DiLoCo in one process, with the swarm's codec: Algorithm 2 of arXiv 2501.18512 (Streaming DiLoCo) as a loop over
replicas. With one fragment and no overlap it is Algorithm 1 (DiLoCo, arXiv 2311.08105), by the same code.

It is what a swarm must agree with, bit for bit, when given the same leases.

A cycle, or outer step, is H inner steps of each replica, in which each fragment is synchronised once. Where the paper
leaves something open:

- Fragments are spread evenly: of a replica that takes n inner steps in a cycle, fragment p = 0 … P - 1 is due after
  ceil((p + 1) n / P) of them, the last one after all, and is synchronised the run's τ inner steps before, so that what
  comes of it is merged within the cycle. In the cycle that it begins with theta, and in the run's last one, it is
  synchronised when it is due.
- The theta that a pseudo-gradient is taken from is the one after the fragment's last outer step (line 15).
- Averages are weighted by the tokens of the cycle's leases; in an asynchronous run old ones count less (`aged`).
- A replica that took no part in the cycle before begins with theta, and nothing is left to be merged into it.
- A replica with no more inner steps than its overlap merges a fragment before that is synchronised again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import Tokenizer, build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.inner.cycles import Cycles, Fragmented, Steps
from opendiloco.inner.replica import ModelReplica
from opendiloco.model.build import build_model
from opendiloco.model.evaluation import EVALUATED_AT_ONCE, held_out_loss
from opendiloco.model.layout import Layout
from opendiloco.outer.residuals import Residuals
from opendiloco.outer.rounding import RunRounding
from opendiloco.outer.state import OuterState
from opendiloco.shared_memory import Vector
from peers.protocol.weights import aged
from peers.values.amendments import Amendment
from peers.values.leases import SampleRange


@dataclass(frozen=True)
class Work:
    """One replica's part in one outer step. `overlap` is its own τ (the paper's section 3.3.2), if not the run's. `age`
    is how many outer steps were taken while it trained, in a run that is asynchronous and does not stream."""

    replica: str
    samples: tuple[SampleRange, ...]
    steps: int
    overlap: int | None = None
    age: int = 0


@dataclass(frozen=True)
class Beginning:
    """What an outer step began with: theta, and the run's tokens."""

    theta: Vector
    tokens: int


class Replica(Fragmented, Protocol):
    """What the algorithm asks of a replica; see `ModelReplica`."""

    layout: Layout

    def inner_steps(
        self, theta: Vector | None, index: int, lease: tuple[SampleRange, ...], steps: int, tokens: int
    ) -> Steps: ...


class Member(Cycles):
    """One replica on its way through the cycles that it takes part in."""

    def __init__(self, replica: Replica, alpha: float, lead: int, error_feedback: float) -> None:
        super().__init__(replica, len(replica.layout.fragments), alpha, lead)
        self.replica = replica
        self.residuals = Residuals(error_feedback, replica.layout.fragments)
        self._last_index: int | None = None
        self.base: Vector | None = None
        """The theta that this cycle's work began with, where others have changed it since."""
        self.began_at = 0
        """The outer step for which it trained."""

    def take_part(self, work: Work, beginning: Beginning, index: int, overlap: int, is_last: bool = False) -> None:
        """Begin a cycle. A replica that took no part in the cycle before begins with theta."""
        self.began_at, self.work = index - work.age, work
        was_there = self._last_index is not None and self.began_at == self._last_index + 1
        goes_on, self._last_index = was_there and not work.age, index
        self.base = beginning.theta if work.age else None
        begin_with = None if goes_on else beginning.theta
        if not was_there:
            self.residuals.forget_all()
        lease = work.samples, work.steps
        self._inner_steps = self.replica.inner_steps(begin_with, self.began_at, *lease, beginning.tokens)
        self.begin(self._inner_steps, overlap, goes_on, is_last)

    @property
    def tokens(self) -> int:
        """Return how many tokens this cycle's inner steps train."""
        return self._inner_steps.planned_tokens


class StreamingDiLoCo:
    """The algorithm, whatever its replicas train. A replica is made when its name first appears."""

    def __init__(self, config: RunConfig, layout: Layout, theta: Vector, new_replica: Callable[[], Replica]) -> None:
        """`theta` is used in place, and begins with zeros in the padding."""
        self.config = config
        self.layout = layout
        self.state = OuterState(theta, config.outer_optimizer, layout.fragments)
        self.members: dict[str, Member] = {}
        self._rounding = RunRounding.of(config.codec)
        self._is_asynchronous = config.rounds.enough is not None
        self._keeps = config.rounds.staleness if self._is_asynchronous and config.streaming.is_plain else 0
        self._beginnings: deque[Beginning] = deque(maxlen=1 + self._keeps)
        self.index = 0
        self.tokens = 0
        self.amendment: Amendment | None = None
        """The one that is in force from the next outer step on; set it where the log takes one in."""
        self._new_replica = new_replica
        self._local = np.zeros_like(theta)

    def outer_step(self, roster: Sequence[Work]) -> bytes:
        """One outer step, its members in roster order (the order matters to the last bit). Returns the state digest.

        Raises: IndexError for work that is older than any that counts.
        """
        streaming, theta = self.config.streaming, self.state.theta
        is_last = self.index + 1 == self.config.total_outer_steps
        self._beginnings.append(Beginning(theta.copy() if self._keeps else theta, self.tokens))
        members = []
        for work in roster:
            if work.replica not in self.members:
                feedback = self.config.codec.error_feedback
                self.members[work.replica] = Member(self._new_replica(), streaming.mixing, streaming.overlap, feedback)
            members.append(self.members[work.replica])
            overlap = streaming.overlap if work.overlap is None else work.overlap
            members[-1].take_part(work, self._beginnings[-1 - work.age], self.index, overlap, is_last)
        for fragment in range(len(self.state.fragments)):
            for member in members:
                is_there = member.train_up_to(fragment, theta)
                assert is_there, "there are fewer inner steps than planned"
            self.synchronise(fragment, members)
        for member in members:
            is_there = member.train_to_the_end(theta)
            assert is_there, "there are fewer inner steps than planned"
            member.merge_what_is_due(theta)
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
            member.store(self._local, fragment)
            rounding = self._rounding.of_contribution(member.began_at, fragment, member.work.samples)
            base = theta if member.base is None else member.base[part]
            kernels.quantize_difference(base, local, payload, rounding, member.residuals.of(fragment))
            kernels.accumulate(payload, self._weight(member), accumulator)
        rounding = self._rounding.of_average(self.index, fragment)
        kernels.finish_average(accumulator, sum(map(self._weight, members)), average, rounding)
        for member, payload in zip(members, payloads, strict=True):
            member.residuals.take_back(fragment, payload, average)
        self.state.apply(average, self.index, fragment, self.amendment)

    def _weight(self, member: Member) -> float:
        return aged(member.tokens, member.work.age) if self._is_asynchronous else member.tokens

    def run(self, outer_steps: Sequence[Sequence[Work]]) -> Iterator[bytes]:
        """The state digest after each outer step."""
        for roster in outer_steps:
            yield self.outer_step(roster)


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

    def held_out_loss(self) -> float:
        """Return the loss of theta in nats per token, on the windows that a swarm evaluates on."""
        self._judge.load(self.state.theta)
        model, windows, precision = self._judge.model, self.config.evaluation.windows, self._judge.precision
        at_once = min(self.config.training.batch_size, EVALUATED_AT_ONCE)
        return held_out_loss(model, self._data.held_out, windows, at_once, precision)[0]

    def build_replica(self) -> ModelReplica:
        """Return a replica with the run's initial weights and an inner optimizer of its own."""
        return ModelReplica(self.config, build_model(self.config, self._tokenizer), self._data.samples)
