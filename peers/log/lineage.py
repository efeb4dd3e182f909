"""Lineages: the end of one peer's own log, and the branches that other logs split off into, with the better of two.

Without liars two certified entries never have one place. So of two branches that split, the one whose first own entry
is certified is the run's, whatever the other one has trained. Otherwise the one that more of the voters before the
split have signed is better, then the one with more tokens, then the one whose entry has the smaller digest. The first
entry's voters are its founders: of two foundings the one with more tokens is better.

Before all of that comes what the run's archives have signed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from peers.log.certificate import Certificate, Support, prove
from peers.log.chain import Outcome, header_of
from peers.log.header import UNKNOWN_STATE, Header, Position
from peers.log.state import LogState
from peers.values.identity import Verify
from peers.values.signed_heads import NOTHING_SIGNED, SignedHead, SignedHeads

RECENT_ENTRIES = 64
"""Headers, the last ones, that a peer can name to one that fell behind."""
UNSUPPORTED = Support(is_certified=False, signers=0)


class Lineage:
    """The last entries of a peer's log. Of those before the snapshot that it began with it knows the heads alone, as
    far as the peers that vouched for the snapshot knew them, or the log that is kept here has them (`recall`).

    `doubt` is the newest place in it from which a minority went on, as certificates say.
    """

    def __init__(self, log: LogState) -> None:
        """`log` is where it begins."""
        self.doubt: LogState | None = None
        self._starts: OrderedDict[bytes, LogState] = OrderedDict({log.position.head: log})
        self._followers: OrderedDict[tuple[bytes, int], tuple[Header, Certificate | None]] = OrderedDict()  # by place
        self._end = log.position.index
        """Cycles in the log, up to the last of these heads."""
        self._heads: deque[bytes] = deque([log.position.head] if log.last else [], maxlen=RECENT_ENTRIES)

    def append(self, header: Header, log: LogState, certificate: Certificate | None = None) -> None:
        """Add an entry; `log` is where that leads. Without a certificate it is unknown who has signed it."""
        before = self._starts.get(header.previous)
        if certificate is not None and certificate.choice.alone and before is not None:
            self.doubt = before
        self._followers[header.previous, header.fragment] = header, certificate
        if len(self._followers) > RECENT_ENTRIES * log.fragments:
            self._followers.popitem(last=False)
        if log.position.index > header.index:
            self._heads.append(log.position.head)
            self._end = log.position.index
            self._starts[log.position.head] = log
            if len(self._starts) > RECENT_ENTRIES + 1:
                self._starts.popitem(last=False)

    @property
    def log(self) -> LogState:
        """The log after the last whole cycle."""
        return next(reversed(self._starts.values()))

    def after(self, position: Position) -> tuple[Header, Certificate | None] | None:
        """Return the entry that was made there, if it is a recent one of this lineage, and its certificate."""
        return self._followers.get((position.head, position.fragment))

    def start(self, head: bytes) -> LogState | None:
        """Return the log as it was when a recent cycle of this lineage began."""
        return self._starts.get(head)

    def lacks(self, index: int, head: bytes) -> bool:
        """Return whether this lineage led to another place after so many cycles, or has not come so far."""
        return index >= self.known_from and self.head_at(index) != head

    @property
    def known_from(self) -> int:
        """The first cycle after which it is known what named this lineage."""
        return self._end - len(self._heads) + 1

    @property
    def is_short(self) -> bool:
        """Whether fewer heads are known than there were, and than can be kept."""
        return self.known_from > 1 and len(self._heads) < RECENT_ENTRIES

    def recall(self, index: int, heads: Sequence[bytes]) -> None:
        """Learn what named the lineage before: after consecutive cycles up to `index`, which must be the first one that
        is known. Heads that do not lead up to that one are of another lineage, and change nothing."""
        room = RECENT_ENTRIES - len(self._heads)
        leads_here = index == self.known_from and self._heads and heads and heads[-1] == self._heads[0]
        if leads_here and room:
            self._heads.extendleft(reversed(heads[:-1][-room:]))

    def head_at(self, index: int) -> bytes | None:
        """Return this lineage's head after so many cycles; None: too long ago to be known, or not made yet."""
        place = index - self.known_from
        return self._heads[place] if 0 <= place < len(self._heads) else None

    @property
    def entries(self) -> tuple[Header, ...]:
        return tuple(header for header, _ in self._followers.values())

    @property
    def heads(self) -> tuple[bytes, ...]:
        """What names the lineage after each cycle, oldest first, the last one included."""
        return tuple(self._heads)

    def move(self, log: LogState, theirs: Sequence[bytes], doubt: LogState | None = None) -> tuple[Header, ...]:
        """Go on where a snapshot stands: at the end of `log`, which is in the lineage whose newest heads are `theirs`,
        and whose newest `doubt` this is.

        Returns the entries that we leave: ours of cycles that are not among those. What lies further back than they
        reach may be in both lineages.
        """
        heads, place, end = list(theirs), -1, log.position
        if log.last is not None:
            if end.head not in heads:
                heads = [end.head]
            place = heads.index(end.head)
        oldest = end.index - 1 - place if log.last else 0
        ours = dict(enumerate(self._heads, self._end - len(self._heads)))
        left = tuple(
            header for header in self.entries if header.index >= oldest and ours.get(header.index) not in heads
        )
        self.doubt = doubt
        self._followers.clear()
        self._starts = OrderedDict({log.position.head: log})
        self._heads = deque(heads[: place + 1], maxlen=RECENT_ENTRIES)
        self._end = end.index
        return left


