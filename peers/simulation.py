"""A whole swarm on a simulated clock: the peers' real protocol code, a network that misbehaves, and no waiting.

Everything is drawn from one seeded generator, so a schedule that fails is replayed by its seed. After every step the
invariants are checked: one state per log position, one child per log position, no sample trained twice.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from peers.buffers import RoundBuffers
from peers.events import (
    Applied,
    Apply,
    ContributionArrived,
    DigestPayload,
    Effect,
    Event,
    FetchSnapshot,
    HeartbeatsSeen,
    LeaveRequested,
    OpenRound,
    PayloadDigested,
    PushContribution,
    Pushed,
    PushFailed,
    PushReduced,
    Quantized,
    Received,
    ReducedArrived,
    ReducePart,
    Send,
    SnapshotFailed,
    SnapshotRestored,
    Stop,
    StopTraining,
    Tick,
    Train,
    TrainingDone,
    Undelivered,
)
from peers.heartbeat import Heartbeat
from peers.history import History
from peers.leases import Lease, sample_count
from peers.messages import pack_message, unpack_message
from peers.peer import Peer
from peers.settings import RunSettings
from peers.states import SHOWN_AS, State
from peers.wire import digest_of
from peers.workload import Trained

BLOCK_BYTES = 8


@dataclass(frozen=True)
class Faults:
    """How badly the network behaves: chances per message (`suspicion`: per tick), delays in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    push_failure: float = 0.0
    longest_delay: float = 0.05
    suspicion: float = 0.0
    """That a peer takes another one for dead, until it hears from it again."""


class SimulatedWorkload:
    """A training side without numbers: contributions and states are digests of what they depend on."""

    block_count = 7

    def __init__(self, me: str) -> None:
        self.me = me
        self.state = digest_of(b"genesis")

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return first_block * BLOCK_BYTES, last_block * BLOCK_BYTES

    def contribution(self, trained: Trained) -> bytes:
        seed = digest_of(repr((self.me, self.state, trained.samples)).encode())
        return (seed * 2)[: self.block_count * BLOCK_BYTES]

    def reduce(self, contributions: list[tuple[bytes, int]]) -> bytes:
        return (digest_of(repr(contributions).encode()) * 2)[: len(contributions[0][0])]

    def apply(self, payload: bytes) -> bytes:
        self.state = digest_of(self.state + payload)
        return self.state


@dataclass
class SimulatedPeer:
    """One peer's protocol with its simulated driver state."""

    peer: Peer
    workload: SimulatedWorkload
    buffers: RoundBuffers
    alive: bool = True
    training: int = 0
    sequence: int = 0
    trained: Trained | None = None


