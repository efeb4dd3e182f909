"""What the planner says: tables for a person, plain values for a program, and the figures' data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from opendiloco.plan.bandwidth import curve, least_bandwidth, logarithmic
from opendiloco.plan.comparison import Settings, Ways, methods_of
from opendiloco.plan.figures import Point, bandwidth_words
from opendiloco.plan.forecast import Forecast, Plan
from opendiloco.plan.methods import Method, Shape, equal_spacing
from opendiloco.plan.rounds import Peer
from opendiloco.plan.schedule import Node, Simulation, Step, Wire

POINTS = 61
WIDEST = 1e12
"""Bits a second at the right end of the curves; the left end is a thousandth of the slowest link."""
FULL = 0.85
"""Share of its time from which on a link may be too busy for rounds that overlap. Chosen, between what was measured: at
a half they were in time, at 95 % they were not."""
PLANNED_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory, and of each GPU beside activations, that some equal peers need."""

    main: int
    gpu: int | None

    def lacks(self, peer: Peer) -> str | None:
        """Return what the machine has too little of, in words."""
        if peer.main_memory is not None and peer.main_memory < self.main:
            return f"{peer.name}: needs {gigabytes(self.main)} of main memory, and has {gigabytes(peer.main_memory)}"
        if peer.gpu_memory is not None and self.gpu is not None and peer.gpu_memory < self.gpu:
            return f"{peer.name}: needs {gigabytes(self.gpu)} of each GPU, and has {gigabytes(peer.gpu_memory)}"
        return None


def methods_table(forecasts: Sequence[Forecast]) -> Table:
    """Return a row for each method."""
    table = _table("method", "tau", "bits", "computes", "round", "cycle", "GB/day", "G tokens/day", "joining")
    for found in forecasts:
        method = found.method
        table.add_row(
            method.name,
            str(method.overlap),
            f"{method.bits:.3g}",
            f"{found.utilisation:.1%}",
            duration(found.round_seconds),
            duration(found.cycle_seconds),
            f"{found.sent_bits_per_day / 8e9:,.0f}",
            f"{found.tokens_per_day / 1e9:.3g}",
            "never" if found.joining is None else duration(found.joining),
        )
    return table


def peers_table(plan: Plan, found: Forecast, memory: Sequence[Memory]) -> Table:
    """Return a row for each kind of peer, with the shares that one method gives it."""
    table = _table("peers", "count", "steps", "counts", "computes", "link busy", "memory", "per GPU")
    for peer, forecast, needed in zip(plan.swarm.peers, found.peers, memory, strict=True):
        table.add_row(
            peer.name,
            str(peer.count),
            str(forecast.inner_steps),
            how_often(forecast.cycles),
            f"{forecast.utilisation:.1%}",
            f"{forecast.link_share:.1%}",
            gigabytes(needed.main),
            "-" if needed.gpu is None else gigabytes(needed.gpu),
        )
    return table


def how_often(cycles: int) -> str:
    """Return in how many entries a peer's work counts, in words."""
    return {0: "never", 1: "each time", 2: "every 2nd", 3: "every 3rd"}.get(cycles, f"every {cycles}th")


def too_slow_lines(plan: Plan, found: Forecast) -> list[str]:
    """Return which peers train in vain."""
    return [
        f"too slow: {forecast.name} takes {duration(plan.training_seconds(peer))} for {forecast.inner_steps} inner"
        f" steps, an outer step takes {duration(found.cycle_seconds)}: its work does not count. Leave it out, lower"
        f" rounds.smallest_share = {plan.smallest_share:g}, or raise rounds.staleness = {plan.staleness}."
        for peer, forecast in zip(plan.swarm.peers, found.peers, strict=True)
        if not forecast.cycles
    ]


def full_link_lines(forecasts: Sequence[Forecast]) -> list[str]:
    """Return with which methods peers compute less than is planned, since rounds that overlap need all of a link."""
    lines = list[str]()
    for found in forecasts:
        busiest = max(found.peers, key=lambda peer: peer.link_share)
        if found.method.overlap and busiest.link_share >= FULL:
            lines.append(
                f"too full: with {found.method.name} the link of {busiest.name} is busy for {busiest.link_share:.0%} of"
                " the time. TCP does not fill it so far: expect peers to wait. More inner steps or fewer bits help."
            )
    return lines


def headline(plan: Plan, finest: Forecast) -> str:
    """Return what is planned, in two lines."""
    return (
        f"{plan.shape.values:,} parameters, {plan.swarm.count} peers, {plan.inner_steps} inner steps,"
        f" {len(finest.method.fragments)} fragments;\nthe slowest link carries"
        f" {bandwidth_words(plan.swarm.slowest_rate)} of data"
    )


