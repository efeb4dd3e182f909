"""How many inner steps after a fragment was stored a machine merges what was averaged: its own τ (arXiv 2501.18512,
section 3.3.2)."""

from __future__ import annotations

import math
from collections import deque

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import MachineError
from opendiloco.workers.control import InnerLoopDone
from opendiloco.workers.options import AUTO, parse_overlap

SEEN = 4
"""Trainings whose averages count: a machine that waited once has more time for that long."""


class Overlap:
    """`steps` is for the next training. With "auto" these are as many as averages have lately taken at most, less than
    a cycle has; the run's τ until that is known. Peers that wait for averages, in a run without overlap, do so anyway.
    """

    def __init__(self, config: RunConfig, own: str | None) -> None:
        """`own` is what the machine's owner says, if anything. Raises: MachineError when a run has no such overlap."""
        self.steps = config.streaming.overlap
        self._most = config.training.inner_steps - 1
        self._follows = own == AUTO and self.steps > 0
        self._needed: deque[int] = deque(maxlen=SEEN)
        chosen = None if own is None else parse_overlap(own)
        if chosen is None:
            return
        if self.steps == 0:
            raise MachineError(f"--overlap {own}: in this run peers wait for averages.", "Leave --overlap out.")
        if chosen > self._most:
            raise MachineError(
                f"--overlap {own} is no less than the run's training.inner_steps = {self._most + 1}.",
                f"Choose {self._most} at most, or auto.",
            )
        self.steps = chosen

    def learn(self, done: InnerLoopDone) -> None:
        """Take account of a training."""
        computed = done.seconds - done.average_wait_seconds
        if self._follows and done.inner_steps and computed > 0 and done.longest_average_seconds > 0:
            self._needed.append(math.ceil(done.longest_average_seconds * done.inner_steps / computed))
            self.steps = min(max(self._needed), self._most)
