"""A worker's end of the control channel, through which the peer process commands it."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from opendiloco.workers.control import Command, ControlMessage, EndInnerLoop, Hold, TakeAverage, parse_command

LOOK_SECONDS = 0.1
"""Between two looks, in a pause, at what the peer process wants."""


class Average(NamedTuple):
    """What was said last of a fragment: of which training it is, whether there are new values, and when it was heard,
    by the clock that never goes back."""

    number: int
    is_changed: bool
    heard_at: float


class ControlChannel:
    """The worker's end of the control channel, read by a thread of its own so that its closing is noticed at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.stopped_number = 0
        self._may_step = threading.Event()  # set unless the owner wants a pause
        self._may_step.set()
        self._averages: dict[int, Average] = {}
        self._news = threading.Event()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def is_held(self, number: int) -> bool:
        """Wait for a moment for a pause to end; return whether the next step of training `number` still has to wait."""
        return number > self.stopped_number and not self._may_step.wait(LOOK_SECONDS)

    def send(self, message: ControlMessage) -> None:
        with self._sending:  # batches are read by a thread of their own, which may have to tokenize
            self._connection.sendall(message.line())

    def average_of(self, fragment: int) -> Average | None:
        """Return what was said last of a fragment."""
        return self._averages.get(fragment)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once this holds; it is asked anew whenever something was heard."""
        while True:
            self._news.clear()
            if is_so():
                return
            self._news.wait()

    def take(self, command: Command) -> None:
        """Hear a command; those that are not heard while training wait in `commands`."""
        match command:
            case EndInnerLoop():
                self.stopped_number = command.number
            case Hold():
                (self._may_step.clear if command.held else self._may_step.set)()
            case TakeAverage():
                self._averages[command.fragment] = Average(command.number, command.is_changed, time.monotonic())
            case _:
                self.commands.put(command)
        self._news.set()

    def _read(self) -> None:
        """Lines to commands, until the peer process is gone. Training cannot be interrupted politely, so: _exit."""
        try:
            for line in self._connection.makefile("rb"):
                self.take(parse_command(line))
        except ConnectionError:
            pass
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
