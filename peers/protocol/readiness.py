"""The leader's records at one position: the samples that it granted, and the Readys that it received."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from peers.log.header import MEMBER_LIMIT, Header, Member
from peers.log.state import LogError, LogState, take_order
from peers.messages.commitment import Contribution
from peers.messages.messages import Certified, LeaseGrant, LeaseRequest, Ready, Refuse
from peers.presence.presence import Presence
from peers.protocol.awaited import Awaited
from peers.protocol.context import Context
from peers.protocol.effects import Dropped, Send
from peers.protocol.pacemaker import death
from peers.protocol.planning import MemberLink
from peers.protocol.trainer import Trainer, TrainerState
from peers.values.leases import Lease, sample_count
from peers.values.wire import printable


class Readiness:
    """The Readys and lease requests that this peer has received as a leader. Members repeat their Readys; a Ready that
    is older than the death time is dropped."""

    def __init__(self, context: Context, presence: Presence, trainer: Trainer, log: LogState) -> None:
        self.awaited = Awaited(context.me, log, context.settings)
        self.strangers: set[str] = set()
        """Newcomers that too many voters do not hear. This entry is made without them."""
        self.is_amendment_left_out = False
        """True if too many voters cannot follow the amendment that waits. This entry is made without it."""
        self.false_locks: dict[str, Certified] = {}
        """The last lock that each peer showed with an invalid certificate."""
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._log = log
        self._granted: dict[str, Lease] = {}
        self._given: set[Lease] = set()  # all grants, also to peers that are not heard any more but may still train
        self._allowed_steps: dict[str, int] = {}  # by joiner: number of inner steps that its grant allows
        self._ready: dict[str, Ready] = {}
        self._ready_at: dict[str, float] = {}

    # Leases for joiners (R14) -----------------------------------------------------------------------------------
    @property
    def has_granted(self) -> bool:
        """True if any peer holds a grant of this leader at this position."""
        return bool(self._granted)

    def ask_lease(self, sender: str, request: LeaseRequest, state_digest: bytes) -> None:
        """Grant samples to a joiner. The further this peer's own training is, the fewer inner steps the joiner may
        make, so that both finish together. Refuse a joiner whose state differs."""
        if sender in self._log.excluded:
            return
        if request.state_digest != state_digest:
            self._refuse(sender, state_digest, "its state at this position is not the leader's")
            return
        lease = self._log.leases.get(sender) or self._granted.get(sender) or self._next_grant()
        if lease is None:
            return  # no more grants fit into one entry
        self._granted[sender] = lease
        self._given.add(lease)
        whole = self._context.settings.inner_steps
        done = whole if self._trainer.state is TrainerState.TRAINED else self._trainer.inner_step()
        self._allowed_steps[sender] = max(1, whole - done)
        grant = LeaseGrant(position=self._log.position, samples=lease, steps=self._allowed_steps[sender])
        self._context.emit(Send(sender, grant))

    def _next_grant(self) -> Lease | None:
        """Return the next grant that no peer holds, if possible one that was never given; None if all are held. If this
        peer trains a grant itself, the grants before that one come last: another leader may have given them already."""
        own = self._trainer.lease
        grants, taken = self._log.grants, {*self._granted.values(), own}
        first = grants.index(own) + 1 if own in grants else 0
        free = [grant for grant in (*grants[first:], *grants[:first]) if grant not in taken]
        return min(free, key=self._given.__contains__, default=None)

    def entry_made(self, header: Header) -> None:
        """Remember the joiners for which this leader waited and which did not use their grants. The leader does not
        wait for them again during the next TERM entries (R7)."""
        unused = self._granted.keys() & self.awaited.in_vain - {*header.peers, *self._log.leases}
        self._context.experience.unawaited.note(sorted(unused), header.index)

    # Ready --------------------------------------------------------------------------------------------------------
    def take(self, sender: str, ready: Ready, state_digest: bytes) -> bool:
        """Store a peer's Ready, or refuse it if the peer cannot be in the entry. Return True if it is stored."""
        context = self._context
        is_full = len(self._ready) >= MEMBER_LIMIT and sender not in self._ready
        if sender in self._log.excluded or self._is_two(sender, ready.incarnation) or is_full:
            return False
        if ready.state_digest != state_digest:
            self._refuse(sender, state_digest, "its state at this position is not the leader's")
            return False
        known = self._ready.get(sender)
        is_same = known is not None and member_of(sender, known) == member_of(sender, ready)
        if known is None or not is_same or known.commitment != ready.commitment:
            try:
                self._admit(sender, ready)
            except LogError as error:
                context.emit(Dropped(sender, "ready", str(error)))
                self._refuse(sender, state_digest, str(error))
                return False
        self._ready[sender], self._ready_at[sender] = ready, context.now
        self.awaited.times.note(sender, context.now)
        return True

    def _is_two(self, peer: str, incarnation: int) -> bool:
        """Return True if a voter's Ready and its heartbeats name different incarnations. Other voters would then refuse
        the entry until they hear the Ready's incarnation."""
        if self._log.voter_incarnations.get(peer, incarnation) == incarnation or peer == self._context.me:
            return False
        patience = self._context.settings.timing.heartbeat_expiry
        return peer in self._presence.voters_here(self._log, self._context.incarnation, patience)

    def _admit(self, sender: str, ready: Ready) -> None:
        """Record the samples of a Ready. A grant of another leader is valid unless this peer trains the same samples,
        or has granted them to another peer.

        Raises:
            LogError: this Ready and the others cannot be in one entry.
        """
        lease = self._log.lease_of(sender, ready.samples)
        other_holders = [peer for peer, grant in self._granted.items() if grant == lease and peer != sender]
        if lease and sender != self._context.me and (other_holders or lease == self._trainer.lease):
            raise LogError("another joiner has its samples")
        member = member_of(sender, ready)
        self._log.check_member(member)
        if self._log.closes and not (member.tokens or self._log.counts(sender, ready.incarnation)):
            raise LogError("it has no tokens, so it cannot become a voter")
        self._check_commitment(sender, ready)
        # If this peer has trained samples that it had granted to other peers, these lose their grant.
        for peer in other_holders:
            del self._granted[peer]
            self._ready.pop(peer, None)
        if lease and sender not in self._log.leases:
            self._granted[sender] = lease

    def _check_commitment(self, sender: str, ready: Ready) -> None:
        """Check a Ready's commitment. Raises: LogError if the Ready states tokens without a valid commitment in a
        format of this run, or has a commitment without tokens."""
        commitment = ready.commitment
        if (commitment is not None) != (ready.tokens > 0):
            raise LogError("a Ready has a commitment if and only if it has tokens")
        if commitment is None:
            return
        author = commitment.author(sender, ready.incarnation, self._log.position)
        if not commitment.is_of(author, self._context.keys.verify):
            raise LogError("the signature of its commitment is not its own")
        if not self._context.payloads[self._log.fragment].size.has(commitment.format):
            raise LogError(f"this run has no format {commitment.format} of contributions")

    def _refuse(self, peer: str, state_digest: bytes, reason: str) -> None:
        refuse = Refuse(position=self._log.position, state_digest=state_digest, reason=printable(reason))
        self._context.emit(Send(peer, refuse))

    def leaves(self, peer: str) -> None:
        """Drop the Ready of a peer that has left the run."""
        self._ready.pop(peer, None)

    def forget(self) -> None:
        """Drop the Readys that members have stopped repeating, and the grants of peers that are not heard any more."""
        now, live = self._context.now, self._presence.live()
        patience = death(self._context.settings.timing)
        for peer in list(self._ready):
            is_here = peer == self._context.me or peer in live
            if not is_here or now - self._ready_at[peer] >= patience:
                del self._ready[peer]
        here = {*live, self._context.me}
        self._granted = {peer: lease for peer, lease in self._granted.items() if peer in here}

    def of(self, view: int) -> dict[str, Ready]:
        """Return the Readys for a view, by peer. Those of excluded newcomers are left out."""
        ready = self._ready.items()
        return {peer: one for peer, one in ready if one.view == view and peer not in self.strangers}

    def view_of(self, peer: str) -> int | None:
        """Return the view for which a peer is ready; None if the peer is not ready."""
        ready = self._ready.get(peer)
        return None if ready is None else ready.view

    def views(self) -> dict[str, int]:
        """Return the view for which each peer is ready, by peer."""
        return {peer: ready.view for peer, ready in self._ready.items()}

    # Start of a round -------------------------------------------------------------------------------------------
    def is_time(self, ready: Mapping[str, Ready]) -> bool:
        """Return True if the leader should begin a round: a peer has work, and all expected peers are ready or the wait
        is over."""
        contributing = self.contributing(ready)
        if not ready or (self._log.closes and not contributing):
            return False
        live, has_convicted = self._presence.live(), self._context.evidence.has_convicted
        away = self._presence.unreached.union(self.strangers, (peer for peer in live if has_convicted(peer)))
        self.awaited.look(live, self._due(), away)
        view = max(one.view for one in ready.values())
        # Peers in a later view do not return to this one, so the leader does not wait for them.
        beyond = {peer for peer, one in self._ready.items() if one.view > view}
        return self.awaited.is_time(self._context.now, ready.keys() | beyond, contributing, self._voters())

    def _voters(self) -> set[str]:
        """Return the voters that this peer hears, and this peer itself if it is a voter. A voter counts only in the
        incarnation that the log has for it."""
        live, context, log = self._presence.live(), self._context, self._log
        incarnations = {peer: live[peer].incarnation for peer in log.voters if peer in live} | {
            context.me: context.incarnation
        }
        return {peer for peer, incarnation in incarnations.items() if log.counts(peer, incarnation)}

    def _due(self) -> dict[str, int]:
        """Return the number of samples that each awaited joiner trains for the entry: fewer than in its grant if it is
        slow."""
        whole, live = self._context.settings.inner_steps, self._presence.live()
        speeds = self._presence.speeds(self._log)
        due = dict[str, int]()
        unawaited = self._context.experience.unawaited.at(self._log.position.index)
        for peer, lease in self._granted.items():
            if peer in unawaited:
                continue
            own = self._context.pace.steps_beside(live[peer].speed, speeds) if peer in live else whole
            due[peer] = sample_count(lease) * min(own, self._allowed_steps.get(peer, whole)) // whole
        return due

    def is_full(self, view: int) -> bool:
        """Return True if all peers that the leader waited for at its last Tick are ready."""
        count = len(self._ready)  # a cheap first test, because the leader calls this at each new Ready
        if count < self.awaited.fewest or 2 * count < len(self._log.voters):
            return False
        return self.awaited.are_all_in(self.of(view).keys())

    def contributing(self, ready: Mapping[str, Ready]) -> set[str]:
        """Return the ready peers whose work counts. Work of peers on probation counts only if all ready peers are on
        probation."""
        working = {peer for peer, one in ready.items() if one.tokens}
        new = {peer for peer in working if self._log.is_on_probation(peer)}
        return working - new if new and not all(map(self._log.is_on_probation, ready)) else working

    def roster(self, ready: Mapping[str, Ready]) -> tuple[Member, ...]:
        """Return the members of the entry that these Readys lead to, with the tokens that count, in roster order."""
        offers = self._log.without_unproven([member_of(peer, one) for peer, one in ready.items()])
        by_peer = {member.peer: member for member in offers}
        return tuple(by_peer[peer] for peer in take_order(self._log.roster, by_peer))


def member_of(peer: str, ready: Ready) -> Member:
    """Return the peer's record as a member of the entry, with the values that its Ready states."""
    return Member(
        peer=peer,
        tokens=ready.tokens,
        samples=ready.samples,
        wants=ready.wants,
        incarnation=ready.incarnation,
        format=ready.commitment.format if ready.commitment else 0,
    )


def commitments_of(roster: Collection[Member], ready: Mapping[str, Ready]) -> tuple[Contribution, ...]:
    """Return the committed contribution of each member that trained tokens, in roster order."""
    committed = (ready[member.peer].commitment for member in roster if member.tokens)
    return tuple(one.contribution for one in committed if one)


def links_of(ready: Mapping[str, Ready]) -> dict[str, MemberLink]:
    """Return each ready peer's own report about its link, by peer."""
    return {
        peer: MemberLink(one.rate, dict(one.seen), frozenset(one.relayed), frozenset(one.unreached))
        for peer, one in ready.items()
    }
