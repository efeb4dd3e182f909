"""The end of the log, as one peer has seen it: what followed what, and what is lost with a lineage that it leaves."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from peers.log.certificate import Certificate, weigh
from peers.log.header import Header, Position
from peers.log.state import LogState

RECENT_ENTRIES = 64
"""How many of the last headers a peer can name to one that fell behind."""


class Lineage:
    """The last entries of a peer's log. Of those before the snapshot that it began with it knows the heads alone, as
    far as whoever vouched for the snapshot knew them, or the log that is kept here has them (`recall`).

    `doubt` is the newest place in it from which too few of its roster went on, as certificates say.
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
        """The entry is made; `log` is where that leads. Without a certificate nobody knows who has signed it."""
        before = self._starts.get(header.previous)
        if certificate and before and not weigh(certificate, before, header).is_certified:
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
        """The entry that was made there, if it is a recent one of this lineage, and what proves it."""
        return self._followers.get((position.head, position.fragment))

    def start(self, head: bytes) -> LogState | None:
        """The log as it was when a recent cycle of this lineage began."""
        return self._starts.get(head)

    def lacks(self, index: int, head: bytes) -> bool:
        """Whether this lineage led to another place after so many cycles, or has not come so far."""
        is_known = index >= self.known_from  # else it is too long ago
        return is_known and self.head_at(index) != head

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
        """What named this lineage after so many cycles; None: too long ago to be known, or not made yet."""
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
