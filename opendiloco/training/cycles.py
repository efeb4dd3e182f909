"""One replica's way through cycles: what Algorithm 2 of arXiv 2501.18512 has it do, and after which inner step.

The worker process and the one-process reference both go this way, so that they do the same at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from opendiloco.shared_memory import Vector

ENDED = object()


class Steps(Protocol):
    """A replica's inner steps in one cycle; see `InnerSteps`."""

    @property
    def planned(self) -> int: ...
    @property
    def planned_tokens(self) -> int: ...
    def every(self) -> Iterator[Any]: ...


class Fragmented(Protocol):
    """Weights in fragments; see `ModelReplica`."""

    def store(self, flat: Vector, fragment: int) -> None: ...
    def merge(self, theta: Vector, fragment: int, alpha: float) -> None: ...


class Cycles:
    """A replica stores each fragment on its way, and goes on with what it has until the average is to be merged.

    Of a replica that takes n inner steps in a cycle, fragment p = 0 … P - 1 is due after ceil((p + 1) n / P) of them,
    the last one after all. It is stored `lead` inner steps before, so that no average is awaited when a cycle ends; but
    when it is due in the cycle that the replica begins with theta, since it has learned nothing before, and in the
    run's last one, after which nothing is awaited. What was averaged is merged into it when the overlap is over, before
    the next inner step, which may be one of the next cycle; and at once where it would be stored once more.
    """

    def __init__(self, replica: Fragmented, fragments: int, alpha: float, lead: int) -> None:
        self._replica = replica
        self._fragments = fragments
        self._alpha = alpha
        self._lead = lead
        self._taken = 0  # inner steps, ever
        self._due: dict[int, int] = {}  # after how many of them a fragment is merged

    def begin(self, inner_steps: Steps, overlap: int, goes_on: bool, is_last: bool) -> None:
        """Begin a cycle: where the replica was when the cycle before ended, or else with theta, when nothing is left to
        be merged. `is_last`: it is the run's last one."""
        if not goes_on:
            self._due.clear()
        self._lead_now = self._lead if goes_on and not is_last else 0
        self._planned, self._steps = inner_steps.planned, inner_steps.every()
        self._overlap, self._began = overlap, self._taken

    def train_up_to(self, fragment: int, theta: Vector) -> bool:
        """Take the inner steps before a fragment is stored, and merge what is due before each. Returns whether the
        replica has come so far: it may have been told to stop."""
        due = -(-(fragment + 1) * self._planned // self._fragments)
        has_come = self._take_up_to(max(due - self._lead_now, 0), theta)
        if has_come and fragment in self._due:
            self._merge(fragment, theta)
        return has_come

    def store(self, local: Vector, fragment: int) -> None:
        """Store a fragment's weights, to be averaged. What comes of it is merged when the overlap is over."""
        self._replica.store(local, fragment)
        self._due[fragment] = self._taken + self._overlap

    def train_to_the_end(self, theta: Vector) -> bool:
        """Take the inner steps that are left when the last fragment is stored. Returns as `train_up_to`."""
        has_come = self._take_up_to(self._planned, theta)
        assert next(self._steps, ENDED) is ENDED, "there are more inner steps than planned"
        return has_come

    def merge_what_is_due(self, theta: Vector) -> None:
        for fragment in [fragment for fragment, due in self._due.items() if due <= self._taken]:
            self._merge(fragment, theta)

    def _take_up_to(self, offset: int, theta: Vector) -> bool:
        while self._taken < self._began + offset:
            self.merge_what_is_due(theta)
            if next(self._steps, ENDED) is ENDED:
                return False
            self._taken += 1
        return True

    def _merge(self, fragment: int, theta: Vector) -> None:
        self._replica.merge(theta, fragment, self._alpha)
        del self._due[fragment]
