"""The presence of other peers, as this peer hears them itself: live peers, reachable peers, and quorums of them."""

from __future__ import annotations

from collections.abc import Collection

from peers.log.header import MEMBER_LIMIT
from peers.log.state import LogState
from peers.presence.branches import Branches
from peers.presence.membership import IsFarewell, Membership, Roll
from peers.presence.reachability import Reachability

LINKS_PATIENCE = 20.0
"""Seconds after its start in which a peer seeks links to all others before it takes part; a link by relay takes ten."""


class Presence:
    """The live and the reachable other peers of a run. The object is kept from entry to entry of the log.

    `now` is the time of the event that is being handled.
    """

    def __init__(self, me: str, expiry: float, pause: float, now: float, is_farewell: IsFarewell) -> None:
        """Create the presence of a peer that starts at the time `now`, and has not heard any other peer yet.

        Args:
        expiry: seconds of silence after which a peer is not live.
        pause: seconds for which a peer is not asked again for data that it did not send.
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

    # Live peers -----------------------------------------------------------------------------------------------
    def live(self) -> Roll:
        """Return the last heartbeats of the other peers that are live and not leaving, by peer id."""
        return self.membership.live(self.now)

    def is_live(self, peer: str) -> bool:
        """Return True if a peer is live and not leaving."""
        return self.membership.is_live(peer, self.now)

    def speeds(self, log: LogState) -> list[float]:
        """Return the tokens a second that each working peer with a lease reports, highest first. Reports of peers
        without a lease count only before the first entry, because any peer can report anything."""
        return [speed for speed in self._reported_speeds(log) if speed]

    def usual(self, log: LogState) -> float:
        """Return the median tokens a second in working peers' reports. A minority of liars cannot raise this median."""
        speeds = self._reported_speeds(log) or [0.0]
        return speeds[len(speeds) // 2]

    def _reported_speeds(self, log: LogState) -> list[float]:
        at_work = self.live().at_work
        return sorted((beat.speed for beat in at_work if log.last is None or beat.peer in log.leases), reverse=True)

    # Reach ----------------------------------------------------------------------------------------------------
    @property
    def unreached(self) -> frozenset[str]:
        """The peers with which this peer's links can exchange no data."""
        return self.reachability.unreached

    @property
    def seeks_links(self) -> bool:
        """True while this peer, started less than LINKS_PATIENCE seconds ago, still makes links to live peers."""
        is_new = self.now - self._started_at < LINKS_PATIENCE
        return is_new and not self.reachability.sought.isdisjoint(self.live())

    @property
    def can_lead(self) -> bool:
        """True if this peer reaches at least half of the other live peers that train (R1)."""
        others = {beat.peer for beat in self.live().trainers}
        return 2 * len(others & self.unreached) <= len(others)

    def named(self, peers: frozenset[str]) -> tuple[str, ...]:
        """Return those of the `peers` that are live, sorted, at most MEMBER_LIMIT."""
        return tuple(sorted(peers & self.live().keys()))[:MEMBER_LIMIT] if peers else ()

    # Quorum ---------------------------------------------------------------------------------------------------
    def is_quorum(self, log: LogState, peers: Collection[str]) -> bool:
        """Return True if `peers` are a quorum for the log's next entry; voters with a farewell do not count (R12)."""
        departed = self.membership.departed(log)
        voters = [peer for peer, _ in log.electors if peer not in departed]
        return log.quorum.is_enough(sum(peer in peers for peer in voters), len(voters)) or not voters

    def are_all_gone(self, log: LogState) -> bool:
        """Return True if all voters of the log have left with a farewell, or the log has no voters. Entries that other
        peers then make are not a minority's."""
        return self.membership.departed(log).issuperset(log.voters)

    def are_most_here(self, log: LogState, incarnation: int, minority: Collection[str] = ()) -> bool:
        """Return True if the live peers, and this peer in our `incarnation`, are a quorum of the log's voters. Peers of
        the `minority` count only if their heartbeats name no later index than the log's."""
        live, index = self.live(), log.position.index
        others = [beat for peer, beat in live.items() if beat.index <= index or peer not in minority]
        incarnations = {beat.peer: beat.incarnation for beat in others}
        incarnations[self._me] = incarnation
        here = {peer for peer, incarnation in incarnations.items() if log.counts(peer, incarnation)}
        return bool(here) and self.is_quorum(log, here)

    def voters_here(self, log: LogState, incarnation: int, patience: float, even_leavers: bool = False) -> set[str]:
        """Return the ids of the voters whose heartbeat, in the incarnation that votes, was received in the last
        `patience` seconds. This peer is one of them if it votes in `incarnation`.

        Their work, their reach and reports of other peers do not matter, since liars can influence those.
        """
        heard = self.membership.spoke_within(patience, self.now, even_leavers)
        incarnations = [(self._me, incarnation), *((beat.peer, beat.incarnation) for beat in heard)]
        return {peer for peer, incarnation in incarnations if log.counts(peer, incarnation)}
