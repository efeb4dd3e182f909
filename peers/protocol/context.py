"""Shared context of the parts of one peer: its name, its settings, the time, its votes, and the effects to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peers.audit.evidence import Evidence
from peers.log.certificate import Departure
from peers.log.header import Fault, Position
from peers.log.settings import RunSettings
from peers.protocol.amending import Amending
from peers.protocol.effects import Effect, Note, Send
from peers.protocol.events import Event, Received
from peers.protocol.messages import Leaving
from peers.protocol.pacemaker import RoundTimes
from peers.protocol.voting import Refusal, VoterState, VotingRecord
from peers.values.identity import Keys
from peers.values.workload import PayloadKind


class Context:
    """`now` is the time of the event that is being handled, in seconds of the driver's clock. `payloads` are of each
    fragment. `record` has this peer's votes; `round_times` is what its last rounds took."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payloads: Sequence[PayloadKind],
        now: float,
        incarnation: int,
        keys: Keys,
    ) -> None:
        self.me = me
        self.keys = keys
        self.settings = settings
        self.payloads = payloads
        self.evidence = Evidence(settings, keys.verify, payloads)
        self.amending = Amending(settings.run, settings.organiser)
        self.record = VotingRecord(run=settings.run, peer=me, incarnation=incarnation)
        self.round_times = RoundTimes()
        self._works = 0
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
        """Return the number of what this peer has trained next: no two commitments of one incarnation have the same."""
        self._works += 1
        return self._works

    # Votes ----------------------------------------------------------------------------------------------------
    @property
    def incarnation(self) -> int:
        """The number under which this peer votes, averages and commits."""
        return self.record.incarnation

    def voter_at(self, position: Position) -> VoterState | None:
        """Return this peer's votes at a position; None once it has left. If it may have voted there and does not
        remember it, it becomes another incarnation (R11)."""
        state = self.record.at(position)
        if state is Refusal.FORGOTTEN:
            self.begin_anew()
            state = self.record.at(position)
        return state if isinstance(state, VoterState) else None

    def remember(self, state: VoterState) -> None:
        """Keep the votes at a position."""
        self.record = self.record.after(state)

    def begin_anew(self) -> None:
        """Become another incarnation, which has voted nowhere. The one before votes no more."""
        self.record = self.record.renewed(self.record.incarnation + 1)

    def goodbye(self, position: Position) -> Leaving:
        """Leave: sign that this incarnation votes no more."""
        self.record, departure = self.record.farewell()
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
