"""Lineages: the end of one peer's own log, branches that split off from it, and the better one of two branches.

Without liars no place has two certified entries. So of two branches that split, the one whose first own entry is
certified is the run's, whatever the other one has trained. Otherwise the better branch is the one with more signatures
of the voters before the split, then with more tokens, then with the smaller digest of that entry. The first entry's
voters are its founders, so of two foundings the one with more tokens is better.

Heads that the run's archives have signed come before all of that.
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
"""Number of last headers that a peer can send to one that fell behind."""
UNSUPPORTED = Support(is_certified=False, signers=0)


class Lineage:
    """The last entries of a peer's log. Of entries before the snapshot that it began with, it knows only the heads:
    those that the peers that vouched for the snapshot knew, or that the log on this machine has (`recall`).

    `doubt` is the newest place in it from which a minority went on, according to the certificates.
    """

    def __init__(self, log: LogState) -> None:
        """`log` ends where the lineage begins."""
        self.doubt: LogState | None = None
        self._starts: OrderedDict[bytes, LogState] = OrderedDict({log.position.head: log})
        self._followers: OrderedDict[tuple[bytes, int], tuple[Header, Certificate | None]] = OrderedDict()  # by place
        self._end = log.position.index
        """Number of cycles in the log, up to the last of these heads."""
        self._heads: deque[bytes] = deque([log.position.head] if log.last else [], maxlen=RECENT_ENTRIES)

    def append(self, header: Header, log: LogState, certificate: Certificate | None = None) -> None:
        """Add an entry; `log` ends after it. Without a certificate it is unknown which voters have signed it."""
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
        """Return the entry that was made at a position, and its certificate, if it is a recent one of this lineage."""
        return self._followers.get((position.head, position.fragment))

    def start(self, head: bytes) -> LogState | None:
        """Return the log at the start of a recent cycle of this lineage."""
        return self._starts.get(head)

    def lacks(self, index: int, head: bytes) -> bool:
        """Return whether this lineage has another head after this number of cycles, or does not reach it."""
        return index >= self.known_from and self.head_at(index) != head

    @property
    def known_from(self) -> int:
        """The first number of cycles after which this lineage's head is known."""
        return self._end - len(self._heads) + 1

    @property
    def is_short(self) -> bool:
        """True if there are earlier heads that this lineage could keep but does not know."""
        return self.known_from > 1 and len(self._heads) < RECENT_ENTRIES

    def recall(self, index: int, heads: Sequence[bytes]) -> None:
        """Add the heads before the known ones. They are of consecutive cycles up to `index`, the first one that is
        known. Heads that do not end in the known one are of another lineage, and change nothing."""
        room = RECENT_ENTRIES - len(self._heads)
        leads_here = index == self.known_from and self._heads and heads and heads[-1] == self._heads[0]
        if leads_here and room:
            self._heads.extendleft(reversed(heads[:-1][-room:]))

    def head_at(self, index: int) -> bytes | None:
        """Return this lineage's head after this number of cycles; None if it is too old, or not made yet."""
        place = index - self.known_from
        return self._heads[place] if 0 <= place < len(self._heads) else None

    @property
    def entries(self) -> tuple[Header, ...]:
        return tuple(header for header, _ in self._followers.values())

    @property
    def heads(self) -> tuple[bytes, ...]:
        """The lineage's heads after each cycle, oldest first."""
        return tuple(self._heads)

    def move(self, log: LogState, theirs: Sequence[bytes], doubt: LogState | None = None) -> tuple[Header, ...]:
        """Go on from a snapshot at the end of `log`. The snapshot's lineage has the newest heads `theirs` and the
        newest `doubt`.

        Return the entries that this peer gives up: its own, of cycles that are not among `theirs`. Older entries than
        `theirs` reaches may be in both lineages.
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

    `first` has the entries of the first cycle: by fragment, the digest and the support. `certificates` are theirs, with
    checked signatures. `heads` has the log's head after each cycle, from `start` on, by index. `states` has the digests
    of the state there, as certified entries name them, and `claimed` as uncertified ones do. `doubts` are the places
    from which a minority went on. `founders` is the number of founders, if the branch has the run's first entry.
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
        """Return the last place before this index from which a minority went on. `ours` is that of this peer's own log;
        the branch has it, too, if it starts later."""
        is_in_both = ours is not None and ours.position.index < self.start.position.index
        doubts = (*((ours,) if is_in_both else ()), *self.doubts)
        return next((doubt for doubt in reversed(doubts) if doubt and doubt.position.index < index), None)

    def has(self, position: Position) -> bool:
        """Return whether the branch starts at a position, or a cycle of it ends there."""
        return self.heads.get(position.index) == position.head

    def followed_by(self, other: Branch) -> Branch:
        """Return this branch up to the start of the other one, followed by the other one."""
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
        """Return the branch with earlier places: those of `heads`, which begin at index `first`, that are before its
        start."""
        before = {index: head for index, head in enumerate(heads, first) if index < self.start.position.index}
        return replace(self, heads=before | dict(self.heads))

    def until(self, place: LogState) -> Branch:
        """Return the branch up to one of its places."""
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
        """True if a quorum has signed the entries that it begins with."""
        return all(support.is_certified for _, support in self.first.values())

    def splits_from(self, other: Branch) -> bool:
        """Return whether the branches have different entries at one place."""
        return self._split(other) is not None

    def is_better_than(self, other: Branch, signed: SignedHeads = NOTHING_SIGNED) -> bool:
        """Return whether a peer on the other branch is to move to this one. Both start at one place. No peer moves to a
        branch that contradicts an archive's signature."""
        fragment = self._split(other)
        if fragment is None:
            is_further = self.end.position.index > other.end.position.index
            return is_further and self.contradiction(signed) is None
        ours, theirs = self.standing(signed), other.standing(signed)
        return (ours, *self._weight(fragment)) > (theirs, *other._weight(fragment))

    def standing(self, signed: SignedHeads) -> int:
        """Return the standing that the run's archives give to the branch's own entries."""
        return signed.standing(self.heads, self.start.position.index)

    def contradiction(self, signed: SignedHeads) -> SignedHead | None:
        """Return the head that an archive has signed at an index where the branch has a different one, if any."""
        return signed.contradiction(self.heads)

    def _split(self, other: Branch) -> int | None:
        """Return the first fragment whose entries differ between the branches."""
        both = sorted(self.first.keys() & other.first.keys())
        return next((one for one in both if self.first[one][0] != other.first[one][0]), None)

    def _weight(self, fragment: int) -> tuple[bool, int, int, int]:
        digest, support = self.first[fragment]
        tokens, by_digest = self.end.lineage_tokens, -int.from_bytes(digest, "big")
        if self.start.last is None:
            return support.is_certified, tokens, support.signers, by_digest
        return support.is_certified, support.signers, tokens, by_digest


class Walk:
    """A walk along a branch, entry by entry, that checks their signatures."""

    def __init__(self, start: LogState, verify: Verify) -> None:
        self.end = self._start = self.whole = start
        """`whole` is the log after the last whole cycle of the walk."""
        self._verify = verify
        self._first: dict[int, tuple[bytes, Support]] = {}
        self._heads = {start.position.index: start.position.head}
        self._states: dict[int, bytes] = {}
        self._claimed: dict[int, bytes] = {}
        self._doubts: list[LogState] = []
        self._founders: int | None = None
        self._certificates: dict[int, Certificate] = {}

    def take(self, content: Header | Outcome, certificate: Certificate | None) -> Header:
        """Check and add one entry, and return its header. Raises: LogError when it does not follow, or its certificate
        is not of it."""
        header = header_of(self.end, content)
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
        """Return the branch that the walk has passed."""
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
