"""Failures of a node's work for one of its runs, which do not stop the node's work for the other runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from peers.errors import DilocoPeerError
from peers.values.system import now

logger = logging.getLogger(__name__)

RETRY_FIRST, RETRY_LAST = 5.0, 600.0  # seconds until failed work is retried: after the first failure, and at most
PEER_RETRY_LAST = 8.0
"""Seconds, at most, until a retry after an error of other peers: less than the 10 seconds for which a leaving volunteer
waits until an archive has fetched the newest outer step."""
QUIET = 60.0  # seconds between two log lines about errors of other peers, which the operator cannot repair


class RunFailures:
    """A record of the runs for which a node's work failed, and when to retry it. Repeated failures are logged once."""

    def __init__(self, work: str, peer_errors: tuple[type[Exception], ...] = (), first: float = RETRY_FIRST) -> None:
        """Create a record of failures of the work named `work`. The first retry is due after `first` seconds, and each
        further failure doubles the wait.

        `peer_errors` are errors of other peers. The operator cannot repair them, so they are logged as information, at
        most once a minute for each run.
        """
        self._work = work
        self._peer_errors = peer_errors
        self._first = first
        self._failed: dict[str, tuple[int, float]] = {}  # by run id: count of failures in a row; time of the next try
        self._quiet: dict[str, float] = {}  # by run id: seconds of `now()` until which peers' errors are not logged

    def is_due(self, run: str) -> bool:
        """Return True if the run has no failure, or the pause after its last failure is over."""
        _, retry_at = self._failed.get(run, (0, -math.inf))
        return now() >= retry_at

    @contextmanager
    def caught(self, run: str) -> Iterator[None]:
        """Catch and log any exception of the `with` block, which does the work for one run, and set the time of
        the next try."""
        try:
            yield
        except Exception as error:  # any exception, since a stranger may have made the run
            count, _ = self._failed.get(run, (0, 0.0))
            is_peer_error = isinstance(error, self._peer_errors)
            last = PEER_RETRY_LAST if is_peer_error else RETRY_LAST
            self._failed[run] = count + 1, now() + min(last, self._first * 2**count)
            if count or (is_peer_error and now() < self._quiet.get(run, 0.0)):
                logger.debug("run %s: %s: %r", run, self._work, error)
            elif is_peer_error:
                self._quiet[run] = now() + QUIET
                logger.info("run %s: %s is retried later: %s", run, self._work, error)
            else:
                is_known = isinstance(error, DilocoPeerError | OSError)
                message = "run %s: %s failed, which is tried again later: %s"
                logger.error(message, run, self._work, error, exc_info=None if is_known else error)
        else:
            self.forget(run)

    def forget(self, run: str) -> None:
        self._failed.pop(run, None)
