"""The methods that the planner compares for one run, and what would take each of them to a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from opendiloco.plan.forecast import Forecast, Plan, forecast
from opendiloco.plan.methods import (
    QUANTIZED,
    Method,
    Spacing,
    data_parallel,
    diloco,
    exact_cycle,
    streaming,
    strided,
)

MOST_INNER_STEPS = 10_000
MOST_OVERLAP = 20
"""The largest that arXiv 2501.18512 tried (Figure 8); it advises 5."""


@dataclass(frozen=True)
class Settings:
    """What run.toml does not say of Streaming yet: layers of a fragment, tau, and the bits of the last method.

    `bits` are those of a value in the run's codec, which encodes so many values a second.
    """

    fragment_layers: int
    overlap: int
    bits: float
    fewer_bits: float
    encoded: float = QUANTIZED


def methods_of(plan: Plan, settings: Settings, spacing: Spacing = exact_cycle) -> tuple[Method, ...]:
    """Return the methods to compare, from the one that sends most to the one that sends least."""

    def fragments(name: str, overlap: int, bits: float) -> Method:
        return streaming(name, plan.shape, plan.inner_steps, settings.fragment_layers, overlap, bits, spacing)

    def ours(method: Method) -> Method:
        return replace(method, encoded=settings.encoded)

    return (
        data_parallel(plan.shape),
        ours(diloco(plan.shape, plan.inner_steps, settings.bits)),
        ours(fragments("Streaming", 0, settings.bits)),
        ours(fragments("with overlap", settings.overlap, settings.bits)),
        fragments(f"overlap, {settings.fewer_bits:.0f} bits", settings.overlap, settings.fewer_bits),
    )


def compare(plan: Plan, settings: Settings) -> tuple[Forecast, ...]:
    """Return the forecast of each method."""
    return tuple(forecast(plan, method) for method in methods_of(plan, settings))


@dataclass(frozen=True)
class Ways:
    """How a method reaches a target if one thing is changed; None where that does not suffice.

    The fewest inner steps; the least overlap with the run's inner steps; the largest fragments, in layers, with both.
    """

    name: str
    reached: float
    inner_steps: int | None
    overlap: int | None
    fragment_layers: int | None


def ways_to(plan: Plan, settings: Settings, target: float) -> tuple[Ways, ...]:
    """Return for each method that trains locally what takes it to a utilisation."""
    return tuple(_ways(plan, settings, place, target) for place in range(1, len(methods_of(plan, settings))))


def _ways(plan: Plan, settings: Settings, place: int, target: float) -> Ways:
    def reached(plan: Plan, settings: Settings) -> float:
        return forecast(plan, methods_of(plan, settings)[place]).utilisation

    def with_inner_steps(steps: int) -> bool:
        return reached(replace(plan, inner_steps=steps), settings) >= target

    def with_overlap(overlap: int) -> bool:
        return reached(plan, replace(settings, overlap=overlap)) >= target

    def with_fragments(layers: int) -> bool:
        smaller = replace(settings, fragment_layers=layers)
        return len(strided(plan.shape, layers)) <= plan.inner_steps and reached(plan, smaller) >= target

    name = methods_of(plan, settings)[place].name
    is_streaming, overlaps = place > 1, place > 2
    fewest = max(len(strided(plan.shape, settings.fragment_layers)) if is_streaming else 1, settings.overlap + 1)
    overlaps_at_most = min(MOST_OVERLAP, plan.inner_steps - 1)
    layers = len(plan.shape.layers)
    return Ways(
        name,
        reached(plan, settings),
        inner_steps=least(with_inner_steps, fewest, MOST_INNER_STEPS),
        overlap=next(filter(with_overlap, range(overlaps_at_most + 1)), None) if overlaps else None,
        fragment_layers=next(filter(with_fragments, range(layers, 0, -1)), None) if is_streaming else None,
    )


def least(reaches: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number from `low` to `high` from which on `reaches` holds; None if it never does."""
    if low > high or not reaches(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low
