"""One peer's way from outer step to outer step: the meaning of one part's news for the others.

One outer step goes: `join` or `on_applied` gives the trainer a lease; the trainer is done (`on_trained`), so the round
is ready; the round decides (`entry_made`), so the work ends, the replica applies the entry, and the next round opens.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.log.certificate import Certificate
from peers.log.header import Header, Position
from peers.log.lineage import Lineage
from peers.presence.presence import Presence
from peers.protocol.catching_up import CatchingUp
from peers.protocol.context import Context
from peers.protocol.effects import Note, Send, Stop
from peers.protocol.events import AverageRefuted, Captured, SnapshotFailed, SnapshotRestored, Tick, TrainingDone
from peers.protocol.hindrance import Hindrances
from peers.protocol.internal import EntryMade, Leased, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.messages import Certified, Elsewhere, Inquire, LeaseGrant, Leaving, Message, Refuse, Unread
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.round import EntryRound, RoundState
from peers.protocol.states import State
from peers.protocol.trainer import NOTHING, Trainer, TrainerState
from peers.values.leases import Lease
from peers.values.manifest import Amendment


class StepCycle:
    """Holds the parts of a peer, and decides what one part's news means for the others."""

    def __init__(self, context: Context, state_digest: bytes, lineage: Lineage) -> None:
        pause = 2 * context.settings.timing.round_timeout
        expiry = context.settings.timing.heartbeat_expiry
        self.presence = Presence(context.me, expiry, pause, context.now, context.is_farewell)
        self.trainer = Trainer(context)
        self.replica = Replica(context, self.presence, lineage, state_digest)
        self.hindrances = Hindrances(context, self.presence, self.trainer, self.replica)
        self.catching_up = CatchingUp(context, self.presence, self.trainer, self.replica, self)
        self.joiner = Joiner(context, self.presence, self.replica)
        self._context = context
        self._me = context.me
        self._whole = context.settings.inner_steps
        self.rounds: dict[int, EntryRound] = {}
        self._certified: list[Position] = []  # whose entries are in our log, in a cycle that is not whole
        self.open_rounds()
        self._leave_by: float | None = None
        self.has_left = False
        self.goodbye: Leaving | None = None
        """The farewell to tell others in the end. None: no peer that trains is there, and nobody would wait for this
        one, which is the same voter when it comes back."""

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
        states = [round.state for round in self.rounds.values()]
        if RoundState.EXCHANGING in states or RoundState.DECIDED in states:
            return State.AVERAGING
        return State.READY if RoundState.READY in states else State.JOINING

    def tick(self) -> None:
        if self._leave_by is not None and self._context.now >= self._leave_by:
            self._leave()
            return
        if self.state is State.JOINING:
            self.join()
        for round in list(self.rounds.values()):
            if self.has_left:
                return
            self._offer_captured(round)
            round.take(Tick())
            round.leader.tick()

    # One outer step -------------------------------------------------------------------------------------------
    def _begin(self, lease: Lease, steps: int) -> None:
        self.trainer.take(Leased(self.replica.log, lease, steps))

    def on_captured(self, event: Captured) -> None:
        """In the midst of training a fragment's turn has come."""
        self.trainer.take(event)
        round = self.rounds.get(event.fragment)
        if round is not None:
            self._offer_captured(round)

    def _offer_captured(self, round: EntryRound) -> None:
        """Bring what was captured of a fragment into its round, in this cycle or a later one; or nothing, if its turn
        has passed without us. We still have a say in what its entry is, and may hear that it is made."""
        if round.state is not RoundState.OPEN or round.log.closes:
            return
        replaying, captured = self.replica.replaying, self.trainer.captures.of(round.log.fragment)
        is_replayed = replaying is not None and replaying.fragment == round.log.fragment
        is_past = self.trainer.state is TrainerState.TRAINED or bool(self.replica.log.made)
        if captured is not None and not is_replayed:
            round.take(WorkDone(captured))
        elif is_past and not self.trainer.is_training and self.replica.state is ReplicaState.LEVEL:
            round.take(WorkDone(NOTHING))

    def on_trained(self, done: TrainingDone) -> None:
        was_training = self.trainer.is_training
        self.trainer.take(done)
        if was_training and not self.catching_up.keeps_work:
            self._offer_work()

    def _offer_work(self) -> None:
        if self.round.log.closes and self.trainer.trained is not None:
            self.round.take(WorkDone(self.trainer.trained))

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """An entry is committed, and its payload is here: take the outer step for its fragment."""
        if certificate is not None and not certificate.choice.alone and self.replica.log.last is not None:
            self._certified.append(self.replica.log.of(header.fragment).position)
        keeps = self.catching_up.keeps_work or not self.replica.log.is_closing(header)
        if not keeps:
            self.trainer.take(WorkEnds(self.replica.log.position, header))
        self.trainer.captures.entry_made(header, self._me)
        self.replica.take(EntryMade(header, certificate, keeps))
        self._close_positions()
        self.turn()

    def _close_positions(self) -> None:
        """Note that nothing is voted any more where a whole cycle's certified entries are known. A disk has whole
        cycles alone, so that votes amid a cycle may be needed again."""
        if not self.replica.log.made:
            for position in self._certified:
                self._context.votes.close(position)
            self._certified.clear()

    def turn(self) -> None:
        """Close the rounds whose entries are made. The next cycle has new ones."""
        log, here = self.replica.log, self.round.log.position
        if log.position.is_in_cycle_of(here):
            self.rounds = {fragment: self.rounds[fragment] for fragment in log.pending}
        else:
            self.open_rounds()

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
        for round in list(self.rounds.values()):
            self._offer_captured(round)
        if kept and self.trainer.state is TrainerState.TRAINED:
            self._offer_work()
        elif kept:
            pass
        elif lease is not None and not self.replica.is_behind:
            self._begin(lease, self._whole)
        else:
            self.look_for_hindrance()  # what was trained last may have been in vain
            self.await_lease()
            self.join()

    def on_digested(self) -> None:
        """The digest of our state is known."""
        if self._leave_by is not None:
            self._leave_if_possible()
        elif self.state is State.JOINING:
            self.join()
        for round in self.rounds.values():
            if round.state is RoundState.READY and not self.has_left:
                round.say_ready()

    @property
    def round(self) -> EntryRound:
        """The one whose entry closes the cycle, while it is open; else another that is."""
        return self.rounds[max(self.rounds)]

    def open_rounds(self) -> None:
        """Begin with new rounds: those before are of another cycle, or nothing in them matters any more."""
        self.rounds = {fragment: self.open_round(fragment) for fragment in self.replica.log.pending}

    def open_round(self, fragment: int) -> EntryRound:
        return EntryRound(self._context, self.presence, self.trainer, self.replica, fragment, self)

    # Into the run ---------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.joiner.knows_peers or self._leave_by is not None or not self.round.log.closes:
            return
        if self.replica.furthest is None:
            self.replica.note_nobody_ahead()
        if self.catching_up.search.question.is_due:
            self.catching_up.look()
        if self.replica.is_behind or self.replica.state is not ReplicaState.LEVEL:
            return
        lease = self.replica.log.leases.get(self._me)
        if self.hindrances.is_aside:
            return
        if lease is not None:
            self._begin(lease, self._whole)
        else:
            self.round.look()
            self.joiner.ask(self.round.led_by)

    def on_grant(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us."""
        if self.joiner.accepts(leader, grant) and not self.replica.needs_signed_log:
            self.round.granted(leader)
            speeds = self.presence.speeds(self.replica.log)
            self._begin(grant.samples, self._context.pace.steps_of_grant(grant.steps, self.trainer.speed, speeds))

    def await_lease(self) -> None:
        """There is something new to ask for."""
        self.joiner.question.at_once()
        self.catching_up.search.question.at_once()

    # Behind, or in vain ---------------------------------------------------------------------------------------
    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Others have an entry whose payload is not here, or one that a minority has made."""
        self.catching_up.replay(certified, sender, round)

    def inquire(self, round: EntryRound) -> None:
        """As a leader, ask whether others have made the entry already."""
        self.catching_up.search.inquire(round.log)

    def on_refuse(self, leader: str, refuse: Refuse, round: EntryRound) -> None:
        """The leader takes nothing from us as we are: begin again with its state, or with other samples, unless it is
        the leader that is wrong."""
        is_waiting = self.state is State.JOINING or round.is_taking_part
        if not is_waiting or self.replica.state is not ReplicaState.LEVEL or leader == self._me:
            return
        self._context.emit(Note("info", f"refused by {leader}: {refuse.reason}"))
        ours = self.replica.state_digest
        if refuse.state_digest == ours:
            self._on_samples_refused(leader, round)
        elif not (self._is_bound or ours == self.replica.state_of_most or leader in self.presence.branches.unhelpful):
            self.catching_up.fetch_from(leader)

    def _on_samples_refused(self, leader: str, round: EntryRound) -> None:
        """Samples that the leader gave us, or the log, are good. What another one gave may be another joiner's, too,
        whichever of the two lied: so ask this one for others."""
        is_good = leader == round.granted_by or self._me in self.replica.log.leases
        if round.is_taking_part and not is_good:
            self.catching_up.drop_work()
            self.await_lease()
            self.join()

    def look_for_hindrance(self) -> None:
        """See whether our work can count. Where it can't, stop training, and wait without a lease."""
        self.hindrances.look(self.round.log.leader_of(0) or self.round.leader_of(0))
        can_stop = self.state in (State.TRAINING, State.READY) and not self._is_exchanging and not self._is_bound
        if self.hindrances.is_aside and can_stop:
            self.catching_up.drop_work()
            self.await_lease()
        self.hindrances.tell()

    def on_links_changed(self) -> None:
        self.look_for_hindrance()

    def on_refuted(self, refuted: AverageRefuted) -> None:
        """An average is another one than its blocks come to. Its reducer has lied, or the round was not one: nobody
        else can see it from what is here, so it is told to the volunteer alone."""
        text = f"{refuted.reducer} has averaged chunk {refuted.chunk} of {refuted.round_name} wrongly"
        self._context.emit(Note("warning", text))

    def hear_amendments(self, amendments: Iterable[Amendment | None]) -> None:
        """Take in what the organiser has signed, to tell others of it, and to put it into an entry when we lead."""
        news = [amendment for amendment in amendments if self._context.amending.hear(amendment)]
        if news and (proposed := self._context.amending.proposed(self.replica.log)) is not None:
            self._context.emit(Note("info", f"the organiser has signed {proposed}; it waits for an entry"))

    def on_fetched(self, event: SnapshotRestored | SnapshotFailed) -> None:
        self.catching_up.search.forget()
        if isinstance(event, SnapshotRestored):
            self.await_lease()
            self.open_rounds()  # where the state is now
            self.join()

    # For others -----------------------------------------------------------------------------------------------
    def answers(self, sender: str) -> bool:
        """Whether a member's wish can be granted: we are where it is, and it is one of us. If a stranger is, too, its
        heartbeat comes before it asks again."""
        is_here = self.replica.state in (ReplicaState.LEVEL, ReplicaState.APPLYING) and self.replica.is_settled
        return is_here and (sender == self._me or self.presence.is_live(sender))

    def gives_lease(self, round: EntryRound) -> bool:
        """Return whether joiners may be given samples here."""
        return round.log.closes and self.joiner.may_start() and not self.joiner.holds_back()

    def answer_elsewhere(self, sender: str, message: Message | Unread) -> None:
        """Answer a sender at a place that we have left, or have not reached."""
        followed = self.replica.lineage.after(message.position)
        if followed is not None:
            header, certificate = followed
            if isinstance(message, Inquire) or not self.replica.is_news(header):
                self._context.emit(Send(sender, Certified(header=header, certificate=certificate)))
        elif isinstance(message, Inquire):
            self._context.emit(Send(sender, Elsewhere(position=self.replica.log.position)))

    # Out of the run -------------------------------------------------------------------------------------------
    def attempt_over(self, round: EntryRound) -> None:
        self._leave_if_possible()

    def on_leave_requested(self, at_once: bool) -> None:
        leave_by = self._context.now + (0 if at_once else self._context.settings.timing.leave)
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
        is_busy = self._is_exchanging or is_applying
        if not is_busy or self._context.now >= self._leave_by:
            self._leave()

    def _leave(self) -> None:
        self.trainer.stop()
        self.has_left = True
        if self.presence.live().trainers:
            self.goodbye = self._context.goodbye(self.replica.log.position)
        self._context.emit(Stop())  # the driver says goodbye to everybody

    @property
    def _is_exchanging(self) -> bool:
        # `any` takes three times as long
        return RoundState.EXCHANGING in [round.state for round in self.rounds.values()]

    @property
    def _is_bound(self) -> bool:
        """Whether we are bound to an entry that may have been committed."""
        return any(round.voter.lock is not None for round in self.rounds.values())
