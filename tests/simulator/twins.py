"""Two processes with one key and one incarnation, each of which is honest by itself: together they vote twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peers.messages.messages import Inquire
from peers.presence.heartbeat import Heartbeat
from peers.protocol.effects import Effect, Send, SendChunk
from peers.protocol.events import Event, HeartbeatsSeen
from tests.simulator.simulated_peer import SimulatedPeer

if TYPE_CHECKING:
    from tests.simulator.simulation import Swarm


class Process(SimulatedPeer):
    """One of two processes, which speaks to some of the others only."""

    is_honest = False

    def speaks_to(self, peer: str, effect: Effect) -> bool:
        """Return whether what it sends to a peer goes out."""
        return True

    def carry_out(self, effect: Effect) -> None:
        if not isinstance(effect, Send | SendChunk) or self.speaks_to(effect.to, effect):
            super().carry_out(effect)

    def may_stumble(self, error: Exception) -> bool:
        """It gets the data of rounds that it is not in."""
        self.alive = False
        return True


class FirstProcess(Process):
    """The process that the swarm knows. When it is parted from its twin, the `far` peers hear the twin in its place."""

    far: tuple[str, ...] = ()
    twin: SecondProcess | None = None
    is_parted = False

    def double(self, swarm: Swarm) -> None:
        """Start the second process. It only listens until it is parted from the first one."""
        self.twin = SecondProcess(self, swarm)
        swarm.set_going(self.twin)

    def part(self, far: tuple[str, ...]) -> None:
        """Leave these peers to the second process."""
        assert self.twin is not None
        self.far, self.is_parted = far, True
        self.twin.sequence = self.sequence

    def meet(self) -> None:
        """End the second process."""
        assert self.twin is not None
        self.sequence = max(self.sequence, self.twin.sequence)
        self.twin.alive, self.is_parted = False, False

    def speaks_to(self, peer: str, effect: Effect) -> bool:
        return not (self.is_parted and peer in self.far)

    def processes_for(self, peer: str) -> tuple[SimulatedPeer, ...]:
        if self.twin is None or not self.twin.alive:
            return (self,)
        if not self.is_parted:
            return self, self.twin
        return (self.twin,) if peer in self.far else (self,)

    def heartbeat_for(self, peer: str) -> Heartbeat | None:
        return self.twin.heartbeat if self.is_parted and self.twin and peer in self.far else self.heartbeat

    def take_in(self, event: Event) -> list[Effect]:
        return super().take_in(_heard(event, self.far, is_wanted=False) if self.is_parted else event)


class SecondProcess(Process):
    """The twin of a process that the swarm knows."""

    def __init__(self, first: FirstProcess, swarm: Swarm) -> None:
        given = swarm.block_count, swarm.kept_bytes, first.clock
        super().__init__(first.name, swarm, *given, incarnation=first.peer.incarnation)
        self.first = first

    def speaks_to(self, peer: str, effect: Effect) -> bool:
        if not self.first.is_parted:
            return isinstance(effect, Send) and isinstance(effect.message, Inquire)
        return peer in self.first.far

    def take_in(self, event: Event) -> list[Effect]:
        return super().take_in(_heard(event, self.first.far, is_wanted=True) if self.first.is_parted else event)


def _heard(event: Event, far: tuple[str, ...], is_wanted: bool) -> Event:
    """Return what one process hears of the others: the far ones, or the near ones."""
    if not isinstance(event, HeartbeatsSeen):
        return event
    return replace(event, heartbeats=tuple(beat for beat in event.heartbeats if (beat.peer in far) == is_wanted))
