"""The peers that the leader waits for before it begins a round at one position, and the length of that wait (R7,
R16)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set

from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.values.leases import sample_count

LATE = 2
"""A peer is late if it was in none of this many last entries."""
SURELY = 2.0
"""A peer is not waited for if it needs this multiple of the grace that is left, since reported speeds are off by some
percent."""


def late(log: LogState, settings: RunSettings) -> frozenset[str]:
    """Return the late peers: lease holders and voters that were in neither of the last two entries (R7). An
    asynchronous run has no late peers, because its leader waits only a short time for any peer (R16)."""
    if settings.contributions is not None:
        return frozenset()
    leases = log.last.leases if log.last else ()
    recent = {lease.peer for lease in leases if lease.since + LATE >= log.position.index}
    return frozenset({*log.leases, *log.voters} - recent)


class ReadyTimes:
    """The time at which each peer was first ready at one position, in seconds of the driver's clock."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def note(self, peer: str, now: float) -> None:
        """Record `now` as the time at which the peer was first ready, unless a time is recorded already."""
        self._times.setdefault(peer, now)

    def of_all(self, peers: Set[str]) -> float:
        """Return the time at which the last of these peers became ready; minus infinity if none of them is ready."""
        return max((self._times[peer] for peer in peers & self._times.keys()), default=-math.inf)

    def of_share(self, share: float, able: Set[str], ready: Set[str]) -> float:
        """Return the time at which the number of peers in `ready` reached this `share` (0 to 1) of the number of `able`
        peers; infinity while there are fewer."""
        times = sorted(self._times[peer] for peer in self._times.keys() & ready)
        enough = max(1, math.ceil(share * len(able)))
        return times[enough - 1] if len(times) >= enough else math.inf

    def of_most(self, voters: Set[str], ready: Set[str]) -> float:
        """Return the time at which more than half of the voters had become ready, counting only those in `ready`;
        infinity while there are fewer. If there are no voters, return the time at which the first peer became ready.

        One Ready is too few to start the grace: a peer that was late for the last entry is ready at once, and would use
        up the time of all others.
        """
        if not voters:
            return min(self._times.values(), default=math.inf)
        times = sorted(self._times[peer] for peer in voters & self._times.keys() & ready)
        return times[len(voters) // 2] if 2 * len(times) > len(voters) else math.inf


class Awaited:
    """The peers that a leader waits for before it begins a round. `look` updates `peers`, which includes those that are
    ready already.

    A synchronous run waits for all of them until the grace is over, an asynchronous run until there are enough
    contributions and its slack is over. Neither waits for a peer whose own beats show that it needs longer.
    """

    def __init__(self, me: str, log: LogState, settings: RunSettings) -> None:
        self.peers: set[str] = set()
        self.in_vain: set[str] = set()
        """The peers that the leader waited for last, apart from those whose beats showed that they need longer."""
        self.times = ReadyTimes()
        self.grace = self.slack = settings.timing.grace
        self.own = 0, 0.0
        """This peer's inner step, and its tokens per second (0 if unknown)."""
        self._me = me
        self._log = log
        self._settings = settings
        self._away: dict[str, float] = {}  # minimum seconds until each peer is ready; 0 if its speed is unknown
        self._passed_over = set[str]()  # expected peers that the leader does not wait for, because they need too long

    def look(self, live: Mapping[str, Heartbeat], granted: Mapping[str, int], excluded: Collection[str]) -> None:
        """Update `peers` to the live peers, without the `excluded` ones, that the leader expects in the entry: joiners,
        and peers at work with a lease that are not late. `granted` has each joiner's number of granted samples."""
        leases = self._log.last.leases if self._log.last else ()
        besides = late(self._log, self._settings)
        given = {lease.peer: sample_count(lease.samples) for lease in leases if lease.peer not in besides}
        at_work = {peer for peer in given if peer in live and self._is_at_work(live[peer])}
        expected = at_work | {peer for peer in granted if peer in live}
        given |= granted
        self.peers = expected - set(excluded) | {self._me} & given.keys()
        reports = {peer: self._reported(live[peer]) for peer in self.peers - {self._me}}
        if self._settings.contributions is not None and self._me in self.peers:
            reports[self._me] = self.own
        self._away = {peer: self._seconds_away(given[peer], *report) for peer, report in reports.items()}

    def _is_at_work(self, beat: Heartbeat) -> bool:
        """Return True if the heartbeat shows a peer at work, or is older than the last entry and the peer
        is a member of that entry."""
        is_older = beat.index < self._log.position.index
        return beat.state in PARTICIPATING or (is_older and beat.peer in self._log.roster)

    def _reported(self, beat: Heartbeat) -> tuple[int, float]:
        """Return the inner step and the tokens per second that a heartbeat reports; 0 tokens per second if it does not
        show a training for this position."""
        is_current = beat.state is PeerState.TRAINING and beat.index == self._log.position.index
        return beat.inner_step, (beat.tokens_per_second or beat.speed) if is_current else 0.0

    def _seconds_away(self, count: int, inner_step: int, speed: float) -> float:
        """Return the minimum seconds until a peer has trained its `count` samples; 0 if `speed`, in tokens a second, is
        0. The estimate assumes that an inner step is almost finished, and the heartbeat two intervals old."""
        if not speed:
            return 0.0
        settings = self._settings
        samples = count * (self._log.fragment + 1) // self._log.fragments
        samples -= (inner_step + 1 + settings.overlap) * settings.samples_per_lease // settings.inner_steps
        return samples * settings.tokens_per_sample / speed - 2 * settings.timing.heartbeat

    def is_time(self, now: float, ready: Set[str], contributing: Set[str], voters: Set[str]) -> bool:
        """Return True if the leader should begin a round: all expected peers are in `ready`, or the leader has waited
        long enough after most expected voters were ready. `contributing` are the ready peers whose work counts."""
        if self.peers <= ready:
            return True
        begun = self.times.of_most(self.peers & voters, ready)
        left = self.grace - (now - begun)
        return self._is_over(ready, SURELY * left, begun <= now) or self._are_enough(now, begun, ready, contributing)

    def _is_over(self, ready: Set[str], seconds_left: float, has_wait_begun: bool) -> bool:
        """Pass over the peers that need more than the `seconds_left` of the wait. Return True if the wait has begun,
        and either no seconds are left or all peers that are not passed over are in `ready`."""
        self._passed_over = {peer for peer in self.peers - ready if self._away.get(peer, 0.0) > seconds_left}
        if seconds_left > 0:
            self.in_vain = self.peers - ready - self._passed_over
        return has_wait_begun and (seconds_left <= 0 or self.are_all_in(ready))

    def _are_enough(self, now: float, begun: float, ready: Set[str], contributing: Set[str]) -> bool:
        """Return True if an asynchronous run has enough contributions, and either has since waited `self.slack` seconds
        (from `begun` at the earliest) for further peers, or no further peer can become ready in that time."""
        share = self._settings.contributions
        if share is None:
            return False
        since = max(begun, self.times.of_share(share, self.peers - (ready - contributing), contributing))
        return self._is_over(ready, self.slack - (now - since), since <= now)

    @property
    def fewest(self) -> int:
        """The number of peers that the leader waits for, including those that are ready already."""
        return len(self.peers) - len(self._passed_over)

    def are_all_in(self, ready: Set[str]) -> bool:
        """Return True if all peers that the leader still waits for are in `ready`."""
        return self.peers <= ready | self._passed_over
