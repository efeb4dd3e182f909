"""What the parts of a peer's protocol share: its state, its clock, its way of saying things, who it thinks leads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from peers.errors import LocalProtocolError
from peers.log.header import Header
from peers.log.lineage import Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.presence.election import broken_pairs, elect
from peers.presence.heartbeat import TAIL, Heartbeat, PeerState, name_peers
from peers.presence.membership import DONATING, PARTICIPATING, Membership
from peers.presence.reachability import Reachability
from peers.presence.standing import Standing
from peers.protocol.events import (
    Effect,
    Event,
    FetchSnapshot,
    Received,
    Send,
    Stop,
    StopTraining,
    TokensLost,
    Train,
)
from peers.protocol.exchange import Exchange
from peers.protocol.leader import Leader
from peers.protocol.messages import Adopt, Attempt, Complete, Held, Leaving
from peers.protocol.schedule import Schedule
from peers.protocol.states import SHOWN_AS, TRANSITIONS, State
from peers.values.chunks import PayloadSize
from peers.values.leases import Lease, sample_count
from peers.values.workload import Progress, Trained

GRACE_SHARE = 0.5
EQUALLY_FAST = 0.8
"""Of the fastest peer's speed: who comes close trains as much as it."""


@dataclass(frozen=True)
class Hindrance:
    """Why our work may not count. `is_vain`: nothing that we train now could."""

    kind: str
    reason: str
    is_vain: bool


