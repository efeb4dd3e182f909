"""The search for peers that are further on (R21).

Any peer may claim anything in its heartbeats, so a claim makes this peer ask, and no more: for the next entry, where
the way is short, and else for the other's log. It looks at one peer at a time, and goes on training meanwhile.
"""

from __future__ import annotations

from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogState
from peers.messages.messages import Inquire
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.belief import Belief
from peers.protocol.context import Context, Repetition
from peers.protocol.effects import FetchLineage, Note, Send
from peers.protocol.events import LineageNotSeen, LineageSeen
from peers.protocol.internal import FarBehind
from peers.protocol.pacemaker import death
from peers.protocol.replica import Replica


class Search:
    """`question` paces what is asked. `has_snapshot` says that the way to the others is replayed: they gave a snapshot
    already, or none."""

    def __init__(self, context: Context, presence: Presence, replica: Replica, belief: Belief) -> None:
        self.question = Repetition(context)
        self.has_snapshot = False
        self._context = context
        self._presence = presence
        self._replica = replica
        self._belief = belief
        self._patience = Patience(context, presence)
        self._weighed: str | None = None  # the peer whose log is being fetched
        self._inquired = ""

    # The next entry -------------------------------------------------------------------------------------------
    def inquire(self, log: LogState) -> None:
        """As a leader, ask the next member whether it has made this entry already. With one fragment heartbeats tell;
        with several a peer that has moved on in the cycle is not seen to have."""
        others = sorted(peer for peer in self._presence.live() if peer in log.roster)
        if others and log.fragments > 1:
            self._inquired = next((peer for peer in others if peer > self._inquired), others[0])
            self._context.emit(Send(self._inquired, Inquire(position=log.position)))

    def look(self) -> None:
        """Ask a peer that claims to be further on for the next entry, or for its log."""
        if self._replica.furthest is None:
            self.has_snapshot = False
        ahead, log = self._replica.claimant, self._replica.log
        if ahead is None:
            return
        self.question.said()
        entries = self._presence.live()[ahead].index - log.position.index
        is_near = entries <= self._context.settings.snapshot_every or self.has_snapshot
        is_astray = self._replica.contradiction is not None or self._replica.needs_signed_log
        if is_astray or not (entries > 0 and is_near):
            self.weigh(ahead)
        elif self._patience.is_over(ahead, log):
            self._presence.branches.pass_over(ahead)
        else:  # it has all entries of our cycle: they are asked for one after the other
            self._context.emit(Send(ahead, Inquire(position=log.of(log.pending[0]).position)))

    def answered(self) -> None:
        """Stop the clock while an entry is fetched and applied."""
        self._patience.answered()

    # Another log ----------------------------------------------------------------------------------------------
    def weigh(self, peer: str) -> None:
        """Have a peer's log fetched, to compare it with ours."""
        if self._weighed is None:
            self._weighed = peer
            others = tuple(sorted(self._presence.branches.donors() - {peer}))
            self._context.emit(FetchLineage(peer, self._presence.live()[peer].index, others))

    def on_seen(self, seen: LineageSeen) -> FarBehind | None:
        """Return the way to another peer's branch, if that is to be ours."""
        if seen.donor != self._weighed:
            return None  # we have gone elsewhere meanwhile
        self._weighed = None
        theirs = self._belief.branch(seen.theirs, seen.ours)
        is_better = theirs is not None and (theirs.splits_from(seen.ours) or theirs.is_better_than(seen.ours))
        if theirs is None or not is_better or not self._presence.is_live(seen.donor):
            self._presence.branches.pass_over(seen.donor)
            return None
        head = self._replica.contradiction
        why = f" with outer step {head.index} as the archive {head.archive} has signed it" if head is not None else ""
        self._context.emit(Note("info", f"{seen.donor} is at {theirs.end.position.index}{why}: fetching a snapshot"))
        return self._far_behind(seen.donor, theirs.start.position.index)

    def on_not_seen(self, failed: LineageNotSeen) -> None:
        """Look at others first."""
        if failed.donor == self._weighed:
            self._weighed = None
        self._presence.branches.pass_over(failed.donor)
        self._context.emit(Note("info", f"the log of {failed.donor} does not show what it says of it: {failed.reason}"))

    # A snapshot -----------------------------------------------------------------------------------------------
    def far_behind(self) -> FarBehind | None:
        """Return the way to the peer that is furthest on, if any is: no peer has what follows here any more."""
        ahead = self._replica.furthest
        return self._far_behind(ahead) if ahead is not None else None

    def _far_behind(self, donor: str, common: int = 0) -> FarBehind:
        """Return the way to a donor, by a snapshot so new that other peers know what followed it. Archives know all. A
        donor on a better branch may be no further on: then any snapshot since the common index will do."""
        index, beat = self._replica.log.position.index, self._presence.live()[donor]
        known_from = 0 if beat.state is PeerState.ARCHIVING else beat.index - RECENT_ENTRIES // 2
        return FarBehind(donor, max(index + 1 if beat.index > index else common, known_from))

    def fetched(self) -> None:
        """Begin anew where the fetched state is. If no donor gave one, the entries may be known all the same."""
        self.has_snapshot, self._weighed = True, None
        self._patience = Patience(self._context, self._presence)


class Patience:
    """The time that each peer had to tell what follows a position. It covers all fragments of a cycle: a peer that
    tells each at the last moment would keep us behind. Each peer has its own: two would be asked in turn for ever."""

    def __init__(self, context: Context, presence: Presence) -> None:
        self._context = context
        self._presence = presence
        self._place = b""
        self._waited: dict[str, float] = {}
        self._asked: tuple[str, float] | None = None  # the last peer, and when; None: it has answered

    def is_over(self, peer: str, log: LogState) -> bool:
        """Ask a peer. Return whether its time is over; it then gets one question's time when its turn comes again."""
        self._charge()
        if self._place != log.position.head:
            self._place, self._waited = log.position.head, {}
        self._asked = peer, self._context.now
        limit = death(self._context.settings.timing)
        if self._waited.get(peer, 0.0) <= limit:
            return False
        self._waited[peer], self._asked = limit, None
        return True

    def answered(self) -> None:
        """Stop the clock. The pause between two questions is forgiven."""
        self._charge(self._context.settings.timing.resend)
        self._asked = None

    def _charge(self, forgiven: float = 0.0) -> None:
        """Add the time since the last question. Questions come at each beat while a peer claims to be further on, so
        no more than two heartbeats count."""
        if self._asked is not None:
            peer, since = self._asked
            waited = min(self._context.now - since, 2 * self._context.settings.timing.heartbeat)
            met = self._presence.membership.met
            self._waited = {one: seconds for one, seconds in self._waited.items() if one in met}
            self._waited[peer] = self._waited.get(peer, 0.0) + max(0.0, waited - forgiven)
