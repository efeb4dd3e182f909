"""Averages of chunks, as their reducers have signed them, and the outcome of a round.

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
    """The members that may average each chunk of a round: its reducer, and heirs that later ballots name.

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
        """Return the members that may average a chunk, the latest heir first; none for an unknown chunk."""
        if chunk >= len(self._owners):
            return ()
        owner = self._owners[chunk]
        return *reversed(self._heirs[owner]), owner

    def chunks_of(self, peer: str) -> set[int]:
        """Return the chunks that a member may average: its own part and those that it is an heir of."""
        owners = [peer, *(owner for owner, heirs in self._heirs.items() if peer in heirs)]
        return {chunk for owner in owners for chunk in self.parts.get(owner, ())}

    def add(self, heirs: Iterable[tuple[str, str]]) -> dict[str, list[range]]:
        """Add the heirs of some reducers. Return the parts that are new to each heir. Only contributors can be heirs,
        since an average has at least its maker's own blocks."""
        new: defaultdict[str, list[range]] = defaultdict(list)
        for owner, heir in heirs:
            if owner in self.parts and heir in self._able and heir != owner and heir not in self._heirs[owner]:
                self._heirs[owner].append(heir)
                new[heir].append(self.parts[owner])
        return new


class Averages:
    """The signed averages of one round that are here, and those that this peer has signed."""

    def __init__(self, me: str, round: Round, keys: Keys | None) -> None:
        """Without `keys` no signature is checked, and this peer's own signatures are empty."""
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
        self._given: defaultdict[str, float] = defaultdict(float)  # each reducer's squared norm, over its averages here

    def sign(self, chunk: int, digest: bytes, absent: tuple[str, ...]) -> Averaged:
        """Sign this peer's average of a chunk. It may sign only one for each chunk in this round."""
        assert chunk not in self.ours
        text = statement(self._round, self._me, chunk, digest, absent).text
        signature = bytes(64) if self._keys is None else self._keys.sign(text)
        origin = Origin(reducer=self._me, signature=signature)
        self.ours[chunk] = Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)
        return self.ours[chunk]

    def is_signed(self, averaged: Averaged) -> bool:
        """Return whether the named reducer has signed this average."""
        if self._keys is None:
            return True
        text = statement_of(self._round, averaged).text
        return self._keys.verify(averaged.reducer, text, averaged.origin.signature)

    def is_marked(self, averaged: Averaged) -> bool:
        """Return whether a proposal names this average. It has no marks for chunks beyond MARKED, so any average may be
        the one."""
        if averaged.chunk >= MARKED:
            return True
        mark = self.marks[averaged.chunk * MARK_BYTES : (averaged.chunk + 1) * MARK_BYTES]
        return mark == statement_of(self._round, averaged).mark

    def keep(self, averaged: Averaged, squares: float = 0.0) -> bool:
        """Keep a signed average in place of any other of its chunk. `squares` is its squared norm. Return whether it
        replaces one."""
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
        """Return the squared norm of all averages of a reducer that are here, together with this one."""
        before = self._here.get(averaged.chunk)
        replaced = self._squares[averaged.chunk] if before and before.reducer == averaged.reducer else 0.0
        return self._given[averaged.reducer] - replaced + squares

    @property
    def are_whole(self) -> bool:
        """True if all averages are here, and are those that the proposal names if there is one."""
        return len(self._here) == self._round.chunks and not self.lacking()

    def lacking(self) -> list[int]:
        """Return the chunks whose average is missing here, or differs from the one that the proposal names."""
        return [chunk for chunk in range(self._round.chunks) if not self.is_right(chunk)]

    def is_right(self, chunk: int) -> bool:
        """Return whether an average of a chunk is here, and is the one that the proposal names if there is one."""
        here = self._here.get(chunk)
        if here is None or not self.marks or chunk >= MARKED:
            return here is not None
        if chunk not in self._marks_here:
            self._marks_here[chunk] = statement_of(self._round, here).mark
        return self._marks_here[chunk] == self.marks[chunk * MARK_BYTES : (chunk + 1) * MARK_BYTES]

    @property
    def of_others(self) -> list[Averaged]:
        """The averages that other members have made."""
        return [averaged for averaged in self._here.values() if averaged.reducer != self._me]

    def absent_from_ours(self) -> frozenset[str]:
        """Return the members that are absent from all averages that this peer has made."""
        absent = [frozenset(averaged.absent) for averaged in self.ours.values()]
        return frozenset.intersection(*absent) if absent else frozenset()

    def absent(self) -> dict[str, int]:
        """Return from how many of the averages here each member is absent, in roster order."""
        return _absent_from(self._round, self._here.values())

    def outcome(self) -> RoundOutcome | None:
        """Return the outcome of the round by the averages here; None while some are missing."""
        return round_outcome(self._round, self._here)


class RoundOutcome(NamedTuple):
    """The outcome of a round: the payload's digest, from how many chunks each member is absent, and the averages'
    marks."""

    payload: bytes
    absent: dict[str, int]
    marks: bytes


def round_outcome(round: Round, averages: Mapping[int, Averaged]) -> RoundOutcome | None:
    """Return the outcome of a round by its averages; None while some are missing."""
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
    """Return whether the absent members of an average are allowed: contributors in roster order, without its maker."""
    absent, among = averaged.absent, set(averaged.absent)
    in_order = tuple(member.peer for member in round.contributors if member.peer in among)
    return absent == in_order and averaged.reducer not in among


class Parts:
    """The averages of a round that its leader has received in Parts."""

    def __init__(self, round: Round, keys: Keys | None = None) -> None:
        """Without `keys` signatures are not checked."""
        self._round = round
        self._reducers = Reducers(round)
        self._averages = Averages("", round, keys)
        self.dropped: set[str] = set()
        """Members whose averages do not count: one of their averages was wrong, or most members do not get them."""
        self._taken: dict[int, Averaged] = {}

    def take(self, sender: str, part: Part, heirs: Iterable[tuple[str, str]] = ()) -> bool:
        """Take the signed averages of a reducer, or of one of the heirs that this leader has named. The first average
        of a chunk counts. A sender with a false signature is dropped, since each one costs time to check. Return
        whether the whole Part was valid."""
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
        """Return the members that signed an average from which most of the round's tokens are absent."""
        tokens = {member.peer: member.tokens for member in self._round.contributors}
        half = sum(tokens.values()) / 2
        taken = self._taken.values()
        return frozenset(one.reducer for one in taken if sum(tokens[peer] for peer in one.absent) > half)

    def signers(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """Return the members whose averages of these chunks count."""
        return tuple(dict.fromkeys(self._taken[chunk].reducer for chunk in chunks if chunk in self._taken))

    def missing(self) -> tuple[str, ...]:
        """Return the reducers with a chunk that has no average yet, neither their own nor an heir's."""
        parts = self._reducers.parts.items()
        return tuple(peer for peer, part in parts if any(chunk not in self._taken for chunk in part))

    def outcome(self) -> RoundOutcome | None:
        """Return the outcome of the round; None while averages are missing."""
        return round_outcome(self._round, self._taken)
