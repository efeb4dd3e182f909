"""Streaming DiLoCo in one process: against a calculation by hand, at its limits, and as plain DiLoCo."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from opendiloco import kernels
from opendiloco.config.overrides import NO_OVERRIDES, Decay, Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import with_sizes_named
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import merge
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.inner import ModelReplica
from opendiloco.training.outer import OuterState
from opendiloco.training.reference import Reference, StreamingDiLoCo, Work
from peers.errors import ManifestError
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from tests.opendiloco.training import streaming_by_hand as by_hand
from tests.opendiloco.training.streaming_by_hand import Case


class ToySteps:
    """The inner steps of a toy, as `InnerSteps` are those of a model."""

    def __init__(self, replica: Toy, steps: int, tokens: int) -> None:
        self.planned, self.planned_tokens = steps, tokens
        self._replica = replica

    def every(self) -> Iterator[None]:
        for _ in range(self.planned):
            weights = self._replica.weights
            weights -= np.float32(by_hand.RATE) * (weights - self._replica.target)
            yield


class Toy:
    """A replica whose samples say which target it has. Stands for a `ModelReplica`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weights = np.zeros(layout.size, np.float32)
        self.target = np.zeros(layout.size, np.float32)

    def inner_steps(
        self,
        theta: Vector | None,
        index: int,
        lease: tuple[SampleRange, ...],
        steps: int,
        tokens: int,
        overrides: Overrides,
    ) -> ToySteps:
        if theta is not None:
            self.weights[:] = theta
        name = list(by_hand.TARGETS)[lease[0].start]
        self.target = flat(self.layout, by_hand.TARGETS[name])
        return ToySteps(self, steps, by_hand.TOKENS[name])

    def store(self, flat: Vector, fragment: int | None = None) -> None:
        part = slice(None) if fragment is None else self.layout.fragments[fragment]
        flat[part] = self.weights[part]

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        part = self.layout.fragments[fragment]
        merge(self.weights[part], theta[part], alpha)


def flat(layout: Layout, values: Sequence[float]) -> Vector:
    vector = np.zeros(layout.size, np.float32)
    for place, value in zip(layout, values, strict=True):
        vector[place.slice] = value
    return vector


def values(layout: Layout, vector: Vector) -> list[float]:
    return [float(vector[place.offset]) for place in layout]


def toy_config(small_content: dict[str, Any], case: Case) -> RunConfig:
    """The toy's fragments are not cut by the configuration, but its layout says where they are."""
    outer = {"learning_rate": by_hand.OUTER_RATE, "momentum": by_hand.MOMENTUM}
    return RunConfig.from_manifest_content(
        small_content
        | {
            "outer_optimizer": outer,
            "outer_steps": by_hand.CYCLES,
            "codec": {"kind": case.codec},
            "streaming": {"overlap": case.overlap, "alpha": case.alpha},
        }
    )


def toy_algorithm(small_content: dict[str, Any], case: Case, kind: type[Toy] = Toy) -> StreamingDiLoCo:
    fragment_of = [
        number
        for value in range(len(by_hand.START))
        for number, fragment in enumerate(by_hand.FRAGMENTS[case.fragments])
        if value in fragment
    ]
    layout = Layout([(f"value {number}", ()) for number in range(len(fragment_of))], fragment_of)
    return StreamingDiLoCo(
        toy_config(small_content, case), layout, flat(layout, by_hand.START), lambda: cast(ModelReplica, kind(layout))
    )


def toy_work(name: str, case: Case) -> Work:
    number = list(by_hand.TARGETS).index(name)
    return Work(name, (SampleRange(number, number + 1),), by_hand.H, dict(case.own).get(name))


def by_the_reference(small_content: dict[str, Any], case: Case) -> Iterator[dict[str, Any]]:
    algorithm = toy_algorithm(small_content, case)
    for _ in range(by_hand.CYCLES):
        algorithm.outer_step([toy_work(name, case) for name in by_hand.TARGETS])
        toys = {name: cast(Toy, algorithm.members[name].replica) for name in by_hand.TARGETS}
        layout, state = toys["a"].layout, algorithm.state
        padding = flat(layout, [1] * len(by_hand.START)) == 0
        assert not state.theta[padding].any()
        assert not state.momentum[padding].any()
        yield {
            "theta": values(layout, state.theta),
            "momentum": values(layout, state.momentum),
            "local": {name: values(layout, toy.weights) for name, toy in toys.items()},
        }


