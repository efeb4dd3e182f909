"""Algorithm 2 of arXiv 2501.18512 by hand, for a toy that a person can recompute: one value at a time, rounded to fp32.

The toy's replicas have a target each, and the inner step x = x - RATE * (x - target): gradient descent on half of the
squared distance. It shares nothing with the code that it is held against, but for the codecs' definition in numpy.

`python -m tests.opendiloco.training.streaming_by_hand` writes golden_streaming.json anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from native.check import reference as codecs

GOLDEN = Path(__file__).parent / "golden_streaming.json"
H, CYCLES = 4, 4
START = (1.0, -2.0, 0.5, 4.0, 0.0)
TARGETS = {"a": (0.0, 0.0, 0.0, 0.0, 8.0), "b": (4.0, 2.0, -2.0, 0.0, -4.0)}
TOKENS = {"a": 48, "b": 16}
RATE, OUTER_RATE, MOMENTUM = 0.5, 0.5, 0.5
FRAGMENTS = {1: ((0, 1, 2, 3, 4),), 2: ((0, 1), (2, 3, 4)), 3: ((0, 1), (2,), (3, 4))}
"""By their number, the values in each."""

f32 = np.float32


@dataclass(frozen=True)
class Case:
    """The number of fragments, the overlap, the share that local weights keep, and the codec; `own` are replicas' own
    overlaps."""

    fragments: int
    overlap: int
    alpha: float
    codec: str
    own: tuple[tuple[str, int], ...] = ()


GOLDEN_CASES = (
    Case(1, 0, 0.0, "fp16"),
    Case(2, 0, 0.0, "fp16"),
    Case(2, 1, 0.5, "fp16"),
    Case(2, 3, 0.5, "fp16"),
    Case(2, 1, 0.0, "fp16"),
    Case(2, 1, 1.0, "fp16"),
    Case(2, 1, 0.5, "fp16", (("b", 3),)),
    *(Case(2, 1, 0.5, codec) for codec in ("int8", "e3m0", "e2m1", "uint4")),
)


def through(codec: str, values: Sequence[Any]) -> list[Any]:
    """Return what a codec makes of a fragment's values."""
    exact = np.array(values, np.float32)
    return list(codecs.decode(codec, codecs.encode(codec, exact), exact.size))


def average(codec: str, contributions: Sequence[tuple[int, Sequence[Any]]]) -> list[Any]:
    """Return the mean of what a codec makes of contributions, weighted by tokens, and encoded once more."""
    total = f32(sum(tokens for tokens, _ in contributions))
    sums = [f32(0)] * len(contributions[0][1])
    for tokens, values in contributions:
        sums = [f32(s + f32(f32(tokens) * value)) for s, value in zip(sums, through(codec, values), strict=True)]
    return through(codec, [f32(s / total) for s in sums])


def cycles(case: Case) -> Iterator[dict[str, Any]]:
    """Yield theta, momentum and each replica's weights after every H inner steps."""
    fragments = FRAGMENTS[case.fragments]
    due = [-(-(p + 1) * H // case.fragments) for p in range(case.fragments)]
    inside = [max(offset - case.overlap, 0) for offset in due]
    taken = [due, *[inside] * (CYCLES - 2), [H] * case.fragments]  # the last cycle has a final synchronisation
    overlaps = {replica: dict(case.own).get(replica, case.overlap) for replica in TARGETS}
    theta, momentum = [f32(x) for x in START], [f32(0)] * len(START)
    local = {replica: list(theta) for replica in TARGETS}
    awaited: dict[tuple[str, int], int] = {}  # by replica and fragment, after which inner step its average is merged

    def merge(replica: str, p: int) -> None:  # line 12
        del awaited[replica, p]
        for i in fragments[p]:
            mine, others = f32(f32(case.alpha) * local[replica][i]), f32(f32(1 - case.alpha) * theta[i])
            local[replica][i] = f32(mine + others)

    for cycle, step in itertools.product(range(CYCLES), range(H + 1)):
        t = cycle * H + step
        for replica, targets in TARGETS.items() if step else ():  # lines 3 to 5
            local[replica] = [
                f32(x - f32(f32(RATE) * f32(x - f32(y)))) for x, y in zip(local[replica], targets, strict=True)
            ]
        for p, values in enumerate(fragments):
            if step == taken[cycle][p]:  # lines 7 and 8, and 11, whose result is not seen before line 12
                for replica in TARGETS:
                    if (replica, p) in awaited:
                        merge(replica, p)
                    awaited[replica, p] = t + overlaps[replica]
                sent = [(TOKENS[replica], [f32(theta[i] - local[replica][i]) for i in values]) for replica in TARGETS]
                for i, g in zip(values, average(case.codec, sent), strict=True):
                    momentum[i] = f32(f32(f32(MOMENTUM) * momentum[i]) + g)
                    outer_step = f32(g + f32(f32(MOMENTUM) * momentum[i]))
                    theta[i] = f32(theta[i] - f32(f32(OUTER_RATE) * outer_step))
        for replica, p in [each for each, when in awaited.items() if when <= t]:  # lines 9 and 10
            merge(replica, p)
        if step == H:
            yield {
                "theta": [float(x) for x in theta],
                "momentum": [float(x) for x in momentum],
                "local": {replica: [float(x) for x in weights] for replica, weights in local.items()},
            }


def text_of_golden() -> str:
    """Return the file's text: a line for each vector."""
    lines = ["["]
    for case in GOLDEN_CASES:
        lines.append(f' {{"case": {json.dumps(vars(case))}, "cycles": [')
        for cycle in cycles(case):
            lines.append(f'  {{"theta": {cycle["theta"]}, "momentum": {cycle["momentum"]},')
            lines.append(f'   "local": {json.dumps(cycle["local"])}}},')
        lines[-1] = lines[-1].removesuffix(",") + "]},"
    return "\n".join([*lines[:-1], lines[-1].removesuffix(","), "]"]) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(text_of_golden())
