"""The exceptions of `opendiloco`, with the exit codes of commands that fail with them, and two text functions."""

from __future__ import annotations

from peers.errors import DilocoPeerError, ManifestError


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, and the second if the first ends in a colon, with a full stop at
    the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def fit_for_terminal(text: str) -> str:
    """Return a text with its control characters, which could rewrite a terminal, replaced by U+FFFD. Line breaks
    stay."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


class AmendmentError(ManifestError):
    """Error: this version does not understand an amendment in the run's log, or the amendment does not fit the run."""


class MachineError(DilocoPeerError):
    """Error: this machine cannot do the work because of its memory, disk or torch, or a missing or unusable device."""

    exit_code = 6


class DeviceMemoryError(MachineError):
    """Error: a device ran out of memory while a worker executed a command."""


class LoopError(MachineError):
    """Error: a researcher's own training loop cannot form a peer because of its model or its processes."""


class DataError(DilocoPeerError):
    """Error: training text is missing, unreadable or too small, or lies in a folder that the owner has not named."""

    exit_code = 7


class WorkerError(DilocoPeerError):
    """Error: training failed because a worker process died, or because a loss or a weight is not finite."""

    exit_code = 8


class DeviceError(WorkerError):
    """Error: a GPU, its driver or a kernel on the GPU failed while a worker executed a command."""


class CheckpointError(DilocoPeerError):
    """Error: a checkpoint is missing, damaged, or from another run."""

    exit_code = 9


class RemoteError(DilocoPeerError):
    """Error: a remote folder cannot be used because of its URL, its credentials, or a missing Python package."""

    exit_code = 10


class DamagedLogError(DilocoPeerError):
    """Error: a log's headers, payloads or states do not match the digests that the log records."""

    exit_code = 11


class DisagreementError(DilocoPeerError):
    """Error: a peer reports a state that differs from the state computed from the run's log."""

    exit_code = 12


class DemoError(DilocoPeerError):
    """Error: the demo did not show the behaviour that it is meant to show."""

    exit_code = 1


class ArgumentError(DilocoPeerError):
    """Error: a Python program passed an argument that opendiloco/training/reference.py cannot use: a roster, an outer
    optimizer, a codec, or a pattern that divides the parameters into fragments."""

    exit_code = 2


class SettingsError(DilocoPeerError):
    """Error: an environment variable or the configuration file contains an invalid value for a setting."""

    exit_code = 2
