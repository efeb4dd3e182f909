"""One peer's way from outer step to outer step: the meaning of one part's news for the others.

One outer step goes: `join` or `on_applied` gives the trainer a lease; the trainer is done (`on_trained`), so the round
is ready; the round decides (`entry_made`), so the work ends, the replica applies the entry, and the next round opens.
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
from peers.protocol.internal import EntryMade, FarBehind, Leased, NobodyAhead, WorkDone, WorkEnds
from peers.protocol.joiner import Joiner
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.round import EntryRound, RoundState
from peers.protocol.states import State
from peers.protocol.trainer import NOTHING, Trainer, TrainerState
from peers.values.leases import Lease
from peers.values.manifest import Amendment


class StepCycle:
    """The parts of a peer, and what the news of each means for the others. `keeps_work` says that the work in hand goes
    into a later cycle than the one that is replayed."""

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
        self._certified: list[Position] = []  # whose entries are in our log, in a cycle that is not whole
        self.rounds: dict[int, EntryRound] = {}
        self._open_rounds()
        self._leave_by: float | None = None
        self.has_left = False
        self.goodbye: Leaving | None = None
        """The farewell to tell others in the end. None: no other peer trains, so none would wait for this one, which
        comes back as the same voter."""

    @property
    def state(self) -> State:
        """What we are doing, in one word."""
        if self.has_left:
            return State.LEFT
        if self.replica.state is not ReplicaState.LEVEL:
            return State(self.replica.state.value)
        if self._notes_down:
            return State.APPLYING
        if self.trainer.is_training:
            return State.TRAINING
        states = [round.state for round in self.rounds.values()]
        if RoundState.EXCHANGING in states or RoundState.DECIDED in states:
            return State.AVERAGING
        return State.READY if RoundState.READY in states else State.JOINING

    @property
    def round(self) -> EntryRound:
        """The round whose entry closes the cycle, while it is open; else another open one."""
        return self.rounds[max(self.rounds)]

    @property
    def _is_level(self) -> bool:
        """Whether we may turn to another place of the log."""
        return self.replica.state is ReplicaState.LEVEL and not self._notes_down

    def tick(self) -> None:
        """Do what is due."""
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
        """Bring a fragment's capture into its round, in this cycle or a later one; or nothing, if its turn has passed
        without us: we still vote on its entry (R15)."""
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
        """Bring what was trained into the round, unless it is for a later one."""
        was_training = self.trainer.is_training
        self.trainer.take(done)
        if was_training and not self.keeps_work:
            self._offer_work()

    def _offer_work(self) -> None:
        if self.round.log.closes and self.trainer.trained is not None:
            self.round.take(WorkDone(self.trainer.trained))

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """Take the outer step of an entry that is committed, and whose payload is here."""
        log = self.replica.log
        if certificate is not None and not certificate.choice.alone and log.last is not None:
            self._certified.append(log.of(header.fragment).position)
        keeps = self.keeps_work or not log.is_closing(header)
        if not keeps:
            self.trainer.take(WorkEnds(log.position, header))
        self.trainer.captures.entry_made(header, self._context.me)
        self.replica.take(EntryMade(header, certificate, keeps))
        if not self.replica.log.made:  # a disk has whole cycles alone: votes amid a cycle may be needed again (R11)
            for position in self._certified:
                self._context.votes.close(position)
            self._certified.clear()
        self._turn()

    def _turn(self) -> None:
        """Close the rounds whose entries are made. The next cycle has new ones."""
        log = self.replica.log
        if log.position.is_in_cycle_of(self.round.log.position):
            self.rounds = {fragment: self.rounds[fragment] for fragment in log.pending}
        else:
            self._open_rounds()

    def _open_rounds(self) -> None:
        """Open new rounds. Earlier ones are of another cycle, or of work that was dropped."""
        self.rounds = {fragment: self._open_round(fragment) for fragment in self.replica.log.pending}

    def _open_round(self, fragment: int) -> EntryRound:
        return EntryRound(self._context, self.presence, self.trainer, self.replica, fragment, self)

    def on_applied(self) -> None:
        """Train from the new theta, or go on with work that an entry without us has left us."""
        self._turn()
        if self._leave_by is not None:
            self.leave_if_possible()  # as soon as the digest is there
            return
        if self.replica.state is not ReplicaState.LEVEL or self.replica.log.made:
            self._look()  # others may have the other fragments' entries
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
            self.look_for_hindrance()  # what was trained last may have been in vain
            self._ask_at_once()
            self.join()

    def on_digested(self) -> None:
        """Tell others of the state, whose digest is known now."""
        if self._leave_by is not None:
            self.leave_if_possible()
        elif self.state is State.JOINING:
            self.join()
        for round in self.rounds.values():
            if round.state is RoundState.READY and not self.has_left:
                round.say_ready()

    # Into the run ---------------------------------------------------------------------------------------------
    def join(self) -> None:
        """Go where the others are, then get a lease from the leader (R14)."""
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
        """Train what the leader gave us."""
        if self.joiner.accepts(leader, grant) and not self.replica.needs_signed_log:
            self.round.granted(leader)
            others = self.presence.speeds(self.replica.log)
            self._begin(grant.samples, self._context.pace.steps_of_grant(grant.steps, self.trainer.speed, others))

    def _ask_at_once(self) -> None:
        """Ask for a lease, and for what others have made, at the next opportunity."""
        self.joiner.question.at_once()
        self.search.question.at_once()

    def on_refuse(self, leader: str, refuse: Refuse, round: EntryRound) -> None:
        """Take the leader's state, or ask for other samples, unless it is the leader that is wrong."""
        is_waiting = self.state is State.JOINING or round.is_taking_part
        if not is_waiting or self.replica.state is not ReplicaState.LEVEL or leader == self._context.me:
            return
        self._context.emit(Note("info", f"refused by {leader}: {refuse.reason}"))
        ours = self.replica.state_digest
        if refuse.state_digest == ours:
            # Samples of the log, or of this leader, are good. Another leader may have given them to two peers.
            is_good = leader == round.granted_by or self._context.me in self.replica.log.leases
            if round.is_taking_part and not is_good:
                self._drop_work()
                self._ask_at_once()
                self.join()
        elif not (self._is_bound or ours == self.replica.state_of_most or leader in self.presence.branches.unhelpful):
            self._fetch_from(leader)

    # Where others are -----------------------------------------------------------------------------------------
    def on_heartbeats(self) -> None:
        """See whether others are further on, and whether our work can count."""
        self._check_state()
        self._look()
        self.look_for_hindrance()

    def _look(self) -> None:
        if self._is_level:
            self.search.look()

    def on_lineage(self, event: LineageSeen | LineageNotSeen) -> None:
        """Take in what another peer's log is worth. If it is better its state is fetched, and the donor is shown the
        certificates that we give up: it convicts those that have signed both branches (R9)."""
        if isinstance(event, LineageNotSeen):
            self.search.on_not_seen(event)
            return
        context, lineage = self._context, self.replica.lineage
        context.convict(context.evidence.observe_split(event.ours, event.theirs, lineage))
        far = self.search.on_seen(event)
        if far is None or not self._is_level:
            return
        given_up = event.ours.certificates if event.theirs.splits_from(event.ours) else ()
        for fragment in sorted(given_up):
            made = lineage.after(event.ours.start.of(fragment).position)
            if made is not None:
                context.emit(Send(event.donor, Certified(header=made[0], certificate=made[1])))
        self._fetch(far)

    def on_elsewhere(self, sender: str) -> None:
        """Compare logs with a peer that has not made what we asked it for: it is on another lineage."""
        if self._is_level and self.replica.claimant == sender:
            self.search.weigh(sender)

    def others_made(self, certified: Certified, sender: str, round: EntryRound) -> None:
        """Replay an entry that others have. Its payload is not here, or a minority has made it."""
        if not self._is_level:
            return
        header, log = certified.header, self.replica.log
        was_asked = self.state is State.JOINING or round.was_asked(sender)
        support = self.belief.support(certified, round.log)
        behind = self.belief.entry(sender, certified, support, was_asked)
        if behind is None:
            if self.replica.claimant == sender and not (support and support.is_certified):
                self.search.weigh(sender)  # its log tells whether others are on the same branch
            return
        if log.is_closing(header):
            self.keeps_work = self.trainer.outlives(header)
            if not self.keeps_work:
                self.trainer.take(WorkEnds(log.position, header))
            self.rounds[header.fragment] = self._open_round(header.fragment)
        self.search.answered()
        self.replica.take(behind)
        if header.payload == NO_PAYLOAD:
            self.entry_made(header, behind.certificate)

    def on_not_replayed(self, header: Header, reason: str) -> None:
        """Fetch another peer's state instead of an entry whose payload no donor has, if any is further on."""
        self._context.emit(Note("info", f"no payload of entry {header.index}: {reason}"))
        far = self.search.far_behind()
        if far is not None:
            self._fetch(far)
        elif self.replica.log.is_closing(header):
            self._drop_work()
            self.replica.take(NobodyAhead())
            self._ask_at_once()
        else:  # its round goes on: a peer that has the entry tells us again
            self.replica.take(NobodyAhead())
            self._turn()

    def _check_state(self) -> None:
        """Fetch the state of most voters, where ours is another at the same place: a bit has flipped."""
        replica = self.replica
        most = replica.state_of_most if self._is_level and replica.is_settled else None
        if most is None or most == replica.state_digest:
            return
        place = replica.settled.position.head, most
        having = {peer for peer, beat in self.presence.live().items() if (beat.head, beat.state_digest) == place}
        donor = min(having - self.presence.branches.unhelpful, default=None)
        if donor is not None:
            self._context.emit(Note("error", f"our state is not that of most peers: fetching it from {donor}"))
            self._fetch_from(donor)

    def _fetch_from(self, donor: str) -> None:
        """Take the state that a peer has where we are, or further on."""
        self._fetch(FarBehind(donor, self.replica.log.position.index))

    def _fetch(self, far: FarBehind) -> None:
        self._drop_work()
        self.replica.take(far)

    def on_fetched(self, event: SnapshotRestored | SnapshotFailed) -> None:
        """Join where the fetched state is."""
        self.search.fetched()
        if isinstance(event, SnapshotRestored):
            self._ask_at_once()
            self._open_rounds()
            self.join()

    def _drop_work(self) -> None:
        """Go on without the work in hand. What we have voted in this cycle still binds us."""
        self.trainer.take(WorkEnds(self.replica.log.position))
        self.keeps_work = False
        self._open_rounds()

    def look_for_hindrance(self) -> None:
        """See whether our work can count. Where it can't, stop training, and wait without a lease."""
        self.hindrances.look(self.round.log.leader_of(0) or self.round.leader_of(0))
        can_stop = self.state in (State.TRAINING, State.READY) and not self._is_exchanging and not self._is_bound
        if self.hindrances.is_aside and can_stop:
            self._drop_work()
            self._ask_at_once()

    # For others -----------------------------------------------------------------------------------------------
    def hear_amendments(self, amendments: Iterable[Amendment | None]) -> None:
        """Take in what the organiser has signed, to tell others of it, and to put it into an entry when we lead."""
        amending, settings = self._context.amending, self._context.settings
        for news in [amendment for amendment in amendments if amendment and amending.hear(amendment)]:
            if news == amending.refused:
                reason = settings.why_not_followed(news)
                self._context.emit(Note("warning", f"{reason} This peer does not vote for it."))
            elif news == amending.proposed(self.replica.log):
                self._context.emit(Note("info", f"the organiser has signed {news}; it waits for an entry"))

    def inquire(self, round: EntryRound) -> None:
        """As a leader, ask whether others have made the entry already."""
        self.search.inquire(round.log)

    def answers(self, sender: str) -> bool:
        """Return whether a member's wish can be granted: our state is known, and the sender is heard. If it is new, its
        heartbeat comes before it asks again."""
        is_here = self.replica.state in (ReplicaState.LEVEL, ReplicaState.APPLYING) and self.replica.is_settled
        return is_here and (sender == self._context.me or self.presence.is_live(sender))

    def gives_lease(self, round: EntryRound) -> bool:
        """Return whether joiners may be given samples here."""
        return round.log.closes and self.joiner.may_start() and not self.joiner.holds_back()

    def answer_elsewhere(self, sender: str, message: Message | Unread) -> None:
        """Answer a sender at a place that we have left, or have not reached; once in a moment, as entries are long."""
        if not self._answers.is_due(sender, message.position):
            return
        followed = self.replica.lineage.after(message.position)
        if followed is not None:
            header, certificate = followed
            if isinstance(message, Inquire) or not self.replica.is_news(header):
                self._context.emit(Send(sender, Certified(header=header, certificate=certificate)))
        elif isinstance(message, Inquire):
            self._context.emit(Send(sender, Elsewhere(position=self.replica.log.position)))

    # Out of the run -------------------------------------------------------------------------------------------
    def on_leave_requested(self, at_once: bool) -> None:
        """Leave once a round under way is over, or at once."""
        leave_by = self._context.now + (0 if at_once else self._context.settings.timing.leave)
        self._leave_by = min(leave_by, self._leave_by or leave_by)
        self.leave_if_possible()

    @property
    def _notes_down(self) -> bool:
        """Whether we leave, and only the last entry's digest is still to come: nothing new begins."""
        return self._leave_by is not None and self.replica.undigested is not None

    def leave_if_possible(self) -> None:
        """Leave, unless a round is under way or its entry is noted down, for which there is time until `_leave_by`."""
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
        self._context.emit(Stop())  # the driver says goodbye to the others

    @property
    def _is_exchanging(self) -> bool:
        # `any` takes three times as long
        return RoundState.EXCHANGING in [round.state for round in self.rounds.values()]

    @property
    def _is_bound(self) -> bool:
        """Whether we are bound to an entry that may have been committed."""
        return any(round.voter.lock is not None for round in self.rounds.values())
