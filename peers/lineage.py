"""The end of the log, as one peer has seen it: what followed what, and what is lost with a lineage that it leaves."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from peers.log import Header

RECENT_ENTRIES = 64
"""How many of the last headers a peer can name to one that fell behind."""


class Lineage:
    """The last entries of a peer's log. Of those before the snapshot that it began with it knows the digests alone."""

    def __init__(self) -> None:
        self._followers: OrderedDict[bytes, Header] = OrderedDict()  # by the head that they follow
        self._heads: deque[bytes] = deque(maxlen=RECENT_ENTRIES)

    def append(self, header: Header) -> None:
        self._followers[header.previous] = header
        if len(self._followers) > RECENT_ENTRIES:
            self._followers.popitem(last=False)
        self._heads.append(header.digest)

    def after(self, head: bytes) -> Header | None:
        """The entry that followed, if it is a recent one of this lineage."""
        return self._followers.get(head)

    @property
    def entries(self) -> tuple[Header, ...]:
        return tuple(self._followers.values())

    @property
    def before(self) -> tuple[bytes, ...]:
        """Digests of the entries before the last one, oldest first."""
        return tuple(self._heads)[:-1]

    def move(self, last: Header | None, before: Sequence[bytes]) -> tuple[Header, ...]:
        """Go on where a snapshot stands: after `last`, which follows the entries `before`.

        Returns the entries that we leave: ours that are not among those. What lies further back than `before` reaches
        may be in both lineages.
        """
        heads = [*before, last.digest] if last else []
        oldest = last.index + 1 - len(heads) if last else 0
        left = tuple(header for header in self.entries if header.index >= oldest and header.digest not in heads)
        self._followers.clear()
        self._heads = deque(heads, maxlen=RECENT_ENTRIES)
        return left
