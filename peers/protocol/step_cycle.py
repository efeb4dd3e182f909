"""The cycle of one peer from outer step to outer step. If one of the peer's parts changes, `StepCycle`
informs the others.

One outer step runs like this: `join` or `on_applied` gives the trainer a lease. When the trainer is done
(`on_trained`), the round is ready. When the round decides (`entry_made`), the work ends, the replica applies the entry,
and the next round opens.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.log.certificate import Certificate
from peers.log.header import NO_PAYLOAD, Header, Position
from peers.log.lineage import Lineage
from peers.messages.messages import Certified, Elsewhere, Inquire, LeaseGrant, Leaving, Message, Refuse, Unread
from peers.presence.presence import Presence
from peers.protocol.belief import Belief
from peers.protocol.catching_up import Search
from peers.protocol.context import Answers, Context
from peers.protocol.effects import Note, Send, Stop
from peers.protocol.events import (
    LineageNotSeen,
    LineageSeen,
    SnapshotFailed,
    SnapshotRestored,
    Tick,
    TrainingDone,
)
from peers.protocol.hindrance import Hindrances
from peers.protocol.internal import EntryMade, FarBehind, Leased, NoneAhead, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.round import EntryRound, RoundState
from peers.protocol.states import State
from peers.protocol.trainer import NOTHING, Trainer, TrainerState
from peers.values.leases import Lease
from peers.values.manifest import Amendment


class StepCycle:
    """The course of one peer's cycles. It connects the peer's training, rounds, log and search for other logs.
    `keeps_work` is true if the present training is for a later cycle than the entry being fetched and applied."""

    def __init__(self, context: Context, state_digest: bytes, lineage: Lineage) -> None:
        pause = 2 * context.settings.timing.round_timeout
        expiry = context.settings.timing.heartbeat_expiry
        self.presence = Presence(context.me, expiry, pause, context.now, context.is_farewell)
        self.trainer = Trainer(context)
        self.replica = Replica(context, self.presence, lineage, state_digest)
        self.hindrances = Hindrances(context, self.presence, self.trainer, self.replica)
        self.belief = Belief(context, self.presence, self.replica)
        self.search = Search(context, self.presence, self.replica, self.belief)
        self.joiner = Joiner(context, self.presence, self.replica)
        self.keeps_work = False
        self._context = context
        self._answers = Answers(context)
        self._certified: list[Position] = []  # positions of this cycle's certified entries; emptied at its end
        self.rounds: dict[int, EntryRound] = {}
        self._open_rounds()
        self._leave_by: float | None = None
        self.has_left = False
        self.goodbye: Leaving | None = None
        """The farewell to send to others at the end. None if no other peer trains: then none waits for this one, and it
        comes back as the same voter."""

    @property
    def state(self) -> State:
        """The peer's activity in one word, such as training or averaging."""
        if self.has_left:
            return State.LEFT
        if self.replica.state is not ReplicaState.LEVEL:
            return State(self.replica.state.value)
        if self._awaits_last_digest:
            return State.APPLYING
        if self.trainer.is_training:
            return State.TRAINING
        states = [round.state for round in self.rounds.values()]
        if RoundState.EXCHANGING in states or RoundState.DECIDED in states:
            return State.AVERAGING
        return State.READY if RoundState.READY in states else State.JOINING

    @property
    def round(self) -> EntryRound:
        """The open round with the highest fragment: the model's last fragment, unless its entry is already made."""
        return self.rounds[max(self.rounds)]

    @property
    def _can_catch_up(self) -> bool:
        """True if this peer may fetch entries or a state: it fetches and applies none now, and is not about to
        leave."""
        return self.replica.state is ReplicaState.LEVEL and not self._awaits_last_digest

    def tick(self) -> None:
        """Handle a Tick: leave the run if the time to leave has come. Otherwise try to join if this peer is joining,
        and pass the Tick to each open round."""
        if self._leave_by is not None and self._context.now >= self._leave_by:
            self._leave()
            return
        if self.state is State.JOINING:
            self.join()
        for round in list(self.rounds.values()):
            if self.has_left:
                return
            self.offer_captured(round.log.fragment)
            round.take(Tick())
            round.leader.tick()

    # One outer step -------------------------------------------------------------------------------------------
    def _begin(self, lease: Lease, steps: int) -> None:
        self.trainer.take(Leased(self.replica.log, lease, steps))

    def offer_captured(self, fragment: int) -> None:
        """Pass a fragment's capture to the fragment's round. If the fragment was not captured in time, pass NOTHING, a
        result without tokens: this peer then only votes on the entry (R15)."""
        round = self.rounds.get(fragment)
        if round is None or round.state is not RoundState.OPEN or round.log.closes:
            return
        replaying, captured = self.replica.replaying, self.trainer.captures.of(fragment)
        is_replayed = replaying is not None and replaying.fragment == fragment
        is_past = self.trainer.state is TrainerState.TRAINED or bool(self.replica.log.made)
        if captured is not None and not is_replayed:
            round.take(WorkDone(captured))
        elif is_past and not self.trainer.is_training and self.replica.state is ReplicaState.LEVEL:
            round.take(WorkDone(NOTHING))

    def on_trained(self, done: TrainingDone) -> None:
        """Store the finished training, and pass it to the closing entry's round. Training for a later cycle is passed
        on only once this peer has applied the present cycle's entries."""
        was_training = self.trainer.is_training
        self.trainer.take(done)
        if was_training and not self.keeps_work:
            self._offer_work()

    def _offer_work(self) -> None:
        if self.round.log.closes and self.trainer.trained is not None:
            self.round.take(WorkDone(self.trainer.trained))

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """Append a committed entry to the log, and take its outer step. This peer must have the entry's payload."""
        log = self.replica.log
        if certificate is not None and not certificate.choice.alone and log.last is not None:
            self._certified.append(log.of(header.fragment).position)
        keeps = self.keeps_work or not log.is_closing(header)
        if not keeps:
            self.trainer.take(WorkEnds(log.position, header))
        self.trainer.captures.entry_made(header, self._context.me)
        self.replica.take(EntryMade(header, certificate, keeps))
        if not self.replica.log.made:  # the cycle is complete, so the log on the disk has it: drop its votes (R11)
            for position in self._certified:
                self._context.votes.close(position)
            self._certified.clear()
        self._turn()

    def _turn(self) -> None:
        """Close the rounds whose entries are made, and open new rounds if a new cycle has begun."""
        log = self.replica.log
        if log.position.is_in_cycle_of(self.round.log.position):
            self.rounds = {fragment: self.rounds[fragment] for fragment in log.pending}
        else:
            self._open_rounds()

    def _open_rounds(self) -> None:
        self.rounds = {fragment: self._open_round(fragment) for fragment in self.replica.log.pending}

    def _open_round(self, fragment: int) -> EntryRound:
        return EntryRound(self._context, self.presence, self.trainer, self.replica, fragment, self)

    def on_applied(self) -> None:
        """Continue the training if it is for a later entry than the applied one. Otherwise train this peer's lease from
        the new theta; if it has no lease, ask for one."""
        self._turn()
        if self._leave_by is not None:
            self.leave_if_possible()  # if not possible yet, `on_digested` tries again
            return
        if self.replica.state is not ReplicaState.LEVEL or self.replica.log.made:
            self._look()  # other peers may have the cycle's other entries
            return
        kept, self.keeps_work = self.keeps_work, False
        lease = self.replica.log.leases.get(self._context.me)
        for fragment in list(self.rounds):
            self.offer_captured(fragment)
        if kept:
            if self.trainer.state is TrainerState.TRAINED:
                self._offer_work()
        elif lease is not None and not self.replica.is_behind:
            self._begin(lease, self._context.settings.inner_steps)
        else:
            self.look_for_hindrance()  # perhaps this peer has no lease because its work cannot count
            self._ask_at_once()
            self.join()

    def on_digested(self) -> None:
        """Use the new state's digest: leave if this peer is leaving. Otherwise try to join if it has no lease, and
        send Ready in each round in which it is ready."""
        if self._leave_by is not None:
            self.leave_if_possible()
        elif self.state is State.JOINING:
            self.join()
        for round in self.rounds.values():
            if round.state is RoundState.READY and not self.has_left:
                round.say_ready()

    # Joining ----------------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Catch up with the other peers. Then train this peer's lease; if it has none, ask the leader for one (R14)."""
        if not self.joiner.knows_peers or self._leave_by is not None or not self.round.log.closes:
            return
        if self.search.question.is_due:
            self._look()
        if self.replica.is_behind or self.replica.state is not ReplicaState.LEVEL or self.hindrances.is_aside:
            return
        lease = self.replica.log.leases.get(self._context.me)
        if lease is not None:
            self._begin(lease, self._context.settings.inner_steps)
        else:
            self.round.look()
            self.joiner.ask(self.round.led_by)

    def on_grant(self, leader: str, grant: LeaseGrant) -> None:
        """Train the samples that the leader granted, if the grant is acceptable."""
        if self.joiner.accepts(leader, grant) and not self.replica.needs_signed_log:
            self.round.granted(leader)
            others = self.presence.speeds(self.replica.log)
            self._begin(grant.samples, self._context.pace.steps_of_grant(grant.steps, self.trainer.speed, others))

    def _ask_at_once(self) -> None:
        self.joiner.question.at_once()
        self.search.question.at_once()

    def on_refuse(self, leader: str, refuse: Refuse, round: EntryRound) -> None:
        """Handle the leader's refusal of this peer. If their states differ, fetch the leader's state, unless this
        peer's is known to be right. If the states are equal, ask for other samples, unless this peer's follow from the
        log or this leader granted them."""
        is_waiting = self.state is State.JOINING or round.is_taking_part
        if not is_waiting or self.replica.state is not ReplicaState.LEVEL or leader == self._context.me:
            return
        self._context.emit(Note("info", f"the leader {leader} refused this peer: {refuse.reason}"))
        ours = self.replica.state_digest
        if refuse.state_digest == ours:
            # Keep work on samples that the log, or the leader that refuses this peer, granted. Drop other work, because
            # a different leader may have granted the same samples to two peers.
            is_good = leader == round.granted_by or self._context.me in self.replica.log.leases
            if round.is_taking_part and not is_good:
                self._drop_work()
                self._ask_at_once()
                self.join()
        elif not (self._is_bound or ours == self.replica.state_of_most or leader in self.presence.branches.unhelpful):
            self._fetch_from(leader)

    # Catching up ------------------------------------------------------------------------------------------------
    def on_heartbeats(self) -> None:
        """Fetch the state of most voters if their heartbeats name another one than this peer's. Look for peers that are
        ahead, and stop training if this peer's work cannot count."""
        self._check_state()
        self._look()
        self.look_for_hindrance()

    def _look(self) -> None:
        if self._can_catch_up:
            self.search.look()

    def on_lineage(self, event: LineageSeen | LineageNotSeen) -> None:
        """Compare a donor's log with this peer's. If the donor's is longer or better (R21), fetch its state, and send
        it certificates that convict peers of signing both branches (R9). If no log was seen, prefer other donors."""
        if isinstance(event, LineageNotSeen):
            self.search.on_not_seen(event)
            return
        context, lineage = self._context, self.replica.lineage
        context.convict(context.evidence.observe_split(event.ours, event.theirs, lineage))
        far = self.search.on_seen(event)
        if far is None or not self._can_catch_up:
            return
        given_up = event.ours.certificates if event.theirs.splits_from(event.ours) else ()
        for fragment in sorted(given_up):
            made = lineage.after(event.ours.start.of(fragment).position)
            if made is not None:
                context.emit(Send(event.donor, Certified(header=made[0], certificate=made[1])))
        self._fetch(far)

    def on_elsewhere(self, sender: str) -> None:
        """Fetch the log of a peer that claims to be ahead but did not have the entry for which this peer asked: the
        two may be on different branches."""
        if self._can_catch_up and self.replica.claimant == sender:
            self.search.weigh(sender)

    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Fetch another peer's entry with its payload, and apply it, if this peer accepts the entry. Otherwise fetch
        the sender's log if the sender claims to be furthest ahead."""
        if not self._can_catch_up:
            return
        header, log = certified.header, self.replica.log
        was_asked = self.state is State.JOINING or round.was_asked(sender)
        support = self.belief.support(certified, round.log)
        behind = self.belief.entry(sender, certified, support, sender_was_asked=was_asked)
        if behind is None:
            if self.replica.claimant == sender and not (support and support.is_certified):
                self.search.weigh(sender)  # the sender's log shows whether it is on the same branch
            return
        if log.is_closing(header):
            self.keeps_work = self.trainer.can_count_after(header)
            if not self.keeps_work:
                self.trainer.take(WorkEnds(log.position, header))
            self.rounds[header.fragment] = self._open_round(header.fragment)
        self.search.answered()
        self.replica.take(behind)
        if header.payload == NO_PAYLOAD:
            self.entry_made(header, behind.certificate)

    def on_not_replayed(self, header: Header, reason: str) -> None:
        """Fetch the state of a peer ahead, because no donor has the entry's payload. If no peer is ahead, stop
        catching up."""
        self._context.emit(Note("info", f"could not fetch the payload of entry {header.index}: {reason}"))
        far = self.search.far_behind()
        if far is not None:
            self._fetch(far)
        elif self.replica.log.is_closing(header):
            self._drop_work()
            self.replica.take(NoneAhead())
            self._ask_at_once()
        else:  # the cycle is still open, so this entry's round is, too: a peer that has the entry sends it again
            self.replica.take(NoneAhead())
            self._turn()

    def _check_state(self) -> None:
        """Fetch the state of most voters if this peer's state differs at the same place, as after a memory error."""
        replica = self.replica
        most = replica.state_of_most if self._can_catch_up and replica.is_settled else None
        if most is None or most == replica.state_digest:
            return
        place = replica.settled.position.head, most
        having = {peer for peer, beat in self.presence.live().items() if (beat.head, beat.state_digest) == place}
        donor = min(having - self.presence.branches.unhelpful, default=None)
        if donor is not None:
            text = f"this peer's state differs from that of most peers: fetching theirs from {donor}"
            self._context.emit(Note("error", text))
            self._fetch_from(donor)

    def _fetch_from(self, donor: str) -> None:
        self._fetch(FarBehind(donor, self.replica.log.position.index))

    def _fetch(self, far: FarBehind) -> None:
        self._drop_work()
        self.replica.take(far)

    def on_fetched(self, event: SnapshotRestored | SnapshotFailed) -> None:
        """Begin the search for peers that are ahead anew. If a state was fetched, join the run with it."""
        self.search.fetched()
        if isinstance(event, SnapshotRestored):
            self._ask_at_once()
            self._open_rounds()
            self.join()

    def _drop_work(self) -> None:
        """Discard this peer's training and its open rounds. Its votes in this cycle still bind it."""
        self.trainer.take(WorkEnds(self.replica.log.position))
        self.keeps_work = False
        self._open_rounds()

    def look_for_hindrance(self) -> None:
        """Check whether this peer's work can count. If it cannot, stop training and wait without a lease."""
        self.hindrances.look(self.round.log.leader_of(0) or self.round.leader_of(0))
        can_stop = self.state in (State.TRAINING, State.READY) and not self._is_exchanging and not self._is_bound
        if self.hindrances.is_aside and can_stop:
            self._drop_work()
            self._ask_at_once()

    # Requests of other peers ------------------------------------------------------------------------------------
    def hear_amendments(self, amendments: Iterable[Amendment | None]) -> None:
        """Store the organiser's signed amendments, to send them on in heartbeats and to propose them as a leader."""
        amending, settings = self._context.amending, self._context.settings
        for news in [amendment for amendment in amendments if amendment and amending.hear(amendment)]:
            if news == amending.refused:
                reason = settings.why_not_followed(news)
                self._context.emit(Note("warning", f"{reason} This peer does not vote for it."))
            elif news == amending.proposed(self.replica.log):
                self._context.emit(Note("info", f"the organiser has signed {news}; the next outer step can take it in"))

    def inquire(self, round: EntryRound) -> None:
        """Ask another member whether it already has the round's entry. Only the round's leader does so."""
        self.search.inquire(round.log)

    def answers(self, sender: str) -> bool:
        """Return True if this peer should handle a member's request: its own state is known, and the sender is live. A
        new sender repeats the request after its first heartbeat."""
        is_here = self.replica.state in (ReplicaState.LEVEL, ReplicaState.APPLYING) and self.replica.is_settled
        return is_here and (sender == self._context.me or self.presence.is_live(sender))

    def gives_lease(self, round: EntryRound) -> bool:
        """Return True if this peer may grant samples to joiners for the round's entry."""
        return round.log.closes and self.joiner.may_start() and not self.joiner.holds_back()

    def answer_elsewhere(self, sender: str, message: Message | Unread) -> None:
        """If a message is about a position that this peer has passed, answer with the entry made there. If this peer
        lacks that entry, answer an Inquire with its own position. Answer the same question at most once in
        half of the pause between repeated messages."""
        if not self._answers.is_due(sender, message.position):
            return
        followed = self.replica.lineage.after(message.position)
        if followed is not None:
            header, certificate = followed
            if isinstance(message, Inquire) or not self.replica.is_news(header):
                self._context.emit(Send(sender, Certified(header=header, certificate=certificate)))
        elif isinstance(message, Inquire):
            self._context.emit(Send(sender, Elsewhere(position=self.replica.log.position)))

    # Leaving ----------------------------------------------------------------------------------------------------
    def on_leave_requested(self, at_once: bool) -> None:
        """Leave the run after the round under way; immediately if `at_once`."""
        leave_by = self._context.now + (0 if at_once else self._context.settings.timing.leave)
        self._leave_by = min(leave_by, self._leave_by or leave_by)
        self.leave_if_possible()

    @property
    def _awaits_last_digest(self) -> bool:
        """True if this peer is leaving, and waits only for the digest of its last entry. It begins nothing new."""
        return self._leave_by is not None and self.replica.undigested is not None

    def leave_if_possible(self) -> None:
        """Leave the run if the volunteer has asked for it, and either no exchange or outer step is under way or the
        time limit `_leave_by` has passed."""
        if self._leave_by is None:
            return
        is_applying = self.replica.state is ReplicaState.APPLYING or self.replica.undigested is not None
        if not (self._is_exchanging or is_applying) or self._context.now >= self._leave_by:
            self._leave()

    def _leave(self) -> None:
        self.trainer.stop()
        self.has_left = True
        if self.presence.live().trainers:
            self.goodbye = self._context.votes.leave(self.replica.log.position)
        self._context.emit(Stop())  # the driver sends the farewell, then ends

    @property
    def _is_exchanging(self) -> bool:
        # A list, because `any` over a generator takes three times as long.
        return RoundState.EXCHANGING in [round.state for round in self.rounds.values()]

    @property
    def _is_bound(self) -> bool:
        return any(round.voter.lock is not None for round in self.rounds.values())
