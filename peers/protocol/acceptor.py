"""What one peer has promised and holds at one position: as long as all keep to it, no two entries are committed there.

A peer is pledged to one leader at a time, and takes part in its attempts in the order of their numbers. Who holds an
entry says so to every leader, and takes part only in attempts that lead to that entry, or to one held in a later
attempt, or where enough others have signed that they do not hold it.
It keeps to that for as long as it lives, whatever state it fetches meanwhile. Who has forgotten it is another
*incarnation*, which counts in a quorum once an entry has it in its roster: where it may have promised something before,
it is nobody.
"""

from __future__ import annotations

from collections import OrderedDict

from peers.log.certificate import Departure, ballot
from peers.log.header import Header, Position
from peers.presence.election import LATENESS, highest_attempt
from peers.protocol.messages import Complete, Leaving
from peers.protocol.rounds import Attempt, Held, Round
from peers.values.chunks import Sum
from peers.values.identity import Keys

MEMORY = 32
"""Positions at which a peer remembers what it has promised. It comes back to one only where lineages meet."""


class Acceptor:
    """The memory of one peer for one position."""

    def __init__(self) -> None:
        self.pledged_to: str | None = None
        self.last_attempt = 0
        self.held: Held | None = None
        self._round = 0  # the number of the last round that we have been in
        self._root: Sum | None = None
        self._said: Complete | None = None  # what we said last of what we hold

    def pledge(self, leader: str | None) -> bool:
        """Be led by this peer from now on. Returns whether it is another one than before."""
        if leader == self.pledged_to:
            return False
        self.last_attempt += self.pledged_to is not None  # the one that the other leader may still begin
        self.pledged_to = leader
        return True

    def may_join(self, sender: str, attempt: Attempt, seconds: float) -> bool:
        """Whether the attempt is one that we promised to be in, and later than all that we have been in. We have been
        at its position for so many seconds."""
        return sender == self.pledged_to and sender == attempt.leader and self.is_later(attempt, seconds)

    def may_enter(self, round: Round) -> bool:
        """Whether we have been in no such round, nor in a later one: to come back would be to sign its averages anew,
        and two that differ convict us. If so, we are in it from now on."""
        is_new = round.name.number > self._round
        self._round = max(self._round, round.name.number)
        return is_new

    def commit(self, root: Sum) -> None:
        """We commit to this for the next attempt. To commit to something else for it would convict us: so then we take
        part in a later one only."""
        self.last_attempt += self._root not in (None, root)
        self._root = root

    def is_later(self, attempt: Attempt, seconds: float) -> bool:
        return self.last_attempt < attempt.number <= highest_attempt(seconds + LATENESS)

    def hold(
        self,
        attempt: Attempt,
        header: Header,
        missed: tuple[tuple[str, int], ...],
        signature: bytes,
    ) -> tuple[Complete, bool]:
        """From now on we take part only in attempts that respect this entry, until it is known what was committed.

        That we say so again in a minority's attempt takes nothing from the weight that it has.
        Returns what there is to say of it, and whether it is said for the first time in this attempt.
        """
        is_new = self.said_in != attempt
        known = self.held
        if known is None or known.header != header or known.attempt.weight < attempt.weight:
            self.held = Held(attempt=attempt, header=header, signature=signature)
        self._said = Complete(
            attempt=attempt, payload=header.payload, missed=missed, entry=header.digest, signature=signature
        )
        return self._said, is_new

    @property
    def said_in(self) -> Attempt | None:
        """The last attempt in which we said that we hold something."""
        return self._said.attempt if self._said is not None else None

    def signed_in(self, attempt: Attempt | None) -> Complete | None:
        """Return what we have signed in this attempt, if anything."""
        return self._said if self.said_in == attempt else None


class Memory:
    """The acceptors of one peer, by position."""

    def __init__(self, me: str, run: str, incarnation: int, keys: Keys) -> None:
        """`incarnation` is a number that no start of this peer has had before."""
        self.incarnation = incarnation
        self.keys = keys
        self._me = me
        self._run = run
        self._acceptors: OrderedDict[tuple[bytes, int], tuple[int, Acceptor]] = OrderedDict()
        self._forgotten = 0
        """Before this index there may be positions of which we know no more what we promised there."""

    def at(self, position: Position) -> Acceptor:
        """What we have promised there. Where that may be forgotten, we are another incarnation from now on."""
        place = position.head, position.fragment
        if place not in self._acceptors:
            if position.index < self._forgotten:
                self.incarnation, self._forgotten = self.incarnation + 1, 0
            self._acceptors[place] = position.index, Acceptor()
            self._forget()
        self._acceptors.move_to_end(place)
        return self._acceptors[place][1]

    @property
    def departure(self) -> int:
        """The index from which on we hold no entry, in any lineage."""
        held = (index + 1 for index, acceptor in self._acceptors.values() if acceptor.held)
        return max(self._forgotten, max(held, default=0))

    def sign(self, attempt: Attempt, header: Header) -> bytes:
        """The signature that says that we hold this entry."""
        return self.keys.sign(ballot(header, attempt.name, self.incarnation).text)

    def goodbye(self, position: Position) -> Leaving:
        """What to tell the others in the end."""
        departure = Departure(run=self._run, peer=self._me, incarnation=self.incarnation, index=self.departure)
        return Leaving(
            position=position,
            incarnation=self.incarnation,
            departure=departure.index,
            signature=self.keys.sign(departure.text),
        )

    def begin_anew(self) -> None:
        """Be another incarnation from now on, which remembers all the same. As what we were we sign nothing more."""
        self.incarnation += 1

    def _forget(self) -> None:
        while len(self._acceptors) > MEMORY:
            _, (index, acceptor) = self._acceptors.popitem(last=False)
            if acceptor.pledged_to is not None or acceptor.last_attempt or acceptor.held:
                self._forgotten = max(self._forgotten, index + 1)
