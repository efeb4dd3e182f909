"""A worker's start as its peer process tells of it: what it is busy with, how far it has come, and how long yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opendiloco.config.run_config import TrainingSection

logger = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""Between two lines about the same stage."""


class StartUp:
    """Logs each stage when it begins, and every few seconds how far it has come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._began = self._said = 0.0

    def heard(self, stage: str, share: float | None) -> None:
        """The worker is at this stage, of which so much is done."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._began, self._said = stage, now, now
            logger.info("%s", stage)
        elif now - self._said >= QUIET_SECONDS:
            self._said = now
            logger.info("%s: %s", stage, _how_far(share, now - self._began))


def tell_micro_batch(training: TrainingSection, workers: int, micro_batch: int) -> None:
    """Log how many windows go through the model at once, where that is not each worker's whole piece of a batch."""
    piece = -(-training.batch_size // workers)
    if micro_batch < piece:
        wish = "as the run recommends at most" if micro_batch == training.micro_batch else "for want of memory"
        logger.info(
            "each worker puts %d of its %d windows through the model at once, %s; --micro-batch says otherwise",
            *(micro_batch, piece, wish),
        )


def _how_far(share: float | None, seconds: float) -> str:
    if not share:
        return f"for {seconds:.0f} s"
    left = seconds * (1 - share) / share
    return f"{share:.0%} after {seconds:.0f} s, about {left:.0f} s left"
