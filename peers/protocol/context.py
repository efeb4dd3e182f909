"""The values that the parts of one peer share: its id, settings, time and votes, and the effects for its driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peers.audit.evidence import Evidence
from peers.log.certificate import Ballot, Departure
from peers.log.header import Fault, Position
from peers.log.settings import RunSettings
from peers.messages.messages import Leaving
from peers.protocol.amending import Amending
from peers.protocol.effects import Effect, KeepVotes, Note, Send
from peers.protocol.events import Event, Received
from peers.protocol.pace import Pace
from peers.protocol.pacemaker import RoundTimes
from peers.protocol.planning import Experience
from peers.protocol.voting import FIRST, POSITIONS, Refusal, VoterState, VotingRecord
from peers.values.identity import Keys
from peers.values.workload import PayloadKind

ANSWERS = 16
"""Maximum number of answers to one peer within half the pause between repeated messages: one for each of several
fragments."""


class Context:
    """The values that one peer's parts share. `now` is the time of the current event, in seconds of the driver's clock.
    `payloads` has the payload kind of each fragment, and `round_times` the durations of this peer's last rounds.
    `experience` has the peers to which this peer, when it leads, gives no chunks, or for which it does not wait."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payloads: Sequence[PayloadKind],
        now: float,
        start: int,
        keys: Keys,
        record: VotingRecord | None = None,
    ) -> None:
        """Args:
        start: the number of this start of the process; no earlier start of this peer had it.
        record: the votes of earlier starts. Without a record, or after a farewell, `start` becomes the new incarnation.
        """
        self.me = me
        self.keys = keys
        self.settings = settings
        self.pace = Pace.of(settings)
        self.payloads = payloads
        self.evidence = Evidence(settings, keys.verify, payloads)
        self.amending = Amending(settings)
        if record is None or record.left is not None:
            record = VotingRecord(run=settings.run, peer=me, incarnation=start)
        self.votes = OwnVotes(self, record)
        self.round_times = RoundTimes()
        self.experience = Experience()
        self._works = start
        self.now = self.started_at = now
        self.events: deque[Event] = deque()
        self._effects: list[Effect] = []

    # Effects --------------------------------------------------------------------------------------------------
    def emit(self, *effects: Effect) -> None:
        """Queue effects for the driver, in order. A message to this peer itself becomes an event instead."""
        for effect in effects:
            if isinstance(effect, Send) and effect.to == self.me:
                self.events.append(Received(self.me, effect.message))
            else:
                self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """Return the effects queued since the last call, and clear the queue."""
        effects, self._effects = self._effects, []
        return effects

    def convict(self, faults: tuple[Fault, ...]) -> None:
        """Warn the volunteer about each peer whose lie one of these faults proves."""
        self.emit(*(Note("warning", f"{fault.peer} is proven to lie: {fault.kind}") for fault in faults))

    def new_training_number(self) -> int:
        """Return a number for a finished training that no other training of this incarnation has, even after a restart
        (R10)."""
        self._works += 1
        return self._works

    @property
    def incarnation(self) -> int:
        """The number of the incarnation under which this peer votes, averages and commits."""
        return self.votes.record.incarnation

    def is_farewell(self, peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
        """Return True if the peer has signed this farewell: it votes nowhere from the index `departure` on."""
        farewell = Departure(run=self.settings.run, peer=peer, incarnation=incarnation, index=departure)
        return self.keys.verify(peer, farewell.text, signature)


class OwnVotes:
    """This peer's voting record, and the messages that wait until the record is on the disk (R10). `trouble` is the
    reason why this peer does not vote; empty if it votes."""

    def __init__(self, context: Context, record: VotingRecord) -> None:
        self.record = record
        self.trouble = ""
        self._context = context
        self._on_disk = record
        self._waiting: deque[tuple[VotingRecord, tuple[Send, ...]]] = deque()
        self._entered: dict[Position, Ballot] = {}

    def enter(self, position: Position, began: Ballot) -> bool:
        """Record that this peer enters the round that the ballot `began` started, and return True. Return False if it
        has entered that round or a newer one before, because it would then average the same chunks twice (R10)."""
        if began <= self._entered.get(position, FIRST):
            return False
        self._entered.pop(position, None)
        self._entered[position] = began
        while len(self._entered) > POSITIONS:
            del self._entered[next(iter(self._entered))]
        return True

    @property
    def are_kept(self) -> bool:
        """True if no vote waits to be written to the disk."""
        return not self._waiting

    def at(self, position: Position) -> VoterState | None:
        """Return this peer's votes at a position; None once it has left the run. If it may have forgotten votes at the
        position, it first becomes another incarnation (R11)."""
        state = self.record.at(position)
        if state is Refusal.FORGOTTEN:
            self.begin_anew()
            state = self.record.at(position)
        return state if isinstance(state, VoterState) else None

    def cast(self, state: VoterState, *sends: Send) -> None:
        """Record the vote in `state`, and send the messages `sends` once the record is on the disk."""
        self.record = self.record.after(state)
        self._waiting.append((self.record, sends))
        self._context.emit(KeepVotes(self.record))

    def kept(self) -> None:
        """Send the messages of the oldest waiting voting record, because the driver has written it to the disk."""
        self.trouble = ""
        self._on_disk, sends = self._waiting.popleft()
        self._context.emit(*sends)

    def not_kept(self, reason: str) -> None:
        """Forget the votes of the oldest waiting record, because the driver could not write it. Votes that a newer
        waiting record has, too, are kept."""
        self._waiting.popleft()
        if not self._waiting:
            self.record = self._on_disk
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Record the reason why this peer does not vote. `Hindrances` shows a lasting reason to the volunteer."""
        self.trouble = reason

    def begin_anew(self) -> None:
        """Become another incarnation, which has no votes. Votes that wait for the disk are not sent."""
        self.record = self._on_disk = self.record.renewed(self.record.incarnation + 1)
        self._waiting = deque((self.record, ()) for _ in self._waiting)

    def close(self, position: Position) -> None:
        """Mark a position as closed, because its entry is certified and in the log. The mark is written to the disk
        with the next vote."""
        self.record = self.record.closed(position)

    def leave(self, position: Position) -> Leaving:
        """Stop voting for good, and return the signed farewell."""
        self.record, departure = self.record.farewell()
        return Leaving(
            position=position,
            incarnation=departure.incarnation,
            departure=departure.index,
            signature=self._context.keys.sign(departure.text),
        )


class Repetition:
    """The timer for repeating one message until an answer arrives."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sent_at: float | None = None

    @property
    def is_due(self) -> bool:
        """True if the message was never sent, or the pause between repeated messages is over."""
        return self._sent_at is None or self._context.now - self._sent_at >= self._context.settings.timing.resend

    def sent(self) -> None:
        """Record that the message was sent just now."""
        self._sent_at = self._context.now

    def at_once(self) -> None:
        """Make the message due immediately, since its content has changed."""
        self._sent_at = None


class Answers:
    """A limit on this peer's answers: within half of the pause between repeated messages, at most ANSWERS to each peer,
    and no answer twice."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._given: dict[tuple[str, object], float] = {}

    def is_due(self, peer: str, about: object) -> bool:
        """Return True if this peer should answer `peer` about the subject `about` now. If so, count that answer."""
        now, pause = self._context.now, self._context.settings.timing.resend / 2
        self._given = {answer: since for answer, since in self._given.items() if now - since < pause}
        if (peer, about) in self._given or sum(one == peer for one, _ in self._given) >= ANSWERS:
            return False
        self._given[peer, about] = now
        return True
