"""One peer of a run, without any I/O: events in, effects out. This is where to begin reading.

A driver calls `handle` with what happened and the time on its clock, and carries out the effects; the real driver
and the simulated one differ in nothing else. What happens goes to one of a peer's parts:

    Presence   who is there, whom we reach and believe, who is further on
    Trainer    the lease that we train, and what becomes of the work
    Replica    where in the log our copy of the state is, and how it moves on
    Slot       our part in making the next entry; its `leadership` is what we do when others take us for their leader

What the news of one part means for the others is in course.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peers.errors import LocalProtocolError
from peers.log.header import Position
from peers.log.lineage import Branch, Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.membership import Membership
from peers.presence.presence import Presence
from peers.protocol.abstention import Abstention
from peers.protocol.course import Course
from peers.protocol.desk import Desk
from peers.protocol.effects import Effect
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
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.messages import (
    Abort,
    Accuse,
    Adopt,
    Begin,
    Commit,
    Compare,
    Complete,
    Elsewhere,
    Excluded,
    Holding,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Marked,
    Message,
    Prepared,
    Prove,
    Ready,
    Refuse,
    Unread,
    Waiting,
    Want,
)
from peers.protocol.replica import Replica
from peers.protocol.rounds import Attempt
from peers.protocol.slot import Slot, SlotState
from peers.protocol.states import State
from peers.protocol.trainer import Trainer
from peers.protocol.troubles import Troubles
from peers.values.identity import Keys
from peers.values.manifest import Amendment
from peers.values.workload import PayloadKind


class Peer:
    """The protocol of one peer. Starts before the first entry, with the state that the manifest's seed gives."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payloads: Sequence[PayloadKind],
        state_digest: bytes,
        now: float,
        incarnation: int,
        keys: Keys,
        lineage: Lineage | None = None,
    ) -> None:
        """`incarnation` is a number that no start of this peer has had before. `lineage` ends where the state is, if
        that is not before the first entry. `payloads` are of each fragment: what is shown as evidence is judged by
        them, too."""
        self.me = me
        self.settings = settings
        self._desk = Desk(me, settings, payloads, now, incarnation, keys)
        self._course = Course(self._desk, state_digest, lineage or Lineage(settings.empty_log))
        self.presence: Presence = self._course.presence
        self.trainer: Trainer = self._course.trainer
        self.replica: Replica = self._course.replica
        self.troubles: Troubles = self._course.troubles
        self._abstention = Abstention(self._desk, self.presence, self.trainer, self.replica, self.troubles)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at time `now` (seconds, monotonic). Raises: LocalProtocolError for an illegal event."""
        self._desk.now = self.presence.now = now
        events = self._desk.events
        events.append(event)
        while events:
            happened = events.popleft()
            if not self._course.has_left:
                self._happens(happened)
        return self._desk.take_effects()

    def _happens(self, event: Event) -> None:
        course = self._course
        match event:
            case Received(sender, message):  # those come first that come most often
                self.membership.heard_from(sender, self._desk.now)
                self._receive(sender, message)
            case Tick():
                course.tick()
            case _ if isinstance(event, ExchangeEvent):
                self._take(event.round_name.position.fragment, event)
            case HeartbeatsSeen(heartbeats, silences):
                self.membership.observe(heartbeats, self._desk.now, silences)
                course.hear_amendments(known for beat in heartbeats for known in (beat.amendment, beat.proposed))
                course.catching_up.check_state()
                course.catching_up.look()
                course.look_for_trouble()
                self._abstention.look(self.slots.values())
            case SignedHeadsSeen():
                self.replica.hear_signed(event)
            case AmendmentSeen(amendment):
                course.hear_amendments([amendment])
            case HeadsSeen(index, heads):
                self.lineage.recall(index, heads)
            case ReachSeen(reach, rates, sought):
                if self.presence.reachability.observe(reach, rates, sought):
                    course.on_links_changed()
            case AverageRefuted():
                course.on_refuted(event)
            case RateMeasured(rate):
                self.presence.rate = rate or self.presence.rate
            case Undelivered(peer):
                self.membership.unreachable(peer)
            case TrainingProgress():
                self.trainer.take(event)
            case Captured():
                course.on_captured(event)
            case TrainingDone():
                course.on_trained(event)
            case Applied():
                self.replica.take(event)
                course.on_applied()
            case Digested():
                self.replica.take(event)
                course.on_digested()
            case SnapshotRestored() | SnapshotFailed():
                self.replica.take(event)
                course.on_fetched(event)
            case LineageSeen() | LineageNotSeen():
                course.catching_up.on_lineage(event)
            case PayloadFetched(header) if header == self.replica.replaying:
                course.entry_made(header, self.replica.proof)
            case PayloadNotFetched(header, reason) if header == self.replica.replaying:
                course.catching_up.on_not_replayed(header, reason)
            case LeaveRequested(at_once):
                course.on_leave_requested(at_once)
            case PayloadFetched(header) | PayloadNotFetched(header, _):
                self._take(header.fragment, event)
            case _:
                raise LocalProtocolError(f"no such event: {event!r}")

    def _take(self, fragment: int, event: Event) -> None:
        """Tell the slot of this fragment, if it is still open."""
        slot = self.slots.get(fragment)
        if slot is not None:
            slot.take(event)

    # Messages -------------------------------------------------------------------------------------------------
    def _receive(self, sender: str, message: Message | Unread) -> None:
        if isinstance(message, Leaving):
            self.membership.departs(sender, message.incarnation, message.departure, message.signature)
            for each in self.slots.values():
                each.leadership.on_leaving(sender)
        elif slot := self._slot_at(message.position):
            self._receive_here(sender, message, slot)
        elif not isinstance(message, Commit | Elsewhere | Refuse | Excluded | Abort | LeaseGrant):
            self._course.answer_elsewhere(sender, message)
        elif isinstance(message, Elsewhere):
            self._course.catching_up.on_elsewhere(sender)

    def _slot_at(self, position: Position) -> Slot | None:
        """The slot that a message is about, if we are where it is."""
        is_here = position.is_in_cycle_of(self.log.position)
        return self.slots.get(position.fragment) if is_here else None

    def _receive_here(self, sender: str, message: Message | Unread, slot: Slot) -> None:
        """A message about a position where we are. What does not fit our state is late or early, and is dropped."""
        course, leadership = self._course, slot.leadership
        match message:
            case Begin() | Adopt() | Abort() | Holding() | Want() | Compare():
                slot.take(message, sender)
            case Commit():
                slot.witness.compare_certificate(message)
                course.on_commit(sender, message, slot)
            case Refuse() if sender == slot.led_by:
                course.on_refuse(sender, message, slot)
            case Excluded(reason=reason) if sender == slot.led_by:
                course.on_excluded(sender, reason)
            case LeaseGrant() if self.state is State.JOINING and slot.log.closes and sender == leadership.elect():
                course.on_grant(sender, message)
            case LeaseRequest() if course.answers(sender) and course.gives_lease(sender, slot):
                leadership.on_lease_request(message, sender)
            case Ready() if course.answers(sender):
                slot.witness.compare(sender, message)
                leadership.on_ready(message, sender)
            case Waiting():
                leadership.on_waiting(message, sender)
            case Accuse():
                leadership.on_accuse(message, sender)
            case Marked():
                leadership.on_marked(message, sender)
            case Prove() if course.answers(sender):
                slot.witness.hear(sender, message)
            case Prepared():
                leadership.on_prepared(message, sender)
                slot.take(message, sender)
            case Complete():
                slot.witness.compare_votes(sender, message, slot.exchange.round if slot.exchange else None)
                leadership.on_complete(message, sender)
                slot.take(message, sender)

    # What others look at --------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        return self._course.state

    @property
    def slot(self) -> Slot:
        """The one whose entry closes the cycle, while it is open."""
        return self._course.slot

    @property
    def slots(self) -> Mapping[int, Slot]:
        """Those of the cycle's entries that are still to be made, by fragment."""
        return self._course.slots

    @property
    def log(self) -> LogState:
        return self.replica.log

    @property
    def settled(self) -> LogState:
        """Where theta and momentum are, and have a digest: what heartbeats name."""
        return self.replica.settled

    @property
    def state_digest(self) -> bytes:
        return self.replica.state_digest

    @property
    def is_settled(self) -> bool:
        return self.replica.is_settled

    @property
    def is_at_cycles_end(self) -> bool:
        """Whether theta and momentum are as the last whole cycle left them, and have a digest."""
        return self.is_settled and not self.log.made

    @property
    def lineage(self) -> Lineage:
        return self.replica.lineage

    @property
    def membership(self) -> Membership:
        return self.presence.membership

    def believed(self, theirs: Branch, ours: Branch) -> Branch | None:
        """As much of another one's log as is to be taken for the run's; see `Search.believed`."""
        return self._course.catching_up.search.believed(theirs, ours)

    def keeps(self, fragment: int) -> bool:
        """Whether what was captured of a fragment in this training is of use, in this cycle or a later one."""
        return self.trainer.keeps(fragment)

    def is_live(self, peer: str) -> bool:
        """Whether its heartbeats say so, as of the last event."""
        return self.presence.is_live(peer)

    @property
    def proposed_amendment(self) -> Amendment | None:
        """The organiser's amendment that is in no entry of our log yet."""
        return self._desk.amending.proposed(self.settled)

    @property
    def incarnation(self) -> int:
        return self._desk.memory.incarnation

    @property
    def exchange(self) -> Exchange | None:
        """Of the round under way, where there is one fragment."""
        return self.slot.exchange

    @property
    def is_exchanging(self) -> bool:
        """Whether chunks come and go. The payload of an entry that is handed on is fetched as a whole."""
        slots = self.slots.values()
        is_here = self.state in (State.TRAINING, State.AVERAGING)
        return is_here and any(slot.state is SlotState.AVERAGING and not slot.adopting for slot in slots)

    def exchange_of(self, round_name: Attempt) -> Exchange | None:
        """Of this round, if it is under way."""
        slot = self.slots.get(round_name.position.fragment)
        exchange = slot.exchange if slot else None
        return exchange if exchange and exchange.name == round_name else None

    @property
    def goodbye(self) -> Leaving:
        """What to tell the others in the end."""
        return self._course.goodbye
