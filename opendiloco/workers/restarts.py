"""Whether workers that were lost, or short of memory, are started again, and with how many windows at once."""

from __future__ import annotations

import logging

from opendiloco.errors import DeviceMemoryError
from opendiloco.workers.failures import UnexpectedWorkerError
from opendiloco.workers.process import WorkerDeathError
from peers.errors import DilocoPeerError

logger = logging.getLogger(__name__)

LOST = (WorkerDeathError, UnexpectedWorkerError)
"""How workers fail that may do better when they are started again."""


class WorkersRestartedError(Exception):
    """The request's workers were lost, or short of memory, and new ones wait. They know nothing of it."""


class Restarts:
    """Up to `allowed` restarts in a row; and once, after a device ran out of memory, half the micro-batch instead."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self.left = allowed
        self._has_halved = False

    def begin_anew(self) -> None:
        """All went well: count from none."""
        self.left = self._allowed

    def after(self, error: DilocoPeerError, micro_batch: int, is_starting: bool) -> int | None:
        """Return with how many windows at once to start the next workers; None: with as many as before.

        `error` is how the present ones failed, which put `micro_batch` windows through at once; `is_starting`, that
        they did so while they started.

        Raises: the error, when there is to be no other start.
        """
        is_short = isinstance(error, DeviceMemoryError)
        if is_short and not self._has_halved and micro_batch > 1:
            self._has_halved = True
            half = micro_batch // 2
            logger.warning(
                "%s The workers start again with %d windows at once instead of %d; --micro-batch %d does so at once.",
                *(error.message, half, micro_batch, half),
            )
            return half
        if not self.left or (is_short and not is_starting):
            raise error
        self.left -= 1
        logger.warning("%s The workers start again, without what they did last.", error.message)
        return None