class PeerCore:
    """State and vocabulary of one peer; `Peer` is the class to use."""

    def __init__(
        self,
        me: str,
        settings: RunSettings,
        payload: PayloadSize,
        state_digest: bytes,
        now: float,
        log: LogState | None = None,
    ) -> None:
        """`log` is where the state is, if not before the first entry."""
        self.me = me
        self.settings = settings
        self.payload = payload
        self.log = log or settings.empty_log
        self.settled = self.log
        self._undigested: LogState | None = None
        self.lineage = Lineage()
        self.state = State.JOINING
        self.state_digest = state_digest
        self.membership = Membership(me, settings.timing.heartbeat_expiry)
        self.progress: Progress | None = None
        self.speed = 0.0  # tokens a second, when we last trained
        self.exchange: Exchange | None = None
        self.schedule = Schedule(settings.timing)
        self.reachability = Reachability(settings.timing.heartbeat_expiry)
        self.trouble = ""  # why what we train does not count; empty: it does
        self._standing = Standing(self.schedule.bar)
        self._told_kind: str | None = None
        self._hindrance: Hindrance | None = None
        self._excluded = ""
        self._is_aside = False
        self._leases_in_vain = 0
        self._now = self._started_at = now
        self._leader: Leader | None = None
        self._trained: Trained | None = None
        self._pledged_to: str | None = None
        self._granted_by: str | None = None  # at this position
        self._ready_since = self._gathered_at = self._attempt_ends = now
        self._hindered_since = self._aside_since = self._ask_at = now
        self._held: Held | None = None
        self._attempt: Attempt | None = None
        self._open_to: tuple[str, ...] = ()  # the members of the attempt, if all tell all that they are complete
        self._completes: dict[str, Complete] = {}
        self._adopting: Adopt | None = None
        self._replaying: Header | None = None
        self._lease: Lease | None = None
        self._is_kept = False
        self._has_snapshot = False  # or got none: the way from here to where the others are is replayed
        self._rate = self._wants = 0
        self._training_since = now
        self._training_seconds: float | None = None
        self._last_attempt = 0
        self._joined_at = self.log.position.head
        self._distrusted_until: dict[str, float] = {}
        self._sent_at = -float("inf")
        self._leave_by: float | None = None
        self._effects: list[Effect] = []
        self._queue: deque[Event] = deque()

    def _emit(self, effect: Effect) -> None:
        """Effects leave in order; a message to ourselves comes straight back."""
        if isinstance(effect, Send) and effect.to == self.me:
            self._queue.append(Received(self.me, effect.message))
        else:
            self._effects.append(effect)

    def _emit_all(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._emit(effect)

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise LocalProtocolError(f"a peer that is {self.state} can't become {state}")
        self.state = state
        self._sent_at = -float("inf")

    def _require(self, state: State) -> None:
        """Our own driver reports only what this state asked for."""
        if self.state is not state:
            raise LocalProtocolError(f"an event of a peer that is {state}, while we are {self.state}")

    def _settle(self, log: LogState, state_digest: bytes) -> None:
        """theta and momentum are there in the log, with this digest; until then heartbeats name the place before."""
        self.state_digest = state_digest
        self.settled = log

    @property
    def is_settled(self) -> bool:
        """Whether theta and momentum are where the log is, and their digest is known. Training needs no digest; what
        others are told of our state does."""
        return self.settled.position == self.log.position and self.state is not State.FETCHING

    def _due(self) -> bool:
        """Whether it is time to say again what has not been answered."""
        if self._now - self._sent_at < self.settings.timing.resend:
            return False
        self._sent_at = self._now
        return True

    def _live(self) -> dict[str, Heartbeat]:
        return self.membership.live(self._now)

    def is_live(self, peer: str) -> bool:
        """Whether its heartbeats say so, as of the last event."""
        return self.membership.is_live(peer, self._now)

    def _elect(self) -> str | None:
        live = self._live()
        able = {
            peer
            for peer, beat in live.items()
            if beat.state in PARTICIPATING and beat.index + 1 >= self.log.position.index
        }
        candidates = {
            peer
            for peer, beat in live.items()
            if beat.index == self.log.position.index and beat.state is not PeerState.ARCHIVING
        } | {self.me}
        has_given = self._leader is not None and self._leader.has_given
        if SHOWN_AS[self.state] in PARTICIPATING or has_given:
            able |= {self.me} | self._granter(live)
        able, candidates = able - self._distrusted, candidates - self._distrusted
        return elect(self.log.roster, able, candidates, self._broken_pairs(live))

    def _granter(self, live: Collection[str]) -> set[str]:
        """Return the peer that gave us our lease, while its heartbeats may not say yet that it is at work, too."""
        is_new = self._now - self._training_since <= self.settings.timing.heartbeat_expiry
        return {self._granted_by} & set(live) if self._granted_by and is_new else set()

    def _broken_pairs(self, live: Mapping[str, Heartbeat]) -> Mapping[str, int]:
        """With how many others each can't talk, those that join included, as heartbeats tell: of ourselves, too, since
        whoever knew more than the others would elect another leader."""
        others = {peer: beat.unreached for peer, beat in live.items() if beat.state is not PeerState.ARCHIVING}
        unreached = {peer: tails for peer, tails in others.items() if tails}
        if self.unreached:
            unreached[self.me] = name_peers(self.unreached)
        return broken_pairs(unreached, {*others, self.me}, TAIL) if unreached else {}

    @property
    def unreached(self) -> frozenset[str]:
        """Peers with which we can exchange no data."""
        return self.reachability.unreached

    @property
    def _distrusted(self) -> frozenset[str]:
        """Peers that failed us as leader or donor a short while ago."""
        return frozenset(peer for peer, until in self._distrusted_until.items() if self._now < until)

    def _distrust(self, peer: str) -> None:
        still = {other: until for other, until in self._distrusted_until.items() if self._now < until}
        self._distrusted_until = still | {peer: self._now + self.schedule.distrust}

    def _lead(self) -> Leader:
        if self._leader is None:
            at = self.log, self.state_digest
            self._leader = Leader(self.me, *at, self.settings, self.payload, self._standing)
        self._leader.lease = self._lease
        return self._leader

    def _train(self, lease: Lease, steps: int) -> None:
        self.progress = None
        self._lease = lease
        self._training_since = self._now
        self._enter(State.TRAINING)
        self._emit(Train(self.log.position.index, lease, steps, self.log.lineage_tokens))

    def _fetch(self, donor: str, least: int = 0) -> None:
        self._drop_work()
        self._joined_at = self.log.position.head  # also when the fetch fails: what we held here is forgotten
        self._enter(State.FETCHING)
        able = {peer for peer, beat in self._live().items() if beat.state in DONATING} - self._distrusted
        self._emit(FetchSnapshot(donor, tuple(sorted(able - {donor})), least))

    def _steps_at_our_speed(self) -> int:
        """Inner steps that we make while the fastest peer makes all, as heartbeats tell. A newcomer finds out: all.

        The manifest's smallest share bounds what one peer's claims can do to the others.
        """
        live = self._live().values()
        fastest = max((beat.speed for beat in live if beat.state in PARTICIPATING), default=0.0)
        if not self.speed or self.speed >= EQUALLY_FAST * fastest:
            return self.settings.inner_steps
        share = max(self.speed / fastest, self.settings.smallest_share)
        return min(self.settings.inner_steps, math.ceil(share * self.settings.inner_steps))

    def _grace(self) -> float:
        """How long to wait for who still trains: a part of what training took us, as it is not lost to be late."""
        timing = self.settings.timing
        if self._training_seconds is None:
            return timing.grace
        return min(timing.grace, max(GRACE_SHARE * self._training_seconds, 3 * timing.heartbeat))

    @property
    def is_training(self) -> bool:
        """Whether the worker is at work; also while an entry that was missed is applied beside it."""
        return self._lease is not None and self._trained is None

    @property
    def _work(self) -> int:
        """The tokens that we have trained and that are in no entry yet."""
        if self._trained is not None:
            return self._trained.tokens
        if self.progress is None or self._lease is None:
            return 0
        samples = self.progress.inner_step * self.settings.samples_per_lease // self.settings.inner_steps
        return min(samples, sample_count(self._lease)) * self.settings.tokens_per_sample

    def _end_work(self, entry: Header | None = None) -> None:
        """What we have trained is in this entry, or void."""
        if entry is not None and entry.tokens_of(self.me):
            self._leases_in_vain = 0
        else:
            self._leases_in_vain += self._work > 0
            self._lose("work", self._work, f"no entry after {self.log.position} takes what we have trained")
        self._lease = self._trained = self.progress = None

    def _drop_work(self, entry: Header | None = None) -> None:
        """We go on without the work in hand, which may be in this entry."""
        if self.is_training:
            self._emit(StopTraining())
        self._end_work(entry)
        self._is_kept = False
        self._forget_round()

    def _lose(self, what: str, tokens: int, reason: str) -> None:
        if tokens:
            self._emit(TokensLost(what, tokens, reason))

    def _forget_round(self) -> None:
        """Nothing of the present position's round matters any more."""
        self.exchange = self._leader = self._held = self._pledged_to = self._granted_by = None
        self._attempt = self._adopting = self._replaying = None
        self._open_to = ()
        self._completes.clear()
        self._last_attempt = 0

    def _leave_if_possible(self) -> None:
        """A round under way is finished first, and its entry noted down, within `leave_by`; all else is dropped."""
        if self._leave_by is None:
            return
        is_busy = self.state in (State.AVERAGING, State.APPLYING) or self._undigested is not None
        if not is_busy or self._now >= self._leave_by:
            self._leave()

    @property
    def goodbye(self) -> Leaving:
        """What to tell the others in the end."""
        return Leaving(position=self.log.position, holds=self._held is not None)

    def _leave(self) -> None:
        if self.is_training:
            self._emit(StopTraining())
        self._enter(State.LEFT)
        self._emit(Stop())  # the driver says goodbye to everybody
