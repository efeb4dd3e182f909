"""The procedure by which a voter that cannot take part in rounds gives up its vote (R12).

Liars can cause everything that others see of a voter, so a voter that is heard keeps its vote. But a peer that knows by
itself that its workers hang, or that it reaches no other peer, becomes another incarnation. The next entry then takes
its vote, and it has one again after the next entry in which it is a member.

That is no farewell: until then the peer counts among the voters. A cause that hits many peers at once, such as a relay
that is down, must not leave the run to the few that it spares. So they give up in turn, and only while the others are a
quorum.
"""

from __future__ import annotations

from collections.abc import Collection

from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.effects import Note
from peers.protocol.hindrance import Hindrances
from peers.protocol.replica import Replica
from peers.protocol.round import EntryRound, RoundState
from peers.protocol.trainer import Trainer

TURNS = 8
"""Number of turns in which voters give up. More would make the last ones wait for long."""
TURN = 2.0
"""Length of a turn in heartbeats, after which others have heard that a peer gave up its vote."""


class Abstention:
    """The part of a peer that gives up the peer's vote when its workers hang, or it has reached no other peer for some
    time (R12)."""

    def __init__(
        self, context: Context, presence: Presence, trainer: Trainer, replica: Replica, hindrances: Hindrances
    ) -> None:
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._hindrances = hindrances
        self._unable_since: float | None = None

    def look(self, rounds: Collection[EntryRound]) -> None:
        """Give up this peer's vote if its workers hang, or it can exchange no data with others (it may still hear their
        heartbeats). Voters give up in turn, and only while the other voters that they hear are a quorum."""
        context, log = self._context, self._replica.log
        if not self._trainer.is_late(log) and any(round.is_taking_part for round in rounds):
            self._trainer.watch.forgive(context.now)
        if not (self._trainer.is_stuck or self._hindrances.is_isolated):
            self._unable_since = None
            return
        if self._unable_since is None:
            self._unable_since = context.now
        is_idle = all(round.state is not RoundState.EXCHANGING and not round.voter.has_voted for round in rounds)
        if not (is_idle and log.counts(context.me, context.incarnation)):
            return
        turn = log.voters.index(context.me) % TURNS * TURN * context.settings.timing.heartbeat
        if context.now - self._unable_since >= turn and self._others_are_enough(log):
            context.votes.begin_anew()
            text = "this peer cannot take part in rounds and gave up its vote; the next outer step with it restores it"
            context.emit(Note("warning", text))

    def _others_are_enough(self, log: LogState) -> bool:
        expiry = self._context.settings.timing.heartbeat_expiry
        others = self._presence.voters_here(log, self._context.incarnation, expiry) - {self._context.me}
        return log.is_quorum([(peer, log.voter_incarnations[peer]) for peer in others])
