from __future__ import annotations

import pytest

from opendiloco.errors import DeviceError
from opendiloco.workers.control import (
    ALLOCATOR,
    Command,
    Evaluated,
    Failed,
    FragmentStored,
    Reply,
    RunInnerLoop,
    _allocator,
    _rebuild,
)
from opendiloco.workers.worker import _describe_failure
from peers.values.leases import SampleRange
from tests.opendiloco.workers.trainings import training_done


def test_messages_survive_their_line() -> None:
    command = RunInnerLoop(number=1, index=2, samples=(SampleRange(0, 4), SampleRange(8, 9)), steps=3, tokens=4096)
    assert command.line().count(b"\n") == 1
    assert Command.parse(command.line()) == command
    reply = training_done(loss=0.1)
    assert Reply.parse(reply.line()) == reply
    stored = FragmentStored(fragment=1, samples=(SampleRange(0, 4),), tokens=64, loss=0.1)
    assert Reply.parse(stored.line()) == stored
    failure = Failed(error="WorkerError", message="two\nlines", remedy="", traceback="a\nb\n")
    assert failure.line().count(b"\n") == 1
    assert Reply.parse(failure.line()) == failure


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense\n",
        b"Dance {}\n",
        b'EndInnerLoop {"number": 1, "now": true}\n',
        b"RunInnerLoop {}\n",
        b'Evaluated {"loss": 1.0, "tokens": 1}\n',
        b"\xff {}\n",
    ],
)
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"is no Command|validation error|can't decode"):
        Command.parse(line)


@pytest.mark.parametrize("loss", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_gets_through(loss: float) -> None:
    reply = Reply.parse(Evaluated(loss=loss, tokens=1).line())
    assert isinstance(reply, Evaluated)
    assert str(reply.loss) == str(loss)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (RuntimeError("CUDA error: out of memory"), "DeviceMemoryError"),
        (RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "DeviceMemoryError"),
        (RuntimeError("NCCL error: Failed to CUDA calloc 4 bytes: out of memory"), "DeviceMemoryError"),
        (RuntimeError("sizes do not match"), "RuntimeError"),
        (RuntimeError("the decc of cards"), "RuntimeError"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "DeviceError"),
        (
            RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error"),
            "DeviceError",
        ),
        (RuntimeError("GPU has fallen off the bus, Xid 79"), "DeviceError"),
        (ValueError("out of memory"), "ValueError"),
    ],
)
def test_want_of_memory_is_known_by_whatever_says_so(error: Exception, name: str) -> None:
    """Regression: workers that could have gone on with half as many windows were started again and again."""
    assert _describe_failure(error).error == name


def test_a_failed_device_is_named_with_what_to_look_at() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    failure = _describe_failure(error, "cuda:3")
    rebuilt = _rebuild(failure)
    assert isinstance(rebuilt, DeviceError)
    assert (rebuilt.message, rebuilt.exit_code) == (
        "cuda:3 failed: CUDA error: an illegal memory access was encountered.",
        8,
    )
    assert "nvidia-smi -q" in rebuilt.remedy
    assert "dmesg" in rebuilt.remedy


def test_a_container_with_little_shared_memory_is_told_what_to_do() -> None:
    said = (
        "NCCL error in: ProcessGroupNCCL.cpp, ncclSystemError: System call failed.\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-4hgr2K (size 9637888), error: No space left on device"
    )
    failure = _describe_failure(RuntimeError(said))
    assert failure.error == "MachineError"
    assert "--shm-size 1g" in failure.remedy
    assert _describe_failure(RuntimeError("/dev/shm is a nice folder")).error == "RuntimeError"


def test_gpus_memory_grows_in_segments_unless_the_volunteer_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert _allocator() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR:
        with monkeypatch.context() as set_by_hand:
            set_by_hand.setenv(name, "")
            assert _allocator() == {}
