"""This peer's part in making the entry at one position, as a state machine: open, ready, exchanging, decided.

There is one EntryRound for each cycle and fragment, from when the peer reaches the cycle until the entry is made or its
work is dropped. It exists while the peer still trains, too, since the peer may vote and lead.

Exchange and vote are separate. Data that the exchange loses is absent, and the vote decides the outcome, so this code
never asks why a message did not arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from peers.log.certificate import Ballot, Phase, electorate
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogError, LogState
from peers.messages.averages import Averaged
from peers.messages.messages import Begin, Certified, Propose, Vote, Want
from peers.messages.rounds import Round
from peers.presence.presence import Presence
from peers.protocol.attendance import Attendance
from peers.protocol.awaited import late
from peers.protocol.context import Context
from peers.protocol.contributions import Contributions
from peers.protocol.effects import Dropped, FetchPayload, Note, Send
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    ReducedArrived,
    Tick,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.internal import Host, WorkDone
from peers.protocol.leader import Leader
from peers.protocol.own_work import Objection, OwnWork
from peers.protocol.pacemaker import Pacemaker, death
from peers.protocol.replica import Replica
from peers.protocol.state_machine import Row, StateMachine, Table
from peers.protocol.trainer import Trainer
from peers.protocol.views import Views
from peers.protocol.voter import Voter, choice_of
from peers.protocol.voting import FIRST, Refusal
from peers.protocol.weights import weights_of

STALLED = 3.0
"""Multiple of the pause between repeated messages without data of a decided payload after which the whole payload is
fetched."""


class RoundState(StrEnum):
    OPEN = "open"
    READY = "ready"
    EXCHANGING = "exchanging"
    DECIDED = "decided"


OPEN, READY, EXCHANGING, DECIDED = RoundState
COMMITTED: dict[StrEnum, str] = {DECIDED: "the entry is committed"}
VOTES: dict[type, Row] = {
    Propose: Row("_propose", COMMITTED),
    Vote: Row("_vote", COMMITTED),
    Certified: Row("_certified", COMMITTED),
    PayloadFetched: Row("_fetched", COMMITTED),
    PayloadNotFetched: Row("_not_fetched"),
}
"""Messages of the vote: a voter takes them in every state, even while it trains or is in no exchange."""
DATA: dict[type, Row] = {event: Row("_exchanged", COMMITTED) for event in ExchangeEvent.__args__} | {Want: Row("_want")}
LATE_DATA: dict[type, Row] = {event: Row(row.method) for event, row in DATA.items()}
"""The rows of DATA once the entry is decided, without changes of state."""


@dataclass
class MissingPayload:
    """A payload that could not be fetched, with the time in seconds of the first failure, and the number of tries."""

    payload: bytes
    first_failed_at: float
    tries: int = 0

    def pause(self, shortest: float, longest: float) -> float:
        """Return the seconds until the next try to fetch the payload, doubled after each try, up to `longest`."""
        return min(shortest * 2.0 ** (self.tries - 1), longest)


@dataclass
class Notes:
    """The events at a round's position so far, as this peer saw them: proposals, payloads and their times."""

    moved_at: float
    """The time at which the last chunk arrived."""
    began_at: float = 0.0
    begun: Ballot = FIRST
    heard: frozenset[tuple[str, int]] = frozenset()
    """The peers, with their incarnations, that were heard when this peer entered the round."""
    views: set[int] = field(default_factory=set)
    """The views in which this peer's round was begun or continued."""
    propose: Propose | None = None
    objection: Objection | None = None
    """This peer's objection to `propose`."""
    fetched: set[bytes] = field(default_factory=set)
    """Payloads of proposals that were fetched as a whole."""
    unkept: set[bytes] = field(default_factory=set)
    """Payloads that are not on the disk, so that this peer does not vote for them (R10)."""
    fetching: bytes | None = None
    """The payload that is being fetched."""
    asked_at: float = -math.inf
    """The time at which a payload was last requested."""
    lacking: MissingPayload | None = None
    """A payload of a prepared header that could not be fetched."""
    decided: Certified | None = None
    decided_at: float = 0.0
    source: str = ""
    """The sender of `propose`, or of `decided` once that is set."""


