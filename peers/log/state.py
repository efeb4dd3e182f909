"""The run's log: hash-chained headers, one for each fragment in each cycle, and the facts that follow from them.

A cycle is one outer step, in which each fragment is synchronised once. Roster, leases and quorum of a cycle are fixed
before it begins, so its entries can be made side by side, in any order. They follow from the *closing* entry of the
cycle before: that of its last fragment, whose pseudo-gradient is taken when the lease is trained, or nearly so. So the
peers need not agree on a header of the cycle: `head`, which all its entries name, stands for all entries of the cycle
before. Plain DiLoCo has one fragment, whose entry closes the cycle.

A leader chooses the members of a round. If only they voted on the next entry, a lying leader could take in its allies
and just enough others for its allies to be a majority from then on. So a voter keeps its vote, as a member or as a
bystander, until an entry says that it is `gone`. Voters do not vote for an entry that says so of a peer that they hear
themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from pydantic import ValidationError

from peers.log.header import (
    BYSTANDER_LIMIT,
    EXCLUSION_LIMIT,
    FREE_LIMIT,
    MEMBER_LIMIT,
    NO_PAYLOAD,
    UNKNOWN_STATE,
    Assignment,
    Bystander,
    Exclusion,
    Fault,
    Header,
    Member,
    Position,
    Tenure,
    cycle_head,
)
from peers.values.leases import Lease, SamplePool, SampleRange, prefix, sample_count
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.wire import digest_of

TERM = 16
"""Outer steps for which one voter leads if nothing goes wrong. This limits how long a leader can refuse samples to
newcomers, or leave out a peer that it has no link to."""
COMMITTEE = 128
"""Maximum number of voters on one entry. More would make certificates the largest part of a large swarm's traffic."""
COMMITTEE_CONTEXT = b"diloco-peer committee\0"
OPEN_CYCLE: dict[str, Any] = {"leases": (), "cursor": 0, "free": (), "lineage_tokens": 0} | dict.fromkeys(
    ("tenures", "excluded", "bystanders"), ()
)
"""The fields of a header that closes no cycle: it has no leases, tokens, tenures, exclusions or bystanders."""


class LogError(ValueError):
    """Error: a header does not follow from the log. The message names the rule that the header breaks."""


