"""The shared parts of all benchmarks: timing in turns, bars (required ratios), the table, and the options `--json` and
`--run`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
)


def run_option(default: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a click option `--run` that takes the path of a run.toml."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--run", "run_file", type=file, default=Path(default), show_default=True, help=help)


@dataclass(frozen=True)
class Bar:
    """A requirement of a benchmark: `ratio` must be at least `at_least`. The report ends with a line on each bar."""

    name: str
    ratio: float
    at_least: float
    digits: int = 2
    """Printed decimals of the ratio."""
    best: float | None = None
    """The upper end of an interval whose lower end is `ratio`. A bar inside the interval is undecided."""

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.at_least

    def __str__(self) -> str:
        undecided = self.best is not None and self.best >= self.at_least
        verdict = "met" if self.is_met else "UNDECIDED" if undecided else "MISSED"
        return f"{self.name}: {self.ratio:.{self.digits}f}, bar {self.at_least:g}: {verdict}"


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, seconds_at_most: float = 20.0
) -> dict[str, list[float]]:
    """Call all contenders in turns, `rounds` times, and return the seconds of each call by the contender's name.
    Because of the turns, noise affects all contenders alike.

    The first round only warms up. A contender that has taken more than `seconds_at_most` in all is skipped from then
    on.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            if len(seconds[name]) > 1 and sum(seconds[name]) > seconds_at_most:
                continue
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if turn > 0:
                seconds[name].append(elapsed)
    return seconds


def speed_ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> float:
    """Return the factor by which `ours` is faster than `theirs`: the median of their ratios of seconds, over the rounds
    in which both ran."""
    pairs = zip(seconds[ours], seconds[theirs], strict=False)
    return statistics.median(other / own for own, other in pairs)


def report(title: str, rows: Sequence[Mapping[str, Any]], bars: Sequence[Bar], json_file: Path | None) -> None:
    """Print a table, a line on each bar (a required ratio), and a last line with the bars that were missed. Also write
    the table and the bars as JSON to `json_file`, unless it is None."""
    table = Table(title=title, title_justify="left")
    columns = list(rows[0])
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console = Console(width=160)
    console.print(table)
    missed = [bar for bar in bars if not bar.is_met]
    for bar in bars:
        console.print(str(bar), highlight=False)
    summary = "all bars met" if not missed else f"{len(missed)} of {len(bars)} bars not met"
    verdict = "; ".join(str(bar) for bar in missed) or "no bar was missed"
    if bars:
        console.print(f"verdict: {summary}: {verdict}", highlight=False, soft_wrap=True)
    if json_file:
        content = {"title": title, "rows": list(rows), "bars": [{**asdict(b), "is_met": b.is_met} for b in bars]}
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
