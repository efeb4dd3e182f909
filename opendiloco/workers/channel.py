"""A worker's end of the control channel, through which the peer process commands it."""

from __future__ import annotations

import os
import queue
import socket
import threading
import traceback

from opendiloco.workers.control import Command, ControlMessage, EndInnerLoop, Hold, parse_command

LOOK_SECONDS = 0.1
"""Between two looks, in a pause, at what the peer process wants."""


class ControlChannel:
    """The worker's end of the control channel, read by a thread of its own so that its closing is noticed at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.stopped_number = 0
        self._may_step = threading.Event()  # set unless the owner wants a pause
        self._may_step.set()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def is_held(self, number: int) -> bool:
        """Wait for a moment for a pause to end; return whether the next step of training `number` still has to wait."""
        return number > self.stopped_number and not self._may_step.wait(LOOK_SECONDS)

    def send(self, message: ControlMessage) -> None:
        with self._sending:  # batches are read by a thread of their own, which may have to tokenize
            self._connection.sendall(message.line())

    def _read(self) -> None:
        """Lines to commands, until the peer process is gone. Training cannot be interrupted politely, so: _exit."""
        try:
            for line in self._connection.makefile("rb"):
                command = parse_command(line)
                if isinstance(command, EndInnerLoop):
                    self.stopped_number = command.number
                elif isinstance(command, Hold):
                    (self._may_step.clear if command.held else self._may_step.set)()
                else:
                    self.commands.put(command)
        except ConnectionError:
            pass
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
