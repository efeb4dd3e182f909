"""Ctrl-C and SIGTERM: the first asks politely, the second insists. A terminal that hangs up asks, and never insists."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peers.net.signals import LEAVE_SIGNALS

T = TypeVar("T")


class Interrupts:
    """What the signals of this process do to its main task.

    The first one calls `polite`, or cancels the task while there is nothing to be polite about; the second cancels it.
    Later ones change nothing, so that what the task tidies up is tidied up. Nor does a hang-up after another signal:
    a closing terminal sends SIGHUP twice (once through its shell), and systemd may send it after SIGTERM.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.polite: Callable[[], None] | None = None
        self.count = 0
        self._task = task

    def __call__(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self.count > 0:
            return
        self.count += 1
        if self.count == 1 and self.polite is not None:
            self.polite()
        elif self.count <= 2:
            self._task.cancel()


def run_interruptible(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T | None:
    """Run `main` in a new event loop; None when the first signal cancelled it.

    Raises: KeyboardInterrupt when a second one did.
    """
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
