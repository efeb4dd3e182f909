"""Context that the parts of one peer share: its id, settings, time, votes, and the effects to carry out."""

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
    """The shared context. `now` is the time of the event in hand, in seconds of the driver's clock. `payloads` has one
    kind for each fragment. `round_times` are the durations of this peer's last rounds, and `experience` what it learned
    as a leader."""

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
        start: a number that no earlier start of this peer had.
        record: the votes of earlier starts. Without it, or after a farewell, this start is another incarnation.
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
        """Add effects, in order. A message to this peer itself becomes an event at once."""
        for effect in effects:
            if isinstance(effect, Send) and effect.to == self.me:
                self.events.append(Received(self.me, effect.message))
            else:
                self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call, and forget them."""
        effects, self._effects = self._effects, []
        return effects

    def convict(self, faults: tuple[Fault, ...]) -> None:
        """Warn the volunteer of peers that are proven to lie."""
        self.emit(*(Note("warning", f"{fault.peer} is proven to lie: {fault.kind}") for fault in faults))

    def number_of_work(self) -> int:
        """Return the number of the next finished training. Numbers start at the number of this start, so that no two
        commitments of one incarnation have the same number (R10)."""
        self._works += 1
        return self._works

    @property
    def incarnation(self) -> int:
        """The number under which this peer votes, averages and commits."""
        return self.votes.record.incarnation

    def is_farewell(self, peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
        """Return whether the peer has signed this farewell."""
        farewell = Departure(run=self.settings.run, peer=peer, incarnation=incarnation, index=departure)
        return self.keys.verify(peer, farewell.text, signature)


class OwnVotes:
    """The voting record of this peer, and the messages that wait until the record is on the disk (R10). `trouble` says
    why this peer does not vote; it is empty if it does. It also holds the newest round that this start has entered at
    each position."""

    def __init__(self, context: Context, record: VotingRecord) -> None:
        """`record` is on the disk already, or empty."""
        self.record = record
        self.trouble = ""
        self._context = context
        self._on_disk = record
        self._waiting: deque[tuple[VotingRecord, tuple[Send, ...]]] = deque()
        self._entered: dict[Position, Ballot] = {}

    def enter(self, position: Position, began: Ballot) -> bool:
        """Return whether this peer may enter the round that this ballot began, and record that it does. It may not if
        it has entered the same round or a newer one: it would average anew. A new start has other numbers of trainings
        (R10)."""
        if began <= self._entered.get(position, FIRST):
            return False
        self._entered.pop(position, None)
        self._entered[position] = began
        while len(self._entered) > POSITIONS:
            del self._entered[next(iter(self._entered))]
        return True

    @property
    def are_kept(self) -> bool:
        """True if no vote waits for the disk."""
        return not self._waiting

    def at(self, position: Position) -> VoterState | None:
        """Return this peer's votes at a position; None once it has left. If it may have voted there and does not
        remember it, it becomes another incarnation first (R11)."""
        state = self.record.at(position)
        if state is Refusal.FORGOTTEN:
            self.begin_anew()
            state = self.record.at(position)
        return state if isinstance(state, VoterState) else None

    def cast(self, state: VoterState, *sends: Send) -> None:
        """Record a vote, and send these messages once the record is on the disk."""
        self.record = self.record.after(state)
        self._waiting.append((self.record, sends))
        self._context.emit(KeepVotes(self.record))

    def kept(self) -> None:
        """Send the messages that waited for the oldest record, which is now on the disk."""
        self.trouble = ""
        self._on_disk, sends = self._waiting.popleft()
        self._context.emit(*sends)

    def not_kept(self, reason: str) -> None:
        """Forget the votes of the oldest record that waited, unless a newer one has them, too."""
        self._waiting.popleft()
        if not self._waiting:
            self.record = self._on_disk
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Record why this peer does not vote. `Hindrances` shows it to the volunteer if it lasts."""
        self.trouble = reason

    def begin_anew(self) -> None:
        """Become another incarnation, which has voted nowhere. Votes that wait for the disk are not sent."""
        self.record = self._on_disk = self.record.renewed(self.record.incarnation + 1)
        self._waiting = deque((self.record, ()) for _ in self._waiting)

    def close(self, position: Position) -> None:
        """Mark a position as closed: its entry is certified and in the log. The mark reaches the disk with the next
        record."""
        self.record = self.record.closed(position)

    def leave(self, position: Position) -> Leaving:
        """Stop voting, and return the signed farewell."""
        self.record, departure = self.record.farewell()
        return Leaving(
            position=position,
            incarnation=departure.incarnation,
            departure=departure.index,
            signature=self._context.keys.sign(departure.text),
        )


class Repetition:
    """The times at which one message is repeated until it is answered."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sent_at: float | None = None

    @property
    def is_due(self) -> bool:
        """True if it is time to send the message again."""
        return self._sent_at is None or self._context.now - self._sent_at >= self._context.settings.timing.resend

    def sent(self) -> None:
        """Record that the message was sent just now."""
        self._sent_at = self._context.now

    def at_once(self) -> None:
        """Make the message due at once, since its content has changed."""
        self._sent_at = None


class Answers:
    """The answers given within the last moment: a few to each peer, and none twice, however often it asks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._given: dict[tuple[str, object], float] = {}

    def is_due(self, peer: str, about: object) -> bool:
        """Return whether to answer a peer, and count that answer."""
        now, pause = self._context.now, self._context.settings.timing.resend / 2
        self._given = {answer: since for answer, since in self._given.items() if now - since < pause}
        if (peer, about) in self._given or sum(one == peer for one, _ in self._given) >= ANSWERS:
            return False
        self._given[peer, about] = now
        return True
