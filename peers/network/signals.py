"""The signals that ask a peer to leave, held back while it starts a child process that must not get them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Holds(threading.local):
    """Holds of one thread (a signal mask belongs to a thread). They overlap when it starts two processes at once.

    The mask from before the first hold is restored after the last one ends.
    """

    count = 0
    before: Collection[signal.Signals | int] = ()


_holds = _Holds()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block the signals during the body, so that processes started there inherit the block. We get them afterwards."""
    if _holds.count == 0:
        _holds.before = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)
    _holds.count += 1
    try:
        yield
    finally:
        _holds.count -= 1
        if _holds.count == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, _holds.before)
