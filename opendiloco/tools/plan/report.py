"""A plan in words: tables for a person, plain values for a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from opendiloco.quantities import bandwidth_in_words
from opendiloco.tools.plan.forecast import Forecast, Peer, Plan

FULL = 0.85
"""Share of its time from which on a link may be too busy for rounds that overlap. Chosen, between what was measured: at
a half they were in time, at 95 % they were not."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which the bandwidth is named that they need."""


def show(console: Console, plan: Plan, found: Forecast, needed: Mapping[float, float | None]) -> None:
    """Print all figures, the cost if all prices are known, and what is wrong with the plan."""
    console.print(_headline(plan))
    console.print(_run_table(found))
    console.print()
    console.print(_peers_table(plan, found))
    if found.cost_per_day is not None:
        console.print(f"{found.cost_per_day:,.2f} a day, {found.cost_per_giga_token:,.2f} for 10⁹ tokens")
    for line in _warnings(plan, found):
        console.print(line)
    console.print()
    console.print(_bandwidth_table(needed))


def _headline(plan: Plan) -> str:
    """Return what is planned, in two lines."""
    fragments = f"{len(plan.fragments)} fragment{'s' * (len(plan.fragments) > 1)}"
    return (
        f"{plan.values:,} parameters in {fragments}, {plan.count} peers, {plan.inner_steps} inner steps;\n"
        f"{plan.bits:.3g} bits a value, tau {plan.overlap}; the slowest link carries"
        f" {bandwidth_in_words(min(peer.rate for peer in plan.peers))} of data"
    )


def _run_table(found: Forecast) -> Table:
    """Return the figures of the whole run."""
    table = _table("computes", "round", "cycle", "GB/day", "G tokens/day", "joining")
    table.add_row(
        f"{found.utilisation:.1%}",
        duration(found.round_seconds),
        duration(found.cycle_seconds),
        f"{found.sent_bits_per_day / 8e9:,.0f}",
        f"{found.tokens_per_day / 1e9:.3g}",
        "never" if found.joining is None else duration(found.joining),
    )
    return table


def _peers_table(plan: Plan, found: Forecast) -> Table:
    """Return a row for each kind of peer."""
    table = _table("peers", "count", "steps", "counts", "computes", "link busy", "memory", "per GPU")
    for peer, forecast in zip(plan.peers, found.peers, strict=True):
        table.add_row(
            peer.name,
            str(peer.count),
            str(forecast.inner_steps),
            _how_often(forecast.cycles),
            f"{forecast.utilisation:.1%}",
            f"{forecast.link_share:.1%}",
            _gigabytes(peer.main_needed),
            "-" if peer.gpu_needed is None else _gigabytes(peer.gpu_needed),
        )
    return table


def _how_often(cycles: int) -> str:
    """Return in how many entries a peer's work counts, in words."""
    return {0: "never", 1: "each time", 2: "every 2nd", 3: "every 3rd"}.get(cycles, f"every {cycles}th")


def _warnings(plan: Plan, found: Forecast) -> list[str]:
    """Return which machines are too small, which peers train in vain, and whether a link is too full."""
    lines = [f"too small: {lack}" for lack in map(_lacks, plan.peers) if lack]
    lines += [
        f"too slow: {forecast.name} takes {duration(plan.training_seconds(peer))} for {forecast.inner_steps} inner"
        f" steps, an outer step takes {duration(found.cycle_seconds)}: its work does not count. Leave it out, lower"
        f" rounds.smallest_share = {plan.smallest_share:g}, or raise rounds.staleness = {plan.staleness}."
        for peer, forecast in zip(plan.peers, found.peers, strict=True)
        if not forecast.cycles
    ]
    busiest = max(found.peers, key=lambda peer: peer.link_share)
    if plan.overlap and busiest.link_share >= FULL:
        lines.append(
            f"too full: the link of {busiest.name} is busy for {busiest.link_share:.0%} of the time. TCP does not fill"
            " it so far: expect peers to wait. More inner steps or fewer bits help."
        )
    return lines


def _lacks(peer: Peer) -> str | None:
    """Return what a machine has too little of, in words."""
    if peer.main_memory is not None and peer.main_memory < peer.main_needed:
        needed, there = _gigabytes(peer.main_needed), _gigabytes(peer.main_memory)
        return f"{peer.name}: needs {needed} of main memory, and has {there}"
    if peer.gpu_memory is not None and peer.gpu_needed is not None and peer.gpu_memory < peer.gpu_needed:
        needed, there = _gigabytes(peer.gpu_needed), _gigabytes(peer.gpu_memory)
        return f"{peer.name}: needs {needed} of each GPU, and has {there}"
    return None


def _bandwidth_table(needed: Mapping[float, float | None]) -> Table:
    """Return the bandwidth that every link must have for each utilisation."""
    table = _table("to compute for", *(f"{target:.0%}" for target in needed))
    table.add_row("each link needs", *("-" if rate is None else bandwidth_in_words(rate) for rate in needed.values()))
    return table


def plain(plan: Plan, found: Forecast, needed: Mapping[float, float | None]) -> dict[str, Any]:
    """Return all of it as JSON can say it: seconds, bits, bytes."""
    return {
        "parameters": plan.values,
        "inner_steps": plan.inner_steps,
        "fragments": len(plan.fragments),
        "overlap": plan.overlap,
        "bits": plan.bits,
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
        "memory": [{"name": peer.name, "main": peer.main_needed, "gpu": peer.gpu_needed} for peer in plan.peers],
        "bandwidth_needed": {f"{target:g}": rate for target, rate in needed.items()},
    }


def duration(seconds: float) -> str:
    """Return a duration in the unit in which it is easiest to read."""
    for factor, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