class EntryRound(StateMachine):
    """One peer's part in the making of the entry at one position. Only this peer's votes outlast the round, in the
    voting record; all else is dropped when the peer moves to another position."""

    TABLE: ClassVar[Table] = {
        OPEN: {
            Tick: Row("_watch", COMMITTED),
            WorkDone: Row("_be_ready", {READY: "inner steps are done"}),
        }
        | VOTES,
        READY: {
            Tick: Row("_keep_ready", COMMITTED),
            Begin: Row("_begin", {EXCHANGING: "the leader begins"} | COMMITTED),
        }
        | VOTES
        | DATA,
        EXCHANGING: {
            Tick: Row("_keep_exchanging", COMMITTED | {READY: "the view is over"}),
            Begin: Row("_begin", COMMITTED),
        }
        | VOTES
        | DATA,
        DECIDED: {Tick: Row("_await_payload")} | LATE_DATA,
    }
    EXACT = frozenset({WorkDone})
    state: RoundState

    def __init__(
        self, context: Context, presence: Presence, trainer: Trainer, replica: Replica, fragment: int, host: Host
    ) -> None:
        super().__init__(OPEN)
        self.log = replica.log.of(fragment)
        self.exchange: Exchange | None = None
        self.views = Views(context, presence, self.log)
        self.voter = Voter(context, presence, replica, self.log)
        self.leader = Leader(context, presence, trainer, replica, self)
        self._context = context
        self._presence = presence
        self._replica = replica
        self._host = host
        self._work = OwnWork(context, presence, trainer, self.log)
        self._notes = Notes(context.now)
        self.look()

    @property
    def is_taking_part(self) -> bool:
        return self.state in (READY, EXCHANGING)

    @property
    def is_decided(self) -> bool:
        """True if the entry is committed, even if this peer still waits for its payload."""
        return self.state is DECIDED

    @property
    def is_exchanging(self) -> bool:
        """True if this peer is in an exchange, or waits for the payload of a committed entry."""
        return self.state in (EXCHANGING, DECIDED)

    @property
    def is_fresh(self) -> bool:
        """True if this peer may continue its round as a new leader: another peer has led it, in only one view."""
        is_ours = self.exchange is not None and self.exchange.name.leader == self._context.me
        return len(self._notes.views) == 1 and not is_ours

    @property
    def pacemaker(self) -> Pacemaker:
        return self.views.pacemaker

    @property
    def attendance(self) -> Attendance:
        return self.views.attendance

    @property
    def led_by(self) -> str | None:
        """The leader of this peer's view; None if it is unknown."""
        return self.pacemaker.leader

    @property
    def is_led_by_us(self) -> bool:
        return self.pacemaker.leader == self._context.me

    @property
    def here(self) -> LogState:
        """The log before the entry, with the digest of this peer's state."""
        return self.voter.here

    def granted(self, leader: str) -> None:
        """Record that `leader` has just granted this peer its lease."""
        self.views.granted_by = leader, self._context.now
        self.look()

    @property
    def granted_by(self) -> str | None:
        """The peer that granted this peer its lease at this position; None if no peer did."""
        return self.views.granted_by[0] if self.views.granted_by else None

    def was_asked(self, peer: str) -> bool:
        """Return True if `peer` is the leader to which this peer sends its Ready. This peer then accepts an entry from
        it, even if its last heartbeat does not show that it is ahead."""
        return self.is_taking_part and peer == self.pacemaker.leader

    # The view -------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Update the peers that work on this entry, this peer's view, and the view's leader, from the time and from the
        other peers' heartbeats and Readys."""
        readiness = self.leader.readiness
        self.views.look(self._work, self.is_taking_part, self._replica, readiness.views(), readiness.has_granted)

    def leader_of(self, view: int) -> str | None:
        """Return the leader of a view; None if it is unknown."""
        return self.views.leader_of(view)

    def _watch(self, _: Tick) -> None:
        self.look()
        self._consider()

    # Ready ----------------------------------------------------------------------------------------------------
    def _be_ready(self, done: WorkDone) -> None:
        self._work.make(done.trained)
        self._enter(READY)
        self.look()
        self._work.repetition.at_once()
        self.say_ready()

    def say_ready(self) -> None:
        """Send Ready, this peer's last votes and proofs of faults to the view's leader. Send the same again only after
        the pause between repeated messages."""
        leader = self.pacemaker.leader
        if not self._replica.is_settled or leader is None or not self._work.repetition.is_due:
            return
        self._work.repetition.sent()
        context, evidence, lineage = self._context, self._context.evidence, self._replica.lineage
        propose, objection = self._notes.propose, self._notes.objection
        refused = propose.ballot if propose and objection else None
        state, view = self._replica.state_digest, self.pacemaker.view
        ready = self._work.ready(state, view, self.exchange, self.voter, refused, objection)
        context.emit(Send(leader, ready))
        self.voter.repeat(leader)
        if leader == context.me:
            self._host.inquire(self)
        else:
            faults = evidence.provable(self.log, lineage, (context.me,))
            shown = evidence.show(leader, faults, self.log.position, context.now, again=True)
            context.emit(*(Send(leader, proof) for proof in shown))

    def _keep_ready(self, _: Tick) -> None:
        before = self.pacemaker.leader
        self.look()
        if self.pacemaker.leader != before:
            self._work.repetition.at_once()
        self._go_on_without_the_entry()
        self._go_on()

    def _go_on_without_the_entry(self) -> None:
        """Become a new incarnation without votes (R10) if the voting record says that this entry is certified, but this
        peer has been ready for the partition grace and hears no peer that has the entry, as after power failures."""
        state, since, context = self.voter.state, self._work.since, self._context
        if state is None or not state.is_closed or since is None or self._replica.is_behind:
            return
        if context.now - since > context.settings.timing.partition_grace:
            text = f"no peer has the certified entry of outer step {self.log.position.index} any more: it is made anew"
            context.emit(Note("warning", text))
            context.votes.begin_anew()

    def _keep_exchanging(self, _: Tick) -> None:
        before = self.pacemaker.view
        self.look()
        if self.pacemaker.view != before:
            self._work.repetition.at_once()
            self._enter(READY)
            self._go_on()
            self._host.leave_if_possible()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Send data again that may be lost, vote on the proposal if that is possible now, and repeat Part and Ready."""
        if self.exchange is not None:
            self._context.emit(*self.exchange.tick(self._context.now, self._heard()))
        self._consider()
        if self.state is not DECIDED and self._work.repetition.is_due:
            self._send_part()
            self.say_ready()

    def _heard(self) -> set[str]:
        return {self._context.me, *self._presence.live()}

    # The exchange ---------------------------------------------------------------------------------------------
    def _begin(self, begin: Begin, sender: str) -> None:
        """Enter the round that the leader of this peer's view begins, or continue the round in a later ballot."""
        notes, round = self._notes, begin.round
        if sender != self.pacemaker.leader or begin.ballot.view != self.pacemaker.view or begin.ballot < notes.begun:
            return
        seconds = min(begin.seconds, self._context.settings.timing.round_timeout)
        if self.exchange is not None and self.exchange.name == round.name:
            if self.exchange.round != round:
                self._context.emit(Dropped(sender, "begin", "it goes on with a different round of the same name"))
                return
            if not self._work.is_stated_by(begin):
                return
            if begin.ballot != notes.begun:
                known = self._contributions(begin)
                self._context.emit(*self.exchange.go_on(begin.heirs, seconds, self._context.now, known))
        elif not self._join(begin, sender, seconds):
            return
        notes.begun = begin.ballot
        notes.views.add(begin.ballot.view)
        if notes.propose is not None and notes.propose.ballot < begin.ballot:
            notes.propose = notes.objection = None  # the leader has withdrawn the proposal: other averages will follow
        self.pacemaker.begun(seconds)
        if self.state is READY:
            self._enter(EXCHANGING)
        self._consider()
        self._send_part()

    def _join(self, begin: Begin, sender: str, seconds: float) -> bool:
        """Enter a new round, and send this peer's blocks. Return True; or False if the Begin is not acceptable."""
        round, notes = begin.round, self._notes
        if not self._work.is_taken_by(round):
            return False
        if round.group and not self.attendance.joins(round.group):
            return False
        if not self._can_lead_to_an_entry(round, sender):
            self._context.emit(Dropped(sender, "begin", "its round cannot lead to an entry"))
            return False
        if not self._work.is_stated_by(begin):
            self._context.emit(Dropped(sender, "begin", "it does not have the commitments that this peer needs"))
            return False
        context = self._context
        if not context.votes.enter(self.log.position, round.name.ballot):
            return False
        notes.views.clear()
        notes.began_at = notes.moved_at = context.now
        notes.heard = self._heard_incarnations()
        least = min(context.settings.timing.heartbeat_expiry, context.settings.timing.round_timeout)
        context.round_times.allowed[self.log.fragment] = max(seconds, least)
        self._presence.reachability.round_begins(self.log.fragment)
        resend, contributions = context.settings.timing.resend, self._contributions(begin)
        delayed = late(self.log, context.settings)
        self.exchange = Exchange(context.me, round, contributions, context.keys, context.now, seconds, resend, delayed)
        context.emit(*self.exchange.open())
        if begin.heirs:
            context.emit(*self.exchange.go_on(begin.heirs, seconds, context.now))
        return True

    def _can_lead_to_an_entry(self, round: Round, leader: str) -> bool:
        """Return True if the log allows an entry with the round's roster, the run has the members' formats, and the
        reducers average all chunks of the payload."""
        try:
            # The payload's digest is not known yet, and does not matter here: the log's head is passed in its place.
            round.entry(self.log, {}, self.log.position.head, leader if self.log.closes else None)
        except LogError:
            return False
        reducers = {share.member.peer for share in round.shares if share.chunks}
        size = self._context.payloads[self.log.fragment].size
        if not all(size.has(member.format) for member in round.roster):
            return False
        return round.chunks == size.chunks and reducers <= {member.peer for member in round.contributors}

    def _contributions(self, begin: Begin) -> Contributions:
        """Return the contributions in a Begin, with their weights and this peer's signature of its own contribution."""
        ours, settings = self._work.commitment(), self._context.settings
        weights = weights_of(begin.round.contributors, self.log, settings)
        return Contributions.of(begin, settings.clip, weights, ours.signature if ours else None)

    def _send_part(self) -> None:
        """Send the leader this peer's signed averages once all of them are made, unless the leader has already proposed
        a header of this round."""
        leader, propose = self.pacemaker.leader, self._notes.propose
        if self.exchange is None or leader is None:
            return
        if propose is not None and propose.ballot.view == self.pacemaker.view and propose.round == self.exchange.name:
            return
        part = self.exchange.part()
        if part is not None:
            self._context.emit(Send(leader, part))

    def _exchanged(self, event: ExchangeEvent) -> None:
        """Let the exchange handle an event, after recording a failed link or the proof of a lie that it shows."""
        exchange, context = self.exchange, self._context
        if exchange is None or event.round_name != exchange.name:
            return
        had_part = exchange.part() is not None
        if isinstance(event, ReducedArrived):
            self._notes.moved_at = context.now
        if isinstance(event, ChunksUnsent) and self._presence.is_live(event.peer):
            self._presence.reachability.failed(event.peer, context.now, self.log.fragment)
        elif isinstance(event, ChunkSent):
            self._presence.reachability.passed(event.peer)
        elif isinstance(event, BadBlocks):
            self._observe_blocks(event, exchange)
        elif isinstance(event, ReducedArrived) and event.origin is not None:
            averaged = Averaged(chunk=event.chunk, digest=event.digest, absent=event.absent, origin=event.origin)
            context.convict(context.evidence.observe_average(exchange.round, averaged, self._replica.lineage))
        context.emit(*exchange.handle(event))
        if not had_part and self.state is not DECIDED:
            self._send_part()
        if isinstance(event, PayloadAssembled):
            self._note_trouble(event.digest, event.trouble)
            self._await_payload() if self.state is DECIDED else self._consider()

    def _observe_blocks(self, bad: BadBlocks, exchange: Exchange) -> None:
        context = self._context
        context.emit(Dropped(bad.sender, "average" if bad.reduced else "contribution", bad.reason))
        if bad.reduced:
            self.leader.drop_reducer(bad.sender)
        members = {member.peer: member for member in exchange.round.contributors}
        if bad.evidence is not None and bad.sender in members:
            author = exchange.round.author(members[bad.sender], bad.evidence.commitment)
            context.convict(context.evidence.observe_blocks(author, bad.evidence, self._replica.lineage))

    def _want(self, want: Want, sender: str) -> None:
        if self.exchange is not None:
            self._context.emit(*self.exchange.hear(sender, want))

    # Vote 1 ---------------------------------------------------------------------------------------------------
    def _propose(self, propose: Propose, sender: str) -> None:
        """Store a proposal of the leader of this or an earlier view, if it is the newest. Vote on it if possible."""
        known, view = self._notes.propose, propose.ballot.view
        if view > self.pacemaker.view or sender != self.leader_of(view) or (known and propose.ballot < known.ballot):
            return
        if view == self.pacemaker.view:
            self.pacemaker.begun(0.0)
        if known is None or known.ballot != propose.ballot:
            self._notes.objection = None
        else:
            self.voter.repeat(sender)
        self._notes.propose, self._notes.source = propose, sender
        self._consider()

    def _consider(self) -> None:
        """Give vote 1 for the newest proposal if possible; otherwise tell the leader this peer's objection."""
        propose, notes = self._notes.propose, self._notes
        if propose is None or self.state is DECIDED:
            return
        objection = self._objection(propose)
        refusal = self.voter.prepare(propose, notes.source, objection.refusal if objection else None)
        if refusal is None:
            self.pacemaker.voted(propose.ballot.view)
            notes.objection = notes.lacking = None
        elif (new := replace(objection or Objection(refusal), refusal=refusal)) != notes.objection:
            notes.objection = new
            if refusal is not Refusal.NO_PAYLOAD and self.is_taking_part:
                self._work.repetition.at_once()
                self.say_ready()
        for certified in self.voter.recount(propose.choice):
            self._is_certified(certified, self._context.me)

    def _objection(self, propose: Propose) -> Objection | None:
        """Return this peer's objection to a proposal by the rules R5.5 to R5.11; None if it has none."""
        header, group = propose.header, propose.group
        if group and not self.attendance.joins(group):
            return Objection(Refusal.NOT_ALONE, named=self.attendance.left_out(group))
        if propose.justify is not None:
            is_kept = self._has_payload(header) and header.payload not in self._notes.unkept
            return None if is_kept else Objection(self._look_for_payload(propose))
        if (objection := self._objection_to_data(propose)) is not None:
            return objection
        if self.log.closes and header.leader != self._notes.source:
            return Objection(Refusal.DOES_NOT_FOLLOW)
        taken_in = self.log.taken_in(header)
        if taken_in is not None and self._context.settings.why_not_followed(taken_in):
            return Objection(Refusal.NOT_FOLLOWED)
        if not group and (heard := self._forgotten(header)):
            return Objection(Refusal.NOT_GONE, named=heard)
        if strangers := self._strangers(header):
            return Objection(Refusal.STRANGER, named=strangers)
        unproven = self._context.evidence.missing_proofs(header.faults, self._replica.lineage)[:16]
        return Objection(Refusal.UNPROVEN_FAULT, unproven=unproven) if unproven else None

    def _objection_to_data(self, propose: Propose) -> Objection | None:
        """Return this peer's objection to a proposal's payload (R5.5, R5.6, R5.9); None if it has none."""
        header, exchange, log = propose.header, self.exchange, self.here
        if header.payload == NO_PAYLOAD:
            has_work = self._work.trained is not None and self._work.trained.tokens > 0
            return Objection(Refusal.HAS_WORK) if has_work and not self.log.closes else None
        if exchange is None or propose.round != exchange.name:
            return Objection(Refusal.NO_PAYLOAD)
        self._context.emit(*exchange.proposed(propose.marks))
        if exchange.payload != header.payload or header.payload in self._notes.unkept:
            return Objection(Refusal.NO_PAYLOAD, lacking=exchange.lacking())
        if not exchange.round.counts_enough(exchange.absent(), propose.ballot.view, len(log.ring)):
            return Objection(Refusal.MOST_ABSENT)
        besides = header.leader, header.faults, log.gone_in(header), log.taken_in(header)
        try:
            expected = exchange.round.entry(log, exchange.absent(), header.payload, *besides)
        except LogError:
            return Objection(Refusal.DOES_NOT_FOLLOW)
        return None if expected == header else Objection(Refusal.UNSIGNED_AVERAGE)

    def _forgotten(self, header: Header) -> tuple[str, ...]:
        """Return the voters that this peer hears, but that would lose their vote because the header calls them gone or
        names another incarnation of them (R12)."""
        if not self.log.closes or not self.log.voters:
            return ()
        expiry = self._context.settings.timing.heartbeat_expiry
        here = self._presence.voters_here(self.log, self._context.incarnation, expiry)
        others = {one.peer for one in header.roster if not self.log.counts(one.peer, one.incarnation)}
        return tuple(sorted(here & {*self.log.gone_in(header), *others}))

    def _strangers(self, header: Header) -> tuple[str, ...]:
        """Return the members that would become voters or serve probation by this entry, and that this peer has not
        heard since it entered the round: a leader may have invented them (R5.7). Founders need not hear each other."""
        if not self.log.closes or self.log.last is None:
            return ()
        known = self.log.voter_incarnations.items() | self._notes.heard | self._heard_incarnations()
        return tuple(one.peer for one in header.roster if (one.peer, one.incarnation) not in known)

    def _heard_incarnations(self) -> frozenset[tuple[str, int]]:
        live = self._presence.live()
        return frozenset(
            {(self._context.me, self._context.incarnation), *((one, live[one].incarnation) for one in live)}
        )

    def _has_payload(self, header: Header) -> bool:
        is_here = self.exchange is not None and self.exchange.payload == header.payload
        return is_here or header.payload == NO_PAYLOAD or header.payload in self._notes.fetched

    def _look_for_payload(self, propose: Propose) -> Refusal:
        """Fetch a prepared header's payload from its voters, and return the refusal for now. If this peer is locked on
        the header, and no peer has had the payload for the partition grace, give up this peer's vote."""
        context, notes, justify = self._context, self._notes, propose.justify
        assert justify is not None
        # For a proposal to the whole run, do not fetch a payload that only a minority prepared: one liar alone could
        # call itself a minority, and fill this disk.
        is_foreign = justify.choice.alone and not propose.group
        if is_foreign or not self.voter.place.is_prepared(propose.header, justify):
            return Refusal.NO_PAYLOAD
        timing, lock, payload = context.settings.timing, self.voter.lock, propose.header.payload
        if notes.fetching == payload:
            return Refusal.NO_PAYLOAD
        lacking = notes.lacking if notes.lacking and notes.lacking.payload == payload else None
        if lacking is None or context.now - notes.asked_at >= lacking.pause(timing.resend, timing.heartbeat_expiry):
            self._fetch(propose)
        is_bound = lock is not None and lock.header == propose.header
        if is_bound and lacking is not None and context.now - lacking.first_failed_at > timing.partition_grace:
            text = f"no peer has the payload of outer step {propose.header.index}: this peer gives up its vote"
            context.emit(Note("warning", text))
            context.votes.begin_anew()
            notes.lacking = None
        return Refusal.NO_PAYLOAD

    def _fetch(self, propose: Propose) -> None:
        header, justify = propose.header, propose.justify
        assert justify is not None
        voters = electorate(self.log, header, justify.group).voters
        signers = [voters[signer.place][0] for signer in justify.signers]
        donors = dict.fromkeys(peer for peer in (self._notes.source, *signers) if self._presence.is_live(peer))
        self._notes.fetching, self._notes.asked_at = header.payload, self._context.now
        self._context.emit(FetchPayload(header, tuple(donors)))

    def _fetched(self, fetched: PayloadFetched) -> None:
        self._notes.fetched.add(fetched.header.payload)
        self._notes.fetching = None
        self._note_trouble(fetched.header.payload, fetched.trouble)
        self._consider()

    def _note_trouble(self, payload: bytes, trouble: str) -> None:
        """Record whether a payload is on the disk. `trouble` is the reason why it is not; empty if it is."""
        self._notes.unkept.discard(payload)
        if trouble:
            self._notes.unkept.add(payload)
            self._context.votes.fail(trouble)

    def _not_fetched(self, failed: PayloadNotFetched) -> None:
        """Record that a payload could not be fetched. `_look_for_payload` tries again, and in the end may give up this
        peer's vote (R10)."""
        notes, payload = self._notes, failed.header.payload
        self._context.emit(Note("info", f"could not fetch the payload of entry {failed.header.index}: {failed.reason}"))
        notes.fetching = None if notes.fetching == payload else notes.fetching
        if notes.lacking is None or notes.lacking.payload != payload:
            notes.lacking = MissingPayload(payload, self._context.now)
        notes.lacking.tries += 1

    # Vote 2 and the entry ---------------------------------------------------------------------------------------
    def _vote(self, vote: Vote, sender: str) -> None:
        """Count a vote, and act on a certificate that it completes. Answer a repeated vote 1 with the prepare
        certificate, if there is one."""
        ballot, phase = vote.choice.ballot, vote.choice.phase
        is_repeated = self.voter.voted_in(sender, ballot, phase)
        certified = self.voter.hear(sender, vote)
        prepared = self.voter.prepared
        if certified is not None:
            self._is_certified(certified, self._context.me)
        elif (
            is_repeated
            and phase is Phase.PREPARE
            and sender != self._context.me
            and prepared is not None
            and choice_of(prepared).ballot == ballot
            and self.voter.answers.is_due(sender, ballot)
        ):
            self._context.emit(Send(sender, prepared))

    def _certified(self, certified: Certified, sender: str) -> None:
        """Check a certificate that another peer has sent. If it is valid, act on its header."""
        certificate = certified.certificate
        if certificate is None:
            self._host.others_made(certified, sender, self)
        elif certificate.choice.phase is Phase.COMMIT:
            if self.voter.proves(certified, sender):
                self._is_certified(certified, sender)
        elif certificate.group and not self.attendance.joins(certificate.group):
            self._context.emit(Dropped(sender, "certificate", "this peer does not join that minority"))
        elif self.voter.is_prepared(certified):
            self._is_certified(certified, sender)
        else:
            self._context.emit(Dropped(sender, "certificate", "it is no valid prepare certificate of this header"))

    def _is_certified(self, certified: Certified, sender: str) -> None:
        """Forward the header's certificate. Give vote 2 if it is a prepare certificate; otherwise treat the
        header as committed."""
        if self.state is DECIDED:
            return
        context, choice = self._context, choice_of(certified)
        context.convict(context.evidence.observe_certified(certified, self.log, self._replica.lineage))
        if choice.phase is Phase.COMMIT:
            # A minority's commit certificate counts only if this peer has given vote 2 for the same choice.
            is_ours = not choice.alone or self.voter.has_committed(choice)
            is_news = is_ours and self._replica.replaying != certified.header
        else:
            is_news = self.voter.is_news(choice)
        if is_news:
            self.voter.pass_on(certified, self.leader_of(choice.ballot.view), self.leader.asked)
        if choice.phase is Phase.COMMIT:
            self._is_committed(certified, sender)
            return
        leader = self.leader_of(choice.ballot.view) or sender
        if self.voter.commit(certified, leader):
            self.pacemaker.voted(choice.ballot.view)
        for known in self.voter.recount(choice):
            self._is_certified(known, context.me)

    def _is_committed(self, certified: Certified, sender: str) -> None:
        """Append a committed entry to the log if this peer has the payload, or wait while the exchange can still
        complete the payload. Otherwise fetch the payload from other peers."""
        header, notes = certified.header, self._notes
        assert certified.certificate is not None
        is_ours = self.voter.has_committed(certified.certificate.choice)
        if not is_ours and (certified.certificate.choice.alone or self.log.last is None):
            self._host.others_made(certified, sender, self)
        elif self._has_payload(header):
            self._make(certified)
        elif self.is_taking_part and notes.propose is not None and notes.propose.header == header and self.exchange:
            notes.decided, notes.source = certified, sender
            notes.decided_at = notes.moved_at = self._context.now
            self._enter(DECIDED)
        else:
            self._host.others_made(certified, sender, self)

    def _await_payload(self, _: Tick | None = None) -> None:
        """Append the committed entry to the log once the exchange has the payload. If no chunk arrives for a while, or
        the payload is incomplete after the death time, fetch the payload from other peers."""
        notes, context = self._notes, self._context
        if notes.decided is None:
            return
        if self._has_payload(notes.decided.header):
            certified, notes.decided = notes.decided, None
            self._make(certified)
            return
        if self.exchange is not None:
            context.emit(*self.exchange.tick(context.now, self._heard()))
        timing = context.settings.timing
        is_still = context.now - notes.moved_at > STALLED * timing.resend
        if is_still or context.now - notes.decided_at > death(timing):
            notes.decided_at = notes.moved_at = context.now
            self._host.others_made(notes.decided, notes.source, self)

    def _make(self, certified: Certified) -> None:
        """Pass the committed entry to the peer's other parts, and record the round's duration."""
        if self.state is not DECIDED:
            self._enter(DECIDED)
        if self._notes.began_at:
            self._context.round_times.note(self._context.now - self._notes.began_at)
        self.leader.readiness.entry_made(certified.header)
        self._host.entry_made(certified.header, certified.certificate)
