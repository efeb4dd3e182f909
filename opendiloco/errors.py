"""What can go wrong on the training side, and whose turn it is to act: the machine's, the data's or the training's."""

from __future__ import annotations

from peers.errors import DilocoPeerError


class MachineError(DilocoPeerError):
    """This machine does not fit the run: memory, disk, torch, or a device that is not there."""

    exit_code = 6


class DataError(DilocoPeerError):
    """The corpus is missing, unreadable or too small."""

    exit_code = 7


class WorkerError(DilocoPeerError):
    """Training failed: the worker process died, or a loss or weight is no finite number."""

    exit_code = 8


class DemoError(DilocoPeerError):
    """The demo did not show what it is there to show."""

    exit_code = 1