@dataclass(frozen=True)
class Branch:
    """The entries from `start`, which both sides have, to `end`.

    `first` are those of the first cycle: by fragment, the digest and what proves it; `certificates` are theirs, whose
    signatures have been checked. `heads` name the log after each
    cycle, from `start` on, by index; `states` the digests of the state there, as certified entries after it say, and
    `claimed` as others do.
    `doubts` are the places from which a minority went on. `founders`: how many founded the run, if the branch has
    its first entry.
    """

    start: LogState
    end: LogState
    first: Mapping[int, tuple[bytes, Support]] = field(default_factory=dict)
    heads: Mapping[int, bytes] = field(default_factory=dict)
    states: Mapping[int, bytes] = field(default_factory=dict)
    claimed: Mapping[int, bytes] = field(default_factory=dict)
    doubts: tuple[LogState, ...] = ()
    founders: int | None = None
    certificates: Mapping[int, Certificate] = field(default_factory=dict)

    def doubt_before(self, index: int, ours: LogState | None = None) -> LogState | None:
        """Return the last place before this one from which a minority went on. `ours` is that of our own log, which the
        branch has, too, if it starts later."""
        is_in_both = ours is not None and ours.position.index < self.start.position.index
        doubts = (*((ours,) if is_in_both else ()), *self.doubts)
        return next((doubt for doubt in reversed(doubts) if doubt and doubt.position.index < index), None)

    def has(self, position: Position) -> bool:
        """Return whether a cycle of this branch ends there, or it begins there."""
        return self.heads.get(position.index) == position.head

    def followed_by(self, other: Branch) -> Branch:
        """Return this branch up to where the other one starts, and then that."""
        if other.start.position.index == self.start.position.index:
            return other
        before = self.until(other.start)
        return replace(
            before,
            end=other.end,
            heads={**before.heads, **other.heads},
            states={**before.states, **other.states},
            claimed={**before.claimed, **other.claimed},
            doubts=before.doubts + other.doubts,
        )

    def preceded_by(self, first: int, heads: Sequence[bytes]) -> Branch:
        """Return the same with places before its start, too: of `heads`, from index `first` on, those that are."""
        before = {index: head for index, head in enumerate(heads, first) if index < self.start.position.index}
        return replace(self, heads=before | dict(self.heads))

    def until(self, place: LogState) -> Branch:
        """Return the branch as far as this one of its places."""
        last = place.position.index
        is_empty = last == self.start.position.index
        return replace(
            self,
            end=place,
            first={} if is_empty else self.first,
            certificates={} if is_empty else self.certificates,
            heads={index: head for index, head in self.heads.items() if index <= last},
            states={index: state for index, state in self.states.items() if index <= last},
            claimed={index: state for index, state in self.claimed.items() if index < last},
            doubts=tuple(other for other in self.doubts if other.position.index < last),
        )

    @property
    def is_certified(self) -> bool:
        """Whether a quorum has signed the entries that it begins with."""
        return all(support.is_certified for _, support in self.first.values())

    def splits_from(self, other: Branch) -> bool:
        """Return whether they have different entries at one place."""
        return self._split(other) is not None

    def is_better_than(self, other: Branch, signed: SignedHeads = NOTHING_SIGNED) -> bool:
        """Return whether a peer that has the other branch is to move to this one. Both start at one place.

        Nobody goes on where an archive has signed something else.
        """
        fragment = self._split(other)
        if fragment is None:
            is_further = self.end.position.index > other.end.position.index
            return is_further and self.contradiction(signed) is None
        ours, theirs = self.standing(signed), other.standing(signed)
        return (ours, *self._weight(fragment)) > (theirs, *other._weight(fragment))

    def standing(self, signed: SignedHeads) -> int:
        """Return the standing that the run's archives give to its own entries."""
        return signed.standing(self.heads, self.start.position.index)

    def contradiction(self, signed: SignedHeads) -> SignedHead | None:
        """Return the head that an archive has signed in place of one of its own, or of one before its start."""
        return signed.contradiction(self.heads)

    def _split(self, other: Branch) -> int | None:
        """Return the first fragment of which they have different entries."""
        both = sorted(self.first.keys() & other.first.keys())
        return next((one for one in both if self.first[one][0] != other.first[one][0]), None)

    def _weight(self, fragment: int) -> tuple[bool, int, int, int]:
        digest, support = self.first[fragment]
        tokens, by_digest = self.end.lineage_tokens, -int.from_bytes(digest, "big")
        if self.start.last is None:
            return support.is_certified, tokens, support.signers, by_digest
        return support.is_certified, support.signers, tokens, by_digest


