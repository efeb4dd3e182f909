"""The view timer of one peer at one position: who leads there, and when the next one does (R1, R2).

A view says to whom the peer says Ready. It forbids no vote, so a timer that ends too early costs time and nothing else.
Everything here is a pure function of the peer's own clock and of what it hears; nobody else's word counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from statistics import median

from peers.log.settings import Timing

MEASURED = 5
"""Rounds whose median the timer rests on."""
MARGIN = 3.0
"""Times the usual round, that a leader has before the next one takes over."""
LONGEST = 5.0
"""Times the manifest's time limit, that a leader has to begin at most, besides the grace."""


def death(timing: Timing) -> float:
    """Return the seconds until a peer that died is known to be dead, and a message about it has arrived."""
    return timing.heartbeat_expiry + 2 * timing.heartbeat


class RoundTimes:
    """The seconds that the last rounds of one peer took."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=MEASURED)
        self.allowed: dict[int, float] = {}
        """The seconds that each fragment's last exchange might take, as its leader said."""

    def note(self, seconds: float) -> None:
        """Note how long a round took."""
        self._seconds.append(seconds)

    @property
    def usual(self) -> float | None:
        """The median; None before the first round."""
        return median(self._seconds) if self._seconds else None


class Pacemaker:
    """`view` is the view that the peer is in, and `leader` leads it. `reached` is what it tells others.

    The timer raises `reached` alone: the peer goes on with the leader that it has until a quorum has reached a later
    view, so that all turn to the next leader together. A leader that is not heard is passed over at once; if it is
    heard again, its view goes on with the time that is left.
    """

    def __init__(self, timing: Timing, times: RoundTimes, now: float) -> None:
        self.view = self.reached = 0
        self.leader: str | None = None
        self._timing = timing
        self._times = times
        self._now = now
        self._floor = 0  # the highest view that a quorum has named, or that the peer has voted in
        self._stalled = 0  # views that ended after their leader had begun
        self._spent: dict[int, float] = {}  # seconds for which the timer has run in each view
        self._begun: dict[int, float] = {}  # the seconds that leaders who have begun gave their exchange

    def look(
        self,
        now: float,
        leader_of: Callable[[int], str | None],
        is_there: Callable[[str], bool],
        turns: int,
        is_running: bool = False,
        grace: float = 0.0,
        named: int = 0,
    ) -> None:
        """Let time pass, and find the view and its leader.

        Args:
            leader_of: tells who leads a view.
            is_there: tells whether a peer is heard, and does not say that it can't lead.
            turns: in how many views all have led that may.
            is_running: whether the timer runs: this peer is ready, and hears a quorum ready that has reached its view.
            grace: seconds for which a leader waits for members that are late.
            named: the highest view that a quorum has reached (`named_by_quorum`).
        """
        passed, self._now = min(now - self._now, self._timing.heartbeat_expiry), now
        if is_running:
            self._spent[self.view] = self._spent.get(self.view, 0.0) + passed
            if self.reached <= self.view and self._spent[self.view] > self.limit(grace):
                self._stalled += self.view in self._begun
                self.reached = self.view + 1
        self._rise(named)
        self.view = self._floor
        for view in range(self._floor, self._floor + max(1, turns)):
            leader = leader_of(view)
            if leader is not None and is_there(leader):
                self.view = view
                break
        self.leader = leader_of(self.view)
        self.reached = max(self.reached, self.view)

    def begun(self, seconds: float) -> None:
        """Note that the leader of this view has begun an exchange of so many seconds, or proposes without one (0): the
        timer starts again, once (R2)."""
        if self.view not in self._begun:
            self._begun[self.view] = seconds
            self._spent[self.view] = 0.0

    def voted(self, view: int) -> None:
        """Note a vote in a view: no lower one can come to anything with this peer."""
        self._rise(view)

    def limit(self, grace: float) -> float:
        """Return the seconds that this view may last until its leader begins, or after that. The exchange gets as much
        of its own time as rounds usually need, and twice as much after each view that was too short."""
        usual, timing = self._times.usual, self._timing
        needed = timing.round_timeout if usual is None else MARGIN * usual
        seconds = max(grace + min(needed, LONGEST * timing.round_timeout), death(timing))
        if self.view in self._begun:
            told = self._begun[self.view]
            seconds += MARGIN * (told if usual is None else min(told, 2.0**self._stalled * max(needed, death(timing))))
        return seconds

    def _rise(self, floor: int) -> None:
        if floor > self._floor:
            self._floor = floor
            for old in [view for view in {*self._spent, *self._begun} if view < floor]:
                self._spent.pop(old, None)
                self._begun.pop(old, None)


def named_by_quorum(views: Mapping[str, int], is_quorum: Callable[[Collection[str]], bool]) -> int:
    """Return the highest view that a quorum has reached, given the views of peers that are heard; 0: none."""
    for view in sorted(set(views.values()), reverse=True):
        if is_quorum([peer for peer, reached in views.items() if reached >= view]):
            return view
    return 0
