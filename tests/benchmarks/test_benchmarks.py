"""Benchmarks run, print one table with a verdict, and write the same figures; what they measure is theirs to judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import accuracy, checkpoint, codecs, training
from benchmarks.reporting import Bar, report, speed_ratio, time_interleaved
from opendiloco.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("command", "arguments", "names"),
    [
        (codecs.main, ["--sizes", "0.25", "--rounds", "1", "--no-compile"], {"ours: quantize int8", codecs.LIMIT}),
        (accuracy.main, ["--run", str(ROOT / "examples/tiny.toml"), "--outer-steps", "1"], {"e3m0", "torch bf16"}),
        (checkpoint.main, ["--sizes", "0.25", "--rounds", "1"], {checkpoint.OURS, checkpoint.SAFETENSORS}),
    ],
    ids=["codecs", "accuracy", "checkpoint"],
)
def test_a_benchmark_reports(command: click.Command, arguments: Sequence[str], names: set[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = CliRunner().invoke(command, [*arguments, "--json", str(figures)], catch_exceptions=False)
    assert done.output.strip().splitlines()[-1].startswith("verdict: ")
    content = json.loads(figures.read_text())
    assert names <= {next(iter(row.values())) for row in content["rows"]}
    assert all(bar["ratio"] > 0 for bar in content["bars"])


@pytest.mark.parametrize(
    ("asked", "device", "bar"), [("cuda", "cuda:0", 0.98), ("cuda:1", "cuda:1", 0.98), ("cpu", "cpu", 0.97)]
)
def test_both_train_on_one_device(asked: str, device: str, bar: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volunteer that is told "cuda" would train on all GPUs."""
    machines = list[training.Machine]()

    async def measure(config: RunConfig, machine: training.Machine, repetitions: int) -> training.Measured:
        machines.append(machine)
        turns = {name: training.Turns([1.0] * repetitions) for name in (training.BARE, training.VOLUNTEER)}
        return training.Measured(turns, 1_000_000)

    monkeypatch.setattr(training, "measure", measure)
    run = str(ROOT / "examples" / "tiny.toml")
    done = CliRunner().invoke(training.main, ["--run", run, "--device", asked], catch_exceptions=False)
    [machine] = machines
    assert machine.bare_arguments[:2] == machine.volunteer_arguments[:2] == ["--device", device]
    assert f"on {device}:" in done.output
    assert str(bar) in done.output


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    seconds = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert [len(each) for each in seconds.values()] == [2, 2]


def test_ratios_are_medians_over_rounds_in_which_both_ran() -> None:
    assert speed_ratio({"ours": [1.0, 2.0, 1.0], "theirs": [2.0, 2.0]}, "ours", "theirs") == 1.5


def test_a_missed_bar_is_named_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    report("title", [{"what": "x", "figure": 1.25, "none": None}], [Bar("a", 2.0, 1.0), Bar("b", 0.5, 1.0)], None)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "verdict: 1 of 2 bars MISSED: b: 0.50, bar 1: MISSED"
