"""Averages of chunks, as the members that made them have signed them; and what a round's averages come to.

A reducer signs each average that it makes once in a round, so two statements by one reducer about one chunk that differ
prove that it has lied. A later ballot may name an heir for a reducer that gave nothing; a chunk may then have averages
of two members. The proposal of the leader says which of them counts, by a mark of a few bytes for each chunk.
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
    """The members that may average each chunk of a round: its reducer, and heirs as later ballots name them.

    Parts are consecutive chunks. Which member has the first one rotates with the log's head, so that a pair of members
    without a link lacks other chunks each time.
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
        """Return the members that may average a chunk, the latest heir first. There are none for an unknown chunk."""
        if chunk >= len(self._owners):
            return ()
        owner = self._owners[chunk]
        return *reversed(self._heirs[owner]), owner

    def chunks_of(self, peer: str) -> set[int]:
        """Return the chunks that a member may average, its own and those that it is an heir of."""
        owners = [peer, *(owner for owner, heirs in self._heirs.items() if peer in heirs)]
        return {chunk for owner in owners for chunk in self.parts.get(owner, ())}

    def add(self, heirs: Iterable[tuple[str, str]]) -> dict[str, list[range]]:
        """Note the heirs of some reducers. Return the parts that are new to each heir. Only contributors can be heirs,
        since an average has its maker's own blocks at least."""
        new: defaultdict[str, list[range]] = defaultdict(list)
        for owner, heir in heirs:
            if owner in self.parts and heir in self._able and heir != owner and heir not in self._heirs[owner]:
                self._heirs[owner].append(heir)
                new[heir].append(self.parts[owner])
        return new


class Averages:
    """The averages of one round that are here, each with its reducer's signature; and those that we have signed."""

    def __init__(self, me: str, round: Round, keys: Keys | None) -> None:
        """Without `keys` nothing is checked, and our own signatures are empty."""
        self.ours: dict[int, Averaged] = {}
        """Our own averages, of which another one may have taken the place."""
        self.marks = b""
        """The averages that a proposal names; none: any that is signed is as good as another."""
        self._me = me
        self._round = round
        self._keys = keys
        self._here: dict[int, Averaged] = {}
        self._marks_here: dict[int, bytes] = {}
        self._squares: dict[int, float] = {}
        self._given: defaultdict[str, float] = defaultdict(float)  # each reducer's squared norm, of what is here

    def sign(self, chunk: int, digest: bytes, absent: tuple[str, ...]) -> Averaged:
        """Sign our own average of a chunk, once: it must be the only one that we make in this round."""
        assert chunk not in self.ours
        text = statement(self._round, self._me, chunk, digest, absent).text
        signature = bytes(64) if self._keys is None else self._keys.sign(text)
        origin = Origin(reducer=self._me, signature=signature)
        self.ours[chunk] = Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)
        return self.ours[chunk]

    def is_signed(self, averaged: Averaged) -> bool:
        """Return whether the reducer that is named has signed this."""
        if self._keys is None:
            return True
        text = statement_of(self._round, averaged).text
        return self._keys.verify(averaged.reducer, text, averaged.origin.signature)

    def is_marked(self, averaged: Averaged) -> bool:
        """Return whether a proposal names this average, or may mean it: it has no mark for a chunk beyond MARKED."""
        if averaged.chunk >= MARKED:
            return True
        mark = self.marks[averaged.chunk * MARK_BYTES : (averaged.chunk + 1) * MARK_BYTES]
        return mark == statement_of(self._round, averaged).mark

    def keep(self, averaged: Averaged, squares: float = 0.0) -> bool:
        """Have a signed average here, in place of any other of its chunk. `squares` is its squared norm. Return whether
        there was another one."""
        chunk, before = averaged.chunk, self._here.get(averaged.chunk)
        self._given[averaged.reducer] = self.squares_with(averaged, squares)
        if before is not None and before.reducer != averaged.reducer:
            self._given[before.reducer] -= self._squares[chunk]
        self._here[chunk], self._squares[chunk] = averaged, squares
        self._marks_here.pop(chunk, None)
        return before is not None

    def of(self, chunk: int) -> Averaged | None:
        """Return the average of a chunk that is here."""
        return self._here.get(chunk)

    def squares_with(self, averaged: Averaged, squares: float) -> float:
        """Return the squared norm of all averages of a reducer that are here, with this one."""
        before = self._here.get(averaged.chunk)
        replaced = self._squares[averaged.chunk] if before and before.reducer == averaged.reducer else 0.0
        return self._given[averaged.reducer] - replaced + squares

    @property
    def are_whole(self) -> bool:
        """Whether all averages are here, and those that the proposal names, if there is one."""
        return len(self._here) == self._round.chunks and not self.lacking()

    def lacking(self) -> list[int]:
        """Return the chunks of which no average is here, or another one than the proposal names."""
        return [chunk for chunk in range(self._round.chunks) if not self.is_right(chunk)]

    def is_right(self, chunk: int) -> bool:
        """Return whether an average of a chunk is here, and the one that the proposal names, if there is one."""
        here = self._here.get(chunk)
        if here is None or not self.marks or chunk >= MARKED:
            return here is not None
        if chunk not in self._marks_here:
            self._marks_here[chunk] = statement_of(self._round, here).mark
        return self._marks_here[chunk] == self.marks[chunk * MARK_BYTES : (chunk + 1) * MARK_BYTES]

    @property
    def of_others(self) -> list[Averaged]:
        """Return the averages that others have made."""
        return [averaged for averaged in self._here.values() if averaged.reducer != self._me]

    def absent_from_ours(self) -> frozenset[str]:
        """Return the members that are absent from all averages that we have made."""
        absent = [frozenset(averaged.absent) for averaged in self.ours.values()]
        return frozenset.intersection(*absent) if absent else frozenset()

    def absent(self) -> dict[str, int]:
        """Return from how many chunks that are here each member is absent, in roster order."""
        return _absent_from(self._round, self._here.values())

    def outcome(self) -> RoundOutcome | None:
        """Return what the averages that are here come to, if all are."""
        return round_outcome(self._round, self._here)


