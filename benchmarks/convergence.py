"""The held-out loss that DiLoCo's variants and their baselines reach: `python -m benchmarks.convergence`.

Several methods train a small Llama from scratch on the source of Python's standard library, byte by byte. They use the
same samples and the same number of tokens, once for each seed (of the initial weights and of the samples' order). The
loss of theta on held-out text is compared seed by seed. Each training runs in one process. Its result is added to
--results, and results that exist there are not computed again.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.methods import EXACT, Curve, Method, TrainingSetup, key_of, train
from benchmarks.plots import Panel, Point, svg
from benchmarks.reporting import Bar, json_option, report

SETTINGS = {
    "1m": TrainingSetup(),
    "small": TrainingSetup(hidden_size=64, layers=4, sequence_length=64),
    # The setting "15m" trains 20 tokens for each parameter, as Chinchilla's law advises. This number of tokens needs a
    # larger corpus than the default one.
    "15m": TrainingSetup(
        hidden_size=384, layers=8, heads=6, windows_per_step=128, sequence_length=512, steps=4500, precision="bf16"
    ),
    "300m": TrainingSetup(
        hidden_size=1024,
        layers=24,
        heads=16,
        windows_per_step=512,
        sequence_length=1024,
        steps=11500,
        warmup=1000,
        learning_rate=6e-4,
        precision="bf16",
    ),
    "quick": TrainingSetup(
        hidden_size=16,
        layers=3,
        windows_per_step=16,
        sequence_length=32,
        steps=12,
        warmup=2,
        held_out_windows=8,
        evaluations=2,
    ),
}
E3M0: dict[str, Any] = {"codec": {"kind": "e3m0"}}
SPARSE_ALLOWED: dict[str, Any] = {"codec": {"contributions": ["int8", "e2m1", "sparse"]}}


def muon(setting: TrainingSetup) -> dict[str, Any]:
    rate = setting.learning_rate
    sizes = {"learning_rate": rate, "scale": "match_rms_adamw", "adamw": {"learning_rate": rate}}
    return {"inner_optimizer": {"kind": "muon", **sizes}}


def methods_of(setting: TrainingSetup) -> list[Method]:
    """Return the methods to train, in the order of training: the most important first. Each method has a row in the
    table."""
    blocks = -(-setting.layers // 2)  # layers in each of two fragments; a third fragment has the embeddings

    def streaming(overlap: int, alpha: float | None = None, **changes: Any) -> dict[str, Any]:
        merged = {} if alpha is None else {"alpha": alpha}
        return changes | {"streaming": {"layers_per_fragment": blocks, "overlap": overlap, **merged}}

    def outer(learning_rate: float, momentum: float) -> Method:
        table = {"outer_optimizer": {"learning_rate": learning_rate, "momentum": momentum}}
        return Method(f"DiLoCo fp32, outer {learning_rate:g} and {momentum:g}", changes=table, idea={"codec": EXACT})

    methods = [
        Method(DATA_PARALLEL, "batches"),
        Method(BASE, idea={"codec": EXACT}),
        Method("DiLoCo int8"),
        Method("Streaming e3m0, τ = 1", changes=streaming(1, **E3M0)),
        outer(0.4, 0.9),
        outer(0.7, 0.6),
        outer(1.0, 0.0),
        Method("DiLoCo e3m0", changes=E3M0),
        Method(FOUR, replicas=4),
        Method("8 replicas int8", replicas=8),
        Method("DiLoCo int8, H = 20", inner_steps=20),
        Method("DiLoCo int8, H = 500", inner_steps=500),
        Method("Streaming int8, τ = 1", changes=streaming(1)),
        Method("Streaming int8, τ = 5", changes=streaming(5)),
        Method("Streaming int8, τ = 0", changes=streaming(0)),
        Method("Streaming int8, τ = 1, alpha 0", changes=streaming(1, 0.0)),
        Method("Streaming int8, τ = 5, alpha 0", changes=streaming(5, 0.0)),
        Method("DiLoCo e3m0, average in fp32", changes=E3M0, encodes_average=False),
        Method("one worker, its share of tokens", "alone"),
        Method("data-parallel, Muon", "batches", changes=muon(setting)),
        Method("DiLoCo int8, Muon", changes=muon(setting)),
        # The sparse codec's error feedback replaces the outer momentum, as in the SparseLoCo paper.
        Method(
            "DiLoCo sparse",
            changes={"codec": {"kind": "sparse"}, "outer_optimizer": {"learning_rate": 2.0, "momentum": 0.0}},
        ),
        Method("4 replicas int8, two with half the steps", replicas=4, slow=2),
        Method("4 replicas int8, two late", replicas=4, late=2, changes={"rounds": {"policy": "asynchronous"}}),
        *(
            Method(f"{FOUR}, {many} {kind}", changes=changes, replicas=4, thin=thin, format=format)
            for many, thin in (("one", 1), ("three", 3))
            for format, kind, changes in ((1, "e2m1", {}), (2, "sparse", SPARSE_ALLOWED))
        ),
    ]
    # In all, the quick setting has fewer inner steps than one outer step of the other settings. H is therefore lowered
    # to at most 6.
    if setting.steps < 500:
        methods = [replace(method, inner_steps=min(method.inner_steps // 10, 6)) for method in methods]
    return methods


DATA_PARALLEL, BASE, FOUR = "data-parallel", "DiLoCo fp32", "4 replicas int8"
BARS = (
    ("DiLoCo int8", BASE, 0.998),
    ("DiLoCo e3m0", BASE, 0.99),
    ("Streaming e3m0, τ = 1", BASE, 0.99),
    ("Streaming int8, τ = 0", "DiLoCo int8", 0.995),
    ("Streaming int8, τ = 1", "DiLoCo int8", 0.995),
    *((f"{FOUR}, {thin}", FOUR, 0.995) for thin in ("one e2m1", "three e2m1", "one sparse", "three sparse")),
)
"""A method, its baseline, and the least ratio of the baseline's loss to the method's."""
PANELS = {
    "replicas, int8": {"2": "DiLoCo int8", "4": FOUR, "8": "8 replicas int8"},
    "inner steps, int8": {"H = 20": "DiLoCo int8, H = 20", "100": "DiLoCo int8", "500": "DiLoCo int8, H = 500"},
    "codecs": {"fp32": BASE, "int8": "DiLoCo int8", "e3m0": "DiLoCo e3m0", "e3m0, τ = 1": "Streaming e3m0, τ = 1"},
    "streaming, int8": {"DiLoCo": "DiLoCo int8"} | {f"τ = {tau}": f"Streaming int8, τ = {tau}" for tau in (0, 1, 5)},
}
STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution, by degrees of freedom, from 0."""

