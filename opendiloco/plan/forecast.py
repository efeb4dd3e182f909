"""What a method comes to with given machines and links: utilisation, tokens, bytes, money, and joining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from opendiloco.host_memory import STATE_BYTES
from opendiloco.plan.methods import Method, Shape
from opendiloco.plan.rounds import LINK_SHARE, Peer, Rounds, Swarm, round_of
from opendiloco.plan.schedule import Step, Wire, cycle_seconds
from peers.log.settings import Timing
from peers.protocol.pace import Pace

SECONDS_A_DAY = 86_400
LEAST_IDLE = 0.01
"""Share of a link's time that joiners need at least; with less they never catch up."""


@dataclass(frozen=True)
class Plan:
    """A run as far as the planner needs to know it. What has a default is the manifest's, too."""

    shape: Shape
    swarm: Swarm
    inner_steps: int
    tokens_per_step: int
    smallest_share: float
    snapshot_every: int
    timing: Timing = field(default_factory=Timing)
    staleness: int = 1
    contributions: float | None = None
    overlap: int = 0

    @property
    def pace(self) -> Pace:
        """Return the pace that peers keep."""
        return Pace(
            self.inner_steps,
            self.inner_steps * self.tokens_per_step,
            self.smallest_share,
            self.timing,
            self.staleness,
            contributions=self.contributions,
            overlap=self.overlap,
        )

    def own_steps(self, peer: Peer) -> int:
        """Return the inner steps that a peer makes while the fastest makes all, as its leases are sized."""
        fastest = min(each.step_seconds for each in self.swarm.peers)
        return self.pace.steps(self.tokens_per_step / peer.step_seconds, self.tokens_per_step / fastest)

    def training_seconds(self, peer: Peer) -> float:
        """Return the seconds for which a peer trains its lease."""
        return self.own_steps(peer) * peer.step_seconds

    @property
    def closes_after(self) -> float:
        """Return the seconds after which nobody is waited for any more: the grace begins when most are ready; in an
        asynchronous run the slack, when enough are."""
        trainings = sorted(self.training_seconds(peer) for peer in self.swarm.peers for _ in range(peer.count))
        most = len(trainings) // 2
        if self.contributions is None:
            return trainings[most] + self.pace.grace(trainings[0])
        enough = math.ceil(self.contributions * len(trainings)) - 1
        return trainings[max(most, enough)] + self.pace.slack(trainings[0])


@dataclass(frozen=True)
class PeerForecast:
    """Of each of some equal peers: inner steps that it makes for an entry, how many cycles there are from one of its
    entries to the next (0: its work never counts), shares of its time that it computes for them and its link sends;
    seconds until a newcomer among them has the state, None if it never has."""

    name: str
    count: int
    inner_steps: int
    cycles: int
    utilisation: float
    link_share: float
    sent_bits: float
    joining: float | None


@dataclass(frozen=True)
class Forecast:
    """Of a method. A cycle is one outer step; data-parallel training has one after each step.

    `round_seconds` are those of the longest exchange. Costs are None unless all prices are known.
    """

    method: Method
    cycle_seconds: float
    round_seconds: float
    utilisation: float
    tokens_per_day: float
    cost_per_day: float | None
    peers: tuple[PeerForecast, ...]

    @property
    def sent_bits(self) -> float:
        """Return the bits that the busiest peer sends in a cycle."""
        return max(peer.sent_bits for peer in self.peers)

    @property
    def sent_bits_per_day(self) -> float:
        return self.sent_bits / self.cycle_seconds * SECONDS_A_DAY

    @property
    def joining(self) -> float | None:
        """Return the seconds of the slowest joiner; None if one of them never catches up."""
        each = [peer.joining for peer in self.peers]
        return None if None in each else max(seconds for seconds in each if seconds is not None)

    @property
    def cost_per_giga_token(self) -> float | None:
        return None if self.cost_per_day is None else self.cost_per_day / self.tokens_per_day * 1e9


def forecast(plan: Plan, method: Method) -> Forecast:
    """Return what a method comes to. Peers wait for one another at each cycle's end, but for nobody that is late: its
    work counts in a later entry, for as long as its lease lasts."""
    if method.cycle == 1:
        return _data_parallel(plan, method)
    swarm = plan.swarm
    rounds = Rounds(
        tuple(round_of(swarm, fragment.values, method.bits, method.encoded) for fragment in method.fragments)
    )
    steps = [plan.own_steps(peer) for peer in swarm.peers]
    waited_for = [peer for peer in swarm.peers if plan.training_seconds(peer) <= plan.closes_after]
    seconds = max(map(plan.training_seconds, waited_for)) + max(
        max(
            0.0,
            cycle_seconds(Step.of(1, peer.step_seconds), _with_steps(method, own), rounds) - own * peer.step_seconds,
        )
        for own, peer in zip(steps, swarm.peers, strict=True)
        if peer in waited_for
    )
    sent = [sum(each.payload_bits * each.moved[kind] for each in rounds.rounds) for kind in range(len(swarm.peers))]
    return _forecast(plan, method, seconds, max(each.seconds for each in rounds.rounds), steps, sent)


