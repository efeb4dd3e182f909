"""The leader's side of one position: gather who is ready, lead a round, go on when somebody dies, commit.

Safety does not depend on there being one leader. An entry commits only when every member that remains in the attempt
says Complete and they hold more than half of the last roster, and a member that holds an entry takes part in another
leader's attempt only if it hands on that entry or a later one, or shows that it can't have been committed. So whoever
leads next meets a member that knows of what may have been committed, and hands it on (Adopt).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from peers.log.header import NO_PAYLOAD, Header
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState, take_order
from peers.presence.heartbeat import Heartbeat
from peers.presence.standing import Standing
from peers.protocol.attempts import annex_of, are_apart, ends, held_up_by, is_connected, reducers, still_in_round, told
from peers.protocol.certifier import OPEN_LIMIT, Certifier, passers
from peers.protocol.claims import Claim, disclaimers
from peers.protocol.commitment import Contribution, digest_of_all
from peers.protocol.comparison import Comparison
from peers.protocol.disputes import Disputes
from peers.protocol.effects import Effect, Note, Send
from peers.protocol.gathering import LEAVES, Gathering
from peers.protocol.judge import Judge
from peers.protocol.messages import Accuse, Adopt, Begin, Commit, Complete, Marked, Ready, Told, Waiting
from peers.protocol.rounds import Attempt, Holder, Round
from peers.protocol.tally import Tally
from peers.values.chunks import PayloadSize


class Leader(Gathering):
    """What one peer knows as leader of one position. Dropped when the position is passed or the lead is lost."""

    def __init__(
        self,
        me: str,
        log: LogState,
        state_digest: bytes,
        settings: RunSettings,
        payload: PayloadSize,
        standing: Standing,
        certifier: Certifier,
        judge: Judge,
    ) -> None:
        super().__init__(me, log, state_digest, settings, payload, standing, certifier)
        self._judge = judge
        self._running: Begin | Adopt | None = None
        self._members: dict[str, None] = {}  # who remains in the running attempt, in order
        self._began_at = self._moved_at = self._seconds = 0.0
        self._moved: dict[str, int] = {}  # chunks, as members say
        self._unseen_since: dict[str, float] = {}
        self._disputes, self._tally = Disputes(settings.timing), Tally()
        self._left: Counter[str] = Counter()
        self._spoiled: set[Attempt] = set()  # rounds that came to different ends at different members

    @property
    def running(self) -> bool:
        return self._running is not None

    def on_ready(self, sender: str, ready: Ready, now: float) -> list[Effect]:
        if self._running is None:
            return super().on_ready(sender, ready, now)
        if sender not in self._members:
            return [self._ask_again(sender)] if ready.last_attempt < self._last_number else []
        if self._are_missed(ready.heard, self._running):
            return self._abort(f"{sender} hears who seemed to be gone") + super().on_ready(sender, ready, now)
        if ready.last_attempt < self._running.attempt.number:
            return self._tell([sender], {sender: ready}, now)  # it has not heard of the attempt yet, or lacks a proof
        reason = f"{sender} has left the attempt"
        self._left[sender] += 1
        effects = self._lose([sender], reason, now) if self._left[sender] > LEAVES else []
        return effects or self._abort(reason) + super().on_ready(sender, ready, now)

    def gone(self, peer: str, now: float) -> list[Effect]:
        """The peer has said goodbye."""
        self._ready.pop(peer, None)
        return self._lose([peer], f"{peer} has left", now)

    def tick(self, now: float, live: Mapping[str, Heartbeat], departed: Collection[str]) -> list[Effect]:
        """Close the roster, or go on without somebody, when it is time. `live` are the other peers' heartbeats,
        `departed` those of the last roster that have left."""
        self.departed = departed
        if self._running:
            return self._watch(now, live)
        self._forget(now, live)
        is_cut_off = self._is_cut_off(now, live)  # asked each time: it keeps the time
        is_time = self._is_time(now, live)
        is_needed = not (is_cut_off or self._enough(self._ready)) and self._needs_barred(now, is_time)
        effects = self._pardon(now) if is_needed else []
        effects += self._begin_if_possible(is_cut_off, now, live) if is_time or is_needed else []
        if not self.running:
            self._take_pardons_back()
        return effects

    def _begin_if_possible(self, is_cut_off: bool, now: float, live: Mapping[str, Heartbeat]) -> list[Effect]:
        plan, claim = self._plan(), self._claim()
        if claim is not None and self._may_be_disclaimed(claim, now, live):
            return []
        is_new = self._has_work and not claim and not self._unfinished_round()
        effects = self._leave_out(plan) if is_new else []
        if is_new and not plan.reducers:
            return effects
        if self._enough(self._ready) or (is_cut_off and self._may_go_on_alone(self._ready)):
            effects += self._begin(claim, now)
        return effects

    # Attempts -------------------------------------------------------------------------------------------------
    def _begin(self, claim: Claim | None, now: float) -> list[Effect]:
        self._in_minority = not self._enough(self._ready)
        if claim is not None:
            members = take_order(self._log.roster, self._ready)
            return self._hand_on(claim.header, claim.holders, members, "hands an entry on", now)
        round = self._unfinished_round()
        if round is not None:
            return self._exchange(round, (), "goes on with a round", now)
        if not self._has_work and not self._log.closes:
            self._pass_over_claims()
            return self._skip(now)
        round = self._new_round(self._attempt(self._last_number + 1))
        return self._exchange(round, self._commitments(round.roster), "begins", now)

    def _skip(self, now: float) -> list[Effect]:
        """Nobody has trained the fragment in this cycle: its entry says so, and there is nothing to exchange."""
        members, offers = take_order(self._log.roster, self._ready), self._offers()
        header = self._log.next_header([offers[peer] for peer in members], NO_PAYLOAD)
        return self._hand_on(header, (), members, "skips a fragment", now)

    def _new_round(self, name: Attempt) -> Round:
        """Those whom all others reach reduce parts, sized so that all links are done together."""
        shares = self._shares()
        members = {share.member.peer for share in shares}
        faults, amendment = self._judge.annex(members, name.alone)
        gone = self._gone(members, faults)
        committed = digest_of_all(self._commitments([share.member for share in shares]))
        return Round(name=name, shares=shares, faults=faults, gone=gone, amendment=amendment, committed=committed)

    def _unfinished_round(self) -> Round | None:
        """The round that a leader before us could not conclude, if enough of its members are here to do so."""
        round = still_in_round(self._me, self._ready)
        if round is None or round.name in self._spoiled or (round.faults if self._in_minority else round.name.alone):
            return None  # a minority has no annex, and its round takes all others their say
        able = self._me in round.remaining and bool(reducers(round))
        able = able and is_connected(round, self._standing.pairs(round.remaining))
        return round if able and self._is_enough(round.remaining) else None

    def _exchange(self, round: Round, commitments: tuple[Contribution, ...], what: str, now: float) -> list[Effect]:
        """Have those who remain exchange blocks. Who goes on with another leader's round knows its `commitments`."""
        members = round.remaining
        begin = Begin(
            attempt=self._next_attempt(),
            round=round,
            seconds=self._seconds_for(round),
            open=bool(self._log.roster) and not self._in_minority and len(members) <= OPEN_LIMIT,
            commitments=commitments,
            disclaimers=disclaimers(self._ready) if self._claims.proven(self._ready) else (),
        )
        return self._run(begin, members, what, now)

    def _hand_on(
        self, header: Header, holders: tuple[Holder, ...], members: Sequence[str], what: str, now: float
    ) -> list[Effect]:
        """Run an attempt in which members take over an entry. How much of it each must fetch is not foreseen."""
        seconds = self._schedule.attempt(())
        adopt = Adopt(attempt=self._next_attempt(), header=header, holders=holders, seconds=seconds)
        return self._run(adopt, members, what, now)

    def _run(self, running: Begin | Adopt, members: Sequence[str], what: str, now: float) -> list[Effect]:
        self._running, self._members, self._seconds = running, dict.fromkeys(members), running.seconds
        self._began_at = self._moved_at = now
        self._barred.attempt_begins(members)
        self._unseen_since.clear()
        self._disputes = Disputes(self._settings.timing)
        self._tally = Tally()
        if isinstance(running, Begin):
            self._comparison = Comparison(self._me, running, self._judge, self._settings.timing.resend)
        note = Note("info", f"attempt {running.attempt} {what}: {len(members)} peer{'s' * (len(members) > 1)}")
        return [note, *self._tell(members, self._ready, now)]

    def _tell(self, peers: Sequence[str], ready: Mapping[str, Ready], now: float) -> list[Effect]:
        assert self._running is not None
        return told(self._running, peers, ready, self._judge.shown(annex_of(self._running), peers, ready, now))

    def _next_attempt(self) -> Attempt:
        self._last_number += 1
        return self._attempt(self._last_number)

    def _attempt(self, number: int) -> Attempt:
        alone = self._in_minority and bool(self._log.roster)
        return Attempt(position=self._log.position, number=number, leader=self._me, alone=alone)

    def _is_enough(self, peers: Collection[str]) -> bool:
        """Return whether these are enough for the attempt that begins or runs."""
        return self._enough(peers) or (self._in_minority and self._may_go_on_alone(peers))

    # Who is lost ----------------------------------------------------------------------------------------------
    def _lose(self, peers: Iterable[str], reason: str, now: float) -> list[Effect]:
        """Go on without these peers; what has arrived of theirs counts."""
        lost = dict.fromkeys(peer for peer in peers if peer in self._members and peer != self._me)
        running = self._running
        if running is None or not lost:
            return []
        remaining = [peer for peer in self._members if peer not in lost]
        if not self._is_enough(remaining):
            return self._abort(reason)
        farewell = ends(running.attempt, lost, reason)
        what = f"goes on ({reason})"
        if isinstance(running, Adopt):
            if running.holders and not set(running.donors) & set(remaining):
                return self._abort(reason)
            return farewell + self._hand_on(running.header, running.holders, remaining, what, now)
        round = running.round.without(lost)
        if not reducers(round):
            return self._abort(reason)
        return farewell + self._exchange(round, running.commitments, what, now)

    def _watch(self, now: float, live: Mapping[str, Heartbeat]) -> list[Effect]:
        """Who has been silent for a heartbeat's time is lost; so are those who hold all others up for too long."""
        unseen = [peer for peer in self._members if peer not in live and peer != self._me]
        self._unseen_since = {peer: self._unseen_since.get(peer, now) for peer in unseen}
        dead = [peer for peer, since in self._unseen_since.items() if now - since >= self._settings.timing.heartbeat]
        if dead:
            return self._lose(dead, f"{', '.join(dead)} is gone", now)
        has_stalled = now - self._moved_at > self._schedule.stall and isinstance(self._running, Begin)
        if has_stalled or now - self._began_at > self._seconds:
            return self._hurry("nothing moves" if has_stalled else "time is up", has_stalled, now)
        return []

    def _hurry(self, why: str, has_stalled: bool, now: float) -> list[Effect]:
        """Go on without those who hold the attempt up, or begin another one."""
        assert self._running is not None
        running, tally, expiry = self._running, self._tally, self._settings.timing.heartbeat_expiry
        waiting = tally.waiting(since=now - expiry)  # who waits says so again and again
        slow = held_up_by(running, self._members, tally.complete, waiting)
        if isinstance(running, Begin):
            late = [peer for peer in self._members if peer not in tally.complete]
            if late and self._me not in late and not tally.differing and self._is_enough(tally.complete):
                return self._do_without(late, waiting, now)
            is_still = now - self._moved_at > expiry  # else they need time, and the next attempt goes on with the round
            if is_still and are_apart(slow, waiting) and self._standing.may_replan(slow[0]):
                return self._part(running.round, slow[0], slow[1:], f"{' and '.join(slow)} wait for each other")
        for peer in slow:
            self._bar(peer, now)
        reason = f"{why}; held up by {', '.join(slow) or 'nobody in particular'}"
        effects = self._lose(slow, reason, now) or self._abort(reason)
        if has_stalled and isinstance(running, Begin) and not self.running:
            self._spoiled.add(running.round.name)  # whatever is wrong with it: a new one begins with all blocks
        return effects

    def _do_without(self, late: Sequence[str], waiting: Mapping[str, tuple[str, ...]], now: float) -> list[Effect]:
        """Enough have signed, and wait for nobody else. Whoever says for whom it waits is believed a few times."""
        for peer in late:
            if not (waiting.get(peer) and self._standing.may_replan(peer)):
                self._bar(peer, now)
        return self._lose(late, f"enough have signed without {', '.join(late)}", now)

    def _abort(self, reason: str) -> list[Effect]:
        assert self._running is not None
        attempt, members = self._running.attempt, self._members
        self._running, self._members = None, {}
        self._ready.clear()  # everyone says Ready again, with what it holds by then
        self._barred.ready.clear()
        return [Note("warning", f"attempt {attempt} failed: {reason}"), *ends(attempt, members, reason)]

    # What members say -----------------------------------------------------------------------------------------
    def on_waiting(self, sender: str, waiting: Waiting, now: float) -> list[Effect]:
        if not self._is_running(waiting.attempt):
            return self._set_right(sender, waiting.attempt, now)
        if sender not in self._members:
            return []
        self._disputes.heard(sender, now)
        self._tally.waits(sender, waiting.missing, now)
        if waiting.moved > self._moved.get(sender, 0):
            self._moved[sender] = waiting.moved
            self._moved_at = now
        return self._plan_anew(sender, waiting.unreached, now)

    def _plan_anew(self, sender: str, unreached: Iterable[str], now: float) -> list[Effect]:
        """A pair that needs each other's data can't talk: begin another round, in which it need not."""
        others = {peer for peer in unreached if peer in self._members and peer != sender}
        self._disputes.says(sender, others, now)
        if not others or not isinstance(self._running, Begin):
            return []
        round, pairs = self._running.round, self._standing.pairs(self._members)
        able = reducers(round)
        known = pairs.broken_with(sender) | pairs.relayed_with(sender)  # the plan could not do without
        broken = (others if sender in able else others & able) - known
        broken = {other for other in broken if self._disputes.has_lasted(sender, other, now)}
        if not broken:
            return []
        outcasts = self._disputes.outcasts(self._members) & {sender, *broken} - {self._me}
        if outcasts:
            return self._leave_behind(sorted(outcasts), "can exchange nothing with most others", now)
        reason = f"{sender} can't exchange data with {', '.join(sorted(broken))}"
        if sender != self._me and not self._standing.may_replan(sender):
            return self._leave_behind([sender], f"has a round planned anew once more: {reason}", now)
        return self._part(round, sender, broken, reason)

    def _part(self, round: Round, peer: str, others: Collection[str], reason: str) -> list[Effect]:
        """The next round does without what the peer and these would exchange."""
        self._standing.failed(peer, others)
        self._spoiled.add(round.name)
        return self._abort(reason)

    def _leave_behind(self, peers: Sequence[str], reason: str, now: float) -> list[Effect]:
        """Bar these, and go on without them."""
        for peer in peers:
            self._bar(peer, now)
        named = f"{', '.join(peers)} {reason}"
        return self._lose(peers, named, now) or self._abort(named)

    def on_accuse(self, sender: str, accuse: Accuse, now: float) -> list[Effect]:
        """Who is shown to have lied is lost, and whoever accuses without showing anything."""
        running, accused = self._running, accuse.accused
        if not self._is_running(accuse.attempt) or sender not in self._members or not isinstance(running, Begin):
            return []
        if self._comparison.convicts(sender, accuse):
            self._spoiled.add(running.round.name)  # everybody holds something else
            self._bar(accused, now)
            return self._abort(f"{accused} gave {sender} another average")
        if accused not in self._members or self._comparison.has_asked(sender, accuse):
            return []
        if self._judge.is_bad_contribution(accuse, running.round):
            return self._leave_behind([accuse.accused], f"sent {sender} bad blocks: {accuse.reason}", now)
        return self._leave_behind([sender], f"accuses {accuse.accused} without evidence: {accuse.reason}", now)

    def on_marked(self, sender: str, marked: Marked, now: float) -> list[Effect]:
        is_wanted = self._is_running(marked.attempt) and isinstance(self._running, Begin)
        return self._comparison.hear(sender, marked, self._tally, now) if is_wanted else []

    def on_prepared(self, sender: str, said: Told, now: float) -> list[Effect]:
        """A member says what has come of the round. Nobody is lost for holding another payload than most before it is
        seen who has given it that."""
        if not self._is_running(said.attempt) or sender not in self._members:
            return self._set_right(sender, said.attempt, now)
        self._disputes.heard(sender, now)
        self._moved_at = now if self._tally.hear(sender, said, now) else self._moved_at
        if not isinstance(self._running, Begin):
            return []
        round, wrong = self._running.round, self._tally.differing
        makes_absent = not {peer for peer, _ in said.missed} <= set(round.lost)
        if not (makes_absent or wrong):
            return []
        self._spoiled.add(round.name)  # should it be aborted
        if makes_absent:
            return self._leave_behind([sender], "does without blocks of members that are not lost", now)
        return self._compare(wrong, now)

    def on_complete(self, sender: str, complete: Complete, now: float) -> list[Effect]:
        effects, running = self.on_prepared(sender, complete, now), self._running
        if effects or running is None or not self._tally.is_complete(self._members):
            return effects
        if isinstance(running, Adopt):
            return self._commit_if_signed(running.header, running, now)
        if self._tally.differing:
            return []  # it is still to be seen who has lied
        try:
            header = running.round.entry(self._log, dict(complete.missed), complete.payload)
        except LogError as error:
            return self._abort(f"what its members say can be no entry: {error}")
        return self._commit_if_signed(header, running, now)

    def _compare(self, wrong: Sequence[str], now: float) -> list[Effect]:
        """Members may show who has given them different averages. If for a while nobody does, those who are alone with
        what they hold are lost, unless the leader has nothing of its own that tells who that is."""
        is_over = now - self._tally.differing_since >= self._settings.timing.heartbeat_expiry
        if not is_over or not self._tally.have_spoken(self._members):
            return self._comparison.ask(self._tally, now)
        if self._me not in self._members:
            return self._abort("its members hold different payloads, and do not show why")
        return self._leave_behind(wrong, "hold another payload", now)

    def _commit_if_signed(self, header: Header, running: Begin | Adopt, now: float) -> list[Effect]:
        """All say the same. Who has signed something else is lost."""
        name = running.attempt.name
        said = {peer: complete.signature for peer, complete in self._tally.complete.items()}
        signed = self._certifier.signed(header, name, said, OPEN_LIMIT)  # each may have told others something else
        voters = self._counted(self._members) & set(self._log.voters)
        unsigned = sorted(voters - signed.keys()) if 2 * len(signed) <= len(self._log.voters) else []
        if unsigned:
            return self._leave_behind(unsigned, "did not sign what they say", now)
        commit = Commit(header=header, certificate=self._certifier.certify(header, name, signed))
        self._standing.entry_made(self._members)
        self._standing.round_seconds = now - self._began_at
        self._standing.work_came((), self._granted.keys() - self._log.leases.keys() - set(self._members))
        round = running.round if isinstance(running, Begin) else None
        passed_on = len(passers(round, header)) > OPEN_LIMIT and self._me in self._members
        return [Send(peer, commit) for peer in ((self._me,) if passed_on else self._members)]

    def _set_right(self, sender: str, attempt: Attempt, now: float) -> list[Effect]:
        """The sender speaks of another attempt than the one that runs."""
        if self._running and sender in self._members:
            return self._tell([sender], self._ready, now)
        return ends(attempt, [sender], "this attempt is over")

    def _is_running(self, attempt: Attempt) -> bool:
        return self._running is not None and self._running.attempt == attempt
