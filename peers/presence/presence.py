"""The peers that are there, as one peer hears them itself: who lives, whom we reach, and whether they are enough."""

from __future__ import annotations

from collections.abc import Collection

from peers.log.header import MEMBER_LIMIT
from peers.log.state import LogState
from peers.presence.branches import Branches
from peers.presence.membership import IsFarewell, Membership, Roll
from peers.presence.reachability import Reachability

LINKS_PATIENCE = 20.0
"""Seconds after its start for which a peer looks for ways to all others before it takes part; a relay's takes ten."""


class Presence:
    """Life and reach of the other peers. Outlives positions of the log.

    `now` is the time of the event that is being handled.
    """

    def __init__(self, me: str, expiry: float, pause: float, now: float, is_farewell: IsFarewell) -> None:
        """Args:
        expiry: seconds without a word after which a peer is dead to us.
        pause: seconds for which a peer is not asked again for what it did not give.
        is_farewell: checks whether a signature of a departure is the peer's own.
        """
        self.now = self._started_at = now
        self.membership = Membership(me, expiry, is_farewell)
        self.reachability = Reachability(expiry)
        self.branches = Branches(self, me, expiry, pause)
        self.unheard: frozenset[str] = frozenset()
        """Peers that are not heard, though they have fresh records: no link leads there, perhaps."""
        self.rate = 0
        """Bytes a second that our link was seen to carry each way; 0: not measured yet."""
        self._me = me

    # Who lives ------------------------------------------------------------------------------------------------
    def live(self) -> Roll:
        """Return the last heartbeats of the other peers that are alive and not leaving, by peer."""
        return self.membership.live(self.now)

    def is_live(self, peer: str) -> bool:
        """Return whether a peer is alive and not leaving."""
        return self.membership.is_live(peer, self.now)

    def speeds(self, log: LogState) -> list[float]:
        """Return the tokens a second that others say they train, the highest first: those of peers at work that have a
        lease, since anybody may say anything; before the first entry those of all at work."""
        return [speed for speed in self._said_speeds(log) if speed]

    def usual(self, log: LogState) -> float:
        """Return the tokens a second that most of them say they train, or more: less than half can't raise it."""
        speeds = self._said_speeds(log) or [0.0]
        return speeds[len(speeds) // 2]

    def _said_speeds(self, log: LogState) -> list[float]:
        at_work = self.live().at_work
        return sorted((beat.speed for beat in at_work if log.last is None or beat.peer in log.leases), reverse=True)

    # How we reach them ----------------------------------------------------------------------------------------
    @property
    def unreached(self) -> frozenset[str]:
        """Peers with which no data can be exchanged, as our links say."""
        return self.reachability.unreached

    @property
    def seeks_links(self) -> bool:
        """Whether it is too early to be counted on: a newcomer first finds out whom it reaches, and how."""
        is_new = self.now - self._started_at < LINKS_PATIENCE
        return is_new and not self.reachability.sought.isdisjoint(self.live())

    @property
    def can_lead(self) -> bool:
        """Whether we reach at least half of the other peers that train, and can say so (R1)."""
        others = {beat.peer for beat in self.live().trainers}
        return 2 * len(others & self.unreached) <= len(others)

    def named(self, peers: frozenset[str]) -> tuple[str, ...]:
        """Return those of these peers that live, as a message may name them."""
        return tuple(sorted(peers & self.live().keys()))[:MEMBER_LIMIT] if peers else ()

    # Whether they are enough ----------------------------------------------------------------------------------
    def is_quorum(self, log: LogState, peers: Collection[str]) -> bool:
        """Return whether these peers can decide on the log's next entry, signed farewells counted out (R12)."""
        departed = self.membership.departed(log)
        voters = [peer for peer, _ in log.electors if peer not in departed]
        return log.quorum.is_enough(sum(peer in peers for peer in voters), len(voters)) or not voters

    def are_all_gone(self, log: LogState) -> bool:
        """Return whether all voters of the log have said farewell, or there never were any: what comes then is no
        minority."""
        return self.membership.departed(log).issuperset(log.voters)

    def are_most_here(self, log: LogState, incarnation: int, along: Collection[str] = ()) -> bool:
        """Return whether a quorum of the log is alive, and no further on than it; or further, but not `along` with
        these. `incarnation` is ours."""
        live, index = self.live(), log.position.index
        others = [beat for peer, beat in live.items() if beat.index <= index or peer not in along]
        incarnations = {beat.peer: beat.incarnation for beat in others}
        incarnations[self._me] = incarnation
        here = {peer for peer, incarnation in incarnations.items() if log.counts(peer, incarnation)}
        return bool(here) and self.is_quorum(log, here)

    def voters_here(self, log: LogState, incarnation: int, patience: float, even_leavers: bool = False) -> set[str]:
        """Return the voters that gave a heartbeat so short a while ago, as incarnations that have a say, and ourselves,
        if we are one in our `incarnation`.

        Their work, their reach and the words of others do not matter: liars can bring those about.
        """
        heard = self.membership.spoke_within(patience, self.now, even_leavers)
        incarnations = [(self._me, incarnation), *((beat.peer, beat.incarnation) for beat in heard)]
        return {peer for peer, incarnation in incarnations if log.counts(peer, incarnation)}
