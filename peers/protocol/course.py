"""One peer's way from outer step to outer step: what the news of one part means for the others.

One outer step goes: `join` or `on_applied` gives the trainer a lease; the trainer is done (`on_trained`), so the slot
is ready; the slot concludes (`entry_made`), so the work ends, the replica applies the entry, and the next slot opens.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.log.certificate import Certificate
from peers.log.header import Header
from peers.log.lineage import Lineage
from peers.presence.presence import Presence
from peers.protocol.catching_up import CatchingUp
from peers.protocol.desk import Desk
from peers.protocol.effects import Note, Send, Stop
from peers.protocol.events import AverageRefuted, Captured, SnapshotFailed, SnapshotRestored, Tick, TrainingDone
from peers.protocol.internal import EntryMade, Leased, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.messages import Commit, Complete, Elsewhere, Inquire, LeaseGrant, Leaving, Message, Refuse, Unread
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.slot import Slot, SlotState
from peers.protocol.states import State
from peers.protocol.trainer import NOTHING, Trainer, TrainerState
from peers.protocol.troubles import Troubles
from peers.values.leases import Lease
from peers.values.manifest import Amendment


class Course:
    """Holds the parts of a peer, and decides what one part's news means for the others."""

    def __init__(self, desk: Desk, state_digest: bytes, lineage: Lineage) -> None:
        timing, schedule = desk.settings.timing, desk.schedule
        self.presence = Presence(desk.me, timing.heartbeat_expiry, schedule.distrust, schedule.bar, desk.now)
        self.presence.membership.is_farewell = desk.is_farewell
        self.trainer = Trainer(desk)
        self.replica = Replica(desk, self.presence, lineage, state_digest)
        self.troubles = Troubles(desk, self.presence, self.trainer, self.replica)
        self.catching_up = CatchingUp(desk, self.presence, self.trainer, self.replica, self.troubles, self)
        self.joiner = Joiner(desk, self.presence, self.replica, self.troubles)
        self._desk = desk
        self._me = desk.me
        self._whole = desk.settings.inner_steps
        self.slots: dict[int, Slot] = {}
        self.open_slots()
        self._leave_by: float | None = None
        self.has_left = False

    @property
    def state(self) -> State:
        """What we are doing, in one word."""
        if self.has_left:
            return State.LEFT
        if self.replica.state is not ReplicaState.LEVEL:
            return State(self.replica.state.value)
        if self.notes_down:
            return State.APPLYING
        if self.trainer.is_training:
            return State.TRAINING
        slots = [slot.state for slot in self.slots.values()]
        if SlotState.AVERAGING in slots:
            return State.AVERAGING
        return State.READY if SlotState.READY in slots else State.JOINING

    def tick(self) -> None:
        if self._leave_by is not None and self._desk.now >= self._leave_by:
            self._leave()
            return
        if self.state is State.JOINING:
            self.join()
        for slot in list(self.slots.values()):
            if self.has_left:
                return
            self._offer_captured(slot)
            slot.take(Tick())
            slot.leadership.tick()

    # One outer step -------------------------------------------------------------------------------------------
    def _begin(self, lease: Lease, steps: int) -> None:
        self.trainer.take(Leased(self.replica.log, lease, steps))

    def on_captured(self, event: Captured) -> None:
        """In the midst of training a fragment's turn has come."""
        self.trainer.capture(event)
        slot = self.slots.get(event.fragment)
        if slot is not None:
            self._offer_captured(slot)

    def _offer_captured(self, slot: Slot) -> None:
        """Bring what was captured of a fragment into its slot, in this cycle or a later one; or nothing, if its turn
        has passed without us. We still have a say in what its entry is, and may hear that it is made."""
        if slot.state is not SlotState.OPEN or slot.log.closes:
            return
        replaying, captured = self.replica.replaying, self.trainer.captured.get(slot.log.fragment)
        is_replayed = replaying is not None and replaying.fragment == slot.log.fragment
        is_past = self.trainer.state is TrainerState.TRAINED or bool(self.replica.log.made)
        if captured is not None and not is_replayed:
            slot.take(WorkDone(captured))
        elif is_past and not self.trainer.is_training and self.replica.state is ReplicaState.LEVEL:
            slot.take(WorkDone(NOTHING))

    def on_trained(self, done: TrainingDone) -> None:
        was_training = self.trainer.is_training
        self.trainer.take(done)
        if was_training and not self.catching_up.keeps_work:
            self._offer_work()

    def _offer_work(self) -> None:
        if self.slot.log.closes and self.trainer.trained is not None:
            self.slot.take(WorkDone(self.trainer.trained))

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """An entry is committed, and its payload is here: take the outer step for its fragment."""
        votes = self._desk.polls.at(self.replica.log.of(header.fragment).position)
        if votes is not None and certificate is not None:
            votes.made(header, certificate)
        keeps = self.catching_up.keeps_work or not self.replica.log.is_closing(header)
        if not keeps:
            self.trainer.take(WorkEnds(self.replica.log.position, header))
        self.trainer.entered(header)
        self.replica.take(EntryMade(header, certificate, keeps))
        self.turn()

    def turn(self) -> None:
        """Close the slots whose entries are made. The next cycle has new ones."""
        log, here = self.replica.log, self.slot.log.position
        if log.position.is_in_cycle_of(here):
            self.slots = {fragment: self.slots[fragment] for fragment in log.pending}
        else:
            self.open_slots()

    def on_applied(self) -> None:
        """Go on training from the new theta at once, or with what an entry without us has left us."""
        self.turn()
        if self._leave_by is not None:
            self._leave_if_possible()  # as soon as the digest is there
            return
        if self.replica.state is not ReplicaState.LEVEL or self.replica.log.made:
            self.catching_up.look()  # with the other fragments' entries, where others have them
            return
        kept, self.catching_up.keeps_work = self.catching_up.keeps_work, False
        lease = self.replica.log.leases.get(self._me)
        for slot in list(self.slots.values()):
            self._offer_captured(slot)
        if kept and self.trainer.state is TrainerState.TRAINED:
            self._offer_work()
        elif kept:
            pass
        elif lease is not None and not self.replica.is_behind:
            self._begin(lease, self._whole)
        else:
            self.await_lease()
            self.join()

    def on_digested(self) -> None:
        """The digest of our state is known."""
        if self._leave_by is not None:
            self._leave_if_possible()
        elif self.state is State.JOINING:
            self.join()
        for slot in self.slots.values():
            if slot.state is SlotState.READY and not self.has_left:
                slot.say_ready()

    @property
    def slot(self) -> Slot:
        """The one whose entry closes the cycle, while it is open; else another that is."""
        return self.slots[max(self.slots)]

    def open_slots(self) -> None:
        """Begin with new slots: those before are of another cycle, or nothing in them matters any more."""
        self.slots = {fragment: self.open_slot(fragment) for fragment in self.replica.log.pending}

    def open_slot(self, fragment: int) -> Slot:
        return Slot(self._desk, self.presence, self.trainer, self.replica, fragment, self)

    # Into the run ---------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.joiner.may_ask or self._leave_by is not None or not self.slot.log.closes:
            return
        if self.replica.furthest is None:
            self.replica.note_nobody_ahead()
        if self.catching_up.search.question.is_due:
            self.catching_up.look()
        if self.replica.is_behind or self.replica.state is not ReplicaState.LEVEL:
            return
        lease = self.replica.log.leases.get(self._me)
        if lease is not None and not self.troubles.is_excluded:
            self._begin(lease, self._whole)
        else:
            self.joiner.ask(self.slot.leadership.elect())

    def on_grant(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us."""
        if self.joiner.accepts(leader, grant) and not self.replica.needs_signed_log:
            if self.troubles.readmitted():
                self.look_for_trouble()
            self.slot.leadership.granted_by = leader
            speeds = self.presence.speeds(self.replica.log)
            self._begin(grant.samples, self.trainer.steps_of_grant(grant.steps, speeds))

    def await_lease(self) -> None:
        """There is something new to ask for."""
        self.joiner.question.at_once()
        self.catching_up.search.question.at_once()

    # Behind, or in vain ---------------------------------------------------------------------------------------
    def on_commit(self, sender: str, commit: Commit, slot: Slot) -> None:
        """Apply the entry if we hold its payload; else somebody went on without us."""
        if slot.is_taking_part and slot.holds(commit.header):
            slot.take(commit, sender)
        else:
            self.catching_up.replay(sender, commit, slot)

    def on_refuse(self, leader: str, refuse: Refuse, slot: Slot) -> None:
        """The leader takes nothing from us as we are: begin again with its state, or with other samples, unless it is
        the leader that is wrong."""
        is_waiting = self.state is State.JOINING or slot.is_taking_part
        if not is_waiting or self.replica.state is not ReplicaState.LEVEL or leader == self._me:
            return
        self._desk.emit(Note("warning", f"refused by {leader}: {refuse.reason}"))
        ours = self.replica.state_digest
        if refuse.state_digest == ours:
            self._on_samples_refused(leader, slot)
        elif self._holds or ours == self.replica.state_of_most or leader in self.presence.unhelpful:
            self.presence.distrust(leader)  # it is wrong, or does not give the state that it wants
        else:
            self.catching_up.fetch_from(leader)

    def _on_samples_refused(self, leader: str, slot: Slot) -> None:
        """Samples that the leader gave us, or the log, are good. What another one gave may be somebody else's, too,
        whoever of the two lied: so ask this one for others."""
        if not slot.is_taking_part:
            return  # we have asked already
        if leader == slot.leadership.granted_by or self._me in self.replica.log.leases:
            self.presence.distrust(leader)
        else:
            self.catching_up.drop_work()
            self.await_lease()
            self.join()

    def on_excluded(self, leader: str, reason: str) -> None:
        """The leader goes on without us."""
        if not self.troubles.may_be_left_out:
            self.presence.distrust(leader)
        elif self.state in (State.JOINING, State.READY) and not self._holds:
            self.troubles.left_out(reason)
            self.look_for_trouble()

    def look_for_trouble(self) -> None:
        """See whether our work can count. Where it can't, stop training, and wait without a lease."""
        self.troubles.look(self.slot.leadership.elect())
        can_stop = self.state in (State.TRAINING, State.READY) and not self._is_averaging and not self._holds
        if self.troubles.is_aside and can_stop:
            self.catching_up.drop_work()
            self.await_lease()
        self.troubles.tell()

    def on_links_changed(self) -> None:
        self.troubles.links_changed()
        self.look_for_trouble()

    def on_refuted(self, refuted: AverageRefuted) -> None:
        """Most others may find the same of it, in other chunks: then it is left out."""
        reducer, name = refuted.reducer, refuted.round_name
        text = f"{reducer} has averaged chunk {refuted.chunk} of {name} wrongly: no exchange with it for an hour"
        self.presence.refuse(reducer)
        self._desk.emit(Note("warning", text))
        self.on_links_changed()

    def hear_amendments(self, amendments: Iterable[Amendment | None]) -> None:
        """Take in what the organiser has signed, to tell others of it, and to put it into an entry when we lead."""
        news = [amendment for amendment in amendments if self._desk.amending.hear(amendment)]
        if news and (proposed := self._desk.amending.proposed(self.replica.log)) is not None:
            self._desk.emit(Note("info", f"the organiser has signed {proposed}; it waits for an entry"))

    def on_fetched(self, event: SnapshotRestored | SnapshotFailed) -> None:
        self.catching_up.search.forget()
        if isinstance(event, SnapshotRestored):
            self.await_lease()
            self.open_slots()  # where the state is now
            self.join()

    # For others -----------------------------------------------------------------------------------------------
    def answers(self, sender: str) -> bool:
        """Whether a member's wish can be granted: we are where it is, and it is one of us. If a stranger is, too, its
        heartbeat comes before it asks again."""
        is_here = self.replica.state in (ReplicaState.LEVEL, ReplicaState.APPLYING) and self.replica.is_settled
        return is_here and (sender == self._me or self.presence.is_live(sender))

    def gives_lease(self, joiner: str, slot: Slot) -> bool:
        may_give = slot.log.closes and self.joiner.may_start() and not self.joiner.holds_back()
        return may_give and slot.leadership.gives_lease(joiner)

    def answer_elsewhere(self, sender: str, message: Message | Unread) -> None:
        """The sender is at a place that we have left, or have not reached."""
        if isinstance(message, Complete):
            self.slot.witness.compare_votes(sender, message)
        followed = self.replica.lineage.after(message.position)
        if followed is not None:
            header, certificate = followed
            if isinstance(message, Inquire) or not self.replica.is_news(header):
                self._desk.emit(Send(sender, Commit(header=header, certificate=certificate)))
        elif isinstance(message, Inquire):
            self._desk.emit(Send(sender, Elsewhere(position=self.replica.log.position)))

    # Out of the run -------------------------------------------------------------------------------------------
    def attempt_over(self, slot: Slot) -> None:
        self._leave_if_possible()
        if not self.has_left:
            slot.say_ready()

    def on_leave_requested(self, at_once: bool) -> None:
        leave_by = self._desk.now + (0 if at_once else self._desk.settings.timing.leave)
        self._leave_by = min(leave_by, self._leave_by or leave_by)
        self._leave_if_possible()

    @property
    def notes_down(self) -> bool:
        """Whether we leave, and only the last entry's digest is still to come: nothing new begins."""
        return self._leave_by is not None and self.replica.undigested is not None

    def _leave_if_possible(self) -> None:
        """A round under way is finished first, and its entry noted down, within `leave_by`; all else is dropped."""
        if self._leave_by is None:
            return
        is_applying = self.replica.state is ReplicaState.APPLYING or self.replica.undigested is not None
        is_busy = self._is_averaging or is_applying
        if not is_busy or self._desk.now >= self._leave_by:
            self._leave()

    def _leave(self) -> None:
        self.trainer.stop()
        self.has_left = True
        self._desk.emit(Stop())  # the driver says goodbye to everybody

    @property
    def goodbye(self) -> Leaving:
        """What to tell the others in the end."""
        return self._desk.memory.goodbye(self.replica.log.position)

    @property
    def _is_averaging(self) -> bool:
        return SlotState.AVERAGING in [slot.state for slot in self.slots.values()]  # `any` takes three times as long

    @property
    def _holds(self) -> bool:
        """Whether we hold an entry that may have been committed."""
        return any(slot.acceptor.held for slot in self.slots.values())
