"""The pace of a swarm: how many inner steps each peer makes so that all are done together, and how long those who are
ready wait for the others. The planner forecasts with the same functions."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from peers.log.settings import RunSettings, Timing

GRACE_SHARE = 0.25
"""Of the training, that most peers wait at most for the others where `grace` is longer."""
LATE_SHARE = 0.05
"""Of the training, that they wait where `grace` is shorter: measured speeds are off by some percent."""
EQUALLY_FAST = 0.8
"""Of the fastest peer's speed: a peer that comes close trains as much as it, if it is in time with that."""


@dataclass(frozen=True)
class Pace:
    """What the manifest says of it: a whole lease's inner steps and tokens, the smallest share of it, and times."""

    inner_steps: int
    lease_tokens: int
    smallest_share: float
    timing: Timing
    staleness: int = 1
    fragments: int = 1
    contributions: float | None = None
    """Of those at work, the share whose contributions are enough; None: all are waited for until the grace is over."""
    overlap: int = 0

    @classmethod
    def of(cls, settings: RunSettings) -> Pace:
        """Return the pace of a run."""
        tokens = settings.samples_per_lease * settings.tokens_per_sample
        return cls(
            settings.inner_steps,
            tokens,
            settings.smallest_share,
            settings.timing,
            settings.staleness,
            settings.fragments,
            settings.contributions,
            settings.overlap,
        )

    @property
    def least_steps(self) -> int:
        """Return the inner steps of the smallest lease: the manifest bounds what claims of speed do to others."""
        return math.ceil(self.smallest_share * self.inner_steps)

    def steps(self, speed: float, fastest: float) -> int:
        """Return the inner steps that a peer makes while the fastest makes all, given tokens a second of both."""
        if speed >= EQUALLY_FAST * fastest and self._is_in_time(speed, fastest):
            return self.inner_steps
        own = speed / fastest * self.inner_steps
        if self.contributions is not None and own < self.least_steps:
            return self._steps_of_late(own)
        return min(self.inner_steps, max(math.ceil(own), self.least_steps))

    def _steps_of_late(self, own: float) -> int:
        """Return what fills as many whole cycles as the smallest lease needs, given how many inner steps one has room
        for, but for what speeds are off by: whoever is too late for an entry would idle until the next one, or lose its
        lease."""
        sure = (1 - LATE_SHARE) * own
        cycles = math.ceil(self.least_steps / sure)
        return min(self.inner_steps, int(cycles * sure) if cycles <= 1 + self.staleness else self.least_steps)

    def _is_in_time(self, speed: float, fastest: float) -> bool:
        """Whether a peer makes all inner steps before half of the fastest peer's grace is over. The other half is for
        what speeds are off by."""
        if speed >= fastest:
            return True
        training = self.lease_tokens / fastest
        patience = self.grace(training) if self.contributions is None else self.slack(training)
        return self.lease_tokens / speed - training <= patience / 2

    def grace(self, training: float) -> float:
        """Return the seconds for which a peer whose training took so many waits for those who still train.

        It is a part of the training, since to be late is not to be lost, and never longer than the partition grace.
        """
        return max(self.shortest_grace(training), min(LATE_SHARE * training, self.timing.partition_grace))

    def shortest_grace(self, training: float) -> float:
        """Return the same where all who still train have been late again and again: what speeds are off by is not what
        keeps them."""
        return min(self.timing.grace, max(GRACE_SHARE * training, 3 * self.timing.heartbeat))

    def slack(self, training: float, round: float = 0.0) -> float:
        """Return the seconds for which an asynchronous run with enough contributions waits for those who come soon.

        While workers go on for the overlap's inner steps, but for what a round takes of that, waiting costs nobody
        anything. It lasts for what speeds are off by in any case, since whoever comes a moment late would idle until
        the next entry; and for a heartbeat, since nobody knows better how far the others are.
        """
        free = self.overlap / self.inner_steps * training - round
        least = max(LATE_SHARE * training / self.fragments, self.timing.heartbeat)
        return min(self.grace(training), max(free, least))


class ReadyTimes:
    """When peers were ready first, at one position."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._times)

    def note(self, peer: str, now: float) -> None:
        """Note that a peer is ready."""
        self._times.setdefault(peer, now)

    def restart(self, now: float) -> None:
        """Let time begin anew for all who are ready."""
        self._times = dict.fromkeys(self._times, now)

    @property
    def first(self) -> float:
        """Return since when anybody is ready; infinity if nobody is."""
        return min(self._times.values(), default=math.inf)

    def of_all(self, peers: Set[str]) -> float:
        """Return since when all of these have been ready; minus infinity if there are none."""
        return max((self._times[peer] for peer in peers & self._times.keys()), default=-math.inf)

    def of_share(self, share: float, able: Set[str], ready: Set[str]) -> float:
        """Return since when at least this share of those who are `able` to contribute are `ready`; infinity if they are
        not."""
        times = sorted(self._times[peer] for peer in self._times.keys() & ready)
        enough = max(1, math.ceil(share * len(able)))
        return times[enough - 1] if len(times) >= enough else math.inf

    def of_most(self, voters: Set[str], ready: Set[str]) -> float:
        """Return since when more than half of these voters are ready, or anybody where there are none; infinity if they
        are not. Those are `ready` that have not taken it back.

        One Ready begins no grace: a peer that was late for the entry before is ready as soon as this one is gathered
        for, and would use up the time of all others.
        """
        if not voters:
            return self.first
        times = sorted(self._times[peer] for peer in voters & self._times.keys() & ready)
        return times[len(voters) // 2] if 2 * len(times) > len(voters) else math.inf
