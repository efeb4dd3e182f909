"""Methods to train one model on the same tokens in one process: DiLoCo in several forms, and its baselines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.kernels import FORMATS, Rounding
from opendiloco.shared_memory import Vector
from opendiloco.training.reference import Codec, Reference, Work
from peers.values.leases import SamplePool

Point = tuple[float, float]
"""The tokens that all replicas have trained, and the loss on held-out text."""


@dataclass(frozen=True)
class TrainingSetup:
    """The model, the data and the number of training tokens, which are the same for all methods."""

    hidden_size: int = 128
    layers: int = 5
    heads: int = 4
    windows_per_step: int = 16
    """Windows that all replicas together train in one inner step each."""
    sequence_length: int = 128
    steps: int = 2500
    """Inner steps of each replica."""
    warmup: int = 100
    learning_rate: float = 3e-3
    outer: Mapping[str, float] = field(default_factory=lambda: {"learning_rate": 0.7, "momentum": 0.9})
    source: str = "stdlib"
    precision: str = "fp32"
    held_out_windows: int = 512
    evaluations: int = 5
    device: str = "cpu"
    series: int = 1
    """Number to raise when a change of this project alters the results of trainings, so that old and new results are
    not compared."""

    @property
    def tokens(self) -> int:
        """The number of tokens that all replicas together train on."""
        return self.steps * self.windows_per_step * self.sequence_length

    def config(self, seed: int, steps: int, inner_steps: int, batch_size: int, changes: Mapping[str, Any]) -> RunConfig:
        """Return the run's configuration with this seed, in which `changes` replaces whole sections. Its replicas take
        `steps` inner steps of `batch_size` windows each."""
        model = {
            "model_type": "llama",
            "vocab_size": 259,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 8 * (self.hidden_size * 11 // 32),
            "max_position_embeddings": self.sequence_length,
            "tie_word_embeddings": True,
        }
        content: dict[str, Any] = {
            "name": "convergence",
            "model": {"config": model, "init_seed": seed},
            "data": {"source": self.source, "shuffle_seed": seed},
            "training": {
                "inner_steps": inner_steps,
                "batch_size": batch_size,
                "sequence_length": self.sequence_length,
                "precision": self.precision,
            },
            "inner_optimizer": {"learning_rate": self.learning_rate},
            "schedule": {
                "kind": "cosine",
                "warmup_steps": self.warmup,
                "decay_steps": steps - self.warmup,
                "final_fraction": 0.1,
            },
            "outer_optimizer": dict(self.outer),
            "evaluation": {"windows": self.held_out_windows},
        }
        return RunConfig.from_manifest_content(content | dict(changes))


@dataclass(frozen=True)
class Method:
    """A method of training that the benchmark compares, with its settings.

    "replicas" is DiLoCo, whose replicas divide each step's windows among them. The others have one worker: "batches",
    data parallel, trains all windows in each of its steps; "alone" trains those of one replica only.
    """

    name: str
    kind: Literal["replicas", "batches", "alone"] = "replicas"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Tables of run.toml that differ from the setting's."""
    replicas: int = 2
    inner_steps: int = 100
    idea: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Reference`: an outer optimizer, a codec or a pattern in place of the run's. Other processes import
    them, so they must be functions of a module, or `partial` objects of such functions."""
    encodes_average: bool = True
    slow: int = 0
    """Number of replicas with half the speed of the others: they make half of the inner steps in each outer step."""
    late: int = 0
    """Number of replicas with half the speed that make all inner steps. Their work counts an outer step later, with its
    age."""
    thin: int = 0
    """Number of replicas that contribute in another format than the run's own."""
    format: int = 0
    """The number of the thin replicas' format in `codec.contributions`."""

    def outer_steps(self, setting: TrainingSetup) -> int:
        """Return the number of outer steps in which this method trains on all of the setup's tokens."""
        share = (self.replicas - (self.slow + self.late) / 2) / self.replicas
        return round(setting.steps / self.inner_steps / share)


def key_of(method: Method, setting: TrainingSetup) -> str:
    """Return a string that identifies a training by all its settings except for the seed."""
    return json.dumps([asdict(setting), asdict(method)], sort_keys=True, default=_name_of)


def _name_of(idea: Any) -> str:
    """Return the name of a function or class, and of a `partial` also its arguments, in a form that is the same in
    every process."""
    if isinstance(idea, partial):
        return f"{_name_of(idea.func)}{idea.args}{idea.keywords}"
    return f"{idea.__module__}.{idea.__qualname__}"


@dataclass(frozen=True)
class Curve:
    """The loss curve of one training, and the bytes that one replica sends: `peak_bytes` is the most at one inner step,
    `sent_bytes` the sum over the training."""

    points: tuple[Point, ...]
    peak_bytes: int
    sent_bytes: int

    @property
    def loss(self) -> float:
        """The held-out loss after the training, in nats per token."""
        return self.points[-1][1]


def unchanged(values: Vector) -> Vector:
    """Return the values unchanged: the encoder and the decoder of a codec without loss."""
    return values


EXACT = Codec(encode=unchanged, decode=unchanged)
"""A codec that keeps fp32, so that pseudo-gradients are averaged exactly."""


class ExactAverageReference(Reference):
    """A DiLoCo reference that encodes the contributions but not their average, as the paper on Streaming DiLoCo
    does."""

    def _codec_with(self, rounding: Rounding, format: int = 0) -> Codec:
        return super()._codec_with(rounding, format)._replace(encodes_average=False)


def train(method: Method, setting: TrainingSetup, seed: int) -> Curve:
    """Train by one method from the seed's initial weights and samples, and return the loss curve."""
    is_diloco = method.kind == "replicas"
    batch_size = setting.windows_per_step // (1 if method.kind == "batches" else method.replicas)
    outer_steps = method.outer_steps(setting)
    steps = outer_steps * method.inner_steps
    config = setting.config(seed, steps, method.inner_steps, batch_size, method.changes)
    kind = Reference if method.encodes_average else ExactAverageReference
    reference = kind(config, device=torch.device(setting.device), **method.idea)
    cycles = _cycles(reference, method, outer_steps) if is_diloco else _straight(reference, outer_steps)
    every = -(-outer_steps // setting.evaluations)
    points = [(0.0, reference.held_out_loss())]
    for cycle in cycles:
        if cycle % every == 0 or cycle == outer_steps:
            points.append((setting.tokens * cycle / outer_steps, reference.held_out_loss()))
    if not is_diloco:
        sent = 4 * reference.layout.parameter_count if method.kind == "batches" else 0
        return Curve(tuple(points), sent, steps * sent)
    values = [fragment.stop - fragment.start for fragment in reference.layout.fragments]
    # Bytes sent for each fragment. A codec of Python functions has no byte format, so its values count 4 bytes each.
    sizes = [4 * each if "codec" in method.idea else FORMATS[config.codec.kind].payload_size(each) for each in values]
    return Curve(tuple(points), max(sizes), outer_steps * sum(sizes))


def _cycles(reference: Reference, method: Method, outer_steps: int) -> Iterator[int]:
    """Take all outer steps of all replicas. After each outer step, yield the number of outer steps taken so far."""
    batch_size, fragments = reference.config.training.batch_size, len(reference.layout.fragments)
    for cycle, roster in enumerate(_rosters(method, outer_steps, batch_size, fragments), 1):
        reference.outer_step(roster)
        yield cycle


def _rosters(method: Method, outer_steps: int, batch_size: int, fragments: int) -> Iterator[list[Work]]:
    """Yield, for each outer step, the work that its members do.

    The last replicas are slow, late or thin. Two late replicas take turns: one is a member of every other outer step,
    the second one of those in between.
    """
    pool, even = SamplePool(), method.replicas - method.slow - method.late
    under_way: dict[int, Work] = {}  # late replicas' work for the next outer step, by the replica's number
    for cycle in range(outer_steps):
        done, under_way = under_way, {}
        roster = list(done.values())
        for number in range(method.replicas):
            is_even = number < even
            if number in done or (method.late and not is_even and number % 2 > cycle):
                continue
            steps = method.inner_steps if is_even or method.late else method.inner_steps // 2
            (lease,), pool = pool.deal([steps * batch_size])
            is_thin = number >= method.replicas - method.thin
            work = Work(f"{number}", lease, steps, formats=(method.format,) * fragments if is_thin else ())
            if is_even or method.slow:
                roster.append(work)
            else:
                under_way[number] = replace(work, age=1)
        yield roster


def _straight(reference: Reference, cycles: int) -> Iterator[int]:
    """Train one worker without averaging. After each cycle of `training.inner_steps` inner steps, yield the number of
    cycles so far."""
    replica, training, pool = reference.build_replica(), reference.config.training, SamplePool()
    for index in range(cycles):
        (lease,), pool = pool.deal([training.inner_steps * training.batch_size])
        begin_with = None if index else reference.state.theta
        for _ in replica.inner_steps(begin_with, index, lease, training.inner_steps).every():
            pass
        replica.store(reference.state.theta)
        yield index + 1
