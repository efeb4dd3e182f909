"""The errors of the training side, by cause: the machine, the data or the training."""

from __future__ import annotations

from peers.errors import DilocoPeerError, ManifestError


def first_line(error: Exception) -> str:
    """Return a library's error as the end of a sentence: its first line, and the second one if the first ends in a
    colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def fit_for_terminal(text: str) -> str:
    """Return a text with its control characters replaced, which could rewrite a terminal's screen. Line breaks stay."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


class AmendmentError(ManifestError):
    """An amendment in the run's log does not fit the run, or this version does not understand it."""


class MachineError(DilocoPeerError):
    """This machine does not fit the run: its memory, disk, torch, or a device that is missing or that torch cannot
    use."""

    exit_code = 6


class DeviceMemoryError(MachineError):
    """The device ran out of memory during a command."""


class LoopError(MachineError):
    """A researcher's own training loop has a model, or runs in processes, that cannot form a peer."""


class DataError(DilocoPeerError):
    """The corpus is missing, unreadable or too small, or lies in a folder that the machine's owner has not named."""

    exit_code = 7


class WorkerError(DilocoPeerError):
    """Training failed: the worker process died, or a loss or weight is not finite."""

    exit_code = 8


class DeviceError(WorkerError):
    """A GPU, its driver or a kernel on it failed during a command."""


class CheckpointError(DilocoPeerError):
    """A checkpoint is missing, damaged, or from another run."""

    exit_code = 9


class RemoteError(DilocoPeerError):
    """A remote folder cannot be used because of its URL, the package for it, or its credentials."""

    exit_code = 10


class DamagedLogError(DilocoPeerError):
    """A log's headers, payloads or states do not match the digests that the log records."""

    exit_code = 11


class DisagreementError(DilocoPeerError):
    """A peer reports another state than the one that the run's log leads to."""

    exit_code = 12


class DemoError(DilocoPeerError):
    """The demo did not show the behaviour that it should demonstrate."""

    exit_code = 1


class ArgumentError(DilocoPeerError):
    """A Python program has given the reference an outer optimizer, a codec or a pattern that it cannot use."""

    exit_code = 2


class SettingsError(DilocoPeerError):
    """An environment variable or the configuration file has an invalid value for a setting."""

    exit_code = 2
