"""The leader's side of one position, before a round: leases for joiners, and who is ready with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from peers.log.header import MEMBER_LIMIT, Fault, Member
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState, take_order
from peers.presence.election import highest_attempt, quorum
from peers.presence.heartbeat import Heartbeat
from peers.presence.standing import Standing
from peers.protocol.awaited import Awaited
from peers.protocol.barred import Barred
from peers.protocol.certifier import Certifier
from peers.protocol.claims import Claim, Claims, Founding
from peers.protocol.commitment import Contribution
from peers.protocol.effects import Dropped, Effect, Send
from peers.protocol.messages import Abort, Adopt, Begin, Excluded, LeaseGrant, LeaseRequest, Ready, Refuse
from peers.protocol.planning import Plan, credible_rates, deal, foreseen, plan, why_left_out
from peers.protocol.rounds import Attempt, Round, Share
from peers.protocol.schedule import Schedule
from peers.values.chunks import PayloadSize
from peers.values.leases import Lease
from peers.values.wire import printable

LEAVES = 1
"""How often a member may leave an attempt at one position until the others go on without it."""
OVERTAKING_LIMIT = 8
"""How often one peer may make the others at a position say Ready again."""


class Gathering:
    """Who is ready at one position, as its leader knows."""

    def __init__(
        self,
        me: str,
        log: LogState,
        state_digest: bytes,
        settings: RunSettings,
        payload: PayloadSize,
        standing: Standing,
        certifier: Certifier,
    ) -> None:
        """`standing` outlives the position."""
        self._me = me
        self._certifier = certifier
        self._standing = standing
        self._schedule = Schedule(settings.timing)
        self._log = log
        self._state_digest = state_digest
        self._settings = settings
        self._payload = payload
        self._claims = Claims(log, certifier)
        self._granted: dict[str, Lease] = {}
        self._ready: dict[str, Ready] = {}
        self._barred = Barred(may_be_needed_ever=not log.roster)
        self._said_at: dict[str, float] = {}  # when each said last that it is ready
        self._most_are_here = False  # of the last roster, whether they count or not
        self._most_here_at = -float("inf")  # a heartbeat that is late, or one message that is lost, makes no minority
        self._founders = set[str]()  # all who are here, before the first entry
        self.departed: Collection[str] = ()  # of the last roster
        self.find_gone: Callable[[Collection[str]], tuple[str, ...]] = lambda heard: ()
        """Return the voters that are gone, given whom others say they hear."""
        self._heard = set[str]()  # as members say
        self.unreached: Collection[str] = ()
        self.vain: Collection[str] = ()
        """Those whom it is no use to catch up with, though they say that they are further on."""
        self.since = 0.0
        """When we came to the position."""
        self.met: Collection[str] | None = None
        """All of whom we have ever heard; None: nobody has looked."""
        self.is_behind = False
        """Whether others are further on: we are to join them, however long it takes us."""
        self.lease: Lease | None = None  # our own
        self.awaited = Awaited(me, log, standing, settings)
        self._overtaken = Counter[str]()
        self._together_at, self._ticked_at = -float("inf"), float("inf")
        self._minimum = settings.minimum_peers
        self._last_number, self._in_minority = 0, False

    # Leases for joiners ---------------------------------------------------------------------------------------
    def on_lease_request(self, sender: str, request: LeaseRequest, inner_step: int) -> list[Effect]:
        """Grant samples; fewer inner steps the further we are ourselves, so that the joiner finishes with us."""
        if sender in self._log.excluded:
            return []
        if request.state_digest != self._state_digest:
            return [self._refuse(sender, "its state at this position is not ours")]
        self._standing.said(sender, request.relayed, request.unreached)
        members = take_order(self._log.roster, self.awaited.peers | {self._me, sender})
        if sender in plan(self._me, members, members, self._standing.pairs(members)).left_out:
            return [self._exclude(sender, members)]
        lease = self._log.leases.get(sender) or self._granted.get(sender)
        if lease is None:
            lease = self._next_grant()
            if lease is None:
                return []  # as many joiners as one entry can take
        self._granted[sender] = lease
        steps = max(1, self._settings.inner_steps - inner_step)
        return [Send(sender, LeaseGrant(position=self._log.position, samples=lease, steps=steps))]

    @property
    def has_given(self) -> bool:
        """Whether anybody got a lease here: whoever did says Ready to us."""
        return bool(self._granted)

    def _next_grant(self) -> Lease | None:
        """Return the next grant that nobody has. Those before our own come last: its giver may have given them."""
        grants, given = self._log.grants, {*self._granted.values(), self.lease}
        ours = self._log.grant_of(self.lease or ())
        first = 0 if ours is None or grants[ours] != self.lease else ours + 1
        order = (*range(first, len(grants)), *range(first))
        return next((grants[number] for number in order if grants[number] not in given), None)

    # Gathering ------------------------------------------------------------------------------------------------
    def on_ready(self, sender: str, ready: Ready, now: float) -> list[Effect]:
        self._said_at[sender] = now
        if sender in self._log.excluded:
            return []  # as it knows from its own log
        if sender in self._standing.barred(now):
            self._barred.says_ready(sender, ready, now)  # the others may go on without it meanwhile
            return []
        return self._take_in(sender, ready, now)

    def _forget(self, now: float, live: Mapping[str, Heartbeat]) -> None:
        """Who is ready says so again and again. Who is gone, or has another leader, is not ready for us."""
        still = {peer for peer, since in self._said_at.items() if now - since < self._schedule.death}
        still &= live.keys() | {self._me}
        for peer in self._ready.keys() - still:
            del self._ready[peer]
        self._barred.forget({peer: live[peer].incarnation for peer in still & live.keys()})
        if self._log.roster:  # whoever has been shown to have lied meanwhile
            for peer in self._standing.barred(now) & self._ready.keys() - {self._me}:
                del self._ready[peer]

    def _needs_barred(self, now: float, is_time: bool) -> bool:
        """Whether there can be no attempt without those who are barred, and one with them. They come last."""
        barred = self._barred.hopeful()
        if not (barred and self._log.roster):
            return bool(barred) and is_time
        others = self._counted(self._ready)
        since = max(self.awaited.times.of_all(others), self._barred.hopeful_since)
        has_waited = is_time or now - since >= self.awaited.grace + self._schedule.death
        counted = {peer for peer, said in barred.items() if self._counts(peer, said.incarnation)}
        return has_waited and quorum(self._log.voters, self.departed, counted | others)

    def _pardon(self, now: float) -> list[Effect]:
        return [one for barred in self._barred.pardon().items() for one in self._take_in(*barred, now)]

    def _take_pardons_back(self) -> None:
        for peer in self._barred.take_back(self._ready):
            del self._ready[peer]

    def _take_in(self, sender: str, ready: Ready, now: float) -> list[Effect]:
        if len(self._ready) >= MEMBER_LIMIT and sender not in self._ready:
            return []  # as many as one entry can take
        if ready == self._ready.get(sender) and ready.last_attempt == self._last_number:
            return []  # it says again what it said, since we have not begun
        if ready.state_digest != self._state_digest:
            return [self._refuse(sender, "its state at this position is not ours")]
        if ready.last_attempt < self._last_number:
            return [self._ask_again(sender)]
        if ready.last_attempt > highest_attempt(now - self.since):
            return [Dropped(sender, "ready", "its attempt number is out of reach")]
        try:
            self._admit(sender, ready)
        except LogError as error:
            return [Dropped(sender, "ready", str(error)), self._refuse(sender, str(error))]
        overtaken = [peer for peer in self._ready if peer != sender] if ready.last_attempt > self._last_number else []
        if overtaken and not self._may_overtake(sender, now):
            return [Dropped(sender, "ready", "it names a higher attempt again and again")]
        self._last_number = ready.last_attempt
        for peer in overtaken:
            del self._ready[peer]
        self._ready[sender] = ready
        self._standing.said(sender, ready.relayed, ready.unreached)
        self.awaited.times.note(sender, now)
        return [self._ask_again(peer) for peer in overtaken]

    def _admit(self, sender: str, ready: Ready) -> None:
        """Raises: LogError unless this Ready and the others can be in one entry.

        What a leader before us granted is good, too, unless we have it ourselves, or have granted it to somebody else.
        """
        lease = self._log.lease_of(sender, ready.samples)
        others = [peer for peer, grant in self._granted.items() if grant == lease and peer != sender]
        if lease and sender != self._me and (others or lease == self.lease):
            raise LogError("its samples were given to another joiner")
        self._log.check_member(ready.member(sender))
        self._check_commitment(sender, ready)
        for peer in others:  # whoever has what we trained: we can't do without ourselves
            del self._granted[peer]
            self._ready.pop(peer, None)
        if lease and sender not in self._log.leases:
            self._granted[sender] = lease

    def _check_commitment(self, sender: str, ready: Ready) -> None:
        """Raises: LogError unless who contributes has signed what."""
        said = ready.commitment
        if (said is not None) != (ready.tokens > 0):
            raise LogError("it commits to what it does not contribute, or does not commit to what it does")
        if said and not said.is_of(ready.author(sender), self._certifier.verify):
            raise LogError("it has not signed its commitment")

    def _is_time(self, now: float, live: Mapping[str, Heartbeat]) -> bool:
        """Whether everybody who can be expected is ready, or the grace is over."""
        if not self._ready or (self._log.closes and not self._has_work):
            return False
        self.awaited.look(now, live, self._granted, self.unreached)
        return self.awaited.is_time(now, self._ready.keys(), self._counting())

    @property
    def _has_work(self) -> bool:
        """Whether anybody who is ready has trained anything for this entry."""
        return bool(self._counting())

    def _counting(self) -> set[str]:
        """Those who are ready whose work counts: not that of peers on probation, unless nobody else is ready."""
        working = {peer for peer, ready in self._ready.items() if ready.tokens}
        new = {peer for peer in working if self._log.is_on_probation(peer)}
        return working - new if new and not all(map(self._log.is_on_probation, self._ready)) else working

    @property
    def is_full(self) -> bool:
        """Whether all whom we waited for when time passed last are ready by now."""
        return self.awaited.are_all_in(self._ready.keys())

    def _is_cut_off(self, now: float, live: Mapping[str, Heartbeat]) -> bool:
        """Whether for the partition grace too few of the last roster were to be heard of: ready, or at work here.

        Peers at work at our position are no partition, whatever holds them up, unless they seem to be so for ever.
        """
        if not self.awaited.times:
            return False
        index, away = self._log.position.index, set(self.unreached)
        away |= {peer for peer in self.vain if peer in live and live[peer].index > index}
        here = {self._me} | {peer for peer, beat in live.items() if self.awaited.is_here(beat)} - away
        unready = here - self._ready.keys()
        coming = {peer for peer in unready if peer == self._me or self._counts(peer, live[peer].incarnation)}
        coming |= self._counted(self._ready)
        enough = quorum(self._log.voters, self.departed, coming) if self._log.roster else len(coming) >= self._minimum
        enough = enough or self.is_behind
        has_slept = now - self._ticked_at > self._settings.timing.heartbeat_expiry  # we, and not the others
        if has_slept:
            self.awaited.times.restart(now)
        if enough or has_slept:
            self._together_at = now
        self._ticked_at = now
        since, is_hopeless = max(self._together_at, self.awaited.times.first), self.awaited.is_hopeless(now)
        self._founders = set() if self._log.roster or is_hopeless else here - self._standing.barred(now)
        if self._are_most(here | self._ready.keys()):
            self._most_here_at = now
        grace = self._settings.timing.partition_grace
        self._most_are_here = not is_hopeless and now - self._most_here_at < max(grace, self._schedule.death)
        return now - since >= grace or is_hopeless

    # Who can take part ----------------------------------------------------------------------------------------
    def _plan(self) -> Plan:
        """Who of those who are ready may reduce, and who can't take part."""
        members = take_order(self._log.roster, self._ready)
        return plan(self._me, members, self._counting(), self._standing.pairs(members))

    def _leave_out(self, plan: Plan) -> list[Effect]:
        """Go on without those with whom too few can exchange data, and tell them."""
        members = tuple(self._ready)
        for peer in plan.left_out:
            del self._ready[peer]
        return [self._exclude(peer, members) for peer in sorted(plan.left_out)]

    def _exclude(self, peer: str, members: Collection[str]) -> Effect:
        reason = why_left_out(self._standing.pairs(members).broken_with(peer))
        return Send(peer, Excluded(position=self._log.position, reason=printable(reason)))

    def _enough(self, peers: Collection[str]) -> bool:
        """Whether these are more than half of the last roster; before the first entry, the minimum of peers."""
        if not self._log.roster:
            return len(peers) >= self._minimum
        return quorum(self._log.voters, self.departed, self._counted(peers))

    def _counted(self, peers: Collection[str]) -> set[str]:
        """Those of them that are ready and count: before the first entry all."""
        return {peer for peer in self._ready.keys() & peers if self._counts(peer, self._ready[peer].incarnation)}

    def _counts(self, peer: str, incarnation: int) -> bool:
        """Whether the peer remembers what it did as a member of the last roster; before the first entry all do."""
        return not self._log.roster or self._log.counts(peer, incarnation)

    def _are_most(self, peers: Collection[str]) -> bool:
        """Return whether these are more than half of the last roster by their names, though some may not count."""
        return bool(self._log.roster) and quorum(self._log.voters, self.departed, peers)

    def _may_go_on_alone(self, peers: Collection[str]) -> bool:
        """Return whether these may make the entry once the partition grace is over.

        A minority may, if its leader's owner wants to. Where most are here, and too few count since they have forgotten
        what they held, most must take part, so that there can't be two such groups. For the same reason a founding by
        too few has all who are here.
        """
        if self._most_are_here:
            return self._are_most(peers)
        return self._settings.goes_on_alone and self._founders <= set(peers)

    def _may_overtake(self, sender: str, now: float) -> bool:
        """Whether the others must say Ready again for this peer's higher number. Each may ask that a few times, then
        once for each bar that it has sat out, or was pardoned from."""
        if self._overtaken[sender] < OVERTAKING_LIMIT:
            self._overtaken[sender] += 1
            return True
        self._overtaken[sender] -= 1
        self._bar(sender, now)
        return False

    def _bar(self, peer: str, now: float) -> None:
        """Leave a peer out for a while, longer each time; never ourselves."""
        if peer != self._me:
            self._ready.pop(peer, None)
            self._standing.bar(peer, now)

    def _offers(self) -> dict[str, Member]:
        """What those who are ready bring, as it counts."""
        offers = self._log.weighed([ready.member(peer) for peer, ready in self._ready.items()])
        return {member.peer: member for member in offers}

    def _commitments(self, roster: Sequence[Member]) -> tuple[Contribution, ...]:
        """Return what the members that contribute have committed to, in their order."""
        committed = (self._ready[member.peer].commitment for member in roster if member.tokens)
        return tuple(one.contribution for one in committed if one)

    def _gone(self, members: Collection[str], faults: Iterable[Fault] = ()) -> tuple[str, ...]:
        """The voters that have no say any more, besides those that the entry names. A minority begins anew with those
        whom it has."""
        gone = self._log.voters if self._in_minority else self.find_gone(self._heard)
        named = {*members, *(fault.peer for fault in faults)}
        return tuple(peer for peer in gone if peer not in named) if self._log.closes else ()

    def _are_missed(self, heard: Collection[str], running: Begin | Adopt) -> bool:
        """Whether a member hears voters that our round takes for gone, and we believe that."""
        self._heard.update(heard)
        return bool(heard) and isinstance(running, Begin) and not set(running.round.gone) <= set(self._gone(()))

    def _rates(self, peers: Iterable[str]) -> dict[str, float]:
        ready = {peer: self._ready[peer] for peer in peers if peer in self._ready}
        claimed = {peer: one.rate for peer, one in ready.items()}
        return credible_rates(claimed, {peer: dict(one.seen) for peer, one in ready.items()})

    def _shares(self) -> tuple[Share, ...]:
        """Return all who are ready, and how many chunks each is to average, so that all links are done together."""
        offers = self._offers()
        roster = [offers[peer] for peer in take_order(self._log.roster, offers)]
        part = deal(self._payload.chunks, len(roster), self._plan().reducers, self._rates(offers))
        return tuple(Share(member=member, chunks=part.get(member.peer, 0)) for member in roster)

    def _seconds_for(self, round: Round) -> float:
        """Return how long an attempt of those who remain in a round may take."""
        rates = self._rates(round.remaining)
        measured = {peer: rates[peer] for peer in rates if self._ready[peer].rate}
        chunks = {share.member.peer: share.chunks for share in round.shares}
        return self._schedule.attempt(foreseen(chunks, round.remaining, measured, self._payload.bytes))

    # What they hold -------------------------------------------------------------------------------------------
    def _claim(self, coming: Mapping[str, int] | None = None) -> Claim | None:
        """Return the entry that may have been committed, though those who are `coming` say that they do not hold it."""
        founding = Founding(self._minimum if self._enough(self._ready) else 1, self.met)
        return self._claims.weightiest(self._ready, coming or {}, self.departed, founding)

    def _may_be_disclaimed(self, claim: Claim, now: float, live: Mapping[str, Heartbeat]) -> bool:
        """Whether to wait for others: those that are at work here may say that they do not hold it, and those that are
        further on will show what was made here, unless they have said so in vain."""
        if self.awaited.is_hopeless(now):
            return False
        absent = self._ready.keys() | self._barred.ready.keys() | self._barred.pardoned.keys() | set(self.unreached)
        here = [peer for peer in self._log.voters if peer in live and peer not in absent]
        index = self._log.position.index
        here = [peer for peer in here if live[peer].index <= index or peer not in self.vain]
        coming = {peer: live[peer].incarnation for peer in here if self.awaited.is_here(live[peer])}
        later = self._claim(coming)
        return later is None or later.header != claim.header

    def _pass_over_claims(self) -> None:
        """Who holds an entry that can't have been committed takes over no other. Do without it, if that is enough."""
        holders = {holder.peer for many in self._claims.proven(self._ready).values() for holder in many} - {self._me}
        others = self._ready.keys() - holders
        if self._enough(others):
            for peer in holders:
                del self._ready[peer]

    def _ask_again(self, peer: str) -> Effect:
        """Every Ready of an attempt must name the number before it: then nobody in it can meanwhile complete an earlier
        attempt of somebody else's, and what they hold is all that may have been committed."""
        attempt = Attempt(position=self._log.position, number=self._last_number, leader=self._me)
        return Send(peer, Abort(attempt=attempt, reason="say Ready for a later attempt"))

    def _refuse(self, peer: str, reason: str) -> Effect:
        refuse = Refuse(position=self._log.position, state_digest=self._state_digest, reason=printable(reason))
        return Send(peer, refuse)
