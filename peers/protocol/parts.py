"""The averages of a round's chunks, as signed by their reducers, and the outcome of the round.

A reducer signs its average of a chunk once in a round, so two different statements by one reducer about one chunk prove
that it has lied. A later ballot may name an heir for a silent reducer; a chunk may then have the averages of two
members. The leader's proposal has a mark of a few bytes for each chunk, which names the average that counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from peers.log.header import NO_PAYLOAD
from peers.messages.averages import (
    MARK_BYTES,
    MARKED,
    Averaged,
    Origin,
    statement,
    statement_of,
)
from peers.messages.rounds import Round
from peers.values.chunks import digest_of_chunks, parts_of
from peers.values.identity import Keys

if TYPE_CHECKING:
    from peers.messages.messages import Part


class Reducers:
    """The members that may average each chunk of a round: the chunk's reducer, and its heirs, which later ballots name.

    A reducer's part is a run of consecutive chunks. The member with the first part rotates with the log's head, so that
    a pair of members without a link misses other chunks each time.
    """

    def __init__(self, round: Round) -> None:
        shares = [share for share in round.shares if share.chunks]
        first = int.from_bytes(round.name.position.head[:8]) % len(shares) if shares else 0
        line = shares[first:] + shares[:first]
        parts = parts_of([share.chunks for share in line])
        self.parts: dict[str, range] = {share.member.peer: part for share, part in zip(line, parts, strict=True)}
        self._owners = [peer for peer, part in self.parts.items() for _ in part]
        self._able = frozenset(member.peer for member in round.contributors)
        self._heirs: defaultdict[str, list[str]] = defaultdict(list)

    def of(self, chunk: int) -> tuple[str, ...]:
        """Return the members that may average a chunk, the latest heir first; none if the round has no such chunk."""
        if chunk >= len(self._owners):
            return ()
        owner = self._owners[chunk]
        return *reversed(self._heirs[owner]), owner

    def chunks_of(self, peer: str) -> set[int]:
        """Return the chunks that a member may average: its own part, and the parts of reducers whose heir it is."""
        owners = [peer, *(owner for owner, heirs in self._heirs.items() if peer in heirs)]
        return {chunk for owner in owners for chunk in self.parts.get(owner, ())}

    def add(self, heirs: Iterable[tuple[str, str]]) -> dict[str, list[range]]:
        """Add heirs, as pairs of reducer and heir. Return the new parts of each heir. Only a contributor can be an
        heir, because each average contains the blocks of the peer that made it."""
        new: defaultdict[str, list[range]] = defaultdict(list)
        for owner, heir in heirs:
            if owner in self.parts and heir in self._able and heir != owner and heir not in self._heirs[owner]:
                self._heirs[owner].append(heir)
                new[heir].append(self.parts[owner])
        return new


class Averages:
    """The signed averages of one round that this peer has received or made."""

    def __init__(self, me: str, round: Round, keys: Keys | None) -> None:
        """Create an empty store. Without `keys` no signature is checked, and this peer's own signatures are empty."""
        self.ours: dict[int, Averaged] = {}
        """The averages that this peer has signed. In `_here` another reducer's may have replaced them."""
        self.marks = b""
        """The averages that a proposal names; empty without a proposal, when any signed average of a chunk will do."""
        self._me = me
        self._round = round
        self._keys = keys
        self._here: dict[int, Averaged] = {}
        self._marks_here: dict[int, bytes] = {}
        self._squares: dict[int, float] = {}
        self._given: defaultdict[str, float] = defaultdict(float)  # by reducer: squared norm of its stored averages

    def sign(self, chunk: int, digest: bytes, absent: tuple[str, ...]) -> Averaged:
        """Return this peer's signed average of a chunk. A peer may sign only one average of a chunk in a round."""
        assert chunk not in self.ours
        text = statement(self._round, self._me, chunk, digest, absent).text
        signature = bytes(64) if self._keys is None else self._keys.sign(text)
        origin = Origin(reducer=self._me, signature=signature)
        self.ours[chunk] = Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)
        return self.ours[chunk]

    def is_signed(self, averaged: Averaged) -> bool:
        """Return True if the average has a valid signature of the reducer that it names."""
        if self._keys is None:
            return True
        text = statement_of(self._round, averaged).text
        return self._keys.verify(averaged.reducer, text, averaged.origin.signature)

    def is_marked(self, averaged: Averaged) -> bool:
        """Return True if the proposal names this average. Chunks beyond MARKED have no marks in a proposal, so each
        average of them is accepted."""
        if averaged.chunk >= MARKED:
            return True
        mark = self.marks[averaged.chunk * MARK_BYTES : (averaged.chunk + 1) * MARK_BYTES]
        return mark == statement_of(self._round, averaged).mark

    def keep(self, averaged: Averaged, squares: float = 0.0) -> bool:
        """Store a signed average in place of an earlier one of the same chunk. `squares` is the average's squared norm.
        Return True if an earlier one was replaced."""
        chunk, before = averaged.chunk, self._here.get(averaged.chunk)
        self._given[averaged.reducer] = self.squares_with(averaged, squares)
        if before is not None and before.reducer != averaged.reducer:
            self._given[before.reducer] -= self._squares[chunk]
        self._here[chunk], self._squares[chunk] = averaged, squares
        self._marks_here.pop(chunk, None)
        return before is not None

    def of(self, chunk: int) -> Averaged | None:
        """Return the average of a chunk that this peer has stored; None if there is none."""
        return self._here.get(chunk)

    def squares_with(self, averaged: Averaged, squares: float) -> float:
        """Return the squared norm of all averages by the reducer of `averaged`: those stored here, and `averaged` with
        the squared norm `squares`, in place of an earlier average of its chunk."""
        before = self._here.get(averaged.chunk)
        replaced = self._squares[averaged.chunk] if before and before.reducer == averaged.reducer else 0.0
        return self._given[averaged.reducer] - replaced + squares

    @property
    def are_whole(self) -> bool:
        """True if this peer has the averages of all chunks (if there is a proposal, the proposed ones)."""
        return len(self._here) == self._round.chunks and not self.lacking()

    def lacking(self) -> list[int]:
        """Return the chunks whose average is missing, or is not the proposed one."""
        return [chunk for chunk in range(self._round.chunks) if not self.is_right(chunk)]

    def is_right(self, chunk: int) -> bool:
        """Return True if this peer has an average of the chunk (if there is a proposal, the proposed one)."""
        here = self._here.get(chunk)
        if here is None or not self.marks or chunk >= MARKED:
            return here is not None
        if chunk not in self._marks_here:
            self._marks_here[chunk] = statement_of(self._round, here).mark
        return self._marks_here[chunk] == self.marks[chunk * MARK_BYTES : (chunk + 1) * MARK_BYTES]

    @property
    def of_others(self) -> list[Averaged]:
        """The averages that this peer has from other members."""
        return [averaged for averaged in self._here.values() if averaged.reducer != self._me]

    def absent_from_ours(self) -> frozenset[str]:
        """Return the members that are absent from every average that this peer has made."""
        absent = [frozenset(averaged.absent) for averaged in self.ours.values()]
        return frozenset.intersection(*absent) if absent else frozenset()

    def absent(self) -> dict[str, int]:
        """Return the number of stored averages from which each member is absent, in roster order."""
        return _absent_from(self._round, self._here.values())

    def outcome(self) -> RoundOutcome | None:
        """Return the outcome of the round if this peer has the averages of all chunks; otherwise None."""
        return round_outcome(self._round, self._here)


