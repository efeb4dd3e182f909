"""Lineages (recent entries of a peer's log), branches that split off from them, and the better one of two branches.

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
    """The last entries of a peer's log. Entries before the snapshot with which the peer began are missing: only their
    heads are known, from the peers that vouched for the snapshot, or from the log on this machine (`recall`).

    `doubt` is the log before the last cycle that a minority made alone, according to the certificates.
    """

    def __init__(self, log: LogState) -> None:
        self.doubt: LogState | None = None
        self._starts: OrderedDict[bytes, LogState] = OrderedDict({log.position.head: log})
        # the header and certificate of each recent entry, by the head before it and its fragment
        self._followers: OrderedDict[tuple[bytes, int], tuple[Header, Certificate | None]] = OrderedDict()
        self._end = log.position.index
        """Number of cycles in the log, up to the last of these heads."""
        self._heads: deque[bytes] = deque([log.position.head] if log.last else [], maxlen=RECENT_ENTRIES)

    def append(self, header: Header, log: LogState, certificate: Certificate | None = None) -> None:
        """Add an entry; `log` ends after the entry. `certificate` is None if it is unknown which voters have signed."""
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
        """The log after this lineage's last whole cycle."""
        return next(reversed(self._starts.values()))

    def after(self, position: Position) -> tuple[Header, Certificate | None] | None:
        """Return the header and the certificate (None if it is unknown) of the entry at a position. Return None if the
        entry is not among the log's last ones."""
        return self._followers.get((position.head, position.fragment))

    def start(self, head: bytes) -> LogState | None:
        """Return the log that ends with this head if a recent cycle of this lineage begins there; otherwise None."""
        return self._starts.get(head)

    def lacks(self, index: int, head: bytes) -> bool:
        """Return True if the log has fewer than `index` cycles, or another head than `head` after them. Return False if
        it has this head, or if its head there is too old to be known."""
        return index >= self.known_from and self.head_at(index) != head

    @property
    def known_from(self) -> int:
        """The smallest number of cycles after which this lineage's head is known."""
        return self._end - len(self._heads) + 1

    @property
    def is_short(self) -> bool:
        """True if this lineage does not know some earlier heads, and has room for them."""
        return self.known_from > 1 and len(self._heads) < RECENT_ENTRIES

    def recall(self, index: int, heads: Sequence[bytes]) -> None:
        """Add older heads, of consecutive cycles. The last of `heads` is the log's head after `index` cycles: ignore
        all if it is not the oldest head in this lineage."""
        room = RECENT_ENTRIES - len(self._heads)
        leads_here = index == self.known_from and self._heads and heads and heads[-1] == self._heads[0]
        if leads_here and room:
            self._heads.extendleft(reversed(heads[:-1][-room:]))

    def head_at(self, index: int) -> bytes | None:
        """Return this lineage's head after `index` cycles; None if the head is unknown, or not made yet."""
        place = index - self.known_from
        return self._heads[place] if 0 <= place < len(self._heads) else None

    @property
    def entries(self) -> tuple[Header, ...]:
        return tuple(header for header, _ in self._followers.values())

    @property
    def heads(self) -> tuple[bytes, ...]:
        """This lineage's known heads, one after each cycle, oldest first."""
        return tuple(self._heads)

    def move(self, log: LogState, theirs: Sequence[bytes], doubt: LogState | None = None) -> tuple[Header, ...]:
        """Begin anew with a snapshot's log, its newest heads `theirs`, and `doubt`, the log before its last cycle made
        alone, if any. Return the old entries in cycles whose head is not in `theirs`.

        Entries before the oldest of `theirs` are not returned, since both logs may have them.
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
    """A part of a peer's log, to compare with another log: the entries from `start`, which both logs have, to `end`.

    `first` has the entries of the first cycle: by fragment, the digest and the support. `certificates` are theirs, with
    checked signatures. `heads` has the log's head after each cycle, from `start` on, by index. `states` has the digests
    of the state there, as certified entries name them, and `claimed` as uncertified ones do. `doubts` are the logs
    before entries that a minority made. `founders` is the number of founders, if the branch has the run's first entry.
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
        """Return the log before the last entry that a minority made in the first `index` cycles; None if there is none.
        `ours` is the same for this peer's log, and counts only if it ends before the branch starts."""
        is_in_both = ours is not None and ours.position.index < self.start.position.index
        doubts = (*((ours,) if is_in_both else ()), *self.doubts)
        return next((doubt for doubt in reversed(doubts) if doubt and doubt.position.index < index), None)

    def has(self, position: Position) -> bool:
        """Return True if the branch starts at a position, or one of its cycles ends there."""
        return self.heads.get(position.index) == position.head

    def followed_by(self, other: Branch) -> Branch:
        """Return a branch that consists of this branch up to the start of `other`, and of `other`."""
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
        """Return this branch with heads before its start added: those of `heads` that are earlier. `first` is the index
        of the first of `heads`."""
        before = {index: head for index, head in enumerate(heads, first) if index < self.start.position.index}
        return replace(self, heads=before | dict(self.heads))

    def until(self, place: LogState) -> Branch:
        """Return the branch up to `place`, where one of its cycles ends."""
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
        """True if a quorum has signed the entries of the branch's first cycle."""
        return all(support.is_certified for _, support in self.first.values())

    def splits_from(self, other: Branch) -> bool:
        """Return True if the two branches have different entries in their first cycle."""
        return self._split(other) is not None

    def is_better_than(self, other: Branch, signed: SignedHeads = NOTHING_SIGNED) -> bool:
        """Return True if a peer on the branch `other` must move to this branch. Both must have the same start. No peer
        moves to a branch that contradicts an archive's signature."""
        fragment = self._split(other)
        if fragment is None:
            is_further = self.end.position.index > other.end.position.index
            return is_further and self.contradiction(signed) is None
        ours, theirs = self.standing(signed), other.standing(signed)
        return (ours, *self._weight(fragment)) > (theirs, *other._weight(fragment))

    def standing(self, signed: SignedHeads) -> int:
        """Return the highest index after the branch's start at which an archive has signed its head, or 0. Return -1
        (CONTRADICTED) if a signed head differs from the branch's."""
        return signed.standing(self.heads, self.start.position.index)

    def contradiction(self, signed: SignedHeads) -> SignedHead | None:
        """Return the first head signed by an archive that differs from the branch's head at the same index; None if
        there is none."""
        return signed.contradiction(self.heads)

    def _split(self, other: Branch) -> int | None:
        """Return the first fragment whose entries in the first cycle differ between the branches; None if none do."""
        both = sorted(self.first.keys() & other.first.keys())
        return next((one for one in both if self.first[one][0] != other.first[one][0]), None)

    def _weight(self, fragment: int) -> tuple[bool, int, int, int]:
        digest, support = self.first[fragment]
        tokens, by_digest = self.end.lineage_tokens, -int.from_bytes(digest, "big")
        if self.start.last is None:
            return support.is_certified, tokens, support.signers, by_digest
        return support.is_certified, support.signers, tokens, by_digest


class Walk:
    """The checker of a branch: it checks one entry after another, and the signatures in the entry's certificate."""

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
        """Check one entry, add it to the branch, and return its header. Raises: LogError when the entry does not
        follow, or the certificate is not valid for it."""
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
        """Return the branch of all entries checked so far."""
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
