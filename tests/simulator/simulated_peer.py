"""One peer of a simulated swarm: the real protocol, a driver without I/O, and a training side without numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from peers.log.header import NO_PAYLOAD, Header
from peers.log.settings import RunSettings
from peers.messages.messages import Message
from peers.messages.packing import Packer
from peers.messages.rounds import RoundName
from peers.network.throttle import RateMeter
from peers.presence.branches import reported_state
from peers.presence.heartbeat import Heartbeat, name_peers
from peers.protocol import effects
from peers.protocol.effect_table import EffectTable, row
from peers.protocol.effects import (
    Apply,
    AssemblePayload,
    Effect,
    FetchLineage,
    FetchPayload,
    FetchSnapshot,
    OpenRound,
    ReduceChunk,
    SendChunk,
    StopTraining,
    Train,
)
from peers.protocol.events import (
    Applied,
    Captured,
    ChunkSent,
    Digested,
    Event,
    LineageNotSeen,
    LineageSeen,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    SnapshotFailed,
    TrainingDone,
    TrainingProgress,
    VotesKept,
    VotesNotKept,
)
from peers.protocol.peer import Peer
from peers.protocol.states import SHOWN_AS, State
from peers.transfer.averages import Admission, Admitted, ChunkHeader, average_chunk
from peers.transfer.buffers import PayloadBuffers, inspection
from peers.transfer.snapshots import PATIENCE, PAUSE, NotYetVouchedError, Vouched
from peers.values.chunks import ChunkedPayload
from peers.values.wire import Reach
from peers.values.workload import PayloadKind, Progress, SnapshotError, Trained
from tests.simulator.history import InvariantError
from tests.simulator.links import Rate
from tests.simulator.simulated_disk import SimulatedDisk
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_log import Frozen, SimulatedLog, SimulatedShelf, restored
from tests.simulator.simulated_workload import (
    Fragment,
    SimulatedTraining,
    SimulatedWorkload,
    digest_of_states,
    run_now,
    trained_in,
)

FULL = "no space is left on the simulated disk"


class World(Protocol):
    """What is around a peer: the clock, the network and the others."""

    settings: RunSettings
    speeds: tuple[float, ...]
    formats: tuple[int, ...]
    now: float
    incarnations: Iterator[int]

    def note(self, *what: object) -> None: ...
    def disk_of(self, name: str) -> SimulatedDisk: ...
    def at(self, delay: float, action: Callable[[], None]) -> None: ...
    def handle(self, peer: SimulatedPeer, event: Event) -> None: ...
    def soon(self, peer: SimulatedPeer, event: Event, delays: float = 1.0) -> None: ...
    def delayed(self, action: Callable[[], None]) -> None: ...
    def later(self, peer: SimulatedPeer, event: Event, seconds: float) -> None: ...
    def send(self, sender: SimulatedPeer, to: str, message: Message) -> None: ...
    def send_chunk(self, sender: SimulatedPeer, send: SendChunk, data: bytes) -> None: ...
    def link_rate(self, peer: SimulatedPeer) -> Rate: ...
    def fetch_from(self, peer: SimulatedPeer, donors: tuple[str, ...]) -> list[SimulatedPeer]: ...
    def farewell(self, sender: SimulatedPeer) -> None: ...
    def opened(self, peer: SimulatedPeer) -> None: ...
    def training_time(self, steps: int) -> float: ...
    def tokens_per_second(self, speed: float) -> float: ...
    def recorded(self, peer: SimulatedPeer, made: Apply, payload: bytes | None) -> None: ...


class SimulatedPeer:
    """`clock` runs at its own rate from its own zero: no two peers agree on the time."""

    is_honest = True

    def __init__(
        self,
        name: str,
        world: World,
        block_count: int,
        kept_bytes: int,
        clock: tuple[float, float],
        incarnation: int | None = None,
    ) -> None:
        """`incarnation`: of a second process that runs with the key of another one, and on a disk of its own."""
        self.name, self.world, self.clock = name, world, clock
        self.disk = world.disk_of(name) if incarnation is None else SimulatedDisk()
        self.fragments = [Fragment(name, block_count, kept_bytes) for _ in range(world.settings.fragments)]
        self.speed = world.speeds[ord(name[-1]) % len(world.speeds)]
        self._keys = SimulatedKeys(name)
        log, frozen = self.disk.log, self.disk.frozen or Frozen(None, (), self.states)
        for fragment, state in zip(self.fragments, frozen.states, strict=True):
            fragment.workload.state = state
        self.peer = Peer(
            name,
            world.settings,
            [
                PayloadKind(one.buffers.size, inspection(one.workload.squared_norm, one.buffers))
                for one in self.fragments
            ],
            self.state,
            self.time(0.0),
            next(world.incarnations) if incarnation is None else incarnation,
            self._keys,
            log.lineage() if log else None,
            self.disk.record,
        )
        self.packer = Packer(self.peer)
        self.alive, self._has_stopped, self.sequence = True, False, 0
        self.heartbeat: Heartbeat | None = None
        speed = world.tokens_per_second(self.speed)
        self._first_heartbeat = Heartbeat.model_construct(
            run=world.settings.run, peer=name, speed=speed, tokens_per_second=speed
        )
        self.reach: dict[str, Reach] = {}  # as its links see it
        self._trained: Trained | None = None
        self._training = SimulatedTraining()
        self._captured: list[Captured] = []
        self.shelf = SimulatedShelf(world.settings.empty_log, frozen)
        self._sent, self._received = RateMeter(lambda: world.now), RateMeter(lambda: world.now)
        self._from = defaultdict[str, RateMeter](lambda: RateMeter(lambda: world.now))  # by sender
        self._was_averaging = self._is_digesting = False
        self._last_of_cycle: Header | None = None  # the entry that was applied last in it
        self._postponed: deque[Apply | FetchSnapshot] = deque()
        self.entries = log or SimulatedLog(world.settings.empty_log)
        self._admissions = [Admission(self.peer, one.buffers, one.workload.squared_norm) for one in self.fragments]
        self._effects = self._table()

    @property
    def is_there(self) -> bool:
        """Whether it lives and has not left."""
        return self.alive and not self._has_stopped

    def time(self, now: float) -> float:
        zero, rate = self.clock
        return zero + rate * now

    @property
    def workload(self) -> SimulatedWorkload:
        """Of the first fragment; often there is no other."""
        return self.fragments[0].workload

    @property
    def buffers(self) -> PayloadBuffers:
        return self.fragments[0].buffers

    @property
    def states(self) -> tuple[bytes, ...]:
        return tuple([fragment.workload.state for fragment in self.fragments])

    @property
    def state(self) -> bytes:
        return digest_of_states(self.states)

    @property
    def is_settled(self) -> bool:
        return self.peer.is_settled and self.peer.state not in (State.LEFT, State.APPLYING)

    def _buffers(self, round_name: RoundName) -> PayloadBuffers:
        return self.fragments[round_name.position.fragment].buffers

    @property
    def index(self) -> int:
        return self.peer.log.position.index

    def beat(self) -> Heartbeat:
        """The heartbeat that it publishes now. Its worker tells it as often how far it is."""
        step = self._training.inner_step(self.world.now) if self._trained else 0
        if step:
            self.world.handle(self, TrainingProgress(Progress(step, 1.0, self.world.tokens_per_second(self.speed))))
        peer = self.peer
        self.sequence += 1
        self.heartbeat = self._first_heartbeat.model_copy(
            update={
                "sequence": self.sequence,
                "state": SHOWN_AS[peer.state],
                "incarnation": peer.incarnation,
                "start": peer.start,
                "index": peer.settled.position.index,
                "head": peer.settled.position.head,
                "state_digest": peer.state_digest,
                "lineage_tokens": peer.settled.lineage_tokens,
                "unreached": name_peers(peer.presence.unreached),
                "inner_step": self._training.inner_step(self.world.now) if self._trained else 0,
                "view": peer.view,
                "leads": peer.presence.can_lead,
                "trouble": peer.hindrances.reported_reason,
                "amendment": peer.settled.amendment,
                "proposed": peer.proposed_amendment,
            }
        )
        return self.heartbeat

    def heartbeat_for(self, peer: str) -> Heartbeat | None:
        """Return what another peer hears of it."""
        return self.heartbeat

    def processes_for(self, peer: str) -> tuple[SimulatedPeer, ...]:
        """Return the processes with its key that hear another peer."""
        return (self,)

    def take_in(self, event: Event) -> list[Effect]:
        """Tell the protocol what happened. Return what it wants done."""
        return self.peer.handle(event, self.time(self.world.now))

    def may_stumble(self, error: Exception) -> bool:
        """Return whether an error in its own code concerns nobody else. Honest peers have none."""
        return False

    def _table(self) -> EffectTable:
        """What carries out which effect, in the order of the real driver's table."""
        return EffectTable(
            row(effects.Send, lambda send: self.world.send(self, send.to, send.message)),
            row(effects.KeepVotes, self._keep_votes),
            row(effects.Train, self._begin_training),
            row(effects.StopTraining, self._stop_training),
            row(effects.OpenRound, self._open_round),
            row(effects.SendChunk, self._send_chunk),
            row(effects.ReduceChunk, self._average),
            row(effects.AssemblePayload, self._assemble),
            row(effects.Apply, self._apply),
            row(effects.FetchPayload, self._fetch_payload),
            row(effects.FetchLineage, self._fetch_lineage),
            row(effects.FetchSnapshot, self._fetch_snapshot),
            row(effects.Note, self._note),
            row(effects.Dropped, self._note),
            row(effects.TokensLost, self._note),
            row(effects.Trouble, self._note),
            row(effects.Stop, self._stop),
        )

    def carry_out(self, effect: Effect) -> None:
        """Do what the protocol wants."""
        self._effects.carry_out(effect)

    def _note(self, effect: Effect) -> None:
        self.world.note(self.name, effect)

    def _keep_votes(self, keep: effects.KeepVotes) -> None:
        if self.disk.is_full:
            self.world.handle(self, VotesNotKept(FULL))
        else:
            self.disk.record = keep.record
            self.world.handle(self, VotesKept())

    # The training side ----------------------------------------------------------------------------------------
    def _begin_training(self, train: Train) -> None:
        settings = self.world.settings
        steps, trained = trained_in(train, settings)
        formats = self.world.formats
        trained = replace(trained, format=formats[(ord(self.name[-1]) + train.index) % len(formats)])
        *others, closing = [fragment.commit_to(trained) for fragment in self.fragments]
        self._trained = replace(trained, contribution=closing)
        self.world.soon(self, TrainingProgress(Progress(1, 1.0, self.world.tokens_per_second(self.speed))))
        seconds = self.world.training_time(steps) / self.speed
        self._training = SimulatedTraining(self.world.now, seconds, steps)
        self._captured = [
            Captured(number, replace(trained, samples=(), contribution=root)) for number, root in enumerate(others)
        ]
        for captured in self._captured:
            self.world.later(self, captured, seconds * (captured.fragment + 1) / len(self.fragments))
        self.world.later(self, TrainingDone(self._trained), seconds)

    def _stop(self, stop: effects.Stop) -> None:
        self._has_stopped = True
        self.disk.record = self.peer.record
        self.world.farewell(self)

    def _stop_training(self, stop: StopTraining) -> None:
        self._trained = None
        self._captured = []

    def is_of_present_training(self, event: Captured | TrainingDone) -> bool:
        """Whether it comes of the training under way, and not of one that was stopped."""
        if isinstance(event, Captured):
            return any(event is captured for captured in self._captured)
        return event.trained is self._trained

    # The data of rounds ---------------------------------------------------------------------------------------
    def _open_round(self, opening: OpenRound) -> None:
        self._sent.begin_round()
        self._received.begin_round()
        for peer in opening.round.peers:
            self._from[peer].begin_round()
        self._buffers(opening.round.name).open(opening.round.name)
        self.world.opened(self)

    def _send_chunk(self, send: SendChunk) -> None:
        buffers = self._buffers(send.round_name)
        if buffers.round(send.round_name):
            self.world.send_chunk(self, send, bytes(buffers.read(send.round_name, send.chunk, send.reduced)))

    def header(self, send: SendChunk) -> ChunkHeader:
        """What it says of a chunk that it sends."""
        return ChunkHeader.of(send, self._buffers(send.round_name))

    def makes_wait(self, sender: str, round_name: RoundName) -> bool:
        """Return whether a chunk of a live peer waits, since this peer is not in the round yet."""
        admission = self._admissions[round_name.position.fragment]
        return self.peer.is_live(sender) and not admission.is_shared(round_name, sender)

    def accept(
        self, sender: str, round_name: RoundName, header: ChunkHeader, data: bytes, seconds: float = 0.0
    ) -> Admitted:
        """Take in a chunk that took so long to come. Return what to tell the protocol, and whether the sender is rid of
        it."""
        admission = self._admissions[round_name.position.fragment]
        admission.check_size(sender, round_name, header, len(data))
        self._received.passed(len(data), seconds)
        self._from[sender].passed(len(data), seconds)
        return admission.take(sender, round_name, header, data)

    def _average(self, reduce: ReduceChunk) -> None:
        """Average a chunk, which takes a while. The protocol hears of it at once, before anything else comes."""
        self.world.delayed(lambda: self._average_now(reduce) if self.alive else None)

    def _average_now(self, reduce: ReduceChunk) -> None:
        fragment, exchange = (
            self.fragments[reduce.round_name.position.fragment],
            self.peer.exchange_of(reduce.round_name),
        )
        if exchange is not None:
            event = run_now(average_chunk(fragment.average, fragment.buffers, exchange, reduce))
            if event is not None:
                self.world.handle(self, event)

    def _assemble(self, assemble: AssemblePayload) -> None:
        name, buffers = assemble.round_name, self._buffers(assemble.round_name)
        if buffers.round(name):
            digest = buffers.assemble(name)
            payload = buffers.kept.get(digest)
            assert payload is not None
            trouble = self._keep(name.position.index, payload)
            self.world.handle(self, PayloadAssembled(name, digest, trouble))

    def _keep(self, index: int, payload: ChunkedPayload) -> str:
        """Keep a payload on the disk. Return why that is not possible; empty: it is."""
        if self.disk.is_full:
            return FULL
        self.disk.keep(index, payload)
        return ""

    def _report_rate(self) -> None:
        """Tell the protocol what the link has carried, in rounds that did not come to an end, too; and what came from
        each of the others."""
        link = self.world.link_rate(self)
        if rate := min(link.up, link.down) if link.is_limited else min(self._sent.rate, self._received.rate):
            self.world.soon(self, RateMeasured(max(1, int(rate))))
        rates = {peer: max(1, int(meter.rate)) for peer, meter in self._from.items() if meter.rate}
        self.world.soon(self, ReachSeen(self.reach, rates))

    # The run's state ------------------------------------------------------------------------------------------
    def _apply(self, apply: Apply) -> None:
        if self._is_digesting:
            self._postponed.append(apply)
            return
        header, log = apply.header, self.peer.log
        fragment, payload = self.fragments[header.fragment], None
        if header.payload != NO_PAYLOAD:
            kept = self.payload(header)
            if kept is None:
                raise InvariantError(f"{self.name} applies an entry whose payload it does not have")
            payload = bytes(kept.data)
            fragment.workload.apply(payload, apply.amendment)
        self.world.recorded(self, apply, payload)
        self.entries.append(header, apply.certificate, log)
        if not log.made:
            self._is_digesting, self._last_of_cycle = True, header
            is_chosen = log.position.index % self.world.settings.snapshot_every == 0
            self.shelf.take(Frozen(log.last, log.ends, self.states), is_chosen)
        self.world.soon(self, Applied(header))

    def go_on(self, event: Event) -> None:
        """What comes after an outer step: the digest of the state, and then what else is to be done with it. And what
        is measured of the link."""
        is_averaging = self.peer.state is State.AVERAGING
        if self._was_averaging and not is_averaging:
            self._report_rate()
        self._was_averaging = is_averaging
        match event:
            case ChunkSent(chunk=chunk):
                start, stop = self.buffers.chunk_bytes(chunk)
                self._sent.passed(stop - start)
            case Applied(header) if header == self._last_of_cycle and self.shelf.newest.last is not None:
                self.world.soon(self, Digested(self.shelf.newest.last, self.state), delays=2.0)
            case Digested():
                self._is_digesting = False
                self._write_down(self.shelf.newest)
                while self._postponed and not self._is_digesting:
                    self.carry_out(self._postponed.popleft())

    def _write_down(self, frozen: Frozen) -> None:
        """Have the disk know the state after a cycle, and the log up to there."""
        if not self.disk.is_full:
            self.disk.entries, self.disk.frozen = self.entries, frozen

    def payload(self, header: Header) -> ChunkedPayload | None:
        """Return the payload of an entry that this peer has, in memory or on its disk."""
        return self.fragments[header.fragment].buffers.kept.get(header.payload) or self.disk.payload(header.payload)

    def _fetch_payload(self, fetch: FetchPayload) -> None:
        header = fetch.header
        for donor in (self, *self.world.fetch_from(self, fetch.donors)):
            payload = donor.payload(header)
            if payload is not None:
                self.fragments[header.fragment].buffers.kept.keep(payload)
                trouble = self._keep(header.index, payload)
                self.world.soon(self, PayloadFetched(header, trouble), delays=2.0)
                return
        self.world.soon(self, PayloadNotFetched(header, "nobody has it"))

    def frozen(self, least: int) -> Frozen:
        """What it gives to who needs a state as new as this."""
        return self.shelf.frozen(least)

    def _fetch_snapshot(self, fetch: FetchSnapshot, patience: float = PATIENCE) -> None:
        if self._is_digesting:
            self._postponed.append(fetch)
            return
        self.world.note(self.name, "fetches a state of", fetch.donor)
        donors = (fetch.donor, *fetch.others)
        sources = {source.name: source for source in self.world.fetch_from(self, donors) if source.is_settled}
        states = {name: source.frozen(fetch.least) for name, source in sources.items()}
        try:
            if fetch.donor not in sources:
                raise SnapshotError(f"{fetch.donor} does not answer")
            believed = self.peer.believed(*self.entries.branches(sources[fetch.donor].entries, self._keys.verify))
            if believed is None:
                raise SnapshotError(f"the log of {fetch.donor} is not better than this peer's")
            told = partial(reported_state, believed, self.peer.presence.live().values())
            vouched = Vouched(believed, told, fetch.least)
            having = vouched.choose({name: self.shelf.offer(frozen) for name, frozen in states.items()})
        except SnapshotError as error:
            if isinstance(error, NotYetVouchedError) and patience > 0:
                self.world.at(PAUSE, lambda: self._fetch_snapshot(fetch, patience - PAUSE) if self.is_there else None)
                return
            self.world.soon(self, SnapshotFailed(fetch.donor, str(error)))
            return
        frozen = states[having[0]]
        for fragment, state in zip(self.fragments, frozen.states, strict=True):
            fragment.workload.state = state
        self.shelf.take(frozen, is_chosen=True)
        self.entries = sources[fetch.donor].entries.until(self.shelf.place(frozen))
        self._write_down(frozen)
        self.world.soon(self, restored(fetch.donor, frozen, believed, self.peer.lineage.doubt), delays=5.0)

    def _fetch_lineage(self, fetch: FetchLineage) -> None:
        for source in self.world.fetch_from(self, (fetch.donor,)):
            theirs, ours = self.entries.branches(source.entries, self._keys.verify)
            self.world.soon(self, LineageSeen(fetch.donor, theirs, ours), delays=3.0)
            return
        self.world.soon(self, LineageNotSeen(fetch.donor, "it does not answer"), delays=3.0)
