"""The end of the log, as one peer has seen it: what followed what, and what is lost with a lineage that it leaves."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from peers.log.header import Header

RECENT_ENTRIES = 64
"""How many of the last headers a peer can name to one that fell behind."""


class Lineage:
    """The last entries of a peer's log. Of those before the snapshot that it began with it knows the digests alone.

    `base` is the entry before them, the last one in that snapshot; None: there was none.
    """

    def __init__(self, base: Header | None = None) -> None:
        self._base = base
        self._followers: OrderedDict[bytes, Header] = OrderedDict()  # by the head that they follow
        self._heads: deque[bytes] = deque(maxlen=RECENT_ENTRIES)

    def append(self, header: Header) -> None:
        self._followers[header.previous] = header
        if len(self._followers) > RECENT_ENTRIES:
            _, self._base = self._followers.popitem(last=False)
        self._heads.append(header.digest)

    def after(self, head: bytes) -> Header | None:
        """The entry that followed, if it is a recent one of this lineage."""
        return self._followers.get(head)

    def entry(self, head: bytes) -> Header | None:
        """The entry with this digest, if it is a recent one of this lineage."""
        recent = (*reversed(self._followers.values()), *([self._base] if self._base else []))
        return next((header for header in recent if header.digest == head), None)

    @property
    def entries(self) -> tuple[Header, ...]:
        return tuple(self._followers.values())

    @property
    def heads(self) -> tuple[bytes, ...]:
        """Digests of the entries, oldest first, the last one included."""
        return tuple(self._heads)

    def move(self, last: Header | None, theirs: Sequence[bytes]) -> tuple[Header, ...]:
        """Go on where a snapshot stands: after `last`, which is in the lineage whose newest entries are `theirs`.

        Returns the entries that we leave: ours that are not among those. What lies further back than they reach may be
        in both lineages.
        """
        heads, place = list(theirs), -1
        if last is not None:
            if last.digest not in heads:
                heads = [last.digest]
            place = heads.index(last.digest)
        oldest = last.index - place if last else 0
        left = tuple(header for header in self.entries if header.index >= oldest and header.digest not in heads)
        self._base = last
        self._followers.clear()
        self._heads = deque(heads[: place + 1], maxlen=RECENT_ENTRIES)
        return left
