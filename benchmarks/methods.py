"""Ways to train one model on the same tokens, in one process: DiLoCo in several forms, and what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from benchmarks.freezing import FreezingReference
from opendiloco.config.run_config import RunConfig
from opendiloco.kernels import FORMATS
from opendiloco.model.layout import Layout
from opendiloco.shared_memory import Vector
from opendiloco.training.reference import Codec, Member, Reference, Work
from peers.values.leases import SamplePool

Point = tuple[float, float]
"""Tokens that all replicas have trained since the warm start, and the loss on held-out text."""
SMALL_CHUNKS = 64
"""Chunks of a small payload (docs/protocol.md, The exchange)."""
MODEL = {"model_type": "llama", "vocab_size": 259, "num_attention_heads": 4, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Setting:
    """What all methods have in common. A replica's batch is `batch_size` windows of `sequence_length` tokens."""

    hidden_size: int = 64
    layers: int = 6
    batch_size: int = 4
    sequence_length: int = 64
    replicas: int = 2
    inner_steps: int = 20
    outer_steps: int = 50
    warm_steps: int = 400
    learning_rate: float = 3e-3
    outer: Mapping[str, float] = field(default_factory=lambda: {"learning_rate": 0.4, "momentum": 0.9})
    windows: int = 512
    evaluations: int = 5
    warmup: int = 20

    @property
    def steps(self) -> int:
        """Return how many inner steps a replica makes."""
        return self.inner_steps * self.outer_steps

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens all replicas train while each makes an inner step."""
        return self.replicas * self.batch_size * self.sequence_length

    def config(self, seed: int, steps: int, batch: int = 1, **changes: Any) -> RunConfig:
        """Return the run with this seed, for so many inner steps of `batch` replicas' batches each."""
        sizes = {"hidden_size": self.hidden_size, "num_hidden_layers": self.layers}
        width = {"intermediate_size": 8 * (self.hidden_size * 11 // 32), "max_position_embeddings": 128}
        content: dict[str, Any] = {
            "name": "convergence",
            "model": {"config": MODEL | sizes | width, "init_seed": seed},
            "data": {"source": "stdlib", "shuffle_seed": seed},
            "training": {
                "inner_steps": self.inner_steps,
                "batch_size": batch * self.batch_size,
                "sequence_length": self.sequence_length,
            },
            "inner_optimizer": {"learning_rate": self.learning_rate},
            "schedule": {
                "kind": "cosine",
                "warmup_steps": self.warmup,
                "decay_steps": steps - self.warmup,
                "final_fraction": 0.1,
            },
            "outer_optimizer": dict(self.outer),
            "evaluation": {"windows": self.windows},
        }
        return RunConfig.from_manifest_content(content | changes)


@dataclass(frozen=True)
class Method:
    """One way to train.

    "replicas": DiLoCo. The others are one worker each: "batches", data-parallel, has all replicas' batches in each of
    its steps; "steps" takes them one after the other; "alone" has those of one replica only.
    """

    name: str
    kind: Literal["replicas", "batches", "steps", "alone"] = "replicas"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Tables of run.toml that are other than the setting's."""
    idea: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Reference`: an outer optimizer, a codec or a pattern in place of the run's. Worker processes import
    them, so they are functions of a module, or `partial` of such."""
    freezes: bool = False
    """Whether in each outer step one fragment alone learns, and is exchanged."""
    overlaps: Sequence[int] = ()
    """The replicas' own overlaps."""
    times: int = 1
    """How many times as many replicas there are as in the setting, each with so much fewer inner steps."""
    slow: int = 0
    """How many of them are half as fast as the others: in each outer step they make half of the inner steps."""
    late: int = 0
    """Instead, how many make all of them, so that what they learn counts an outer step later, with its age."""
    absent: bool = False
    """Whether the last replica is absent from a quarter of the chunks, and from every other outer step as a whole."""

    def adapt(self, setting: Setting) -> Setting:
        """Return the setting with this method's replicas, and as many outer steps as all the tokens take."""
        replicas = self.times * setting.replicas
        share = (replicas - (self.slow + self.late) / 2) / replicas
        return replace(
            setting,
            replicas=replicas,
            inner_steps=setting.inner_steps // self.times,
            outer_steps=math.ceil(setting.outer_steps / share),
        )

    @property
    def reference(self) -> type[Reference]:
        """Return what trains by this method."""
        return AbsentReference if self.absent else FreezingReference if self.freezes else Reference


@dataclass(frozen=True)
class Course:
    """What came of one training. `peak_bytes` is the most that a replica sends at one inner step, `sent_bytes` what it
    sends in all."""

    curve: tuple[Point, ...]
    peak_bytes: int
    sent_bytes: int

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def unchanged(values: Vector) -> Vector:
    """Return values as they are."""
    return values


EXACT = Codec(encode=unchanged, decode=unchanged)
"""Pseudo-gradients are averaged in fp32."""


class AbsentReference(Reference):
    """DiLoCo where a quarter of the last replica's chunks never arrive, each time others."""

    def mean(self, fragment: int, members: Sequence[Member], sent: Sequence[Vector]) -> Vector:
        total, weights = np.zeros_like(sent[0]), np.zeros_like(sent[0])
        for member, values in zip(members, sent, strict=True):
            weight = np.float32(member.tokens) * self._presence(member, fragment, values.size)
            total += weight * values
            weights += weight
        return np.asarray(total / weights)

    def _presence(self, member: Member, fragment: int, size: int) -> Vector:
        """Return 1 for each value of a fragment that a member brings, and 0 for the others."""
        if member.work.replica != max(self.members):
            return np.ones(size, np.float32)
        drawn = np.random.default_rng((self.index, fragment)).permutation(SMALL_CHUNKS) >= SMALL_CHUNKS // 4
        return np.repeat(drawn, -(-size // SMALL_CHUNKS))[:size].astype(np.float32)


def warm_start(setting: Setting, seed: int) -> Vector:
    """Return weights that one worker has trained with all replicas' batches."""
    reference = Reference(setting.config(seed, setting.warm_steps, setting.replicas))
    for _ in _straight(reference, setting.warm_steps, SamplePool()):
        pass
    return reference.state.theta


def train(method: Method, setting: Setting, seed: int, warm: Vector) -> Course:
    """Train by one method from warm weights, on the samples that follow those that these have been trained on."""
    pool = SamplePool(setting.warm_steps * setting.replicas * setting.batch_size)
    total = setting.steps * setting.tokens_per_step
    setting = method.adapt(setting)
    steps = setting.steps * (setting.replicas if method.kind == "steps" else 1)
    config = setting.config(seed, steps, setting.replicas if method.kind == "batches" else 1, **method.changes)
    reference = method.reference(config, **method.idea)
    layout, theta = reference.layout, reference.state.theta
    for there, here in zip(Layout([(each.name, each.shape) for each in layout]), layout, strict=True):
        theta[here.slice] = warm[there.slice]
    is_diloco = method.kind == "replicas"
    cycles = _cycles(reference, method, setting, pool) if is_diloco else _straight(reference, steps, pool)
    all_cycles = steps // setting.inner_steps
    every = -(-all_cycles // setting.evaluations)
    curve = [(0.0, reference.held_out_loss())]
    for cycle in cycles:
        if cycle % every == 0 or cycle == all_cycles:
            curve.append((total * cycle / all_cycles, reference.held_out_loss()))
    if not is_diloco:
        sent = 4 * layout.parameter_count if method.kind == "batches" else 0
        return Course(tuple(curve), sent, steps * sent)
    values = [fragment.stop - fragment.start for fragment in layout.fragments]
    # A codec in Python counts as if it sent fp32.
    sizes = [4 * each if "codec" in method.idea else FORMATS[config.codec.kind].payload_size(each) for each in values]
    cycles_of_each = setting.outer_steps / (len(sizes) if method.freezes else 1)
    return Course(tuple(curve), max(sizes), round(cycles_of_each * sum(sizes)))


def _cycles(reference: Reference, method: Method, setting: Setting, pool: SamplePool) -> Iterator[int]:
    """Take all outer steps of all replicas; yield how many have been taken."""
    for cycle, roster in enumerate(_rosters(method, setting, pool), 1):
        reference.outer_step(roster)
        yield cycle


def _rosters(method: Method, setting: Setting, pool: SamplePool) -> Iterator[list[Work]]:
    """Yield who is part of each outer step. The last replicas are slow, or late: of two late ones one is part of every
    other outer step, and one of those between."""
    even = setting.replicas - method.slow - method.late
    under_way: dict[int, Work] = {}  # for the next outer step
    for cycle in range(setting.outer_steps):
        done, under_way = under_way, {}
        roster = list(done.values())
        for number in range(setting.replicas):
            is_even = number < even
            if method.absent and number == setting.replicas - 1 and cycle % 2:
                continue
            if number in done or (method.late and not is_even and number % 2 > cycle):
                continue
            steps = setting.inner_steps if is_even or method.late else setting.inner_steps // 2
            (lease,), pool = pool.deal([steps * setting.batch_size])
            work = Work(f"{number}", lease, steps, method.overlaps[number] if method.overlaps else None)
            if is_even or method.slow:
                roster.append(work)
            else:
                under_way[number] = replace(work, age=1)
        yield roster


def _straight(reference: Reference, steps: int, pool: SamplePool) -> Iterator[int]:
    """Train one worker on and on; yield, after as many steps as an outer step has, how often so far."""
    replica, training = reference.build_replica(), reference.config.training
    for index in range(steps // training.inner_steps):
        (lease,), pool = pool.deal([training.inner_steps * training.batch_size])
        begin_with = None if index else reference.state.theta
        for _ in replica.inner_steps(begin_with, index, lease, training.inner_steps).every():
            pass
        replica.store(reference.state.theta)
        yield index + 1
