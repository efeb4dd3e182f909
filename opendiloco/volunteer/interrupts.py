"""Ctrl-C and SIGTERM: the first asks politely, the second insists. A terminal that hangs up asks, and never insists.

In somebody else's program Ctrl-C is that program's, and Python's; there we only see to it that it is not lost.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Self, TypeVar

from peers.network.signals import LEAVE_SIGNALS

T = TypeVar("T")


class Interrupts:
    """What the signals of this process do to its main task. Each one first calls `heard`.

    The first one calls `polite`, or cancels the task while there is nothing to be polite about; the second cancels it.
    Later ones change nothing, so that what the task tidies up is tidied up. Nor does a hang-up after another signal:
    a closing terminal sends SIGHUP twice (once through its shell), and systemd may send it after SIGTERM.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.polite: Callable[[], None] | None = None
        self.heard: Callable[[], None] | None = None
        self.count = 0
        self._task = task

    def __call__(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self.count > 0:
            return
        self.count += 1
        if self.heard is not None:
            self.heard()
        if self.count == 1 and self.polite is not None:
            self.polite()
        elif self.count <= 2:
            self._task.cancel()


class RememberedInterrupt:
    """Ctrl-C as it was, but remembered. A context, which puts the former handler back.

    Python loses a KeyboardInterrupt that is raised in a destructor or in some libraries' callbacks: it prints
    "Exception ignored in", and the program goes on as if nothing had happened. So the work in the context calls
    `raise_again` now and then.

    The former handler decides what Ctrl-C means: only if it raises KeyboardInterrupt is there anything to remember. In
    a thread other than the main one, or where Ctrl-C ends the process or is ignored, the context changes nothing.
    """

    def __init__(self) -> None:
        self._was_raised = False
        self._former: Any = None

    def __enter__(self) -> Self:
        former = signal.getsignal(signal.SIGINT)
        if callable(former) and threading.current_thread() is threading.main_thread():
            self._former = former
            signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        is_ours = signal.getsignal(signal.SIGINT) == self._heard  # nobody has set another one meanwhile
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._former)

    def raise_again(self) -> None:
        """Raise the KeyboardInterrupt that was lost, if there was one. Raises: KeyboardInterrupt."""
        was_raised, self._was_raised = self._was_raised, False
        if was_raised:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        try:
            self._former(number, frame)
        except KeyboardInterrupt:
            self._was_raised = True
            raise


def run_interruptible(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T | None:
    """Run `main`; None when the first signal cancelled it. Raises: KeyboardInterrupt when a second one did."""
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