@dataclass
class Swarm:
    """The simulated network and clock, and the peers on it."""

    seed: int
    settings: RunSettings
    faults: Faults = field(default_factory=Faults)
    one_child: bool = True
    """Whether a second entry at a position is an error, as it is until a partition grace has run out."""
    now: float = 0.0
    trace: list[tuple[object, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.peers: dict[str, SimulatedPeer] = {}
        self.side: dict[str, int] = defaultdict(int)  # which side of a partition a peer is on
        self.history = History(self.one_child)
        self._sequence = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    # Peers and faults -----------------------------------------------------------------------------------------
    def start(self, name: str) -> None:
        """A peer starts, or starts again having forgotten everything but its name."""
        sequence = self.peers[name].sequence if name in self.peers else 0
        workload = SimulatedWorkload(name)
        peer = Peer(name, self.settings, workload.state, self.now)
        simulated = SimulatedPeer(peer, workload, RoundBuffers(workload), sequence=sequence)  # type: ignore[arg-type]
        self.peers[name] = simulated
        self._note(name, "starts")
        self._repeat(simulated, 0.25, lambda: self._tick(simulated))
        self._repeat(simulated, self.settings.timing.heartbeat, lambda: self._beat(simulated))

    def kill(self, name: str) -> None:
        self._note(name, "is killed")
        self.peers[name].alive = False

    def leave(self, name: str) -> None:
        self._handle(self.peers[name], LeaveRequested())

    def cut_off(self, name: str) -> None:
        self._note(name, "is cut off")
        self.side[name] = 1

    def heal(self) -> None:
        self._note("partition healed")
        self.side.clear()

    def _note(self, *what: object) -> None:
        self.trace.append((round(self.now, 2), *what))

    @property
    def longest(self) -> int:
        """Entries in the longest lineage so far."""
        return self.history.longest

    @property
    def living(self) -> list[SimulatedPeer]:
        return [peer for peer in self.peers.values() if peer.alive and peer.peer.state is not State.LEFT]

    # The clock ------------------------------------------------------------------------------------------------
    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (self.now + delay, self._sequence, action))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass. Returns whether `until` came true."""
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            if until():
                return True
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end
        return until()

    def _repeat(self, peer: SimulatedPeer, period: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if peer.alive and peer.peer.state is not State.LEFT:
                action()
                self.at(period * self.random.uniform(0.8, 1.2), again)

        self.at(period * self.random.random(), again)

    def _tick(self, simulated: SimulatedPeer) -> None:
        if self.random.random() < self.faults.suspicion:
            self._handle(simulated, Undelivered(self.random.choice(sorted(self.peers))))
        self._handle(simulated, Tick())

    # The driver -----------------------------------------------------------------------------------------------
    def _handle(self, simulated: SimulatedPeer, event: Event) -> None:
        if not simulated.alive:
            return
        for effect in simulated.peer.handle(event, self.now):
            self._carry_out(simulated, effect)
        if simulated.peer.state not in (State.APPLYING, State.FETCHING):
            self.history.check(simulated.peer.me, simulated.peer.log.position, simulated.workload.state)

    def _soon(self, simulated: SimulatedPeer, event: Event) -> None:
        self.at(self._delay(), lambda: self._handle(simulated, event))

    def _delay(self) -> float:
        return self.random.uniform(0.001, self.faults.longest_delay)

    def _carry_out(self, simulated: SimulatedPeer, effect: Effect) -> None:
        me = simulated.peer.me
        buffers, workload = simulated.buffers, simulated.workload
        match effect:
            case Send(to, message):
                self._note(me, "→", to, message)
                self._send(simulated, to, pack_message(self.settings.run, message))
            case Train(lease=lease, steps=steps):
                simulated.training += 1
                self._train(simulated, simulated.training, lease, steps)
            case StopTraining():
                simulated.training += 1
            case Stop():
                for other in self.living:
                    farewell = simulated.peer.goodbye
                    self._send(simulated, other.peer.me, pack_message(self.settings.run, farewell))
            case OpenRound(attempt=attempt):
                if buffers.open(effect):
                    self._soon(simulated, ReducedArrived(attempt, 0))
                elif effect.adopted is None and simulated.trained and (current := buffers.current(attempt)):
                    current.own = workload.contribution(simulated.trained)
                    self._soon(simulated, Quantized(attempt))
            case PushContribution() | PushReduced():
                self._push(simulated, effect)
            case ReducePart(attempt, part):
                if current := buffers.current(attempt):
                    current.parts[part] = workload.reduce(buffers.ordered_contributions(attempt, part))
                    self._soon(simulated, ReducedArrived(attempt, part))
            case DigestPayload(attempt):
                if buffers.current(attempt):
                    self._handle(simulated, PayloadDigested(attempt, buffers.hold(attempt)))
            case Apply(header):
                state = workload.apply(buffers.held(header.payload))
                self.history.record(header)
                self._soon(simulated, Applied(header, state))
            case FetchSnapshot(donor):
                self._note(me, "fetches the state of", donor)
                self.at(self._delay() * 5, lambda: self._fetch(simulated, donor))
            case _:
                self._note(me, effect)

    def _train(self, simulated: SimulatedPeer, training: int, lease: Lease, steps: int) -> None:
        def done() -> None:
            if simulated.training == training:
                tokens = self.settings.tokens_per_sample * sample_count(lease)
                simulated.trained = Trained(lease, tokens, 1.0)
                self._handle(simulated, TrainingDone(simulated.trained))

        self.at(steps * self.random.uniform(0.5, 1.5), done)

    def _reachable(self, first: str, second: str) -> bool:
        other = self.peers.get(second)
        return other is not None and other.alive and self.side[first] == self.side[second]

    def _send(self, sender: SimulatedPeer, to: str, data: bytes) -> None:
        if not self._reachable(sender.peer.me, to):
            self._soon(sender, Undelivered(to))
            return
        receiver = self.peers[to]
        message = unpack_message(self.settings.run, data)
        copies = 0 if self.random.random() < self.faults.loss else 1
        copies += self.random.random() < self.faults.duplication
        for _ in range(copies):
            self._soon(receiver, Received(sender.peer.me, message))

    def _push(self, sender: SimulatedPeer, push: PushContribution | PushReduced) -> None:
        reduced = isinstance(push, PushReduced)
        read = sender.buffers.part if reduced else sender.buffers.contribution
        if not sender.buffers.current(push.attempt):
            return
        data = read(push.attempt, push.part)

        def arrive() -> None:
            if not sender.alive:
                return  # it died with the upload under way
            failed = PushFailed(push.attempt, push.to, reduced, refused=False)
            if not self._reachable(sender.peer.me, push.to) or self.random.random() < self.faults.push_failure:
                self._soon(sender, failed)
                return
            accepted = self._accept(self.peers[push.to], sender.peer.me, push, data)
            answer = Pushed(push.attempt, push.to, reduced)
            self._soon(sender, answer if accepted else PushFailed(push.attempt, push.to, reduced, refused=True))

        self.at(self._delay(), arrive)

    def _accept(self, receiver: SimulatedPeer, sender: str, push: PushContribution | PushReduced, data: bytes) -> bool:
        exchange = receiver.peer.exchange
        current = receiver.buffers.current(push.attempt)
        if exchange is None or current is None or exchange.attempt != push.attempt:
            return False
        if isinstance(push, PushReduced):
            if exchange.wants_reduced(sender, push.part):
                current.parts[push.part] = data
                self._handle(receiver, ReducedArrived(push.attempt, push.part))
        elif exchange.wants_contribution(sender, push.part):
            current.contributions[sender] = data
            self._handle(receiver, ContributionArrived(push.attempt, sender))
        return True

    def _fetch(self, simulated: SimulatedPeer, donor: str) -> None:
        source = self.peers.get(donor)
        if source is None or not self._reachable(simulated.peer.me, donor) or source.peer.state is State.APPLYING:
            self._handle(simulated, SnapshotFailed(donor, "not there"))
            return
        simulated.workload.state = source.workload.state
        self._handle(simulated, SnapshotRestored(donor, source.peer.log.last, source.workload.state))

    def _beat(self, simulated: SimulatedPeer) -> None:
        simulated.sequence += 1
        me = simulated.peer.me
        seen = [self._heartbeat(other) for other in self.living if self.side[other.peer.me] == self.side[me]]
        self._soon(simulated, HeartbeatsSeen(tuple(beat for beat in seen if beat.sequence > 0)))

    def _heartbeat(self, simulated: SimulatedPeer) -> Heartbeat:
        peer = simulated.peer
        return Heartbeat.model_construct(
            run=self.settings.run,
            peer=peer.me,
            sequence=simulated.sequence,
            state=SHOWN_AS[peer.state],
            index=peer.settled.position.index,
            head=peer.settled.position.head,
            state_digest=peer.state_digest,
            lineage_tokens=peer.settled.lineage_tokens,
        )
