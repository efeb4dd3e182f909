"""A new implementation of the simulator of Streaming DiLoCo (arXiv 2501.18512, section 3.1). The table shows the Gbit/s
needed for a compute utilisation of 50 to 99 %, beside the paper's values (Table 4).

A step has four kinds of nodes, one of each for a layer: forward, backward with respect to activations (not for the
first layer), backward with respect to parameters, and reduction. One processor computes and one link reduces; each
takes its nodes in order. A layer's forward waits for the reduction of its parameters, if one is due by then.

From the paper: layers and seconds of a step, H = 100, strided fragments of 3 layers, tau = 1, 2 replicas, 4 bits for
FP4. The paper leaves these points open, so they are our choices:

- 10^9, 10^10 and 10^11 values, shared equally by the layers, and no embeddings, as its 4 L - 1 nodes have none; 16
  bits a value without FP4; a third of a layer's time for each of its three computing nodes.
- An all-reduce sends 2 (n - 1) / n payloads from each of n replicas, and has no latency.
- A fragment is synchronised every round(H / P) steps, so that a cycle may be a little longer or shorter than H. The
  paper says "every 11, 5, and 2 steps", which is the same if it means the steps between two synchronisations.
- All numbers of the table lie on 50 bandwidths from 0.1 to 1000 Gbit/s, each 1.207 times the one before, rounded to
  hundredths and then to tenths. Each is the last of them at which the utilisation is still below the target: at 1
  Gbit/s FP4 with overlap computes for 77 % of its time by Table 1, while Table 4 has 0.9 Gbit/s for 80 %.

The spacing of fragments and the reading of the grid were chosen among several because they agree best, each once for
all three sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.reporting import Bar, json_option, report

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = [0.1 * 1e4 ** (place / 49) for place in range(50)]
INNER_STEPS, FRAGMENT_LAYERS, OVERLAP, REPLICAS = 100, 3, 1, 2
TOLERANCE = 0.15
"""Largest relative difference of two numbers at the same place on the grid, smaller than a step of the grid."""
HOURS = {"data-parallel": 1097, "with overlap, FP4": 8.75}
"""Hours in the paper's Table 1 for training 1B on 250 G tokens at 1 Gbit/s. Without communication it is HOURS_ALONE."""
HOURS_ALONE = 6.75
AGREEING, OFF = 73 / 75, 0.01
"""Bars: the share of agreeing cells of the paper's Table 4, and the largest relative error of Table 1's times."""
CYCLES = 2
"""Number of cycles simulated before the measurement of utilisation, and during it. All cycles after the first are
alike."""
HALVINGS = 20


@dataclass(frozen=True)
class SyncSchedule:
    """A schedule of a method's synchronisation. Each fragment is a tuple of layers; fragment i is sent after inner step
    `ends[i]` of each `cycle` inner steps.

    Training goes on for `overlap` inner steps (tau) without the result; with 0 it waits.
    """

    fragments: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    cycle: int
    overlap: int = 0
    bits: int = 16


