"""The leader of one position's view: it begins the exchange, collects the reducers' Parts, and proposes the header.

Safety does not depend on the leader: it may propose anything (voting.py). It need not be in the round itself. It
proposes, in this order: the newest prepared header, because that may be committed already; the outcome of the round
under way; the outcome of a new round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from peers.log.certificate import Ballot, Group, Phase
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogError
from peers.messages.commitment import Norms, digest_of_all
from peers.messages.messages import Begin, Certified, LeaseRequest, Part, Propose, Ready
from peers.messages.rounds import Round, RoundName
from peers.presence.presence import Presence
from peers.protocol.awaited import late
from peers.protocol.context import Context
from peers.protocol.contributions import receivers_of_commitments
from peers.protocol.effects import Note, Send
from peers.protocol.exchange import DUE
from peers.protocol.pacemaker import death
from peers.protocol.parts import Parts
from peers.protocol.planning import heirs_of, seconds_for, shares
from peers.protocol.readiness import Readiness, commitments_of, links_of
from peers.protocol.replica import Replica
from peers.protocol.trainer import Trainer
from peers.protocol.voter import choice_of
from peers.protocol.voting import Refusal

if TYPE_CHECKING:
    from peers.protocol.round import EntryRound

SECOND_CHANCES = 2
"""Maximum number of times in a view that the leader names heirs for members that gave no Part in time."""
MISSED_ATTEMPTS = 1 << 16
"""Maximum number of a view's attempts that its leader may have forgotten in a restart."""
AGAIN = 2.0
"""Multiple of the pause between repeated messages after which the leader repeats a message to a silent member."""
STRANGER, NOT_FOLLOWED = Refusal.STRANGER.value, Refusal.NOT_FOLLOWED.value
PROPOSED_AGAIN_AFTER = {Refusal.NOT_GONE, Refusal.NOT_ALONE, Refusal.OLD_BALLOT, Refusal.OTHER_VOTE}
"""Refusals after which the leader proposes the same outcome in another ballot, or with more voters kept."""
REFUSALS = {refusal.value: refusal for refusal in Refusal}


