"""Failures of single runs at a node that serves many: none of them may end what the node does for the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from peers.errors import DilocoPeerError
from peers.values.system import now

logger = logging.getLogger(__name__)

RETRY_FIRST, RETRY_LAST = 5.0, 600.0  # seconds


class RunFailures:
    """The runs for which a piece of work has failed. Each failure is logged once, until the work succeeds again."""

    def __init__(self, work: str) -> None:
        self._work = work
        self._failed: dict[str, tuple[int, float]] = {}  # how often in a row, and when it may be tried again

    def is_due(self, run: str) -> bool:
        """Return whether the work may be tried: after each failure later than after the one before."""
        _, retry_at = self._failed.get(run, (0, -math.inf))
        return now() >= retry_at

    @contextmanager
    def caught(self, run: str) -> Iterator[None]:
        """Catch and log what the work for one run raises."""
        try:
            yield
        except Exception as error:  # of any kind: a stranger may have made the run
            count, _ = self._failed.get(run, (0, 0.0))
            self._failed[run] = count + 1, now() + min(RETRY_LAST, RETRY_FIRST * 2**count)
            if count:
                logger.debug("run %s: %s: %r", run, self._work, error)
            else:
                is_known = isinstance(error, DilocoPeerError)
                message = "run %s: %s failed, which is tried again later: %s"
                logger.error(message, run, self._work, error, exc_info=None if is_known else error)
        else:
            self.forget(run)

    def forget(self, run: str) -> None:
        self._failed.pop(run, None)
