"""The search for peers whose logs are longer or better than this peer's (R21).

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
    """The search for peers that are ahead of this peer in the log. `question` limits how often this peer asks them.
    Once this peer has tried to load a snapshot (`has_snapshot`), it replays entries, however many are missing."""

    def __init__(self, context: Context, presence: Presence, replica: Replica, belief: Belief) -> None:
        self.question = Repetition(context)
        self.has_snapshot = False
        self._context = context
        self._presence = presence
        self._replica = replica
        self._belief = belief
        self._patience = Patience(context, presence)
        self._weighed: str | None = None  # the peer whose log this peer is fetching, to compare the two logs
        self._inquired = ""

    # The next entry -------------------------------------------------------------------------------------------
    def inquire(self, log: LogState) -> None:
        """Ask a live member of the last entry, another one at each call, whether it already has the entry after `log`.
        In a run with one fragment ask no member, because heartbeats show the answer."""
        others = sorted(peer for peer in self._presence.live() if peer in log.roster)
        if others and log.fragments > 1:
            self._inquired = next((peer for peer in others if peer > self._inquired), others[0])
            self._context.emit(Send(self._inquired, Inquire(position=log.position)))

    def look(self) -> None:
        """Ask the peer that claims to be furthest ahead for the next entry; if many are missing, for its log."""
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
        else:  # ask for the cycle's first missing entry; later calls ask for the others
            self._context.emit(Send(ahead, Inquire(position=log.of(log.pending[0]).position)))

    def answered(self) -> None:
        """Stop counting the wait for the peer that was asked last, because its answer has arrived."""
        self._patience.answered()

    # Another log ----------------------------------------------------------------------------------------------
    def weigh(self, peer: str) -> None:
        """Request a peer's log, to compare it with this peer's, unless another peer's log is being fetched."""
        if self._weighed is None:
            self._weighed = peer
            others = tuple(sorted(self._presence.branches.donors() - {peer}))
            self._context.emit(FetchLineage(peer, self._presence.live()[peer].index, others))

    def on_seen(self, seen: LineageSeen) -> FarBehind | None:
        """Return the order to fetch a snapshot from the sender of a fetched log, if this log is to extend or replace
        this peer's; otherwise return None."""
        if seen.donor != self._weighed:
            return None  # this log is not the one that was requested last
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
        return self._snapshot_order(seen.donor, theirs.start.position.index)

    def on_not_seen(self, failed: LineageNotSeen) -> None:
        """Prefer other donors for a while, because the log of this donor could not be fetched or proven."""
        if failed.donor == self._weighed:
            self._weighed = None
        self._presence.branches.pass_over(failed.donor)
        reason = f"the log of {failed.donor} does not prove the outer steps that it claims: {failed.reason}"
        self._context.emit(Note("info", reason))

    # A snapshot -----------------------------------------------------------------------------------------------
    def far_behind(self) -> FarBehind | None:
        """Return the peer that is furthest ahead as the donor of a snapshot; None if no peer is ahead. Call this if no
        peer has the next entry's payload any more."""
        ahead = self._replica.furthest
        return self._snapshot_order(ahead) if ahead is not None else None

    def _snapshot_order(self, donor: str, common: int = 0) -> FarBehind:
        """Return the order to fetch a snapshot from `donor`: newer than this peer's log if the donor is ahead, else at
        `common`, the last index in both logs, or later. The donor must still have all entries after the snapshot."""
        index, beat = self._replica.log.position.index, self._presence.live()[donor]
        known_from = 0 if beat.state is PeerState.ARCHIVING else beat.index - RECENT_ENTRIES // 2
        return FarBehind(donor, max(index + 1 if beat.index > index else common, known_from))

    def fetched(self) -> None:
        """Reset the search after a try to load a snapshot, successful or not. This peer then replays entries."""
        self.has_snapshot, self._weighed = True, None
        self._patience = Patience(self._context, self._presence)


class Patience:
    """A limit on the seconds that each peer may take to answer this peer's questions for the next entry. It holds for
    all fragments of a cycle together; otherwise a peer could use up the limit once for each fragment."""

    def __init__(self, context: Context, presence: Presence) -> None:
        self._context = context
        self._presence = presence
        self._place = b""
        self._waited: dict[str, float] = {}
        self._asked: tuple[str, float] | None = None  # peer asked last, and the question's time; None after the answer

    def is_over(self, peer: str, log: LogState) -> bool:
        """Return True if the waits for the answers of `peer` in this cycle add up to more than the death time.
        Otherwise begin another wait, because this peer sends `peer` a question now."""
        self._charge()
        if self._place != log.position.head:
            self._place, self._waited = log.position.head, {}
        self._asked = peer, self._context.now
        limit = death(self._context.settings.timing)
        if self._waited.get(peer, 0.0) <= limit:
            return False
        self._waited[peer], self._asked = limit, None  # not above the limit: `peer` may be asked once more later
        return True

    def answered(self) -> None:
        """Record that the asked peer has answered. An answer within `timing.resend` seconds counts as no wait; of a
        later answer, only the seconds beyond count."""
        self._charge(self._context.settings.timing.resend)
        self._asked = None

    def _charge(self, forgiven: float = 0.0) -> None:
        """Count the seconds since the last question, less `forgiven` seconds, as a wait for the asked peer. Count at
        most two heartbeat intervals, because the question is repeated at each heartbeat."""
        if self._asked is not None:
            peer, since = self._asked
            waited = min(self._context.now - since, 2 * self._context.settings.timing.heartbeat)
            met = self._presence.membership.met
            self._waited = {one: seconds for one, seconds in self._waited.items() if one in met}
            self._waited[peer] = self._waited.get(peer, 0.0) + max(0.0, waited - forgiven)
