"""One peer of a run, without any I/O: events in, effects out.

A driver calls `handle` with what happened and the time on its clock, and carries out the effects; the hivemind driver
and the simulated one differ in nothing else. states.py has the states; joining.py and averaging.py what a peer does in
them; leader.py what it does when others take it for their leader.
"""

from __future__ import annotations

from peers.protocol.averaging import Averaging
from peers.protocol.events import (
    Applied,
    Digested,
    Effect,
    Event,
    HeartbeatsSeen,
    LeaveRequested,
    PayloadFetched,
    PayloadNotFetched,
    RateMeasured,
    ReachSeen,
    Received,
    Send,
    SnapshotFailed,
    SnapshotRestored,
    Tick,
    TrainingDone,
    TrainingProgress,
    Undelivered,
)
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
from peers.protocol.states import State


class Peer(Averaging):
    """The protocol of one peer. Starts before the first entry, with the state that the manifest's seed gives."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at time `now` (seconds, monotonic). Raises: LocalProtocolError for an illegal event."""
        self._now = now
        self._queue.append(event)
        while self._queue:
            self._dispatch(self._queue.popleft())
        effects, self._effects = self._effects, []
        return effects

    def _dispatch(self, event: Event) -> None:
        if self.state is State.LEFT:
            return
        match event:
            case Tick():
                self._tick()
            case HeartbeatsSeen(heartbeats):
                self.membership.observe(heartbeats, self._now)
                self._catch_up()
                self._look_for_trouble()
            case ReachSeen(reach, rates, sought):
                if self.reachability.observe(reach, rates, sought):
                    self._links_changed()
            case Received(sender, message):
                self.membership.heard_from(sender, self._now)
                self._receive(sender, message)
            case Undelivered(peer):
                self.membership.unreachable(peer)
            case TrainingProgress(progress):
                self.progress = progress if self.is_training else None
                self.speed = progress.tokens_per_second
            case TrainingDone(trained):
                self._trained_all(trained)
            case Applied(header):
                self._applied(header)
            case Digested(header, state_digest):
                self._digested(header, state_digest)
            case SnapshotRestored(donor, header, state_digest, lineage):
                self._restored(donor, header, state_digest, lineage)
            case SnapshotFailed(donor, reason):
                self._not_restored(donor, reason)
            case PayloadFetched(header):
                self._fetched(header)
            case PayloadNotFetched(header, reason):
                self._not_fetched(header, reason)
            case RateMeasured(rate):
                self._rate = rate or self._rate
            case LeaveRequested(at_once):
                leave_by = self._now + (0 if at_once else self.settings.timing.leave)
                self._leave_by = min(leave_by, self._leave_by or leave_by)
                self._leave_if_possible()
            case _:
                self._exchanged(event)

    def _tick(self) -> None:
        if self._leave_by is not None and self._now >= self._leave_by:
            self._leave()
            return
        match self.state:
            case State.JOINING:
                self._join()
            case State.READY:
                self._say_ready()
            case State.AVERAGING:
                self._keep_averaging()
        self._tick_leader()

    def _tick_leader(self) -> None:
        if self._leader and self.state is not State.APPLYING:
            self._leader.grace = self._grace()
            self._leader.unreached = self.unreached
            self._emit_all(self._leader.tick(self._now, self._live(), self.membership.leavers))

    def _receive(self, sender: str, message: Message) -> None:
        if isinstance(message, Leaving):
            if not message.holds:
                self.membership.left(sender)
            self.membership.unreachable(sender)
            if self._leader:
                self._leader.left = self.membership.leavers
                self._emit_all(self._leader.gone(sender, self._now))
        elif message.position == self.log.position:
            self._receive_here(sender, message)
        elif not isinstance(message, Commit | Elsewhere | Refuse | Excluded | Abort | LeaseGrant):
            self._answer_elsewhere(sender, message)
        elif isinstance(message, Elsewhere):
            self._elsewhere(sender)

    def _receive_here(self, sender: str, message: Message) -> None:
        """A message about the position we are at; what does not fit our state is late or early, and is dropped."""
        busy = self.state in (State.FETCHING, State.REPLAYING, State.APPLYING) or not self.is_settled
        match message:
            case Begin():
                self._begin(sender, message)
            case Adopt():
                self._adopt(sender, message)
            case Holding() | Want():
                self._talk(sender, message)
            case Commit(header=header):
                self._commit(sender, header)
            case Abort(attempt=attempt):
                self._aborted(sender, attempt)
            case Refuse(reason=reason) if sender == (self._pledged_to or self._elect()):
                self._refused(sender, reason)
            case Excluded(reason=reason) if sender == (self._pledged_to or self._elect()):
                self._left_out(reason)
            case LeaseGrant() if self.state is State.JOINING and sender == self._elect():
                self._granted(sender, message)
            case LeaseRequest() | Ready() if busy or not (sender == self.me or self.is_live(sender)):
                pass  # a stranger: if it is one of us, its heartbeat comes before it asks again
            case LeaseRequest() if self._may_start() and self._gives_lease(sender):
                step = self.progress.inner_step if self.progress and self.state is State.TRAINING else 0
                step = self.settings.inner_steps if self.state in (State.READY, State.AVERAGING) else step
                self._emit_all(self._lead().on_lease_request(sender, message, step))
            case Ready():
                self._emit_all(self._lead().on_ready(sender, message, self._now))
                if self._lead().is_full and not self._lead().running:
                    self._tick_leader()  # at once: a round does not wait for the clock
            case Waiting() if self._leader:
                self._emit_all(self._leader.on_waiting(sender, message, self._now))
            case Accuse() if self._leader:
                self._emit_all(self._leader.on_accuse(sender, message, self._now))
            case Complete():
                if self._leader and message.attempt.leader == self.me:
                    self._emit_all(self._leader.on_complete(sender, message, self._now))
                if sender != self.me and self.is_live(sender):
                    self._heard_complete(sender, message)
            case _:
                pass

    def _answer_elsewhere(self, sender: str, message: Message) -> None:
        """The sender is at a place that we have left, or have not reached."""
        followed = self.lineage.after(message.position.head)
        if followed is not None:
            self._emit(Send(sender, Commit(header=followed)))
        elif isinstance(message, Inquire):
            self._emit(Send(sender, Elsewhere(position=self.log.position)))
