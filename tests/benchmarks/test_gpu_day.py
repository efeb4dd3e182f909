"""A day on a GPU runs each step in its time, and what fails stops nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import convergence, device_memory, gpu_checks, gpu_day, training
from benchmarks.gpu_day import Step, run, steps_of


@pytest.mark.parametrize(
    ("code", "seconds", "outcome", "last"),
    [
        ("print('verdict: good'); print('more')", 60, "done", "verdict: good"),
        ("print('a'); raise SystemExit(3)", 60, "exit code 3", "a"),
        ("import time; print('begun', flush=True); time.sleep(600)", 0.5, "out of time", "KeyboardInterrupt"),
    ],
)
def test_a_step_is_told_as_it_ended(code: str, seconds: float, outcome: str, last: str, tmp_path: Path) -> None:
    row = run(Step("one", seconds, [sys.executable, "-c", code]), seconds, tmp_path)
    assert row["outcome"] == outcome
    # A process that is ended before Python has begun to run its code says nothing.
    assert row["last line"] in (last, "") if outcome == "out of time" else row["last line"] == last


@pytest.mark.parametrize("is_quick", [False, True])
def test_each_benchmark_knows_the_options_that_it_is_given(is_quick: bool, tmp_path: Path) -> None:
    commands: dict[str, click.Command] = {
        f"benchmarks.{module.__name__.partition('.')[2]}": module.main
        for module in (convergence, device_memory, gpu_checks, training)
    }
    for step in steps_of("cuda", is_quick, tmp_path):
        _, _, name, *arguments = map(str, step.command)
        if name in commands:
            commands[name].make_context(name, arguments)


def test_no_step_begins_that_has_no_time_left(tmp_path: Path) -> None:
    figures = tmp_path / "day.json"
    call = ["--out", str(tmp_path / "day"), "--seconds", "5", "--json", str(figures)]
    assert CliRunner().invoke(gpu_day.main, call, catch_exceptions=False).exit_code == 0
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert {row["outcome"] for row in rows} == {"no time left"}
    wrong = CliRunner().invoke(gpu_day.main, [*call, "--only", "speed"])
    assert wrong.exit_code == 2
    assert "there is no step 'speed'" in wrong.output


@pytest.mark.thorough
def test_a_device_is_checked_beside_the_cpu() -> None:
    done = CliRunner().invoke(gpu_checks.main, ["--device", "cpu", "--values", "400000", "--inner-steps", "1"])
    for what in ("the difference of weights", "theta back bit for bit", "moments back bit for bit"):
        assert f"{what}: " in done.output
        assert next(line for line in done.output.splitlines() if what in line).endswith("met"), done.output
