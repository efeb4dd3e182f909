"""A liar in a simulated swarm: an honest peer's own code, and one lie that changes what goes out, or what comes in.

What the lies are is in lies.py and mixtures.py. Each overrides a method or two of `Lie`. A liar signs for itself alone,
and cannot speak for others: the network proves who speaks. A lie needs no more than a peer's protocol and its keys, so
that real processes can tell it, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from peers.log.certificate import Choice
from peers.log.header import Header, Member, Position
from peers.log.state import LogError, LogState
from peers.messages.messages import Message, Unread, Vote
from peers.messages.packing import Packer
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import Effect, ReduceChunk, Send, SendChunk
from peers.protocol.events import Event, Received, Tick
from peers.protocol.exchange import Exchange
from peers.protocol.parts import Averages
from peers.protocol.peer import Peer
from peers.transfer.averages import Average
from peers.values.identity import Keys
from peers.values.wire import Value, digest_of
from peers.values.workload import Blocks, Reduction
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_log import Frozen
from tests.simulator.simulated_peer import SimulatedPeer

if TYPE_CHECKING:
    from tests.simulator.simulation import Swarm

V = TypeVar("V", bound=Value)
FAR = 2**61
"""More than any honest run counts up to."""
Said = Iterator[tuple[str, Message]]
"""Messages, and to whom."""


class Lie:
    """One way to depart from the protocol. This one does not."""

    def __init__(self, peer: Peer, keys: Keys, draw: random.Random, allies: Sequence[str] = ()) -> None:
        self.peer = peer
        self.keys = keys
        self.draw = draw
        self.allies = allies or (peer.me,)

    # What it may change ---------------------------------------------------------------------------------------
    def says(self, to: str, message: Message) -> Said:
        """Yield what is sent in place of a message of the protocol's."""
        yield to, message

    def hears(self, sender: str, message: Message | Unread) -> Said:
        """Yield what is sent because a message has come."""
        yield from ()

    def volunteers(self) -> Said:
        """Yield what is sent unasked, at each tick: about once a second."""
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

    def reduces(self, reduce: ReduceChunk) -> ReduceChunk:
        """Return which blocks it averages."""
        return reduce

    def averages(self, blocks: Blocks) -> Blocks:
        """Return what it takes for an average that it has made."""
        return blocks

    def freezes(self, frozen: Frozen) -> Frozen:
        """Return the state that joiners get."""
        return frozen

    # What it has to do it with --------------------------------------------------------------------------------
    @property
    def me(self) -> str:
        return self.peer.me

    @property
    def log(self) -> LogState:
        """The log as the liar has it, with its state."""
        return self.peer.log.in_state(self.peer.state_digest)

    @property
    def others(self) -> list[str]:
        """The peers that it knows to be there."""
        return sorted(self.peer.presence.live())

    @property
    def victims(self) -> list[str]:
        """The others that are no allies."""
        return [peer for peer in self.others if peer not in self.allies]

    @property
    def exchange(self) -> Exchange | None:
        return self.peer.exchange

    def to_all(self, message: Message) -> Said:
        """Yield a message to all others."""
        yield from ((peer, message) for peer in self.others)

    def vote(self, choice: Choice, position: Position) -> Vote:
        """Return its signed vote for anything."""
        incarnation = self.log.incarnations.get(self.me, self.peer.incarnation)
        signature = self.keys.sign(choice.text(position, incarnation))
        return Vote(position=position, incarnation=incarnation, choice=choice, signature=signature)

    def entry_of_its_own(self) -> Header:
        """Return an entry that follows from the log, and that nobody has made."""
        log = self.log.of(self.log.fragments - 1)
        lease = log.leases.get(self.me) or log.grants[0]
        tokens = sum(piece.size for piece in lease) * log.tokens_per_sample
        own = Member(peer=self.me, tokens=tokens, samples=lease, incarnation=self.peer.incarnation)
        return log.next_header((own,), invented("payload"), self.me if log.closes else None)


