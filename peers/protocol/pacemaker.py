"""The view timer of one peer at one position, which decides when the next peer leads (R1, R2).

A view decides to which leader the peer sends Ready. It forbids no vote, so a timer that ends too early costs only time.
Everything here is a pure function of the peer's own clock and of what the peer itself hears.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from statistics import median

from peers.log.settings import Timing

MEASURED = 5
"""Number of last rounds whose median duration sets the timer."""
MARGIN = 3.0
"""Multiple of the median round that a leader has before the next one takes over."""
LONGEST = 5.0
"""Longest time for a leader to begin, besides the grace, as a multiple of the manifest's round timeout."""


def death(timing: Timing) -> float:
    """Return the death time in seconds: the longest time after a peer's death until all others know of it."""
    return timing.heartbeat_expiry + 2 * timing.heartbeat


class RoundTimes:
    """The durations of one peer's last rounds, in seconds."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=MEASURED)
        self.allowed: dict[int, float] = {}
        """Time limit in seconds of each fragment's last exchange, as its leader set it."""

    def note(self, seconds: float) -> None:
        """Record the duration of a finished round, in seconds."""
        self._seconds.append(seconds)

    @property
    def usual(self) -> float | None:
        """The median duration of the last rounds, in seconds; None before the first round."""
        return median(self._seconds) if self._seconds else None


class Pacemaker:
    """The view timer of one position. `view` is the peer's current view, and `leader` its leader. `reached`, the
    view in the peer's beats, is the next one once the timer has ended. When a quorum has reached it, `view` follows.

    So all peers change leaders together. A leader that is not heard is skipped at once; if it is heard again, its view
    goes on with the time that was left.
    """

    def __init__(self, timing: Timing, times: RoundTimes, now: float) -> None:
        self.view = self.reached = 0
        self.leader: str | None = None
        self._timing = timing
        self._times = times
        self._now = now
        self._floor = 0  # highest view that a quorum has reached, or in which this peer has voted
        self._stalled = 0  # number of views that timed out after their leader's Begin or Propose
        self._spent: dict[int, float] = {}  # seconds for which the timer has run in each view
        self._begun: dict[int, float] = {}  # time limit in seconds of each exchange, by the view whose leader began it

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
        """Advance the timer to `now`, and update the view and its leader.

        Args:
            leader_of: returns the leader of a view.
            is_there: returns whether a peer is heard, and does not say that it can't lead.
            turns: number of views after which the leaders repeat.
            is_running: true if the timer runs: this peer is ready, and hears a ready quorum that has reached its view.
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
        """Record that this view's leader has begun an exchange with a time limit of `seconds`, or has proposed (then
        `seconds` is 0). The first call in a view restarts the timer (R2)."""
        if self.view not in self._begun:
            self._begun[self.view] = seconds
            self._spent[self.view] = 0.0

    def voted(self, view: int) -> None:
        """Move on to the view in which this peer has voted, if later, because it votes in no earlier view any more."""
        self._rise(view)

    def limit(self, grace: float) -> float:
        """Return the seconds after which this view times out: `grace` and three times the median round, and after the
        leader's Begin also three times the exchange's time limit. R2 has the lower and upper bounds."""
        usual, timing = self._times.usual, self._timing
        needed = timing.round_timeout if usual is None else MARGIN * usual
        seconds = max(grace + min(needed, LONGEST * timing.round_timeout), death(timing))
        if self.view in self._begun:
            allowed = self._begun[self.view]
            seconds += MARGIN * (
                allowed if usual is None else min(allowed, 2.0**self._stalled * max(needed, death(timing)))
            )
        return seconds

    def _rise(self, floor: int) -> None:
        if floor > self._floor:
            self._floor = floor
            for old in [view for view in {*self._spent, *self._begun} if view < floor]:
                self._spent.pop(old, None)
                self._begun.pop(old, None)


def named_by_quorum(views: Mapping[str, int], is_quorum: Callable[[Collection[str]], bool]) -> int:
    """Return the highest view that a quorum has reached; 0 if there is none. `views` has the view of each peer that is
    heard."""
    for view in sorted(set(views.values()), reverse=True):
        if is_quorum([peer for peer, reached in views.items() if reached >= view]):
            return view
    return 0
