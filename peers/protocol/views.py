"""The views of one position: the view that each peer has reached, and the leader of this peer's view (R1, R2, R13)."""

from __future__ import annotations

from collections.abc import Mapping

from peers.log.state import LogState
from peers.presence.membership import PARTICIPATING
from peers.presence.presence import Presence
from peers.protocol.attendance import Attendance
from peers.protocol.context import Context
from peers.protocol.own_work import OwnWork
from peers.protocol.pacemaker import Pacemaker, named_by_quorum
from peers.protocol.replica import Replica, ReplicaState
from peers.values.wire import digest_of, pack_plain


class Views:
    """The views of one position. `granted_by` has the peer that granted this peer its lease, and the time of the grant.
    That peer may lead even before its heartbeats show it at work."""

    def __init__(self, context: Context, presence: Presence, log: LogState) -> None:
        self.attendance = Attendance(context, presence, log)
        self.pacemaker = Pacemaker(context.settings.timing, context.round_times, context.now)
        self.granted_by: tuple[str, float] | None = None
        self._context = context
        self._presence = presence
        self._log = log
        self._has_granted = False

    def look(
        self,
        work: OwnWork,
        is_taking_part: bool,
        replica: Replica,
        reached_by_others: Mapping[str, int],
        has_granted: bool,
    ) -> None:
        """Update the peers that work on this position's entry, this peer's view, and the view's leader, from the time
        and the other peers' heartbeats.

        Args:
            is_taking_part: true if this peer is ready, or exchanges.
            reached_by_others: the views that members named to this peer in Ready.
            has_granted: true if this peer has granted samples to a joiner at this position, so that it may lead.
        """
        self._has_granted = has_granted
        ready_since = work.since if is_taking_part else None
        is_level = replica.state in (ReplicaState.LEVEL, ReplicaState.APPLYING)
        self.attendance.look(ready_since, is_level and work.is_under_way, replica.is_behind)
        attendance, pacemaker, me = self.attendance, self.pacemaker, self._context.me
        views = attendance.views() | {me: pacemaker.reached}
        for peer, view in reached_by_others.items():
            views[peer] = max(view, views.get(peer, 0))
        incarnations = {peer: attendance.at_work.get(peer, 0) for peer in views}
        named = named_by_quorum(views, lambda peers: attendance.moves_on({peer: incarnations[peer] for peer in peers}))
        ready = attendance.ready() if is_taking_part else {}
        if self._log.last is None and not work.is_under_way:
            # All heard peers count as ready, so that the timer runs and replaces a leader that grants no samples.
            ready = incarnations
        reached = {peer: incarnation for peer, incarnation in ready.items() if views.get(peer, 0) >= pacemaker.view}
        is_running = bool(ready) and attendance.moves_on(reached)
        turns = len(self._log.ring) if self._is_log_led else 1
        self.pacemaker.look(self._context.now, self.leader_of, self._is_there, turns, is_running, work.grace, named)

    @property
    def _is_log_led(self) -> bool:
        """True if the log determines the leader (R13): there is an entry, and at least one peer of its ring, the peers
        that lead in turn, can lead."""
        return any(self._is_there(peer) for peer in self._log.ring)

    def leader_of(self, view: int) -> str | None:
        """Return the leader of a view (R1): the log's, if the log determines one (R13). Otherwise the peer at work with
        the lowest id leads view 0, and the peer at work or possible founder with the lowest digest of head, view and id
        leads a later view."""
        if self._is_log_led:
            return self._log.leader_of(view)
        at_work, head = self._at_work(), self._log.position.head
        founders = self.attendance.founders() if self._log.last is None else [self._context.me]
        if view == 0:
            return min(at_work or founders)
        return min({*at_work, *founders}, key=lambda peer: digest_of(pack_plain([head, view, peer])))

    def _at_work(self) -> set[str]:
        now, me = self._context.now, self._context.me
        at_work = set(self.attendance.at_work)
        if self.granted_by and now - self.granted_by[1] <= self._context.settings.timing.heartbeat_expiry:
            at_work.add(self.granted_by[0])
        if self._has_granted:
            at_work.add(me)
        return at_work

    def _is_there(self, peer: str) -> bool:
        """Return True if a peer can lead: this peer hears it and has no proof against it, and the peer's own heartbeat
        says that it can lead and is at work at this position."""
        if peer == self._context.me:
            return self._presence.can_lead
        beat = self._presence.live().get(peer)
        if beat is None or not beat.leads or self._context.evidence.has_convicted(peer):
            return False
        if self._log.last is None:
            return True
        index = self._log.position.index
        is_unproven = beat.index > index and peer in self._presence.branches.unproven
        # A member of the last entry has it, and a peer whose beat is one index behind may have it by now.
        is_near = beat.index + 1 >= index or peer in self._log.roster
        return beat.state in PARTICIPATING and is_near and not is_unproven
