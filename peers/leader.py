"""The leader's side of one position: gather who is ready, lead a round, go on when somebody dies, commit.

Safety does not depend on there being one leader. An entry commits only when every member that remains in the attempt
says Complete and they hold more than half of the last roster, and a member that holds an entry takes part in another
leader's attempt only if it hands on that entry or a later one. So whoever leads next meets a member that knows of what
may have been committed, and hands it on (Adopt).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from peers.chunks import PayloadSize, split_by_rate
from peers.election import culprits, take_order
from peers.events import Effect, Note, Send
from peers.gathering import Gathering
from peers.heartbeat import Heartbeat
from peers.log import Header, LogError, LogState
from peers.messages import Abort, Accuse, Adopt, Attempt, Begin, Commit, Complete, Held, Ready, Round, Share, Waiting
from peers.settings import RunSettings
from peers.wire import printable

MARGIN = 3.0  # how much longer than foreseen a round may take before those who hold it up are left out
LONGEST = 10.0  # times the manifest's time limit: rates are what peers say of themselves


class Leader(Gathering):
    """What one peer knows as leader of one position. Dropped when the position is passed or the lead is lost."""

    def __init__(
        self, me: str, log: LogState, state_digest: bytes, settings: RunSettings, payload: PayloadSize
    ) -> None:
        super().__init__(me, log, state_digest, settings, payload)
        self._running: Begin | Adopt | None = None
        self._members: tuple[str, ...] = ()  # who remains in the running attempt
        self._in_minority = False
        self._began_at = 0.0
        self._unseen_since: dict[str, float] = {}
        self._complete: dict[str, Complete] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._spoiled: set[Attempt] = set()  # rounds that came to different ends at different members

    @property
    def running(self) -> bool:
        return self._running is not None

    def on_ready(self, sender: str, ready: Ready, now: float) -> list[Effect]:
        if self._running is None:
            return super().on_ready(sender, ready, now)
        if sender not in self._members:
            return [self._ask_again(sender)] if ready.last_attempt < self._last_number else []
        if ready.last_attempt < self._running.attempt.number:
            return [Send(sender, self._running)]  # it has not heard of the attempt yet
        return self._abort(f"{sender} has left the attempt") + super().on_ready(sender, ready, now)

    def gone(self, peer: str, now: float) -> list[Effect]:
        """The peer has said goodbye."""
        self._ready.pop(peer, None)
        return self._lose([peer], f"{peer} has left", now)

    def tick(self, now: float, live: Mapping[str, Heartbeat], left: Collection[str]) -> list[Effect]:
        """Close the roster, or go on without somebody, when it is time. `live` are the other peers' heartbeats."""
        self.left = left
        if self._running:
            return self._watch(now, live)
        for peer in [peer for peer in self._ready if peer != self._me and peer not in live]:
            del self._ready[peer]
        return self._begin(now) if self._may_begin(now, live) else []

    # Attempts -------------------------------------------------------------------------------------------------
    def _begin(self, now: float) -> list[Effect]:
        self._in_minority = not self._enough(self._ready)
        held = self._latest_held()
        attempt = self._next_attempt()
        if held is not None:
            holders = tuple(peer for peer in sorted(self._ready) if self._holds(peer, held))
            ready = take_order(self._log.roster, self._ready)
            return self._run(Adopt(attempt=attempt, held=held, holders=holders), ready, "hands an entry on", now)
        round = self._unfinished_round()
        what = "goes on with a round" if round else "begins"
        round = round or self._new_round(attempt)
        return self._run(Begin(attempt=attempt, round=round), round.remaining, what, now)

    def _new_round(self, attempt: Attempt) -> Round:
        """Each member with tokens reduces a part, sized so that all links are done together."""
        offers = self._offers()
        roster = [offers[peer] for peer in take_order(self._log.roster, offers)]
        reducers = [member.peer for member in roster if member.tokens]
        chunks = split_by_rate(self._payload.chunks, [float(self._ready[peer].rate) for peer in reducers])
        part = dict(zip(reducers, chunks, strict=True))
        shares = tuple(Share(member=member, chunks=part.get(member.peer, 0)) for member in roster)
        return Round(name=attempt, shares=shares, lost=())

    def _unfinished_round(self) -> Round | None:
        """The round that a leader before us could not conclude, if enough of its members are here to do so."""
        rounds = {peer: ready.round for peer, ready in self._ready.items() if ready.round}
        mine = rounds.get(self._me)
        if mine is None or mine.name in self._spoiled:
            return None
        others = {peer: round for peer, round in rounds.items() if round.shares == mine.shares}
        lost = {peer for round in others.values() for peer in round.lost}
        round = mine.without(lost.union(peer for peer in mine.peers if peer not in others))
        able = self._me in round.remaining and self._may_conclude(round)
        return round if able and (self._in_minority or self._enough(round.remaining)) else None

    @staticmethod
    def _may_conclude(round: Round) -> bool:
        return any(share.chunks for share in round.shares if share.member.peer in round.remaining)

    def _run(self, running: Begin | Adopt, members: Sequence[str], what: str, now: float) -> list[Effect]:
        self._running = running
        self._members = tuple(members)
        self._began_at = now
        self._unseen_since.clear()
        self._complete, self._waiting = {}, {}
        note = Note("info", f"attempt {running.attempt} {what}: {len(members)} peers")
        return [note, *(Send(peer, running) for peer in members)]

    def _next_attempt(self) -> Attempt:
        self._last_number += 1
        return Attempt(position=self._log.position, number=self._last_number, leader=self._me)

    # Who is lost ----------------------------------------------------------------------------------------------
    def _lose(self, peers: Iterable[str], reason: str, now: float) -> list[Effect]:
        """Go on without these peers; what has arrived of theirs counts."""
        lost = [peer for peer in peers if peer in self._members and peer != self._me]
        running = self._running
        if running is None or not lost:
            return []
        remaining = [peer for peer in self._members if peer not in lost]
        if not (self._in_minority or self._enough(remaining)):
            return self._abort(reason)
        farewell = self._ends(running.attempt, lost, reason)
        what = f"goes on ({reason})"
        if isinstance(running, Adopt):
            holders = tuple(peer for peer in running.holders if peer in remaining)
            if not holders:
                return self._abort(reason)
            adopt = running.model_copy(update={"attempt": self._next_attempt(), "holders": holders})
            return farewell + self._run(adopt, remaining, what, now)
        round = running.round.without(lost)
        if not self._may_conclude(round):
            return self._abort(reason)
        return farewell + self._run(Begin(attempt=self._next_attempt(), round=round), remaining, what, now)

    def _watch(self, now: float, live: Mapping[str, Heartbeat]) -> list[Effect]:
        """Who has been silent for a heartbeat's time is lost; so are those who hold all others up for too long."""
        for peer in self._members:
            if peer in live or peer == self._me:
                self._unseen_since.pop(peer, None)
            else:
                self._unseen_since.setdefault(peer, now)
        patience = self._settings.timing.heartbeat
        dead = [peer for peer, since in self._unseen_since.items() if now - since >= patience]
        if dead:
            return self._lose(dead, f"{', '.join(dead)} is gone", now)
        if now - self._began_at <= self._time_limit():
            return []
        slow = culprits(self._members, self._complete, self._waiting)
        for peer in slow:
            self._bar(peer, now)
        reason = f"time is up; held up by {', '.join(slow) or 'nobody in particular'}"
        return self._lose(slow, reason, now) or self._abort(reason)

    def _time_limit(self) -> float:
        """Seconds for the running attempt: a multiple of what the slowest link needs, as far as links were measured."""
        timing = self._settings.timing
        rates = [self._ready[peer].rate for peer in self._members if peer in self._ready]
        if isinstance(self._running, Adopt) or not all(rates) or not rates:
            return timing.round_timeout
        payloads = 2.0  # at most: its own blocks out and the average in, and its part in and out
        foreseen = MARGIN * payloads * self._payload.bytes / min(rates)
        until_a_death_is_seen = timing.heartbeat_expiry + 2 * timing.heartbeat
        return min(max(foreseen, until_a_death_is_seen), LONGEST * timing.round_timeout)

    def _ends(self, attempt: Attempt, members: Iterable[str], reason: str) -> list[Effect]:
        abort = Abort(attempt=attempt, reason=printable(reason))
        return [Send(peer, abort) for peer in members]

    def _abort(self, reason: str) -> list[Effect]:
        assert self._running is not None
        attempt, members = self._running.attempt, self._members
        self._running, self._members = None, ()
        self._ready.clear()  # everyone says Ready again, with what it holds by then
        return [Note("warning", f"attempt {attempt} failed: {reason}"), *self._ends(attempt, members, reason)]

    # What members say -----------------------------------------------------------------------------------------
    def on_waiting(self, sender: str, waiting: Waiting) -> list[Effect]:
        if not self._is_running(waiting.attempt):
            return self._set_right(sender, waiting.attempt)
        if sender in self._members:
            self._waiting[sender] = waiting.missing
        return []

    def on_accuse(self, sender: str, accuse: Accuse, now: float) -> list[Effect]:
        if not self._is_running(accuse.attempt) or not {sender, accuse.accused} <= set(self._members):
            return []
        self._bar(accuse.accused, now)
        return self._lose([accuse.accused], f"{accuse.accused} sent {sender} bad blocks: {accuse.reason}", now)

    def on_complete(self, sender: str, complete: Complete, now: float) -> list[Effect]:
        running = self._running
        if running is None or running.attempt != complete.attempt or sender not in self._members:
            return self._set_right(sender, complete.attempt)
        self._complete[sender] = complete
        if len(self._complete) < len(self._members):
            return []
        if isinstance(running, Adopt):
            return self._commit(running.held.header)
        outcomes = {peer: (said.payload, said.missed) for peer, said in self._complete.items()}
        (payload, missed), _ = Counter(outcomes.values()).most_common(1)[0]
        wrong = [peer for peer, outcome in outcomes.items() if outcome != (payload, missed)]
        try:
            header = self._log.next_header(running.round.entry_roster(dict(missed)), payload)
        except LogError as error:
            return self._abort(f"what its members say can be no entry: {error}")
        if not wrong:
            return self._commit(header)
        self._spoiled.add(running.round.name)  # should it be aborted
        for peer in wrong:
            self._bar(peer, now)
        reason = f"{', '.join(wrong)} hold another payload"
        return self._lose(wrong, reason, now) or self._abort(reason)

    def _commit(self, header: Header) -> list[Effect]:
        commit = Commit(header=header)
        return [Send(peer, commit) for peer in self._members]

    def _set_right(self, sender: str, attempt: Attempt) -> list[Effect]:
        """The sender speaks of another attempt than the one that runs."""
        if self._running and sender in self._members:
            return [Send(sender, self._running)]
        return self._ends(attempt, [sender], "this attempt is over")

    def _is_running(self, attempt: Attempt) -> bool:
        return self._running is not None and self._running.attempt == attempt

    def _latest_held(self) -> Held | None:
        held = [ready.held for ready in self._ready.values() if ready.held and self._follows(ready.held.header)]
        return max(held, key=lambda item: item.attempt.order, default=None)

    def _follows(self, header: Header) -> bool:
        try:
            self._log.append(header)
        except LogError:
            return False
        return True

    def _holds(self, peer: str, held: Held) -> bool:
        theirs = self._ready[peer].held
        return theirs is not None and theirs.header == held.header
