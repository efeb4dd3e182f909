"""Getting into the run, and back into it: replay the entries that were missed, or take the state of whoever is furthest
on; then a lease from the leader."""

from __future__ import annotations

from peers.log.header import MEMBER_LIMIT, Header
from peers.log.lineage import RECENT_ENTRIES
from peers.log.state import LogError, LogState
from peers.presence.heartbeat import PeerState
from peers.presence.membership import DONATING, PARTICIPATING
from peers.protocol.events import Apply, Dropped, FetchPayload, Note, Send
from peers.protocol.messages import Inquire, LeaseGrant, LeaseRequest
from peers.protocol.states import State
from peers.protocol.troubles import Troubled

LINKS_PATIENCE = 20.0
"""Seconds after its start for which a peer looks for ways to all others before it takes part; a relay's takes ten."""
CATCHING_UP = frozenset({State.JOINING, State.TRAINING, State.READY, State.AVERAGING})
"""States in which a peer looks whether others are further on."""


class Joining(Troubled):
    """A peer that lacks the run's present state or a lease."""

    def _join(self) -> None:
        """Get the state of those who are further on, then a lease from the leader."""
        if not self.membership.polled or not self._may_ask or self._seeks_links:
            return
        if self._furthest() is not None:
            if self._due():
                self._catch_up()
            return
        self._has_snapshot = False
        lease = self.log.leases.get(self.me)
        if lease is not None and not self._excluded:
            self._train(lease, self.settings.inner_steps)
        elif self.is_settled and self._may_start() and self._due():
            leader = self._elect()
            if leader is not None:
                request = LeaseRequest(
                    position=self.log.position,
                    state_digest=self.state_digest,
                    relayed=self._named(self.reachability.detours(self._now)),
                    unreached=self._named(self.unreached),
                )
                self._emit(Send(leader, request))

    @property
    def _seeks_links(self) -> bool:
        """Whether it is too early to be counted on: a newcomer first finds out whom it reaches, and how."""
        is_new = self._now - self._started_at < LINKS_PATIENCE
        return is_new and not self.reachability.sought.isdisjoint(self._live())

    def _named(self, peers: frozenset[str]) -> tuple[str, ...]:
        """Those of them that live, as a message may name them."""
        return tuple(sorted(peers & self._live().keys()))[:MEMBER_LIMIT] if peers else ()

    def _granted(self, leader: str, grant: LeaseGrant) -> None:
        """Train what the leader gave us, if it is a lease that others will accept from us."""
        try:
            self.log.lease_of(self.me, grant.samples)
            if grant.steps > self.settings.inner_steps:
                raise LogError(f"{grant.steps} inner steps are too many")
        except LogError as error:
            self._emit(Dropped(leader, "lease", str(error)))
            self._distrust(leader)
        else:
            self._taken_in()
            self._granted_by = leader
            self._train(grant.samples, min(grant.steps, self._steps_at_our_speed()))

    def _gives_lease(self, joiner: str) -> bool:
        """Return whether we lead, as far as we know: two leaders of one position may give two joiners the same samples.

        A peer that gave us our lease does not lead if it asks us for one.
        """
        return self._elect() == self.me or joiner == self._granted_by

    def _may_start(self) -> bool:
        """Before the first entry: wait until peers can have seen each other and enough of them are there."""
        live = self._live()
        if self.log.position.index > 0 or any(beat.state in PARTICIPATING for beat in live.values()):
            return True
        settled = self._now - self._started_at >= 2 * self.settings.timing.heartbeat
        trainers = [beat for beat in live.values() if beat.state is not PeerState.ARCHIVING]
        return settled and len(trainers) + 1 >= self.settings.minimum_peers

    def _furthest(self) -> str | None:
        """The live peer with the heaviest lineage of those that we reach, if it is heavier than ours; equal weight is
        decided by digest."""
        out_of_reach = self._distrusted | self.unreached
        tokens, head = self.log.lineage_tokens, self.log.position.head
        heavier = {
            peer: (beat.lineage_tokens, _inverted(beat.head), peer)
            for peer, beat in self._live().items()
            if (beat.lineage_tokens > tokens or (beat.lineage_tokens == tokens and beat.head < head))
            and beat.lineage_tokens > 0
            and beat.state in DONATING
            and peer not in out_of_reach
        }
        return max(heavier, key=lambda peer: heavier[peer], default=None)

    def _restored(self, donor: str, header: Header | None, state_digest: bytes, theirs: tuple[bytes, ...]) -> None:
        self._require(State.FETCHING)
        self.log = self.log.at(header)
        self._joined_at = self.log.position.head
        self._settle(self.log, state_digest)
        self._leave_lineage(donor, header, theirs)
        self._has_snapshot = True
        self._emit(Note("info", f"state at {self.log.position} fetched from {donor}"))
        self._enter(State.JOINING)
        self._join()

    def _leave_lineage(self, donor: str, header: Header | None, theirs: tuple[bytes, ...]) -> None:
        """Our tokens in entries that the donor's lineage does not have are lost. Everybody says so of its own alone."""
        left = self.lineage.move(header, theirs)
        if left:
            reason = f"our entries from {left[0].index} on are not in the lineage of {donor}"
            self._lose("entries", sum(entry.tokens_of(self.me) for entry in left), reason)

    def _not_restored(self, donor: str, reason: str) -> None:
        self._require(State.FETCHING)
        trusted = self._distrusted_until
        self._distrust(donor)
        if self._furthest() is None:  # nobody else is ahead: to go on alone would be worse than to ask again
            self._distrusted_until = trusted
        self._has_snapshot = True  # as good as: whoever knows what followed may have all of it
        self._emit(Note("warning", f"no state from {donor}: {reason}"))
        self._enter(State.JOINING)

    def _catch_up(self) -> None:
        """Somebody is further on, or on a heavier lineage: learn the next entry from them, or take their state."""
        if self.state not in CATCHING_UP or not self._may_ask:
            return
        ahead = self._furthest()
        if ahead is None:
            return
        entries = self._live()[ahead].index - self.log.position.index
        if entries > 0 and (entries <= self.settings.snapshot_every or self._has_snapshot):
            self._emit(Send(ahead, Inquire(position=self.log.position)))
        else:
            self._emit(Note("warning", f"{ahead} is at {self._live()[ahead].index}: fetching a snapshot"))
            self._fetch(ahead, self._oldest_of_use(ahead))

    def _oldest_of_use(self, ahead: str) -> int:
        """The index from which on a snapshot brings us further, and others still know what followed it.

        Of who is not further on, but heavier, one brings us further at any index. Archives know everything.
        """
        index, beat = self.log.position.index, self._live()[ahead]
        known_from = 0 if beat.state is PeerState.ARCHIVING else beat.index - RECENT_ENTRIES // 2
        return max(index + 1 if beat.index > index else 0, known_from)

    def _replay(self, sender: str, header: Header) -> None:
        """Others went on without us: get the payload of their entry, and apply it.

        Whom we asked for a lease, or to lead us, knows better than its last heartbeat how far it is.
        """
        donors = {peer for peer, beat in self._live().items() if beat.index > header.index}
        asked = self.state is State.JOINING or (self.state is State.READY and sender == self._pledged_to)
        if asked and self.is_live(sender):
            donors.add(sender)
        if sender not in donors:
            return
        try:
            log = self.log.append(header)
        except LogError as error:
            self._emit(Dropped(sender, "commit", str(error)))
            return
        incumbent = self.log.position.head != self._joined_at
        self._is_kept = self._outlives(log)
        if self._is_kept:
            self._forget_round()
        else:
            self._drop_work(header)
        if not incumbent:  # we may have been there before, and forgotten what we held
            self._joined_at = header.digest
        self._enter(State.REPLAYING)
        self._replaying = header
        self._emit(FetchPayload(header, tuple(sorted(donors))))

    def _outlives(self, log: LogState) -> bool:
        """Whether what we are training, or have trained, can go into an entry after this log, which lacks it.

        The worker must have loaded theta, which is about to change.
        """
        is_loaded = self.progress is not None or self._trained is not None
        return self._lease is not None and is_loaded and self._lease == log.leases.get(self.me)

    def _apply(self, header: Header) -> None:
        if not self._is_kept:
            self._end_work(header)
        self.log = self.log.append(header)
        self.lineage.append(header)
        self._enter(State.APPLYING)
        self._forget_round()
        self._emit(Apply(header, self._is_kept))

    def _not_replayed(self, header: Header, reason: str) -> None:
        self._emit(Note("warning", f"no payload of entry {header.index}: {reason}"))
        ahead = self._furthest()
        if ahead is None:
            self._drop_work()
            self._joined_at = self.log.position.head  # what we may have held here is forgotten
            self._enter(State.JOINING)
        else:
            self._fetch(ahead, self._oldest_of_use(ahead))

    def _refused(self, leader: str, reason: str) -> None:
        """What we trained, or the state we trained from, is of no use to the leader: take its state and begin again."""
        if self.state not in (State.JOINING, State.READY, State.AVERAGING) or leader == self.me:
            return
        self._emit(Note("warning", f"refused by {leader}: {reason}"))
        self._fetch(leader)

    def _elsewhere(self, sender: str) -> None:
        """Our inquiry led nowhere: what we hold is on another lineage than the heavier one."""
        if self.state in CATCHING_UP and self._furthest() == sender:
            self._fetch(sender, self._oldest_of_use(sender))


def _inverted(digest: bytes) -> int:
    """Orders digests the other way round, so that the smaller one wins a tie in `max`."""
    return -int.from_bytes(digest, "big")
