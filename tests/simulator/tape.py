"""What happened to one simulated peer, and what the same costs a peer that is alone in its process.

In a simulated swarm a thousand peers share one process: what one of them has worked out is there for the others, and
each finds the processor's cache cold. So the processor time of one is measured elsewhere: all that happened to it since
it started is played again to the same protocol code, in a process that has nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from peers.log.settings import RunSettings
from peers.log.state import LogError
from peers.messages.packing import Packer
from peers.protocol.effects import Effect, Send
from peers.protocol.events import Event, Received
from peers.protocol.peer import Peer
from peers.values.chunks import PayloadSize
from peers.values.identity import Identity, verify
from peers.values.workload import PayloadKind
from tests.simulator.simulated_keys import SimulatedKeys


@dataclass(frozen=True)
class Packed:
    """A message as it came."""

    sender: str
    data: bytes


@dataclass
class Tape:
    """All that happened to one peer, in order, by its clock."""

    me: str
    settings: RunSettings
    payloads: tuple[PayloadSize, ...]
    state_digest: bytes
    incarnation: int
    started_at: float
    happened: list[tuple[float, Event | Packed]] = field(default_factory=list)

    def record(self, now: float, what: Event | Packed) -> None:
        self.happened.append((now, what))

    def __len__(self) -> int:
        return len(self.happened)


class PricedKeys(SimulatedKeys):
    """Simulated signatures that take as long as real ones to make and to check."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._identity = Identity.generate()
        self._signature = self._identity.sign(name.encode())

    def sign(self, data: bytes) -> bytes:
        self._identity.sign(data)
        return super().sign(data)

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        verify(self._identity.peer_id, data, self._signature)
        return super().verify(peer, data, signature)


def play(tape: Tape, scenes: Sequence[range]) -> list[float]:
    """Return the processor seconds that each scene, a part of the tape, takes a peer that lives through all of it.

    Counted is what a peer does with its control messages: to unpack and check those that come, signatures too, to
    decide, and to pack those that go.
    """
    times = [time.thread_time(), *(time.thread_time() for _ in replayed(tape))]
    return [times[scene.stop] - times[scene.start] for scene in scenes]


def replayed(tape: Tape) -> Iterator[list[Effect]]:
    """Yield what a peer wants done about each thing that happened, with its messages packed."""
    keys = PricedKeys(tape.me)
    payloads = [PayloadKind(size, lambda chunk, data, format: 0.0) for size in tape.payloads]  # nobody is accused
    started = tape.settings, payloads, tape.state_digest, tape.started_at, tape.incarnation
    peer = Peer(tape.me, *started, keys)
    packer = Packer(peer)
    for now, what in tape.happened:
        effects = _told(peer, packer, now, what)
        for effect in effects:
            if isinstance(effect, Send):
                with suppress(LogError):  # of a lineage that the peer has left meanwhile
                    packer.pack(effect.message)
        yield effects


def _told(peer: Peer, packer: Packer, now: float, what: Event | Packed) -> list[Effect]:
    if not isinstance(what, Packed):
        return peer.handle(what, now)
    message = packer.unpack(what.sender, what.data)
    return [] if message is None else peer.handle(Received(what.sender, message), now)
