"""The planner, which forecasts a run on given machines and links before they are rented: its utilisation, tokens,
traffic, cost, joining times and the bandwidth that it needs.

Only sizing a model needs torch. docs/runs.md lists the assumptions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from opendiloco.config.run_config import RunConfig
from opendiloco.config.section import Name, NotNegativeFloat, Positive, Section, describe_validation_error, read_toml
from opendiloco.host_memory import STATE_BYTES
from opendiloco.kernels import FORMATS
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.quantities import SECONDS_A_DAY, OptimizerState, bandwidth_in_words
from opendiloco.training.codec import BLOCK_VALUES
from opendiloco.workers.options import WorkerOptions
from peers.driver.training import Sending
from peers.errors import ManifestError
from peers.log.settings import Timing
from peers.protocol.pace import Pace
from peers.protocol.planning import deadline, deal, foreseen, format_for, is_fair, seconds_to_send
from peers.protocol.voter import OPEN_LIMIT
from peers.values.chunks import Chunking, PayloadSize, payloads_moved

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs


# Links ----------------------------------------------------------------------------------------------------------------
Megabits = Annotated[float, Field(gt=0, le=1e7)]
Amount = Annotated[float, Field(gt=0, le=1e30)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
PEERS_LIMIT = 1000
"""Most peers of a plan."""


class PeerSection(Section):
    """A kind of peer in `links.toml`, with `count` equal peers. `latency_ms` is a round trip to a well-connected
    server, as ping shows it. Exactly one of these gives the speed of each peer: `step_seconds` (an inner step of its
    whole batch), `tokens_per_second`, or `gpu` (torch's name of it) with the number `gpus`. `optimizer_state` is the
    option of `join`."""

    name: Name | None = None
    count: Positive = 1
    up_mbit: Megabits
    down_mbit: Megabits
    latency_ms: Milliseconds = 50.0
    step_seconds: Amount | None = None
    tokens_per_second: Amount | None = None
    gpu: Name | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    gpu_memory_gb: Amount | None = None
    main_memory_gb: Amount | None = None
    optimizer_state: OptimizerState = "device"
    price_per_hour: NotNegativeFloat | None = None

    @model_validator(mode="after")
    def check_speed(self) -> Self:
        given = [key for key in ("step_seconds", "tokens_per_second", "gpu") if getattr(self, key) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "no speed"
            raise ValueError(f"{named} given: give exactly one of step_seconds, tokens_per_second and gpu")
        if self.gpus == 0 and (self.gpu is not None or self.gpu_memory_gb is not None):
            raise ValueError("gpus = 0 excludes gpu and gpu_memory_gb: remove them, or set gpus to the number of GPUs")
        return self


class LinksFile(Section):
    """The content of a `links.toml`: the peers with their links and speeds."""

    peers: Annotated[tuple[PeerSection, ...], Field(strict=False, min_length=1, max_length=PEERS_LIMIT)]

    @model_validator(mode="after")
    def check_count(self) -> Self:
        count = sum(peer.count for peer in self.peers)
        if not 2 <= count <= PEERS_LIMIT:
            raise ValueError(f"the counts of all [[peers]] add up to {count}; give 2 to {PEERS_LIMIT} peers")
        return self

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read a `links.toml` and return its checked content. Raises: ManifestError with a line for each problem."""
        content = read_toml(path, "Give a file that exists.")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ManifestError(describe_validation_error(str(path), error, cls)) from None


# Plan -----------------------------------------------------------------------------------------------------------------
LINK_SHARE = 0.95
"""Share of a link's bits that carry data: a packet of 1,514 bytes carries 1,448, minus TLS and chunk headers."""
DELAYS, DELAYS_OF_MORE = 8, 10
"""One-way delays in a round: Ready, Begin, a block to its reducer, its average back, Part, Propose, Vote 1, Vote 2.
Above `OPEN_LIMIT` peers, also a certificate after each vote (docs/protocol.md, Liveness)."""
QUANTIZED, QUANTIZED_SPARSE = 1.67e9, 0.37e9
"""Values a second that one thread encodes: in int8, and as sparse payloads with error feedback (docs/codecs.md)."""
SETTLING = 8
"""Most rounds computed until the contributions' formats no longer change. A round's formats follow from the duration of
the round before."""
STEPPED = 1.69e9
"""Values a second to which one thread applies the outer step (docs/codecs.md)."""


@dataclass(frozen=True)
class PeerGroup:
    """A kind of peer in a plan, with `count` equal peers. `up` and `down` are bits a second, `latency` is a round trip
    to a well-connected server in seconds. With `gpus` 0, the peers train on the CPU. Memory is in bytes. A memory or a
    price that is not given is None. `main_needed` is the main memory that the run needs, `gpu_needed` the memory of
    each GPU, without activations."""

    name: str
    count: int
    up: float
    down: float
    latency: float
    step_seconds: float
    gpus: int = 1
    gpu_memory: float | None = None
    main_memory: float | None = None
    price_per_hour: float | None = None
    main_needed: int = 0
    gpu_needed: int | None = None

    @property
    def rate(self) -> float:
        """The bits of data a second that a peer's link carries in each direction while both directions are in use."""
        return LINK_SHARE * min(self.up, self.down)

    @property
    def uplink(self) -> float:
        """The bytes of data a second that a peer's uplink carries."""
        return LINK_SHARE * self.up / 8


@dataclass(frozen=True)
class _Round:
    """The forecast of one round, with times in seconds. Tuples have a value for each kind of peer: the number of
    payloads `received` and `sent`, the time in which its link is `busy`, and its contribution's format and size."""

    arithmetic: float
    delays: float
    transfer: float
    payload_bits: float
    received: tuple[float, ...]
    sent: tuple[float, ...]
    busy: tuple[float, ...]
    sending: tuple[Sending, ...]

    @property
    def lag(self) -> float:
        """The seconds of a round apart from its transfer, in which the link is free for the next round."""
        return self.arithmetic + self.delays

    @property
    def seconds(self) -> float:
        return self.transfer + self.lag


def round_of(
    peers: Sequence[PeerGroup],
    values: int,
    bits: float,
    encoded: float = QUANTIZED,
    thinner: Sequence[float] = (),
    timing: Timing | None = None,
    overlaps: Sequence[float] = (),
) -> _Round:
    """Return the forecast of a round that averages `values` values of `bits` bits. A peer encodes `encoded` values a
    second. Chunks are dealt to reducers, and contributions may use the `thinner` formats (bits a value), as in the
    protocol. `overlaps` are the seconds for which each kind of peer trains during the round; the default is 0."""
    timing, overlaps = timing or Timing(), overlaps or [0.0] * len(peers)
    kinds = [kind for kind, peer in enumerate(peers) for _ in range(peer.count)]
    names = [str(place) for place in range(len(kinds))]
    rates = {name: peers[kind].rate / 8 for name, kind in zip(names, kinds, strict=True)}
    sizes = [round(values * each / 8) for each in (bits, *thinner)]
    size = PayloadSize(Chunking(-(-values // BLOCK_VALUES)).count, sizes[0], tuple(sizes[1:]))
    furthest = sorted(peer.latency for peer in peers for _ in range(min(2, peer.count)))[-2:]
    delays = (DELAYS if len(names) <= OPEN_LIMIT else DELAYS_OF_MORE) * sum(furthest) / 2
    arithmetic = values / encoded + values / STEPPED
    allowed = None
    sending, received, sent, busy = list[Sending](), list[float](), list[float](), list[float]()
    for _ in range(SETTLING):
        before, times = sending, [seconds_to_send(allowed, timing, overlap) for overlap in overlaps]
        chosen = [format_for(size, peer.uplink, time) for peer, time in zip(peers, times, strict=True)]
        made = zip(chosen, peers, times, strict=True)
        sending = [Sending(one, sizes[one], peer.uplink, time) for one, peer, time in made]
        if sending == before:
            break
        shares = [size.share(sending[kind].format) for kind in kinds]
        able = [name for name, kind in zip(names, kinds, strict=True) if not sending[kind].format]
        dealt = deal(size.chunks, len(names), able if is_fair(able, names, len(names)) else names, rates)
        received = [payloads_moved(len(names), dealt.get(name, 0) / size.chunks) for name in names]
        sent = [both - 1 + share for both, share in zip(received, shares, strict=True)]
        busy = [
            values * bits / LINK_SHARE * max(out / peers[kind].up, back / peers[kind].down)
            for out, back, kind in zip(sent, received, kinds, strict=True)
        ]
        thin = dict(zip(names, shares, strict=True))
        seconds = deadline(foreseen(dealt, names, rates, size.bytes, thin), timing)
        allowed = max(seconds, min(*overlaps, timing.round_timeout))

    def mean_of_kinds(each: Sequence[float]) -> tuple[float, ...]:
        sums = [math.fsum(one for one, place in zip(each, kinds, strict=True) if place == kind) for kind in set(kinds)]
        return tuple(total / peer.count for total, peer in zip(sums, peers, strict=True))

    return _Round(
        arithmetic=arithmetic,
        delays=delays,
        transfer=max(busy),
        payload_bits=values * bits,
        received=mean_of_kinds(received),
        sent=mean_of_kinds(sent),
        busy=mean_of_kinds(busy),
        sending=tuple(sending),
    )


@dataclass(frozen=True)
class Plan:
    """The properties of a run that the planner needs. The defaults are those of the manifest. `fragments` are the
    numbers of values in each fragment. `bits` are the bits of a transferred value, and a peer encodes `encoded` values
    a second. `thinner` are the bits of a value in the other formats for contributions; `formats` names all, the run's
    own first. Peers train for `overlap` inner steps (tau in the papers) while a fragment is averaged; with 0, they
    wait."""

    fragments: tuple[int, ...]
    peers: tuple[PeerGroup, ...]
    inner_steps: int
    tokens_per_step: int
    smallest_share: float
    snapshot_every: int
    bits: float
    encoded: float = QUANTIZED
    timing: Timing = field(default_factory=Timing)
    staleness: int = 1
    contributions: float | None = None
    overlap: int = 0
    formats: tuple[str, ...] = ("int8",)
    thinner: tuple[float, ...] = ()

    @property
    def values(self) -> int:
        return sum(self.fragments)

    @property
    def count(self) -> int:
        return sum(peer.count for peer in self.peers)

    @property
    def pace(self) -> Pace:
        """The settings that determine the leases of the run's peers, and the leader's waits."""
        return Pace(
            self.inner_steps,
            self.inner_steps * self.tokens_per_step,
            self.smallest_share,
            self.timing,
            self.staleness,
            contributions=self.contributions,
            overlap=self.overlap,
        )

    @cached_property
    def rounds(self) -> tuple[_Round, ...]:
        """The forecast of each fragment's round."""
        speeds = [self.tokens_per_step / peer.step_seconds for peer in self.peers]
        overlaps = list(map(self.pace.overlap_seconds, speeds))
        return tuple(
            round_of(self.peers, values, self.bits, self.encoded, self.thinner, self.timing, overlaps)
            for values in self.fragments
        )

    def own_steps(self, peer: PeerGroup) -> int:
        """Return the number of inner steps in a peer's lease: as many as the peer takes while the fastest peer takes
        all `inner_steps`, within the run's limits."""
        fastest = min(each.step_seconds for each in self.peers)
        return self.pace.steps(self.tokens_per_step / peer.step_seconds, self.tokens_per_step / fastest)

    def training_seconds(self, peer: PeerGroup) -> float:
        """Return the seconds for which a peer trains on a lease."""
        return self.own_steps(peer) * peer.step_seconds

    @property
    def closes_after(self) -> float:
        """The seconds from the start of training until the leader stops waiting: until most peers are ready, and then
        for the grace. In an asynchronous run, at least the share `contributions` of the peers must be ready, too, and
        `Pace.slack` replaces the grace."""
        trainings = sorted(self.training_seconds(peer) for peer in self.peers for _ in range(peer.count))
        majority = len(trainings) // 2
        if self.contributions is None:
            return trainings[majority] + self.pace.grace(trainings[0])
        enough = math.ceil(self.contributions * len(trainings)) - 1
        return trainings[max(majority, enough)] + self.pace.slack(trainings[0])


def plan_of(config: RunConfig, skeleton: Any, links: LinksFile) -> Plan:
    """Return the plan of a run with the peers of `links`; `skeleton` is the model without weights. Raises:
    ManifestError if a peer's speed is given only by an unknown GPU."""
    from opendiloco.model.parameters import layout_of  # this import and the next import torch
    from opendiloco.workers.needs import UTILISATION, needs_of

    training, peers = config.training, []
    tokens_per_step = training.batch_size * training.sequence_length
    needs_by_kind = {
        (gpus, kept): needs_of(config, skeleton, max(1, gpus), WorkerOptions(optimizer_state=kept))
        for gpus, kept in {(each.gpus, each.optimizer_state) for each in links.peers}
    }
    for place, section in enumerate(links.peers):
        peak, needs = None, needs_by_kind[section.gpus, section.optimizer_state]
        if section.gpu is not None:
            peak = peak_tokens_per_second(section.gpu, section.gpus, needs.precision, needs.token_flops)
        rate = section.tokens_per_second or (None if peak is None else UTILISATION * peak)
        peers.append(_peer(section, place, tokens_per_step, rate, needs))
    return Plan(
        fragments=tuple(part.stop - part.start for part in layout_of(skeleton, config.streaming).fragments),
        peers=tuple(peers),
        inner_steps=training.inner_steps,
        tokens_per_step=tokens_per_step,
        smallest_share=config.rounds.smallest_share,
        snapshot_every=config.snapshots.every,
        bits=_bits_of(config.codec.kind),
        encoded=QUANTIZED_SPARSE if config.codec.kind == "sparse" else QUANTIZED,
        timing=config.rounds.timing,
        staleness=config.rounds.staleness,
        contributions=config.rounds.enough,
        overlap=config.streaming.overlap,
        formats=config.codec.contributions,
        thinner=tuple(map(_bits_of, config.codec.contributions[1:])),
    )


def _bits_of(codec: str) -> float:
    """Return the bits that a codec uses for each value, including the value's share of the block's header."""
    return 8 * FORMATS[codec].block_bytes / FORMATS[codec].block_values


def _peer(section: PeerSection, place: int, tokens: int, rate: float | None, needs: Needs) -> PeerGroup:
    """Return the kind of peer that a section describes. An inner step has `tokens` tokens, and each peer trains `rate`
    tokens a second."""
    if section.step_seconds is not None:
        seconds = section.step_seconds
    elif rate is not None:
        seconds = tokens / rate
    else:
        raise ManifestError(
            f"peers.{place}.gpu = {section.gpu!r} is not in the table of GPUs.",
            "Give step_seconds or tokens_per_second instead, or torch's name for the GPU, e.g. NVIDIA H100 80GB HBM3.",
        )
    return PeerGroup(
        name=section.name or f"peer {place + 1}",
        count=section.count,
        up=section.up_mbit * 1e6,
        down=section.down_mbit * 1e6,
        latency=section.latency_ms / 1e3,
        step_seconds=seconds,
        gpus=section.gpus,
        gpu_memory=section.gpu_memory_gb and 1e9 * section.gpu_memory_gb,
        main_memory=section.main_memory_gb and 1e9 * section.main_memory_gb,
        price_per_hour=section.price_per_hour,
        main_needed=needs.main_memory if section.gpus else needs.main_memory_on_cpu,
        gpu_needed=needs.device_memory if section.gpus else None,
    )


# Forecast -------------------------------------------------------------------------------------------------------------
LEAST_IDLE = 0.01
"""Least share of a link's time that must be idle: with less, joiners never catch up."""
SLOWEST_LINK, FASTEST_LINK = 1e4, 1e13
"""Bits a second between which the needed bandwidth is searched."""
HALVINGS = 12
"""Bisection steps, which narrow the interval to less than one percent."""
CYCLES = 2
"""Cycles simulated to warm up, and again to measure. From the second on, all cycles are alike."""


@dataclass(frozen=True)
class _PeerForecast:
    """The forecast for a kind of peer with `count` equal peers. A peer takes `inner_steps` for each lease; its work
    counts in a log entry every `cycles` cycles (0: never). `utilisation` is the share of its time spent on inner steps,
    `link_share` the share of time in which its link is busy. `formats` names its contributions' formats, the thinnest
    last. `joining` is the seconds until a newcomer has the state, None if it never catches up."""

    name: str
    count: int
    inner_steps: int
    cycles: int
    utilisation: float
    link_share: float
    sent_bits: float
    formats: tuple[str, ...]
    joining: float | None


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. A cycle is one outer step. `round_seconds` is the longest round. Costs are None unless all
    prices are known."""

    cycle_seconds: float
    round_seconds: float
    utilisation: float
    tokens_per_day: float
    cost_per_day: float | None
    peers: tuple[_PeerForecast, ...]

    @property
    def sent_bits(self) -> float:
        """The bits that the busiest peer sends in a cycle."""
        return max(peer.sent_bits for peer in self.peers)

    @property
    def sent_bits_per_day(self) -> float:
        return self.sent_bits / self.cycle_seconds * SECONDS_A_DAY

    @property
    def joining(self) -> float | None:
        """The seconds that the slowest joiner needs to fetch the state; None if a joiner never catches up."""
        each = [peer.joining for peer in self.peers]
        return None if None in each else max(seconds for seconds in each if seconds is not None)

    @property
    def cost_per_giga_token(self) -> float | None:
        return None if self.cost_per_day is None else self.cost_per_day / self.tokens_per_day * 1e9


def forecast(plan: Plan) -> Forecast:
    """Return the forecast of a run. At each cycle's end, peers wait for one another, but not for peers that are too
    slow (`closes_after`). A slow peer's work counts in a later entry, if its lease is still valid then."""
    kinds = plan.peers
    steps = [plan.own_steps(peer) for peer in kinds]
    waited_for = [peer for peer in kinds if plan.training_seconds(peer) <= plan.closes_after]
    seconds = max(map(plan.training_seconds, waited_for)) + max(
        max(0.0, _cycle_seconds(plan, peer) - plan.training_seconds(peer)) for peer in waited_for
    )
    sent = [sum(each.payload_bits * each.sent[kind] for each in plan.rounds) for kind in range(len(kinds))]
    busy = [sum(each.busy[kind] for each in plan.rounds) for kind in range(len(kinds))]
    cycles = [_cycles(plan, peer, seconds) for peer in kinds]
    peers = tuple(
        _PeerForecast(
            name=peer.name,
            count=peer.count,
            inner_steps=own,
            cycles=between,
            utilisation=own * peer.step_seconds / (between * seconds) if between else 0.0,
            link_share=min(1.0, busy[kind] / seconds),
            sent_bits=sent[kind],
            formats=tuple(plan.formats[one] for one in sorted({each.sending[kind].format for each in plan.rounds})),
            joining=_joining(plan, peer, seconds, max(busy)),
        )
        for kind, (peer, own, between) in enumerate(zip(kinds, steps, cycles, strict=True))
    )
    tokens = plan.tokens_per_step * sum(peer.count * peer.inner_steps / peer.cycles for peer in peers if peer.cycles)
    prices = [None if peer.price_per_hour is None else peer.count * peer.price_per_hour for peer in kinds]
    known = [price for price in prices if price is not None]
    return Forecast(
        cycle_seconds=seconds,
        round_seconds=max(each.seconds for each in plan.rounds),
        utilisation=sum(peer.count * peer.utilisation for peer in peers) / plan.count,
        tokens_per_day=tokens / seconds * SECONDS_A_DAY,
        cost_per_day=24 * sum(known) if len(known) == len(prices) else None,
        peers=peers,
    )


def _cycle_seconds(plan: Plan, peer: PeerGroup) -> float:
    """Return the mean seconds of a peer's cycle, from a simulation of several. The peer waits for rounds, but not for
    other peers. Each fragment has its own round, which begins after an inner step and ends before one. Transfers happen
    one by one; during the rest of a round, the link is free for the next transfer."""
    steps = plan.own_steps(peer)
    overlap = min(plan.overlap, steps - 1)
    taken = sorted(zip(_taken_after(plan, steps, overlap), plan.rounds, strict=True), key=lambda each: each[0])
    due = deque[tuple[int, float]]()  # (inner step that needs an average, seconds at which the average arrives)
    done, now, link_free, all_there, ends = 0, 0.0, 0.0, 0.0, list[float]()

    def train(until: int) -> None:
        nonlocal done, now
        while due and due[0][0] <= until:
            needed, there = due.popleft()
            now = max(now + (needed - 1 - done) * peer.step_seconds, there)
            done = needed - 1
        now += (until - done) * peer.step_seconds
        done = until

    for cycle in range(2 * CYCLES):
        for after, each in taken:
            train(cycle * steps + after)
            link_free = max(now, link_free) + each.transfer
            due.append((done + 1 + overlap, link_free + each.lag))
            all_there = max(all_there, link_free + each.lag)
        train((cycle + 1) * steps)
        ends.append(max(now, all_there))
    return (ends[-1] - ends[CYCLES - 1]) / CYCLES


def _taken_after(plan: Plan, steps: int, overlap: int) -> Sequence[int]:
    """Return for each fragment the inner step of a cycle after which the peer's contribution to it is computed:
    `overlap` steps before the average is due."""
    whole, fragments = plan.inner_steps, len(plan.fragments)
    due = [-(-(place + 1) * whole // fragments) for place in range(fragments)]
    return [max(0, max(1, each * steps // whole) - overlap) or steps for each in due]


def _cycles(plan: Plan, peer: PeerGroup, seconds: float) -> int:
    """Return the number of cycles, each of `seconds`, from one log entry with a peer's work to the next, or 0 if the
    peer's lease ends before its work can count."""
    trained = plan.training_seconds(peer)
    cycles = 1 if trained <= plan.closes_after else math.ceil(trained / seconds)
    return cycles if cycles <= 1 + plan.staleness else 0


def _joining(plan: Plan, peer: PeerGroup, seconds: float, busy: float) -> float | None:
    """Return the seconds until a newcomer has a snapshot and all later log entries; None if it never catches up. It
    fetches from all other peers at once, in the time that rounds leave idle. The snapshot may be as old as the interval
    between snapshots, and more entries are made meanwhile."""
    idle = 1 - busy / seconds
    if idle < LEAST_IDLE:
        return None
    donors = LINK_SHARE * (sum(each.count * each.up for each in plan.peers) - peer.up)
    rate = idle * min(LINK_SHARE * peer.down, donors)
    snapshot, payload = 8 * STATE_BYTES * plan.values / rate, plan.values * plan.bits / rate
    if payload >= seconds:
        return None
    return (snapshot + plan.snapshot_every * payload) / (1 - payload / seconds)


def least_bandwidth(plan: Plan, target: float) -> float | None:
    """Return the bits a second that every link needs, up and down, for the utilisation `target`; None if no bandwidth
    suffices."""

    def reaches(bandwidth: float) -> bool:
        peers = tuple(replace(peer, up=bandwidth, down=bandwidth) for peer in plan.peers)
        return forecast(replace(plan, peers=peers)).utilisation >= target

    low, high = SLOWEST_LINK, FASTEST_LINK
    if not reaches(high):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


# Report ---------------------------------------------------------------------------------------------------------------
FULL = 0.85
"""Share of a link's time above which overlapping rounds may be late. It was chosen between two measurements: at a half
they were in time, at 95 % they were late."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which the report shows the needed bandwidth."""


def show(console: Console, plan: Plan, found: Forecast, needed: Mapping[float, float | None]) -> None:
    """Print the forecast, the cost if all prices are known, warnings, and the bandwidth needed for each utilisation."""
    slowest = bandwidth_in_words(min(peer.rate for peer in plan.peers))
    console.print(
        f"{plan.values:,} parameters in {len(plan.fragments)} fragment{'s' * (len(plan.fragments) > 1)}, {plan.count}"
        f" peers, {plan.inner_steps} inner steps;\n"
        f"{plan.bits:.3g} bits a value, tau {plan.overlap}; the slowest link carries {slowest} of data"
    )
    table = _table("computes", "round", "cycle", "GB/day", "G tokens/day", "joining")
    table.add_row(
        f"{found.utilisation:.1%}",
        duration(found.round_seconds),
        duration(found.cycle_seconds),
        f"{found.sent_bits_per_day / 8e9:,.0f}",
        f"{found.tokens_per_day / 1e9:.3g}",
        "never" if found.joining is None else duration(found.joining),
    )
    console.print(table)
    console.print()
    console.print(_peers_table(plan, found))
    if found.cost_per_day is not None:
        console.print(f"{found.cost_per_day:,.2f} a day, {found.cost_per_giga_token:,.2f} for 10⁹ tokens")
    for line in _warnings(plan, found):
        console.print(line)
    console.print()
    bandwidths = _table("to compute for", *(f"{target:.0%}" for target in needed))
    rates = ("-" if rate is None else bandwidth_in_words(rate) for rate in needed.values())
    bandwidths.add_row("each link needs", *rates)
    console.print(bandwidths)
    if None in needed.values():
        console.print(
            "-: no bandwidth suffices, because the rest of a round, mostly delays, is too long for so little training."
            f" Raise training.inner_steps = {plan.inner_steps}, or train a larger model.",
            soft_wrap=True,
        )


def _peers_table(plan: Plan, found: Forecast) -> Table:
    table = _table("peers", "count", "steps", "counts", "computes", "link busy", "sends", "memory", "per GPU")
    for peer, each in zip(plan.peers, found.peers, strict=True):
        table.add_row(
            peer.name,
            str(peer.count),
            str(each.inner_steps),
            _how_often(each.cycles),
            f"{each.utilisation:.1%}",
            f"{each.link_share:.1%}",
            ", ".join(each.formats),
            _gigabytes(peer.main_needed),
            "-" if peer.gpu_needed is None else _gigabytes(peer.gpu_needed),
        )
    return table


def _how_often(cycles: int) -> str:
    """Return in words how often a peer's work counts: in each entry, in every `cycles`-th, or never (0)."""
    return {0: "never", 1: "each time", 2: "every 2nd", 3: "every 3rd"}.get(cycles, f"every {cycles}th")


def _warnings(plan: Plan, found: Forecast) -> list[str]:
    """Return warnings about machines that are too small, peers whose work does not count, and links that are too slow
    or too busy."""
    lines = [f"too small: {shortage}" for shortage in map(_shortage, plan.peers) if shortage]
    lines += [
        f"too slow: {each.name} takes {duration(plan.training_seconds(peer))} for {each.inner_steps} inner"
        f" steps, an outer step takes {duration(found.cycle_seconds)}: its work does not count. Remove it, lower"
        f" rounds.smallest_share = {plan.smallest_share:g}, or raise rounds.staleness = {plan.staleness}."
        for peer, each in zip(plan.peers, found.peers, strict=True)
        if not each.cycles
    ]
    for kind, peer in enumerate(plan.peers):
        sending = max((each.sending[kind] for each in plan.rounds), key=lambda one: one.seconds / one.allowed)
        if sending.seconds > sending.allowed:
            lines.append(
                f"too thin: the uplink of {peer.name} takes {duration(sending.seconds)} for a contribution in"
                f" {plan.formats[sending.format]}, and has {duration(sending.allowed)}: later blocks do not count. Add"
                " a thinner format to codec.contributions, or raise rounds.round_timeout_seconds."
            )
    busiest = max(found.peers, key=lambda peer: peer.link_share)
    if plan.overlap and busiest.link_share >= FULL:
        lines.append(
            f"too full: the link of {busiest.name} is busy for {busiest.link_share:.0%} of the time. TCP does not reach"
            " that, so peers will wait. Use more inner steps or fewer bits."
        )
    return lines


def _shortage(peer: PeerGroup) -> str | None:
    """Return a text about the memory that a peer needs and does not have; None if the peer has enough."""
    main, gpu = (peer.main_memory, peer.main_needed), (peer.gpu_memory, peer.gpu_needed)
    for where, (there, needed) in (("main memory", main), ("each GPU", gpu)):
        if there is not None and needed is not None and there < needed:
            return f"{peer.name}: needs {_gigabytes(needed)} of {where}, and has {_gigabytes(there)}"
    return None


def plain(plan: Plan, found: Forecast, needed: Mapping[float, float | None]) -> dict[str, Any]:
    """Return as JSON values the forecast and, by utilisation, the bits a second that each link needs (`needed`)."""
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
    """Return `seconds` as text, in the largest unit (d, h, min or s) in which the number is 2 or more."""
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
