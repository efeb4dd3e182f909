"""DiLoCo in one process: Algorithm 1 of arXiv 2311.08105 as a loop over replicas, with the swarm's codec.

It is what a swarm must agree with, bit for bit, when given the same leases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import Tokenizer, build_tokenizer
from opendiloco.data.training_data import TrainingData, load_data
from opendiloco.inner.replica import ModelReplica
from opendiloco.model.build import build_model
from opendiloco.model.evaluation import held_out_loss
from opendiloco.outer.state import OuterState
from opendiloco.shared_memory import Vector
from peers.values.leases import SampleRange


@dataclass(frozen=True)
class Work:
    """One replica's part in one outer step."""

    replica: str
    samples: tuple[SampleRange, ...]
    steps: int


class Reference:
    """A run with all its replicas on this CPU. A replica is made, with a fresh AdamW, when its name first appears."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self._data: TrainingData = load_data(config, self._tokenizer)
        self._replicas: dict[str, ModelReplica] = {}
        self._judge = self._new_replica()
        theta: Vector = np.empty(self._judge.layout.size, np.float32)
        self._judge.store(theta)
        self.state = OuterState(theta, config.outer_optimizer)
        self.index = 0
        self.tokens = 0

    def outer_step(self, roster: Sequence[Work]) -> bytes:
        """One outer step, its members in roster order (the order matters to the last bit). Returns the state digest."""
        theta = self.state.theta
        accumulator, local = np.zeros_like(theta), np.empty_like(theta)
        payload = kernels.Payload(kernels.FORMATS[self._config.codec.kind], theta.size)
        total_tokens = 0
        for work in roster:
            if work.replica not in self._replicas:
                self._replicas[work.replica] = self._new_replica()
            replica = self._replicas[work.replica]
            trained = replica.train(theta, self.index, work.samples, work.steps, tokens=self.tokens)
            replica.store(local)
            kernels.quantize_difference(theta, local, payload)
            kernels.accumulate(payload, trained.tokens, accumulator)
            total_tokens += trained.tokens
        kernels.finish_average(accumulator, total_tokens, payload)
        self.state.apply(payload, self.index)
        self.index += 1
        self.tokens += total_tokens
        return self.state.digest()

    def run(self, outer_steps: Sequence[Sequence[Work]]) -> Iterator[bytes]:
        """The state digest after each outer step."""
        for roster in outer_steps:
            yield self.outer_step(roster)

    def held_out_loss(self) -> float:
        """Return the loss of theta in nats per token, on the windows that a swarm evaluates on."""
        self._judge.load(self.state.theta)
        windows, batch_size = self._config.evaluation.windows, self._config.training.batch_size
        return held_out_loss(self._judge.model, self._data.held_out, windows, batch_size, self._judge.precision)[0]

    def _new_replica(self) -> ModelReplica:
        return ModelReplica(self._config, build_model(self._config, self._tokenizer), self._data.samples)
