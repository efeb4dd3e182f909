"""What the benchmark of learning compares is what it says; how well it learns is for the benchmark itself to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.convergence import METHODS, PANELS, QUICK, plot, row
from benchmarks.freezing import FreezingReference
from benchmarks.methods import EXACT, Course, Method, train, warm_start
from opendiloco.data.sample_order import SampleOrder
from opendiloco.shared_memory import Vector
from opendiloco.training.reference import Reference, Work
from peers.values.leases import SampleRange

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def warm() -> Vector:
    return warm_start(QUICK, 0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples that inner loops ask for."""
    numbers: list[int] = []
    expect = SampleOrder.expect

    def note(self: Any, wanted: Any) -> None:
        numbers.extend(wanted.tolist())
        expect(self, wanted)

    monkeypatch.setattr(SampleOrder, "expect", note)
    return numbers


@pytest.mark.parametrize("kind", ["replicas", "batches", "steps"])
def test_all_methods_train_the_same_samples_once(kind: Any, warm: Vector, trained: list[int]) -> None:
    course = train(Method("any", kind), QUICK, 0, warm)
    used = QUICK.warm_steps * QUICK.replicas * QUICK.batch_size
    total = QUICK.steps * QUICK.tokens_per_step
    assert sorted(trained) == list(range(used, used + total // QUICK.sequence_length))
    assert [tokens for tokens, _ in course.curve] == [0, total / 2, total]


def test_a_worker_with_its_share_trains_a_part_of_them(warm: Vector, trained: list[int]) -> None:
    course = train(Method("any", "alone"), QUICK, 0, warm)
    assert len(set(trained)) == QUICK.steps * QUICK.batch_size
    assert course.curve[-1][0] == QUICK.steps * QUICK.tokens_per_step


@pytest.mark.parametrize("method", [Method("any", times=2, slow=2), Method("any", times=2, late=2)])
def test_uneven_replicas_train_as_many_tokens_in_more_outer_steps(
    method: Method, warm: Vector, trained: list[int]
) -> None:
    course = train(method, QUICK, 0, warm)
    assert method.adapt(QUICK).outer_steps > QUICK.outer_steps
    assert len(trained) == len(set(trained)), "each sample once"
    tokens = len(trained) * QUICK.sequence_length
    assert tokens == pytest.approx(QUICK.steps * QUICK.tokens_per_step, rel=0.1)
    assert course.curve[-1][0] == QUICK.steps * QUICK.tokens_per_step


def test_of_two_late_replicas_one_is_part_of_each_outer_step(warm: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    ages: list[dict[str, int]] = []
    outer_step = Reference.outer_step

    def note(self: Reference, roster: Sequence[Work]) -> bytes:
        ages.append({work.replica: work.age for work in roster})
        return outer_step(self, roster)

    monkeypatch.setattr(Reference, "outer_step", note)
    train(Method("any", times=2, late=2), QUICK, 0, warm)
    assert ages == [{"0": 0, "1": 0}, {"0": 0, "1": 0, "2": 1}, {"0": 0, "1": 0, "3": 1}]


def test_what_is_frozen_stays_as_it_is(warm: Vector) -> None:
    method = next(method for method in METHODS if method.freezes)
    algorithm = FreezingReference(QUICK.config(0, QUICK.steps, **method.changes))
    changed: list[set[int]] = []
    for first in range(0, 48 * len(algorithm.state.fragments), 48):
        before = algorithm.state.theta.copy()
        algorithm.outer_step(
            [Work(name, (SampleRange(first + at, first + at + 24),), 6) for name, at in (("a", 0), ("b", 24))]
        )
        parts = enumerate(algorithm.state.fragments)
        changed.append(
            {number for number, part in parts if not np.array_equal(before[part], algorithm.state.theta[part])}
        )
    assert changed == [{number} for number in range(len(algorithm.state.fragments))]


def test_all_begin_with_the_same_weights_wherever_fragments_lie(warm: Vector) -> None:
    begun = [train(method, QUICK, 0, warm).curve[0][1] for method in METHODS[1:10:4]]  # one whole, one in fragments
    assert begun == [pytest.approx(begun[0], rel=1e-6)] * 3


def test_diloco_without_a_codec_is_what_fp16_comes_close_to(warm: Vector) -> None:
    config = QUICK.config(0, QUICK.steps, streaming={"layers_per_fragment": 3, "overlap": 2}, codec={"kind": "fp16"})
    exact, coded = Reference(config, codec=EXACT), Reference(config)
    roster = [Work(name, (SampleRange(first, first + 24),), 6) for name, first in (("a", 0), ("b", 24))]
    before = exact.state.theta.copy()
    for _ in range(2):
        exact.outer_step(roster)
        coded.outer_step(roster)
    moved = np.abs(exact.state.theta - before).max()
    assert np.abs(exact.state.theta - coded.state.theta).max() < 0.01 * moved


def test_peaks_fall_with_fragments_and_codecs(warm: Vector) -> None:
    def sent(**changes: Any) -> tuple[int, int]:
        course = train(Method("any", changes=changes), QUICK, 0, warm)
        return course.peak_bytes, course.sent_bytes

    whole, parts = sent(), sent(streaming={"layers_per_fragment": 3})
    four_bits = sent(streaming={"layers_per_fragment": 3}, codec={"kind": "e3m0"})
    assert parts[0] < 0.5 * whole[0]
    assert parts[1] == pytest.approx(whole[1], rel=0.01)
    assert four_bits[0] == pytest.approx(parts[0] / 2, rel=0.02)


def test_losses_are_compared_seed_by_seed() -> None:
    def courses(*losses: float) -> list[Course]:
        return [Course(((0.0, 5.0), (1000.0, loss)), 2000, 3_000_000) for loss in losses]

    measured = {method.name: courses(2.0, 1.0) for method in METHODS} | {"DiLoCo int8": courses(2.2, 1.2)}
    assert row(measured, "DiLoCo int8") == {
        "method": "DiLoCo int8",
        "loss": pytest.approx(1.7),
        "spread": pytest.approx(1.0),
        "% above DiLoCo fp32": 15.0,
        "from": 10.0,
        "to": 20.0,
        "most at once, kB": 2.0,
        "sent, MB": 3.0,
    }
    root = ElementTree.fromstring(plot(measured))
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == sum(len(methods) for methods in PANELS.values())
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= float(root.attrib["width"])
            assert 0 <= y <= float(root.attrib["height"])