class Quorum(StrEnum):
    """The share of the voters that decides on an entry, as the manifest's `rounds.quorum` sets it."""

    MAJORITY = "majority"
    TWO_THIRDS = "two-thirds"

    def least(self, voters: int) -> int:
        """Return the smallest number of votes that decides among this number of voters."""
        return (2 * voters // 3 if self is Quorum.TWO_THIRDS else voters // 2) + 1

    def is_enough(self, signers: int, voters: int) -> bool:
        """Return True if this number of signers decides among this number of voters."""
        return voters > 0 and signers >= self.least(voters)


@lru_cache(maxsize=16)
def _grants(pool: SamplePool, samples_per_lease: int) -> dict[int, Lease]:
    """Return the leases that can be granted to peers without a lease, by the number of each lease's first sample."""
    return {lease[0].start: lease for lease in pool.deal([samples_per_lease] * MEMBER_LIMIT)[0]}


@dataclass(frozen=True)
class LogState:
    """The log as far as the next entry depends on it. Immutable; `append` returns the log with one more entry.

    `last` is the last entry of the newest whole cycle, whose entries have the digests `ends`. `made` are entries of the
    present cycle. The next entry is that of `fragment`; see `of`. `state` is the digest of theta and momentum when the
    present cycle began: it does not follow from earlier headers.
    """

    run: str
    manifest_digest: bytes
    samples_per_lease: int
    tokens_per_sample: int
    staleness: int = 0
    fragments: int = 1
    probation: int = 0
    exclusion: int = 1000
    organiser: str = ""
    quorum: Quorum = Quorum.MAJORITY
    last: Header | None = None
    ends: tuple[bytes, ...] = ()
    made: tuple[Header, ...] = ()
    fragment: int = 0
    state: bytes = UNKNOWN_STATE

    @cached_property
    def position(self) -> Position:
        if self.last is None:
            return Position(index=0, head=self.manifest_digest, fragment=self.fragment)
        return Position(index=self.last.index + 1, head=cycle_head(self.ends), fragment=self.fragment)

    def of(self, fragment: int) -> LogState:
        """Return the log with `fragment` as the fragment of the next entry."""
        return self if fragment == self.fragment else replace(self, fragment=fragment)

    def opening(self, fragment: int) -> LogState:
        """Return the log at the start of the present cycle, with `fragment` as the fragment of the next entry. No entry
        of a cycle depends on another entry of the same cycle."""
        return replace(self.of(fragment), made=()) if self.made else self.of(fragment)

    def in_state(self, digest: bytes) -> LogState:
        """Return the log with `digest` as the digest of theta and momentum when the present cycle began."""
        return self if digest == self.state else replace(self, state=digest)

    @property
    def closes(self) -> bool:
        """True if the next entry is of the last fragment. Only a cycle's last entry names samples, and gives leases."""
        return self.fragment == self.fragments - 1

    def is_closing(self, header: Header) -> bool:
        """Return True if the header is of the entry that closes its cycle."""
        return header.fragment == self.fragments - 1

    @property
    def pending(self) -> tuple[int, ...]:
        """The fragments whose entries are still to be made in the present cycle."""
        made = {header.fragment for header in self.made}
        return tuple(fragment for fragment in range(self.fragments) if fragment not in made)

    @property
    def lineage_tokens(self) -> int:
        return self.last.lineage_tokens if self.last else 0

    # Voters -------------------------------------------------------------------------------------------------------
    @property
    def roster(self) -> tuple[str, ...]:
        """The peers in the roster of the newest whole cycle's last entry; empty in the first cycle."""
        return self.last.peers if self.last else ()

    @cached_property
    def incarnations(self) -> dict[str, int]:
        """The incarnation of each peer of the last roster and each bystander, as the log last named it."""
        if self.last is None:
            return {}
        members = {member.peer: member.incarnation for member in self.last.roster}
        return members | {one.peer: one.incarnation for one in self.last.bystanders}

    @cached_property
    def voters(self) -> tuple[str, ...]:
        """The peers that may vote on the next entry: those of the last roster that are not on probation, in order, then
        the bystanders (R12)."""
        if self.last is None:
            return ()
        members = (peer for peer in self.roster if not self.is_on_probation(peer))
        return (*members, *(one.peer for one in self.last.bystanders))

    @cached_property
    def voter_incarnations(self) -> dict[str, int]:
        """The incarnation in which each voter votes, by peer id."""
        return {peer: self.incarnations[peer] for peer in self.voters}

    def counts(self, peer: str, incarnation: int) -> bool:
        """Return True if the peer votes in this incarnation. In another one it does not remember its votes (R12)."""
        return self.voter_incarnations.get(peer) == incarnation

    @cached_property
    def electors(self) -> tuple[tuple[str, int], ...]:
        """The voters that decide on the next entry, as (peer, incarnation): all voters, or a committee if there are
        many. Empty before the first entry, on which its own members decide."""
        return committee(tuple(self.voter_incarnations.items()), self.last.previous) if self.last else ()

    def is_quorum(self, peers: Collection[tuple[str, int]]) -> bool:
        """Return True if these peers, as (peer, incarnation), are a quorum for the next entry."""
        return self.quorum.is_enough(len(set(peers).intersection(self.electors)), len(self.electors))

    @cached_property
    def served(self) -> dict[str, int]:
        """The number of outer steps with a peer in the roster, by peer id, counted up to the manifest's `probation`."""
        return {tenure.peer: tenure.served for tenure in self.last.tenures} if self.last else {}

    def is_on_probation(self, peer: str) -> bool:
        """Return True if the peer is on probation: its tokens do not count, and it does not vote yet (R17). Before the
        first entry no peer is on probation."""
        return self.probation > 0 and self.last is not None and self.served.get(peer, 0) < self.probation

    @cached_property
    def ring(self) -> tuple[str, ...]:
        """The peers that lead the next entry's views, in turn (R1): the voters, from the last leader on, or every TERM
        outer steps, from the voter after it on; then the peers on probation. Empty before the first entry.

        The log records failed views only by naming the leader that succeeded, so a leader that fails costs one entry of
        a term.
        """
        if self.last is None:
            return ()
        first, voters = 0, self.voters
        if self.last.leader in voters:
            first = voters.index(self.last.leader) + (self.last.index % TERM == 0)
        return tuple(dict.fromkeys((*voters[first:], *voters[:first], *self.roster)))

    def leader_of(self, view: int) -> str | None:
        """Return the leader of a view of the next entry; None before the first entry, when the log names no leader."""
        return self.ring[view % len(self.ring)] if self.ring else None

    def without_unproven(self, roster: Sequence[Member]) -> tuple[Member, ...]:
        """Return the roster with the tokens and samples of members on probation removed. If all members are on
        probation, return it unchanged."""
        new = {member.peer for member in roster if self.is_on_probation(member.peer)}
        if not new or len(new) == len(roster):
            return tuple(roster)
        nothing = {"tokens": 0, "samples": ()}
        return tuple(member.model_copy(update=nothing) if member.peer in new else member for member in roster)

    def is_known(self, member: Member) -> bool:
        """Return True if a member of the next entry is no new voter: the peer already votes in this incarnation, or is
        on probation. Always True before the first entry, since founders may become voters."""
        return self.last is None or self.counts(member.peer, member.incarnation) or self.is_on_probation(member.peer)

    @cached_property
    def excluded(self) -> dict[str, int]:
        """The peers excluded from the present cycle for a proven lie, each with the last cycle of its exclusion."""
        return {exclusion.peer: exclusion.until for exclusion in self.last.excluded} if self.last else {}

    # Amendments ---------------------------------------------------------------------------------------------------
    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force in the present cycle; None if the manifest's own values are in force."""
        return self.last.amendment if self.last else None

    @property
    def amendments(self) -> tuple[LoggedAmendment, ...]:
        """All amendments in the log, in order; the last one is in force."""
        return (self.last.amendments or ()) if self.last else ()

    def taken_in(self, header: Header) -> Amendment | None:
        """Return the amendment that the next entry, with this header, adds to the log; None if it adds none."""
        return header.amendment if header.amendment != self.amendment else None

    def is_truly_amended(self, header: Header) -> bool:
        """Return True if the organiser has signed all amendments in a header. While the earlier log is unknown, nothing
        else about them can be checked."""
        return all(one.amendment.is_signed(self.run, self.organiser) for one in header.amendments or ())

    # Samples, leases and members ----------------------------------------------------------------------------------
    @property
    def pool(self) -> SamplePool:
        return SamplePool(self.last.cursor, self.last.free) if self.last else SamplePool()

    @cached_property
    def leases(self) -> dict[str, Lease]:
        return {lease.peer: lease.samples for lease in self.last.leases} if self.last else {}

    @cached_property
    def lease_holders(self) -> tuple[str, ...]:
        """The peers with a lease: the last roster in order, then other peers that have kept an earlier lease."""
        return tuple(self.leases)

    @cached_property
    def lease_places(self) -> dict[str, int]:
        """The place of each peer in `lease_holders`, by which messages name the peer."""
        return {peer: place for place, peer in enumerate(self.lease_holders)}

    @cached_property
    def accountable(self) -> frozenset[str]:
        """The peers whose faults the next entry may name: those with a lease or a vote."""
        return frozenset({*self.leases, *self.voters})

    def expected(self, peer: str) -> Member:
        """Return the member that the log expects for a peer in the next roster: with its whole lease trained, or
        without samples if the peer has no lease.

        Raises:
            LogError: its samples are too many to count.
        """
        lease = self.leases.get(peer, ())
        tokens, samples = sample_count(lease) * self.tokens_per_sample, lease if self.closes else ()
        wants, format = self._before.get(peer, (0, 0))
        incarnation = self.incarnations.get(peer, 0)
        try:
            return Member(
                peer=peer, tokens=tokens, samples=samples, wants=wants, incarnation=incarnation, format=format
            )
        except ValidationError as error:
            raise LogError(f"{peer}: {error.errors()[0]['msg']}") from error

    @cached_property
    def _before(self) -> dict[str, tuple[int, int]]:
        """The number of samples wanted by each member of the last cycle, and its contribution's format, by peer id."""
        return {member.peer: (member.wants, member.format) for member in self.last.roster} if self.last else {}

    @cached_property
    def grants(self) -> tuple[Lease, ...]:
        """The leases that a leader can grant at this position to peers without a lease, in the order of granting. Each
        has `samples_per_lease` samples, and no two share a sample."""
        return tuple(_grants(self.pool, self.samples_per_lease).values())

    def lease_of(self, peer: str, samples: Lease) -> Lease:
        """Return the peer's lease. If it has none, return the grant that begins with `samples`, or () if `samples` is
        empty.

        Raises:
            LogError: they begin neither its lease nor a grant. Scattered samples would cost all peers, for ever.
        """
        lease = self.leases.get(peer)
        if lease is None:
            lease = _grants(self.pool, self.samples_per_lease).get(samples[0].start, ()) if samples else ()
        if samples != prefix(lease, sample_count(samples)):
            raise LogError(
                f"{peer}: samples {samples[0].start}..{samples[-1].stop} begin neither its lease nor a grant"
            )
        return lease

    def age(self, peer: str) -> int:
        """Return the number of cycles closed without the peer since it got its lease; 0 for a peer without one."""
        given = self._given_at.get(peer)
        return 0 if given is None else self.position.index - 1 - given

    @cached_property
    def _given_at(self) -> dict[str, int]:
        return {lease.peer: lease.since for lease in self.last.leases} if self.last else {}

    def check_member(self, member: Member) -> None:
        """Raise LogError if a member is excluded, has trained samples that are not of its lease or a grant, states more
        tokens than these samples have, or wants more samples than a lease has."""
        if member.peer in self.excluded:
            raise LogError(f"{member.peer} is excluded up to cycle {self.excluded[member.peer]}")
        self.lease_of(member.peer, member.samples)
        if member.samples and not self.closes:
            raise LogError(f"{member.peer}: only the entry that closes a cycle names trained samples")
        count = sample_count(member.samples)
        # Before the cycle's last entry, `samples` is empty: allow the tokens of a whole lease or grant.
        if not self.closes:
            lease = self.leases.get(member.peer)
            count = self.samples_per_lease if lease is None else sample_count(lease)
        tokens = count * self.tokens_per_sample
        if member.tokens > tokens:
            raise LogError(f"{member.peer}: {member.tokens} tokens are more than the {tokens} in its samples")
        if member.wants > self.samples_per_lease:
            raise LogError(f"{member.peer}: it wants {member.wants} samples; a lease has {self.samples_per_lease}")

    def has_trained(self, member: Member) -> bool:
        """Return True if at least half of the tokens in a member's samples are in the average (`member.tokens`).
        Otherwise, the samples are trained again."""
        return 2 * member.tokens >= sample_count(member.samples) * self.tokens_per_sample

    def carried(self, roster: Sequence[Member], faults: Sequence[Fault] = ()) -> tuple[Assignment, ...]:
        """Return the leases of peers outside the roster that may still contribute to a later entry (R7)."""
        if self.last is None:
            return ()
        besides = {member.peer for member in roster} | {fault.peer for fault in faults}
        oldest = self.position.index - self.staleness
        kept = [lease for lease in self.last.leases if lease.peer not in besides and lease.since >= oldest]
        return tuple(kept[:MEMBER_LIMIT])

    def pool_after(self, roster: Sequence[Member], faults: Sequence[Fault] = ()) -> SamplePool:
        """Return the sample pool after `roster` has trained its samples. All leased samples return to the pool, except
        trained ones that count (`has_trained`), and those of leases that are kept (`carried`).

        Raises:
            LogError: a member trained samples that are not its own, or states more tokens than they have.
        """
        trained: list[SampleRange] = []
        for member in roster:
            self.check_member(member)
            trained += member.samples if self.has_trained(member) else ()
        carried = {lease.peer for lease in self.carried(roster, faults)}
        leased = [piece for peer, lease in self.leases.items() if peer not in carried for piece in lease]
        try:
            return self.pool.release(leased).claim(trained)
        except ValueError as error:
            raise LogError(str(error)) from error

    # Next entries --------------------------------------------------------------------------------------------------
    def next_header(
        self,
        roster: Sequence[Member],
        payload: bytes,
        leader: str | None,
        faults: Sequence[Fault] = (),
        gone: Sequence[str] = (),
        amendment: Amendment | None = None,
    ) -> Header:
        """Return the only valid next header, given the members, the payload's digest, the leader (None unless the entry
        closes its cycle), the proven faults, the voters that lose their vote, and the amendment to add to the log.

        Voters must check that it was the leader's turn, since that depends on the view. Raises: LogError.
        """
        return _next_header(self, tuple(roster), payload, leader, tuple(faults), tuple(gone), amendment)

    def gone_in(self, header: Header) -> tuple[str, ...]:
        """Return the voters that lose their vote if the next entry has this header."""
        here = {*header.peers, *(one.peer for one in header.bystanders), *(fault.peer for fault in header.faults)}
        return tuple(peer for peer in self.voters if peer not in here) if self.closes else ()

    def append(self, header: Header) -> LogState:
        """Return the log with the next entry appended. Raises: LogError naming the first field that does not follow."""
        return _append(self, header)

    def check_next(self, header: Header) -> None:
        """Raise LogError unless the header may be the next entry of this log's `fragment`. If the log's `state` is
        known, the header must name that state."""
        self.append(header)
        if self.state not in (UNKNOWN_STATE, header.state):
            raise LogError("it is for another state than this peer's")
        if header.fragment != self.fragment:
            raise LogError(f"it is the entry of fragment {header.fragment}, not of {self.fragment}")

    def at(self, header: Header | None, ends: tuple[bytes, ...] = ()) -> LogState:
        """Return the log after the cycle that `header` closes. The header is not checked: other peers vouch for the
        snapshot that it is from. `ends` are the digests of the cycle's entries; optional if the cycle has one entry."""
        return replace(
            self, last=header, ends=ends or ((header.digest,) if header else ()), made=(), state=UNKNOWN_STATE
        )

    def may_end_with(self, header: Header | None, ends: Sequence[bytes]) -> bool:
        """Return True if `header` may close a cycle whose entries have the digests `ends`. For the empty log, `header`
        must be None and `ends` empty."""
        if header is None:
            return not ends
        is_all = (len(ends) == self.fragments and ends[-1] == header.digest) or (self.fragments == 1 and not ends)
        return self.is_closing(header) and self.is_truly_amended(header) and is_all


@lru_cache(maxsize=8)
def _closing(
    log: LogState, roster: tuple[Member, ...], faults: tuple[Fault, ...], gone: tuple[str, ...]
) -> dict[str, Any]:
    """Return the header fields that only a cycle's last entry has: next leases, samples left for later leases, the
    tokens so far, the tenures, the excluded peers, and the bystanders. Cached, since a round needs them twice.

    Raises:
        LogError: a member trained samples that are not its own.
    """
    if not log.closes:
        for member in roster:
            log.check_member(member)
        return OPEN_CYCLE
    index = log.position.index
    leases, pool = log.pool_after(roster, faults).deal(member.wants or log.samples_per_lease for member in roster)
    pool = pool.bounded(FREE_LIMIT)
    dealt = zip((member.peer for member in roster), leases, strict=True)
    fresh = [Assignment(peer=peer, samples=samples, since=index) for peer, samples in dealt]
    tokens = sum(member.tokens for member in roster)
    tenures, before = (log.last.tenures, log.last.excluded) if log.last else ((), ())
    excluded = _exclusions_after(before, faults, index, log.exclusion)
    liars, peers = {one.peer for one in excluded}, [member.peer for member in roster]
    silent = {*peers, *gone, *(fault.peer for fault in faults)}
    # The limit drops the oldest bystanders, since `voters` has the members of the last roster first.
    standing_by = [peer for peer in log.voters if peer not in silent][:BYSTANDER_LIMIT]
    return {
        "leases": (*fresh, *log.carried(roster, faults)),
        "cursor": pool.cursor,
        "free": pool.free,
        "lineage_tokens": log.lineage_tokens + tokens,
        "tenures": _tenures_after(tenures, peers, log.probation, liars),
        "excluded": excluded,
        "bystanders": tuple(Bystander(peer=peer, incarnation=log.incarnations[peer]) for peer in standing_by),
    }


@lru_cache(maxsize=8)
def _next_header(
    log: LogState,
    roster: tuple[Member, ...],
    payload: bytes,
    leader: str | None,
    faults: tuple[Fault, ...],
    gone: tuple[str, ...],
    amendment: Amendment | None,
) -> Header:
    """Return the log's next header: see `LogState.next_header`. Cached, since a round needs the same header several
    times, and many members make it slow."""
    has_trained, peers = any(member.tokens for member in roster), [member.peer for member in roster]
    if has_trained == (payload == NO_PAYLOAD) or (log.closes and not has_trained):
        raise LogError("its payload is missing" if has_trained else "no member of the roster has trained tokens")
    if len(set(peers)) != len(peers) or peers != take_order(log.roster, peers):
        raise LogError("a peer is in the roster twice, or out of order")
    if log.probation and log.without_unproven(roster) != roster:
        raise LogError("a peer on probation counts in the roster")
    if log.closes and (made_up := [one.peer for one in roster if not (one.tokens or log.is_known(one))]):
        raise LogError(f"{made_up[0]}: a peer without tokens cannot become a voter")
    if log.closes != (leader is not None):
        raise LogError("the entry that closes a cycle names its leader, and other entries name none")
    if faults and not (log.closes and log.exclusion):
        raise LogError("only the entry that closes a cycle has an annex, in a run with exclusion")
    if gone and not log.closes:
        raise LogError("only the entry that closes a cycle may call voters gone")
    _check_annex(faults, log.accountable, peers)
    _check_gone(gone, log.voters, {*peers, *(fault.peer for fault in faults)})
    _check_amendment(log, amendment)
    amendments = log.amendments if log.closes else ()
    try:
        closing = _closing(log, roster, faults, gone)
        if amendment is not None:
            amendments = (*amendments, LoggedAmendment(amendment=amendment, cursor=closing["cursor"]))
        return Header(
            run=log.run,
            index=log.position.index,
            fragment=log.fragment,
            previous=log.position.head,
            state=log.state,
            roster=roster,
            payload=payload,
            leader=leader,
            faults=faults,
            amendments=amendments or None,
            **closing,
        )
    except ValidationError as error:
        raise LogError(f"a header cannot have these values: {error.errors()[0]['msg']}") from error


@lru_cache(maxsize=8)
def _append(log: LogState, header: Header) -> LogState:
    """Return the log with the next entry appended. Cached, since each vote or message about an entry needs it."""
    if header.fragment not in log.pending:
        raise LogError(f"entry {header.index}: its fragment does not follow from the log")
    if log.made and header.state != log.made[0].state:
        raise LogError(f"entry {header.index}: it is for another state than the others of its cycle")
    before = log.opening(header.fragment).in_state(header.state)
    besides = header.leader, header.faults, before.gone_in(header), before.taken_in(header)
    expected = before.next_header(header.roster, header.payload, *besides)
    for field in Header.model_fields:
        if getattr(header, field) != getattr(expected, field):
            raise LogError(f"entry {header.index}: its {field} does not follow from the log")
    made = sorted((*log.made, expected), key=lambda entry: entry.fragment)
    if len(made) < log.fragments:
        return replace(log, made=tuple(made))
    return log.at(made[-1], tuple(entry.digest for entry in made))


def _check_gone(gone: Sequence[str], voters: Sequence[str], named: Collection[str]) -> None:
    """Raise LogError unless `gone` are voters in the voters' order, and none is in `named`, which has the entry's
    members and the peers whose faults it notes."""
    chosen = set(gone)
    if tuple(gone) != tuple(peer for peer in voters if peer in chosen):
        raise LogError("the peers that it calls gone are not voters in the voters' order")
    if not chosen.isdisjoint(named):
        raise LogError("a peer that it calls gone is a member, or named in its annex")


def _check_amendment(log: LogState, amendment: Amendment | None) -> None:
    """Raise LogError if the next entry may not add this amendment to the log. None is always allowed."""
    if amendment is None:
        return
    if not log.closes:
        raise LogError("only the entry that closes a cycle takes in an amendment")
    if log.amendment and amendment.number <= log.amendment.number:
        raise LogError(f"amendment {amendment.number} does not follow {log.amendment.number}, which is in force")
    if not amendment.is_signed(log.run, log.organiser):
        raise LogError(f"amendment {amendment.number} is not signed by the run's organiser")


def _tenures_after(
    before: Sequence[Tenure], roster: Sequence[str], probation: int, excluded: Collection[str]
) -> tuple[Tenure, ...]:
    """Return the peers' tenures after an entry with this roster; () in a run without probation. A tenure is the number
    of outer steps that had a peer in the roster, counted up to `probation`.

    Founders have served. If all members are on probation, they have served, too, since they found the run anew.
    Excluded peers begin anew (R17).
    """
    if not probation:
        return ()
    served = {tenure.peer: tenure.served for tenure in before}
    is_founding = all(served.get(peer, 0) < probation for peer in roster)
    present = {peer: probation if is_founding else min(probation, served.get(peer, 0) + 1) for peer in roster}
    absent = [tenure for tenure in before if tenure.peer not in present and tenure.peer not in excluded]
    absent.sort(key=lambda tenure: -tenure.served)  # longest first; of equal ones, the last to leave the roster first
    return (*(Tenure(peer=peer, served=steps) for peer, steps in present.items()), *absent[:MEMBER_LIMIT])


def take_order(roster: Sequence[str], members: Iterable[str]) -> list[str]:
    """Return the members in the order of the next roster: those of the last `roster` first, in its order, then
    newcomers sorted by id."""
    old = {peer: place for place, peer in enumerate(roster)}
    return sorted(members, key=lambda peer: (old.get(peer, len(old)), peer))


def committee(voters: tuple[tuple[str, int], ...], seed: bytes) -> tuple[tuple[str, int], ...]:
    """Return all voters, or if there are more than COMMITTEE, those with the lowest hashes of `seed` and id, in the
    voters' order. `seed` is the head of two cycles ago, which no leader of the last cycle could choose."""
    if len(voters) <= COMMITTEE:
        return voters
    ranked = sorted(voters, key=lambda voter: digest_of(COMMITTEE_CONTEXT + seed + voter[0].encode()))
    chosen = set(ranked[:COMMITTEE])
    return tuple(voter for voter in voters if voter in chosen)


def _check_annex(faults: Sequence[Fault], known: Collection[str], roster: Collection[str]) -> None:
    """Raise LogError if an entry notes two faults of one peer, a fault of a member of its `roster`, or a fault of a
    peer that is not `known`, because it has neither lease nor vote.

    Only peers with a lease or a vote can be excluded, so that a liar cannot fill the log with peers that it has made
    up. Members of the entry cannot be excluded: a peer that is needed for it is excluded later.
    """
    peers = [fault.peer for fault in faults]
    if len(set(peers)) < len(peers):
        raise LogError("a peer is named twice in its annex")
    for peer in peers:
        if peer not in known:
            raise LogError(f"{peer}: its annex names a peer with neither lease nor vote")
        if peer in roster:
            raise LogError(f"{peer}: its annex names a member")


def _exclusions_after(
    before: Iterable[Exclusion], faults: Iterable[Fault], index: int, cycles: int
) -> tuple[Exclusion, ...]:
    """Return the exclusions that hold from the cycle after entry `index` on: earlier ones that have not ended, and new
    ones for `faults`, which last for `cycles` cycles."""
    still = (exclusion for exclusion in before if exclusion.until > index)
    new = (Exclusion(peer=fault.peer, until=index + cycles) for fault in faults)
    return (*still, *new)[-EXCLUSION_LIMIT:]
