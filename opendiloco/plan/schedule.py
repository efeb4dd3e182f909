"""The simulator of section 3.1 of arXiv 2501.18512: what one replica computes and sends when, layer by layer.

A step has four kinds of nodes, one of each for a layer: forward, backward with respect to activations (not for the
first layer), backward with respect to parameters, and reduction. One processor computes, one link reduces; each takes
its nodes in order. A layer's forward waits for the reduction of its parameters, if one is due by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

from opendiloco.plan.methods import Fragment, Method

CYCLES = 2
"""Cycles that are simulated before utilisation is measured, and while it is: from the second on, all are alike."""


class Kind(StrEnum):
    """What a node does."""

    FORWARD = "forward"
    ACTIVATIONS = "backward, activations"
    PARAMETERS = "backward, parameters"
    REDUCTION = "reduction"


@dataclass(frozen=True)
class Node:
    """One node of the graph, and the seconds at which it begins and ends."""

    kind: Kind
    step: int
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """An inner step: so many layers, and the seconds that each of their three computing nodes takes."""

    layers: int
    node: float

    @classmethod
    def of(cls, layers: int, seconds: float) -> Self:
        """Return a step whose nodes take so many seconds together."""
        return cls(layers, seconds / (3 * layers - 1))

    @property
    def seconds(self) -> float:
        """Return the seconds of computing; the first layer has no backward with respect to activations."""
        return (3 * self.layers - 1) * self.node


@dataclass(frozen=True)
class Exchange:
    """A reduction: it can begin after the backward pass of one layer, and is needed before the forward of another.

    It takes the link for `seconds`, and is there `lag` seconds later; meanwhile the link is free for the next one.
    """

    after: int
    before: int
    seconds: float
    lag: float = 0.0


class Transport(Protocol):
    """What carries fragments."""

    def exchanges(self, place: int, fragment: Fragment, bits: float) -> Sequence[Exchange]:
        """Return the reductions of a method's fragment with this number, in the order in which they can begin."""


@dataclass(frozen=True)
class Wire:
    """A uniform link, over which an all-reduce among so many replicas sends 2 (n - 1) / n of its values from each.

    Each layer is reduced by itself, as soon as its gradients are there. `latency` is added to each reduction.
    """

    bits_per_second: float
    replicas: int = 2
    latency: float = 0.0

    def exchanges(self, place: int, fragment: Fragment, bits: float) -> Sequence[Exchange]:
        layers = fragment.layers or (0,)
        values = 2 * (self.replicas - 1) / self.replicas * fragment.values / len(layers)
        seconds = self.latency + bits * values / self.bits_per_second
        return [Exchange(layer, layer, seconds) for layer in sorted(layers, reverse=True)]


@dataclass
class Simulation:
    """A replica in training. With `nodes`, every node is recorded there."""

    step: Step
    method: Method
    transport: Transport
    nodes: list[Node] | None = None
    steps: int = 0
    _now: float = 0.0
    _link_free: float = 0.0
    _all_there: float = 0.0
    _due: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def ended(self) -> float:
        """Return the seconds until all that was begun is done."""
        return max(self._now, self._all_there)

    def run(self, steps: int) -> None:
        """Train for so many more steps."""
        last = self.steps + steps
        while self.steps < last:
            skipped = min(self._undisturbed(), last - self.steps - 1)
            self.steps += skipped + 1
            self._now += skipped * self.step.seconds
            self._forward(self._due.pop(self.steps, {}))
            self._backward(self._exchanges())

    def _undisturbed(self) -> int:
        """Return how many of the next steps only compute; none while nodes are recorded."""
        if self.nodes is not None:
            return 0
        cycle, place = self.method.cycle, self.steps % self.method.cycle
        sent = min((end - 1 - place) % cycle for end in self.method.ends)
        return min(sent, min(self._due, default=self.steps + cycle + 1) - self.steps - 1)

    def _exchanges(self) -> list[Exchange]:
        """Return the reductions that begin in this step."""
        place_in_cycle = (self.steps - 1) % self.method.cycle + 1
        begun = list[Exchange]()
        for place, (fragment, end) in enumerate(zip(self.method.fragments, self.method.ends, strict=True)):
            if end == place_in_cycle:
                begun += self.transport.exchanges(place, fragment, self.method.bits)
        return begun

    def _forward(self, due: dict[int, float]) -> None:
        if not due and self.nodes is None:
            self._now += self.step.layers * self.step.node
            return
        for layer in range(self.step.layers):
            self._now = max(self._now, due.get(layer, 0.0))
            self._compute(Kind.FORWARD, layer)

    def _backward(self, exchanges: Sequence[Exchange]) -> None:
        if not exchanges and self.nodes is None:
            self._now += (2 * self.step.layers - 1) * self.step.node
            return
        for layer in reversed(range(self.step.layers)):
            if layer:
                self._compute(Kind.ACTIVATIONS, layer)
            self._compute(Kind.PARAMETERS, layer)
            for exchange in exchanges:
                if exchange.after == layer:
                    self._reduce(exchange)

    def _compute(self, kind: Kind, layer: int) -> None:
        self._record(kind, layer, self._now, self._now + self.step.node)
        self._now += self.step.node

    def _reduce(self, exchange: Exchange) -> None:
        start = max(self._now, self._link_free)
        self._link_free = start + exchange.seconds
        self._record(Kind.REDUCTION, exchange.after, start, self._link_free)
        due = self._due.setdefault(self.steps + 1 + self.method.overlap, {})
        there = self._link_free + exchange.lag
        due[exchange.before] = max(due.get(exchange.before, 0.0), there)
        self._all_there = max(self._all_there, there)

    def _record(self, kind: Kind, layer: int, start: float, end: float) -> None:
        if self.nodes is not None:
            self.nodes.append(Node(kind, self.steps, layer, start, end))


def cycle_seconds(step: Step, method: Method, transport: Transport) -> float:
    """Return how long a cycle takes in a long run, with all waiting."""
    simulation = Simulation(step, method, transport)
    simulation.run(CYCLES * method.cycle)
    before = simulation.ended
    simulation.run(CYCLES * method.cycle)
    return (simulation.ended - before) / CYCLES


def utilisation(step: Step, method: Method, transport: Transport) -> float:
    """Return the share of its time that a replica computes in a long run."""
    return method.cycle * step.seconds / cycle_seconds(step, method, transport)