@dataclass(frozen=True)
class Scale:
    """A model in Table 4 of arXiv 2501.18512: its number of layers, seconds of an inner step, number of parameters
    (`values`), and the table's Gbit/s for the utilisations of TARGETS (`rows`)."""

    layers: int
    step_seconds: float
    values: int
    rows: dict[str, tuple[float, ...]]

    @property
    def node(self) -> float:
        """The seconds of one pass through a layer: forward, backward for its parameters, or backward for its input."""
        return self.step_seconds / (3 * self.layers)

    def method(self, row: str) -> SyncSchedule:
        """Return the synchronisation schedule of the method that `row` names, a row of Table 4 of arXiv 2501.18512."""
        everything = (tuple(range(self.layers)),)
        if row == "data-parallel":
            return SyncSchedule(everything, (1,), 1)
        if row == "DiLoCo":
            return SyncSchedule(everything, (INNER_STEPS,), INNER_STEPS)
        count = -(-self.layers // FRAGMENT_LAYERS)
        fragments = tuple(tuple(range(first, self.layers, count)) for first in range(count))
        spacing = round(INNER_STEPS / count)
        ends = tuple(spacing * (place + 1) for place in range(count))
        overlap = OVERLAP if "overlap" in row else 0
        return SyncSchedule(fragments, ends, ends[-1], overlap, bits=4 if "FP4" in row else 16)


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


@dataclass
class Simulation:
    """A simulated replica in training. `node` is the seconds of one pass through a layer (forward, backward for its
    parameters, or backward for its input), `reduction` the seconds in which the link averages one layer."""

    layers: int
    node: float
    reduction: float
    method: SyncSchedule
    _step: int = 0
    _now: float = 0.0
    _link_free: float = 0.0
    _due: dict[int, dict[int, float]] = field(default_factory=dict)

    def cycles(self, count: int) -> float:
        """Simulate `count` more cycles, and return the simulated time in seconds at which all computing and sending of
        these cycles is done."""
        last = self._step + count * self.method.cycle
        while self._step < last:
            skipped = min(self._undisturbed(), last - self._step - 1)
            self._step += skipped + 1
            self._now += skipped * (3 * self.layers - 1) * self.node
            self._forward(self._due.pop(self._step, {}))
            self._backward()
        return max(self._now, self._link_free)

    def _undisturbed(self) -> int:
        """Return the number of inner steps, counted from the next one, before the first that sends a fragment or waits
        for one."""
        cycle, place = self.method.cycle, self._step % self.method.cycle
        sent = min((end - 1 - place) % cycle for end in self.method.ends)
        return min(sent, min(self._due, default=self._step + cycle + 1) - self._step - 1)

    def _forward(self, due: dict[int, float]) -> None:
        for layer in range(self.layers):
            self._now = max(self._now, due.get(layer, 0.0)) + self.node

    def _backward(self) -> None:
        place = (self._step - 1) % self.method.cycle + 1
        sent = {
            layer
            for fragment, end in zip(self.method.fragments, self.method.ends, strict=True)
            if end == place
            for layer in fragment
        }
        for layer in reversed(range(self.layers)):
            # One pass is for the gradients of the layer's parameters, and one for those of its input, which the first
            # layer does not need.
            self._now += self.node * (2 if layer else 1)
            if layer in sent:
                self._link_free = max(self._now, self._link_free) + self.reduction
                self._due.setdefault(self._step + 1 + self.method.overlap, {})[layer] = self._link_free


def utilisation(scale: Scale, method: SyncSchedule, gigabits: float) -> float:
    """Return the share (0 to 1) of a long run's time in which a replica computes, over a link of `gigabits` Gbit/s."""
    values = 2 * (REPLICAS - 1) / REPLICAS * scale.values / scale.layers
    simulation = Simulation(scale.layers, scale.node, method.bits * values / (gigabits * 1e9), method)
    before = simulation.cycles(CYCLES)
    took = simulation.cycles(CYCLES) - before
    return CYCLES * method.cycle * (3 * scale.layers - 1) * scale.node / took


def least_bandwidth(scale: Scale, method: SyncSchedule, target: float) -> float:
    """Return the least bandwidth in Gbit/s at which the utilisation reaches `target` (0 to 1)."""
    low, high = 1e-3, 1e4
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation(scale, method, middle) >= target else (middle, high)
    return high


def as_printed(bandwidth: float) -> float:
    """Return a bandwidth rounded to hundredths and then to tenths, as the paper prints it. Half a tenth is rounded as
    Python formats the float: 0.95 becomes 0.9, and 2.95 becomes 3.0."""
    return float(f"{round(bandwidth, 2):.1f}")


def row_of(size: str, name: str) -> dict[str, Any]:
    """Return the table's row on one method and one model size: the paper's Gbit/s and the simulated Gbit/s for each
    target utilisation."""
    scale, row = TABLE[size], dict[str, Any](size=size, method=name)
    for target, papers in zip(TARGETS, scale.rows[name], strict=True):
        least = least_bandwidth(scale, scale.method(name), target)
        row[f"{target:.0%}"] = papers
        row[f"{target:.0%}, ours"] = as_printed(max(place for place in GRID if place < least))
    return row


def bars_of(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    columns = [f"{target:.0%}" for target in TARGETS]
    agreeing = [
        abs(row[f"{column}, ours"] - row[column]) <= TOLERANCE * row[column] for row in rows for column in columns
    ]
    scale = TABLE["1B"]
    off = max(
        abs(HOURS_ALONE / hours / utilisation(scale, scale.method(name), 1.0) - 1) for name, hours in HOURS.items()
    )
    return [
        Bar("cells of Table 4 that agree, of all", sum(agreeing) / len(agreeing), AGREEING, digits=3),
        Bar("1 - the most that a time of Table 1 is off", 1 - off, 1 - OFF, digits=3),
    ]


@click.command(help=__doc__)
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(TABLE)), help="Only this size of Table 4.")
@json_option
def main(sizes: tuple[str, ...], json_file: Path | None) -> None:
    rows = [row_of(size, name) for size in sizes or TABLE for name in TABLE[size].rows]
    report("Gbit/s for a compute utilisation: Table 4 of arXiv 2501.18512, and ours", rows, bars_of(rows), json_file)


if __name__ == "__main__":
    main()
