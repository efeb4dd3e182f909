"""A member's way through a round: ready, pledged to a leader, exchanging, complete, applying."""

from __future__ import annotations

from peers.election import ATTEMPT_LEAP
from peers.errors import LocalProtocolError
from peers.events import (
    Apply,
    BadBlocks,
    ContributionArrived,
    Dropped,
    Event,
    Note,
    PayloadDigested,
    Pushed,
    PushFailed,
    Quantized,
    ReducedArrived,
    Send,
)
from peers.exchange import Exchange
from peers.joining import Joining
from peers.log import Header, LogError
from peers.messages import (
    Accuse,
    Attempt,
    Begin,
    Complete,
    Held,
    Ready,
    Waiting,
)
from peers.states import State
from peers.wire import printable
from peers.workload import Trained

RECENT_ENTRIES = 64
"""How many of the last headers a peer can name to one that fell behind."""


class Averaging(Joining):
    """A peer that has trained its lease."""

    def _trained_all(self, trained: Trained) -> None:
        if self.state is not State.TRAINING:
            return  # void: the state has moved on since
        self._trained = trained
        self._ready_since = self._now
        self._enter(State.READY)
        self._say_ready()

    def _say_ready(self) -> None:
        patience = self.settings.timing
        if self._now - self._ready_since > patience.grace + patience.partition_grace + 2 * patience.round_timeout:
            self._give_up_on_leader()
        leader = self._elect()
        if leader != self._pledged_to:
            self._last_attempt += self._pledged_to is not None  # the one that the other leader may still begin
            self._pledged_to = leader
            self._sent_at = -float("inf")
        if leader is None or not self._due():
            return
        assert self._trained is not None
        ready = Ready(
            position=self.log.position,
            state_digest=self.state_digest,
            tokens=self._trained.tokens,
            samples=self._trained.samples,
            incumbent=self.log.position.head != self._joined_at,
            last_attempt=self._last_attempt,
            held=self._held,
        )
        self._emit(Send(leader, ready))

    def _keep_averaging(self) -> None:
        """Say where we are, repeat pushes that failed, and give up on a leader that is gone or does not conclude."""
        assert self.exchange is not None
        leader = self._pledged_to
        if leader != self.me and leader not in self._live():
            self._back_to_ready()
            return
        if self._now - self.exchange.started_at > 2 * self.settings.timing.round_timeout:
            self._give_up_on_leader()
            self._back_to_ready()
            return
        if leader is not None and self._due():
            self._emit_all(self.exchange.push_what_is_due())
            attempt = self.exchange.attempt
            if self.exchange.payload is not None:
                self._emit(Send(leader, Complete(attempt=attempt, payload=self.exchange.payload)))
            else:
                self._emit(Send(leader, Waiting(attempt=attempt, missing=self.exchange.missing())))

    def _give_up_on_leader(self) -> None:
        self._ready_since = self._now
        if self._pledged_to is not None and self._pledged_to != self.me:
            self._distrust(self._pledged_to)

    def _begin(self, sender: str, begin: Begin) -> None:
        """Join the attempt that our Ready promised to the leader we are pledged to, if it respects what we hold."""
        if self.state not in (State.READY, State.AVERAGING) or sender != self._pledged_to:
            return
        if sender != begin.attempt.leader or begin.attempt.number != self._last_attempt + 1 or not self._offered(begin):
            return
        if not self._possible(begin):
            self._emit(Dropped(sender, "begin", "its attempt can lead to no entry"))
            return
        if self._held and (begin.adopted is None or begin.adopted.attempt.order < self._held.attempt.order):
            return
        self._last_attempt = begin.attempt.number
        if self.state is State.READY:
            self._enter(State.AVERAGING)
        self.exchange = Exchange(self.me, begin, self._now)
        self._emit_all(self.exchange.open())

    def _offered(self, begin: Begin) -> bool:
        assert self._trained is not None
        mine = [member for member in begin.roster if member.peer == self.me]
        offer = (self._trained.tokens, self._trained.samples)
        return [(member.tokens, member.samples) for member in mine] == [offer]

    def _possible(self, begin: Begin) -> bool:
        try:
            self.log.next_header(begin.roster, begin.attempt.position.head)  # any digest will do
            if begin.adopted:
                self.log.append(begin.adopted.header)
        except LogError:
            return False
        return (begin.adopted is not None) == bool(begin.holders)

    def _aborted(self, sender: str, attempt: Attempt) -> None:
        """The leader has ended our attempt; or we said Ready for one that is too early for it."""
        if sender != attempt.leader:
            return
        if self.state is State.AVERAGING and self.exchange and attempt == self.exchange.attempt:
            self._back_to_ready()
            return
        leap = attempt.number - self._last_attempt
        if self.state is State.READY and sender == self._pledged_to and 0 < leap <= ATTEMPT_LEAP:
            self._last_attempt = attempt.number
            self._sent_at = -float("inf")
            self._say_ready()

    def _exchanged(self, event: Event) -> None:
        """Something of the present attempt's data has moved."""
        kinds = Quantized | ContributionArrived | BadBlocks | ReducedArrived | Pushed | PushFailed | PayloadDigested
        if not isinstance(event, kinds):
            raise LocalProtocolError(f"no such event: {event!r}")
        if self.state is not State.AVERAGING or self.exchange is None or event.attempt != self.exchange.attempt:
            return
        self._emit_all(self.exchange.handle(event))
        if isinstance(event, PayloadDigested):
            self._hold(event.digest)
        elif isinstance(event, BadBlocks) and self._pledged_to is not None:
            self._emit(Dropped(event.sender, "contribution", event.reason))
            accuse = Accuse(attempt=event.attempt, accused=event.sender, reason=printable(event.reason))
            self._emit(Send(self._pledged_to, accuse))

    def _hold(self, payload: bytes) -> None:
        assert self.exchange is not None
        begin = self.exchange.begin
        header = begin.adopted.header if begin.adopted else self.log.next_header(begin.roster, payload)
        if header.payload == payload:
            self._held = Held(attempt=begin.attempt, header=header)
        self._sent_at = -float("inf")
        self._keep_averaging()

    def _back_to_ready(self) -> None:
        self.exchange = None
        self._enter(State.READY)
        self._leave_if_possible()
        if self.state is State.READY:
            self._say_ready()

    def _commit(self, sender: str, header: Header) -> None:
        """Apply the entry if we hold its payload; else somebody went on without us."""
        if self.state not in (State.READY, State.AVERAGING):
            return
        if self._held is None or self._held.header != header:
            ahead = self._furthest()
            if ahead is not None:
                self._fetch(ahead)
            return
        try:
            log = self.log.append(header)
        except LogError as error:
            self._emit(Dropped(sender, "commit", str(error)))
            return
        self._enter(State.APPLYING)
        self._recent[header.previous] = header
        while len(self._recent) > RECENT_ENTRIES:
            self._recent.popitem(last=False)
        self.log = log
        self._forget_round()
        self._emit(Apply(header))

    def _applied(self, header: Header, state_digest: bytes) -> None:
        self._require(State.APPLYING)
        self._settle(state_digest)
        self._emit(Note("info", f"outer step {header.index + 1} applied, {len(header.roster)} peers"))
        lease = self.log.leases.get(self.me)
        if self._leave_by is not None:
            self._leave()
        elif lease is not None:
            self._train(lease, self.settings.inner_steps)
        else:
            self._enter(State.JOINING)
