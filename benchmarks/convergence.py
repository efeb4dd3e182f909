"""How well DiLoCo learns, in all its forms: `python -m benchmarks.convergence`.

A small Llama is trained on the source of Python's standard library, byte by byte, by several methods: from the same
warm weights, on the same samples, for as many tokens, once for each seed (of the initial weights and of the samples'
order). What is compared is the loss of theta on held-out text, seed by seed. Each training runs in one process.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from benchmarks.methods import EXACT, Course, Method, Setting, train, warm_start
from benchmarks.plots import Panel, Point, svg
from benchmarks.reporting import Bar, json_option, report
from opendiloco.shared_memory import Vector

MUON = {
    "kind": "muon",
    "learning_rate": Setting.learning_rate,
    "scale": "match_rms_adamw",
    "adamw": {"learning_rate": Setting.learning_rate},
}


def streaming(overlap: int, **changes: Any) -> dict[str, Any]:
    return changes | {"streaming": {"layers_per_fragment": Setting.layers // 2, "overlap": overlap}}


E3M0: dict[str, Any] = {"codec": {"kind": "e3m0"}}
# Error feedback stands for the outer momentum, as in SparseLoCo.
SPARSE = {"codec": {"kind": "sparse"}, "outer_optimizer": {"learning_rate": 2.0, "momentum": 0.0}}
# One block after the other, from the first one on, and plain averages, as in the paper.
FEDPART = {
    "streaming": {"layers_per_fragment": 1, "pattern": "sequential", "embeddings": "ends"},
    "outer_optimizer": {"learning_rate": 1.0, "momentum": 0.0},
}
ASYNCHRONOUS: dict[str, Any] = {"rounds": {"policy": "asynchronous"}}
DELAYED = ASYNCHRONOUS | {"outer_optimizer": {**Setting().outer, "momentum_every": 2}}
METHODS = (
    Method("one worker, all tokens", "steps"),
    Method("data-parallel", "batches"),
    Method("data-parallel, Muon", "batches", {"inner_optimizer": MUON}),
    Method("one worker, its share of tokens", "alone"),
    Method("DiLoCo fp32", idea={"codec": EXACT}),
    Method("DiLoCo int8"),
    Method("DiLoCo e3m0", changes=E3M0),
    Method("DiLoCo int8, Muon", changes={"inner_optimizer": MUON}),
    Method("Streaming int8, τ = 0", changes=streaming(0)),
    Method("Streaming int8, τ = 1", changes=streaming(1)),
    Method("Streaming int8, τ = 5", changes=streaming(5)),
    Method("Streaming int8, τ = 1 and 5", changes=streaming(1), overlaps=(1, 5)),
    Method("Streaming e3m0, τ = 1", changes=streaming(1, **E3M0)),
    Method("DiLoCo sparse", changes=SPARSE),
    Method("FedPart int8", changes=FEDPART, freezes=True),
    Method("4 replicas int8", times=2),
    Method("4 replicas fp32", idea={"codec": EXACT}, times=2),
    Method("4 replicas fp32, one often absent", absent=True, idea={"codec": EXACT}, times=2),
    Method("4 replicas int8, two with half the steps", times=2, slow=2),
    Method("4 replicas int8, two late", changes=ASYNCHRONOUS, times=2, late=2),
    Method("4 replicas int8, two late, momentum every 2", changes=DELAYED, times=2, late=2),
)
BASE = "DiLoCo fp32"
BARS = (
    ("DiLoCo int8", BASE, 0.998),
    ("DiLoCo e3m0", BASE, 0.99),
    ("Streaming e3m0, τ = 1", BASE, 0.99),
    ("Streaming int8, τ = 0", "DiLoCo int8", 0.995),
    ("Streaming int8, τ = 1", "DiLoCo int8", 0.995),
)
"""A method, the one that it is held against, and how much of that one's loss its own may be at the most, inverted."""
PANELS = {
    "workers": {
        "data-parallel": "data-parallel",
        "one, all": "one worker, all tokens",
        "one, share": "one worker, its share of tokens",
        "DiLoCo": BASE,
    },
    "codecs": {"fp32": BASE, "int8": "DiLoCo int8", "e3m0": "DiLoCo e3m0", "e3m0, τ = 1": "Streaming e3m0, τ = 1"},
    "streaming, int8": {"DiLoCo": "DiLoCo int8"} | {f"τ = {tau}": f"Streaming int8, τ = {tau}" for tau in (0, 1, 5)},
}
QUICK = Setting(
    hidden_size=16, sequence_length=32, inner_steps=6, outer_steps=2, warm_steps=6, windows=8, evaluations=2, warmup=2
)