class RoundOutcome(NamedTuple):
    """The result of a round: the payload's digest, the number of chunks from which each member is absent, and `marks`,
    a few bytes for each average in chunk order, by which a proposal names it."""

    payload: bytes
    absent: dict[str, int]
    marks: bytes


def round_outcome(round: Round, averages: Mapping[int, Averaged]) -> RoundOutcome | None:
    """Return the outcome of a round if `averages` has an average of each chunk; otherwise None."""
    if len(averages) < round.chunks:
        return None
    if not round.chunks:
        return RoundOutcome(NO_PAYLOAD, {}, b"")
    in_order = [averages[chunk] for chunk in range(round.chunks)]
    marks = b"".join(statement_of(round, averaged).mark for averaged in in_order[:MARKED])
    payload = digest_of_chunks(averaged.digest for averaged in in_order)
    return RoundOutcome(payload, _absent_from(round, in_order), marks)


def _absent_from(round: Round, averages: Iterable[Averaged]) -> dict[str, int]:
    missed = Counter(peer for averaged in averages for peer in averaged.absent)
    return {peer: missed[peer] for peer in round.peers if missed[peer]}


def is_lawful(round: Round, averaged: Averaged) -> bool:
    """Return True if an average names valid absent members: contributors, in roster order, and not its reducer."""
    absent, among = averaged.absent, set(averaged.absent)
    in_order = tuple(member.peer for member in round.contributors if member.peer in among)
    return absent == in_order and averaged.reducer not in among