class Walk:
    """Goes along a branch, entry by entry, and checks who has signed them."""

    def __init__(self, start: LogState, verify: Verify) -> None:
        self.end = self._start = self.whole = start
        """`whole` is the log after the last whole cycle that was passed."""
        self._verify = verify
        self._first: dict[int, tuple[bytes, Support]] = {}
        self._heads = {start.position.index: start.position.head}
        self._states: dict[int, bytes] = {}
        self._claimed: dict[int, bytes] = {}
        self._doubts: list[LogState] = []
        self._founders: int | None = None
        self._certificates: dict[int, Certificate] = {}

    def take(self, told: Header | Outcome, certificate: Certificate | None) -> Header:
        """Go on by one entry, and return it. Raises: LogError where it does not follow, or its certificate is none of
        it."""
        header = header_of(self.end, told)
        log = self.end.of(header.fragment)
        end = log.append(header)
        if log.last is None:
            self._founders = len(header.roster)
        support = UNSUPPORTED if certificate is None else prove(certificate, log, header, self._verify)
        if header.previous == self._start.position.head:
            self._first[header.fragment] = header.digest, support
            if certificate is not None:
                self._certificates[header.fragment] = certificate
        if not support.is_certified:
            self._doubts.append(log)
        if header.state != UNKNOWN_STATE:
            states = self._states if support.is_certified else self._claimed
            states.setdefault(header.index, header.state)
        self.end = end
        self.whole = self.whole if end.made else end
        self._heads[end.position.index] = end.position.head
        return header

    def branch(self) -> Branch:
        """Return what has been passed."""
        return Branch(
            self._start,
            self.end,
            dict(self._first),
            dict(self._heads),
            dict(self._states),
            dict(self._claimed),
            tuple(self._doubts),
            self._founders,
            dict(self._certificates),
        )
