"""The way of a peer to where others are: it replays the entries that were made without it, or takes another's state.

Heartbeats say where their peers are, and anybody may say anything. So what they claim makes a peer ask, and no more:
for the next entry, where the way is short, and else for the other one's log. It gives up what it trains, and its own
branch, when signatures have shown that the other one is better. It looks at others only while its own state is level,
and at one at a time.
"""

from __future__ import annotations

from typing import Protocol

from peers.log.certificate import CertificateError, prove
from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import RECENT_ENTRIES, Branch
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.context import Context, Repetition
from peers.protocol.effects import FetchLineage, Note, Send
from peers.protocol.events import LineageNotSeen, LineageSeen
from peers.protocol.internal import FarBehind, NobodyAhead, Owner, WorkEnds
from peers.protocol.messages import Certified, Inquire
from peers.protocol.minority import are_most, may_found
from peers.protocol.pacemaker import death
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.round import EntryRound
from peers.protocol.states import State
from peers.protocol.trainer import Trainer


class Host(Owner, Protocol):
    """What the rest of the peer does about it."""

    rounds: dict[int, EntryRound]

    @property
    def state(self) -> State:
        """What the peer is doing, in one word."""

    @property
    def notes_down(self) -> bool:
        """Whether the peer leaves, so that nothing new begins."""

    def open_rounds(self) -> None:
        """Begin with new rounds."""

    def open_round(self, fragment: int) -> EntryRound:
        """Return a new round for the fragment."""

    def turn(self) -> None:
        """Close the rounds whose entries are made."""

    def await_lease(self) -> None:
        """Note that there is something new to ask others for."""