Curves = Mapping[str, Mapping[int, Curve]]
"""Results by method and by seed."""


# Results --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Results:
    """A file of training results, with one JSON line for each finished training. New results are appended."""

    path: Path
    setting: TrainingSetup

    def read(self, methods: Sequence[Method]) -> dict[str, dict[int, Curve]]:
        """Return the loss curves of these methods from the file, by method name and by seed. A later result of the same
        training replaces an earlier one."""
        names = {key_of(method, self.setting): method.name for method in methods}
        curves: dict[str, dict[int, Curve]] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                result = json.loads(line)
            except ValueError:  # incomplete line of a process that was killed while writing
                continue
            name = names.get(result["key"])
            if name is not None:
                points = tuple((tokens, loss) for tokens, loss in result["points"])
                curve = Curve(points, result["peak_bytes"], result["sent_bytes"])
                curves.setdefault(name, {})[result["seed"]] = curve
        return curves

    def add(self, method: Method, seed: int, curve: Curve) -> None:
        about = {"method": method.name, "seed": seed, "torch": torch.__version__, "key": key_of(method, self.setting)}
        sent = {"peak_bytes": curve.peak_bytes, "sent_bytes": curve.sent_bytes}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | sent | {"points": curve.points}, ensure_ascii=False) + "\n")


def _train(method: Method, setting: TrainingSetup, seed: int) -> Curve:
    torch.set_num_threads(1)
    return train(method, setting, seed)


def train_missing(results: Results, methods: Sequence[Method], seeds: int, jobs: int) -> None:
    """Train the methods that have no result yet, in `jobs` processes at once: all methods with seed 0, then all with
    seed 1, and so on."""
    curves = results.read(methods)
    missing = [(one, seed) for seed in range(seeds) for one in methods if seed not in curves.get(one.name, {})]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(_train, method, results.setting, seed): (method, seed) for method, seed in missing}
        for task in as_completed(tasks):
            method, seed = tasks[task]
            results.add(method, seed, task.result())
            click.echo(f"seed {seed}: {method.name}: {task.result().loss:.4f}", err=True)


