"""One peer of a simulated swarm: the real protocol, a driver without I/O, and a training side without numbers."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Protocol, TypeVar

from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.presence.heartbeat import Heartbeat, name_peers
from peers.protocol import events
from peers.protocol.effect_table import EffectTable, row
from peers.protocol.events import (
    Applied,
    Apply,
    AssemblePayload,
    ChunkSent,
    Digested,
    Effect,
    Event,
    FetchPayload,
    FetchSnapshot,
    OpenRound,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReduceChunk,
    SendChunk,
    SnapshotFailed,
    SnapshotRestored,
    StopTraining,
    Train,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.messages import Message
from peers.protocol.packing import Packer
from peers.protocol.peer import Peer
from peers.protocol.states import SHOWN_AS, State
from peers.simulator.history import InvariantError
from peers.simulator.simulated_workload import SimulatedWorkload
from peers.streams.throttle import RateMeter
from peers.transfer.admission import Admission, Admitted, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.chunk_average import average_chunk
from peers.transfer.snapshot_fetch import Offered, choose, lineage_of
from peers.transfer.snapshots import Offer
from peers.values.leases import sample_count
from peers.values.reach import Reach
from peers.values.workload import Progress, SnapshotError, Trained

T = TypeVar("T")


class World(Protocol):
    """What is around a peer: the clock, the network and the others."""

    settings: RunSettings
    speeds: tuple[float, ...]
    now: float

    def note(self, *what: object) -> None: ...
    def handle(self, peer: SimulatedPeer, event: Event) -> None: ...
    def soon(self, peer: SimulatedPeer, event: Event, delays: float = 1.0) -> None: ...
    def later(self, peer: SimulatedPeer, event: Event, seconds: float) -> None: ...
    def send(self, sender: SimulatedPeer, to: str, message: Message) -> None: ...
    def send_chunk(self, sender: SimulatedPeer, send: SendChunk, data: bytes) -> None: ...
    def fetch_from(self, peer: SimulatedPeer, donors: tuple[str, ...]) -> list[SimulatedPeer]: ...
    def farewell(self, sender: SimulatedPeer) -> None: ...
    def training_time(self, steps: int) -> float: ...
    def recorded(self, peer: SimulatedPeer, header: Header) -> None: ...


class SimulatedPeer:
    """`clock` runs at its own rate from its own zero: no two peers agree on the time."""

    def __init__(self, name: str, world: World, block_count: int, kept_bytes: int, clock: tuple[float, float]) -> None:
        self.name = name
        self.world = world
        self.workload = SimulatedWorkload(name, block_count)
        self.buffers = PayloadBuffers(self.workload, kept_bytes)
        self.clock = clock
        self.speed = world.speeds[ord(name[-1]) % len(world.speeds)]
        self.peer = Peer(name, world.settings, self.buffers.size, self.workload.state, self.time(0.0))
        self.packer = Packer(self.peer)
        self.alive = True
        self._has_stopped = False
        self.sequence = 0
        self.heartbeat: Heartbeat | None = None
        self._first_heartbeat = Heartbeat.model_construct(run=world.settings.run, peer=name, speed=self.speed)
        self.reach: dict[str, Reach] = {}  # as its links see it
        self._trained: Trained | None = None
        self._frozen: tuple[Header | None, bytes] | None = None
        self._was_averaging = False
        self._sent, self._received = RateMeter(lambda: world.now), RateMeter(lambda: world.now)
        self._is_digesting = False
        self._postponed: Apply | FetchSnapshot | None = None
        self._admission = Admission(self.peer, self.buffers, self.workload.check)
        self._effects = self._table()

    @property
    def is_there(self) -> bool:
        """Whether it lives and has not left."""
        return self.alive and not self._has_stopped

    def time(self, now: float) -> float:
        zero, rate = self.clock
        return zero + rate * now

    @property
    def is_settled(self) -> bool:
        return self.peer.is_settled and self.peer.state is not State.LEFT

    @property
    def index(self) -> int:
        return self.peer.log.position.index

    def beat(self) -> Heartbeat:
        """The heartbeat that it publishes now."""
        peer = self.peer
        self.sequence += 1
        self.heartbeat = self._first_heartbeat.model_copy(
            update={
                "sequence": self.sequence,
                "state": SHOWN_AS[peer.state],
                "index": peer.settled.position.index,
                "head": peer.settled.position.head,
                "state_digest": peer.state_digest,
                "lineage_tokens": peer.settled.lineage_tokens,
                "unreached": name_peers(peer.presence.unreached),
                "trouble": peer.troubles.told,
            }
        )
        return self.heartbeat

    def _table(self) -> EffectTable:
        """What carries out which effect, in the order of the real driver's table."""
        return EffectTable(
            row(events.Send, lambda send: self.world.send(self, send.to, send.message)),
            row(events.Train, self._train),
            row(events.StopTraining, self._stop_training),
            row(events.OpenRound, self._open_round),
            row(events.SendChunk, self._send_chunk),
            row(events.ReduceChunk, self._average),
            row(events.AssemblePayload, self._assemble),
            row(events.Apply, self._apply),
            row(events.FetchPayload, self._fetch_payload),
            row(events.FetchSnapshot, self._fetch_snapshot),
            row(events.Note, self._note),
            row(events.Dropped, self._note),
            row(events.TokensLost, self._note),
            row(events.Trouble, self._note),
            row(events.Stop, self._stop),
        )

    def carry_out(self, effect: Effect) -> None:
        """Do what the protocol wants."""
        self._effects.carry_out(effect)

    def _note(self, effect: Effect) -> None:
        self.world.note(self.name, effect)

    # The training side ----------------------------------------------------------------------------------------
    def _train(self, train: Train) -> None:
        settings = self.world.settings
        count = sample_count(train.samples)
        self._trained = Trained(train.samples, settings.tokens_per_sample * count, 1.0)
        self.buffers.own = self.workload.contribution(self._trained)
        self.world.soon(self, TrainingProgress(Progress(1, loss=1.0, tokens_per_second=self.speed)))
        steps = min(train.steps, count * settings.inner_steps // settings.samples_per_lease)
        self.world.later(self, TrainingDone(self._trained), self.world.training_time(steps) / self.speed)

    def _stop(self, stop: events.Stop) -> None:
        self._has_stopped = True
        self.world.farewell(self)

    def _stop_training(self, stop: StopTraining) -> None:
        self._trained = None

    def is_trained(self, done: TrainingDone) -> bool:
        """Whether this is the end of the training under way, and not of one that was stopped."""
        return done.trained is self._trained

    # The data of rounds ---------------------------------------------------------------------------------------
    def _open_round(self, opening: OpenRound) -> None:
        self._sent.begin_round()
        self._received.begin_round()
        self.buffers.open(opening.round.name)

    def _send_chunk(self, send: SendChunk) -> None:
        if self.buffers.round(send.round):
            read = self.buffers.averaged if send.reduced else self.buffers.contribution
            self.world.send_chunk(self, send, bytes(read(send.round, send.chunk)))

    def accept(self, sender: str, send: SendChunk, data: bytes) -> Admitted:
        """A chunk has come in: what to tell the protocol, and whether the sender is rid of it."""
        header = ChunkHeader(chunk=send.chunk, reduced=send.reduced, absent=send.absent)
        self._admission.check_size(sender, header, len(data))
        self._received.passed(len(data))
        return self._admission.take(sender, send.round, header, data)

    def _average(self, reduce: ReduceChunk) -> None:
        event = run_now(average_chunk(self.workload, self.buffers, self.name, reduce))
        if event is not None:
            self.world.soon(self, event)

    def _assemble(self, assemble: AssemblePayload) -> None:
        if self.buffers.round(assemble.round):
            self.world.handle(self, PayloadAssembled(assemble.round, self.buffers.assemble(assemble.round)))

    def _report_rate(self) -> None:
        """What the link carried, in rounds that did not come to an end, too."""
        rate = int(min(self._sent.rate, self._received.rate))
        if rate:
            self.world.soon(self, RateMeasured(rate))

    # The run's state ------------------------------------------------------------------------------------------
    def _apply(self, apply: Apply) -> None:
        if self._is_digesting:
            self._postponed = apply
            return
        header = apply.header
        kept = self.buffers.kept.get(header.payload)
        if kept is None:
            raise InvariantError(f"{self.name} applies an entry whose payload it does not have")
        state = self.workload.apply(bytes(kept.data))
        self.world.recorded(self, header)
        self._is_digesting = True
        if (header.index + 1) % self.world.settings.snapshot_every == 0:
            self._frozen = (header, state)
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
            case Applied(header):
                self.world.soon(self, Digested(header, self.workload.state), delays=2.0)
            case Digested():
                self._is_digesting = False
                postponed, self._postponed = self._postponed, None
                if postponed is not None:
                    self.carry_out(postponed)

    def _fetch_payload(self, fetch: FetchPayload) -> None:
        header = fetch.header
        for donor in self.world.fetch_from(self, fetch.donors):
            payload = donor.buffers.kept.get(header.payload)
            if payload is not None:
                self.buffers.kept.keep(payload)
                self.world.soon(self, PayloadFetched(header), delays=2.0)
                return
        self.world.soon(self, PayloadNotFetched(header, "nobody has it"))

    def offered(self, least: int) -> Offered:
        """The state frozen last, or the present one if that is older than `least`."""
        if self._frozen is None or self.peer.log.at(self._frozen[0]).position.index < least:
            self._frozen = (self.peer.log.last, self.workload.state)
        last, state = self._frozen
        offer = Offer.model_construct(last=last, bytes=0, state_digest=state, lineage=self.peer.lineage.heads)
        return Offered(offer, self.peer.log.at(last).position, ())

    def _fetch_snapshot(self, fetch: FetchSnapshot) -> None:
        if self._is_digesting:
            self._postponed = fetch
            return
        self.world.note(self.name, "fetches a state of", fetch.donor)
        donors = (fetch.donor, *fetch.others)
        offered = {
            source.name: source.offered(fetch.least)
            for source in self.world.fetch_from(self, donors)
            if source.is_settled
        }
        try:
            chosen, _ = choose(offered, donors, fetch.least)
        except SnapshotError as error:
            self.world.soon(self, SnapshotFailed(fetch.donor, str(error)))
            return
        self.workload.state = chosen.offer.state_digest
        self._frozen = (chosen.offer.last, chosen.offer.state_digest)
        restored = SnapshotRestored(fetch.donor, *self._frozen, lineage_of(offered, donors))
        self.world.soon(self, restored, delays=5.0)


def run_now(work: Coroutine[None, None, T]) -> T:
    """Run what is asynchronous for the real driver's sake, and here waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        returned: T = done.value
        return returned
    raise RuntimeError("it waits for something")
