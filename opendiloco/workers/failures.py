"""A worker's failure: what it says of it on the control channel, and the error that the peer process makes of that."""

from __future__ import annotations

import logging
import traceback

from opendiloco.errors import DataError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.workers.control import Failed
from peers.errors import DilocoPeerError, ManifestError

logger = logging.getLogger(__name__)

EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error for error in (DataError, DeviceMemoryError, MachineError, ManifestError, WorkerError)
}


class UnexpectedWorkerError(WorkerError):
    """The worker failed in a way that none of ours describes."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device has no memory left.

    Torch has a class for its own allocator alone; what CUDA's libraries and NCCL could not get, they say in words.
    """
    said = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "cublas_status_alloc_failed" in said)
    )


def is_short_of_shared_memory(error: Exception) -> bool:
    """Return whether NCCL found too little in /dev/shm, of which a container has 64 MB unless told otherwise."""
    said = str(error)
    return isinstance(error, RuntimeError) and "/dev/shm" in said and ("segment" in said or "No space left" in said)


def describe_failure(error: Exception) -> Failed:
    """Return what the peer process needs to raise the same error on its side."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ImportError):
        error = MachineError(f"a library of the training stack cannot be imported: {error}.", "Install it with pip.")
    if is_short_of_shared_memory(error):
        remedy = "In a container, give it more: docker run --shm-size 1g, or --ipc host. Else train on one GPU."
        error = MachineError("/dev/shm has too little room for what this machine's GPUs tell each other.", remedy)
    if is_out_of_memory(error):
        remedy = "Use --micro-batch with a smaller number, --activation-checkpointing, or another device."
        error = DeviceMemoryError("the device ran out of memory.", remedy)
    message, remedy = (error.message, error.remedy) if isinstance(error, DilocoPeerError) else (str(error), "")
    return Failed(error=type(error).__name__, message=message, remedy=remedy, traceback=trace)


def rebuild(failure: Failed) -> DilocoPeerError:
    """Return the worker's error as one of ours, with its traceback as a note; unexpected ones as a WorkerError."""
    expected = EXPECTED_ERRORS.get(failure.error)
    error: DilocoPeerError
    if expected is not None:
        error = expected(failure.message, failure.remedy)
    else:
        logger.error("in the worker:\n%s", failure.traceback.rstrip())
        said = f"the worker failed: {failure.error}: {failure.message}."
        error = UnexpectedWorkerError(said, "This may be a bug; report it.")
    error.add_note(f"In the worker:\n{failure.traceback}")
    return error
