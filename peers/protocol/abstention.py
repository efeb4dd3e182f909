"""Giving up one's say for as long as one can take part in nothing.

A voter keeps its say for as long as it is heard of, whatever happens to it: liars can bring about all else. So one that
knows by itself that it can do nothing, since its workers hang or it reaches nobody, says farewell as the start that has
the say: else the others would wait for its signature. It is another incarnation from then on, and has a say again after
the next entry that it is in. What it trains is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Note, Send
from peers.protocol.messages import Leaving
from peers.protocol.replica import Replica
from peers.protocol.slot import Slot, SlotState
from peers.protocol.trainer import Trainer
from peers.protocol.troubles import Troubles


class Abstention:
    """Of one peer, for as long as it runs."""

    def __init__(self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica, troubles: Troubles) -> None:
        self._desk = desk
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._troubles = troubles
        self._farewell: Leaving | None = None
        self._said_at = desk.now

    def look(self, slots: Iterable[Slot]) -> None:
        """Give our say up if we can take part in nothing, and tell those who count us until an entry does no more."""
        log, memory, me = self._replica.log, self._desk.memory, self._desk.me
        is_idle = all(slot.state is not SlotState.AVERAGING and slot.acceptor.held is None for slot in slots)
        is_unable = self._trainer.is_stuck or self._troubles.reaches_nobody
        if is_unable and is_idle and log.counts(me, memory.incarnation):
            self._farewell = memory.part(log.position)
            self._tell(self._farewell)
            self._desk.emit(Note("warning", "this peer can take part in nothing, and has no say until it can again"))
        elif self._farewell is not None and self._is_due:
            if log.starts.get(me) == self._farewell.incarnation and not self._replica.is_behind:
                self._tell(self._farewell)
            else:
                self._farewell = None

    @property
    def _is_due(self) -> bool:
        return self._desk.now - self._said_at > self._desk.settings.timing.heartbeat_expiry

    def _tell(self, farewell: Leaving) -> None:
        self._said_at = self._desk.now
        said = farewell.model_copy(update={"position": self._replica.log.position})
        voters = self._presence.voters_here(self._replica.log, self._desk.schedule.death)
        self._desk.emit(*(Send(peer, said) for peer in sorted(voters)))
