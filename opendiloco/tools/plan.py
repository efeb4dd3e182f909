"""The planner: what a run would come to with given machines and links, before anybody rents them: utilisation, tokens,
bytes, money, joining, bandwidth needed. Needs no torch but to size a model. docs/runs.md has the assumptions.
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
"""That a swarm is built for."""


class PeerSection(Section):
    """So many equal peers. `latency_ms` is what ping shows to a well-connected server: a round trip.

    How fast each trains is one of `step_seconds` (an inner step of its whole batch), `tokens_per_second`, and `gpu`:
    what torch calls it, of which there are `gpus`. `optimizer_state` is what each gives `join` by that name.
    """

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
            named = " and ".join(given) or "none of them"
            raise ValueError(f"{named} given; say with one of step_seconds, tokens_per_second and gpu how fast it is")
        if self.gpus == 0 and (self.gpu is not None or self.gpu_memory_gb is not None):
            raise ValueError("gpus = 0 has neither a gpu nor gpu_memory_gb; remove these, or say how many there are")
        return self


class LinksFile(Section):
    """A whole `links.toml`."""

    peers: Annotated[tuple[PeerSection, ...], Field(strict=False, min_length=1, max_length=PEERS_LIMIT)]

    @model_validator(mode="after")
    def check_count(self) -> Self:
        count = sum(peer.count for peer in self.peers)
        if not 2 <= count <= PEERS_LIMIT:
            raise ValueError(f"the counts of all [[peers]] add up to {count}; give 2 to {PEERS_LIMIT} peers")
        return self

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read and check a file. Raises: ManifestError, with one line for each problem."""
        content = read_toml(path, "Give a file that exists.")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ManifestError(describe_validation_error(str(path), error, cls)) from None


# Plan -----------------------------------------------------------------------------------------------------------------
LINK_SHARE = 0.95
"""Of a link's bits, that are data: a packet of 1,514 bytes carries 1,448, less what TLS and chunk headers take."""
DELAYS, DELAYS_OF_MORE = 8, 10
"""One way, in a round: Ready, Begin, a block to its reducer, its average back, Part, Propose, Vote 1, Vote 2; among
more than `OPEN_LIMIT` peers also a certificate after each vote (docs/protocol.md, Liveness)."""
QUANTIZED, QUANTIZED_SPARSE = 1.67e9, 0.37e9
"""Values a second that one thread encodes, and as sparse payloads with error feedback (docs/codecs.md)."""
SETTLING = 8
"""Rounds at most, after which members have the formats that they keep: each goes by how long the one before took."""
STEPPED = 1.69e9
"""Values a second for which one thread takes the outer step (docs/codecs.md)."""


@dataclass(frozen=True)
class PeerGroup:
    """So many equal peers. Bits a second, the seconds of a round trip to a well-connected server, and of an inner step.

    `gpus` 0 trains on the CPU. Bytes and prices are None where nobody has said them. `main_needed` are the bytes of
    main memory that it must have, `gpu_needed` those of each GPU beside activations.
    """

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
        """Return the bits of data that its link carries in a second, both ways at once."""
        return LINK_SHARE * min(self.up, self.down)

    @property
    def uplink(self) -> float:
        """Return the bytes of data that its link carries away in a second."""
        return LINK_SHARE * self.up / 8


@dataclass(frozen=True)
class _Round:
    """One round: its seconds, and of each kind of peers how many payloads it gets and sends, for how many seconds its
    link is busy, and how its contribution goes."""

    arithmetic: float
    delays: float
    transfer: float
    payload_bits: float
    moved: tuple[float, ...]
    sent: tuple[float, ...]
    busy: tuple[float, ...]
    sending: tuple[Sending, ...]

    @property
    def lag(self) -> float:
        """Return the seconds that it takes beside its transfer; meanwhile the link is free for the next round."""
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
    """Return the round that averages so many values at so many bits each, of which each peer encodes `encoded` a
    second. Parts are dealt, and contributions go in `thinner` formats of so many bits, as in the protocol. `overlaps`
    are the seconds for which each kind of peers trains on meanwhile; by default none does."""
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
    sending, moved, sent, busy = list[Sending](), list[float](), list[float](), list[float]()
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
        moved = [payloads_moved(len(names), dealt.get(name, 0) / size.chunks) for name in names]
        sent = [both - 1 + share for both, share in zip(moved, shares, strict=True)]
        busy = [
            values * bits / LINK_SHARE * max(out / peers[kind].up, back / peers[kind].down)
            for out, back, kind in zip(sent, moved, kinds, strict=True)
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
        moved=mean_of_kinds(moved),
        sent=mean_of_kinds(sent),
        busy=mean_of_kinds(busy),
        sending=tuple(sending),
    )