def _data_parallel(plan: Plan, method: Method) -> Forecast:
    """Return the forecast for an all-reduce that the slowest link and the slowest peer hold up at each step."""
    swarm = plan.swarm
    wire = Wire(swarm.slowest_rate, swarm.count, 2 * swarm.delay / len(plan.shape.layers))
    slowest = max(peer.step_seconds for peer in swarm.peers)
    seconds = cycle_seconds(Step.of(len(plan.shape.layers), slowest), method, wire)
    sent = 2 * (swarm.count - 1) / swarm.count * plan.shape.values * method.bits
    reduction = sent / wire.bits_per_second + 2 * swarm.delay
    return _forecast(plan, method, seconds, reduction, [1] * len(swarm.peers), [sent] * len(swarm.peers))


def _forecast(
    plan: Plan, method: Method, seconds: float, longest: float, steps: list[int], sent: list[float]
) -> Forecast:
    kinds = plan.swarm.peers
    cycles = [1 if method.cycle == 1 else _cycles(plan, peer, seconds) for peer in kinds]
    busy = max(bits / peer.rate for bits, peer in zip(sent, kinds, strict=True))
    peers = tuple(
        PeerForecast(
            name=peer.name,
            count=peer.count,
            inner_steps=own,
            cycles=between,
            utilisation=own * peer.step_seconds / (between * seconds) if between else 0.0,
            link_share=min(1.0, bits / peer.rate / seconds),
            sent_bits=bits,
            joining=joining(plan, method, peer, seconds, busy),
        )
        for peer, own, between, bits in zip(kinds, steps, cycles, sent, strict=True)
    )
    tokens = plan.tokens_per_step * sum(peer.count * peer.inner_steps / peer.cycles for peer in peers if peer.cycles)
    prices = [None if peer.price_per_hour is None else peer.count * peer.price_per_hour for peer in kinds]
    known = [price for price in prices if price is not None]
    return Forecast(
        method=method,
        cycle_seconds=seconds,
        round_seconds=longest,
        utilisation=sum(peer.count * peer.utilisation for peer in peers) / plan.swarm.count,
        tokens_per_day=tokens / seconds * SECONDS_A_DAY,
        cost_per_day=24 * sum(known) if len(known) == len(prices) else None,
        peers=peers,
    )


def _cycles(plan: Plan, peer: Peer, seconds: float) -> int:
    """Return from how many cycles of so many seconds to the next a peer is in an entry; 0: its lease is over before."""
    trained = plan.training_seconds(peer)
    cycles = 1 if trained <= plan.closes_after else math.ceil(trained / seconds)
    return cycles if cycles <= 1 + plan.staleness else 0


def joining(plan: Plan, method: Method, peer: Peer, seconds: float, busy: float) -> float | None:
    """Return the seconds until a newcomer has the state: a snapshot, and the entries since, replayed.

    It fetches in the time that rounds leave, from all others at once. The snapshot may be as old as two snapshots are
    apart, and more entries are made meanwhile. None if it never catches up.
    """
    idle = 1 - busy / seconds
    if idle < LEAST_IDLE:
        return None
    donors = LINK_SHARE * (sum(each.count * each.up for each in plan.swarm.peers) - peer.up)
    rate = idle * min(LINK_SHARE * peer.down, donors)
    snapshot, payload = 8 * STATE_BYTES * plan.shape.values / rate, plan.shape.values * method.bits / rate
    if payload >= seconds:
        return None
    return (snapshot + plan.snapshot_every * payload) / (1 - payload / seconds)


def _with_steps(method: Method, steps: int) -> Method:
    """Return the method of a peer that makes so many inner steps in a cycle. Each fragment is taken `overlap` of them
    before it is due, so that all have come back when the cycle ends; at the earliest when it begins."""
    overlap = min(method.overlap, steps - 1)
    due = [max(1, end * steps // method.cycle) for end in method.ends]
    return replace(method, ends=tuple(max(0, end - overlap) or steps for end in due), cycle=steps, overlap=overlap)
