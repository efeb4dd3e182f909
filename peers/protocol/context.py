"""Shared context of the parts of one peer: its name, its settings, the time, its votes, and the effects to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peers.audit.evidence import Evidence
from peers.log.certificate import Ballot, Departure
from peers.log.header import Fault, Position
from peers.log.settings import RunSettings
from peers.protocol.amending import Amending
from peers.protocol.effects import Effect, KeepVotes, Note, Send
from peers.protocol.events import Event, Received
from peers.protocol.messages import Leaving
from peers.protocol.pace import Pace
from peers.protocol.pacemaker import RoundTimes
from peers.protocol.planning import Undealt
from peers.protocol.voting import FIRST, PLACES, Refusal, VoterState, VotingRecord
from peers.values.identity import Keys
from peers.values.workload import PayloadKind


class Context:
    """`now` is the time of the event that is being handled, in seconds of the driver's clock. `payloads` are of each
    fragment. `round_times` is what this peer's last rounds took, and `undealt` whom it deals nothing as a leader."""

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
        """`start` is a number that no start of this peer has had before. `record` has the votes of the starts before;
        without it, or after a farewell, this start is another incarnation."""
        self.me = me
        self.keys = keys
        self.settings = settings
        self.pace = Pace.of(settings)
        self.payloads = payloads
        self.evidence = Evidence(settings, keys.verify, payloads)
        self.amending = Amending(settings.run, settings.organiser)
        if record is None or record.left is not None:
            record = VotingRecord(run=settings.run, peer=me, incarnation=start)
        self.votes = OwnVotes(record)
        self.round_times = RoundTimes()
        self.undealt = Undealt()
        self._works = start
        self.now = self.started_at = now
        self.events: deque[Event] = deque()
        self._effects: list[Effect] = []

    # Effects --------------------------------------------------------------------------------------------------
    def emit(self, *effects: Effect) -> None:
        """Add effects, in order. A message to this peer itself comes straight back as an event."""
        for effect in effects:
            if isinstance(effect, Send) and effect.to == self.me:
                self.events.append(Received(self.me, effect.message))
            else:
                self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, once."""
        effects, self._effects = self._effects, []
        return effects

    def convict(self, faults: tuple[Fault, ...]) -> None:
        """Tell the volunteer of peers that are proven to lie."""
        self.emit(*(Note("warning", f"{fault.peer} is proven to lie: {fault.kind}") for fault in faults))

    def number_of_work(self) -> int:
        """Return the number of what this peer has trained next. Numbers begin with that of the process's start, so that
        no two commitments of one incarnation have the same."""
        self._works += 1
        return self._works

    # Votes ----------------------------------------------------------------------------------------------------
    @property
    def incarnation(self) -> int:
        """The number under which this peer votes, averages and commits."""
        return self.votes.record.incarnation

    def voter_at(self, position: Position) -> VoterState | None:
        """Return this peer's votes at a position; None once it has left. If it may have voted there and does not
        remember it, it becomes another incarnation (R11)."""
        state = self.votes.record.at(position)
        if state is Refusal.FORGOTTEN:
            self.begin_anew()
            state = self.votes.record.at(position)
        return state if isinstance(state, VoterState) else None

    def cast(self, state: VoterState, *sends: Send) -> None:
        """Vote: have the votes at a position kept, and send these messages once they are (R10)."""
        self.emit(self.votes.keep(state, sends))

    def votes_kept(self) -> None:
        """Send the votes that the disk has by now."""
        self.emit(*self.votes.kept())

    def votes_not_kept(self, reason: str) -> None:
        """Take back the votes that the disk did not take: they were not sent."""
        self.votes.take_back()
        self.has_no_vote(reason)

    def has_no_vote(self, reason: str) -> None:
        """Tell the volunteer why this peer does not vote."""
        if reason != self.votes.trouble:
            self.emit(Note("warning", f"this peer has no vote: {reason}"))
        self.votes.trouble = reason

    def begin_anew(self) -> None:
        """Become another incarnation, which has voted nowhere. The one before votes no more."""
        self.votes.begin_anew()

    def goodbye(self, position: Position) -> Leaving:
        """Leave: sign that this incarnation votes no more."""
        departure = self.votes.leave()
        return Leaving(
            position=position,
            incarnation=departure.incarnation,
            departure=departure.index,
            signature=self.keys.sign(departure.text),
        )

    def is_farewell(self, peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
        """Return whether the peer has signed that it left."""
        said = Departure(run=self.settings.run, peer=peer, incarnation=incarnation, index=departure)
        return self.keys.verify(peer, said.text, signature)


class OwnVotes:
    """The voting record of this peer, and the votes that wait until the disk has it (R10). `trouble` says why the disk
    takes none; empty: it does. With the votes goes the newest round that this start has entered at each position."""

    def __init__(self, record: VotingRecord) -> None:
        """`record` is on the disk, or empty."""
        self.record = record
        self.trouble = ""
        self._on_disk = record
        self._waiting: deque[tuple[VotingRecord, tuple[Send, ...]]] = deque()
        self._entered: dict[Position, Ballot] = {}

    def enter(self, position: Position, began: Ballot) -> bool:
        """Enter a round that this ballot began, unless it is no newer than one that was entered: to come back to it
        would be to average anew. Return whether it is entered. A new start has other numbers of trainings (R10)."""
        if began <= self._entered.get(position, FIRST):
            return False
        self._entered.pop(position, None)
        self._entered[position] = began
        while len(self._entered) > PLACES:
            del self._entered[next(iter(self._entered))]
        return True

    @property
    def are_kept(self) -> bool:
        """Whether no vote waits for the disk."""
        return not self._waiting

    def keep(self, state: VoterState, sends: tuple[Send, ...]) -> KeepVotes:
        """Note the votes at a position, and what to send once the disk has them."""
        self.record = self.record.after(state)
        self._waiting.append((self.record, sends))
        return KeepVotes(self.record)

    def kept(self) -> tuple[Send, ...]:
        """Return what may be sent now: the oldest record that waited is on the disk."""
        self.trouble = ""
        self._on_disk, sends = self._waiting.popleft()
        return sends

    def take_back(self) -> None:
        """Forget the votes of the oldest record that waited, unless a newer one has them, too."""
        self._waiting.popleft()
        if not self._waiting:
            self.record = self._on_disk

    def begin_anew(self) -> None:
        """Drop all votes, those that wait for the disk included."""
        self.record = self._on_disk = self.record.renewed(self.record.incarnation + 1)
        self._waiting = deque((self.record, ()) for _ in self._waiting)

    def close(self, position: Position) -> None:
        """Note that a certified entry of the position is in the log, which the next record says."""
        self.record = self.record.closed(position)

    def leave(self) -> Departure:
        """Note that this peer votes no more, and return what it signs."""
        self.record, departure = self.record.farewell()
        return departure


class Repetition:
    """The pace at which a message is repeated until it is answered."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._said_at: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to say it again."""
        return self._said_at is None or self._context.now - self._said_at >= self._context.settings.timing.resend

    def said(self) -> None:
        """Note that it was said just now."""
        self._said_at = self._context.now

    def at_once(self) -> None:
        """Let it be said at the next opportunity, since there is something new to say."""
        self._said_at = None
