"""The pace of a swarm: the inner steps that each peer makes so that all are done together, and how long the ready ones
wait for the others (R7, R14, R16). The planner forecasts with the same functions. Speeds are in tokens a second."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_high

from peers.log.settings import RunSettings, Timing

GRACE_SHARE = 0.25
"""Longest grace as a share of the training, where the manifest's is longer."""
LATE_SHARE = 0.05
"""Shortest grace as a share of the training: measured speeds are off by some percent."""
EQUALLY_FAST = 0.8
"""Share of the fastest peer's speed above which a peer trains as much, if it is done within half of the grace."""


@dataclass(frozen=True)
class Pace:
    """What the manifest says about pace. `lease_tokens` and `inner_steps` are of a whole lease, which
    `smallest_share` is a share of. `contributions` is the share of contributions that is enough in an asynchronous
    run; None: the run is synchronous."""

    inner_steps: int
    lease_tokens: int
    smallest_share: float
    timing: Timing
    staleness: int = 1
    fragments: int = 1
    contributions: float | None = None
    overlap: int = 0

    @classmethod
    def of(cls, settings: RunSettings) -> Pace:
        """Return the pace of a run."""
        return cls(
            settings.inner_steps,
            settings.samples_per_lease * settings.tokens_per_sample,
            settings.smallest_share,
            settings.timing,
            settings.staleness,
            settings.fragments,
            settings.contributions,
            settings.overlap,
        )

    # How much to train ------------------------------------------------------------------------------------------
    @property
    def least_steps(self) -> int:
        """Return the inner steps of the smallest lease. It bounds what false speeds do to others."""
        return math.ceil(self.smallest_share * self.inner_steps)

    def steps(self, speed: float, fastest: float) -> int:
        """Return the inner steps that a peer makes while the fastest makes all."""
        if speed >= EQUALLY_FAST * fastest and self._is_in_time(speed, fastest):
            return self.inner_steps
        own = speed / fastest * self.inner_steps
        if self.contributions is not None and own < self.least_steps:
            return self._steps_of_late(own)
        return min(self.inner_steps, max(math.ceil(own), self.least_steps))

    def _steps_of_late(self, own: float) -> int:
        """Return the inner steps that fill as many whole cycles as the smallest lease needs, given those that fit into
        one. A peer that just misses an entry would idle until the next one, or lose its lease."""
        sure = (1 - LATE_SHARE) * own
        if self.least_steps > (1 + self.staleness) * sure:  # whatever others claim: the quotient may be infinite
            return min(self.inner_steps, self.least_steps)
        return min(self.inner_steps, int(math.ceil(self.least_steps / sure) * sure))

    def _is_in_time(self, speed: float, fastest: float) -> bool:
        """Return whether a peer makes all inner steps within half of the fastest peer's grace. The other half is for
        errors in the speeds."""
        if speed >= fastest:
            return True
        training = self.lease_tokens / fastest
        patience = self.grace(training) if self.contributions is None else self.slack(training)
        return self.lease_tokens / speed - training <= patience / 2

    def steps_beside(self, speed: float, others: Collection[float]) -> int:
        """Return the inner steps of a lease that a peer finishes together with others; all if its speed is unknown."""
        return self.steps(speed, self._fastest(speed, others)) if speed else self.inner_steps

    def steps_of_grant(self, steps: int, speed: float, others: Collection[float]) -> int:
        """Return the inner steps that a peer makes of a grant. The pool keeps no grants, and an asynchronous run does
        not wait: there it makes those for which it has time until the fastest peer has made all."""
        fastest = self._fastest(speed, others)
        if self.contributions is None or not speed or speed >= fastest:
            return min(steps, self.steps_beside(speed, others))
        return max(1, int(steps * speed / fastest))

    def _fastest(self, speed: float, others: Collection[float]) -> float:
        """Return the highest of others' speeds, as they claim; but no more than a usual peer keeps up with by the
        smallest lease, so that a minority of liars can't make all others train next to nothing."""
        return min(max(others, default=0.0), median_high([speed, *others]) / self.smallest_share)

    def is_too_slow(self, speed: float, usual: float) -> bool:
        """Return whether a peer loses its lease before it has trained the smallest one, given most others' speed."""
        return 0 < speed * (1 + self.staleness) < self.least_steps / self.inner_steps * usual

    def overlap_seconds(self, speed: float) -> float:
        """Return the seconds that the overlap's inner steps take at a speed; 0 where either is none, or not known."""
        return self.overlap / self.inner_steps * self.lease_tokens / speed if speed else 0.0

    # How long to wait -------------------------------------------------------------------------------------------
    def grace(self, training: float | None) -> float:
        """Return the seconds for which ready peers wait for the others, given what training took; None: unknown."""
        if training is None:
            return self.timing.grace
        usual = min(self.timing.grace, max(GRACE_SHARE * training, 3 * self.timing.heartbeat))
        return max(usual, min(LATE_SHARE * training, self.timing.partition_grace))

    def slack(self, training: float | None, round: float = 0.0, usual: float = 0.0) -> float:
        """Return the seconds for which an asynchronous run with enough contributions waits for those that come soon.

        Waiting costs nothing while workers make the overlap's inner steps, less what a round takes of that. It lasts
        at least for the error of the speeds and for a heartbeat, since a peer that is a moment late idles until the
        next entry. `training` may be of several cycles, so no more counts than most others need at their `usual` speed.
        """
        if training is None:
            return self.grace(None)
        if usual:
            training = min(training, self.lease_tokens / usual)
        free = self.overlap / self.inner_steps * training - round
        least = max(LATE_SHARE * training / self.fragments, self.timing.heartbeat)
        return min(self.grace(training), max(free, least))
