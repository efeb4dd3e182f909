"""How much bandwidth a method needs for a compute utilisation, and the curve of one over the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from opendiloco.plan.methods import Method
from opendiloco.plan.schedule import Step, Wire, utilisation

LEAST, MOST = 1e6, 1e13
"""Bits a second between which a bandwidth is looked for."""
HALVINGS = 20
"""Times that the interval is halved: far finer than anybody knows a link."""


def logarithmic(least: float, most: float, count: int) -> list[float]:
    """Return so many bandwidths between two, each the same factor above the one before."""
    return [least * (most / least) ** (place / (count - 1)) for place in range(count)]


def curve(step: Step, method: Method, bandwidths: Sequence[float], replicas: int) -> list[float]:
    """Return the utilisation at each of these bandwidths."""
    return [utilisation(step, method, Wire(bandwidth, replicas)) for bandwidth in bandwidths]


def least_bandwidth(step: Step, method: Method, target: float, replicas: int = 2) -> float | None:
    """Return the bits a second from which on the utilisation is at least the target; None if there are none."""

    def reaches(bandwidth: float) -> bool:
        return utilisation(step, method, Wire(bandwidth, replicas)) >= target

    return bisect(reaches, LEAST, MOST)


def bisect(reaches: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return about where `reaches` turns true between two positive numbers, on a logarithmic scale; None if nowhere."""
    if not reaches(high):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
