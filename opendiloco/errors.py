"""What can go wrong on the training side, and whose turn it is to act: the machine's, the data's or the training's."""

from __future__ import annotations

from peers.errors import DilocoPeerError, ManifestError


def first_line(error: Exception) -> str:
    """Return a library's error as the end of a sentence: its first line, with the next if that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said if said.endswith((".", "!", "?")) else f"{said}."


def fit_for_terminal(text: str) -> str:
    """Return a text, lines kept, without control characters, which could rewrite what a terminal shows."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


class AmendmentError(ManifestError):
    """An amendment in the run's log that this version does not understand, or that does not fit the run."""


class MachineError(DilocoPeerError):
    """This machine does not fit the run: memory, disk, torch, or a device that is not there or of no use to torch."""

    exit_code = 6


class DeviceMemoryError(MachineError):
    """The device ran out of memory in the middle of a command."""


class LoopError(MachineError):
    """One's own training loop has a model, or runs in processes, that cannot be a peer's."""


class DataError(DilocoPeerError):
    """The corpus is missing, unreadable, too small, or in a place of the machine that its owner has not named."""

    exit_code = 7


class WorkerError(DilocoPeerError):
    """Training failed: the worker process died, or a loss or weight is no finite number."""

    exit_code = 8


class DeviceError(WorkerError):
    """A GPU, its driver or a kernel on it failed in the middle of a command."""


class CheckpointError(DilocoPeerError):
    """A checkpoint is missing, damaged, or of another run."""

    exit_code = 9


class RemoteError(DilocoPeerError):
    """A remote folder cannot be used: its URL, the package for it, or its credentials."""

    exit_code = 10


class DamagedLogError(DilocoPeerError):
    """A log's headers, payloads or states are not what its digests say."""

    exit_code = 11


class DisagreementError(DilocoPeerError):
    """A peer says that it has another state than the run's log leads to."""

    exit_code = 12


class DemoError(DilocoPeerError):
    """The demo did not show what it is there to show."""

    exit_code = 1


class ArgumentError(DilocoPeerError):
    """What a Python program has given to the reference is of no use: an outer optimizer, a codec or a pattern."""

    exit_code = 2


class SettingsError(DilocoPeerError):
    """An environment variable or the configuration file says what no setting can be."""

    exit_code = 2