class Leader:
    """This peer's work as a leader at one position. `asked` are the peers that received the last proposal."""

    def __init__(
        self, context: Context, presence: Presence, trainer: Trainer, replica: Replica, seat: EntryRound
    ) -> None:
        """Create the leader of one position. `seat` is this peer's own round at that position."""
        self.readiness = Readiness(context, presence, trainer, seat.log)
        self.asked: tuple[str, ...] = ()
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._seat = seat
        self._attempt = 0
        self._view = 0
        self._begun: Begin | None = None
        self._parts: Parts | None = None
        self._second_chances = 0
        self._proposed: Propose | None = None
        self._at = 0.0  # time at which this peer last began a round or proposed
        self._sent_at: dict[str, float] = {}  # time at which each peer was last sent the current Begin or Propose

    # Messages of other peers ----------------------------------------------------------------------------------
    def on_lease_request(self, request: LeaseRequest, sender: str) -> None:
        """Grant samples to a joiner if this peer leads, or if the joiner is the leader that granted this peer its
        lease: since that leader asks for samples itself, it leads no longer."""
        self._seat.look()
        if self._seat.is_led_by_us or sender == self._seat.granted_by:
            self.readiness.ask_lease(sender, request, self._replica.state_digest)

    def on_ready(self, ready: Ready, sender: str) -> None:
        """Store a member's Ready for a view that this peer leads. Act on the lock or refusal that it shows."""
        is_news = self.readiness.view_of(sender) != ready.view or ready.lock is not None
        if not self.readiness.take(sender, ready, self._replica.state_digest):
            return
        lock = choice_of(ready.lock).ballot if ready.lock and ready.lock.certificate else None
        for named in (ready.refused, ready.round.ballot if ready.round else None, lock):
            if named is not None and named.view == self._seat.pacemaker.view:
                # Each ballot has the number of its attempt in the view. A number that is MISSED_ATTEMPTS or more above
                # this peer's own is ignored, because no honest peer names it.
                ahead = named.attempt if named.attempt < self._attempt + MISSED_ATTEMPTS else 0
                self._attempt = max(self._attempt, ahead)
        if ready.view != self._seat.pacemaker.view or not self._seat.is_led_by_us:
            return
        if self._begun is not None or self._proposed is not None:
            self._remind(sender, ready)
        if self._proposed is not None or (is_news and self.readiness.is_full(ready.view)):
            self.tick()  # act at once, without waiting for the next Tick

    def on_part(self, part: Part, sender: str) -> None:
        """Store the averages of a reducer's Part, and propose the header if all Parts have arrived."""
        if self._parts is None or self._begun is None or part.round != self._begun.round.name or self._proposed:
            return
        if self._parts.take(sender, part, self._begun.heirs):
            evidence, lineage = self._context.evidence, self._replica.lineage
            for averaged in part.averages:
                self._context.convict(evidence.observe_average(self._begun.round, averaged, lineage))
        self.tick()

    def on_leaving(self, peer: str) -> None:
        """Drop the Ready of a peer that has sent a farewell, and continue without that peer."""
        self.readiness.leaves(peer)
        self.tick()

    def drop_reducer(self, reducer: str) -> None:
        """Ignore a reducer's averages, because this peer has received a wrong one."""
        if self._parts is not None:
            self._parts.drop(reducer)

    # Choosing the next action ---------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Begin a round, collect its averages, or propose a header, if this peer leads and the action is due."""
        seat = self._seat
        self.readiness.forget()
        if self._view != seat.pacemaker.view or not seat.is_led_by_us:
            self._view, self._second_chances = seat.pacemaker.view, 0
            self._drop()
        if not seat.is_led_by_us or seat.is_decided:
            return
        self._set_pace()
        ready = self.readiness.of(self._view)
        prepared = self._newest_prepared(ready)
        if self._proposed is not None:
            self._revise(self._proposed, prepared, ready)
        elif prepared is not None:
            if seat.attendance.is_enough(_incarnations(ready)):
                self._propose_prepared(prepared, ready)
        elif self._begun is not None:
            self._collect(self._begun)
        elif self._may_vote(ready) and self.readiness.is_time(ready):
            self._begin(ready)

    def _may_vote(self, ready: Mapping[str, Ready]) -> bool:
        """Return True if the ready peers can make the entry. Until twice the grace after the last of them became ready,
        those that are not late (R7) must be enough, because late peers may get the payload too late to vote."""
        incarnations = _incarnations(ready)
        if not self._seat.attendance.is_enough(incarnations):
            return False
        besides = late(self._seat.log, self._context.settings)
        timely = {peer: incarnation for peer, incarnation in incarnations.items() if peer not in besides}
        waited = self._context.now - self.readiness.awaited.times.of_all(incarnations.keys())
        return self._seat.attendance.is_enough(timely) or waited >= 2 * self.readiness.awaited.grace

    def _set_pace(self) -> None:
        awaited, trainer, pace = self.readiness.awaited, self._trainer, self._context.pace
        awaited.grace = pace.grace(trainer.seconds)
        usual_round = self._context.round_times.usual or 0.0
        awaited.slack = pace.slack(trainer.seconds, usual_round, self._presence.usual(self._seat.log))
        awaited.own = trainer.inner_step(), trainer.speed if trainer.is_training else 0.0

    def _drop(self) -> None:
        self._begun = self._proposed = None
        self._parts = None
        self._sent_at.clear()

    def _next_ballot(self) -> Ballot:
        self._attempt += 1
        return Ballot(view=self._view, attempt=self._attempt)

    # The exchange -------------------------------------------------------------------------------------------------
    def _begin(self, ready: Mapping[str, Ready]) -> None:
        """Begin a round of all ready peers, or continue the unfinished round that this peer is in."""
        seat = self._seat
        group = () if seat.attendance.is_quorum(_incarnations(ready)) else seat.attendance.group
        ready = self._without_liars(ready)
        round = self._unfinished(ready)
        if round is not None:
            self._exchange(round, "goes on with a round", ready)
            return
        roster = self.readiness.roster(ready)
        if not any(member.tokens for member in roster):
            self._skip(ready, group)
            return
        name = RoundName(position=seat.log.position, ballot=self._next_ballot(), leader=self._context.me)
        chunks = self._context.payloads[seat.log.fragment].size.chunks
        committed = digest_of_all(commitments_of(roster, ready))
        dealt = shares(roster, links_of(ready), chunks, self._context.experience.undealt.at(seat.log.position.index))
        self._exchange(Round(name=name, shares=dealt, committed=committed, group=group), "begins", ready)

    def _without_liars(self, ready: Mapping[str, Ready]) -> Mapping[str, Ready]:
        """Return the ready peers that no proof convicts of a lie; if they are no quorum, all ready peers. Convicted
        peers are left out because an entry cannot name faults of its own members."""
        honest = {peer: one for peer, one in ready.items() if not self._context.evidence.has_convicted(peer)}
        is_quorum = self._seat.attendance.is_quorum(_incarnations(honest))
        return honest if is_quorum and self.readiness.contributing(honest) else ready

    def _unfinished(self, ready: Mapping[str, Ready]) -> Round | None:
        """Return the round that this peer is in, if a quorum is in it and no leader has continued it yet; otherwise
        None."""
        exchange = self._seat.exchange
        if exchange is None or not self._seat.is_fresh or exchange.round.group:
            return None
        inside = {peer: one for peer, one in ready.items() if one.terms == exchange.round.terms}
        is_known = commitments_are_known(exchange.round, exchange.contributions.commitments)
        return exchange.round if is_known and self._seat.attendance.is_quorum(_incarnations(inside)) else None

    def _exchange(
        self, round: Round, what: str, ready: Mapping[str, Ready], heirs: tuple[tuple[str, str], ...] = ()
    ) -> None:
        context, seat = self._context, self._seat
        is_new = round.name.leader == context.me and not heirs
        ballot = round.name.ballot if is_new else self._next_ballot()
        size, overlap = context.payloads[seat.log.fragment].size, context.pace.overlap_seconds(self._trainer.speed)
        seconds = seconds_for(round, links_of(ready), size, context.settings.timing, overlap)
        before = self._begun
        if before is not None and before.round == round:
            commitments = before.commitments
        elif is_new:
            commitments = commitments_of(round.roster, ready)
        else:
            known = seat.exchange.contributions.commitments if seat.exchange else {}
            commitments = tuple(known[member.peer] for member in round.contributors)
        self._begun = Begin(ballot=ballot, round=round, seconds=seconds, heirs=heirs, commitments=commitments)
        if self._parts is None:
            self._parts = Parts(round, context.keys)
        self._at = context.now
        members = f"{len(round.peers)} peer{'s' * (len(round.peers) > 1)}"
        context.emit(Note("info", f"round {ballot} of outer step {seat.log.position.index} {what}: {members}"))
        self._tell_begun(round.peers)

    def _tell_begun(self, peers: Iterable[str]) -> None:
        """Send the Begin to these members of the round: with all commitments if they average, otherwise with only the
        contributions' norms if they vote, otherwise with neither. In a small round, all get the commitments."""
        begun = self._begun
        assert begun is not None
        need_all, need_norms = receivers_of_commitments(begun, self._seat.log)
        short = begun.model_copy(update={"commitments": ()})
        brief = short.model_copy(update={"norms": Norms.of(begun.commitments)})
        to: tuple[list[str], ...] = [], [], []
        for peer in peers:
            self._sent_at[peer] = self._context.now
            to[0 if peer in need_all else 1 if peer in need_norms else 2].append(peer)
        for message, receivers in zip((begun, brief, short), to, strict=True):  # each message is packed only once
            self._context.emit(*(Send(peer, message) for peer in receivers))

    def _collect(self, begun: Begin) -> None:
        """Propose the round's outcome once all reducers have sent a Part with their signed averages. Name heirs for
        reducers that are dead or have sent no Part within the exchange's time limit."""
        assert self._parts is not None
        if (outcome := self._parts.outcome()) is not None:
            self._context.experience.undealt.note(self._parts.one_sided(), begun.round.name.position.index)
            self._propose_outcome(outcome.payload, outcome.absent, outcome.marks)
            return
        missing, now = self._parts.missing(), self._context.now
        heard = {self._context.me, *self._presence.live()} - self._parts.dropped
        served = dict(begun.heirs)
        heard = {peer for peer in heard if not self._context.evidence.has_convicted(peer)}
        dead = [peer for peer in missing if served.get(peer, peer) not in heard]
        is_late = now - self._at > begun.seconds
        if not (dead or is_late):
            return
        if is_late and not dead:
            if self._second_chances >= SECOND_CHANCES:
                return  # the view times out soon, and the next peer leads
            self._second_chances += 1
        lacking = missing if is_late else tuple(dead)
        able = [
            member.peer for member in begun.round.contributors if member.peer in heard and member.peer not in missing
        ]
        able = able or [member.peer for member in begun.round.contributors if member.peer in heard]
        self._context.experience.undealt.note(lacking, begun.round.name.position.index)
        heirs = heirs_of(lacking, able, begun.heirs)
        if heirs:
            self._exchange(begun.round, "goes on with heirs", self.readiness.of(self._view), (*begun.heirs, *heirs))

    # Proposals ----------------------------------------------------------------------------------------------------
    def _propose_outcome(self, payload: bytes, absent: Mapping[str, int], marks: bytes) -> None:
        begun = self._begun
        assert begun is not None
        round = begun.round
        # voters refuse a proposal in which too few tokens count (R5)
        is_enough = round.counts_enough(absent, begun.ballot.view, len(self._seat.log.ring))
        if not is_enough:
            self._context.emit(Note("info", f"most blocks are missing from round {round.name}: another round begins"))
        header = self._header(round, payload, absent, round.group) if is_enough else None
        if header is None:
            self._drop()
            return
        self._propose(
            Propose(
                ballot=begun.ballot,
                header=header,
                group=round.group,
                justify=None,
                round=round.name,
                marks=marks,
            ),
            round.peers,
        )

    def _header(self, round: Round, payload: bytes, absent: Mapping[str, int], group: Group) -> Header | None:
        """Return the header for the outcome of a round; None if the log allows no such entry."""
        seat = self._seat
        log, faults = seat.here, self._context.evidence.provable(seat.log, self._replica.lineage, round.peers)
        gone = self._gone([*round.peers, *(fault.peer for fault in faults)], group)
        amends = seat.log.closes and not self.readiness.is_amendment_left_out
        amendment = self._context.amending.proposed(seat.log) if amends else None
        leader = self._context.me if seat.log.closes else None
        try:
            return round.entry(log, absent, payload, leader, faults, gone, amendment)
        except LogError as error:
            self._context.emit(Note("warning", f"round {round.name} leads to no entry: {error}"))
            return None

    def _skip(self, ready: Mapping[str, Ready], group: Group) -> None:
        """Propose an entry that skips the fragment, because no ready peer has trained it (R15)."""
        try:
            header = self._seat.here.next_header(self.readiness.roster(ready), NO_PAYLOAD, None)
        except LogError as error:
            self._context.emit(Note("warning", f"fragment {self._seat.log.fragment} cannot be skipped: {error}"))
            return
        propose = Propose(ballot=self._next_ballot(), header=header, group=group, justify=None, round=None)
        self._propose(propose, tuple(ready))

    def _propose_prepared(self, prepared: Certified, ready: Mapping[str, Ready]) -> None:
        """Propose a prepared header again, without an exchange, because the header may be committed already."""
        seat = self._seat
        group = () if seat.attendance.is_quorum(_incarnations(ready)) else seat.attendance.group
        propose = Propose(
            ballot=self._next_ballot(),
            header=prepared.header,
            group=group,
            justify=prepared.certificate,
            round=None,
        )
        self._context.emit(Note("info", f"ballot {propose.ballot} proposes the prepared header again"))
        self._propose(propose, tuple(dict.fromkeys([*ready, *(peer for peer in seat.attendance.at_work)])))

    def _propose(self, propose: Propose, peers: Iterable[str]) -> None:
        self._proposed, self._at = propose, self._context.now
        self.asked = tuple(peers)
        self._sent_at.clear()
        self._tell_proposed(self.asked)

    def _tell_proposed(self, peers: Iterable[str], lacking_proofs: Collection[str] = ()) -> None:
        """Send the peers the proposal, after the proofs of the faults that its header names. Only peers in
        `lacking_proofs` get proofs again that this peer has sent them before."""
        propose, context = self._proposed, self._context
        assert propose is not None
        for peer in peers:
            faults, position = propose.header.faults, propose.position
            shown = context.evidence.show(peer, faults, position, context.now, again=peer in lacking_proofs)
            context.emit(*(Send(peer, proof) for proof in shown if peer != context.me), Send(peer, propose))
            self._sent_at[peer] = context.now

    def _revise(self, propose: Propose, prepared: Certified | None, ready: Mapping[str, Ready]) -> None:
        """Propose the header `prepared` in place of this peer's proposal if `_must_replace` is true. Otherwise, if the
        refusals in `ready` require it, propose the outcome in a new ballot, or withdraw it for a new round."""
        voter, resend = self._seat.voter, self._context.settings.timing.resend
        if self._do_without_signers(propose, ready) or self._context.now - self._at < resend:
            return
        if prepared is not None and self._must_replace(prepared, propose):
            self._propose_prepared(prepared, ready)
            return
        if voter.prepared is not None and choice_of(voter.prepared).ballot == propose.ballot:
            return  # the header is prepared, and voters are giving vote 2
        refusals = {
            REFUSALS[one.reason] for one in ready.values() if one.refused == propose.ballot and one.reason in REFUSALS
        }
        if Refusal.HAS_WORK in refusals or self._does_without_strangers(propose, ready):
            self._drop()
        elif self._does_without_amendment(propose, ready) or refusals & PROPOSED_AGAIN_AFTER:
            self._propose_anew(propose, refusals)

    def _do_without_signers(self, propose: Propose, ready: Mapping[str, Ready]) -> bool:
        """Withdraw the proposal if it has averages that this peer or too many members cannot get, or whose signers are
        proven to lie. Heirs then average the chunks of these signers anew. Return True if it is withdrawn."""
        exchange, begun, parts = self._seat.exchange, self._begun, self._parts
        if begun is None or parts is None or begun.round.name != propose.round:
            return False
        is_in = exchange is not None and exchange.name == propose.round
        signers = parts.signers(exchange.averages.lacking()) if exchange is not None and is_in else ()
        wrong = {one for one in signers if self._context.evidence.has_convicted(one)}
        if self._context.now - self._at > DUE * begun.seconds:
            lacking = self._obstacles_to_remove({peer: one.lacking for peer, one in ready.items()})
            wrong |= {*signers, *lacking.intersection(parts.signers(range(begun.round.chunks)))}
        for signer in sorted(wrong):
            parts.drop(signer)
        if wrong:
            self._proposed = None
            self._sent_at.clear()
        return bool(wrong)

    def _obstacles_to_remove(self, obstacles: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the most frequent obstacles, as many as must be removed so that enough ready peers can vote.
        `obstacles` maps ready peers to names that keep them from voting, such as ids of newcomers."""
        ready = {self._context.me: self._context.incarnation} | _incarnations(self.readiness.of(self._view))
        found = set[str]()
        while True:
            left = {peer: names for peer in sorted(obstacles) if (names := set(obstacles[peer]) - found)}
            if not left or self._seat.attendance.is_enough({peer: ready[peer] for peer in ready.keys() - left.keys()}):
                return found
            by = Counter(name for names in left.values() for name in names)
            found.add(max(by, key=lambda name: (by[name], name)))

    def _does_without_strangers(self, propose: Propose, ready: Mapping[str, Ready]) -> bool:
        """Exclude newcomers that voters do not hear (R5), if these voters' refusals keep the proposal from a quorum.
        Return True if newcomers are excluded."""
        new = {one.peer for one in propose.header.roster if not self._seat.log.counts(one.peer, one.incarnation)}
        refusing = self._refusing(propose, ready, STRANGER)
        strangers = self._obstacles_to_remove({peer: new.intersection(one.named) for peer, one in refusing.items()})
        self.readiness.strangers |= strangers
        return bool(strangers)

    def _does_without_amendment(self, propose: Propose, ready: Mapping[str, Ready]) -> bool:
        """Leave out an amendment that voters cannot follow, if these voters' refusals keep the proposal from a quorum
        (R18). Return True if the amendment is left out."""
        refusing = self._refusing(propose, ready, NOT_FOLLOWED)
        are_too_many = bool(self._obstacles_to_remove({peer: [NOT_FOLLOWED] for peer in refusing}))
        self.readiness.is_amendment_left_out |= are_too_many
        return are_too_many

    def _refusing(self, propose: Propose, ready: Mapping[str, Ready], reason: str) -> dict[str, Ready]:
        """Return the Readys that refuse the proposal for this reason, by peer; none in the first AGAIN heartbeat
        intervals after the proposal, because other voters may not have answered yet."""
        if self._context.now - self._at < AGAIN * self._context.settings.timing.heartbeat:
            return {}
        return {peer: one for peer, one in ready.items() if (one.refused, one.reason) == (propose.ballot, reason)}

    def _propose_anew(self, propose: Propose, refusals: set[Refusal]) -> None:
        """Propose the same outcome in a new ballot if its header or minority has changed since, or if voters refuse it
        because of their votes in this or a newer ballot (OTHER_VOTE, OLD_BALLOT). Otherwise do nothing."""
        group = self._seat.attendance.group if propose.group else ()
        header: Header | None = propose.header
        if propose.justify is None and self._begun is not None and self._parts is not None:
            outcome = self._parts.outcome()
            if outcome is not None:
                header = self._header(self._begun.round, outcome.payload, outcome.absent, group)
        is_new = header != propose.header or group != propose.group
        if header is None or not (is_new or refusals & {Refusal.OLD_BALLOT, Refusal.OTHER_VOTE}):
            return
        again = Propose(
            ballot=self._next_ballot(),
            header=header,
            group=group,
            justify=propose.justify,
            round=propose.round,
            marks=propose.marks,
        )
        self._propose(again, self.asked)

    def _must_replace(self, prepared: Certified, propose: Propose) -> bool:
        """Return True if a prepared header must replace the proposal: its certificate is from another ballot, and newer
        than the one that the proposal shows. The whole run's certificates count as newer than a minority's."""
        choice = choice_of(prepared)
        if choice.ballot == propose.ballot:
            return False
        return propose.justify is None or propose.justify.choice.weight < choice.weight

    def _newest_prepared(self, ready: Mapping[str, Ready]) -> Certified | None:
        """Return the newest prepared header that this peer or a ready peer knows, to propose it again (R4); None if
        there is none, or if a minority prepared it and this peer may not make entries alone."""
        voter, next_ballot = self._seat.voter, Ballot(view=self._view, attempt=self._attempt + 1)
        false = self.readiness.false_locks
        shown = {peer: one.lock for peer, one in ready.items() if one.lock and one.lock.certificate}
        newest = voter.prepared
        for peer, lock in sorted(shown.items(), key=lambda one: choice_of(one[1]).weight, reverse=True):
            if newest is not None and choice_of(newest).weight >= choice_of(lock).weight:
                break
            if not choice_of(lock).ballot < next_ballot or lock == false.get(peer):
                continue
            if voter.is_prepared(lock):
                newest = lock
                break
            false[peer] = lock  # not checked again, because checks of signatures take time
        is_foreign = newest is not None and choice_of(newest).alone and not self._seat.attendance.is_alone
        return None if is_foreign else newest

    def _gone(self, named: Iterable[str], group: Group) -> tuple[str, ...]:
        """Return the voters that the header lists as gone, without those `named` elsewhere in it. A voter is gone if
        this peer and a quorum of the members do not hear it, or if a minority (`group`) makes the entry."""
        log, timing = self._seat.log, self._context.settings.timing
        if not log.closes:
            return ()
        here: set[str] = set()
        if not group:
            ready = self.readiness.of(self._view)
            here = self._presence.voters_here(log, self._context.incarnation, death(timing))
            heard = {peer: one.named for peer, one in ready.items() if one.reason != STRANGER}
            here |= self._obstacles_to_remove(heard)
        besides = here.union(named)
        return tuple(peer for peer in log.voters if peer not in besides)

    # Repeating messages -------------------------------------------------------------------------------------------
    def _remind(self, peer: str, ready: Ready) -> None:
        """Send the Begin or the proposal again to a member if its Ready shows that it has not received that message."""
        now, resend = self._context.now, self._context.settings.timing.resend
        is_due = now - self._sent_at.get(peer, -resend) >= AGAIN * resend
        begun, propose = self._begun, self._proposed
        if begun is not None and peer in begun.round.peers:
            has_heirs = bool(begun.heirs) and propose is None
            is_elsewhere = ready.round != begun.round.name
            if (is_elsewhere and self._seat.voter.answers.is_due(peer, begun.round.name)) or (has_heirs and is_due):
                self._tell_begun([peer])
        if propose is None or peer not in self.asked or not is_due:
            return
        has_voted = self._seat.voter.voted_in(peer, propose.ballot, Phase.PREPARE)
        if ready.unproven or not (has_voted or ready.refused == propose.ballot):
            self._tell_proposed([peer], lacking_proofs=[peer] if ready.unproven else [])


def commitments_are_known(round: Round, known: Mapping[str, object]) -> bool:
    """Return True if `known` has the commitment of each contributor of the round."""
    return all(member.peer in known for member in round.contributors)


def _incarnations(ready: Mapping[str, Ready]) -> dict[str, int]:
    return {peer: one.incarnation for peer, one in ready.items()}
