"""Presence of the other peers, as one peer hears them itself: which ones are live and reachable, and their quorum."""

from __future__ import annotations

from collections.abc import Collection

from peers.log.header import MEMBER_LIMIT
from peers.log.state import LogState
from peers.presence.branches import Branches
from peers.presence.membership import IsFarewell, Membership, Roll
from peers.presence.reachability import Reachability

LINKS_PATIENCE = 20.0
"""Seconds after its start in which a peer seeks links to all others before it takes part; a relay's takes ten."""


class Presence:
    """Life and reach of the other peers. It is kept when the log moves on.

    `now` is the time of the event that is being handled.
    """

    def __init__(self, me: str, expiry: float, pause: float, now: float, is_farewell: IsFarewell) -> None:
        """Args:
        expiry: seconds of silence after which a peer is not live.
        pause: seconds without requests to a peer for something that it did not give.
        is_farewell: checks whether a signature of a departure is the peer's own.
        """
        self.now = self._started_at = now
        self.membership = Membership(me, expiry, is_farewell)
        self.reachability = Reachability(expiry)
        self.branches = Branches(self, me, expiry, pause)
        self.unheard: frozenset[str] = frozenset()
        """Peers that are not heard over a link, though they have fresh records in the DHT."""
        self.rate = 0
        """Measured bytes a second that our link carries each way; 0: not measured yet."""
        self._me = me

    # Life -----------------------------------------------------------------------------------------------------
    def live(self) -> Roll:
        """Return the last heartbeats of the other peers that are alive and not leaving, by peer."""
        return self.membership.live(self.now)

    def is_live(self, peer: str) -> bool:
        """Return whether a peer is alive and not leaving."""
        return self.membership.is_live(peer, self.now)

    def speeds(self, log: LogState) -> list[float]:
        """Return the tokens a second that working peers with a lease report, the highest first. Others' reports do not
        count, since any peer may report anything; before the first entry all working peers count."""
        return [speed for speed in self._reported_speeds(log) if speed]

    def usual(self, log: LogState) -> float:
        """Return the tokens a second that most of them reach, as they report. Less than half cannot raise it."""
        speeds = self._reported_speeds(log) or [0.0]
        return speeds[len(speeds) // 2]

    def _reported_speeds(self, log: LogState) -> list[float]:
        at_work = self.live().at_work
        return sorted((beat.speed for beat in at_work if log.last is None or beat.peer in log.leases), reverse=True)

    # Reach ----------------------------------------------------------------------------------------------------
    @property
    def unreached(self) -> frozenset[str]:
        """The peers with which no data can be exchanged, according to our links."""
        return self.reachability.unreached

    @property
    def seeks_links(self) -> bool:
        """True while a new peer still looks for links to live peers, and should not be counted on."""
        is_new = self.now - self._started_at < LINKS_PATIENCE
        return is_new and not self.reachability.sought.isdisjoint(self.live())

    @property
    def can_lead(self) -> bool:
        """True if this peer reaches at least half of the other live peers that train (R1)."""
        others = {beat.peer for beat in self.live().trainers}
        return 2 * len(others & self.unreached) <= len(others)

    def named(self, peers: frozenset[str]) -> tuple[str, ...]:
        """Return those of these peers that are live, at most as many as a message may name."""
        return tuple(sorted(peers & self.live().keys()))[:MEMBER_LIMIT] if peers else ()

    # Quorum ---------------------------------------------------------------------------------------------------
    def is_quorum(self, log: LogState, peers: Collection[str]) -> bool:
        """Return whether these peers are a quorum for the log's next entry, not counting signed farewells (R12)."""
        departed = self.membership.departed(log)
        voters = [peer for peer, _ in log.electors if peer not in departed]
        return log.quorum.is_enough(sum(peer in peers for peer in voters), len(voters)) or not voters

    def are_all_gone(self, log: LogState) -> bool:
        """Return whether all voters of the log have left with a farewell, or it has none. Peers that go on then are no
        minority."""
        return self.membership.departed(log).issuperset(log.voters)

    def are_most_here(self, log: LogState, incarnation: int, along: Collection[str] = ()) -> bool:
        """Return whether a quorum is live that is not further on than the log. Peers further on count if they are not
        among those `along` the same branch. `incarnation` is ours."""
        live, index = self.live(), log.position.index
        others = [beat for peer, beat in live.items() if beat.index <= index or peer not in along]
        incarnations = {beat.peer: beat.incarnation for beat in others}
        incarnations[self._me] = incarnation
        here = {peer for peer, incarnation in incarnations.items() if log.counts(peer, incarnation)}
        return bool(here) and self.is_quorum(log, here)

    def voters_here(self, log: LogState, incarnation: int, patience: float, even_leavers: bool = False) -> set[str]:
        """Return the voters that were heard by a heartbeat in the last `patience` seconds, in the incarnation that
        votes. This peer is one of them if it votes in its `incarnation`.

        Their work, their reach and reports of other peers do not matter, since liars can influence those.
        """
        heard = self.membership.spoke_within(patience, self.now, even_leavers)
        incarnations = [(self._me, incarnation), *((beat.peer, beat.incarnation) for beat in heard)]
        return {peer for peer, incarnation in incarnations if log.counts(peer, incarnation)}
