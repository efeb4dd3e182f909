"""One peer's way from outer step to outer step: what the news of one part means for the others.

One outer step goes: `join` or `go_on` gives the trainer a lease; the trainer is done (`trained`), so the slot is ready;
the slot concludes (`entry_made`), so the work ends, the replica applies the entry, and the next slot opens.
"""

from __future__ import annotations

from peers.log.header import Header
from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.events import Note, Send, SnapshotFailed, SnapshotRestored, Stop, Tick, TrainingDone
from peers.protocol.internal import EntryMade, FarBehind, Leased, NobodyAhead, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.messages import Commit, Elsewhere, Inquire, LeaseGrant, Leaving, Message, Unread
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.slot import Slot, SlotState
from peers.protocol.states import State
from peers.protocol.trainer import Trainer, TrainerState
from peers.protocol.troubles import Troubles
from peers.values.leases import Lease


class Course:
    """Holds the parts of a peer."""

    def __init__(self, desk: Desk, state_digest: bytes, log: LogState) -> None:
        timing, schedule = desk.settings.timing, desk.schedule
        self.presence = Presence(desk.me, timing.heartbeat_expiry, schedule.distrust, schedule.bar, desk.now)
        self.trainer = Trainer(desk)
        self.replica = Replica(desk, self.presence, log, state_digest)
        self.troubles = Troubles(desk, self.presence, self.trainer, self.replica)
        self.joiner = Joiner(desk, self.presence, self.replica, self.troubles)
        self._desk = desk
        self._me = desk.me
        self._whole = desk.settings.inner_steps
        self._open_slot()
        self._keeps_work = False  # what is trained goes into a later entry than the one that is replayed
        self._leave_by: float | None = None
        self.has_left = False

    @property
    def state(self) -> State:
        """What we are doing, in one word."""
        if self.has_left:
            return State.LEFT
        if self.replica.state is not ReplicaState.LEVEL:
            return State(self.replica.state.value)
        if self.slot.state in (SlotState.READY, SlotState.AVERAGING):
            return State(self.slot.state.value)
        return State.TRAINING if self.trainer.is_training else State.JOINING

    def tick(self) -> None:
        if self._leave_by is not None and self._desk.now >= self._leave_by:
            self._leave()
            return
        if self.state is State.JOINING:
            self.join()
        self.slot.take(Tick())
        self.slot.leadership.tick()

    # One outer step -------------------------------------------------------------------------------------------
    def _train(self, lease: Lease, steps: int) -> None:
        self.trainer.take(Leased(self.replica.log, lease, steps))

    def trained(self, done: TrainingDone) -> None:
        was_training = self.trainer.is_training
        self.trainer.take(done)
        if was_training and self.replica.state is ReplicaState.LEVEL:
            self.slot.take(WorkDone())

    def entry_made(self, header: Header) -> None:
        """The next entry is committed, and its payload is here: take the outer step."""
        if not self._keeps_work:
            self.trainer.take(WorkEnds(self.replica.log.position, header))
        self.replica.take(EntryMade(header, self._keeps_work))
        self._open_slot()

    def go_on(self) -> None:
        """Go on training from the new theta at once, or with what an entry without us has left us."""
        kept, self._keeps_work = self._keeps_work, False
        lease = self.replica.log.leases.get(self._me)
        if self._leave_by is not None:
            return  # as soon as the digest is there
        if kept and self.trainer.state is TrainerState.TRAINED:
            self.slot.take(WorkDone())
        elif kept:
            pass
        elif lease is not None and self.replica.furthest() is None:
            self._train(lease, self._whole)
        else:
            self._await_lease()
            self.join()

    def state_is_digested(self) -> None:
        """The digest of our state is known."""
        if self._leave_by is not None:
            self._leave_if_possible()
        elif self.state is State.READY:
            self.slot.say_ready()
        elif self.state is State.JOINING:
            self.join()

    def _open_slot(self) -> None:
        """Nothing of the present position's round matters any more."""
        self.slot = Slot(self._desk, self.presence, self.trainer, self.replica, self)

    # Into the run ---------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.joiner.may_ask or self._leave_by is not None:
            return
        if self.replica.furthest() is not None:
            if self.joiner.question.is_due:
                self.joiner.question.said()
                self.catch_up()
            return
        self.replica.has_caught_up()
        lease = self.replica.log.leases.get(self._me)
        if lease is not None and not self.troubles.is_excluded:
            self._train(lease, self._whole)
        else:
            self.joiner.ask(self.slot.leadership.elect())

    def granted(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us."""
        if self.joiner.accepts(leader, grant):
            if self.troubles.taken_in():
                self.look_for_trouble()
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

    def catch_up(self) -> None:
        if self._can_catch_up and self.troubles.may_ask:
            far = self.replica.catch_up()
            if far is not None:
                self._fetch(far)

    def commit(self, sender: str, commit: Commit) -> None:
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

    def not_replayed(self, header: Header, reason: str) -> None:
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
        self.trainer.take(WorkEnds(self.replica.log.position, entry))
        self._keeps_work = False
        self._open_slot()

    def elsewhere(self, sender: str) -> None:
        """Our inquiry led nowhere: what we hold is on another lineage than the heavier one."""
        if self._can_catch_up and self.replica.furthest() == sender:
            self._fetch(self.replica.far_behind(sender))

    def refused(self, leader: str, reason: str) -> None:
        """What we trained, or the state we trained from, is of no use to the leader: take its state and begin again."""
        if self.state in (State.JOINING, State.READY, State.AVERAGING) and leader != self._me:
            self._desk.emit(Note("warning", f"refused by {leader}: {reason}"))
            self._fetch(FarBehind(leader))

    def left_out(self, reason: str) -> None:
        """The leader goes on without us."""
        if self.state in (State.JOINING, State.READY) and self.slot.acceptor.held is None:
            self.troubles.left_out(reason)
            self.look_for_trouble()

    def look_for_trouble(self) -> None:
        """Stop training, and wait without a lease, where it would be in vain. What we promised here is forgotten."""
        self.troubles.look(self.slot.leadership.elect())
        can_stop = self.state in (State.TRAINING, State.READY) and self.slot.acceptor.held is None
        if self.troubles.is_aside and can_stop:
            if self.state is State.READY:
                self.replica.forgets()
            self._drop_work()
            self._await_lease()

    def links_changed(self) -> None:
        self.troubles.links_changed()
        self.look_for_trouble()

    def has_fetched(self, event: SnapshotRestored | SnapshotFailed) -> None:
        self._await_lease()
        if isinstance(event, SnapshotRestored):
            self.join()

    # For others -----------------------------------------------------------------------------------------------
    def answers(self, sender: str) -> bool:
        """Whether a member's wish can be granted: we are where it is, and it is one of us. If a stranger is, too, its
        heartbeat comes before it asks again."""
        is_here = self.replica.state is ReplicaState.LEVEL and self.replica.is_settled
        return is_here and (sender == self._me or self.presence.is_live(sender))

    def gives_lease(self, joiner: str) -> bool:
        return self.joiner.may_start() and self.slot.leadership.gives_lease(joiner)

    def answer_elsewhere(self, sender: str, message: Message | Unread) -> None:
        """The sender is at a place that we have left, or have not reached."""
        followed = self.replica.lineage.after(message.position.head)
        if followed is not None:
            self._desk.emit(Send(sender, Commit(header=followed)))
        elif isinstance(message, Inquire):
            self._desk.emit(Send(sender, Elsewhere(position=self.replica.log.position)))

    # Out of the run -------------------------------------------------------------------------------------------
    def attempt_over(self) -> None:
        self._leave_if_possible()
        if not self.has_left:
            self.slot.say_ready()

    def leave_soon(self, at_once: bool) -> None:
        leave_by = self._desk.now + (0 if at_once else self._desk.settings.timing.leave)
        self._leave_by = min(leave_by, self._leave_by or leave_by)
        self._leave_if_possible()

    def _leave_if_possible(self) -> None:
        """A round under way is finished first, and its entry noted down, within `leave_by`; all else is dropped."""
        if self._leave_by is None:
            return
        is_busy = self.state in (State.AVERAGING, State.APPLYING) or self.replica.undigested is not None
        if not is_busy or self._desk.now >= self._leave_by:
            self._leave()

    def _leave(self) -> None:
        self.trainer.stop()
        self.has_left = True
        self._desk.emit(Stop())  # the driver says goodbye to everybody

    @property
    def goodbye(self) -> Leaving:
        """What to tell the others in the end."""
        return Leaving(position=self.replica.log.position, holds=self.slot.acceptor.held is not None)
