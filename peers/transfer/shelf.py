"""Room for the snapshots that a peer holds: for two, of 8 bytes a parameter each, whatever others ask for.

The first place is that of the newest snapshot from a chosen entry; everybody is given it for whom it is new enough, so
that joiners find the same one at many donors. In the second is one that somebody still fetches: the one before, or one
that was frozen since somebody asked for a newer one. Since identities cost nothing in an open run, no rule counts
who fetches: whatever is in the second place has a time limit, and one that was asked for gives way to a chosen one. So
nobody can keep a peer from having a new snapshot for others.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.transfer.snapshots import Snapshot

LEAVE = 600.0  # seconds for which one may be fetched in the second place, at least
SLOWEST = 500_000  # bytes a second; a joiner whose links carry as much gets all of a snapshot in this time


class Shelf:
    """The snapshots that are held, by the heads of the log that they are at."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[bytes, Snapshot] | None = None
        self._second: tuple[bytes, Snapshot] | None = None
        self._is_asked_for = False
        """Whether the second one is at no chosen entry."""
        self._leaves_at = 0.0

    @property
    def is_empty(self) -> bool:
        return self._first is None

    def held(self, head: bytes) -> Snapshot | None:
        return next((snapshot for at, snapshot in self._all if at == head), None)

    def new_enough(self, least: int) -> Snapshot | None:
        """Return one at index `least` or later; if both are, the first, which other peers have, too. One that another
        has followed is given to nobody else: it may be of a log that was left."""
        given = self._all if self._is_asked_for else self._all[:1]
        return next((snapshot for _, snapshot in given if snapshot.index >= least), None)

    def gives_again(self, head: bytes) -> bool:
        """Whether the snapshot at this head is here. If so, it is given from now on."""
        snapshot = self.held(head)
        if snapshot is not None and self._second is not None and self._second[1] is snapshot:
            self.add_chosen(head, snapshot)
        return snapshot is not None

    def has_room(self, is_chosen: bool) -> bool:
        """Whether another snapshot may be frozen, which `is_chosen` or was asked for. One that is in its way, and that
        nobody fetches any more or has had its time, is dropped."""
        if self._second is None:
            return True
        now, (_, snapshot) = self._clock(), self._second
        if snapshot.is_in_use(now) and now < self._leaves_at and not (is_chosen and self._is_asked_for):
            return False
        self._drop_second()
        return True

    def add_chosen(self, head: bytes, snapshot: Snapshot) -> None:
        """Give this one from now on, and the one before as long as somebody fetches it."""
        before, self._first = self._first, (head, snapshot)
        if before is not None and before[0] != head and before[1].is_in_use(self._clock()):
            self._put_second(*before, is_asked_for=False)
        elif self._second is not None and self._second[0] == head:
            self._second = None

    def add_asked_for(self, head: bytes, snapshot: Snapshot) -> None:
        """Give this one to those for whom the first is too old; without any, to all."""
        if self._first is None:
            self._first = head, snapshot
        else:
            self._put_second(head, snapshot, is_asked_for=True)

    def _drop_second(self) -> None:
        if self._second is not None:
            self._second[1].let_go()
            self._second = None

    def _put_second(self, head: bytes, snapshot: Snapshot, is_asked_for: bool) -> None:
        if self._second is not None and self._second[1] is not snapshot:
            self._drop_second()
        self._second, self._is_asked_for = (head, snapshot), is_asked_for
        self._leaves_at = self._clock() + max(LEAVE, len(snapshot.data) / SLOWEST)

    @property
    def _all(self) -> list[tuple[bytes, Snapshot]]:
        return [one for one in (self._first, self._second) if one is not None]
