"""This peer's part in making the entry at one position: ready, pledged to a leader, exchanging, complete, concluded.

There is one slot for each cycle and fragment, from when the peer comes to the cycle until its entry is made or its work
dropped; while it still trains, too, since others may take it for their leader.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from peers.log.certificate import Certificate
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.agreement import Agreement
from peers.protocol.certifier import Certifier, passed_on
from peers.protocol.claims import Takeover, follows
from peers.protocol.desk import Desk, Repetition
from peers.protocol.effects import Dropped, FetchPayload, Note, Send
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    PayloadAssembled,
    PayloadFetched,
    PayloadNotFetched,
    Tick,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.protocol.inquiries import Inquiries
from peers.protocol.internal import Owner, WorkDone
from peers.protocol.leadership import Leadership
from peers.protocol.messages import Abort, Accuse, Adopt, Begin, Commit, Compare, Complete, Holding, Prepared, Want
from peers.protocol.minority import may_make
from peers.protocol.offer import Offer
from peers.protocol.part import Part, Row, Table
from peers.protocol.patience import Patience
from peers.protocol.replica import Replica
from peers.protocol.rounds import Attempt, Round
from peers.protocol.trainer import Trainer
from peers.protocol.witness import Witness
from peers.values.wire import printable


class SlotState(StrEnum):
    OPEN = "open"
    READY = "ready"
    AVERAGING = "averaging"
    CONCLUDED = "concluded"


OPEN, READY, AVERAGING, CONCLUDED = SlotState
COMMITTED: dict[StrEnum, str] = {CONCLUDED: "what we hold is committed"}


class Slot(Part):
    """One position, one entry. What it knows of the position goes with it when the peer moves on."""

    TABLE: ClassVar[Table] = {
        OPEN: {
            WorkDone: Row("_be_ready", {READY: "inner steps are done"}),
        },
        READY: {
            Tick: Row("say_ready"),
            Begin: Row("_begin", COMMITTED | {AVERAGING: "the leader begins"}),
            Adopt: Row("_adopt", COMMITTED | {AVERAGING: "the leader hands on an entry"}),
            Commit: Row("_committed", COMMITTED),
            Abort: Row("_told_to_wait"),
            Prepared: Row("_heard"),
            Complete: Row("_heard"),
            Holding: Row("_talk"),
            Want: Row("_talk"),
            PayloadNotFetched: Row("_not_fetched"),
        }
        | {event: Row("_exchanged") for event in ExchangeEvent.__args__},
        AVERAGING: {
            Tick: Row("_keep_averaging", COMMITTED | {READY: "the leader is gone, or does not conclude"}),
            Begin: Row("_begin", COMMITTED),
            Adopt: Row("_adopt", COMMITTED),
            Commit: Row("_committed", COMMITTED),
            Abort: Row("_aborted", {READY: "the attempt is over"}),
            Prepared: Row("_heard", COMMITTED),
            Complete: Row("_heard", COMMITTED),
            Holding: Row("_talk"),
            Want: Row("_talk"),
            Compare: Row("_talk"),
            PayloadFetched: Row("_fetched", COMMITTED),
            PayloadNotFetched: Row("_not_fetched"),
        }
        | {event: Row("_exchanged", COMMITTED) for event in ExchangeEvent.__args__},
        CONCLUDED: {},
    }
    EXACT = frozenset({WorkDone})
    state: SlotState

    def __init__(
        self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica, fragment: int, host: Owner
    ) -> None:
        super().__init__(OPEN)
        self.exchange: Exchange | None = None
        self.log = replica.log.of(fragment)
        self.acceptor = desk.memory.at(self.log.position)
        self.certifier = Certifier(desk.keys, self.log, lambda: presence.membership.farewells(self.log))
        self.leadership = Leadership(desk, presence, trainer, replica, self.log, self.certifier, self)
        self.attempt: Attempt | None = None
        self.adopting: Adopt | None = None
        self._desk = desk
        self._presence = presence
        self._replica = replica
        self._host = host
        self._open_to: tuple[str, ...] = ()  # the members of the attempt, if all tell all that they are complete
        self._offer = Offer(desk, presence, trainer, replica, self.log)
        self._since = self._attempt_ends = self._began_at = self._ready_since = desk.now
        self._agreement = Agreement(desk, presence, self.acceptor)
        self._takeover = Takeover(desk, presence, self.log, self.certifier, self.acceptor)
        self._patience = Patience(desk, presence, self.log)
        self._inquiries = Inquiries(desk, presence, self.log)
        self.witness = Witness(desk, presence, self.log, replica, self._patience)
        self._word = Repetition(desk)

    def was_asked(self, peer: str) -> bool:
        """Whether we asked the peer: it knows better than its last heartbeat how far it is."""
        return self.state is READY and peer in (self.acceptor.pledged_to, self._inquiries.asked)

    @property
    def _lasted(self) -> float:
        """For how long we have been at this position."""
        return self._desk.now - self._since

    @property
    def is_taking_part(self) -> bool:
        return self.state in (READY, AVERAGING)

    @property
    def led_by(self) -> str | None:
        """The leader that we are pledged to, or would be."""
        return self.acceptor.pledged_to or self.leadership.elect()

    # Ready ----------------------------------------------------------------------------------------------------
    def _be_ready(self, done: WorkDone) -> None:
        self._patience.begin()
        self._ready_since = self._desk.now
        self._offer.make(done.trained)
        self._enter_fresh(READY)
        self.say_ready()

    def say_ready(self, _: Tick | None = None) -> None:
        """Tell the leader what we have trained and hold, until something comes of it."""
        if not self._replica.is_settled:
            return
        if self._patience.is_over(self.acceptor.pledged_to):
            self._patience.give_up(self.acceptor.pledged_to)
        leader, before = self.leadership.elect(), self.acceptor.pledged_to
        if self.acceptor.pledge(leader):
            self._patience.turn_away(before)
            self._word.at_once()
        if leader is None or not self._word.is_due:
            return
        self._word.said()
        if leader == self._desk.me:
            self._inquiries.ask_another()
        round = self.exchange.round if self.exchange else None
        self._desk.emit(Send(leader, self._offer.ready(self.acceptor, round, self.witness.lacking(leader))))
        self.witness.show(leader)
        if self.exchange:
            self._desk.emit(*self.exchange.repeat())

    # Attempts -------------------------------------------------------------------------------------------------
    def _begin(self, begin: Begin, sender: str) -> None:
        """Join an attempt of the leader we are pledged to, or go on with a round of which somebody was lost."""
        if not self.acceptor.may_join(sender, begin.attempt, self._lasted):
            return
        ours = self.exchange.round if self.exchange and self.exchange.name == begin.round.name else None
        if not self._keeps_to_what_we_hold(begin, ours) or not self._offer.is_in(begin.round, begin.attempt.alone):
            return
        if not self.witness.is_convinced(begin.round.faults, sender):
            return
        if objection := self._offer.objection(begin, ours, self.acceptor):
            self._desk.emit(Dropped(sender, "begin", objection))
            return
        self._enter_attempt(begin.attempt, begin.seconds)
        self._open_to = begin.round.remaining if begin.open else ()
        if self.exchange is not None and ours is not None:
            self._desk.emit(*self.exchange.go_on(begin.attempt, begin.round))
            if self.exchange.payload is not None:
                self._hold_round(self.exchange)
        else:
            self._presence.reachability.round_begins(self.log.fragment)
            contributions = self._offer.contributions(begin)
            self.exchange = Exchange(self._desk.me, begin.attempt, begin.round, contributions, self._desk.keys)
            self._desk.emit(*self.exchange.open())

    def _keeps_to_what_we_hold(self, begin: Begin, ours: Round | None) -> bool:
        """Whether an attempt can lead to nothing else than what we hold, or that can't have been committed."""
        held, exchange = self.acceptor.held, self.exchange if ours else None
        outcome = self._outcome(exchange) if exchange and exchange.payload is not None else None
        return held is None or held.header == outcome or self._takeover.is_disclaimed(held, begin)

    def _adopt(self, adopt: Adopt, sender: str) -> None:
        """Take over an entry that may have been committed, unless what we hold is of a weightier attempt."""
        if not self.acceptor.may_join(sender, adopt.attempt, self._lasted):
            return
        if not follows(self._here, adopt.header) or not self._takeover.is_proven(adopt):
            self._desk.emit(Dropped(sender, "adopt", "it hands on what nobody has signed, or what does not follow"))
            self._patience.give_up(sender)
            return
        if not self.witness.is_convinced(adopt.header.faults, sender):
            return
        waited = self._desk.now - self._ready_since
        if sender != self._desk.me and (objection := self._takeover.objection(adopt, waited)):
            if self._patience.decline(adopt.attempt):
                self._desk.emit(Note("warning", f"no entry is taken over from {sender}: {objection}"))
            return
        self._enter_attempt(adopt.attempt, adopt.seconds)
        self.adopting = adopt
        self._adopt_held(adopt)

    def _adopt_held(self, adopt: Adopt) -> None:
        header, held = adopt.header, self.acceptor.held
        if header.payload == NO_PAYLOAD or (held and held.header == header):
            self._hold(header)
        else:
            donors = tuple(peer for peer in adopt.donors if peer != self._desk.me and self._presence.is_live(peer))
            self._desk.emit(FetchPayload(header, donors))

    def _enter_attempt(self, attempt: Attempt, seconds: float) -> None:
        self._attempt_ends = self._patience.join(attempt.leader, seconds)
        self.attempt = attempt
        self.adopting = None
        self._open_to = ()
        self.acceptor.last_attempt = attempt.number
        self._began_at = self._desk.now
        if self.state is READY:
            self._enter_fresh(AVERAGING)

    def _enter_fresh(self, state: SlotState) -> None:
        self._enter(state)
        self._word.at_once()

    def _keep_averaging(self, _: Tick) -> None:
        """Say where we are, repeat what failed, and give up on a leader that is gone or does not conclude."""
        leader, attempt, now = self.acceptor.pledged_to, self.attempt, self._desk.now
        if leader is None or attempt is None or (leader != self._desk.me and not self._presence.is_live(leader)):
            self._back_to_ready()
        elif now > self._attempt_ends:
            self._patience.give_up(self.acceptor.pledged_to)
            self._back_to_ready()
        elif self._word.is_due:
            self._word.said()
            self._repeat(leader, attempt)

    def _repeat(self, leader: str, attempt: Attempt) -> None:
        exchange = self.exchange
        if self.adopting:
            self._adopt_held(self.adopting)
        elif exchange:
            self._desk.emit(*exchange.repeat())
            if exchange.payload is not None:
                self._hold_round(exchange)
                return
            doubted = self._presence.reachability.doubted(self._desk.now)
            self._desk.emit(Send(leader, exchange.waiting(attempt, self._presence.unreached | doubted)))

    def _aborted(self, abort: Abort, sender: str) -> None:
        """The leader has ended our attempt."""
        if sender == abort.attempt.leader and abort.attempt == self.attempt:
            has_lasted = self._desk.now - self._began_at > self._desk.settings.timing.heartbeat_expiry
            is_mute = has_lasted and self.exchange is not None and self.exchange.lacks_all_of(sender)
            self._patience.attempt_ended(sender, is_mute)
            self._back_to_ready()

    def _told_to_wait(self, abort: Abort, sender: str) -> None:
        """We said Ready for an attempt that is too early for the leader."""
        attempt = abort.attempt
        if sender == attempt.leader == self.acceptor.pledged_to and self.acceptor.is_later(attempt, self._lasted):
            self.acceptor.last_attempt = attempt.number
            self._word.at_once()
            self.say_ready()

    def _back_to_ready(self) -> None:
        """The attempt is over. What has been exchanged stays: the next leader may go on with the round."""
        self.attempt = self.adopting = None
        self._open_to = ()
        self._patience.leave()
        self._enter_fresh(READY)
        self._host.attempt_over(self)

    # The exchange ---------------------------------------------------------------------------------------------
    def _exchanged(self, event: ExchangeEvent) -> None:
        """Something of the round's data has moved."""
        if not self.exchange or event.round_name != self.exchange.name:
            return
        if isinstance(event, ChunksUnsent) and self._presence.is_live(event.peer):
            self._presence.reachability.failed(event.peer, self._desk.now, self.log.fragment)
        elif isinstance(event, ChunkSent):
            self._presence.reachability.passed(event.peer)
        self._desk.emit(*self.exchange.handle(event))
        if isinstance(event, PayloadAssembled) and self.attempt and not self.adopting:
            self._hold_round(self.exchange)
        elif isinstance(event, BadBlocks):
            self._accuse(event)

    def _accuse(self, bad: BadBlocks) -> None:
        """What one can show is evidence; of the rest we say that there is no exchange with its sender."""
        self._desk.emit(Dropped(bad.sender, "contribution", bad.reason))
        if self.attempt and bad.sender == self.attempt.leader:
            self._attempt_ends = self._desk.now  # it would not do without itself
        elif self.attempt and bad.evidence:
            reason = printable(bad.reason)
            accuse = Accuse(attempt=self.attempt, accused=bad.sender, reason=reason, evidence=bad.evidence)
            self._desk.emit(Send(self.attempt.leader, accuse))

    def _talk(self, message: Holding | Want | Compare, sender: str) -> None:
        """Members settle between them what becomes of a lost member's chunks, and who gave them different ones."""
        if self.exchange:
            self._desk.emit(*self.exchange.hear(sender, message))

    def _fetched(self, fetched: PayloadFetched) -> None:
        """The payload of an entry that we take over is here."""
        if self.adopting and fetched.header == self.adopting.header:
            self._hold(fetched.header)

    def _not_fetched(self, failed: PayloadNotFetched) -> None:
        self._desk.emit(Note("warning", f"no payload of entry {failed.header.index}: {failed.reason}"))

    # The entry ------------------------------------------------------------------------------------------------
    def _hold_round(self, exchange: Exchange) -> None:
        """All chunks are here: hold the entry that they make, if it is the same for all."""
        assert self.attempt is not None
        header, missed = self._outcome(exchange), tuple(exchange.missed().items())
        said = Prepared(attempt=self.attempt, payload=header.payload, missed=missed, entry=header.digest)
        if self.holds(header) or self._agreement.is_reached(said, exchange.round.remaining, exchange.moved):
            self._hold(header, missed)

    def _outcome(self, exchange: Exchange) -> Header:
        assert exchange.payload is not None
        return exchange.round.entry(self._here, exchange.missed(), exchange.payload)

    @property
    def _here(self) -> LogState:
        """The log before the entry, with the state that we have."""
        return self._replica.in_our_state(self.log)

    def _hold(self, header: Header, missed: tuple[tuple[str, int], ...] = ()) -> None:
        attempt = self.attempt
        assert attempt is not None
        complete, is_new = self.acceptor.hold(attempt, header, missed, self._desk.memory.sign(attempt, header))
        self._desk.emit(Send(attempt.leader, complete))
        if is_new:  # later only to the leader: its Commit repairs what gets lost
            others = set(self._open_to) - {self._desk.me, attempt.leader} - self._presence.unreached
            self._desk.emit(*(Send(peer, complete) for peer in self._open_to if peer in others))
        self._conclude()

    def _heard(self, said: Prepared | Complete, sender: str) -> None:
        """A member of our round, maybe in an attempt of which we have not heard yet, has a whole payload, and may have
        signed it."""
        exchange = self.exchange
        if sender == self._desk.me or exchange is None or not self._presence.is_live(sender):
            return
        is_new = self._agreement.hear(sender, said, self.attempt, exchange.round.remaining)
        has_signed = self.acceptor.said_in == self.attempt
        if self.state is AVERAGING and not has_signed and not self.adopting and exchange.payload:
            self._hold_round(exchange)
        if is_new:
            self._conclude()

    def _conclude(self) -> None:
        """Apply the entry if all members of our attempt hold it."""
        attempt = self.attempt
        if attempt is not None and attempt.leader == self._desk.me and self.leadership.is_leading:
            return  # as its leader we hear the same, and commit: so that it is known here, too, who took part
        header = self._agreement.concluded(attempt, self._open_to)
        if header is None or attempt is None or self.state is not AVERAGING:
            return
        signed = self.certifier.signed(header, attempt.name, self._agreement.signatures(attempt, self._open_to))
        certificate = self.certifier.certify(header, attempt.name, signed)
        if self.certifier.weight(header, certificate).is_certified:
            self._make(header, certificate)

    def holds(self, header: Header) -> bool:
        return self.acceptor.held is not None and self.acceptor.held.header == header

    def _committed(self, commit: Commit, sender: str) -> None:
        """What we hold is committed."""
        certificate, said_in = commit.certificate, self.acceptor.said_in
        if certificate is None or not self.holds(commit.header):
            return
        proof = self.certifier.proof(commit.header, certificate)
        if proof is None:
            self._desk.emit(Dropped(sender, "commit", "a signature in its certificate is false"))
        elif proof.is_certified or may_make(self._desk, self._presence, self.log, said_in, sender, commit, proof):
            round = self.exchange.round if self.exchange and not self.adopting else None
            self._desk.emit(*passed_on(commit, self._desk.me, self.attempt, round))
            self._make(commit.header, certificate)

    def _make(self, header: Header, certificate: Certificate) -> None:
        self._enter(CONCLUDED)
        self._host.entry_made(header, certificate)
