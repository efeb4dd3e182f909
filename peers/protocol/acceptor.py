"""What one peer has promised and holds at one position: as long as all keep to it, no two entries are committed there.

A peer is pledged to one leader at a time, and takes part in its attempts in the order of their numbers. Who holds an
entry says so to every leader, and takes part only in attempts that hand on that entry, or one held in a later attempt.
"""

from __future__ import annotations

from peers.log.header import Header
from peers.presence.election import ATTEMPT_LEAP
from peers.protocol.messages import Attempt, Complete, Held


class Acceptor:
    """The memory of one peer for one position. What it forgets (a restart, a fetched state) makes it no incumbent."""

    def __init__(self, me: str) -> None:
        self.pledged_to: str | None = None
        self.last_attempt = 0
        self.held: Held | None = None
        self._me = me
        self._completes: dict[str, Complete] = {}

    def pledge(self, leader: str | None) -> bool:
        """Be led by this peer from now on. Returns whether it is another one than before."""
        if leader == self.pledged_to:
            return False
        self.last_attempt += self.pledged_to is not None  # the one that the other leader may still begin
        self.pledged_to = leader
        return True

    def may_join(self, sender: str, attempt: Attempt) -> bool:
        """Whether the attempt is one that we promised to be in, and later than all that we have been in."""
        return sender == self.pledged_to and sender == attempt.leader and self.is_later(attempt)

    def is_later(self, attempt: Attempt) -> bool:
        return 0 < attempt.number - self.last_attempt <= ATTEMPT_LEAP

    def hold(self, attempt: Attempt, header: Header, missed: tuple[tuple[str, int], ...]) -> tuple[Complete, bool]:
        """From now on we take part only in attempts that respect this entry, until it is known what was committed.

        Returns what there is to say of it, and whether it is said for the first time in this attempt.
        """
        is_new = self.held is None or self.held.attempt != attempt
        self.held = Held(attempt=attempt, header=header)
        complete = Complete(attempt=attempt, payload=header.payload, missed=missed)
        self._completes[self._me] = complete
        return complete, is_new

    def heard(self, sender: str, complete: Complete) -> bool:
        """A member holds the whole payload. Returns whether that is new."""
        known = self._completes.get(sender)
        if known is not None and known.attempt.order >= complete.attempt.order:
            return False
        self._completes[sender] = complete
        return True

    def concluded(self, attempt: Attempt | None, members: tuple[str, ...]) -> Header | None:
        """The entry, if all members of our open attempt hold it: more than half of the last roster, as in its leader's
        commit. No later attempt can then lead to another one, whether its leader learns of this or not."""
        mine = self._completes.get(self._me)
        if self.held is None or mine is None or mine.attempt != attempt or not members:
            return None
        return self.held.header if all(self._completes.get(peer) == mine for peer in members) else None
