"""A program that runs all GPU benchmarks in nine minutes: `python -m benchmarks.gpu_day --out FOLDER`.

A GPU may be available for a few minutes only. This program runs the benchmarks that need one, the most informative
first, each with its own time limit. The next step starts even if one fails or runs out of time. The folder receives
their output, and their figures as JSON, while they run. On a CPU, `--quick` checks that all of them run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.reporting import json_option, report

ROOT = Path(__file__).parent.parent
LEAST_SECONDS = 10.0
"""Remaining seconds below which no step is started."""
ENDING_SECONDS = 10.0
"""Seconds that a step has after its time limit to end its processes."""


@dataclass(frozen=True)
class Step:
    """A benchmark's command line, and its time limit in seconds."""

    name: str
    seconds: float
    command: Sequence[object]


def steps_of(device: str, is_quick: bool, out: Path) -> list[Step]:
    """Return the benchmarks to run as steps, the most informative first."""
    module = [sys.executable, "-m"]

    def benchmark(name: str, what: str, seconds: float, *options: object) -> Step:
        figures = out / f"{name}.json"
        return Step(name, seconds, [*module, f"benchmarks.{what}", "--device", device, "--json", figures, *options])

    def training(name: str, run: str, seconds: float, *options: object) -> Step:
        turns = [
            "--steps",
            2 if is_quick else 8,
            "--repetitions",
            1 if is_quick else 4,
            "--data",
            "stdlib",
            "--by-hand",
        ]
        run_file = ROOT / "examples" / f"{'tiny' if is_quick else run}.toml"
        return benchmark(name, "training", seconds, "--run", run_file, *turns, *options)

    run_file = ROOT / "examples" / ("tiny.toml" if is_quick else "llama-150m.toml")
    rows = ["data-parallel", "DiLoCo fp32", "DiLoCo int8", "Streaming e3m0, τ = 1"]
    wanted = [option for row in rows for option in ("--only", row)]
    size = ["--size", "quick" if is_quick else "1m", "--seeds", 1]
    return [
        benchmark("checks", "gpu_checks", 60, "--values", 2_000_000 if is_quick else 200_000_000),
        training("training-150m", "llama-150m", 150),
        Step(
            "swarm",
            120,
            [*module, "opendiloco.cli", "demo", "--plain", "--peers", 2, "--minutes", 1.5, "--out", out / "demo"],
        ),
        training("training-150m-32", "llama-150m", 120, "--micro-batch", 2 if is_quick else 32),
        benchmark("memory", "device_memory", 60, "--run", run_file),
        training("training-15m", "llama-15m", 60),
        benchmark("convergence", "convergence", 240, *size, "--results", out / "convergence.jsonl", *wanted),
    ]


def run(step: Step, seconds: float, out: Path) -> dict[str, Any]:
    """Run a step for at most `seconds` seconds, end all its processes, and return its row of the table."""
    began = time.monotonic()
    with (out / f"{step.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in step.command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            outcome = f"exit code {code}" if (code := process.wait(seconds)) else "done"
        except subprocess.TimeoutExpired:
            outcome = "out of time"
        finally:
            end_session(process)
    lines = (out / f"{step.name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = next((line for line in reversed(lines) if line.startswith("verdict: ")), lines[-1] if lines else "")
    return {"step": step.name, "outcome": outcome, "seconds": time.monotonic() - began, "last line": last[:90]}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT (as Ctrl-C does) to a step's process, wait at most 10 seconds for its end, and kill the rest of its
    session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for the results.")
@click.option("--seconds", default=540.0, show_default=True, help="Time limit of all steps together.")
@click.option("--only", multiple=True, metavar="NAME", help="Run this step alone (may be given several times).")
@click.option("--quick", is_flag=True, help="Only check that it runs, with a tiny model and few steps.")
@json_option
def main(device: str, out: Path, seconds: float, only: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    steps = steps_of(device, quick, out.resolve())
    if unknown := set(only) - {step.name for step in steps}:
        known = ", ".join(step.name for step in steps)
        raise click.BadParameter(f"there is no step {min(unknown)!r}. There are: {known}.", param_hint="--only")
    end, rows = time.monotonic() + seconds, []
    for step in [step for step in steps if not only or step.name in only]:
        left = min(step.seconds, end - time.monotonic())
        if left < LEAST_SECONDS:
            rows.append({"step": step.name, "outcome": "no time left", "seconds": 0.0, "last line": ""})
            continue
        click.echo(f"{step.name}: {left:.0f} s at most", err=True)
        rows.append(run(step, left, out))
    report(f"a day on {device}, in {seconds:g} seconds", rows, [], json_file)


if __name__ == "__main__":
    main()