class CatchingUp:
    """`search` finds out who is further on. `keeps_work` says whether what is trained goes into a later cycle than the
    one that is replayed."""

    def __init__(
        self,
        context: Context,
        presence: Presence,
        trainer: Trainer,
        replica: Replica,
        host: Host,
    ) -> None:
        self.search = Search(context, presence, replica)
        self.keeps_work = False
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._host = host

    @property
    def may_begin(self) -> bool:
        return self._replica.state is ReplicaState.LEVEL and not self._host.notes_down

    # Who is further on ----------------------------------------------------------------------------------------
    def look(self) -> None:
        """Ask a peer that claims to be further on, if there is one."""
        if self.may_begin:
            self.search.catch_up()

    def on_lineage(self, event: LineageSeen | LineageNotSeen) -> None:
        """Take in what another one's log is worth. Where we have a state to give up, it is given up now."""
        if isinstance(event, LineageNotSeen):
            self.search.on_not_seen(event)
            return
        context = self._context
        context.convict(context.evidence.observe_split(event.ours, event.theirs, self._replica.lineage))
        far = self.search.on_seen(event)
        if far is not None and self.may_begin:
            self._show_ours(event)
            self.fetch(far)

    def _show_ours(self, seen: LineageSeen) -> None:
        """Show the donor the certificates of the entries that we give up for its own: who has signed both branches is
        convicted there, too (R9)."""
        start, given_up = seen.ours.start, seen.ours.certificates if seen.theirs.splits_from(seen.ours) else ()
        for fragment in sorted(given_up):
            made = self._replica.lineage.after(start.of(fragment).position)
            if made is not None:
                self._context.emit(Send(seen.donor, Certified(header=made[0], certificate=made[1])))

    def on_elsewhere(self, sender: str) -> None:
        """Take in that our inquiry led nowhere: the sender is on another lineage than we are."""
        if self.may_begin and self._replica.claimant == sender:
            self.search.weigh(sender)

    # Entry after entry ----------------------------------------------------------------------------------------
    def replay(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Take in that others went on without us."""
        if not self.may_begin:
            return
        header, was_asked = certified.header, self._host.state is State.JOINING or round.was_asked(sender)
        proof = None
        if certified.certificate is not None:
            try:
                proof = prove(certified.certificate, round.log, header, self._context.keys.verify)
            except CertificateError:
                proof = None
        behind = self._replica.follow(sender, certified, proof, was_asked)
        if behind is None:
            if self._replica.claimant == sender and not (proof and proof.is_certified):
                self.search.weigh(sender)  # its log says whether others are on the same branch
            return
        if self._replica.log.is_closing(header):
            self.keeps_work = self._trainer.outlives(header)
            if not self.keeps_work:
                self._trainer.take(WorkEnds(self._replica.log.position, header))
            self._host.rounds[header.fragment] = self._host.open_round(header.fragment)
        self.search.answered()
        self._replica.take(behind)
        if header.payload == NO_PAYLOAD:
            self._host.entry_made(header, behind.certificate)

    def on_not_replayed(self, header: Header, reason: str) -> None:
        """Take in that no donor had an entry's payload."""
        self._context.emit(Note("info", f"no payload of entry {header.index}: {reason}"))
        far = self.search.far_behind()
        if far is not None:
            self.fetch(far)
        elif self._replica.log.is_closing(header):
            self.drop_work()
            self._replica.take(NobodyAhead())
            self._host.await_lease()
        else:  # its round goes on: a peer that has the entry tells us again
            self._replica.take(NobodyAhead())
            self._host.turn()

    # Another one's state --------------------------------------------------------------------------------------
    def check_state(self) -> None:
        """Take the state of most of the roster, where ours is another at the same place: a bit has flipped."""
        if not (self.may_begin and self._replica.is_settled):
            return
        most = self._replica.state_of_most
        if most is None or most == self._replica.state_digest:
            return
        donor = self._replica.donor_of(most)
        if donor is not None:
            self._context.emit(Note("error", f"our state is not that of most peers: fetching it from {donor}"))
            self.fetch_from(donor)

    def fetch_from(self, donor: str) -> None:
        """Take the state that a peer has where we are, or further on."""
        self.fetch(FarBehind(donor, self._replica.log.position.index))

    def fetch(self, far: FarBehind) -> None:
        self.drop_work()
        self._replica.take(far)

    def drop_work(self) -> None:
        """Go on without the work in hand. What we have voted in this cycle still binds us."""
        self._trainer.take(WorkEnds(self._replica.log.position))
        self.keeps_work = False
        self._host.open_rounds()


class Search:
    """Looks at one other peer at a time. `question` paces what is asked of it."""

    def __init__(self, context: Context, presence: Presence, replica: Replica) -> None:
        self.question = Repetition(context)
        self._context = context
        self._presence = presence
        self._replica = replica
        self._weighed: str | None = None
        self._asked: tuple[str, float] | None = None  # who was asked last, and when; None: it has answered
        self._place = replica.log.position
        self._waits: dict[str, float] = {}
        self._inquired = ""

    def inquire(self, log: LogState) -> None:
        """As a leader, ask the next member whether it has made this entry already. Of one fragment heartbeats do tell;
        of several they do not, and no peer says so that has no business with us any more."""
        others = sorted(peer for peer in self._presence.live() if peer in log.roster)
        if others and log.fragments > 1:
            self._inquired = next((peer for peer in others if peer > self._inquired), others[0])
            self._context.emit(Send(self._inquired, Inquire(position=log.position)))

    def was_asked(self, peer: str) -> bool:
        """Return whether we have asked the peer so last."""
        return peer == self._inquired

    def catch_up(self) -> None:
        """Ask who claims to be further on for the next entry, or for its log."""
        ahead = self._replica.claimant
        if ahead is None:
            return
        self.question.said()
        log = self._replica.log
        entries = self._presence.live()[ahead].index - log.position.index
        is_near = entries <= self._context.settings.snapshot_every or self._replica.has_snapshot
        is_astray = self._replica.contradiction is not None or self._replica.needs_signed_log
        if is_astray or not (entries > 0 and is_near):
            self.weigh(ahead)
        elif self._has_been_patient(ahead):
            self._pass_over(ahead)
        else:  # it is past our cycle, so that it has each of its entries: one after the other
            self._context.emit(Send(ahead, Inquire(position=log.of(log.pending[0]).position)))

    def _has_been_patient(self, peer: str) -> bool:
        """Ask a peer. Returns whether it has had time enough to tell what followed here. All of a cycle's fragments
        share that time: a peer that tells one after another, each at the last moment, would keep us behind. It is the
        peer's own, whoever else was asked meanwhile: two peers would be asked in turn for ever."""
        self._charge()
        if self._place != self._replica.log.position:
            self._place, self._waits = self._replica.log.position, {}
        self._asked = peer, self._context.now
        return self._waits.get(peer, 0.0) > death(self._context.settings.timing)

    def _pass_over(self, peer: str) -> None:
        """When its turn comes again, it has one question's time."""
        self._presence.branches.pass_over(peer)
        self._waits[peer], self._asked = death(self._context.settings.timing), None

    def answered(self) -> None:
        """Stop the clock while an entry is fetched and applied. The pause between two questions is forgiven."""
        self._charge(self._context.settings.timing.resend)
        self._asked = None

    def _charge(self, forgiven: float = 0.0) -> None:
        """Whoever was asked last has let us wait since then. We ask at each beat: in a longer pause nobody claimed to
        be further on."""
        if self._asked is not None:
            peer, since = self._asked
            waited = min(self._context.now - since, 2 * self._context.settings.timing.heartbeat)
            met = self._presence.membership.met
            self._waits = {one: seconds for one, seconds in self._waits.items() if one in met}
            self._waits[peer] = self._waits.get(peer, 0.0) + max(0.0, waited - forgiven)

    def weigh(self, peer: str) -> None:
        """Have its log fetched, and compared with ours. Training goes on meanwhile."""
        if self._weighed is None:
            self._weighed = peer
            others = tuple(sorted(self._presence.branches.donors() - {peer}))
            self._context.emit(FetchLineage(peer, self._presence.live()[peer].index, others))

    def on_seen(self, seen: LineageSeen) -> FarBehind | None:
        """What is returned leads to where the other one's branch does, if that is to be ours."""
        if seen.donor != self._weighed:
            return None  # we have gone elsewhere meanwhile
        self._weighed = None
        theirs = self.believed(seen.theirs, seen.ours)
        is_better = theirs is not None and (theirs.splits_from(seen.ours) or theirs.is_better_than(seen.ours))
        if theirs is None or not is_better or not self._presence.is_live(seen.donor):
            self._presence.branches.pass_over(seen.donor)
            return None
        head = self._replica.contradiction
        why = f" with outer step {head.index} as the archive {head.archive} has signed it" if head is not None else ""
        self._context.emit(Note("info", f"{seen.donor} is at {theirs.end.position.index}{why}: fetching a snapshot"))
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
        if may_be_founding and not may_found(self._context, self._presence, founders or 0):
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
            are_more = self._presence.branches.are_more_there(theirs, log, self._replica.lineage)
            if are_more is not None:
                return theirs if are_more and theirs.is_certified else None
        return theirs if theirs.is_better_than(ours) else None

    def _is_followed(self, doubt: LogState, branch: Branch) -> bool | None:
        """Whether to believe what too few have made of a place; None: it is to be looked at again."""
        if self._presence.are_all_gone(doubt):
            return True
        if not (are_most(doubt, branch.end.roster) or self._context.settings.goes_on_alone):
            return False
        elsewhere = self._presence.branches.are_most_elsewhere(doubt, branch, self._context.incarnation)
        return None if elsewhere is None else not elsewhere

    def forget(self) -> None:
        """We are elsewhere in the log: what another one's is worth here does not matter any more."""
        self._weighed = self._asked = None
        self._waits.clear()

    def on_not_seen(self, failed: LineageNotSeen) -> None:
        if failed.donor == self._weighed:
            self._weighed = None
        self._presence.branches.pass_over(failed.donor)
        self._context.emit(Note("info", f"the log of {failed.donor} does not show what it says of it: {failed.reason}"))

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
