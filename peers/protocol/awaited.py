"""Whom the leader of one position waits for before it begins a round, and for how long."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat
from peers.presence.membership import PARTICIPATING
from peers.presence.standing import Standing
from peers.protocol.pace import ReadyTimes
from peers.protocol.schedule import Schedule


class Awaited:
    """Of one position. `peers` are those whom the leader expected when time passed last, ready or not."""

    def __init__(self, me: str, log: LogState, standing: Standing, schedule: Schedule) -> None:
        self.peers: set[str] = set()
        self.times = ReadyTimes()
        self.grace = self.shortest_grace = schedule.timing.grace
        self._me = me
        self._log = log
        self._standing = standing
        self._schedule = schedule

    def look(
        self, now: float, live: Mapping[str, Heartbeat], granted: Collection[str], unreached: Collection[str]
    ) -> None:
        """See who is at work on the entry, or has got samples for it, and is not left out."""
        at_work = {peer for peer in self._log.leases if peer in live and self._is_at_work(peer, live[peer])}
        expected = at_work | {peer for peer in granted if peer in live} | {self._me}
        self.peers = expected - self._standing.barred(now) - set(unreached)

    def _is_at_work(self, peer: str, beat: Heartbeat) -> bool:
        """Whether the peer trains or is ready, as it must be if it took part in an entry newer than its heartbeat."""
        is_older = beat.index < self._log.position.index
        return beat.state in PARTICIPATING or (is_older and peer in self._log.roster)

    def is_time(self, now: float, ready: Set[str]) -> bool:
        """Whether all of them are ready, or the grace is over."""
        voters, late = self.peers.intersection(self._log.voters), self.peers - ready
        patience = min(self.grace, self.shortest_grace) if self._standing.are_often_late(late) else self.grace
        is_over = now - self.times.of_most(voters, ready) >= patience
        return self.peers <= ready or is_over or self.is_hopeless(now)

    def is_hopeless(self, now: float) -> bool:
        """Whether somebody has been ready for so long that those who still seem at work are not waited for."""
        return now - self.times.first >= self._schedule.hopeless

    def are_all_in(self, ready: Set[str]) -> bool:
        """Whether all of them are ready by now."""
        return len(ready) >= len(self.peers) and self.peers <= ready
