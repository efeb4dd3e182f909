"""One peer of a run, without any I/O: its driver passes events in and carries out the effects. Begin reading at this
module.

A driver calls `handle` with an event and the time on its clock, and carries out the effects that it returns; the real
driver and the simulated one use the same interface. Each event goes to one of a peer's parts:

    Presence    the peers that are heard, reached and further on
    Trainer     the lease that this peer trains, and whether the work counts
    Replica     the place in the log of this peer's copy of the state, and its next move
    EntryRound  this peer's part in making the next entry; its `leader` is its part when it leads

step_cycle.py has the consequences that a change of one part has for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peers.audit.evidence import FalseProofError
from peers.errors import LocalProtocolError
from peers.log.header import Position
from peers.log.lineage import Branch, Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.messages.messages import (
    Begin,
    Certified,
    Elsewhere,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Part,
    Proof,
    Propose,
    Ready,
    Refuse,
    Unread,
    Vote,
    Want,
)
from peers.messages.rounds import RoundName
from peers.presence.membership import Membership
from peers.presence.presence import Presence
from peers.protocol.abstention import Abstention
from peers.protocol.context import Context
from peers.protocol.effects import Dropped, Effect, Note
from peers.protocol.events import (
    AmendmentSeen,
    Applied,
    AverageRefuted,
    Captured,
    Digested,
    Event,
    HeadsSeen,
    HeartbeatsSeen,
    LeaveRequested,
    LineageNotSeen,
    LineageSeen,
    NothingToTrain,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    Received,
    SignedHeadsSeen,
    SnapshotFailed,
    SnapshotRestored,
    Tick,
    TrainingDone,
    TrainingProgress,
    Undelivered,
    VotesKept,
    VotesNotKept,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.hindrance import Hindrances
from peers.protocol.planning import seconds_to_send
from peers.protocol.replica import Replica
from peers.protocol.round import EntryRound
from peers.protocol.states import State
from peers.protocol.step_cycle import StepCycle
from peers.protocol.trainer import Trainer
from peers.protocol.voting import VotingRecord
from peers.values.identity import Keys
from peers.values.manifest import Amendment
from peers.values.workload import PayloadKind

SETTLED = Certified | Elsewhere | Refuse | LeaseGrant | Vote
"""Messages that need no answer if they are about another position. A voter that still waits for the entry sends Ready,
or asks."""


class Peer:
    """The protocol of one peer: a driver passes it events, and carries out the effects that it returns."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payloads: Sequence[PayloadKind],
        state_digest: bytes,
        now: float,
        start: int,
        keys: Keys,
        lineage: Lineage | None = None,
        record: VotingRecord | None = None,
    ) -> None:
        """Args:
        payloads: one kind of payload for each fragment.
        start: the number of this start of the process; no earlier start of this peer had it.
        lineage: the log up to the present theta and momentum; None before the first entry.
        record: the votes of earlier starts (R10).
        """
        self.me = me
        self.settings = settings
        self.start = start
        self._context = Context(me, settings, payloads, now, start, keys, record)
        self._cycle = StepCycle(self._context, state_digest, lineage or Lineage(settings.empty_log))
        self.presence: Presence = self._cycle.presence
        self.trainer: Trainer = self._cycle.trainer
        self.replica: Replica = self._cycle.replica
        self.hindrances: Hindrances = self._cycle.hindrances
        self._abstention = Abstention(self._context, self.presence, self.trainer, self.replica, self.hindrances)

    def seconds_to_send(self, fragment: int) -> float:
        """Return the seconds within which this peer should send its blocks of a fragment, so that no other member waits
        for them."""
        context = self._context
        overlap = context.pace.overlap_seconds(self.trainer.speed)
        return seconds_to_send(context.round_times.allowed.get(fragment), self.settings.timing, overlap)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at the time `now` (seconds, monotonic), and return the effects to carry out.

        Raises:
            LocalProtocolError: the event is illegal in the present state.
        """
        self._context.now = self.presence.now = now
        events = self._context.events
        events.append(event)
        while events:
            happened = events.popleft()
            if not self._cycle.has_left:
                self._happens(happened)
        return self._context.take_effects()

    def _happens(self, event: Event) -> None:
        cycle = self._cycle
        match event:
            case Received(sender, message):  # matched first, since it is the most frequent event
                self.membership.heard_from(sender, self._context.now)
                self._receive(sender, message)
            case Tick():
                cycle.tick()
            case _ if isinstance(event, ExchangeEvent):
                self._take(event.round_name.position.fragment, event)
            case HeartbeatsSeen(heartbeats, silences, unheard):
                self.membership.observe(heartbeats, self._context.now, silences)
                self.presence.unheard = unheard
                cycle.hear_amendments(known for beat in heartbeats for known in (beat.amendment, beat.proposed))
                cycle.on_heartbeats()
                self._abstention.look(self.rounds.values())
            case SignedHeadsSeen():
                self.replica.hear_signed(event)
            case AmendmentSeen(amendment):
                cycle.hear_amendments([amendment])
            case HeadsSeen(index, heads):
                self.lineage.recall(index, heads)
            case ReachSeen(reach, rates, sought):
                if self.presence.reachability.observe(reach, rates, sought):
                    cycle.look_for_hindrance()
            case AverageRefuted(name, reducer, chunk):  # only a warning, since other peers cannot check the average
                self._context.emit(Note("warning", f"{reducer} averaged chunk {chunk} of {name} wrongly"))
            case RateMeasured(rate):
                self.presence.rate = rate or self.presence.rate
            case Undelivered(peer):
                self.membership.unreachable(peer)
            case NothingToTrain():
                self.trainer.watch.rest()
            case VotesKept():
                self._context.votes.kept()
            case VotesNotKept(reason):
                self._context.votes.not_kept(reason)
            case TrainingProgress():
                self.trainer.take(event)
            case Captured(fragment):
                self.trainer.take(event)
                cycle.offer_captured(fragment)
            case TrainingDone():
                cycle.on_trained(event)
            case Applied():
                self.replica.take(event)
                cycle.on_applied()
            case Digested():
                self.replica.take(event)
                cycle.on_digested()
            case SnapshotRestored() | SnapshotFailed():
                self.replica.take(event)
                cycle.on_fetched(event)
            case LineageSeen() | LineageNotSeen():
                cycle.on_lineage(event)
            case PayloadFetched(header, _) if header == self.replica.replaying:
                cycle.entry_made(header, self.replica.certificate)
            case PayloadNotFetched(header, reason) if header == self.replica.replaying:
                cycle.on_not_replayed(header, reason)
            case LeaveRequested(at_once):
                cycle.on_leave_requested(at_once)
            case PayloadFetched(header, _) | PayloadNotFetched(header, _):
                self._take(header.fragment, event)
            case _:
                raise LocalProtocolError(f"unknown event: {event!r}")

    def _take(self, fragment: int, event: Event) -> None:
        round = self.rounds.get(fragment)
        if round is not None:
            round.take(event)

    # Messages -------------------------------------------------------------------------------------------------
    def _receive(self, sender: str, message: Message | Unread) -> None:
        self._observe(sender, message)
        if isinstance(message, Leaving):
            self.membership.departs(sender, message.incarnation, message.departure, message.signature)
            for each in self.rounds.values():
                each.leader.on_leaving(sender)
        elif isinstance(message, Proof):
            pass  # `_observe` has handled the message
        elif round := self._round_at(message.position):
            self._receive_here(sender, message, round)
        elif isinstance(message, Elsewhere):
            self._cycle.on_elsewhere(sender)
        elif not isinstance(message, SETTLED):
            self._cycle.answer_elsewhere(sender, message)

    def _observe(self, sender: str, message: Message | Unread) -> None:
        """Search a message about any position for proofs that a peer lies, and warn the volunteer of liars (R9)."""
        context, evidence, lineage = self._context, self._context.evidence, self.lineage
        match message:
            case Vote() if sender != self.me:
                context.convict(evidence.observe_vote(sender, message, lineage))
            case Leaving():
                context.convict(evidence.observe_farewell(sender, message, lineage))
            case Certified() if sender != self.me and self._is_decided(message.position):
                context.convict(evidence.observe_late(sender, message, lineage))
            case Ready(commitment=commitment) if commitment is not None and sender != self.me:
                author = commitment.author(sender, message.incarnation, message.position)
                context.convict(evidence.observe_commitment(author, commitment, lineage))
            case Proof():
                try:
                    context.convict(evidence.observe_proof(sender, message, lineage))
                except FalseProofError as error:
                    context.emit(Dropped(sender, "proof", str(error)))

    def _round_at(self, position: Position) -> EntryRound | None:
        is_here = position.is_in_cycle_of(self.log.position)
        return self.rounds.get(position.fragment) if is_here else None

    def _is_decided(self, position: Position) -> bool:
        round = self._round_at(position)
        return round is None or round.is_decided

    def _receive_here(self, sender: str, message: Message | Unread, round: EntryRound) -> None:
        """Handle a message about a position with an open round. Drop a message that does not fit the peer's state."""
        cycle, leader = self._cycle, round.leader
        match message:
            case Begin() | Want() | Propose() | Vote() | Certified():
                round.take(message, sender)
            case Ready() if cycle.answers(sender):
                leader.on_ready(message, sender)
            case Part():
                leader.on_part(message, sender)
            case Refuse() if sender == round.led_by:
                cycle.on_refuse(sender, message, round)
            case LeaseGrant() if self.state is State.JOINING and round.log.closes and cycle.joiner.has_asked(sender):
                cycle.on_grant(sender, message)
            case LeaseRequest() if cycle.answers(sender) and cycle.gives_lease(round):
                leader.on_lease_request(message, sender)

    # Values for drivers ---------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        return self._cycle.state

    @property
    def round(self) -> EntryRound:
        """The round whose entry closes the cycle. Once that entry is made, the open round with the highest fragment."""
        return self._cycle.round

    @property
    def rounds(self) -> Mapping[int, EntryRound]:
        """The open rounds, by fragment: those of the cycle's entries that are still to be made."""
        return self._cycle.rounds

    @property
    def view(self) -> int:
        """The highest view that this peer has reached at any open position. Its beats name this view."""
        return max(round.pacemaker.reached for round in self.rounds.values())

    @property
    def log(self) -> LogState:
        return self.replica.log

    @property
    def settled(self) -> LogState:
        """The log up to the newest theta and momentum whose digest is known. Heartbeats name the end of this log."""
        return self.replica.settled

    @property
    def state_digest(self) -> bytes:
        return self.replica.state_digest

    @property
    def is_settled(self) -> bool:
        return self.replica.is_settled

    @property
    def is_at_cycles_end(self) -> bool:
        """True if theta and momentum are those after the last whole cycle, and their digest is known."""
        return self.is_settled and not self.log.made

    @property
    def lineage(self) -> Lineage:
        return self.replica.lineage

    @property
    def membership(self) -> Membership:
        return self.presence.membership

    def believed(self, theirs: Branch, ours: Branch) -> Branch | None:
        """Return the part of another peer's branch (`theirs`) that this peer accepts as the run's log. Return None if
        it accepts no part, or cannot decide yet."""
        return self._cycle.belief.branch(theirs, ours)

    def is_live(self, peer: str) -> bool:
        """Return True if another peer is heard, is reachable and is not leaving."""
        return self.presence.is_live(peer)

    @property
    def proposed_amendment(self) -> Amendment | None:
        """The organiser's amendment that is in no entry of this peer's log yet; None if there is none."""
        return self._context.amending.proposed(self.settled)

    @property
    def incarnation(self) -> int:
        return self._context.incarnation

    @property
    def record(self) -> VotingRecord:
        """All votes of this peer, and its farewell. They are on the disk before they are sent (R10)."""
        return self._context.votes.record

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that this peer takes part in, for the entry of `round`; None if it takes part in none."""
        return self.round.exchange

    @property
    def is_exchanging(self) -> bool:
        """True if an exchange of any open round is under way."""
        is_here = self.state in (State.TRAINING, State.AVERAGING)
        return is_here and any(round.is_exchanging for round in self.rounds.values())

    def exchange_of(self, round_name: RoundName) -> Exchange | None:
        """Return the exchange of the round with this name if the round is still open; otherwise None."""
        round = self.rounds.get(round_name.position.fragment)
        exchange = round.exchange if round else None
        return exchange if exchange and exchange.name == round_name else None

    @property
    def goodbye(self) -> Leaving | None:
        """The farewell to send to the other peers when this peer leaves; None if it sends none."""
        return self._cycle.goodbye
