"""The speed of the kernels that quantize, average and apply payloads, compared with the memory's speed and with other
libraries: `python -m benchmarks.codecs`.

All contenders of a size take turns in one run. A ratio is the median over the rounds of two contenders' times in the
same round. The bars are for the largest size on huge pages.
"""

from __future__ import annotations

import statistics
import timeit
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contenders import (
    Arrays,
    hivemind_contenders,
    limit_contenders,
    our_contenders,
    piquant_contenders,
    torch_contenders,
)
from benchmarks.limits import build_limits
from benchmarks.reporting import Bar, json_option, report, speed_ratio, time_interleaved
from opendiloco import kernels

LIMIT, PIQUANT = "limit: read 4, write 1", "pypiquant: parameters + quantize uint8"
INT8, STEP, SGD = "ours: quantize int8", "ours: outer step int8", "torch: SGD(nesterov)"

BARS = (
    ("int8 quantize / limit", INT8, LIMIT, 0.9),
    ("int8 quantize / pypiquant", INT8, PIQUANT, 2.0),
    ("accumulate / fp32 y += x", "ours: accumulate int8", "fp32 y += x", 1.3),
    ("e3m0 / limit", "ours: quantize e3m0", LIMIT, 0.8),
    ("e3m0 stochastic / limit", "ours: quantize e3m0, stochastic", LIMIT, 0.65),
    ("theta - local / its limit", "ours: quantize theta - local", "limit: read 8, write 1", 0.85),
    ("outer step / torch SGD", STEP, SGD, 4.0),
    ("outer step / its limit", STEP, "limit: read 1, update 8", 0.8),
)


def measure(limits: Any, arrays: Arrays, threads: int, rounds: int, compile_too: bool) -> dict[str, list[float]]:
    """Return the seconds of each timed call of every contender (a kernel or another library's function), by the
    contender's name."""
    contenders = {
        **limit_contenders(limits, arrays, threads),
        **our_contenders(arrays, threads),
        **piquant_contenders(arrays, threads),
        **torch_contenders(arrays, threads, compile_too),
        **hivemind_contenders(arrays),
    }
    return time_interleaved(contenders, rounds)


def row_of(name: str, seconds: dict[str, list[float]], arrays: Arrays, threads: int) -> dict[str, Any]:
    """Return the table's row on one kernel or library function: its speed in 10⁹ values a second, and as a share of the
    speed that the memory allows and of pypiquant's."""
    return {
        "contender": name,
        "values": f"{arrays.count / 2**20:g} M",
        "pages": "2 MiB" if arrays.huge_pages else "4 KiB",
        "threads": threads,
        "G values/s": arrays.count / statistics.median(seconds[name]) / 1e9,
        "of the limit": speed_ratio(seconds, name, LIMIT),
        "of pypiquant": speed_ratio(seconds, name, PIQUANT),
    }


def call_microseconds() -> float:
    """Return the microseconds of one call that quantizes 1,024 values to int8, in the fastest of 15 series of calls."""
    values, payload = kernels.FloatView(np.ones(1024, np.float32)), kernels.Payload(kernels.INT8, 1024)
    calls = 20_000
    return min(timeit.repeat(lambda: kernels.quantize(values, payload), number=calls, repeat=15)) / calls * 1e6


@click.command(help=__doc__)
@click.option("--sizes", default="0.25,16,64", show_default=True, help="Millions (2^20) of values.")
@click.option("--rounds", default=9, show_default=True, help="Number of runs of each contender.")
@click.option("--compile/--no-compile", "compile_too", default=True, help="torch.compile takes a minute to start.")
@json_option
def main(sizes: str, rounds: int, compile_too: bool, json_file: Path | None) -> None:
    limits = build_limits()
    counts = [int(float(size) * 2**20) for size in sizes.split(",")]
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for count in counts:
        for huge_pages in (False, True):
            arrays = Arrays(count, huge_pages)
            for threads in (1, 2):
                # Calls on few values are short. They are therefore timed in five times as many rounds as other calls.
                seconds = measure(limits, arrays, threads, rounds if count > 1 << 20 else 5 * rounds, compile_too)
                rows += [row_of(name, seconds, arrays, threads) for name in seconds]
                if huge_pages and count == max(counts):
                    bars += [
                        Bar(f"{name}, {threads} thread{'s' * (threads > 1)}", speed_ratio(seconds, ours, other), limit)
                        for name, ours, other, limit in BARS
                    ]
    bars.append(Bar("1 µs / a call on 1,024 values", 1 / call_microseconds(), 1.0))
    report(f"kernels: {kernels.chosen_kernels()}", rows, bars, json_file)


if __name__ == "__main__":
    main()
