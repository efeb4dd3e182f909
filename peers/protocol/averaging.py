"""A member's way through a round: ready, pledged to a leader, exchanging, complete, applying."""

from __future__ import annotations

from peers.errors import LocalProtocolError
from peers.log.header import Header, Member
from peers.log.state import LogError
from peers.presence.election import ATTEMPT_LEAP, quorum
from peers.presence.heartbeat import PeerState
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    Dropped,
    Event,
    FetchPayload,
    Note,
    PayloadAssembled,
    Send,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.joining import CATCHING_UP, Joining
from peers.protocol.messages import Accuse, Adopt, Attempt, Begin, Complete, Held, Holding, Ready, Round, Waiting, Want
from peers.protocol.states import State
from peers.values.wire import printable
from peers.values.workload import Trained


class Averaging(Joining):
    """A peer that has trained its lease."""

    def _trained_all(self, trained: Trained) -> None:
        if not self.is_training:
            return  # void: the state has moved on since
        self._trained = trained
        self._training_seconds = self._now - self._training_since
        if self.state is State.TRAINING:
            self._be_ready()

    def _be_ready(self) -> None:
        self._ready_since = self._gathered_at = self._now
        steps, whole = self._steps_at_our_speed(), self.settings.inner_steps
        self._wants = 0 if steps == whole else steps * self.settings.samples_per_lease // whole
        self._enter(State.READY)
        self._say_ready()

    def _say_ready(self) -> None:
        if not self.is_settled:
            return
        if self._is_kept_waiting():
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
            round=self.exchange.round if self.exchange else None,
            rate=self._rate,
            wants=self._wants,
            relayed=self._named(self.reachability.detours(self._now)),
            unreached=self._named(self.unreached),
            seen=self.reachability.seen(self.me),
        )
        self._emit(Send(leader, ready))
        if self.exchange:
            self._emit_all(self.exchange.repeat())

    def _is_kept_waiting(self) -> bool:
        """Whether the leader could have begun long ago, or has waited for those at work for longer than it may."""
        if not self._are_most_ready():
            self._gathered_at = self._now
        since_gathered = self._now - max(self._gathered_at, self._ready_since)
        overdue = since_gathered > self.schedule.begin(everyone_is_ready=True)
        return overdue or self._now - self._ready_since > self.schedule.begin(everyone_is_ready=False)

    def _are_most_ready(self) -> bool:
        ready = {self.me} | {peer for peer, beat in self._live().items() if beat.state is PeerState.READY}
        if not self.log.roster:
            return len(ready) >= self.settings.minimum_peers
        return quorum(self.log.roster, self.membership.leavers, ready)

    def _keep_averaging(self) -> None:
        """Say where we are, repeat what failed, and give up on a leader that is gone or does not conclude."""
        leader, attempt = self._pledged_to, self._attempt
        if leader is None or attempt is None or (leader != self.me and not self.is_live(leader)):
            self._back_to_ready()
            return
        if self._now > self._attempt_ends:
            self._give_up_on_leader()
            self._back_to_ready()
            return
        if not self._due():
            return
        if self._adopting:
            self._adopt_held(self._adopting)
        elif self.exchange:
            self._emit_all(self.exchange.repeat())
            if self.exchange.payload is not None:
                self._hold_round(self.exchange)
            else:
                self._say_waiting(leader, attempt, self.exchange)

    def _say_waiting(self, leader: str, attempt: Attempt, exchange: Exchange) -> None:
        unreached = exchange.partners() & (self.unreached | self.reachability.doubted(self._now))
        missing, named = exchange.missing(), tuple(sorted(unreached))
        waiting = Waiting(attempt=attempt, missing=missing, moved=exchange.moved, unreached=named)
        self._emit(Send(leader, waiting))

    def _give_up_on_leader(self) -> None:
        self._ready_since = self._gathered_at = self._now
        if self._pledged_to is not None and self._pledged_to != self.me:
            self._distrust(self._pledged_to)

    def _back_to_ready(self) -> None:
        """The attempt is over. What has been exchanged stays: the next leader may go on with the round."""
        self._attempt = self._adopting = None
        self._open_to = ()
        self._enter(State.READY)
        self._leave_if_possible()
        if self.state is State.READY:
            self._say_ready()

    # Attempts -------------------------------------------------------------------------------------------------
    def _begin(self, sender: str, begin: Begin) -> None:
        """Join an attempt of the leader we are pledged to, or go on with a round of which somebody was lost."""
        if not self._takes_part(sender, begin.attempt):
            return
        going_on = self.exchange is not None and self.exchange.name == begin.round.name
        unbroken = going_on and self.state is State.AVERAGING  # it is the only one who may have committed what we hold
        if (self._held and not unbroken) or not self._offered(begin.round):
            return
        if not self._possible(begin.round):
            self._emit(Dropped(sender, "begin", "its attempt can lead to no entry"))
            return
        self._enter_attempt(begin.attempt, begin.seconds)
        self._open_to = begin.round.remaining if begin.open else ()
        if self.exchange is not None and going_on:
            self._emit_all(self.exchange.go_on(begin.attempt, begin.round))
            if self.exchange.payload is not None:
                self._hold_round(self.exchange)
        else:
            self.reachability.round_begins()
            self.exchange = Exchange(self.me, begin.attempt, begin.round)
            self._emit_all(self.exchange.open())

    def _adopt(self, sender: str, adopt: Adopt) -> None:
        """Take over an entry that may have been committed, unless what we hold is from a later attempt."""
        if not self._takes_part(sender, adopt.attempt):
            return
        if self._held and adopt.held.attempt.order < self._held.attempt.order:
            return
        try:
            self.log.append(adopt.held.header)
        except LogError as error:
            self._emit(Dropped(sender, "adopt", str(error)))
            return
        self._enter_attempt(adopt.attempt, adopt.seconds)
        self._adopting = adopt
        self._adopt_held(adopt)

    def _adopt_held(self, adopt: Adopt) -> None:
        header = adopt.held.header
        if self._held and self._held.header == header:
            self._hold(header)
        else:
            donors = tuple(peer for peer in adopt.holders if peer != self.me)
            self._emit(FetchPayload(header, donors))

    def _takes_part(self, sender: str, attempt: Attempt) -> bool:
        """Whether the attempt is one that we promised to be in, and later than all that we have been in."""
        here = self.state in (State.READY, State.AVERAGING) and sender == self._pledged_to
        leap = attempt.number - self._last_attempt
        return here and sender == attempt.leader and 0 < leap <= ATTEMPT_LEAP

    def _enter_attempt(self, attempt: Attempt, seconds: float) -> None:
        self._attempt = attempt
        self._adopting = None
        self._open_to = ()
        self._last_attempt = attempt.number
        self._attempt_ends = self._now + self.schedule.given_up(seconds)
        if self.state is State.READY:
            self._enter(State.AVERAGING)

    def _offered(self, round: Round) -> bool:
        assert self._trained is not None
        mine = [member for member in round.roster if member.peer == self.me]
        offer = Member(peer=self.me, tokens=self._trained.tokens, samples=self._trained.samples, wants=self._wants)
        return mine == [offer] and self.me not in round.lost

    def _possible(self, round: Round) -> bool:
        """Whether the round can lead to an entry: its roster follows from the log, and its parts are the payload."""
        try:
            self.log.next_header(round.roster, self.log.position.head)  # any digest will do
        except LogError:
            return False
        reduces = {share.member.peer for share in round.shares if share.chunks}
        trained = {member.peer for member in round.roster if member.tokens}
        return round.chunks == self.payload.chunks and reduces <= trained and not reduces <= set(round.lost)

    def _aborted(self, sender: str, attempt: Attempt) -> None:
        """The leader has ended our attempt; or we said Ready for one that is too early for it."""
        if sender != attempt.leader:
            return
        if self.state is State.AVERAGING and attempt == self._attempt:
            self._back_to_ready()
            return
        leap = attempt.number - self._last_attempt
        if self.state is State.READY and sender == self._pledged_to and 0 < leap <= ATTEMPT_LEAP:
            self._last_attempt = attempt.number
            self._sent_at = -float("inf")
            self._say_ready()

    # The exchange ---------------------------------------------------------------------------------------------
    def _exchanged(self, event: Event) -> None:
        """Something of the round's data has moved."""
        if not isinstance(event, ExchangeEvent):
            raise LocalProtocolError(f"no such event: {event!r}")
        if self.state not in (State.READY, State.AVERAGING) or not self.exchange or event.round != self.exchange.name:
            return
        if isinstance(event, ChunksUnsent) and self.is_live(event.peer):
            self.reachability.failed(event.peer, self._now)
        elif isinstance(event, ChunkSent):
            self.reachability.passed(event.peer)
        self._emit_all(self.exchange.handle(event))
        if isinstance(event, PayloadAssembled) and self._attempt and not self._adopting:
            self._hold_round(self.exchange)
        elif isinstance(event, BadBlocks):
            self._accuse(event)

    def _accuse(self, bad: BadBlocks) -> None:
        self._emit(Dropped(bad.sender, "contribution", bad.reason))
        if self._attempt:
            accuse = Accuse(attempt=self._attempt, accused=bad.sender, reason=printable(bad.reason))
            self._emit(Send(self._attempt.leader, accuse))

    def _talk(self, sender: str, message: Holding | Want) -> None:
        """Members settle between them what becomes of a lost member's chunks."""
        if self.exchange:
            if isinstance(message, Holding):
                self._emit_all(self.exchange.on_holding(sender, message))
            else:
                self._emit_all(self.exchange.on_want(sender, message))

    def _fetched(self, header: Header) -> None:
        """A payload that we asked for is here."""
        if self.state is State.REPLAYING and header == self._replaying:
            self._apply(header)
        elif self._adopting and header == self._adopting.held.header:
            self._hold(header)

    def _not_fetched(self, header: Header, reason: str) -> None:
        if self.state is State.REPLAYING and header == self._replaying:
            self._not_replayed(header, reason)
        else:
            self._emit(Note("warning", f"no payload of entry {header.index}: {reason}"))

    def _hold_round(self, exchange: Exchange) -> None:
        """All chunks are here: what entry do they make?"""
        assert exchange.payload is not None
        missed = exchange.missed()
        header = self.log.next_header(exchange.round.entry_roster(missed), exchange.payload)
        self._hold(header, tuple(missed.items()))

    def _hold(self, header: Header, missed: tuple[tuple[str, int], ...] = ()) -> None:
        """From now on we take part only in attempts that respect this entry, until it is known what was committed."""
        assert self._attempt is not None
        is_new = self._held is None or self._held.attempt != self._attempt
        self._held = Held(attempt=self._attempt, header=header)
        complete = Complete(attempt=self._attempt, payload=header.payload, missed=missed)
        self._completes[self.me] = complete
        leader = self._attempt.leader
        self._emit(Send(leader, complete))
        if is_new:  # later only to the leader: its Commit repairs what gets lost
            for peer in self._open_to:
                if peer not in (self.me, leader) and peer not in self.unreached:
                    self._emit(Send(peer, complete))
        self._conclude()

    def _heard_complete(self, sender: str, complete: Complete) -> None:
        """A member of an open attempt, which we may not have heard of yet, holds the whole payload."""
        known = self._completes.get(sender)
        if known is None or known.attempt.order < complete.attempt.order:
            self._completes[sender] = complete
            self._conclude()

    def _conclude(self) -> None:
        """Apply the entry if all members of our attempt hold it: more than half of the last roster, as in its leader's
        commit. No later attempt can then lead to another one, whether its leader learns of this or not."""
        mine = self._completes.get(self.me)
        if mine and mine.attempt.leader == self.me and self._leader:
            return  # as its leader we hear the same, and commit: so that it is known here, too, who took part
        if self.state is not State.AVERAGING or not self._held or not mine or mine.attempt != self._attempt:
            return
        if self._open_to and all(self._completes.get(peer) == mine for peer in self._open_to):
            self._apply(self._held.header)

    # The entry ------------------------------------------------------------------------------------------------
    def _commit(self, sender: str, header: Header) -> None:
        """Apply the entry if we hold its payload; else somebody went on without us."""
        if self._held is not None and self._held.header == header and self.state in (State.READY, State.AVERAGING):
            self._apply(header)
        elif self.state in CATCHING_UP:
            self._replay(sender, header)

    def _applied(self, header: Header) -> None:
        """Go on training from the new theta at once; the digest of the state is taken meanwhile."""
        self._require(State.APPLYING)
        self._undigested = self.log
        self._emit(Note("info", f"outer step {header.index + 1} applied, {len(header.roster)} peers"))
        kept, self._is_kept = self._is_kept, False
        lease = self.log.leases.get(self.me)
        if self._leave_by is not None:
            return  # as soon as the digest is there
        if kept and self._trained:
            self._be_ready()
        elif kept:
            self._enter(State.TRAINING)
        elif lease is not None and self._furthest() is None:
            self._train(lease, self.settings.inner_steps)
        else:
            self._enter(State.JOINING)
            self._join()

    def _digested(self, header: Header, state_digest: bytes) -> None:
        """Now others can be told where we are."""
        log, self._undigested = self._undigested, None
        if log is None or log.last != header:
            raise LocalProtocolError(f"the digest after entry {header.index}, which was not applied last")
        self._settle(log, state_digest)
        if self._leave_by is not None:
            if log is self.log:
                self._leave()
        elif self.state is State.READY:
            self._say_ready()
        elif self.state is State.JOINING:
            self._join()
