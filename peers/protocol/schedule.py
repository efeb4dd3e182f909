"""The one schedule of time limits: what leaders and members wait for, so that no limit contradicts another.

From short to long: a death is noticed; an attempt that stalls is gone on with without those who hold it up; an attempt
ends; its members give up on their leader; a leader that never begins is given up; those who seem at work for ever are
not waited for any more. Each is longer than the ones before it can make somebody wait, so that one peer that stalls on
purpose never looks like a partition. Seconds, all of them, from the manifest's timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peers.log.settings import Timing

MARGIN = 3.0
"""How much longer than foreseen an attempt may take before those who hold it up are left out."""
LONGEST = 5.0
"""Times the manifest's time limit, that an attempt may take: rates are what peers say of themselves."""
STALLED = 0.25
"""Of the manifest's time limit, for which nothing may move in an attempt; and what a link gets that nobody measured."""
HOPELESS = 10.0
"""Partition graces, at least, after which those who still seem to be at work are not waited for."""


@dataclass(frozen=True)
class Schedule:
    """The limits that follow from a manifest's timing."""

    timing: Timing

    @property
    def death(self) -> float:
        """Until a peer that died is known to be dead, and a message about it has arrived."""
        return self.timing.heartbeat_expiry + 2 * self.timing.heartbeat

    @property
    def stall(self) -> float:
        """For how long nothing may move in an attempt."""
        return max(self.death, STALLED * self.timing.round_timeout)

    @property
    def longest_attempt(self) -> float:
        return LONGEST * self.timing.round_timeout

    def attempt(self, foreseen: Iterable[float]) -> float:
        """The limit of an attempt, given how long each member's link is busy in it; 0: nobody knows.

        A link that nobody has measured yet gets a short time for the first time; after that its rate is known.
        """
        links = list(foreseen)
        if not any(links):
            return self.timing.round_timeout
        least = self.death if all(links) else self.stall
        return min(max(MARGIN * max(links), least), self.longest_attempt)

    def given_up(self, attempt: float) -> float:
        """When members give up on the leader of an attempt with this limit: it ends the attempt before that."""
        return min(attempt, self.longest_attempt) + self.death

    @property
    def hopeless(self) -> float:
        """For how long a leader waits for peers that are alive and at work, before it goes on without a majority."""
        return max(HOPELESS * self.timing.partition_grace, 2 * self.given_up(self.longest_attempt))

    def begin(self, everyone_is_ready: bool) -> float:
        """For how long members wait for their leader to begin."""
        longest = self.timing.partition_grace if everyone_is_ready else self.hopeless
        return self.timing.grace + longest + self.death

    def progress(self, training: float, liars: int) -> float:
        """Within how many seconds an honest majority makes an entry, whatever so many liars do.

        One that leads costs at most the time for which members wait for it to begin, most of them being ready, and that
        after which they give up on its attempts; they distrust it for longer than the next one needs. One that does not
        lead costs an attempt. Then somebody honest leads an attempt without liars, after a training and its grace.
        """
        each = self.begin(everyone_is_ready=True) + self.given_up(self.longest_attempt)
        return training + self.timing.grace + (liars + 1) * each

    @property
    def bar(self) -> float:
        """For how long a peer that held an attempt up is left out the first time."""
        return self.timing.round_timeout

    @property
    def distrust(self) -> float:
        """For how long a peer that failed as leader or donor is not asked again: meanwhile another one can gather all
        and lead an attempt, though not all gave up on the first one at the same time."""
        return 2 * self.timing.round_timeout + self.timing.grace + self.death