def lying(average: Average, lie: Callable[[], Lie]) -> Average:
    """Return what a liar averages with."""

    async def averaged(reduction: Reduction) -> Blocks:
        return lie().averages(await average(reduction))

    return averaged


class LiarsPacker(Packer):
    """There are lies that no bytes can say."""

    def pack(self, message: Message) -> bytes:
        """Raises: LogError."""
        try:
            return super().pack(message)
        except Exception as error:
            raise LogError(str(error)) from error


class Liar(SimulatedPeer):
    """It lies while `is_time` says so."""

    is_honest = False

    def __init__(
        self,
        name: str,
        swarm: Swarm,
        clock: tuple[float, float],
        kind: type[Lie],
        draw: random.Random,
        allies: Sequence[str] = (),
        is_time: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name, swarm, swarm.block_count, swarm.kept_bytes, clock)
        self.packer = LiarsPacker(self.peer)
        self.swarm = swarm
        keys = SimulatedKeys(name)
        self._lie, self._truth = kind(self.peer, keys, draw, allies), Lie(self.peer, keys, draw)
        self._is_time = is_time
        for fragment in self.fragments:
            fragment.average = lying(fragment.workload.reduce, lambda: self.lie)

    @property
    def lie(self) -> Lie:
        """What it says at present."""
        return self._lie if self._is_time() else self._truth

    def take_in(self, event: Event) -> list[Effect]:
        event = self.lie.notices(event)
        effects = super().take_in(event)
        if isinstance(event, Received) and event.sender != self.name:
            self.tell(self.lie.hears(event.sender, event.message))
        elif isinstance(event, Tick):
            self.tell(self.lie.volunteers())
        return effects

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self.tell(self.lie.says(to, message))
            case SendChunk():
                self._give(effect)
            case ReduceChunk():
                super().carry_out(self.lie.reduces(effect))
            case _:
                super().carry_out(effect)

    def tell(self, said: Iterable[tuple[str, Message]]) -> None:
        """Send messages as they are."""
        for to, message in said:
            if to != self.name:
                self.swarm.send(self, to, message)

    def _give(self, send: SendChunk) -> None:
        buffers = self._buffers(send.round_name)
        if buffers.round(send.round_name):
            given = self.lie.gives(send, bytes(buffers.read(send.round_name, send.chunk, send.reduced)))
            if given:
                self.swarm.send_chunk(self, *given)

    def may_stumble(self, error: Exception) -> bool:
        """Start again: it fell over its own lies."""
        self.swarm.note(self.name, "stumbles", repr(error))
        if self.alive:
            self.alive = False
            self.swarm.at(1.0, lambda: self.swarm.start(self.name))
        return True

    def heartbeat_for(self, peer: str) -> Heartbeat | None:
        return self.heartbeat and self.lie.beats(peer, self.heartbeat)

    def frozen(self, least: int) -> Frozen:
        return self.lie.freezes(super().frozen(least))


def remade(value: V, **changes: object) -> V:
    """Return a message with other fields. A copy would keep what was worked out from the old ones."""
    return type(value)(**{name: getattr(value, name) for name in type(value).model_fields} | changes)


def invented(what: object) -> bytes:
    """Return a digest of nothing."""
    return digest_of(repr(what).encode())


def altered(data: bytes, salt: str = "") -> bytes:
    """Return other bytes, as many."""
    return (digest_of(salt.encode() + data) * (len(data) // 32 + 1))[: len(data)]


def signed_average(exchange: Exchange, keys: Keys, send: SendChunk, data: bytes) -> SendChunk:
    """Return what hands on these bytes as its own average, signed like any other."""
    averages = Averages(exchange.me, exchange.round, keys)
    return replace(send, origin=averages.sign(send.chunk, digest_of(data), send.absent).origin)
