"""How a peer finds out that others are further on, or on a better branch, and what it does about it.

Heartbeats say where their peers are, and anybody may say anything. So what they claim makes a peer ask, and no more:
for the next entry, where the way is short, and else for the other one's log. It gives up what it trains, and its own
branch, when signatures have shown that the other one is better.
"""

from __future__ import annotations

from peers.log.lineage import RECENT_ENTRIES, Branch
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk, Repetition
from peers.protocol.effects import FetchLineage, Note, Send
from peers.protocol.events import LineageNotSeen, LineageSeen
from peers.protocol.internal import FarBehind
from peers.protocol.messages import Inquire
from peers.protocol.minority import are_most, may_found
from peers.protocol.replica import Replica


class Search:
    """Looks at one other peer at a time. `question` paces what is asked of it."""

    def __init__(self, desk: Desk, presence: Presence, replica: Replica) -> None:
        self.question = Repetition(desk)
        self._desk = desk
        self._presence = presence
        self._replica = replica
        self._weighed: str | None = None
        self._asked: tuple[str, float] | None = None  # who was asked last, and when; None: it has answered
        self._place = replica.log.position
        self._waits: dict[str, float] = {}

    def catch_up(self) -> None:
        """Ask who claims to be further on for the next entry, or for its log."""
        ahead = self._replica.claimant
        if ahead is None:
            return
        self.question.said()
        log = self._replica.log
        entries = self._presence.live()[ahead].index - log.position.index
        is_near = entries <= self._desk.settings.snapshot_every or self._replica.has_snapshot
        is_astray = self._replica.contradiction is not None or self._replica.needs_signed_log
        if is_astray or not (entries > 0 and is_near):
            self.weigh(ahead)
        elif self._has_been_patient(ahead):
            self._pass_over(ahead)
        else:  # it is past our cycle, so that it has each of its entries: one after the other
            self._desk.emit(Send(ahead, Inquire(position=log.of(log.pending[0]).position)))

    def _has_been_patient(self, peer: str) -> bool:
        """Ask a peer. Returns whether it has had time enough to tell what followed here. All of a cycle's fragments
        share that time: a peer that tells one after another, each at the last moment, would keep us behind. It is the
        peer's own, whoever else was asked meanwhile: two peers would be asked in turn for ever."""
        self._charge()
        if self._place != self._replica.log.position:
            self._place, self._waits = self._replica.log.position, {}
        self._asked = peer, self._desk.now
        return self._waits.get(peer, 0.0) > self._desk.schedule.death

    def _pass_over(self, peer: str) -> None:
        """When its turn comes again, it has one question's time."""
        self._presence.pass_over(peer)
        self._waits[peer], self._asked = self._desk.schedule.death, None

    def answered(self) -> None:
        """Stop the clock while an entry is fetched and applied. The pause between two questions is forgiven."""
        self._charge(self._desk.settings.timing.resend)
        self._asked = None

    def _charge(self, forgiven: float = 0.0) -> None:
        """Whoever was asked last has let us wait since then. We ask at each beat: in a longer pause nobody claimed to
        be further on."""
        if self._asked is not None:
            peer, since = self._asked
            waited = min(self._desk.now - since, 2 * self._desk.settings.timing.heartbeat)
            met = self._presence.membership.met
            self._waits = {one: seconds for one, seconds in self._waits.items() if one in met}
            self._waits[peer] = self._waits.get(peer, 0.0) + max(0.0, waited - forgiven)

    def weigh(self, peer: str) -> None:
        """Have its log fetched, and compared with ours. Training goes on meanwhile."""
        if self._weighed is None:
            self._weighed = peer
            others = tuple(sorted(self._presence.donors() - {peer}))
            self._desk.emit(FetchLineage(peer, self._presence.live()[peer].index, others))

    def on_seen(self, seen: LineageSeen) -> FarBehind | None:
        """What is returned leads to where the other one's branch does, if that is to be ours."""
        if seen.donor != self._weighed:
            return None  # we have gone elsewhere meanwhile
        self._weighed = None
        theirs = self.believed(seen.theirs, seen.ours)
        is_better = theirs is not None and (theirs.splits_from(seen.ours) or theirs.is_better_than(seen.ours))
        if theirs is None or not is_better or not self._presence.is_live(seen.donor):
            self._presence.pass_over(seen.donor)
            return None
        head = self._replica.contradiction
        why = f" with outer step {head.index} as the archive {head.archive} has signed it" if head is not None else ""
        self._desk.emit(Note("warning", f"{seen.donor} is at {theirs.end.position.index}{why}: fetching a snapshot"))
        return self._far_behind(seen.donor, theirs.start.position.index)

    def believed(self, theirs: Branch, ours: Branch) -> Branch | None:
        """Return as much of another one's branch as is to be taken for the run's; None: nothing, or not now.

        What an archive has signed decides before all else, and leaves no doubt about what leads up to it. Whoever makes
        up a founding makes up its tokens, too: so of two foundings the one with more live peers counts.
        """
        log, signed, founders = self._replica.log, self._replica.signed, theirs.founders
        vouched = signed.vouched(theirs.heads)
        if self._replica.needs_signed_log and not vouched:
            return None  # it may be another founding, which has not come so far
        may_be_founding = log.last is None and founders is not None and not vouched
        if may_be_founding and not may_found(self._desk, self._presence, founders or 0):
            return None
        for doubt in theirs.doubts:
            if doubt.position.index < vouched:
                continue
            is_followed = self._is_followed(doubt, theirs)
            if is_followed is None:
                return None
            if not is_followed:
                theirs = theirs.until(doubt)
                break
        if not theirs.splits_from(ours):
            return theirs if theirs.contradiction(signed) is None else None
        if ours.end.position != log.position and not theirs.has(log.position):
            return None  # what we have made meanwhile was not compared with it
        if theirs.standing(signed) != ours.standing(signed):
            return theirs if theirs.standing(signed) > ours.standing(signed) else None
        if theirs.start.last is None:
            are_more = self._presence.are_more_there(theirs, log, self._replica.lineage)
            if are_more is not None:
                return theirs if are_more and theirs.is_certified else None
        return theirs if theirs.is_better_than(ours) else None

    def _is_followed(self, doubt: LogState, branch: Branch) -> bool | None:
        """Whether to believe what too few have made of a place; None: it is to be looked at again."""
        if self._presence.are_all_gone(doubt):
            return True
        if not (are_most(doubt, branch.end.roster) or self._desk.settings.goes_on_alone):
            return False
        elsewhere = self._presence.are_most_elsewhere(doubt, branch, self._desk.memory.incarnation)
        return None if elsewhere is None else not elsewhere

    def forget(self) -> None:
        """We are elsewhere in the log: what another one's is worth here does not matter any more."""
        self._weighed = self._asked = None
        self._waits.clear()

    def on_not_seen(self, failed: LineageNotSeen) -> None:
        if failed.donor == self._weighed:
            self._weighed = None
        self._presence.pass_over(failed.donor)
        self._desk.emit(Note("info", f"the log of {failed.donor} does not show what it says of it: {failed.reason}"))

    def far_behind(self) -> FarBehind | None:
        """Nobody has what follows here any more: the state of who is furthest on leads further, if anybody is."""
        ahead = self._replica.furthest
        return self._far_behind(ahead) if ahead is not None else None

    def _far_behind(self, donor: str, common: int = 0) -> FarBehind:
        """A snapshot brings us further from some index on, and others still know what followed it.

        Of who is not further on, but heavier, one brings us further at any index. Archives know everything.
        """
        index, beat = self._replica.log.position.index, self._presence.live()[donor]
        known_from = 0 if beat.state is PeerState.ARCHIVING else beat.index - RECENT_ENTRIES // 2
        return FarBehind(donor, max(index + 1 if beat.index > index else common, known_from))
