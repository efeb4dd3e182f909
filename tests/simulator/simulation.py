"""A whole swarm on a simulated clock: the peers' real protocol code, a network that misbehaves, and no waiting.

Everything is drawn from one seeded generator, so a schedule that fails is replayed by its seed. After every step the
invariants are checked: one state per log position, one child per log position, no sample trained twice.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from peers.driver.traffic import ADMISSION_TIMEOUT
from peers.errors import RemoteProtocolError
from peers.log.header import Position
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState
from peers.messages.messages import Message, Unread
from peers.protocol.effects import Apply, Effect, SendChunk
from peers.protocol.events import (
    Captured,
    ChunkSent,
    ChunksUnsent,
    Event,
    HeartbeatsSeen,
    LeaveRequested,
    ReachSeen,
    Received,
    SignedHeadsSeen,
    Tick,
    TrainingDone,
    Undelivered,
)
from peers.values.signed_heads import NOTHING_SIGNED
from peers.values.wire import Reach, WireError
from tests.simulator.history import History
from tests.simulator.links import DETOUR, SLOWNESS, Faults, Links, Rate
from tests.simulator.simulated_disk import SimulatedDisk
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.trace import brief

TICK = 1.0  # seconds
READ_AT_ONCE = 1000
"""Messages whose meaning is remembered, since others will read them, too."""
SKEW = 0.03  # by which clocks run fast or slow
REACH_DELAY = 8.0  # seconds until a peer's links know how it reaches another one


@dataclass
class Swarm:
    """The simulated network and clock, and the peers on it. The hooks see, change or stop what goes on."""

    seed: int
    settings: RunSettings
    faults: Faults = field(default_factory=Faults)
    one_child: bool = True
    """Whether a second entry at a position is an error, as it is until a partition grace has run out."""
    block_count: int = 7
    kept_bytes: int = 200
    traced: bool = False
    """Whether the trace has the messages, too. They take a tenth of the time; they are read where a life fails."""
    speeds: tuple[float, ...] = (1.0,)
    """Of peers, by name; who is slow trains shorter leases."""
    formats: tuple[int, ...] = (0,)
    """Of contributions, in turn: format 1 has half the bytes of an average's."""
    step_seconds: float = 1.0
    """That an inner step takes, at speed 1."""
    unevenness: float = 0.5
    """By which share of its usual time an inner step takes more or less."""
    now: float = 0.0
    trace: list[tuple[object, ...]] = field(default_factory=list)
    on_message: Callable[[str, str, Message], Message | None] = field(default=lambda sender, to, message: message)
    on_chunk: Callable[[str, SendChunk], bool] = field(default=lambda sender, send: True)
    on_apply: Callable[[str], None] = field(default=lambda name: None)
    on_effect: Callable[[str], None] = field(default=lambda name: None)
    on_event: Callable[[SimulatedPeer, Event], None] = field(default=lambda peer, event: None)
    peer_of: Callable[[str, Swarm, tuple[float, float]], SimulatedPeer] = field(
        default=lambda name, swarm, clock: SimulatedPeer(name, swarm, swarm.block_count, swarm.kept_bytes, clock)
    )
    """Makes the peer of a name: stories with liars make them here."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.peers: dict[str, SimulatedPeer] = {}
        self.disks: defaultdict[str, SimulatedDisk] = defaultdict(SimulatedDisk)  # by peer; they outlive its processes
        self.links = Links()
        self.side: dict[str, int] = defaultdict(int)  # which side of a partition a peer is on
        self.deaf: set[str] = set()  # whom nothing reaches, while they are heard
        self.stopped: set[str] = set()
        self.signed = NOTHING_SIGNED
        """What archives have signed, as all peers know that are not `unaware`."""
        self.unaware: set[str] = set()
        self.incarnations: Iterator[int] = count(1000, 1000)
        self.history = History(self.settings, self.one_child)
        self.messages: Counter[str] = Counter()  # sent, by sender
        self.chunks: Counter[str] = Counter()
        self._checked: dict[str, tuple[LogState, tuple[bytes, ...]]] = {}  # where each peer was when it was checked
        self._doors: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)  # chunks that wait, by receiver
        self._read: dict[tuple[bytes, Position, bytes], Message | Unread | None] = {}  # what bytes say, and where
        self._sequence = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    # Peers and faults -----------------------------------------------------------------------------------------
    def start(self, name: str) -> None:
        """Start a peer, or start it again: it has its name and its disk, and nothing else."""
        clock = (self.random.uniform(0, 1000), self.random.uniform(1 - SKEW, 1 + SKEW))
        peer = self.peer_of(name, self, clock)
        peer.sequence = self.peers[name].sequence if name in self.peers else 0
        self.peers[name] = peer
        self.note(name, "starts")
        self.set_going(peer)

    def set_going(self, peer: SimulatedPeer) -> None:
        """Have a process look at the clock, and give heartbeats, from now on."""
        self._repeat(peer, TICK, lambda: self._tick(peer))
        self._repeat(peer, self.settings.timing.heartbeat, lambda: self._beat(peer))

    def kill(self, name: str) -> None:
        self.note(name, "is killed")
        self.peers[name].alive = False

    def leave(self, name: str) -> None:
        self.note(name, "leaves")
        self.handle(self.peers[name], LeaveRequested())

    def cut_off(self, name: str) -> None:
        self.note(name, "is cut off")
        self.side[name] = 1

    def deafen(self, name: str) -> None:
        """A partition of one direction: nothing reaches the peer any more."""
        self.note(name, "hears nothing")
        self.deaf.add(name)

    def stop(self, name: str) -> None:
        """As SIGSTOP does: what reaches the peer waits until it goes on."""
        self.note(name, "is stopped")
        self.stopped.add(name)

    def heal(self) -> None:
        self.note("all healed")
        self.side.clear()
        self.deaf.clear()
        self.stopped.clear()

    def note(self, *what: object) -> None:
        self.trace.append((round(self.now, 2), *what))

    @property
    def longest(self) -> int:
        """Entries in the longest lineage so far."""
        return self.history.longest

    @property
    def living(self) -> list[SimulatedPeer]:
        return [peer for peer in self.peers.values() if peer.is_there]

    @property
    def honest(self) -> list[SimulatedPeer]:
        """The living peers that do as they should."""
        return [peer for peer in self.living if peer.is_honest]

    def disk_of(self, name: str) -> SimulatedDisk:
        """Return a peer's disk, which is empty at first."""
        return self.disks[name]

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

    def soon(self, peer: SimulatedPeer, event: Event, delays: float = 1.0) -> None:
        self.later(peer, event, delays * self._delay())

    def delayed(self, action: Callable[[], None]) -> None:
        """Do something after a delay, as a message has it."""
        self.at(self._delay(), action)

    def later(self, peer: SimulatedPeer, event: Event, seconds: float) -> None:
        self.at(seconds, lambda: self.handle(peer, event))

    def training_time(self, steps: int) -> float:
        return steps * self.step_seconds * self.random.uniform(1 - self.unevenness, 1 + self.unevenness)

    def tokens_per_second(self, speed: float) -> float:
        """Return what a peer of this speed says that it trains."""
        tokens = self.settings.samples_per_lease * self.settings.tokens_per_sample
        return speed * tokens / (self.settings.inner_steps * self.step_seconds)

    def _repeat(self, peer: SimulatedPeer, period: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if peer.is_there:
                if peer.name not in self.stopped:
                    action()
                self.at(period * self.random.uniform(0.8, 1.2), again)

        self.at(period * self.random.random(), again)

    def _tick(self, peer: SimulatedPeer) -> None:
        if self.random.random() < self.faults.suspicion:
            self.handle(peer, Undelivered(self.random.choice(sorted(self.peers))))
        self.handle(peer, Tick())

    def _beat(self, peer: SimulatedPeer) -> None:
        """Have a peer say how it is, and hear what those said last whose beats reach it (R20)."""
        peer.beat()
        others = [other for other in self.peers.values() if other.is_there and self._reaches(other.name, peer.name)]
        if self.signed.heads and peer.name not in self.unaware:
            heads = peer.entries.heads
            ours = {index: heads[index] for index in self.signed.indices if index < len(heads)}
            self.handle(peer, SignedHeadsSeen(self.signed, ours))
        beats = tuple(beat for other in others if (beat := other.heartbeat_for(peer.name)))
        side, heard = self.side[peer.name], {peer.name, *(beat.peer for beat in beats)}
        recorded = {one for one, other in self.peers.items() if other.is_there and self.side[one] == side}
        unheard = frozenset(recorded - heard)
        self.soon(peer, HeartbeatsSeen(beats, unheard=unheard))
        self._learn_reach(peer)

    def _learn_reach(self, peer: SimulatedPeer) -> None:
        """Tell a peer how it reaches others, a while after that changed. Its links say nothing of peers that it reaches
        as usual, but for those of which they said something before."""
        if not (self.faults.hinders or peer.reach):
            return
        side = self.side[peer.name]
        others = [other for other in self.peers.values() if other.is_there and self.side[other.name] == side]
        now = {other.name: self.faults.reach(peer.name, other.name) for other in others if other.name != peer.name}
        reach = {other: way for other, way in now.items() if way is not Reach.OPEN or other in peer.reach}
        if reach != peer.reach:
            peer.reach = reach
            self.later(peer, ReachSeen(reach, {}), REACH_DELAY)

    # The driver -----------------------------------------------------------------------------------------------
    def handle(self, peer: SimulatedPeer, event: Event) -> None:
        """The peer takes in an event, unless it died meanwhile: between any two of its effects, too."""
        if not peer.alive:
            return
        if peer.name in self.stopped:
            self.at(1.0, lambda: self.handle(peer, event))
            return
        if isinstance(event, Captured | TrainingDone) and not peer.is_of_present_training(event):
            return
        try:
            self._take_in(peer, event)
        except Exception as error:
            if not peer.may_stumble(error):
                raise

    def _take_in(self, peer: SimulatedPeer, event: Event) -> None:
        self.on_event(peer, event)
        for effect in self.tell(peer, event):
            self.on_effect(peer.name)
            if not peer.alive:
                return
            peer.carry_out(effect)
        peer.go_on(event)
        place = peer.peer.log, peer.states
        if peer.is_honest and place != self._checked.get(peer.name) and peer.is_settled:
            self.history.check(peer.name, peer.peer.log, peer.states)
            self._checked[peer.name] = place

    def tell(self, peer: SimulatedPeer, event: Event) -> list[Effect]:
        """Tell the peer's protocol. Returns what it wants done."""
        return peer.take_in(event)

    def recorded(self, peer: SimulatedPeer, made: Apply, payload: bytes | None) -> None:
        """A peer applies an entry. What a liar says of it is no part of the history; what follows from it is."""
        header, log = made.header, peer.peer.log
        self.history.derive(header, log, payload)
        if peer.is_honest:
            self.history.record(header, log)
            self.history.certified(header, made.certificate, peer.peer.lineage.start(header.previous))
        self.on_apply(peer.name)

    # The network ----------------------------------------------------------------------------------------------
    def _delay(self) -> float:
        return self.random.uniform(0.001, self.faults.longest_delay)

    def _reaches(self, sender: str, to: str) -> bool:
        other = self.peers.get(to)
        is_there = other is not None and other.alive and self.side[sender] == self.side[to] and to not in self.deaf
        return is_there and self.faults.reach(sender, to) is not Reach.NONE

    def send(self, sender: SimulatedPeer, to: str, message: Message) -> None:
        self.messages[sender.name] += 1
        if self.traced:
            self.note(sender.name, "→", to, _Brief(message))
        seen = self.on_message(sender.name, to, message)
        if not self._reaches(sender.name, to):
            self.soon(sender, Undelivered(to))
        elif seen is not None:
            with suppress(LogError):  # of a lineage that the sender has left meanwhile: nobody needs to know
                self.carry(sender, self.peers[to], sender.packer.pack(seen))

    def carry(self, sender: SimulatedPeer, to: SimulatedPeer, packed: bytes) -> None:
        """Bytes are on their way."""
        copies = 0 if self.random.random() < self.faults.loss else 1
        copies += self.random.random() < self.faults.duplication
        for _ in range(copies):
            delay = self._delay() + self.faults.delay(sender.name, to.name)
            self.at(delay, lambda: self.deliver(to, sender.name, packed))

    def deliver(self, to: SimulatedPeer, sender: str, packed: bytes) -> None:
        """They have come. What they say depends on where in the log the receiver is by now."""
        if to.name in self.stopped:
            self.at(1.0, lambda: self.deliver(to, sender, packed))
            return
        for process in to.processes_for(sender):
            if process.alive and (message := self._unpacked(process, sender, packed)) is not None:
                self.handle(process, Received(sender, message))

    def _unpacked(self, to: SimulatedPeer, sender: str, packed: bytes) -> Message | Unread | None:
        """What bytes say to a peer. Most are told to many that are at one place: they say the same to all these, and
        are read once. Only a liar sends such as say nothing. Raises: WireError."""
        log = to.peer.log
        here = packed, log.position, log.state
        if here not in self._read:
            if len(self._read) >= READ_AT_ONCE:
                self._read.clear()
            try:
                self._read[here] = to.packer.unpack(sender, packed)
            except WireError:
                if self.peers[sender].is_honest:
                    raise
                return None
        return self._read[here]

    def farewell(self, sender: SimulatedPeer) -> None:
        if (goodbye := sender.peer.goodbye) is not None:
            for other in self.living:
                self.send(sender, other.name, goodbye)

    def send_chunk(self, sender: SimulatedPeer, send: SendChunk, data: bytes) -> None:
        if not self.on_chunk(sender.name, send):
            return
        self.chunks[sender.name] += 1
        header, sent, size = sender.header(send), self.now, len(data)

        def arrive(latest: float = 0.0) -> None:
            if not sender.alive:
                return  # it died with the chunk under way
            if send.to in self.stopped:
                self.at(1.0, arrive)
                return
            latest = latest or self.now + ADMISSION_TIMEOUT
            if self.now < latest and self._must_wait(sender.name, send):
                self._wait_at_door(send.to, lambda: arrive(latest), latest)
                return
            is_taken = False
            if self._reaches(sender.name, send.to) and self.random.random() >= self.faults.stream_failure:
                for process in self.peers[send.to].processes_for(sender.name):
                    try:
                        event, taken = process.accept(sender.name, send.round_name, header, data, self.now - sent)
                    except RemoteProtocolError:
                        if sender.name not in self.history.liars:
                            raise
                        continue
                    is_taken |= taken
                    if event is not None:
                        self.handle(process, event)
            if is_taken:
                self.soon(sender, ChunkSent(send.round_name, send.to, send.chunk, send.reduced))
            else:
                self.soon(sender, ChunksUnsent(send.round_name, send.to, (send.chunk,), send.reduced))

        faults = self.faults
        slow = sender.name in faults.slow or send.to in faults.slow
        is_relayed = faults.reach(sender.name, send.to) is Reach.RELAYED
        delay = self._delay() * (SLOWNESS if slow else 1.0) * (DETOUR if is_relayed else 1.0)
        delay += faults.delay(sender.name, send.to)

        def pass_down() -> None:
            self.at(self.links.receive(send.to, send.round_name, size, self.faults, self.now), arrive)

        self.at(delay + self.links.send(sender.name, send.round_name, size, faults, self.now), pass_down)

    def _must_wait(self, sender: str, send: SendChunk) -> bool:
        """Return whether a chunk waits until its receiver begins the round, as the driver has it."""
        if not self._reaches(sender, send.to):
            return False
        return all(process.makes_wait(sender, send.round_name) for process in self.peers[send.to].processes_for(sender))

    def _wait_at_door(self, name: str, again: Callable[[], None], latest: float) -> None:
        """Do something again when a peer begins a round, or when it has waited for long enough."""
        door = self._doors[name]
        door.append(again)

        def give_up() -> None:
            if again in door:
                door.remove(again)
                again()

        self.at(latest - self.now, give_up)

    def opened(self, peer: SimulatedPeer) -> None:
        """Let in what has waited for a peer to begin a round."""
        door = self._doors[peer.name]
        for again in door:
            self.at(0.0, again)
        door.clear()

    def link_rate(self, peer: SimulatedPeer) -> Rate:
        """Return what a peer's link carries, as it would find out by itself."""
        return self.faults.rate(peer.name)

    def fetch_from(self, peer: SimulatedPeer, donors: tuple[str, ...]) -> list[SimulatedPeer]:
        """The donors that answer."""
        return [self.peers[donor] for donor in donors if self._reaches(peer.name, donor)]


class _Brief:
    """Put into words only if somebody reads the trace."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __str__(self) -> str:
        return brief(self._message)
