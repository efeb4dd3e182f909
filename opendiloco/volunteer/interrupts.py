"""Handlers of Ctrl-C and SIGTERM: the first signal asks the program to leave politely, the second one cancels it.
SIGHUP, which a closing terminal sends, only asks.

In a researcher's own program, that program and Python handle Ctrl-C; this module only makes sure that it is not lost,
and that SIGTERM acts like it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Self, TypeVar

from peers.network.signals import LEAVE_SIGNALS
from peers.values.system import now

REPEAT_SECONDS = 1.0
"""A SIGTERM that comes fewer seconds after another signal repeats it: GNU timeout signals its child, then its group."""

T = TypeVar("T")


class Interrupts:
    """A handler of the signals that end this process, such as that of Ctrl-C. The first signal calls `polite`, which
    makes the main task end by itself; the second signal cancels the task.

    If `polite` is not set, the first signal cancels the task. Signals after the second do nothing, so that the task can
    clean up. Each signal first calls `heard`, if this is set. A hang-up after another signal does nothing either: a
    closing terminal sends SIGHUP twice (once through its shell), and systemd may send it after SIGTERM. Nor does a
    SIGTERM within `REPEAT_SECONDS` of the signal before.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.polite: Callable[[], None] | None = None
        self.heard: Callable[[], None] | None = None
        self.count = 0
        self._last = 0.0  # the time of the last signal that counted
        self._task = task

    def __call__(self, number: signal.Signals) -> None:
        at = now()
        is_repeated = number == signal.SIGTERM and at - self._last < REPEAT_SECONDS
        if self.count > 0 and (number == signal.SIGHUP or is_repeated):
            return
        self.count, self._last = self.count + 1, at
        if self.heard is not None:
            self.heard()
        if self.count == 1 and self.polite is not None:
            self.polite()
        elif self.count <= 2:
            self._task.cancel()


class RememberedInterrupt:
    """A context manager that makes SIGTERM raise KeyboardInterrupt, as Ctrl-C does, and remembers both signals, so that
    `raise_again` can repeat a KeyboardInterrupt that Python has ignored, as in a destructor.

    Python ignores a KeyboardInterrupt that is raised in a destructor or in some libraries' callbacks: it prints
    "Exception ignored in", and the program continues. The work in the context therefore calls `raise_again` now and
    then.

    The end of the context restores the former signal handlers. A program's own handler runs first. Only if it raises
    KeyboardInterrupt is an interrupt remembered. The context changes nothing in a thread other than the main one, for a
    signal that is ignored, or for SIGINT if that ends the process. SIGTERM ends a forked child as before.
    """

    def __init__(self) -> None:
        self._was_raised = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._process = os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            former = signal.getsignal(number)
            if callable(former) or (number == signal.SIGTERM and former == signal.SIG_DFL):
                self._former[number] = former
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        for number, former in self._former.items() if is_main else ():
            if signal.getsignal(number) == self._heard:  # not if the `with` block has set another handler
                signal.signal(number, former)

    def raise_again(self) -> None:
        """Raise a new KeyboardInterrupt if one was lost since the last call."""
        was_raised, self._was_raised = self._was_raised, False
        if was_raised:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        former = self._former[number]
        if not callable(former) and os.getpid() != self._process:
            signal.signal(number, former)
            signal.raise_signal(number)
        try:
            (former if callable(former) else signal.default_int_handler)(number, frame)
        except KeyboardInterrupt:
            self._was_raised = True
            raise


def run_interruptible(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T | None:
    """Run the coroutine that `main` returns. Return its result, or None if the first signal cancelled it. Raises:
    KeyboardInterrupt after a second signal."""
    interrupts: Interrupts | None = None

    async def with_signals() -> T:
        nonlocal interrupts
        task = asyncio.current_task()
        assert task is not None
        interrupts = Interrupts(task)
        for number in LEAVE_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, interrupts, number)
        return await main(interrupts)

    try:
        return asyncio.run(with_signals())
    except asyncio.CancelledError:
        if interrupts is None or interrupts.count > 1:
            raise KeyboardInterrupt from None
        return None