Courses = Mapping[str, Sequence[Course]]
"""Of each method, what came of it with each seed."""
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Training:
    """One training that is to be done, in whatever process."""

    method: Method
    setting: Setting
    seed: int
    warm: Vector


def make_warm(task: tuple[Setting, int]) -> Vector:
    torch.set_num_threads(1)
    return warm_start(*task)


def make_course(task: Training) -> Course:
    torch.set_num_threads(1)
    course = train(task.method, task.setting, task.seed, task.warm)
    click.echo(f"seed {task.seed}: {task.method.name}: {course.loss:.4f}", err=True)
    return course


@contextmanager
def spread_over(jobs: int) -> Iterator[Callable[[Callable[[Task], Result], Iterable[Task]], Iterable[Result]]]:
    """Yield what `map` is, with so many processes; with one job it is `map`."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def measure(setting: Setting, seeds: int, jobs: int) -> Courses:
    with spread_over(jobs) as each:
        warm = list(each(make_warm, [(setting, seed) for seed in range(seeds)]))
    tasks = [Training(method, setting, seed, warm[seed]) for seed in range(seeds) for method in METHODS]
    with spread_over(jobs) as each:
        done = list(each(make_course, tasks))
    return {method.name: done[number :: len(METHODS)] for number, method in enumerate(METHODS)}


def ratios(courses: Courses, name: str, base: str) -> list[float]:
    """Return a method's loss as a part of another one's, with each seed."""
    return [own.loss / other.loss for own, other in zip(courses[name], courses[base], strict=True)]


def row(courses: Courses, name: str) -> dict[str, Any]:
    """Return a line of the table. `spread`, `from` and `to` are over the seeds."""
    losses = [course.loss for course in courses[name]]
    against = [100 * (ratio - 1) for ratio in ratios(courses, name, BASE)]
    return {
        "method": name,
        "loss": statistics.mean(losses),
        "spread": max(losses) - min(losses),
        f"% above {BASE}": round(statistics.mean(against), 2),
        "from": round(min(against), 2),
        "to": round(max(against), 2),
        "most at once, kB": courses[name][0].peak_bytes / 1e3,
        "sent, MB": courses[name][0].sent_bytes / 1e6,
    }


def plot(courses: Courses) -> str:
    """Return means over the seeds as SVG."""

    def curve(name: str) -> list[Point]:
        points = zip(*(course.curve for course in courses[name]), strict=True)
        return [(tokens[0][0] / 1e3, statistics.mean(loss for _, loss in tokens)) for tokens in points]

    level = "data-parallel in the end", curve("data-parallel")[-1][1]
    panels = [
        Panel(title, {label: curve(name) for label, name in lines.items()}, level) for title, lines in PANELS.items()
    ]
    lowest = min(loss for panel in panels for line in panel.lines.values() for _, loss in line)
    bottom = min(0.97 * level[1], lowest)
    return svg(panels, "thousand tokens since the warm start; loss on held-out text, nats per byte", bottom)


@click.command(help=__doc__)
@click.option("--seeds", default=3, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Trainings at the same time, each on one core.")
@click.option("--quick", is_flag=True, help="See that it runs: a tiny model, and a few steps.")
@json_option
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw an SVG here.")
def main(seeds: int, jobs: int, quick: bool, json_file: Path | None, plot_file: Path | None) -> None:
    setting = QUICK if quick else Setting()
    courses = measure(setting, seeds, jobs)
    bars = [
        Bar(f"{base}'s loss / that of {name}", 1 / statistics.mean(ratios(courses, name, base)), least, digits=4)
        for name, base, least in BARS
    ]
    title = (
        f"convergence: {setting.replicas} replicas, {setting.outer_steps} outer steps of {setting.inner_steps} inner "
        f"steps, {setting.steps * setting.tokens_per_step:,} tokens, {seeds} seeds"
    )
    report(title, [row(courses, method.name) for method in METHODS], bars, json_file)
    if plot_file:
        plot_file.write_text(plot(courses), encoding="utf-8")


if __name__ == "__main__":
    main()