def lacking_lines(plan: Plan, memory: Sequence[Memory]) -> list[str]:
    """Return which machines are too small."""
    lacking = (needed.lacks(peer) for peer, needed in zip(plan.swarm.peers, memory, strict=True))
    return [f"too small: {lack}" for lack in lacking if lack]


def ways_table(ways: Sequence[Ways]) -> Table:
    """Return what would take each method to the target, one thing changed at a time."""
    table = _table("method", "computes", "inner steps", "or tau", "or fragment layers")
    for way in ways:
        numbers = (way.inner_steps, way.overlap, way.fragment_layers)
        table.add_row(way.name, f"{way.reached:.1%}", *("-" if number is None else f"{number:,}" for number in numbers))
    return table


def cost_lines(forecasts: Sequence[Forecast]) -> list[str]:
    """Return what each method costs, if all prices are known."""
    return [
        f"{found.method.name}: {found.cost_per_day:,.2f} a day, {found.cost_per_giga_token:,.2f} for 10⁹ tokens"
        for found in forecasts
        if found.cost_per_day is not None
    ]


def plain(plan: Plan, forecasts: Sequence[Forecast], memory: Sequence[Memory], ways: Sequence[Ways]) -> dict[str, Any]:
    """Return all of it as JSON can say it: seconds, bits, bytes."""
    return {
        "inner_steps": plan.inner_steps,
        "parameters": plan.shape.values,
        "methods": [_plain_forecast(found) for found in forecasts],
        "memory": [{"name": peer.name, **asdict(each)} for peer, each in zip(plan.swarm.peers, memory, strict=True)],
        "ways_to_target": [asdict(way) for way in ways],
        "uniform_links": _least_bandwidths(plan, [found.method for found in forecasts]),
    }


def utilisation_curves(plan: Plan, settings: Settings) -> dict[str, list[Point]]:
    """Return each method's utilisation over the bandwidth of uniform links, as the paper simulates it."""
    even, step = uniform(plan)
    bandwidths = logarithmic(plan.swarm.slowest_rate / 1e3, max(WIDEST, plan.swarm.slowest_rate), POINTS)
    return {
        method.name: list(zip(bandwidths, curve(step, method, bandwidths, plan.swarm.count), strict=True))
        for method in methods_of(even, settings, equal_spacing)
    }


def schedule_rows(plan: Plan, settings: Settings) -> dict[str, list[Node]]:
    """Return the nodes of the steps around each method's second synchronisation, over the slowest link."""
    even, step = uniform(plan)
    rows = dict[str, list[Node]]()
    for method in methods_of(even, settings, equal_spacing):
        place = sorted(method.ends)[1] if len(method.ends) > 1 else method.ends[0] + method.cycle
        nodes = list[Node]()
        simulation = Simulation(step, method, Wire(plan.swarm.slowest_rate, plan.swarm.count), nodes)
        simulation.run(place + method.overlap + 2)
        rows[method.name] = [node for node in nodes if node.step >= place - 1]
    return rows


def uniform(plan: Plan) -> tuple[Plan, Step]:
    """Return the plan with all values shared equally by the layers, and the fastest peer's step."""
    layers = len(plan.shape.layers)
    even = replace(plan, shape=Shape.even(layers, plan.shape.values))
    return even, Step.of(layers, min(peer.step_seconds for peer in plan.swarm.peers))


def duration(seconds: float) -> str:
    """Return a duration in the unit in which it is easiest to read."""
    for factor, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _plain_forecast(found: Forecast) -> dict[str, Any]:
    return {
        "method": found.method.name,
        "overlap": found.method.overlap,
        "bits": found.method.bits,
        "fragments": len(found.method.fragments),
        "utilisation": found.utilisation,
        "cycle_seconds": found.cycle_seconds,
        "longest_round_seconds": found.round_seconds,
        "sent_bits": found.sent_bits,
        "sent_bits_per_day": found.sent_bits_per_day,
        "tokens_per_day": found.tokens_per_day,
        "joining_seconds": found.joining,
        "cost_per_day": found.cost_per_day,
        "cost_per_giga_token": found.cost_per_giga_token,
        "peers": [asdict(peer) for peer in found.peers],
    }


def _least_bandwidths(plan: Plan, methods: Sequence[Method]) -> Mapping[str, Mapping[str, float | None]]:
    """Return the bits a second of uniform links that take each method to each of the paper's targets."""
    _, step = uniform(plan)
    return {
        method.name: {
            f"{target:g}": least_bandwidth(step, method, target, plan.swarm.count) for target in PLANNED_TARGETS
        }
        for method in methods
    }


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
