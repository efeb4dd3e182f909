"""Whether the members of a round hold the same payload, before any of them signs what follows from it; and whether all
have signed.

Whoever averages a chunk may give each member another average. Had they signed at once, each would hold an entry of its
own that may have been committed, for all that the others know. So they tell each other first, and nobody signs what
another one does not have. The leader hears it, too, and finds out who has given what.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from peers.log.header import Header
from peers.presence.presence import Presence
from peers.protocol.acceptor import Acceptor
from peers.protocol.certifier import OPEN_LIMIT
from peers.protocol.desk import Desk, Repetition
from peers.protocol.effects import Send
from peers.protocol.messages import Complete, Prepared, Result, Told, Waiting
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
        self._told: dict[str, Result] = {}  # what each member said last of its payload, signed or not
        self._completes: dict[str, Complete] = {}
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

    def hear(self, sender: str, said: Told, attempt: Attempt | None, members: Collection[str]) -> bool:
        """A peer's payload is whole. One that says so and does not know yet what we have signed is told.

        Returns whether it says for the first time that it has signed. What others say than the `members` of our round,
        and where these do not ask each other, is not remembered.
        """
        if sender not in members or len(members) > OPEN_LIMIT:
            return False
        if sender not in self._told or self._told[sender][0].name <= said.attempt.name:
            self._told[sender] = said.outcome
        if isinstance(said, Complete):
            return self._hear_signed(sender, said)
        signed = self._acceptor.signed_in(attempt)
        if signed is not None and said.attempt == attempt:
            self._desk.emit(Send(sender, signed))
        return False

    def _hear_signed(self, sender: str, complete: Complete) -> bool:
        known = self._completes.get(sender)
        if known is not None and known.attempt.name >= complete.attempt.name:
            return False
        self._completes[sender] = complete
        return True

    def concluded(self, attempt: Attempt | None, members: Collection[str]) -> Header | None:
        """Return the entry, if all members of our open attempt hold it: more than half of the last roster, as in its
        leader's commit. No later attempt can then lead to another one, whether its leader learns of this or not."""
        mine, held = self._acceptor.signed_in(attempt), self._acceptor.held
        if held is None or mine is None or not members:
            return None
        others = (self._completes.get(peer) for peer in members if peer != self._desk.me)
        return held.header if all(other and other.outcome == mine.outcome for other in others) else None

    def signatures(self, attempt: Attempt, members: Collection[str]) -> dict[str, bytes]:
        """Return what we and these members have signed, we in this attempt."""
        mine = self._acceptor.signed_in(attempt)
        signed = self._completes | ({self._desk.me: mine} if mine else {})
        return {peer: signed[peer].signature for peer in members if peer in signed}

    def _lacking(self, mine: Prepared, others: Set[str]) -> set[str]:
        """Return who says something else, or nothing yet. Who can't be heard is not waited for, nor for long who says
        nothing, perhaps only to us. It will hear what we sign, and sign nothing else."""
        told, turns = self._told_in(mine.attempt, others), self._turns
        silent = {peer for peer in others - told.keys() if self._presence.can_hear(peer)}
        self._note_who_is_quiet(told.keys(), silent if turns > SILENCE else ())
        differing = {peer for peer, outcome in told.items() if outcome != mine.outcome}
        quiet = self._presence.quiet
        return differing | {peer for peer in silent if turns <= (1 if peer in quiet else SILENCE)}

    def _note_who_is_quiet(self, heard: Set[str], quiet: Collection[str]) -> None:
        """Remember for the next rounds who has said nothing when we have waited for that longest."""
        self._presence.quiet -= heard
        self._presence.quiet.update(quiet)

    @property
    def _turns(self) -> float:
        """How often the others could have spoken since we said what we have."""
        return (self._desk.now - self._since) / self._desk.settings.timing.resend

    def _told_in(self, attempt: Attempt, others: Set[str]) -> dict[str, Result]:
        """Return what these have said in an attempt."""
        said = {peer: self._told[peer] for peer in others & self._told.keys()}
        return {peer: told for peer, told in said.items() if told[0] == attempt}
