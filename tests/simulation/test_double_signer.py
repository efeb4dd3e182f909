"""One voter in both majorities: two processes with its key and incarnation each lead one half of the others, which do
not hear each other. Both halves certify an entry at one place; no rule for votes prevents that."""

from __future__ import annotations

from dataclasses import replace

from peers.log.settings import Timing
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import SendChunk
from peers.protocol.events import Event, HeartbeatsSeen
from peers.protocol.messages import Inquire, Message
from peers.protocol.rounds import Attempt
from peers.transfer.averages import Admitted, ChunkHeader
from tests.simulation.test_schedules import SETTINGS
from tests.simulator.schedules import EVENLY
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import TICK, Swarm

LIAR = "peer0"
NEAR, FAR = ("peer1", "peer2"), ("peer3", "peer4")


class Everywhere:
    """A side of a partition that reaches both."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Twin(SimulatedPeer):
    """The second process. It only listens until the halves are parted."""

    is_honest = False


class DoubleSigner(SimulatedPeer):
    """The first process, which others take for both."""

    is_honest = False
    twin: Twin | None = None
    is_parted = False

    def accept(self, sender: str, round_name: Attempt, header: ChunkHeader, data: bytes) -> Admitted:
        if not self.is_parted or self.twin is None or sender not in FAR:
            return super().accept(sender, round_name, header, data)
        event, is_taken = self.twin.accept(sender, round_name, header, data)
        if event is not None:
            self.world.handle(self.twin, event)
        return Admitted(None, is_taken)

    def heartbeat_for(self, peer: str) -> Heartbeat | None:
        if self.is_parted and self.twin is not None and peer in FAR:
            return self.twin.heartbeat
        return super().heartbeat_for(peer)


class Parted(Swarm):
    """A swarm whose liar speaks to each half through another process."""

    def peer(self) -> DoubleSigner:
        liar = self.peers[LIAR]
        assert isinstance(liar, DoubleSigner)
        return liar

    def _is_deaf_to(self, one: SimulatedPeer, other: str) -> bool:
        """Whether nothing passes between one of the processes and another peer."""
        if isinstance(one, Twin):
            return not self.peer().is_parted or other not in FAR
        return isinstance(one, DoubleSigner) and one.is_parted and other in FAR

    def double(self) -> None:
        """Start the second process."""
        liar = self.peer()
        twin = liar.twin = Twin(LIAR, self, self.block_count, self.kept_bytes, liar.clock)
        twin.peer._desk.memory.incarnation = liar.peer.incarnation
        self._repeat(twin, TICK, lambda: self._tick(twin))
        self._repeat(twin, self.settings.timing.heartbeat, lambda: self._beat(twin))

    def part(self) -> None:
        liar = self.peer()
        assert liar.twin is not None
        liar.is_parted, liar.twin.sequence = True, liar.sequence
        self.side.update(dict.fromkeys(FAR, 1))
        self.side[LIAR] = Everywhere()  # type: ignore[assignment]

    def meet(self) -> None:
        """The halves hear each other again, and the second process is gone."""
        liar = self.peer()
        assert liar.twin is not None
        liar.sequence = max(liar.sequence, liar.twin.sequence)
        liar.twin.alive, liar.is_parted = False, False
        self.heal()

    def handle(self, peer: SimulatedPeer, event: Event) -> None:
        if isinstance(event, HeartbeatsSeen) and isinstance(peer, Twin | DoubleSigner) and self.peer().is_parted:
            heard = tuple(beat for beat in event.heartbeats if not self._is_deaf_to(peer, beat.peer))
            event = HeartbeatsSeen(heard)
        super().handle(peer, event)

    def send(self, sender: SimulatedPeer, to: str, message: Message) -> None:
        if not self._is_deaf_to(sender, to) or (isinstance(message, Inquire) and not self.peer().is_parted):
            super().send(sender, to, message)

    def carry(self, sender: SimulatedPeer, to: SimulatedPeer, packed: bytes) -> None:
        twin = to.twin if isinstance(to, DoubleSigner) else None
        if twin is not None and twin.alive and (not self.peer().is_parted or sender.name in FAR):
            super().carry(sender, twin, packed)
        if twin is None or not self._is_deaf_to(to, sender.name):
            super().carry(sender, to, packed)

    def send_chunk(self, sender: SimulatedPeer, send: SendChunk, data: bytes) -> None:
        if not self._is_deaf_to(sender, send.to):
            super().send_chunk(sender, send, data)


def test_after_a_fork_that_is_certified_twice_all_end_on_one_branch_without_its_author() -> None:
    swarm = Parted(0, replace(SETTINGS, timing=Timing(), minimum_peers=5), one_child=False, unevenness=EVENLY)
    make = swarm.peer_of
    swarm.peer_of = lambda name, world, clock: (
        DoubleSigner(name, world, world.block_count, world.kept_bytes, clock)
        if name == LIAR
        else make(name, world, clock)
    )
    swarm.history.certified = lambda header, certificate, before: None  # type: ignore[method-assign]
    swarm.history.liars = frozenset({LIAR})
    for name in (LIAR, *NEAR, *FAR):
        swarm.start(name)
    assert swarm.run(100.0, until=lambda: swarm.longest >= 1)
    swarm.double()
    twin = swarm.peer().twin
    assert twin is not None

    def are_together() -> bool:
        states = {one.peer.state.value for one in (*swarm.honest, twin)}
        return len({one.peer.log.position for one in (*swarm.honest, twin)}) == 1 and states == {"training"}

    assert swarm.run(300.0, until=are_together)
    split = swarm.longest
    swarm.part()
    near, far = swarm.peers[NEAR[0]].peer, swarm.peers[FAR[0]].peer
    assert swarm.run(600.0, until=lambda: min(near.log.position.index, far.log.position.index) > split + 1)
    assert near.log.position.head != far.log.position.head
    assert not near.lineage.doubt
    assert not far.lineage.doubt
    swarm.meet()
    assert swarm.run(1000.0, until=lambda: all(LIAR in one.peer.log.excluded for one in swarm.honest))
    assert swarm.run(60.0, until=lambda: len({one.peer.log.position.head for one in swarm.honest}) == 1)
