"""The lease requests of a peer without a lease: when it sends them, to which peer, and which grants it accepts (R13,
R14)."""

from __future__ import annotations

from peers.log.state import LogError
from peers.messages.messages import LeaseGrant, LeaseRequest
from peers.presence.membership import PARTICIPATING
from peers.presence.presence import Presence
from peers.protocol.context import Context, Repetition
from peers.protocol.effects import Dropped, Send
from peers.protocol.pacemaker import death
from peers.protocol.replica import Replica

PATIENCE = 10
"""Multiple of the partition grace for which this peer waits for founders that it cannot reach. They may take that long
to found the run."""


class Joiner:
    """The lease requests of a peer without a lease. `question` limits how often this peer sends them."""

    def __init__(self, context: Context, presence: Presence, replica: Replica) -> None:
        self.question = Repetition(context)
        self._context = context
        self._presence = presence
        self._replica = replica
        self._held_back_since: float | None = None
        self._asked: str | None = None

    def has_asked(self, peer: str) -> bool:
        """Return True if the last lease request went to this peer."""
        return peer == self._asked

    @property
    def knows_peers(self) -> bool:
        """True if this peer has looked for other peers, and waits for no more links to them."""
        return self._presence.membership.polled and not self._presence.seeks_links

    def may_start(self) -> bool:
        """Return True if this peer has entries of the run or hears peers at work, or if it may found the run now. A
        founding requires that enough peers have had time to hear each other, and that no archive has signed a head."""
        live = self._presence.live()
        if self._replica.needs_signed_log:
            return False
        if self._replica.log.position.index > 0 or live.at_work:
            return True
        settings = self._context.settings
        settled = self._context.now - self._context.started_at >= 2 * settings.timing.heartbeat
        return settled and len(live.trainers) + 1 >= settings.minimum_peers

    def ask(self, leader: str | None) -> None:
        """Send the leader a lease request, if the run may start and the first request or a repetition is due (R14)."""
        if not (self._replica.is_settled and self.may_start() and self.question.is_due):
            return
        self.question.sent()
        if leader is not None and not (leader == self._context.me and self.holds_back()):
            position = self._replica.log.of(self._replica.log.fragments - 1).position
            request = LeaseRequest(position=position, state_digest=self._replica.state_digest)
            self._asked = leader
            self._context.emit(Send(leader, request))

    def holds_back(self) -> bool:
        """Return True if this peer delays the run's first entry, because it hears founders that it cannot reach and
        that might found a second run."""
        if not self._founders_out_of_reach():
            self._held_back_since = None
            return False
        if self._held_back_since is None:
            self._held_back_since = self._context.now
        timing = self._context.settings.timing
        patience = timing.grace + PATIENCE * timing.partition_grace + death(timing)
        return self._context.now - self._held_back_since <= patience

    def _founders_out_of_reach(self) -> set[str]:
        if self._replica.log.last is not None:
            return set()
        expiry = self._context.settings.timing.heartbeat_expiry
        heard = self._presence.membership.spoke_within(expiry, self._context.now)
        at_work = {beat.peer for beat in heard if beat.state in PARTICIPATING or beat.index > 0}
        return at_work - (self._presence.live().keys() - self._presence.unreached)

    def accepts(self, leader: str, grant: LeaseGrant) -> bool:
        """Return True if the other peers will accept the granted lease; otherwise report the leader's error."""
        whole = self._context.settings.inner_steps
        try:
            if self._replica.log.lease_of(self._context.me, grant.samples) != grant.samples:
                raise LogError("the granted samples are less than a whole lease")
            if not 0 < grant.steps <= whole:
                raise LogError(f"the grant is for {grant.steps} inner steps, not for 1 to {whole}")
        except LogError as error:
            self._context.emit(Dropped(leader, "lease", str(error)))
            return False
        return True
