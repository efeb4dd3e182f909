"""A liar in a simulated swarm: it runs the protocol's own code, and what it says of it goes through its lies.

What the lies are is in lies.py, leading_lies.py and mixtures.py. A lie sees all that the liar sends and hears, and may
say more, less, or something else. It signs for the liar and its allies alone, and cannot speak for others: the network
proves who speaks. A lie needs no more of its liar than `Means`, so that real processes can tell it, too.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from peers.log.certificate import ballot
from peers.log.header import Header, Member
from peers.log.state import LogError, LogState
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import Effect, Send, SendChunk
from peers.protocol.events import Event, HeartbeatsSeen, ReachSeen, Received, Tick, Undelivered
from peers.protocol.messages import Message, Unread
from peers.protocol.packing import Packer
from peers.protocol.peer import Peer
from peers.protocol.rounds import Attempt, Held, Holder
from peers.transfer.averages import Admitted, Average, ChunkHeader
from peers.transfer.buffers import PayloadBuffers
from peers.values.chunks import Payload
from peers.values.identity import Keys
from peers.values.wire import digest_of
from peers.values.workload import Blocks, Reduction
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_log import Frozen
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulated_workload import BLOCK_BYTES

if TYPE_CHECKING:
    from tests.simulator.simulation import Swarm

Said = Iterator[tuple[str, Message]]
"""Messages, and to whom."""
HEARD = HeartbeatsSeen | ReachSeen | Received | Tick | Undelivered
"""What comes from outside, and so to every process that runs with one key."""


class Means(ABC):
    """What lies are made of: where a liar is in the log, whom it knows, and for whom it can sign."""

    name: str
    peer: Peer
    keys: Keys
    allies: Sequence[str]

    @abstractmethod
    def keys_of(self, ally: str) -> Keys:
        """Return the keys of one of the allies."""

    @abstractmethod
    def payload_of_its_own(self) -> Payload:
        """Return a payload that nobody has averaged, and keep it, to be fetched."""

    @property
    def log(self) -> LogState:
        """The log as the liar has it, with its state."""
        return self.peer.log.in_state(self.peer.state_digest)

    @property
    def others(self) -> list[str]:
        """The peers that it knows to be there."""
        return sorted(self.peer.presence.live())

    def sign(self, header: Header, attempt: Attempt, signer: str | None = None) -> bytes:
        """Return its signature of an entry in an attempt, or an ally's, in the incarnation that the roster has."""
        signer = signer or self.name
        incarnation = self.log.incarnations.get(signer, self.peer.incarnation)
        return self.keys_of(signer).sign(ballot(header, attempt.name, incarnation).text)

    def holding(self, header: Header, attempt: Attempt) -> Held:
        """Return what it says if it holds an entry since this attempt."""
        return Held(attempt=attempt, header=header, signature=self.sign(header, attempt))

    def holders(self, header: Header, attempt: Attempt) -> tuple[Holder, ...]:
        """Return its own and its allies' signatures of an entry."""
        signed = {ally: self.sign(header, attempt, ally) for ally in sorted(self.allies)}
        return tuple(Holder(peer=ally, attempt=attempt, signature=signature) for ally, signature in signed.items())

    def entry_of_its_own(self) -> Header:
        """Return an entry that follows from the log, and that nobody has made."""
        log = self.log.of(self.log.fragments - 1)
        lease = log.leases.get(self.name) or log.grants[0]
        tokens = sum(piece.size for piece in lease) * log.tokens_per_sample
        own = Member(peer=self.name, tokens=tokens, samples=lease, incarnation=self.peer.incarnation)
        return log.next_header((own,), self.payload_of_its_own().digest)


class Lie:
    """One way to depart from the protocol. This one does not."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        self.liar = liar
        self.draw = draw

    def says(self, to: str, message: Message) -> Said:
        """Yield what is sent in place of a message of the protocol's."""
        yield to, message

    def hears(self, sender: str, message: Message | Unread) -> Said:
        """Yield what is sent because a message has come."""
        yield from ()

    def volunteers(self) -> Said:
        """Yield what is sent unasked, at each tick."""
        yield from ()

    def notices(self, event: Event) -> Event:
        """Return what the liar itself believes that happened."""
        return event

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        """Return the heartbeat that a peer hears of the liar."""
        return heartbeat

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes] | None:
        """Return what goes to another member in place of a chunk; None: nothing."""
        return send, data

    def offers(self, to: str, buffers: PayloadBuffers) -> PayloadBuffers:
        """Return what it contributes, as another one sees that: the proofs of chunks that it sends, and what it shows
        when averages are made again."""
        return buffers

    def reduces(self, blocks: Blocks) -> Blocks:
        """Return what it takes for the average of a chunk that it reduces."""
        return blocks

    def freezes(self, frozen: Frozen) -> Frozen:
        """Return the state that joiners get."""
        return frozen