# The table ------------------------------------------------------------------------------------------------------------
def interval(curves: Curves, name: str, base: str) -> tuple[float, float, float] | None:
    """Return the percentage by which a method's loss exceeds its baseline's: the mean over their common seeds, and the
    two ends of the 95 % interval (NaN for one seed). Return None if they have no common seed."""
    own, other = curves.get(name, {}), curves.get(base, {})
    above = [100 * (own[seed].loss / other[seed].loss - 1) for seed in sorted(own.keys() & other.keys())]
    if not above:
        return None
    mean = statistics.mean(above)
    freedom = min(len(above), len(STUDENT)) - 1
    half = STUDENT[freedom] * statistics.stdev(above) / math.sqrt(len(above)) if freedom else math.nan
    return mean, mean - half, mean + half


def row(curves: Curves, name: str) -> dict[str, Any]:
    own = curves.get(name, {})
    above = interval(curves, name, BASE)
    return {
        "method": name,
        "seeds": len(own),
        "loss": statistics.mean(curve.loss for curve in own.values()) if own else None,
        f"% above {BASE}": round(above[0], 2) if above else None,
        "95 % interval": f"{above[1]:+.2f} … {above[2]:+.2f}" if above and not math.isnan(above[1]) else "",
        "most at once, kB": max(curve.peak_bytes for curve in own.values()) / 1e3 if own else None,
        "sent, MB": max(curve.sent_bytes for curve in own.values()) / 1e6 if own else None,
    }


def bars_of(curves: Curves) -> list[Bar]:
    """Return a requirement for each method in BARS that has results for two seeds: its baseline's loss divided by its
    own must be at least the ratio in BARS, even at the lower end of the 95 % interval."""
    bars = []
    for name, base, least in BARS:
        above = interval(curves, name, base)
        if above is not None and not math.isnan(above[1]):
            worst, best = (1 / (1 + percent / 100) for percent in (above[2], above[1]))
            bars.append(Bar(f"{base}'s loss / that of {name}", worst, least, digits=4, best=best))
    return bars


def plot(curves: Curves) -> str:
    """Return a plot of the methods' loss curves, each averaged over the seeds, as SVG text."""

    def curve(name: str) -> list[Point]:
        of_seeds = zip(*(curve.points for curve in curves[name].values()), strict=True)
        return [(points[0][0] / 1e6, statistics.mean(loss for _, loss in points)) for points in of_seeds]

    if DATA_PARALLEL not in curves:
        raise click.ClickException(f"--plot: {DATA_PARALLEL!r} has no result yet. Train it first, or leave --plot out.")
    level = "data-parallel in the end", curve(DATA_PARALLEL)[-1][1]
    panels = []
    for title, lines in PANELS.items():
        present = {label: curve(name)[1:] for label, name in lines.items() if name in curves}
        if present:
            panels.append(Panel(title, present, level))
    lowest = min(loss for panel in panels for line in panel.lines.values() for _, loss in line)
    bottom = 0.99 * min(level[1], lowest)
    return svg(panels, "million tokens; loss on held-out text, nats per byte", bottom)


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SETTINGS)), default="1m", show_default=True, help="Parameters.")
@click.option("--data", "source", default="stdlib", show_default=True, help="The corpus, as data.source of run.toml.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Simultaneous trainings, each on one core.")
@click.option("--only", multiple=True, metavar="NAME", help="Train this method alone (may be given several times).")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(__file__).parent / "convergence.jsonl",
    show_default="benchmarks/convergence.jsonl",
    help="Where results are kept.",
)
@click.option("--no-training", is_flag=True, help="Only print existing results.")
@json_option
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw an SVG here.")
def main(
    size: str,
    source: str,
    device: str,
    seeds: int,
    jobs: int,
    only: tuple[str, ...],
    results: Path,
    no_training: bool,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    setting = replace(SETTINGS[size], source=source, device=device)
    methods, kept = methods_of(setting), Results(results, setting)
    names = [method.name for method in methods]
    if unknown := [name for name in only if name not in names]:
        raise click.BadParameter(f"there is no {unknown[0]!r}. There are: {'; '.join(names)}.", param_hint="--only")
    if not no_training:
        chosen = [method for method in methods if not only or method.name in only]
        train_missing(kept, chosen, seeds, jobs)
    curves = kept.read(methods)
    inner_steps = next(method.inner_steps for method in methods if method.name == BASE)
    title = (
        f"convergence: size {size} from scratch, {setting.tokens:,} tokens; 2 replicas and {inner_steps} inner steps "
        "unless a row names others"
    )
    shown = [name for name in names if name in curves] or names
    report(title, [row(curves, name) for name in shown], bars_of(curves), json_file)
    if plot_file:
        plot_file.write_text(plot(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
