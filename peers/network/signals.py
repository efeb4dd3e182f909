"""Blocking of the signals that ask a peer to leave, while it starts a child process that must not receive them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Holds(threading.local):
    """The number of `with signals_held_back()` blocks that one thread is in, and its signal mask before them.

    The bodies overlap when two processes are started at once. The mask is restored after the last body.
    """

    count = 0
    before: Collection[signal.Signals | int] = ()


_holds = _Holds()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block LEAVE_SIGNALS during the body, so that processes started in it inherit the block. This process receives
    the signals after the body."""
    if _holds.count == 0:
        _holds.before = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)
    _holds.count += 1
    try:
        yield
    finally:
        _holds.count -= 1
        if _holds.count == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, _holds.before)