class RoundOutcome(NamedTuple):
    """What a round comes to: the payload's digest, from how many chunks each member is absent, and the marks."""

    payload: bytes
    absent: dict[str, int]
    marks: bytes


def round_outcome(round: Round, averages: Mapping[int, Averaged]) -> RoundOutcome | None:
    """Return what a round's averages come to; None while some are missing."""
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
    """Return whether an average may lack the blocks that it lacks: contributors' in roster order, not its maker's."""
    absent, among = averaged.absent, set(averaged.absent)
    in_order = tuple(member.peer for member in round.contributors if member.peer in among)
    return absent == in_order and averaged.reducer not in among


class Parts:
    """The averages of a round as their reducers have told its leader."""

    def __init__(self, round: Round, keys: Keys | None = None) -> None:
        """Without `keys` signatures are not checked."""
        self._round = round
        self._reducers = Reducers(round)
        self._averages = Averages("", round, keys)
        self.dropped: set[str] = set()
        """Members whose averages are done without: one was no average, or most members do not get them."""
        self._taken: dict[int, Averaged] = {}

    def take(self, sender: str, part: Part, heirs: Iterable[tuple[str, str]] = ()) -> bool:
        """Take in what a reducer, or one of the heirs that this leader has named, has signed of its own chunks. The
        first average of a chunk counts. A sender with a false signature is dropped: each costs time to check. Return
        whether all of the part was as it should be."""
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
        """Do without a member's averages. An heir may replace it."""
        self.dropped.add(reducer)
        self._taken = {chunk: averaged for chunk, averaged in self._taken.items() if averaged.reducer != reducer}

    def one_sided(self) -> frozenset[str]:
        """Return the members of whose averages some are without most of the round's tokens."""
        tokens = {member.peer: member.tokens for member in self._round.contributors}
        half = sum(tokens.values()) / 2
        taken = self._taken.values()
        return frozenset(one.reducer for one in taken if sum(tokens[peer] for peer in one.absent) > half)

    def signers(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """Return the members whose averages of these chunks count."""
        return tuple(dict.fromkeys(self._taken[chunk].reducer for chunk in chunks if chunk in self._taken))

    def missing(self) -> tuple[str, ...]:
        """Return the reducers of whose chunks some have no average yet, neither their own nor an heir's."""
        parts = self._reducers.parts.items()
        return tuple(peer for peer, part in parts if any(chunk not in self._taken for chunk in part))

    def outcome(self) -> RoundOutcome | None:
        """Return what the round comes to, once it is whole."""
        return round_outcome(self._round, self._taken)
