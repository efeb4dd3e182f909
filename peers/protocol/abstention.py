"""Giving up one's say for as long as one can take part in nothing.

A voter keeps its say for as long as it is heard of, whatever happens to it: liars can bring about all else. So one that
knows by itself that it can do nothing, since its workers hang or it reaches nobody, is another incarnation from then
on: the next entry takes its say, and it has one again after the next that it is in. What it trains is not lost.

That is no farewell: in the next entry it still counts among those of whom more than half must sign. Else something that
befalls many at once, as a relay that is down, would leave the swarm to whoever it does not befall. For the same reason
they do so in turn, and only while more than half of the voters are left.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Note
from peers.protocol.replica import Replica
from peers.protocol.slot import Slot, SlotState
from peers.protocol.trainer import Trainer
from peers.protocol.troubles import Troubles

TURNS = 8
TURN = 2.0
"""Heartbeats until others have heard that somebody has given its say up."""


class Abstention:
    """Of one peer, for as long as it runs."""

    def __init__(self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica, troubles: Troubles) -> None:
        self._desk = desk
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._troubles = troubles
        self._unable_since: float | None = None

    def look(self, slots: Iterable[Slot]) -> None:
        """Give our say up if we can take part in nothing."""
        slots, is_late = list(slots), self._trainer.is_late(self._replica.log)
        if not is_late and any(slot.state in (SlotState.READY, SlotState.AVERAGING) for slot in slots):
            self._trainer.waits()
        if not (self._trainer.is_stuck or self._troubles.reaches_nobody):
            self._unable_since = None
            return
        if self._unable_since is None:
            self._unable_since = self._desk.now
        log, memory, me = self._replica.log, self._desk.memory, self._desk.me
        is_idle = all(slot.state is not SlotState.AVERAGING and slot.acceptor.held is None for slot in slots)
        if is_idle and log.counts(me, memory.incarnation) and self._is_our_turn and self._others_are_enough:
            memory.begin_anew()
            self._desk.emit(Note("warning", "this peer can take part in nothing, and has no say until it can again"))

    @property
    def _is_our_turn(self) -> bool:
        assert self._unable_since is not None
        waits = self._replica.log.voters.index(self._desk.me) % TURNS * TURN * self._desk.settings.timing.heartbeat
        return self._desk.now - self._unable_since >= waits

    @property
    def _others_are_enough(self) -> bool:
        """Whether the voters that are left are more than half."""
        log, expiry = self._replica.log, self._desk.settings.timing.heartbeat_expiry
        here = self._presence.voters_here(log, self._desk.memory.incarnation, expiry)
        return 2 * len(here - {self._desk.me}) > len(log.voters)
