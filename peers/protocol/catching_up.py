"""The search for peers that are further on (R21).

Any peer may claim anything in its heartbeats, so a claim makes this peer ask, and no more: for the next entry, if few
entries are missing, and otherwise for the claimant's log. It asks one peer at a time, and trains meanwhile.
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
    """The search for peers that are further on. `question` limits how often this peer asks. `has_snapshot` is true once
    a snapshot was loaded or was not to be found, so that the rest of the way is replayed."""

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
        """Ask the next member, as a leader, whether it has made this entry already. With one fragment heartbeats show
        that; with several they do not show how far a peer is within the cycle."""
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
        self.question.sent()
        entries = self._presence.live()[ahead].index - log.position.index
        is_near = entries <= self._context.settings.snapshot_every or self.has_snapshot
        is_astray = self._replica.contradiction is not None or self._replica.needs_signed_log
        if is_astray or not (entries > 0 and is_near):
            self.weigh(ahead)
        elif self._patience.is_over(ahead, log):
            self._presence.branches.pass_over(ahead)
        else:  # the peer has all entries of this cycle, so they are asked for one after the other
            self._context.emit(Send(ahead, Inquire(position=log.of(log.pending[0]).position)))

    def answered(self) -> None:
        """Stop the clock while an entry is fetched and applied."""
        self._patience.answered()

    # Another log ----------------------------------------------------------------------------------------------
    def weigh(self, peer: str) -> None:
        """Fetch a peer's log, to compare it with this peer's."""
        if self._weighed is None:
            self._weighed = peer
            others = tuple(sorted(self._presence.branches.donors() - {peer}))
            self._context.emit(FetchLineage(peer, self._presence.live()[peer].index, others))

    def on_seen(self, seen: LineageSeen) -> FarBehind | None:
        """Return the way to another peer's branch, if this peer is to change to it; otherwise None."""
        if seen.donor != self._weighed:
            return None  # this peer has turned to another donor meanwhile
        self._weighed = None
        theirs = self._belief.branch(seen.theirs, seen.ours)
        is_better = theirs is not None and (theirs.splits_from(seen.ours) or theirs.is_better_than(seen.ours))
        if theirs is None or not is_better or not self._presence.is_live(seen.donor):
            self._presence.branches.pass_over(seen.donor)
            return None
        head = self._replica.contradiction
        why = f" with outer step {head.index} as the archive {head.archive} has signed it" if head is not None else ""
        text = f"fetching a snapshot of {seen.donor}, which is at outer step {theirs.end.position.index}{why}"
        self._context.emit(Note("info", text))
        return self._far_behind(seen.donor, theirs.start.position.index)

    def on_not_seen(self, failed: LineageNotSeen) -> None:
        """Pass over the donor, so that other peers are asked first."""
        if failed.donor == self._weighed:
            self._weighed = None
        self._presence.branches.pass_over(failed.donor)
        reason = f"the log of {failed.donor} does not prove the outer steps that it claims: {failed.reason}"
        self._context.emit(Note("info", reason))

    # A snapshot -----------------------------------------------------------------------------------------------
    def far_behind(self) -> FarBehind | None:
        """Return the peer that is furthest on as the donor of a snapshot, because no peer has the next entries any
        more. Return None if no peer is further on."""
        ahead = self._replica.furthest
        return self._far_behind(ahead) if ahead is not None else None

    def _far_behind(self, donor: str, common: int = 0) -> FarBehind:
        """Return the donor and the lowest index at which its snapshot helps: later than our entry, and so recent that
        other peers still know the entries after it (archives know all). If the donor is not ahead, but on a better
        branch, any index from `common` on will do."""
        index, beat = self._replica.log.position.index, self._presence.live()[donor]
        known_from = 0 if beat.state is PeerState.ARCHIVING else beat.index - RECENT_ENTRIES // 2
        return FarBehind(donor, max(index + 1 if beat.index > index else common, known_from))

    def fetched(self) -> None:
        """Begin anew from the fetched state. If no donor gave a snapshot, other peers may still know the entries."""
        self.has_snapshot, self._weighed = True, None
        self._patience = Patience(self._context, self._presence)


class Patience:
    """The time that each peer has spent on telling what follows a position, with a limit. The limit is for all
    fragments of a cycle, because a peer that tells each at the last moment would keep this peer behind. Each peer has
    its own, because this peer would otherwise ask two peers in turn for ever."""

    def __init__(self, context: Context, presence: Presence) -> None:
        self._context = context
        self._presence = presence
        self._place = b""
        self._waited: dict[str, float] = {}
        self._asked: tuple[str, float] | None = None  # the last peer asked, and when; None: it has answered

    def is_over(self, peer: str, log: LogState) -> bool:
        """Note a question to a peer, or return that its time is over. A peer whose time is over gets the time of one
        question when its turn comes again."""
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
        """Stop the clock. The pause between two questions is not counted."""
        self._charge(self._context.settings.timing.resend)
        self._asked = None

    def _charge(self, forgiven: float = 0.0) -> None:
        """Add the time since the last question, at most two heartbeats: a question goes out at each beat while a peer
        claims to be further on."""
        if self._asked is not None:
            peer, since = self._asked
            waited = min(self._context.now - since, 2 * self._context.settings.timing.heartbeat)
            met = self._presence.membership.met
            self._waited = {one: seconds for one, seconds in self._waited.items() if one in met}
            self._waited[peer] = self._waited.get(peer, 0.0) + max(0.0, waited - forgiven)
