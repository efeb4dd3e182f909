"""Getting into the run, and back into it: the state from whoever is furthest on, then a lease from the leader."""

from __future__ import annotations

from peers.events import (
    Dropped,
    Note,
    Send,
)
from peers.log import Header, LogError
from peers.membership import PARTICIPATING
from peers.messages import (
    Inquire,
    LeaseGrant,
    LeaseRequest,
)
from peers.peer_core import PeerCore
from peers.states import State


class Joining(PeerCore):
    """A peer that lacks the run's present state or a lease."""

    def _join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.membership.polled:
            return
        ahead = self._furthest()
        if ahead is not None:
            self._fetch(ahead)
            return
        lease = self.log.leases.get(self.me)
        if lease is not None:
            self._train(lease, self.settings.inner_steps)
        elif self._may_start() and self._due():
            leader = self._elect()
            if leader is not None:
                request = LeaseRequest(position=self.log.position, state_digest=self.state_digest)
                self._emit(Send(leader, request))

    def _granted(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us, if it is a lease that others will accept from us."""
        try:
            self.log.lease_of(self.me, grant.samples)
            if grant.steps > self.settings.inner_steps:
                raise LogError(f"{grant.steps} inner steps are too many")
        except LogError as error:
            self._emit(Dropped(leader, "lease", str(error)))
            self._distrust(leader)
        else:
            self._train(grant.samples, grant.steps)

    def _may_start(self) -> bool:
        """Before the first entry: wait until peers can have seen each other and enough of them are there."""
        live = self._live()
        if self.log.position.index > 0 or any(beat.state in PARTICIPATING for beat in live.values()):
            return True
        settled = self._now - self._started_at >= 2 * self.settings.timing.heartbeat
        return settled and len(live) + 1 >= self.settings.minimum_peers

    def _furthest(self) -> str | None:
        """The live peer with the heaviest lineage, if it is heavier than ours; equal weight is decided by digest."""
        ours = (self.log.lineage_tokens, _inverted(self.log.position.head))
        standing = {
            peer: (beat.lineage_tokens, _inverted(beat.head))
            for peer, beat in self._live().items()
            if beat.state in PARTICIPATING and peer not in self._distrusted and beat.lineage_tokens > 0
        }
        best = max(standing, key=lambda peer: (standing[peer], peer), default=None)
        return best if best is not None and standing[best] > ours else None

    def _restored(self, donor: str, header: Header | None, state_digest: bytes) -> None:
        self._require(State.FETCHING)
        self.log = self.log.at(header)
        self._joined_at = self.log.position.head
        self._settle(state_digest)
        self._recent.clear()
        self._emit(Note("info", f"state at {self.log.position} fetched from {donor}"))
        self._enter(State.JOINING)
        self._join()

    def _not_restored(self, donor: str, reason: str) -> None:
        self._require(State.FETCHING)
        self._distrust(donor)
        self._emit(Note("warning", f"no state from {donor}: {reason}"))
        self._enter(State.JOINING)

    def _catch_up(self) -> None:
        """Somebody is further on, or on a heavier lineage: learn the entry from them, or take their state."""
        if self.state not in (State.TRAINING, State.READY, State.AVERAGING):
            return
        ahead = self._furthest()
        if ahead is None:
            return
        if self._held is not None and self._live()[ahead].index == self.log.position.index + 1:
            self._emit(Send(ahead, Inquire(position=self.log.position)))
        else:
            self._emit(Note("warning", f"{ahead} is ahead at {self._live()[ahead].index}: fetching its state"))
            self._fetch(ahead)

    def _refused(self, leader: str, reason: str) -> None:
        """What we trained, or the state we trained from, is of no use to the leader: take its state and begin again."""
        if self.state not in (State.JOINING, State.READY, State.AVERAGING) or leader == self.me:
            return
        self._emit(Note("warning", f"refused by {leader}: {reason}"))
        self._fetch(leader)

    def _elsewhere(self, sender: str) -> None:
        """Our inquiry led nowhere: what we hold is on another lineage than the heavier one."""
        if self.state in (State.READY, State.AVERAGING) and self._furthest() == sender:
            self._fetch(sender)


def _inverted(digest: bytes) -> bytes:
    """Orders digests the other way round, so that the smaller one wins a tie in `max`."""
    return bytes(255 - byte for byte in digest)