@dataclass(frozen=True)
class Plan:
    """A run as far as the planner needs to know it. What has a default is the manifest's, too.

    `fragments` are the numbers of values in each; `bits` are those of a value on its way, of which `encoded` a second
    become payload. Contributions may also have the bits of `thinner` formats; `formats` are all names, the run's own
    first. Training goes on for `overlap` inner steps (the papers' tau) without the result; with 0 it waits.
    """

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
        """Return the number of peers."""
        return sum(peer.count for peer in self.peers)

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

    @cached_property
    def rounds(self) -> tuple[_Round, ...]:
        """Return the round of each fragment."""
        speeds = [self.tokens_per_step / peer.step_seconds for peer in self.peers]
        overlaps = list(map(self.pace.overlap_seconds, speeds))
        return tuple(
            round_of(self.peers, values, self.bits, self.encoded, self.thinner, self.timing, overlaps)
            for values in self.fragments
        )

    def own_steps(self, peer: PeerGroup) -> int:
        """Return the inner steps that a peer makes while the fastest makes all, as its leases are sized."""
        fastest = min(each.step_seconds for each in self.peers)
        return self.pace.steps(self.tokens_per_step / peer.step_seconds, self.tokens_per_step / fastest)

    def training_seconds(self, peer: PeerGroup) -> float:
        """Return the seconds for which a peer trains its lease."""
        return self.own_steps(peer) * peer.step_seconds

    @property
    def closes_after(self) -> float:
        """Return the seconds after which nobody is waited for any more: the grace begins when most are ready; in an
        asynchronous run the slack, when enough are."""
        trainings = sorted(self.training_seconds(peer) for peer in self.peers for _ in range(peer.count))
        most = len(trainings) // 2
        if self.contributions is None:
            return trainings[most] + self.pace.grace(trainings[0])
        enough = math.ceil(self.contributions * len(trainings)) - 1
        return trainings[max(most, enough)] + self.pace.slack(trainings[0])


def plan_of(config: RunConfig, skeleton: Any, links: LinksFile) -> Plan:
    """Return the plan. Raises: ManifestError where a machine's speed does not follow from its GPU."""
    from opendiloco.model.parameters import layout_of  # this and the next import torch
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
    """Return the bits that a codec takes for a value, its blocks' headers included."""
    return 8 * FORMATS[codec].block_bytes / FORMATS[codec].block_values


