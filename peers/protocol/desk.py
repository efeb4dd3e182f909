"""What the parts of one peer share: who it is, what time it is, and where everything goes that it wants done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peers.log.certificate import Departure
from peers.log.settings import RunSettings
from peers.protocol.acceptor import Memory
from peers.protocol.amending import Amending
from peers.protocol.docket import Docket
from peers.protocol.effects import Effect, Send
from peers.protocol.events import Event, Received
from peers.protocol.faults import Court
from peers.protocol.schedule import Schedule
from peers.protocol.votes import Polls
from peers.values.identity import Keys
from peers.values.workload import PayloadKind


class Desk:
    """`now` is the time of the event that is being handled, in seconds of the driver's clock. `payloads` are of each
    fragment."""

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
        self.docket = Docket(Court(keys.verify, payloads))
        self.polls = Polls(keys.verify)
        self.amending = Amending(settings.run, settings.organiser)
        self.memory = Memory(me, settings.run, incarnation, keys)
        self.settings = settings
        self.payloads = payloads
        self.schedule = Schedule(settings.timing)
        self.now = self.started_at = now
        self.events: deque[Event] = deque()
        self._effects: list[Effect] = []

    def is_farewell(self, peer: str, incarnation: int, departure: int, signature: bytes) -> bool:
        """Whether the peer has signed that it left."""
        said = Departure(run=self.settings.run, peer=peer, incarnation=incarnation, index=departure)
        return self.keys.verify(peer, said.text, signature)

    def emit(self, *effects: Effect) -> None:
        """Effects leave in order; a message to ourselves comes straight back."""
        for effect in effects:
            if isinstance(effect, Send) and effect.to == self.me:
                self.events.append(Received(self.me, effect.message))
            else:
                self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, once."""
        effects, self._effects = self._effects, []
        return effects


class Repetition:
    """When to say again what has not been answered."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._said_at: float | None = None

    @property
    def is_due(self) -> bool:
        return self._said_at is None or self._desk.now - self._said_at >= self._desk.settings.timing.resend

    def said(self) -> None:
        self._said_at = self._desk.now

    def at_once(self) -> None:
        """Say it at the next opportunity, since there is something new to say."""
        self._said_at = None
