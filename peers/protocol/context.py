"""Shared context of the parts of one peer: its name, its settings, the time, its votes, and the effects to come."""

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
"""Answers that a peer gets at most within half the pause between repeated messages: one for each of some fragments."""


class Context:
    """`now` is the time of the event that is being handled, in seconds of the driver's clock. `payloads` are of each
    fragment. `round_times` is what this peer's last rounds took, and `experience` what it saw as a leader."""

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
        """Return the number of the next finished training. Numbers begin with that of the process's start, so that no
        two commitments of one incarnation have the same (R10)."""
        self._works += 1
        return self._works

    @property
    def incarnation(self) -> int:
        """The number under which this peer votes, averages and commits."""
        return self.votes.record.incarnation

    def is_farewell(self, peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
        """Return whether the peer has signed that it left."""
        said = Departure(run=self.settings.run, peer=peer, incarnation=incarnation, index=departure)
        return self.keys.verify(peer, said.text, signature)


class OwnVotes:
    """The voting record of this peer, and the messages that wait until the disk has it (R10). `trouble` says why this
    peer does not vote; empty: it does. With the votes goes the newest round that this start has entered at each
    position."""

    def __init__(self, context: Context, record: VotingRecord) -> None:
        """`record` is on the disk, or empty."""
        self.record = record
        self.trouble = ""
        self._context = context
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
        while len(self._entered) > POSITIONS:
            del self._entered[next(iter(self._entered))]
        return True

    @property
    def are_kept(self) -> bool:
        """Whether no vote waits for the disk."""
        return not self._waiting

    def at(self, position: Position) -> VoterState | None:
        """Return this peer's votes at a position; None once it has left. If it may have voted there and does not
        remember it, it becomes another incarnation (R11)."""
        state = self.record.at(position)
        if state is Refusal.FORGOTTEN:
            self.begin_anew()
            state = self.record.at(position)
        return state if isinstance(state, VoterState) else None

    def cast(self, state: VoterState, *sends: Send) -> None:
        """Vote: keep the votes at a position, and send these messages once the disk has them."""
        self.record = self.record.after(state)
        self._waiting.append((self.record, sends))
        self._context.emit(KeepVotes(self.record))

    def kept(self) -> None:
        """Send what waited for the oldest record: it is on the disk."""
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
        """Note why this peer does not vote: the volunteer is told when it lasts (`Hindrances`)."""
        self.trouble = reason

    def begin_anew(self) -> None:
        """Become another incarnation, which has voted nowhere. Votes that wait for the disk are not sent."""
        self.record = self._on_disk = self.record.renewed(self.record.incarnation + 1)
        self._waiting = deque((self.record, ()) for _ in self._waiting)

    def close(self, position: Position) -> None:
        """Note that a certified entry of the position is in the log, which the next record says."""
        self.record = self.record.closed(position)

    def leave(self, position: Position) -> Leaving:
        """Vote no more, and return the farewell that says so."""
        self.record, departure = self.record.farewell()
        return Leaving(
            position=position,
            incarnation=departure.incarnation,
            departure=departure.index,
            signature=self._context.keys.sign(departure.text),
        )


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


class Answers:
    """The answers that were given in the last moment: each peer gets a few, and none twice, however often it asks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._given: dict[tuple[str, object], float] = {}

    def is_due(self, peer: str, about: object) -> bool:
        """Return whether to answer a peer, and note that it is answered."""
        now, pause = self._context.now, self._context.settings.timing.resend / 2
        self._given = {answer: since for answer, since in self._given.items() if now - since < pause}
        if (peer, about) in self._given or sum(one == peer for one, _ in self._given) >= ANSWERS:
            return False
        self._given[peer, about] = now
        return True
