"""What arXiv 2501.18512 says of its simulated bandwidths (Tables 1 and 4), and how we read it. docs/planning.md has the
reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from opendiloco.plan.bandwidth import least_bandwidth, logarithmic
from opendiloco.plan.methods import Method, Shape, data_parallel, diloco, equal_spacing, streaming
from opendiloco.plan.schedule import Step

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = logarithmic(0.1, 1000, 50)
"""All numbers of the table lie on it, in Gbit/s: 50 bandwidths from 0.1 to 1000, each 1.207 times the one before."""
INNER_STEPS, FRAGMENT_LAYERS, OVERLAP, REPLICAS = 100, 3, 1, 2


@dataclass(frozen=True)
class Scale:
    """One model of Table 4, and its rows in Gbit/s."""

    layers: int
    step_seconds: float
    values: int
    rows: dict[str, tuple[float, ...]]

    @property
    def shape(self) -> Shape:
        return Shape.even(self.layers, self.values)

    @property
    def step(self) -> Step:
        """A third of the step for forward and each backward pass, shared equally by all layers."""
        return Step(self.layers, self.step_seconds / (3 * self.layers))


TABLE = {
    "1B": Scale(
        24,
        0.1,
        10**9,
        {
            "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
            "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
            "Streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
            "with overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
            "with overlap, FP4": (0.4, 0.9, 1.7, 2.0, 3.0),
        },
    ),
    "10B": Scale(
        48,
        0.8,
        10**10,
        {
            "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
            "DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
            "Streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
            "with overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
            "with overlap, FP4": (0.4, 0.9, 1.4, 1.4, 1.7),
        },
    ),
    "100B": Scale(
        108,
        4.9,
        10**11,
        {
            "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
            "DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
            "Streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
            "with overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
            "with overlap, FP4": (0.5, 0.9, 1.1, 1.1, 1.4),
        },
    ),
}


def methods(shape: Shape) -> dict[str, Method]:
    """Return the rows' methods for a model."""

    def fragments(name: str, overlap: int = 0, bits: float = 16) -> Method:
        return streaming(name, shape, INNER_STEPS, FRAGMENT_LAYERS, overlap, bits, equal_spacing)

    return {
        "data-parallel": data_parallel(shape),
        "DiLoCo": diloco(shape, INNER_STEPS),
        "Streaming": fragments("Streaming"),
        "with overlap": fragments("with overlap", OVERLAP),
        "with overlap, FP4": fragments("with overlap, FP4", OVERLAP, 4),
    }


@cache
def needed(size: str, row: str) -> tuple[float, ...]:
    """Return the least bandwidth that we compute for each target, in Gbit/s."""
    scale = TABLE[size]
    found = [least_bandwidth(scale.step, methods(scale.shape)[row], target, REPLICAS) for target in TARGETS]
    return tuple(bandwidth / 1e9 for bandwidth in found if bandwidth)


def read_like_the_paper(size: str, row: str) -> list[float]:
    """Return for each target the last bandwidth of the grid at which the utilisation is still below it, in Gbit/s."""
    return [max(place for place in GRID if place < bandwidth) for bandwidth in needed(size, row)]
