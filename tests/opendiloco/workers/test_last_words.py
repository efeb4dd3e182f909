"""What is said of a worker that dies: its last lines, in the error and in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from opendiloco.workers import control
from opendiloco.workers.control import (
    LINE_LENGTH,
    LINES_KEPT,
    CountDevices,
    DevicesCounted,
    WorkerDeathError,
    WorkerProcess,
    _LastWords,
)

SECONDS = 120.0
RAISES = """
import sys
print("\\x1b[31mloading\\x1b[0m", flush=True)
print("tokens: 1%\\rtokens: 99%", file=sys.stderr)
def deepest():
    raise RuntimeError("no kernel image is available")
deepest()
"""
LEAVES_ANOTHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import os; os.read({0}, 1)"], pass_fds=[{0}])
sys.exit(3)
"""
CRASHES = """
import ctypes, faulthandler
faulthandler.enable()
ctypes.string_at(0)
"""


async def dead(
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    inherits: Sequence[int] = (),
    afterwards: Callable[[], None] = lambda: None,
) -> WorkerDeathError:
    """What is raised for a worker whose program is this script, which inherits these descriptors."""
    started = list[asyncio.subprocess.Process]()

    async def spawn(channel: int, inherited: Sequence[int], threads: int) -> asyncio.subprocess.Process:
        pipe: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        command = [sys.executable, "-c", script]
        started.append(await asyncio.create_subprocess_exec(*command, pass_fds=[channel, *inherits], **pipe))
        return started[0]

    monkeypatch.setattr(control, "_spawn", spawn)
    async with asyncio.timeout(SECONDS):
        worker = await WorkerProcess.start((), 1)
        try:
            with pytest.raises(WorkerDeathError) as caught:
                await worker.exchange(CountDevices(), DevicesCounted, lambda progress: None)
        finally:
            await worker.close()
        afterwards()
        assert started[0].stdout is not None
        await started[0].stdout.read()
    return caught.value


def test_a_traceback_is_in_the_log_and_its_end_in_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = asyncio.run(dead(RAISES, monkeypatch))
    assert "ended with exit status 1. It printed last:" in error.message
    assert error.message.endswith("| RuntimeError: no kernel image is available")
    assert "\n" not in error.message
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = record.getMessage().splitlines()
    assert said[0] == "the worker printed last:"
    assert said[1].strip() == "loading"
    assert {"tokens: 99%", "Traceback (most recent call last):", "RuntimeError: no kernel image is available"} <= {
        line.strip() for line in said
    }


def test_a_process_that_nccl_ends_names_the_device_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its line NCCL prints where it was, frame by frame."""
    script = "print('[rank1]: watchdog terminated with exception: CUDA error: unspecified launch failure')\n"
    script += "for frame in range(9): print('frame', frame)\nimport os; print(end='', flush=True); os.abort()"
    error = asyncio.run(dead(script, monkeypatch))
    assert "was killed by SIGABRT, since its device failed: [rank1]" in error.message
    assert error.message.endswith("CUDA error: unspecified launch failure")
    assert "nvidia-smi -q" in error.remedy


def test_a_crash_says_where_it_was(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    error = asyncio.run(dead(CRASHES, monkeypatch))
    assert "was killed by SIGSEGV" in error.message
    assert "Fatal Python error: Segmentation fault" in caplog.text
    assert "string_at" in caplog.text


def test_the_death_of_a_worker_is_noticed_though_another_process_has_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a compiler that it called and that hangs: asyncio itself waits for it."""
    reading, writing = os.pipe()
    script = LEAVES_ANOTHER.format(reading)
    error = asyncio.run(dead(script, monkeypatch, [reading], lambda: os.close(writing)))  # with which the other ends
    os.close(reading)
    assert "ended with exit status 3" in error.message


def test_a_worker_that_we_end_is_no_news(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def spawn(channel: int, inherited: Sequence[int], threads: int) -> asyncio.subprocess.Process:
        script = f"import os; print('ready', flush=True); os.read({channel}, 1)"
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", script, pass_fds=[channel], stdout=pipe)

    async def story() -> None:
        worker = await WorkerProcess.start((), 1)
        await worker.close()

    monkeypatch.setattr(control, "_spawn", spawn)
    asyncio.run(asyncio.wait_for(story(), SECONDS))
    assert not caplog.records


def test_however_much_it_prints_little_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    words = _LastWords()
    assert words.sentence() == ""
    words.log("the worker")
    assert not caplog.records
    for number in range(1000):
        words.heard(f"line {number} " + "x" * 10_000)
        words.heard("  \n")
    words.log("the worker")
    assert len(caplog.text.splitlines()) == 1 + LINES_KEPT
    assert len(words.sentence()) < 4 * LINE_LENGTH
