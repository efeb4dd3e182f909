"""For how long a member that is ready waits for its leader to begin."""

from __future__ import annotations

from collections import Counter

from peers.log.state import LogState
from peers.presence.election import quorum
from peers.presence.presence import Presence
from peers.protocol.desk import Desk

ATTEMPTS = 5
"""How many attempts a leader may end at one position before its members turn to another."""


class Patience:
    """Of one slot. A leader may wait for those at work, but not for ever; when most are ready, it has to begin.

    Whoever comes back to a leader that it gave up waits twice as long for it. Else peers that give up at different
    times could go round from leader to leader for ever, and never be with one of them all at once.
    """

    def __init__(self, desk: Desk, presence: Presence, log: LogState) -> None:
        self._desk = desk
        self._presence = presence
        self._log = log
        self._since = self._gathered_at = desk.now
        self._given_up: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def begin(self) -> None:
        """Somebody is asked, or another one, to begin."""
        self._since = self._gathered_at = self._desk.now

    def give_up(self, leader: str | None) -> None:
        """Another one is asked from now on; we never give up on ourselves."""
        if leader is not None and leader != self._desk.me:
            self._given_up[leader] += 1
            self._presence.distrust(leader)
        self.begin()

    def attempt_ended(self, leader: str) -> None:
        """The leader has ended an attempt. One that does so again and again may never come to an entry: what it lacks
        itself, or refuses to give, it blames on nobody."""
        self._ended[leader] += 1
        if self._ended[leader] % ATTEMPTS == 0:
            self.give_up(leader)

    def is_over(self, leader: str | None) -> bool:
        """Whether the leader could have begun long ago, or has waited for those at work for longer than it may."""
        now, schedule, times = self._desk.now, self._desk.schedule, 1 << self._given_up[leader or ""]
        if not self._are_most_ready():
            self._gathered_at = now
        since_gathered = now - max(self._gathered_at, self._since)
        overdue = since_gathered > times * schedule.begin(everyone_is_ready=True)
        return overdue or now - self._since > times * schedule.begin(everyone_is_ready=False)

    def _are_most_ready(self) -> bool:
        ready = {self._desk.me, *self._presence.live().ready}
        if not self._log.roster:
            return len(ready) >= self._desk.settings.minimum_peers
        return quorum(self._log.voters, self._presence.membership.departed(self._log), ready)