def lying(average: Average, lies: Callable[[], Sequence[Lie]]) -> Average:
    """Return what a liar averages with."""

    async def averaged(reduction: Reduction) -> Blocks:
        made = await average(reduction)
        for lie in lies():
            made = lie.reduces(made)
        return made

    return averaged


class LiarsPacker(Packer):
    """There are lies that no bytes can say."""

    def pack(self, message: Message) -> bytes:
        """Raises: LogError."""
        try:
            return super().pack(message)
        except Exception as error:
            raise LogError(str(error)) from error


class Liar(SimulatedPeer, Means):
    """It lies while `is_time` says so. Liars that are `allies` sign for each other."""

    is_honest = False

    def __init__(
        self,
        name: str,
        swarm: Swarm,
        clock: tuple[float, float],
        lies: Iterable[type[Lie]],
        draw: random.Random,
        allies: Sequence[str] = (),
        is_time: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name, swarm, swarm.block_count, swarm.kept_bytes, clock)
        self.packer = LiarsPacker(self.peer)
        self.swarm = swarm
        self.clock = clock
        self.allies = allies or (name,)
        self.twin: SimulatedPeer | None = None
        """Another process with the same key, that knows nothing of this one."""
        self.keys = SimulatedKeys(name)
        self._lies = tuple(lie(self, draw) for lie in lies)
        self._is_time = is_time
        for fragment in self.fragments:
            fragment.average = lying(fragment.workload.reduce, lambda: self.lies)

    @property
    def lies(self) -> tuple[Lie, ...]:
        """Those that it tells at present."""
        return self._lies if self._is_time() else ()

    # What it does ---------------------------------------------------------------------------------------------
    def take_in(self, event: Event) -> list[Effect]:
        for lie in self.lies:
            event = lie.notices(event)
        if self.twin is not None and isinstance(event, HEARD):
            self.swarm.handle(self.twin, event)
        effects = super().take_in(event)
        for lie in self.lies:
            if isinstance(event, Received) and event.sender != self.name:
                self.tell(lie.hears(event.sender, event.message))
            elif isinstance(event, Tick):
                self.tell(lie.volunteers())
        return effects

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.tell(self._said(effect.to, effect.message))
        else:
            super().carry_out(effect)

    def _said(self, to: str, message: Message) -> Said:
        said = [(to, message)]
        for lie in self.lies:
            said = [lied for one in said for lied in lie.says(*one)]
        yield from said

    def tell(self, said: Iterable[tuple[str, Message]]) -> None:
        """Send messages as they are."""
        for to, message in said:
            if to != self.name:
                self.swarm.send(self, to, message)

    def may_stumble(self, error: Exception) -> bool:
        """Start again: it fell over its own lies."""
        self.swarm.note(self.name, "stumbles", repr(error))
        if self.alive:
            self.alive = False
            self.swarm.at(1.0, lambda: self.swarm.start(self.name))
        return True

    def heartbeat_for(self, peer: str) -> Heartbeat | None:
        beat = self.heartbeat
        for lie in self.lies if beat else ():
            assert beat is not None
            beat = lie.beats(peer, beat)
        return beat

    def _send_chunk(self, send: SendChunk) -> None:
        buffers = self._buffers(send.round_name)
        if not buffers.round(send.round_name):
            return
        given: tuple[SendChunk, bytes] | None = send, bytes(buffers.read(send.round_name, send.chunk, send.reduced))
        for lie in self.lies:
            given = given and lie.gives(*given)
        if given:
            self.world.send_chunk(self, *given)

    def header(self, send: SendChunk) -> ChunkHeader:
        return ChunkHeader.of(send, self.contributed(send.to, send.round_name.position.fragment))

    def contributed(self, to: str, fragment: int) -> PayloadBuffers:
        """Return what it contributes, as another one sees that."""
        buffers = self.fragments[fragment].buffers
        for lie in self.lies:
            buffers = lie.offers(to, buffers)
        return buffers

    def accept(self, sender: str, round_name: Attempt, header: ChunkHeader, data: bytes) -> Admitted:
        admitted = super().accept(sender, round_name, header, data)
        if self.twin is None or admitted.is_taken:
            return admitted
        event, is_taken = self.twin.accept(sender, round_name, header, data)
        if event is not None:
            self.swarm.soon(self.twin, event)
        return Admitted(None, is_taken)

    def frozen(self, least: int) -> Frozen:
        frozen = super().frozen(least)
        for lie in self.lies:
            frozen = lie.freezes(frozen)
        return frozen

    # What it makes lies of ------------------------------------------------------------------------------------
    def keys_of(self, ally: str) -> SimulatedKeys:
        return SimulatedKeys(ally)

    def payload_of_its_own(self) -> Payload:
        payload = Payload.cut(memoryview(b"\x07" * self.buffers.size.bytes), BLOCK_BYTES)
        self.fragments[-1].buffers.kept.keep(payload)
        return payload


def invented(what: object) -> bytes:
    """Return a digest of nothing."""
    return digest_of(repr(what).encode())