QUICK = {"int8", "e3m0", "sparse"}  # codecs that `make test` tries; `make thorough` tries all
CASES = [
    Case(*case)
    for case in itertools.product((1, 2, 3), (0, 1, 3), (0.0, 0.5, 0.3, 1.0), ("int8", "uint4", "e2m1", "e3m0", "fp16"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_papers_algorithm_by_hand(small_content: dict[str, Any], case: Case) -> None:
    assert list(by_the_reference(small_content, case)) == list(by_hand.cycles(case))


@pytest.mark.parametrize("golden", json.loads(by_hand.GOLDEN.read_text()), ids=lambda golden: str(golden["case"]))
def test_golden_numbers(small_content: dict[str, Any], golden: dict[str, Any]) -> None:
    own = tuple((name, overlap) for name, overlap in golden["case"]["own"])
    assert list(by_the_reference(small_content, Case(**golden["case"] | {"own": own}))) == golden["cycles"]


def test_the_golden_numbers_are_those_of_the_calculation_by_hand() -> None:
    assert by_hand.GOLDEN.read_text() == by_hand.text_of_golden()


# With models ---------------------------------------------------------------------------------------------------------
def model_config(small_content: dict[str, Any], layers: int = 4, **changes: Any) -> RunConfig:
    content = copy.deepcopy(small_content) | changes
    content["model"]["config"]["num_hidden_layers"] = layers
    return RunConfig.from_manifest_content(content)


def work(replica: str, first: int, count: int = 8) -> Work:
    return Work(replica, (SampleRange(first, first + count),), 4)


ROSTERS = (
    (work("a", 0), work("b", 8)),
    (work("a", 16), work("b", 24, 3)),  # one with a short lease
    (work("b", 32),),  # one that is missing
    (work("c", 40), work("a", 48), work("b", 56)),  # another order, and one that is new
)


def decoded(payload: kernels.Payload) -> Vector:
    out = np.empty(payload.values, np.float32)
    kernels.dequantize(payload, out)
    return out


def algorithm_1(
    config: RunConfig, overrides: Sequence[Overrides] = (NO_OVERRIDES,) * len(ROSTERS)
) -> Iterator[tuple[Vector, Vector]]:
    """DiLoCo as arXiv 2311.08105 has it: each replica begins each outer step with theta. `overrides` are in force."""
    like = Reference(config)
    state = OuterState(like.state.theta.copy(), config.outer_optimizer)
    replicas: dict[str, ModelReplica] = {}
    left_out: dict[str, Vector] = {}  # by those that took part in the outer step before
    tokens = 0
    for index, roster in enumerate(ROSTERS):
        sums, local = np.zeros_like(state.theta), np.empty_like(state.theta)
        payload = kernels.Payload(kernels.FORMATS[config.codec.kind], local.size)
        sent: dict[str, Vector] = {}
        share, left_out_before, left_out = np.float32(config.codec.error_feedback), left_out, {}
        total = 0
        for each in roster:
            if each.replica not in replicas:
                replicas[each.replica] = like.build_replica()
            replica = replicas[each.replica]
            inner_steps = replica.inner_steps(
                state.theta, index, each.samples, each.steps, tokens, overrides=overrides[index]
            )
            for _ in inner_steps:
                pass
            trained = inner_steps.trained
            replica.store(local)
            left_out[each.replica] = share * left_out_before.get(each.replica, np.zeros_like(local))
            kernels.quantize_difference(state.theta, local, payload, residual=left_out[each.replica])
            kernels.accumulate(payload, trained.tokens, sums)
            sent[each.replica] = decoded(payload)
            total += trained.tokens
        kernels.finish_average(sums, total, payload)
        for name in left_out if payload.format is kernels.SPARSE else ():
            left_out[name] += np.where(decoded(payload) == 0, sent[name], np.float32(0))
        state.apply(payload, index, overrides=overrides[index])
        tokens += total
        yield state.theta.copy(), state.momentum.copy()


@pytest.mark.parametrize(
    ("streaming", "codec"),
    [
        *(pytest.param({}, codec, marks=() if codec in QUICK else pytest.mark.thorough) for codec in kernels.FORMATS),
        ({"layers_per_fragment": 4, "embeddings": "ends", "alpha": 0.0}, "int8"),
    ],
)
def test_one_fragment_without_overlap_is_plain_diloco(
    small_content: dict[str, Any], codec: str, streaming: dict[str, Any]
) -> None:
    config = model_config(small_content, codec={"kind": codec}, streaming=streaming)
    reference = Reference(config)
    for roster, (theta, momentum) in zip(ROSTERS, algorithm_1(config), strict=True):
        reference.outer_step(roster)
        assert np.array_equal(reference.state.theta, theta)
        assert np.array_equal(reference.state.momentum, momentum)


def test_the_reference_steps_with_what_the_log_amends(small_content: dict[str, Any]) -> None:
    config = model_config(small_content)
    lowered = [
        Overrides(outer_learning_rate=0.4, outer_momentum=0.5),
        Overrides(outer_learning_rate=0.2, inner_learning_rate_factor=0.5, decay=Decay(after=2, outer_steps=2)),
    ]
    overrides = [NO_OVERRIDES, NO_OVERRIDES, *(lowered[index % 2] for index in range(2, len(ROSTERS)))]
    reference, states = Reference(config), list[Vector]()
    for roster, in_force, (theta, momentum) in zip(ROSTERS, overrides, algorithm_1(config, overrides), strict=True):
        reference.overrides = in_force
        reference.outer_step(roster)
        assert np.array_equal(reference.state.theta, theta)
        assert np.array_equal(reference.state.momentum, momentum)
        states.append(theta)
    plain = [theta for theta, _ in algorithm_1(config)]
    assert [np.array_equal(*both) for both in zip(states, plain, strict=True)] == [
        one == NO_OVERRIDES for one in overrides
    ]


def weights_of(reference: Reference, name: str) -> Vector:
    weights = np.zeros_like(reference.state.theta)
    replica = reference.members[name].replica
    assert isinstance(replica, ModelReplica)
    replica.store(weights)
    return weights


@pytest.mark.parametrize(
    "streaming",
    [
        {"layers_per_fragment": 2, "overlap": 1},
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ({"layers_per_fragment": 2}, {"overlap": 3}, {})),
    ],
    ids=str,
)
def test_with_alpha_1_each_replica_trains_as_if_it_were_alone(
    small_content: dict[str, Any], streaming: dict[str, Any]
) -> None:
    config = model_config(small_content, streaming=streaming | {"alpha": 1.0})
    reference = Reference(config)
    first = reference.state.theta.copy()
    for cycle in range(3):
        reference.outer_step((work("a", 16 * cycle), work("b", 16 * cycle + 8)))
    for number, name in enumerate("ab"):
        alone = reference.build_replica()
        alone.train(first, 0, (SampleRange(8 * number, 8 * number + 8),), 4)
        for cycle in (1, 2):
            start = 16 * cycle + 8 * number
            for _ in alone.inner_steps(None, cycle, (SampleRange(start, start + 8),), 4):
                pass
        weights = np.zeros_like(first)
        alone.store(weights)
        assert np.array_equal(weights, weights_of(reference, name))
    assert not np.array_equal(reference.state.theta, first)


def test_the_toys_mean_after_an_inner_step_is_exact(small_content: dict[str, Any]) -> None:
    """One inner step a cycle and SGD with a learning rate of 1 outside: gradient descent on the mean of the losses."""
    config = toy_config(small_content, Case(2, 0, 0.0, "fp16"))
    config = config.changed({"outer_optimizer": {"learning_rate": 1.0, "momentum": 0.0}})
    layout = Layout([(f"value {number}", ()) for number in range(len(by_hand.START))])
    theta = flat(layout, by_hand.START)
    algorithm = StreamingDiLoCo(config, layout, theta, lambda: cast(ModelReplica, Toy(layout)))
    target = np.average(list(by_hand.TARGETS.values()), axis=0, weights=list(by_hand.TOKENS.values()))
    expected = np.array(by_hand.START)
    for _ in range(3):
        algorithm.outer_step([replace(toy_work(name, Case(1, 0, 0.0, "fp16")), steps=1) for name in by_hand.TARGETS])
        expected -= by_hand.RATE * (expected - target)
        assert values(layout, algorithm.state.theta) == expected.tolist()


def test_an_inner_step_a_cycle_and_sgd_outside_is_data_parallel_local_sgd(small_content: dict[str, Any]) -> None:
    """theta is then the mean of what the replicas made of it in one step, and where SGD is inside, too, that of one
    worker with all their batches: but for what fp16 rounds."""
    changes = {
        "training": small_content["training"] | {"inner_steps": 1, "gradient_clip": 1e30},
        "inner_optimizer": {"kind": "torch", "name": "SGD", "learning_rate": 0.5, "rewarmup_steps": 0},
        "outer_optimizer": {"learning_rate": 1.0, "momentum": 0.0},
        "codec": {"kind": "fp16"},
    }
    config = model_config(small_content, 1, **changes)
    together = changes["training"] | {"batch_size": 4}
    reference, one = Reference(config), Reference(model_config(small_content, 1, **changes | {"training": together}))
    replicas = [reference.build_replica() for _ in range(2)]
    alone, theta = one.build_replica(), one.state.theta.copy()
    for index in range(4):
        before = reference.state.theta.copy()
        locals_ = [np.empty_like(before) for _ in replicas]
        for number, (replica, local) in enumerate(zip(replicas, locals_, strict=True)):
            replica.train(before, index, (SampleRange(4 * index + 2 * number, 4 * index + 2 * number + 2),), 1)
            replica.store(local)
        reference.outer_step((work("a", 4 * index, 2), work("b", 4 * index + 2, 2)))
        mean = (locals_[0] + locals_[1]) / 2
        largest = max(np.abs(before - local).max() for local in locals_)
        assert np.abs(reference.state.theta - mean).max() <= largest * 2.0**-10  # rounded twice, by half of 2^-10
        alone.train(theta, index, (SampleRange(4 * index, 4 * index + 4),), 1)
        alone.store(theta)
        moved = np.abs(theta - before).max()
        assert np.abs(reference.state.theta - theta).max() < 1e-2 * moved


@pytest.mark.parametrize(
    ("pattern", "codec"),
    [
        *(
            pytest.param("strided", codec, marks=() if codec in QUICK else pytest.mark.thorough)
            for codec in kernels.FORMATS
        ),
        ("sequential", "int8"),
        ("balanced", "int8"),
    ],
)
def test_streams_of_every_pattern_and_codec_learn(small_content: dict[str, Any], pattern: str, codec: str) -> None:
    streaming = {"layers_per_fragment": 2, "pattern": pattern, "overlap": 2}
    reference = Reference(model_config(small_content, codec={"kind": codec}, streaming=streaming))
    before = reference.held_out_loss()
    for cycle in range(4):
        reference.outer_step((work("a", 16 * cycle), work("b", 16 * cycle + 8)))
    # Four sparse averages have changed a sixteenth of all values at the most.
    assert reference.held_out_loss() < before - (0.05 if codec == "sparse" else 0.5)


def test_a_replica_that_was_away_is_as_good_as_a_new_one(small_content: dict[str, Any]) -> None:
    """It begins with theta, and nothing is left to be merged into it."""
    case = Case(2, 3, 0.5, "fp16")
    digests = []
    for name in ("b", "new"):
        algorithm = toy_algorithm(small_content, case)
        for roster in ("ab", "a"):
            algorithm.outer_step([toy_work(each, case) for each in roster])
        algorithm.outer_step([toy_work("a", case), replace(toy_work("b", case), replica=name)])
        digests.append(algorithm.outer_step([toy_work("a", case), replace(toy_work("b", case), replica=name)]))
    assert digests[0] == digests[1]


def test_a_replica_with_few_inner_steps_merges_before_it_is_asked_again(small_content: dict[str, Any]) -> None:
    """With an overlap of 3 and one inner step a cycle, the average would be due after two more averages."""
    merged: list[int] = []

    class Noting(Toy):
        def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
            super().merge(theta, fragment, alpha)
            merged.append(fragment)

    algorithm = toy_algorithm(small_content, Case(2, 3, 0.5, "fp16"), Noting)
    for cycle in range(4):
        algorithm.outer_step([replace(toy_work("a", Case(2, 3, 0.5, "fp16")), steps=1)])
        assert merged == [0, 1] * cycle


def test_a_step_that_is_skipped_counts(small_content: dict[str, Any]) -> None:
    """A fragment is taken after as many steps on every replica, whether they changed anything or not."""
    config = model_config(small_content, streaming={"layers_per_fragment": 2})
    reference = Reference(config)
    reference.outer_step((work("a", 0),))
    replica = reference.members["a"].replica
    assert isinstance(replica, ModelReplica)
    calls = itertools.count(1)

    def stumble(module: Any, inputs: Any, output: Any) -> None:
        if next(calls) == 2:
            output.logits = output.logits * torch.nan

    replica.model.register_forward_hook(stumble)
    reference.outer_step((work("a", 8),))
    assert np.isfinite(reference.state.theta).all()
    assert next(calls) == 5


def test_a_run_says_how_large_its_fragments_are(small_content: dict[str, Any]) -> None:
    config = model_config(small_content, streaming={"layers_per_fragment": 2})
    with pytest.raises(ManifestError, match=r"streaming\.sizes is missing") as caught:
        Run.sign(config, Identity.generate())
    assert "diloco-peer run create" in str(caught.value.remedy)
    named = with_sizes_named(config)
    assert Run.sign(named, Identity.generate()).settings.fragments == len(named.streaming.sizes or ())
    for streaming in ({"overlap": 1}, {"alpha": 0.5}, {"pattern": "sequential"}):
        assert Run.sign(model_config(small_content, streaming=streaming), Identity.generate()).settings.fragments == 1
