"""The convergence benchmark compares what it says that it compares; how well methods learn is its own verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.convergence import BASE, DATA_PARALLEL, PANELS, SETTINGS, bars_of, interval, main, methods_of, plot, row
from benchmarks.methods import EXACT, Curve, ExactAverageReference, Method, key_of, train
from opendiloco.data.sample_order import SampleOrder
from opendiloco.training.reference import Reference, Work
from peers.values.leases import SampleRange

pytestmark = pytest.mark.thorough
QUICK = SETTINGS["quick"]
DILOCO = Method("any", inner_steps=6)


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


@pytest.mark.parametrize("kind", ["replicas", "batches"])
@pytest.mark.parametrize("replicas", [2, 8])
def test_all_methods_train_the_same_samples_once(kind: Any, replicas: int, trained: list[int]) -> None:
    curve = train(Method("any", kind, replicas=replicas, inner_steps=6), QUICK, 0)
    assert sorted(trained) == list(range(QUICK.tokens // QUICK.sequence_length))
    assert [tokens for tokens, _ in curve.points] == [0, QUICK.tokens / 2, QUICK.tokens]


def test_a_worker_with_its_share_trains_a_part_of_them(trained: list[int]) -> None:
    train(Method("any", "alone", inner_steps=6), QUICK, 0)
    assert len(set(trained)) == QUICK.steps * QUICK.windows_per_step // 2


@pytest.mark.parametrize("uneven", [{"slow": 2}, {"late": 2}])
def test_uneven_replicas_train_as_many_tokens_in_more_outer_steps(uneven: Any, trained: list[int]) -> None:
    method = Method("any", replicas=4, inner_steps=4, **uneven)
    train(method, QUICK, 0)
    assert method.outer_steps(QUICK) == 4
    assert len(trained) == len(set(trained)), "each sample once"
    assert len(trained) * QUICK.sequence_length == pytest.approx(QUICK.tokens, rel=0.1)


def test_of_two_late_replicas_one_is_part_of_each_outer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ages: list[dict[str, int]] = []
    outer_step = Reference.outer_step

    def note(self: Reference, roster: Sequence[Work]) -> bytes:
        ages.append({work.replica: work.age for work in roster})
        return outer_step(self, roster)

    monkeypatch.setattr(Reference, "outer_step", note)
    train(Method("any", replicas=4, inner_steps=6, late=2), QUICK, 0)
    assert ages == [{"0": 0, "1": 0}, {"0": 0, "1": 0, "2": 1}, {"0": 0, "1": 0, "3": 1}]


def test_all_begin_with_the_same_weights_wherever_fragments_lie() -> None:
    streaming = {"streaming": {"layers_per_fragment": 2}}
    begun = [
        train(method, QUICK, 0).points[0][1]
        for method in (Method("any", "batches", inner_steps=6), DILOCO, Method("any", inner_steps=6, changes=streaming))
    ]
    assert begun == [pytest.approx(begun[0], rel=1e-6)] * 3


def two_steps(reference: Reference) -> np.ndarray[Any, Any]:
    """Return theta after two outer steps of two replicas."""
    for _ in range(2):
        reference.outer_step([Work(name, (SampleRange(at, at + 48),), 6) for name, at in (("a", 0), ("b", 48))])
    return reference.state.theta


def test_codecs_are_exact_where_a_row_says_so() -> None:
    def config(kind: str) -> Any:
        changes = {"streaming": {"layers_per_fragment": 2, "overlap": 2}, "codec": {"kind": kind}}
        return QUICK.config(0, QUICK.steps, 6, 8, changes)

    exact, begun = Reference(config("fp16"), codec=EXACT), Reference(config("fp16")).state.theta
    moved = np.abs(two_steps(exact) - begun).max()
    error = {
        name: np.abs(two_steps(reference) - exact.state.theta).max() / moved
        for name, reference in (
            ("fp16", Reference(config("fp16"))),
            ("e3m0", Reference(config("e3m0"))),
            ("average in fp32", ExactAverageReference(config("e3m0"))),
        )
    }
    assert error["fp16"] < 0.01
    assert 0.01 < error["average in fp32"] < error["e3m0"]


def test_peaks_fall_with_fragments_and_codecs() -> None:
    def sent(**changes: Any) -> tuple[int, int]:
        curve = train(Method("any", changes=changes, inner_steps=6), QUICK, 0)
        return curve.peak_bytes, curve.sent_bytes

    whole, parts = sent(), sent(streaming={"layers_per_fragment": 2})
    four_bits = sent(streaming={"layers_per_fragment": 2}, codec={"kind": "e3m0"})
    assert parts[0] < 0.6 * whole[0]
    assert parts[1] == pytest.approx(whole[1], rel=0.01)
    assert four_bits[0] == pytest.approx(parts[0] / 2, rel=0.02)


def curves(*losses: float) -> dict[int, Curve]:
    return {seed: Curve(((0.0, 5.0), (1e6, loss)), 2000, 3_000_000) for seed, loss in enumerate(losses)}


def test_losses_are_compared_seed_by_seed() -> None:
    measured = {BASE: curves(2.0, 1.0, 4.0), "DiLoCo int8": curves(2.2, 1.2)}
    line = row(measured, "DiLoCo int8")
    assert line == {
        "method": "DiLoCo int8",
        "seeds": 2,
        "loss": pytest.approx(1.7),
        "% above DiLoCo fp32": 15.0,
        "95 % interval": "-48.53 … +78.53",  # 15 ± 12.706 · 7.071 / √2
        "most at once, kB": 2.0,
        "sent, MB": 3.0,
    }
    one = interval({BASE: curves(2.0), "DiLoCo int8": curves(2.2)}, "DiLoCo int8", BASE)
    assert one is not None
    assert one[0] == pytest.approx(10)
    assert math.isnan(one[1]), "one seed has no interval"
    assert interval(measured, "DiLoCo e3m0", BASE) is None


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [((2.0, 2.0, 2.0), "met"), ((2.3, 2.3, 2.3), "MISSED"), ((2.0, 2.01, 1.99), "UNDECIDED"), ((2.0,), None)],
)
def test_a_bar_is_met_by_the_whole_interval(losses: tuple[float, ...], verdict: str | None) -> None:
    bars = bars_of({BASE: curves(*[2.0] * len(losses)), "DiLoCo int8": curves(*losses)})
    assert [str(bar).rpartition(": ")[2] for bar in bars] == ([] if verdict is None else [verdict])


def test_a_plot_has_a_line_for_each_method_that_was_trained() -> None:
    names = {name for lines in PANELS.values() for name in lines.values()} - {"DiLoCo e3m0"}
    root = ElementTree.fromstring(plot({name: curves(2.0, 1.0) for name in names | {DATA_PARALLEL}}))
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == sum(len(methods) for methods in PANELS.values()) - 1
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= float(root.attrib["width"])
            assert 0 <= y <= float(root.attrib["height"])


def test_results_are_kept_and_not_trained_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    call = ["--size", "quick", "--seeds", "1", "--results", str(results), "--only", DATA_PARALLEL]
    assert CliRunner().invoke(main, call).exit_code == 0
    before = results.read_text(encoding="utf-8")
    printed = CliRunner().invoke(main, [*call, "--only", BASE, "--json", str(tmp_path / "table.json")])
    assert printed.exit_code == 0, printed.output
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [line["method"] for line in table["rows"]] == [DATA_PARALLEL, BASE], "rows without a result are left out"
    assert "and 6 inner steps" in table["title"]
    kept = results.read_text(encoding="utf-8")
    assert kept.startswith(before)
    assert len(kept.splitlines()) == 2
    assert CliRunner().invoke(main, [*call, "--no-training"]).exit_code == 0
    wrong = CliRunner().invoke(main, [*call, "--only", "Adam"])
    assert wrong.exit_code == 2
    assert "there is no 'Adam'" in wrong.output


def test_a_result_belongs_to_its_method_and_setting() -> None:
    methods = methods_of(QUICK)
    keys = {key_of(method, setting) for setting in SETTINGS.values() for method in methods}
    assert len(keys) == len(SETTINGS) * len(methods)


def test_the_reference_trains_on_the_device_it_is_given() -> None:
    reference = Reference(QUICK.config(0, 6, 6, 8, {}), device=torch.device("cpu"))
    assert {parameter.device.type for parameter in reference.build_replica().model.parameters()} == {"cpu"}
