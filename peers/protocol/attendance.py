"""The peers that are at work at one position of the log, whether they are a quorum, and the time after which a minority
makes the entry alone (R8).

A minority goes on because the other peers may be gone for good. Each of its voters must itself have heard no quorum
here for the partition grace. Other peers follow its entry only if too few of the last roster are here to make one of
their own, so that a liar with only its own signature leads no honest peer astray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from peers.log.certificate import Group
from peers.log.header import MEMBER_LIMIT
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.pacemaker import death
from peers.values.leases import sample_count

READY_STATES = frozenset({PeerState.READY, PeerState.AVERAGING})
NEARLY = 0.8
"""Share of the partition grace after which a peer joins another one that has waited for all of it, since clocks
differ."""
HOPELESS = 10.0
"""Multiple of the partition grace for which a ready peer counts peers that are at work but never ready."""


class Attendance:
    """The peers that are at work at one position of the log. `at_work` maps each of their ids, this peer's included,
    to the peer's incarnation.

    `is_alone` is true if this peer begins a minority's ballots, `joins_alone` if it takes part in them.
    """

    def __init__(self, context: Context, presence: Presence, log: LogState) -> None:
        self.at_work: dict[str, int] = {}
        self.is_alone = self.joins_alone = False
        self._context = context
        self._presence = presence
        self._log = log
        self._together_at = self._looked_at = context.now
        self._most_at_work_at = -float("inf")

    def look(self, ready_since: float | None, is_at_work: bool, is_behind: bool) -> None:
        """Update `at_work`, the live peers that work on this position's entry. Set `is_alone` to true if this peer may
        begin a minority's ballots, and `joins_alone` if it may join them.

        Args:
            ready_since: time at which this peer became ready; None if it is not.
            is_at_work: true if this peer trains or has trained for the position's entry.
            is_behind: true if other peers are ahead: this peer then joins no minority.
        """
        context, now = self._context, self._context.now
        live, position = self._presence.live(), self._log.position
        away = self._presence.unreached
        unproven = self._presence.branches.unproven
        timing = context.settings.timing
        is_hopeless = ready_since is not None and now - ready_since >= HOPELESS * timing.partition_grace
        states = READY_STATES if is_hopeless else PARTICIPATING
        coming = {
            peer: beat.incarnation
            for peer, beat in live.items()
            if beat.state in states and peer not in away and not (peer in unproven and beat.index > position.index)
        }
        self.at_work = {peer: incarnation for peer, incarnation in coming.items() if live[peer].head == position.head}
        coming = {
            peer: incarnation
            for peer, incarnation in coming.items()
            if peer in self.at_work or live[peer].index != position.index
        }
        if is_at_work or ready_since is not None:
            self.at_work[context.me] = coming[context.me] = context.incarnation
        has_slept = now - self._looked_at > timing.heartbeat_expiry
        self._looked_at = now
        if has_slept or is_behind or (self.is_quorum(coming) and not self._are_all_gone):
            self._together_at = now
        if self._log.last is not None and are_most(self._log, coming):
            self._most_at_work_at = now
        waited = 0.0 if ready_since is None else now - max(ready_since, self._together_at)
        may_go_on = context.settings.goes_on_alone or self.were_most_at_work or self._are_all_gone
        may_go_on = may_go_on and ready_since is not None
        self.is_alone = may_go_on and (waited >= timing.partition_grace or self._are_all_gone)
        self.joins_alone = self.is_alone or (may_go_on and waited >= NEARLY * timing.partition_grace)

    @property
    def _are_all_gone(self) -> bool:
        return self._log.last is not None and self._presence.are_all_gone(self._log)

    @property
    def were_most_at_work(self) -> bool:
        """True if this peer saw more than half of the voters, in any incarnation, at work at the same moment within the
        last partition grace, or within the death time if that is longer."""
        timing = self._context.settings.timing
        return self._context.now - self._most_at_work_at < max(timing.partition_grace, death(timing))

    def is_quorum(self, incarnations: Mapping[str, int]) -> bool:
        """Return True if these peers, in these incarnations, are a quorum of the voters. Before the first entry the
        manifest's minimum number of peers is enough."""
        if self._log.last is None:
            return len(incarnations) >= self._context.settings.minimum_peers
        counted = [peer for peer, incarnation in incarnations.items() if self._log.counts(peer, incarnation)]
        return bool(counted) and self._presence.is_quorum(self._log, counted)

    def is_enough(self, incarnations: Mapping[str, int]) -> bool:
        """Return True if these peers can make the entry, either as a quorum or, if this peer may act alone, as a
        minority (R8)."""
        return self.is_quorum(incarnations) or (self.is_alone and self.may_go_on(incarnations))

    def may_go_on(self, incarnations: Mapping[str, int]) -> bool:
        """Return True if these peers may make the entry as a minority (R8). They must be more than half of the live
        peers that work on it, or all of those if it is the first entry. If most voters worked lately, and not all
        voters have sent a farewell, they must instead be more than half of the voters."""
        if self.were_most_at_work and not self._are_all_gone:
            return are_most(self._log, incarnations)
        among = len(self.at_work.keys() & incarnations.keys())
        return among == len(self.at_work) if self._log.last is None else 2 * among > len(self.at_work)

    @property
    def group(self) -> Group:
        """The voters of a minority: the live peers that work on the entry, with their incarnations, sorted by peer id.
        Of more than MEMBER_LIMIT peers it has the first ones."""
        return tuple(sorted(self.at_work.items()))[:MEMBER_LIMIT]

    def left_out(self, group: Group) -> tuple[str, ...]:
        """Return the ids of the peers at work that are not in the group."""
        return tuple(sorted(peer for peer, incarnation in self.at_work.items() if (peer, incarnation) not in group))

    def joins(self, group: Group) -> bool:
        """Return True if this peer takes part in a minority's ballots (R8): it has waited long enough, and the group
        contains all peers at work, and enough of them for an entry."""
        heard = {peer: incarnation for peer, incarnation in group if peer in self.at_work}
        return self.joins_alone and not self.left_out(group) and self.may_go_on(heard)

    def ready(self) -> dict[str, int]:
        """Return the peers at work that are ready or averaging, and this peer, each with its incarnation. With several
        fragments, a peer that trains counts, too, if it has made the inner steps before this fragment's average."""
        live, me = self._presence.live(), self._context.me
        return {
            peer: incarnation for peer, incarnation in self.at_work.items() if peer == me or self._is_ready(live[peer])
        }

    def _is_ready(self, beat: Heartbeat) -> bool:
        log, settings = self._log, self._context.settings
        if beat.state in READY_STATES or log.fragments == 1:
            return beat.state in READY_STATES
        lease = log.leases.get(beat.peer)
        samples = settings.samples_per_lease if lease is None else sample_count(lease)
        done = beat.inner_step * settings.samples_per_lease // settings.inner_steps
        return done * log.fragments >= samples * (log.fragment + 1)

    def views(self) -> dict[str, int]:
        """Return the view that each other peer at work names in its heartbeat, by peer id. Before the first entry,
        return the views of the possible founders instead."""
        live = self._presence.live()
        peers = self.founders() if self._log.last is None else self.at_work
        return {peer: live[peer].view for peer in peers if peer in live}

    def moves_on(self, incarnations: Mapping[str, int]) -> bool:
        """Return True if these peers are enough to change the leader. After the first entry, that means enough to make
        the next one; before it, more than half of the possible founders."""
        if self._log.last is None:
            heard = self.founders()
            are_many = len(heard) >= self._context.settings.minimum_peers or bool(self.at_work)
            return are_many and 2 * len(incarnations.keys() & set(heard)) > len(heard)
        return self.is_enough(incarnations)

    def founders(self) -> list[str]:
        """Return the sorted ids of the peers that may found the run: this peer, and all peers that it hears and
        reaches, except archives and peers that have entries."""
        beats: Iterable[Heartbeat] = self._presence.live().trainers
        others = [beat.peer for beat in beats if beat.index == 0 and beat.peer not in self._presence.unreached]
        return sorted([self._context.me, *others])


def are_most(log: LogState, peers: Collection[str]) -> bool:
    """Return True if these peers are more than half of the log's voters, in any incarnation."""
    return 2 * len(set(log.voters).intersection(peers)) > len(log.voters)
