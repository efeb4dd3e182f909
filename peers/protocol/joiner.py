"""How a peer without a lease gets one: when it may ask, whom, and what it takes for an answer."""

from __future__ import annotations

from peers.log.state import LogError
from peers.presence.membership import PARTICIPATING
from peers.presence.presence import Presence
from peers.protocol.desk import Desk, Repetition
from peers.protocol.effects import Dropped, Send
from peers.protocol.messages import LeaseGrant, LeaseRequest
from peers.protocol.replica import Replica
from peers.protocol.troubles import Troubles


class Joiner:
    """`question` is whatever a joiner asks: for a lease, or for what followed its last entry."""

    def __init__(self, desk: Desk, presence: Presence, replica: Replica, troubles: Troubles) -> None:
        self.question = Repetition(desk)
        self._desk = desk
        self._presence = presence
        self._replica = replica
        self._troubles = troubles
        self._asked: dict[str, float] = {}  # who founds the run, as we took it, and since when we ask each
        self._held_back_since: float | None = None

    @property
    def may_ask(self) -> bool:
        """Whether we know who is there, and how we reach them, and our work could count."""
        return self._presence.membership.polled and self._troubles.may_ask and not self._presence.seeks_links

    def may_start(self) -> bool:
        """Before the first entry: wait until peers can have seen each other and enough of them are there. A run of
        which an archive has signed an entry is not founded again."""
        live = self._presence.live()
        if self._replica.needs_signed_log:
            return False
        if self._replica.log.position.index > 0 or live.at_work:
            return True
        settings = self._desk.settings
        settled = self._desk.now - self._desk.started_at >= 2 * settings.timing.heartbeat
        return settled and len(live.trainers) + 1 >= settings.minimum_peers

    def ask(self, leader: str | None) -> None:
        """Ask the leader for a lease, again and again."""
        if not (self._replica.is_settled and self.may_start() and self.question.is_due):
            return
        self.question.said()
        if leader is not None and not (leader == self._desk.me and self.holds_back()):
            self._wait_for(leader)
            request = LeaseRequest(
                position=self._replica.log.of(self._replica.log.fragments - 1).position,
                state_digest=self._replica.state_digest,
                relayed=self._presence.named(self._presence.reachability.detours(self._desk.now)),
                unreached=self._presence.named(self._presence.unreached),
            )
            self._desk.emit(Send(leader, request))

    def _wait_for(self, leader: str) -> None:
        """A founder that gives nobody samples has as long as one that does not begin. Once a run goes on, most of its
        peers know better than a newcomer who leads. Each has a time of its own: two could take turns."""
        if self._replica.log.last is not None or leader == self._desk.me:
            self._asked.clear()
            return
        met = self._presence.membership.met
        self._asked = {leader: self._desk.now, **{peer: since for peer, since in self._asked.items() if peer in met}}
        if self._desk.now - self._asked[leader] > self._patience(leader):
            del self._asked[leader]
            self._presence.distrust(leader)

    def _patience(self, founder: str) -> float:
        """Who can't be reached from here, or has founded, as it says, is waited for as long as those who seem at work:
        else we would found another run beside it. What it says never makes the time begin anew."""
        beat = self._presence.live().get(founder)
        is_mute = beat is not None and beat.index == 0 and founder not in self._presence.unreached
        return self._desk.schedule.begin(everyone_is_ready=is_mute)

    def holds_back(self) -> bool:
        """Whether we do not found the run yet, since somebody is about to or has, whom we can't reach at the moment."""
        founders = self._founders_out_of_reach()
        if not founders:
            self._held_back_since = None
            return False
        self._held_back_since = self._held_back_since or self._desk.now
        return self._desk.now - self._held_back_since <= self._desk.schedule.begin(everyone_is_ready=False)

    def _founders_out_of_reach(self) -> set[str]:
        if self._replica.log.last is not None:
            return set()
        expiry = self._desk.settings.timing.heartbeat_expiry
        heard = self._presence.membership.spoke_within(expiry, self._desk.now)
        at_work = {beat.peer for beat in heard if beat.state in PARTICIPATING or beat.index > 0}
        reached = self._presence.live().keys() - self._presence.unreached
        return at_work - reached - self._presence.distrusted

    def accepts(self, leader: str, grant: LeaseGrant) -> bool:
        """Whether others will accept the leader's lease from us."""
        whole = self._desk.settings.inner_steps
        self._asked.clear()
        try:
            self._replica.log.lease_of(self._desk.me, grant.samples)
            if grant.steps > whole:
                raise LogError(f"{grant.steps} inner steps are too many")
        except LogError as error:
            self._desk.emit(Dropped(leader, "lease", str(error)))
            self._presence.distrust(leader)
            return False
        return True
