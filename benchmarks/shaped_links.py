"""Averaging rounds between network namespaces, compared with the limits of the links; used by benchmarks/averaging.py.

There are two limits. The *bound* is the time that the links need for the bytes if the averaging is split between them
in the best way; with equal links every peer sends 2 (n - 1) / n payloads. *All at once* is the same time with the rates
that iperf3 gets while all peers send to all others, in the better of two measurements, before and after the rounds. The
links may share a medium that carries less than all of them together, so the bar uses the longer time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.groups import GLOO_BYTES, OURS, Group, measure, sent_bytes, times_ours
from benchmarks.namespaces import has_iperf3, place_in, rates_alone, rates_at_once
from benchmarks.reporting import Bar
from opendiloco.kernels import INT8


@dataclass(frozen=True)
class Possible:
    """The least number of seconds that a round of one payload can take on the links, computed from the links' speeds,
    measured one link at a time (`alone`) and all links at once (`at_once`)."""

    alone: float
    at_once: float

    @property
    def seconds(self) -> float:
        return max(self.alone, self.at_once)


def least_seconds(payload: int, rates: Sequence[float]) -> float:
    """Return the least seconds in which members whose links carry `rates` bytes a second, in each direction, can
    average a payload of `payload` bytes: the members share the reducing in the best way.

    With n members, one that reduces the share x of the payload sends and receives 1 + (n - 2) x payloads. In a time T,
    a link of `rate` payloads a second therefore allows a share of (T * rate - 1) / (n - 2), and the shares must add up
    to 1. No share may be negative, because every member sends its own blocks and receives the average.
    """
    members, fastest = len(rates), sorted(rates, reverse=True)
    splits = [payload * (members - 2 + count) / sum(fastest[:count]) for count in range(1, members + 1)]
    return max(payload / fastest[-1], min(splits))


def row_of(group: Group, groups: dict[str, Group], values: int, possible: Possible) -> dict[str, Any]:
    peers, seconds = len(group.peers), statistics.median(group.seconds)
    payload = group.contender.payload(values)
    return {
        "contender": group.contender.name,
        "peers": peers,
        "seconds": seconds,
        "slowest": max(group.seconds),
        "exchange s": group.exchange_seconds if group.contender.name == OURS else None,
        "CPU s/GB": group.cpu_per_gigabyte(values),
        "payload MB": payload / 1e6,
        "sent MB": sent_bytes(payload, peers) / 1e6,
        "bound s": possible.alone,
        "all at once s": possible.at_once,
        "of what is possible": possible.seconds / seconds,
        "times ours": times_ours(groups, group.contender.name),
    }


def bars_of(groups: dict[str, Group], possible: Possible, streams: int, least: float) -> list[Bar]:
    ours = groups[OURS]
    where = f"{len(ours.peers)} peers"
    reached = possible.seconds / statistics.median(ours.seconds)
    bars = [Bar(f"what iperf3 -P {streams} allows / ours, {where}", reached, least)]
    if GLOO_BYTES in groups:
        bars.append(Bar(f"{GLOO_BYTES} / ours, {where}", times_ours(groups, GLOO_BYTES), 1.0))
    return bars


def run(
    values: int, namespaces: Sequence[str], repetitions: int, with_gloo: bool, streams: int, least: float
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Measure the links and averaging rounds, and return the table's rows and the bars; both are empty without iperf3.
    `least` is a bar: the share (0 to 1) of the links' possible speed that our rounds must reach."""
    if not has_iperf3():
        return [], []
    places, payload = list(map(place_in, namespaces)), INT8.payload_size(values)
    alone, before = rates_alone(namespaces, streams), rates_at_once(namespaces, streams)
    names = [OURS, GLOO_BYTES] if with_gloo else [OURS]
    groups = asyncio.run(measure(names, values, places, repetitions))
    at_once = [least_seconds(payload, rates.both_ways) for rates in (before, rates_at_once(namespaces, streams))]
    possible = Possible(least_seconds(payload, alone.both_ways), min(at_once))
    rows = [row_of(group, groups, values, possible) for group in groups.values()]
    return rows, bars_of(groups, possible, streams, least)
