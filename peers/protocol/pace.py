"""The pace of a swarm (R7, R14, R16): how many inner steps each peer makes, so that all finish together, and how long
ready peers wait for others. The planner uses the same functions. Speeds are in tokens a second."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_high

from peers.log.settings import RunSettings, Timing

GRACE_SHARE = 0.25
"""Longest grace as a share of the training time, unless the manifest's grace is shorter."""
LATE_SHARE = 0.05
"""Shortest grace as a share of the training time: measured speeds are off by some percent."""
EQUALLY_FAST = 0.8
"""Share of the fastest peer's speed above which a peer makes all inner steps, if it is done within half of the
grace."""


@dataclass(frozen=True)
class Pace:
    """The manifest's settings that determine the pace. `lease_tokens` and `inner_steps` are those of a whole lease;
    `smallest_share` is the smallest lease as a share of a whole one. An asynchronous run begins a round with the share
    `contributions` of the possible contributions; None in a synchronous run."""

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
        """Return a Pace with those of a run's settings that determine the inner steps and the leader's waiting time."""
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

    # Amount of training ---------------------------------------------------------------------------------------
    @property
    def least_steps(self) -> int:
        """The number of inner steps of the smallest lease. No peer trains fewer, whatever speeds other peers claim."""
        return math.ceil(self.smallest_share * self.inner_steps)

    def steps(self, speed: float, fastest: float) -> int:
        """Return the inner steps that a peer of this `speed` makes while the `fastest` peer makes all of its own."""
        if speed >= EQUALLY_FAST * fastest and self._is_in_time(speed, fastest):
            return self.inner_steps
        own = speed / fastest * self.inner_steps
        if self.contributions is not None and own < self.least_steps:
            return self._steps_of_late(own)
        return min(self.inner_steps, max(math.ceil(own), self.least_steps))

    def _steps_of_late(self, own: float) -> int:
        """Return the inner steps of an asynchronous peer that needs more than one cycle for the smallest lease: that
        lease's steps, rounded up to fill whole cycles, so that the peer does not idle. `own` are the steps that fit
        into one cycle."""
        sure = (1 - LATE_SHARE) * own
        # This check comes before the division: other peers may claim any speed, so the quotient may be infinite.
        if self.least_steps > (1 + self.staleness) * sure:
            return min(self.inner_steps, self.least_steps)
        return min(self.inner_steps, int(math.ceil(self.least_steps / sure) * sure))

    def _is_in_time(self, speed: float, fastest: float) -> bool:
        """Return True if a peer finishes all inner steps after the fastest peer by at most half of the leader's waiting
        time, which is `grace`, in an asynchronous run `slack`. The other half allows for errors in the speeds."""
        if speed >= fastest:
            return True
        training = self.lease_tokens / fastest
        patience = self.grace(training) if self.contributions is None else self.slack(training)
        return self.lease_tokens / speed - training <= patience / 2

    def steps_beside(self, speed: float, other_speeds: Collection[float]) -> int:
        """Return the number of inner steps that a peer makes while the fastest other one makes all of a lease's; all of
        them if its own `speed` is unknown (0). Speeds are in tokens a second."""
        return self.steps(speed, self._fastest(speed, other_speeds)) if speed else self.inner_steps

    def steps_of_grant(self, steps: int, speed: float, other_speeds: Collection[float]) -> int:
        """Return the number of inner steps that a peer makes of a grant's `steps`: as many as it can finish together
        with the others; in an asynchronous run, `steps` times its speed as a share of the fastest peer's."""
        fastest = self._fastest(speed, other_speeds)
        if self.contributions is None or not speed or speed >= fastest:
            return min(steps, self.steps_beside(speed, other_speeds))
        return max(1, int(steps * speed / fastest))

    def _fastest(self, speed: float, other_speeds: Collection[float]) -> float:
        """Return the highest of the other speeds, but at most the median of all speeds times the ratio of a whole lease
        to the smallest one. So a minority of false speeds cannot make all peers train almost nothing."""
        return min(max(other_speeds, default=0.0), median_high([speed, *other_speeds]) / self.smallest_share)

    def is_too_slow(self, speed: float, median_speed: float) -> bool:
        """Return True if a peer loses its lease before it has trained the smallest one, because peers of the
        `median_speed` finish 1 + `staleness` whole leases in less time. Speeds are in tokens a second."""
        return 0 < speed * (1 + self.staleness) < self.least_steps / self.inner_steps * median_speed

    def overlap_seconds(self, speed: float) -> float:
        """Return the seconds that the overlap's inner steps take at this speed, in tokens a second; 0 without overlap,
        or if the speed is unknown (0)."""
        return self.overlap / self.inner_steps * self.lease_tokens / speed if speed else 0.0

    # Waiting time ----------------------------------------------------------------------------------------------
    def grace(self, training: float | None) -> float:
        """Return the seconds for which ready peers wait for the others. `training` is the duration of the last training
        in seconds; None if unknown."""
        if training is None:
            return self.timing.grace
        usual = min(self.timing.grace, max(GRACE_SHARE * training, 3 * self.timing.heartbeat))
        return max(usual, min(LATE_SHARE * training, self.timing.partition_grace))

    def slack(self, training_seconds: float | None, round_seconds: float = 0.0, median_speed: float = 0.0) -> float:
        """Return the seconds for which an asynchronous run that has enough contributions waits for further peers: the
        time of the overlap's inner steps less `round_seconds`, and at most the grace; the grace if `training_seconds`,
        the last training's duration, is None (unknown).

        Waiting costs nothing during the overlap. The slack is at least the error of the speeds and a heartbeat, because
        a peer that is a moment late idles until the next entry. The training may span several cycles, so it counts at
        most as long as a whole lease takes at `median_speed`, in tokens a second (0: unknown).
        """
        if training_seconds is None:
            return self.grace(None)
        training = training_seconds
        if median_speed:
            training = min(training, self.lease_tokens / median_speed)
        free = self.overlap / self.inner_steps * training - round_seconds
        least = max(LATE_SHARE * training / self.fragments, self.timing.heartbeat)
        return min(self.grace(training), max(free, least))
