"""One peer of a simulated swarm: the real protocol, a driver without I/O, and a training side without numbers."""

from __future__ import annotations

from typing import Protocol

from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.presence.heartbeat import Heartbeat, name_peers
from peers.protocol.events import (
    Applied,
    Apply,
    AssemblePayload,
    ChunkSent,
    ContributionArrived,
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
    ReducedArrived,
    Send,
    SendChunk,
    SnapshotFailed,
    SnapshotRestored,
    Stop,
    StopTraining,
    Train,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.messages import Message
from peers.protocol.peer import Peer
from peers.protocol.states import SHOWN_AS, State
from peers.simulator.history import InvariantError
from peers.streams.throttle import RateMeter
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.snapshot_fetch import Offered, choose, lineage_of
from peers.transfer.snapshots import Offer
from peers.values.leases import sample_count
from peers.values.reach import Reach
from peers.values.wire import digest_of
from peers.values.workload import Progress, SnapshotError, Trained

BLOCK_BYTES = 8


class SimulatedWorkload:
    """Contributions and states are digests of what they depend on."""

    def __init__(self, me: str, block_count: int) -> None:
        self.me = me
        self.block_count = block_count
        self.state = digest_of(b"genesis")

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return first_block * BLOCK_BYTES, last_block * BLOCK_BYTES

    def contribution(self, trained: Trained) -> bytes:
        seed = digest_of(repr((self.me, self.state, trained.samples)).encode())
        size = self.block_count * BLOCK_BYTES
        return (seed * (size // len(seed) + 1))[:size]

    def reduce(self, contributions: list[tuple[bytes, int]]) -> bytes:
        return digest_of(repr(contributions).encode())[: len(contributions[0][0])]

    def apply(self, payload: bytes) -> bytes:
        self.state = digest_of(self.state + payload)
        return self.state


class World(Protocol):
    """What is around a peer: the clock, the network and the others."""

    settings: RunSettings
    speeds: tuple[float, ...]
    now: float

    def note(self, *what: object) -> None: ...
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
        self.alive = True
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

    def is_trained(self, done: TrainingDone) -> bool:
        """Whether this is the end of the training under way, and not of one that was stopped."""
        return done.trained is self._trained

    def carry_out(self, effect: Effect, now: float) -> Event | None:
        """Do what the protocol wants; returns the event that follows at once, if one does."""
        world, buffers = self.world, self.buffers
        match effect:
            case Send(to, message):
                world.send(self, to, message)
            case Train(samples=lease, steps=steps):
                tokens = world.settings.tokens_per_sample * sample_count(lease)
                self._trained = Trained(lease, tokens, 1.0)
                buffers.own = self.workload.contribution(self._trained)
                world.soon(self, TrainingProgress(Progress(1, loss=1.0, tokens_per_second=self.speed)))
                steps = min(steps, sample_count(lease) * world.settings.inner_steps // world.settings.samples_per_lease)
                world.later(self, TrainingDone(self._trained), world.training_time(steps) / self.speed)
            case StopTraining():
                self._trained = None
            case Stop():
                world.farewell(self)
            case OpenRound(round):
                self._sent.begin_round()
                self._received.begin_round()
                buffers.open(round.name)
            case SendChunk():
                if buffers.round(effect.round):
                    read = buffers.averaged if effect.reduced else buffers.contribution
                    world.send_chunk(self, effect, bytes(read(effect.round, effect.chunk)))
            case ReduceChunk():
                self._reduce(effect)
            case AssemblePayload(round) if buffers.round(round):
                return PayloadAssembled(round, buffers.assemble(round))
            case FetchPayload(header, donors):
                self._fetch_payload(header, donors)
            case Apply() | FetchSnapshot() if self._is_digesting:
                self._postponed = effect
            case Apply(header):
                self._apply(header)
            case FetchSnapshot():
                self._fetch_snapshot(effect)
            case _:
                world.note(self.name, effect)
        return None

    def _report_rate(self) -> None:
        """What the link carried, in rounds that did not come to an end, too."""
        rate = int(min(self._sent.rate, self._received.rate))
        if rate:
            self.world.soon(self, RateMeasured(rate))

    def accept(self, sender: str, send: SendChunk, data: bytes) -> tuple[Event | None, bool]:
        """A chunk has come in: what to tell the protocol, and whether the sender is rid of it."""
        exchange, current = self.peer.exchange, self.buffers.round(send.round)
        if exchange is None or current is None or exchange.name != send.round:
            return None, False
        self._received.passed(len(data))
        if send.reduced and exchange.wants_reduced(sender, send.chunk):
            self.buffers.store(send.round, send.chunk, data)
            return ReducedArrived(send.round, sender, send.chunk, send.absent), True
        if not send.reduced and exchange.wants_contribution(sender, send.chunk):
            current.contributions[send.chunk][sender] = data
            return ContributionArrived(send.round, sender, send.chunk), True
        return None, exchange.is_done_with(sender, send.chunk, send.reduced)

    def _reduce(self, reduce: ReduceChunk) -> None:
        round, chunk = reduce.round, reduce.chunk
        if self.buffers.round(round):
            blocks = self.buffers.contributions(round, chunk, self.name, reduce.members)
            average = self.workload.reduce([(bytes(data), tokens) for data, tokens in blocks])
            self.buffers.store(round, chunk, average)
            self.world.soon(self, ReducedArrived(round, self.name, chunk, reduce.absent))

    def _apply(self, header: Header) -> None:
        kept = self.buffers.kept.get(header.payload)
        if kept is None:
            raise InvariantError(f"{self.name} applies an entry whose payload it does not have")
        state = self.workload.apply(bytes(kept.data))
        self.world.recorded(self, header)
        self._is_digesting = True
        if (header.index + 1) % self.world.settings.snapshot_every == 0:
            self._frozen = (header, state)
        self.world.soon(self, Applied(header))

    def go_on(self, event: Event, now: float) -> None:
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
                    self.carry_out(postponed, now)

    def _fetch_payload(self, header: Header, donors: tuple[str, ...]) -> None:
        for donor in self.world.fetch_from(self, donors):
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
