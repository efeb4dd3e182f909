"""Whether the members of a round hold the same payload, before any of them signs what follows from it.

Whoever averages a chunk may give each member another average. Had they signed at once, each would hold an entry of its
own that may have been committed, for all that the others know. So they tell each other first, and nobody signs what
another one does not have. The leader hears it, too, and finds out who has given what.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from peers.presence.presence import Presence
from peers.protocol.acceptor import Acceptor
from peers.protocol.certifier import OPEN_LIMIT
from peers.protocol.desk import Desk, Repetition
from peers.protocol.effects import Send
from peers.protocol.messages import Prepared, Told, Waiting
from peers.protocol.rounds import Attempt

SILENCE = 3
"""How often somebody may have said nothing until it is not waited for; once where it was so in a round before."""


class Agreement:
    """Of one slot."""

    def __init__(self, desk: Desk, presence: Presence, acceptor: Acceptor) -> None:
        self._desk = desk
        self._presence = presence
        self._acceptor = acceptor
        self._mine: Prepared | None = None
        self._since = desk.now
        self._word = Repetition(desk)

    def is_reached(self, mine: Prepared, members: Collection[str], moved: int) -> bool:
        """Return whether all members say the same, as far as they can be heard; else tell them what we say. `moved` are
        the chunks that have come and gone. Many members do not ask each other: each is sure to be outvoted alone."""
        if len(members) > OPEN_LIMIT:
            return True
        if mine != self._mine:
            self._mine, self._since = mine, self._desk.now
            self._word.at_once()
        others, leader = set(members) - {self._desk.me}, mine.attempt.leader
        lacking = self._lacking(mine, others)
        if lacking and self._word.is_due:
            self._word.said()
            reached = others - self._presence.unreached - {leader}
            self._desk.emit(*(Send(peer, mine) for peer in (leader, *sorted(reached))))
            waiting = Waiting(attempt=mine.attempt, missing=tuple(sorted(lacking)), moved=moved, unreached=())
            self._desk.emit(Send(leader, waiting))
        return not lacking

    def hear(self, sender: str, said: Told, attempt: Attempt | None) -> None:
        """A member's payload is whole. One that says so and does not know yet what we have signed is told."""
        self._acceptor.heard_told(sender, said)
        signed = self._acceptor.signed_in(attempt)
        if isinstance(said, Prepared) and signed is not None and said.attempt == attempt:
            self._desk.emit(Send(sender, signed))

    def _lacking(self, mine: Prepared, others: Set[str]) -> set[str]:
        """Return who says something else, or nothing yet. Who can't be heard is not waited for, nor for long who says
        nothing, perhaps only to us. It will hear what we sign, and sign nothing else."""
        told = self._acceptor.told(mine.attempt, others)
        differing = {peer for peer, outcome in told.items() if outcome != mine.outcome}
        silent = {peer for peer in others - told.keys() if self._presence.can_hear(peer)}
        self._presence.quiet -= told.keys()
        turns = (self._desk.now - self._since) / self._desk.settings.timing.resend
        if turns > SILENCE:
            self._presence.quiet |= silent
        return differing | {peer for peer in silent if turns <= (1 if peer in self._presence.quiet else SILENCE)}