def _peer(section: PeerSection, place: int, tokens: int, rate: float | None, needs: Needs) -> PeerGroup:
    """Return the peers of a section, whose inner step has so many tokens, of which they train `rate` a second."""
    if section.step_seconds is not None:
        seconds = section.step_seconds
    elif rate is not None:
        seconds = tokens / rate
    else:
        raise ManifestError(
            f"peers.{place}.gpu = {section.gpu!r}: its peak is not known here.",
            "Give step_seconds or tokens_per_second instead, or torch's name of it, e.g. NVIDIA H100 80GB HBM3.",
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
"""Share of a link's time that joiners need at least; with less they never catch up."""
SLOWEST_LINK, FASTEST_LINK = 1e4, 1e13
"""Bits a second between which a bandwidth is looked for."""
HALVINGS = 12
"""Times that this interval is halved: to less than one percent."""
CYCLES = 2
"""Cycles that are simulated before one is measured, and while it is: from the second on, all are alike."""


@dataclass(frozen=True)
class _PeerForecast:
    """Of each of some equal peers: inner steps that it makes for an entry, how many cycles there are from one of its
    entries to the next (0: its work never counts), shares of its time that it computes for them and its link is busy,
    the formats of its contributions, the thinnest last; seconds until a newcomer among them has the state, None if it
    never has."""

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
    """Of a run. A cycle is one outer step. `round_seconds` are those of the longest round.

    Costs are None unless all prices are known.
    """

    cycle_seconds: float
    round_seconds: float
    utilisation: float
    tokens_per_day: float
    cost_per_day: float | None
    peers: tuple[_PeerForecast, ...]

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


def forecast(plan: Plan) -> Forecast:
    """Return what a run comes to. Peers wait for one another at each cycle's end, but for nobody that is late: its
    work counts in a later entry, for as long as its lease lasts."""
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
    """Return how long a peer's cycle takes in a long run, with its waiting for rounds but none for other peers.

    Each fragment has a round of its own, which begins after an inner step and ends before one. What a round that began
    earlier has to send goes first; while it waits for anything else, the link is free for the next one.
    """
    steps = plan.own_steps(peer)
    overlap = min(plan.overlap, steps - 1)
    taken = sorted(zip(_taken_after(plan, steps, overlap), plan.rounds, strict=True), key=lambda each: each[0])
    due = deque[tuple[int, float]]()  # the inner step that needs a result, and when it is there
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
    """Return after how many of a peer's inner steps in a cycle each fragment is taken: `overlap` before it is due."""
    whole, fragments = plan.inner_steps, len(plan.fragments)
    due = [-(-(place + 1) * whole // fragments) for place in range(fragments)]
    return [max(0, max(1, each * steps // whole) - overlap) or steps for each in due]


def _cycles(plan: Plan, peer: PeerGroup, seconds: float) -> int:
    """Return from how many cycles of so many seconds to the next a peer is in an entry; 0: its lease is over before."""
    trained = plan.training_seconds(peer)
    cycles = 1 if trained <= plan.closes_after else math.ceil(trained / seconds)
    return cycles if cycles <= 1 + plan.staleness else 0


def _joining(plan: Plan, peer: PeerGroup, seconds: float, busy: float) -> float | None:
    """Return the seconds until a newcomer has the state: a snapshot, and the entries since, replayed.

    It fetches in the time that rounds leave, from all others at once. The snapshot may be as old as two snapshots are
    apart, and more entries are made meanwhile. None if it never catches up.
    """
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
    """Return the bits a second that every link needs, up and down, for this utilisation; None: no link is enough."""

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
"""Share of its time from which on a link may be too busy for rounds that overlap. Chosen, between what was measured: at
a half they were in time, at 95 % they were not."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which the bandwidth is named that they need."""


def show(console: Console, plan: Plan, found: Forecast, needed: Mapping[float, float | None]) -> None:
    """Print all figures, the cost if all prices are known, and what is wrong with the plan."""
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
            "-: no bandwidth does it, since what else a round takes, delays above all, takes too long beside so little"
            f" training. Raise training.inner_steps = {plan.inner_steps}, or train a larger model.",
            soft_wrap=True,
        )


def _peers_table(plan: Plan, found: Forecast) -> Table:
    """Return a row for each kind of peer."""
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
    """Return in how many entries a peer's work counts, in words."""
    return {0: "never", 1: "each time", 2: "every 2nd", 3: "every 3rd"}.get(cycles, f"every {cycles}th")


def _warnings(plan: Plan, found: Forecast) -> list[str]:
    """Return which machines are too small, which peers train in vain, and whether a link is too full."""
    lines = [f"too small: {lack}" for lack in map(_lacks, plan.peers) if lack]
    lines += [
        f"too slow: {each.name} takes {duration(plan.training_seconds(peer))} for {each.inner_steps} inner"
        f" steps, an outer step takes {duration(found.cycle_seconds)}: its work does not count. Leave it out, lower"
        f" rounds.smallest_share = {plan.smallest_share:g}, or raise rounds.staleness = {plan.staleness}."
        for peer, each in zip(plan.peers, found.peers, strict=True)
        if not each.cycles
    ]
    for kind, peer in enumerate(plan.peers):
        sending = max((each.sending[kind] for each in plan.rounds), key=lambda one: one.seconds / one.allowed)
        if sending.seconds > sending.allowed:
            lines.append(
                f"too thin: the uplink of {peer.name} takes {duration(sending.seconds)} for a contribution in"
                f" {plan.formats[sending.format]}, and has {duration(sending.allowed)}: what comes later is left out. A"
                " thinner format in codec.contributions or more rounds.round_timeout_seconds help."
            )
    busiest = max(found.peers, key=lambda peer: peer.link_share)
    if plan.overlap and busiest.link_share >= FULL:
        lines.append(
            f"too full: the link of {busiest.name} is busy for {busiest.link_share:.0%} of the time. TCP does not fill"
            " it so far: expect peers to wait. More inner steps or fewer bits help."
        )
    return lines


def _lacks(peer: PeerGroup) -> str | None:
    """Return what a machine has too little of, in words."""
    main, gpu = (peer.main_memory, peer.main_needed), (peer.gpu_memory, peer.gpu_needed)
    for where, (there, needed) in (("main memory", main), ("each GPU", gpu)):
        if there is not None and needed is not None and there < needed:
            return f"{peer.name}: needs {_gigabytes(needed)} of {where}, and has {_gigabytes(there)}"
    return None


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
