"""Giving up one's say for as long as one can take part in nothing.

A voter keeps its say for as long as it is heard, whatever happens to it: liars can bring about all else. So a peer that
knows by itself that it can do nothing, since its workers hang or it reaches no other peer, is another incarnation from
then on: the next entry takes its say, and it has one again after the next that it is in. What it trains is not lost.

That is no farewell: in the next entry it still counts among those of whom a quorum must vote. Else something that
befalls many at once, as a relay that is down, would leave the swarm to those that it does not befall. For the same
reason they do so in turn, and only while a quorum of the voters is left.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.effects import Note
from peers.protocol.hindrance import Hindrances
from peers.protocol.replica import Replica
from peers.protocol.round import EntryRound, RoundState
from peers.protocol.trainer import Trainer

TURNS = 8
TURN = 2.0
"""Heartbeats until others have heard that a peer has given its say up."""


class Abstention:
    """One peer's ability to take part."""

    def __init__(
        self, context: Context, presence: Presence, trainer: Trainer, replica: Replica, hindrances: Hindrances
    ) -> None:
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._hindrances = hindrances
        self._unable_since: float | None = None

    def look(self, rounds: Iterable[EntryRound]) -> None:
        """Give our say up if we can take part in nothing."""
        rounds, is_late = list(rounds), self._trainer.is_late(self._replica.log)
        if not is_late and any(round.is_taking_part for round in rounds):
            self._trainer.watch.forgive(self._context.now)
        if not (self._trainer.is_stuck or self._hindrances.reaches_nobody):
            self._unable_since = None
            return
        if self._unable_since is None:
            self._unable_since = self._context.now
        log, context = self._replica.log, self._context
        is_idle = all(round.state is not RoundState.EXCHANGING and not round.voter.has_voted for round in rounds)
        if is_idle and log.counts(context.me, context.incarnation) and self._is_our_turn and self._others_are_enough:
            context.begin_anew()
            context.emit(Note("warning", "this peer can take part in nothing, and has no say until it can again"))

    @property
    def _is_our_turn(self) -> bool:
        assert self._unable_since is not None
        waits = (
            self._replica.log.voters.index(self._context.me) % TURNS * TURN * self._context.settings.timing.heartbeat
        )
        return self._context.now - self._unable_since >= waits

    @property
    def _others_are_enough(self) -> bool:
        """Whether the voters that are left are a quorum."""
        log, expiry = self._replica.log, self._context.settings.timing.heartbeat_expiry
        here = self._presence.voters_here(log, self._context.incarnation, expiry)
        return log.is_quorum([(peer, log.starts[peer]) for peer in here - {self._context.me}])
