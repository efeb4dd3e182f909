"""The peers that the leader of one position waits for before it begins a round, and for how long (R7)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.protocol.pace import ReadyTimes
from peers.values.leases import sample_count

LATE = 2
"""Entries without a peer after which it is not waited for."""


SURELY = 2.0
"""Times what is left of the grace, that a peer must need to be done without at once: speeds are off by some percent."""


def late(log: LogState) -> frozenset[str]:
    """Return the lease holders and bystanders that were in neither of the last two entries (R7)."""
    leases = log.last.leases if log.last else ()
    recent = {lease.peer for lease in leases if lease.since + LATE >= log.position.index}
    return frozenset({*log.leases, *log.voters} - recent)


class Awaited:
    """`peers` are those whom the leader expected when time passed last, ready or not.

    A synchronous run waits for all of them until the grace is over, an asynchronous one until there are enough
    contributions, and its slack is over. Both do without those that say themselves that they need longer.
    """

    def __init__(self, me: str, log: LogState, settings: RunSettings) -> None:
        self.peers: set[str] = set()
        self.times = ReadyTimes()
        self.grace = self.slack = settings.timing.grace
        self.own = 0, 0.0
        """At which inner step we are ourselves, and how fast; no speed: unknown."""
        self._me = me
        self._log = log
        self._settings = settings
        self._away: dict[str, float] = {}  # seconds until each can be ready, where its heartbeat tells
        self._passed_over = set[str]()  # whom we do not wait for, though they are at work

    def look(self, live: Mapping[str, Heartbeat], granted: Mapping[str, int], unreached: Collection[str]) -> None:
        """See who is at work on the entry, or is `granted` so many samples for it. Lateness follows from the log: a
        lease tells in which entry its peer was last. An asynchronous run waits for late ones, too, since its slack is
        short."""
        leases = self._log.last.leases if self._log.last else ()
        besides = late(self._log) if self._settings.contributions is None else ()
        given = {lease.peer: sample_count(lease.samples) for lease in leases if lease.peer not in besides}
        at_work = {peer for peer in given if peer in live and self._is_at_work(peer, live[peer])}
        expected = at_work | {peer for peer in granted if peer in live}
        given |= granted
        self.peers = expected - set(unreached) | {self._me} & given.keys()
        told = {peer: self._told(live[peer]) for peer in self.peers - {self._me}}
        if self._settings.contributions is not None and self._me in self.peers:
            told[self._me] = self.own
        self._away = {peer: self._seconds_away(given[peer], *said) for peer, said in told.items()}

    def _is_at_work(self, peer: str, beat: Heartbeat) -> bool:
        """Return whether the peer trains or is ready, as it must be if it took part in an entry newer than its
        heartbeat."""
        is_older = beat.index < self._log.position.index
        return beat.state in PARTICIPATING or (is_older and peer in self._log.roster)

    def _told(self, beat: Heartbeat) -> tuple[int, float]:
        """Return at which inner step a peer is, and how fast; no speed where its heartbeat does not tell."""
        is_told = beat.state is PeerState.TRAINING and beat.index == self._log.position.index
        return beat.inner_step, (beat.tokens_per_second or beat.speed) if is_told else 0.0

    def _seconds_away(self, count: int, inner_step: int, speed: float) -> float:
        """Return in how many seconds at least a peer will have trained what the entry takes of so many samples; 0:
        unknown. What it has told is of before its next inner step, and as old as two heartbeats let it become."""
        if not speed:
            return 0.0
        settings = self._settings
        samples = count * (self._log.fragment + 1) // self._log.fragments
        samples -= (inner_step + 1 + settings.overlap) * settings.samples_per_lease // settings.inner_steps
        return samples * settings.tokens_per_sample / speed - 2 * settings.timing.heartbeat

    def is_time(self, now: float, ready: Set[str], contributing: Set[str], voters: Set[str]) -> bool:
        """Return whether those who are ready begin, given those of them who contribute. Most of these voters must be,
        of whom those count that are expected."""
        if self.peers <= ready:
            return True
        begun = self.times.of_most(self.peers & voters, ready)
        left = self.grace - (now - begun)
        return self._is_over(ready, SURELY * left, begun <= now) or self._are_enough(now, begun, ready, contributing)

    def _is_over(self, ready: Set[str], left: float, has_begun: bool) -> bool:
        """Return whether nobody else can be ready in the seconds that are left."""
        self._passed_over = {peer for peer in self.peers - ready if self._away.get(peer, 0.0) > left}
        return has_begun and (left <= 0 or self.peers <= ready | self._passed_over)

    def _are_enough(self, now: float, begun: float, ready: Set[str], contributing: Set[str]) -> bool:
        """Return whether an asynchronous run has enough contributions, and nobody else comes while there is slack. Most
        voters are ready since it has `begun`."""
        share = self._settings.contributions
        if share is None:
            return False
        since = max(begun, self.times.of_share(share, self.peers - (ready - contributing), contributing))
        return self._is_over(ready, self.slack - (now - since), since <= now)

    def are_all_in(self, ready: Set[str]) -> bool:
        """Return whether all of them are ready by now, but for those whom we do not wait for."""
        return self.peers <= ready | self._passed_over
