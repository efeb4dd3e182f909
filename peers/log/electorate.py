"""Who has a say in the next entry, and what counts in it, as the last entry says.

A leader chooses whom it takes into a round. Were its members the only voters of the next entry, a liar that leads could
take in its allies and just as many others as make a majority with them, and they would be the majority from then on. So
whoever had a say keeps it, whether it is in an entry or stands by, until the entry says that it is `gone`. Members sign
no entry that says so of a peer that they hear themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from peers.log.header import BYSTANDER_LIMIT, Bystander, Header, Member

TERM = 64
"""Outer steps for which one member leads, if nothing is wrong with it. A leader that gives newcomers no samples does so
no longer; and each has to find out for itself who holds rounds up, which costs an entry's time."""


def take_order(roster: Sequence[str], members: Iterable[str]) -> list[str]:
    """Roster order for the next entry: those of the last one in their old order, then newcomers by id."""
    old = {peer: place for place, peer in enumerate(roster)}
    return sorted(members, key=lambda peer: (old.get(peer, len(old)), peer))


def place_of_turn(turn: int, members: int) -> int:
    """Return the place of the member that leads in a term.

    Turns count round a ring of places, whose size is a power of two; an empty one falls to the place half a ring before
    it. So whoever joins at the end, or leaves there, moves no turn but its own. Were it the remainder by the number of
    members, each of their comings and goings would have somebody else lead, and liars could choose whom.
    """
    ring = 1 << (members - 1).bit_length()
    place = turn % ring
    return place if place < members else place - ring // 2


class Electorate:
    """What a log's end says of peers. Part of `LogState`."""

    last: Header | None
    probation: int

    @property
    def roster(self) -> tuple[str, ...]:
        """Peers of the last entry, first of them the leader's first choice; empty before the first entry."""
        return self.last.peers if self.last else ()

    @cached_property
    def incarnations(self) -> dict[str, int]:
        """The roster and the bystanders, and of each the start at which it was in an entry last."""
        if self.last is None:
            return {}
        starts = {member.peer: member.incarnation for member in self.last.roster}
        return starts | {one.peer: one.incarnation for one in self.last.bystanders}

    @cached_property
    def voting_members(self) -> tuple[str, ...]:
        """Those of the roster that vote."""
        if not self.probation:
            return self.roster
        return tuple(peer for peer in self.roster if not self.is_on_probation(peer))

    @cached_property
    def voters(self) -> tuple[str, ...]:
        """The peers that have a say in the next entry: of the roster those that are not on probation, in its order, and
        then the bystanders."""
        return (*self.voting_members, *(one.peer for one in self.last.bystanders)) if self.last else ()

    @cached_property
    def starts(self) -> dict[str, int]:
        """The voters, and of each the start that has a say."""
        return {peer: self.incarnations[peer] for peer in self.voters}

    def counts(self, peer: str, incarnation: int) -> bool:
        """Whether the peer is a voter as the start that it is, and so remembers what it did as one."""
        return self.starts.get(peer) == incarnation

    def is_majority(self, starts: Collection[tuple[str, int]]) -> bool:
        """Whether these peers, each as the start that it is, are more than half of the voters."""
        return 2 * sum(self.counts(peer, start) for peer, start in starts) > len(self.voters)

    @cached_property
    def served(self) -> dict[str, int]:
        """In how many outer steps' rosters each peer has been, up to the manifest's `probation`."""
        return {tenure.peer: tenure.served for tenure in self.last.tenures} if self.last else {}

    def is_on_probation(self, peer: str) -> bool:
        """Whether the peer neither counts nor votes yet. Before the first entry nobody is."""
        return self.probation > 0 and self.last is not None and self.served.get(peer, 0) < self.probation

    @cached_property
    def leaders(self) -> tuple[str, ...]:
        """Who leads before whom: the members that vote, in turn, each for a term; then bystanders, who may be late or
        hold rounds up; and then those on probation."""
        members = self.voting_members
        first = place_of_turn(self.last.index // TERM, len(members)) if self.last and members else 0
        return tuple(dict.fromkeys((*members[first:], *members[:first], *self.voters, *self.roster)))

    def weighed(self, roster: Sequence[Member]) -> tuple[Member, ...]:
        """The roster as it counts: of those on probation nothing, unless all of them are."""
        new = {member.peer for member in roster if self.is_on_probation(member.peer)}
        if not new or len(new) == len(roster):
            return tuple(roster)
        nothing = {"tokens": 0, "samples": (), "missed": 0}
        return tuple(member.model_copy(update=nothing) if member.peer in new else member for member in roster)

    @cached_property
    def excluded(self) -> dict[str, int]:
        """The peers that are excluded from the present cycle for a proven lie; the last cycle from which each is."""
        return {exclusion.peer: exclusion.until for exclusion in self.last.excluded} if self.last else {}

    def bystanders_besides(self, peers: Collection[str]) -> tuple[Bystander, ...]:
        """Return the voters besides these peers, as bystanders: of too many those that were in an entry last."""
        besides = (peer for peer in self.voters if peer not in peers)
        bystanders = tuple(Bystander(peer=peer, incarnation=self.incarnations[peer]) for peer in besides)
        return bystanders[:BYSTANDER_LIMIT]


def wrong_in_gone(gone: Sequence[str], voters: Sequence[str], named: Collection[str]) -> str | None:
    """Return what is wrong with the voters that an entry says are gone; None: nothing. `named` are its members, and
    those in its annex."""
    chosen = set(gone)
    if tuple(gone) != tuple(peer for peer in voters if peer in chosen):
        return "somebody who is gone is no voter, or they are not in the voters' order"
    if not chosen.isdisjoint(named):
        return "somebody who is gone is a member, or named in its annex"
    return None