class Parts:
    """The signed averages of one round's chunks that its leader has received, in `Part` messages from reducers."""

    def __init__(self, round: Round, keys: Keys | None = None) -> None:
        """Create the object without averages. If `keys` is None, no signature is checked."""
        self._round = round
        self._reducers = Reducers(round)
        self._averages = Averages("", round, keys)
        self.dropped: set[str] = set()
        """Members whose averages do not count: one of their averages was wrong, or most members do not get them."""
        self._taken: dict[int, Averaged] = {}

    def take(self, sender: str, part: Part, heirs: Iterable[tuple[str, str]] = ()) -> bool:
        """Store the signed averages in a Part from a reducer or an heir; the first average of a chunk counts. If one is
        not valid, drop all that the sender sent, and ignore its later Parts. Return True if the Part was valid."""
        self._reducers.add(heirs)
        if part.round != self._round.name or sender in self.dropped:
            return False
        own = {averaged.chunk: averaged for averaged in part.averages if sender in self._reducers.of(averaged.chunk)}
        for averaged in own.values():
            if averaged == self._taken.get(averaged.chunk):
                continue
            if not self._is_statement(sender, averaged):
                self.drop(sender)
                return False
            self._taken.setdefault(averaged.chunk, averaged)
        return len(own) == len(part.averages)

    def _is_statement(self, sender: str, averaged: Averaged) -> bool:
        is_own = averaged.reducer == sender and is_lawful(self._round, averaged)
        return is_own and self._averages.is_signed(averaged)

    def drop(self, reducer: str) -> None:
        """Remove a member's signed averages, and ignore its later ones. An heir may average the chunks instead."""
        self.dropped.add(reducer)
        self._taken = {chunk: averaged for chunk, averaged in self._taken.items() if averaged.reducer != reducer}

    def one_sided(self) -> frozenset[str]:
        """Return the members that signed an average from which more than half of the round's tokens are absent."""
        tokens = {member.peer: member.tokens for member in self._round.contributors}
        half = sum(tokens.values()) / 2
        taken = self._taken.values()
        return frozenset(one.reducer for one in taken if sum(tokens[peer] for peer in one.absent) > half)

    def signers(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """Return the members that signed the stored averages of these chunks."""
        return tuple(dict.fromkeys(self._taken[chunk].reducer for chunk in chunks if chunk in self._taken))

    def missing(self) -> tuple[str, ...]:
        """Return the reducers whose part has a chunk without a stored average by the reducer or an heir."""
        parts = self._reducers.parts.items()
        return tuple(peer for peer, part in parts if any(chunk not in self._taken for chunk in part))

    def outcome(self) -> RoundOutcome | None:
        """Return the outcome of the round if the Parts received have all averages; otherwise None."""
        return round_outcome(self._round, self._taken)
