"""One peer of a run, without any I/O: events in, effects out. This is where to begin reading.

A driver calls `handle` with what happened and the time on its clock, and carries out the effects; the hivemind driver
and the simulated one differ in nothing else. `Peer` has four parts and carries to each what concerns it:

    Presence   who is there, whom we reach and believe, who is further on
    Trainer    the lease that we train, and what becomes of the work
    Replica    where in the log our copy of the state is, and how it moves on
    Slot       our part in making the next entry; its `leadership` is what we do when others take us for their leader

One outer step goes: `_join` or `_go_on` gives the trainer a lease; the trainer is done, so the slot is ready; the slot
concludes, so `entry_made` ends the work, has the replica apply the entry, and opens the next slot.
"""

from __future__ import annotations

from peers.errors import LocalProtocolError
from peers.log.header import Header
from peers.log.lineage import Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.membership import Membership
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.events import (
    Applied,
    Digested,
    Effect,
    Event,
    HeartbeatsSeen,
    LeaveRequested,
    Note,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    Received,
    Send,
    SnapshotFailed,
    SnapshotRestored,
    Stop,
    Tick,
    TrainingDone,
    TrainingProgress,
    Undelivered,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.internal import EntryMade, FarBehind, Leased, NobodyAhead, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.messages import (
    Abort,
    Accuse,
    Adopt,
    Begin,
    Commit,
    Complete,
    Elsewhere,
    Excluded,
    Holding,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Leaving,
    Message,
    Ready,
    Refuse,
    Waiting,
    Want,
)
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.slot import Slot, SlotState
from peers.protocol.states import State
from peers.protocol.trainer import Trainer, TrainerState
from peers.protocol.troubles import Troubles
from peers.values.chunks import PayloadSize
from peers.values.leases import Lease


class Peer:
    """The protocol of one peer. Starts before the first entry, with the state that the manifest's seed gives."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payload: PayloadSize,
        state_digest: bytes,
        now: float,
        log: LogState | None = None,
    ) -> None:
        """`log` is where the state is, if not before the first entry."""
        self.me = me
        self.settings = settings
        self._desk = desk = Desk(me, settings, payload, now)
        schedule, expiry = desk.schedule, settings.timing.heartbeat_expiry
        self.presence = Presence(me, expiry, schedule.distrust, schedule.bar, now)
        self.trainer = Trainer(desk)
        self.replica = Replica(desk, self.presence, log or settings.empty_log, state_digest)
        self.troubles = Troubles(desk, self.presence, self.trainer, self.replica)
        self.joiner = Joiner(desk, self.presence, self.replica, self.troubles)
        self._open_slot()
        self._keeps_work = False  # what is trained goes into a later entry than the one that is replayed
        self._leave_by: float | None = None
        self._has_left = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at time `now` (seconds, monotonic). Raises: LocalProtocolError for an illegal event."""
        self._desk.now = self.presence.now = now
        events = self._desk.events
        events.append(event)
        while events:
            if self._has_left:
                events.clear()
            else:
                self._dispatch(events.popleft())
        return self._desk.take_effects()

    # Who gets what --------------------------------------------------------------------------------------------
    def _dispatch(self, event: Event) -> None:
        match event:
            case Tick():
                self._tick()
            case HeartbeatsSeen(heartbeats):
                self.membership.observe(heartbeats, self._desk.now)
                self._catch_up()
                self._look_for_trouble()
            case ReachSeen(reach, rates, sought):
                if self.presence.reachability.observe(reach, rates, sought):
                    self.troubles.links_changed()
                    self._look_for_trouble()
            case RateMeasured(rate):
                self.presence.rate = rate or self.presence.rate
            case Received(sender, message):
                self.membership.heard_from(sender, self._desk.now)
                self._receive(sender, message)
            case Undelivered(peer):
                self.membership.unreachable(peer)
            case TrainingProgress():
                self.trainer.take(event)
            case TrainingDone():
                self._trained(event)
            case Applied():
                self.replica.take(event)
                self._go_on()
            case Digested():
                self.replica.take(event)
                self._tell_of_our_state()
            case SnapshotRestored():
                self.replica.take(event)
                self._await_lease()
                self._join()
            case SnapshotFailed():
                self.replica.take(event)
                self._await_lease()
            case PayloadFetched(header) if header == self.replica.replaying:
                self.entry_made(header)
            case PayloadNotFetched(header, reason) if header == self.replica.replaying:
                self._not_replayed(header, reason)
            case LeaveRequested(at_once):
                leave_by = self._desk.now + (0 if at_once else self.settings.timing.leave)
                self._leave_by = min(leave_by, self._leave_by or leave_by)
                self._leave_if_possible()
            case _ if isinstance(event, PayloadFetched | PayloadNotFetched | ExchangeEvent):
                self.slot.take(event)
            case _:
                raise LocalProtocolError(f"no such event: {event!r}")

    def _tick(self) -> None:
        if self._leave_by is not None and self._desk.now >= self._leave_by:
            self._leave()
            return
        if self.state is State.JOINING:
            self._join()
        self.slot.take(Tick())
        self.slot.leadership.tick()

    def _receive(self, sender: str, message: Message) -> None:
        if isinstance(message, Leaving):
            if not message.holds:
                self.membership.left(sender)
            self.membership.unreachable(sender)
            self.slot.leadership.left(sender)
        elif message.position == self.log.position:
            self._receive_here(sender, message)
        elif not isinstance(message, Commit | Elsewhere | Refuse | Excluded | Abort | LeaseGrant):
            self._answer_elsewhere(sender, message)
        elif isinstance(message, Elsewhere):
            self._elsewhere(sender)

    def _receive_here(self, sender: str, message: Message) -> None:
        """A message about the position we are at. What does not fit our state is late or early, and is dropped."""
        slot, leadership = self.slot, self.slot.leadership
        match message:
            case Begin() | Adopt() | Abort() | Holding() | Want():
                slot.take(message, sender)
            case Commit():
                self._commit(sender, message)
            case Refuse(reason=reason) if sender == self._led_by:
                self._refused(sender, reason)
            case Excluded(reason=reason) if sender == self._led_by:
                self._left_out(reason)
            case LeaseGrant() if self.state is State.JOINING and sender == leadership.elect():
                self._granted(sender, message)
            case LeaseRequest() if self._answers(sender) and self.joiner.may_start() and leadership.gives_lease(sender):
                leadership.lease_requested(message, sender)
            case Ready() if self._answers(sender):
                leadership.is_ready(message, sender)
            case Waiting():
                leadership.waits(message, sender)
            case Accuse():
                leadership.accuses(message, sender)
            case Complete():
                leadership.is_complete(message, sender)
                slot.take(message, sender)

    def _answers(self, sender: str) -> bool:
        """Whether a member's wish can be granted: we are where it is, and it is one of us. If a stranger is, too, its
        heartbeat comes before it asks again."""
        is_here = self.replica.state is ReplicaState.LEVEL and self.replica.is_settled
        return is_here and (sender == self.me or self.is_live(sender))

    def _answer_elsewhere(self, sender: str, message: Message) -> None:
        """The sender is at a place that we have left, or have not reached."""
        followed = self.lineage.after(message.position.head)
        if followed is not None:
            self._desk.emit(Send(sender, Commit(header=followed)))
        elif isinstance(message, Inquire):
            self._desk.emit(Send(sender, Elsewhere(position=self.log.position)))

    # One outer step -------------------------------------------------------------------------------------------
    def _train(self, lease: Lease, steps: int) -> None:
        self.trainer.take(Leased(self.log, lease, steps))

    def _trained(self, done: TrainingDone) -> None:
        was_training = self.is_training
        self.trainer.take(done)
        if was_training and self.replica.state is ReplicaState.LEVEL:
            self.slot.take(WorkDone())

    def entry_made(self, header: Header) -> None:
        """The next entry is committed, and its payload is here: take the outer step."""
        if not self._keeps_work:
            self.trainer.take(WorkEnds(self.log.position, header))
        self.replica.take(EntryMade(header, self._keeps_work))
        self._open_slot()

    def _go_on(self) -> None:
        """Go on training from the new theta at once, or with what an entry without us has left us."""
        kept, self._keeps_work = self._keeps_work, False
        lease = self.log.leases.get(self.me)
        if self._leave_by is not None:
            return  # as soon as the digest is there
        if kept and self.trainer.state is TrainerState.TRAINED:
            self.slot.take(WorkDone())
        elif kept:
            pass
        elif lease is not None and self.replica.furthest() is None:
            self._train(lease, self.settings.inner_steps)
        else:
            self._await_lease()
            self._join()

    def _tell_of_our_state(self) -> None:
        """The digest of our state is known."""
        if self._leave_by is not None:
            self._leave_if_possible()
        elif self.state is State.READY:
            self.slot.say_ready()
        elif self.state is State.JOINING:
            self._join()

    def _open_slot(self) -> None:
        """Nothing of the present position's round matters any more."""
        self.slot = Slot(self._desk, self.presence, self.trainer, self.replica, self)

    # Into the run ---------------------------------------------------------------------------------------------
    def _join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.joiner.may_ask or self._leave_by is not None:
            return
        if self.replica.furthest() is not None:
            if self.joiner.question.is_due:
                self.joiner.question.said()
                self._catch_up()
            return
        self.replica.has_caught_up()
        lease = self.log.leases.get(self.me)
        if lease is not None and not self.troubles.is_excluded:
            self._train(lease, self.settings.inner_steps)
        else:
            self.joiner.ask(self.slot.leadership.elect())

    def _granted(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us."""
        if self.joiner.accepts(leader, grant):
            if self.troubles.taken_in():
                self._look_for_trouble()
            self.slot.leadership.granted_by = leader
            self._train(grant.samples, min(grant.steps, self.trainer.steps_at_our_speed(self.presence.fastest)))

    def _await_lease(self) -> None:
        """There is something new to ask for."""
        self.joiner.question.at_once()

    # Behind, or in vain ---------------------------------------------------------------------------------------
    @property
    def _can_catch_up(self) -> bool:
        is_leaving = self._leave_by is not None and self.replica.undigested is not None
        return self.replica.state is ReplicaState.LEVEL and not is_leaving

    def _catch_up(self) -> None:
        if self._can_catch_up and self.troubles.may_ask:
            far = self.replica.catch_up()
            if far is not None:
                self._fetch(far)

    def _commit(self, sender: str, commit: Commit) -> None:
        """Apply the entry if we hold its payload; else somebody went on without us."""
        header = commit.header
        if self.slot.state in (SlotState.READY, SlotState.AVERAGING) and self.slot.holds(header):
            self.slot.take(commit, sender)
        elif self._can_catch_up:
            self._replay(sender, header)

    def _replay(self, sender: str, header: Header) -> None:
        """Others went on without us. Whom we asked for a lease, or to lead us, knows better than its last heartbeat how
        far it is."""
        is_our_leader = self.state is State.READY and sender == self.slot.acceptor.pledged_to
        behind = self.replica.follow(sender, header, self.state is State.JOINING or is_our_leader)
        if behind is None:
            return
        self._keeps_work = self.trainer.outlives(behind.log)
        if self._keeps_work:
            self._open_slot()
        else:
            self._drop_work(header)
        self.replica.take(behind)

    def _not_replayed(self, header: Header, reason: str) -> None:
        self._desk.emit(Note("warning", f"no payload of entry {header.index}: {reason}"))
        ahead = self.replica.furthest()
        if ahead is not None:
            self._fetch(self.replica.far_behind(ahead))
        else:
            self._drop_work()
            self.replica.take(NobodyAhead())
            self._await_lease()

    def _fetch(self, far: FarBehind) -> None:
        self._drop_work()
        self.replica.take(far)

    def _drop_work(self, entry: Header | None = None) -> None:
        """We go on without the work in hand, which may be in this entry."""
        self.trainer.take(WorkEnds(self.log.position, entry))
        self._keeps_work = False
        self._open_slot()

    def _elsewhere(self, sender: str) -> None:
        """Our inquiry led nowhere: what we hold is on another lineage than the heavier one."""
        if self._can_catch_up and self.replica.furthest() == sender:
            self._fetch(self.replica.far_behind(sender))

    def _refused(self, leader: str, reason: str) -> None:
        """What we trained, or the state we trained from, is of no use to the leader: take its state and begin again."""
        if self.state in (State.JOINING, State.READY, State.AVERAGING) and leader != self.me:
            self._desk.emit(Note("warning", f"refused by {leader}: {reason}"))
            self._fetch(FarBehind(leader))

    def _left_out(self, reason: str) -> None:
        """The leader goes on without us."""
        if self.state in (State.JOINING, State.READY) and self.slot.acceptor.held is None:
            self.troubles.left_out(reason)
            self._look_for_trouble()

    def _look_for_trouble(self) -> None:
        """Stop training, and wait without a lease, where it would be in vain. What we promised here is forgotten."""
        self.troubles.look(self.slot.leadership.elect())
        can_stop = self.state in (State.TRAINING, State.READY) and self.slot.acceptor.held is None
        if self.troubles.is_aside and can_stop:
            if self.state is State.READY:
                self.replica.forgets()
            self._drop_work()
            self._await_lease()

    # Out of the run -------------------------------------------------------------------------------------------
    def attempt_over(self) -> None:
        self._leave_if_possible()
        if not self._has_left:
            self.slot.say_ready()

    def _leave_if_possible(self) -> None:
        """A round under way is finished first, and its entry noted down, within `leave_by`; all else is dropped."""
        if self._leave_by is None:
            return
        is_busy = self.state in (State.AVERAGING, State.APPLYING) or self.replica.undigested is not None
        if not is_busy or self._desk.now >= self._leave_by:
            self._leave()

    def _leave(self) -> None:
        self.trainer.stop()
        self._has_left = True
        self._desk.emit(Stop())  # the driver says goodbye to everybody

    @property
    def goodbye(self) -> Leaving:
        """What to tell the others in the end."""
        return Leaving(position=self.log.position, holds=self.slot.acceptor.held is not None)

    # What others look at --------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        """What we are doing, in one word."""
        if self._has_left:
            return State.LEFT
        if self.replica.state is not ReplicaState.LEVEL:
            return State(self.replica.state.value)
        if self.slot.state in (SlotState.READY, SlotState.AVERAGING):
            return State(self.slot.state.value)
        return State.TRAINING if self.is_training else State.JOINING

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
    def lineage(self) -> Lineage:
        return self.replica.lineage

    @property
    def membership(self) -> Membership:
        return self.presence.membership

    def is_live(self, peer: str) -> bool:
        """Whether its heartbeats say so, as of the last event."""
        return self.presence.is_live(peer)

    @property
    def exchange(self) -> Exchange | None:
        """Of the round under way."""
        return self.slot.exchange

    @property
    def is_training(self) -> bool:
        """Whether the worker is at work; also while an entry that was missed is applied beside it."""
        return self.trainer.state is TrainerState.TRAINING

    @property
    def _led_by(self) -> str | None:
        return self.slot.acceptor.pledged_to or self.slot.leadership.elect()
