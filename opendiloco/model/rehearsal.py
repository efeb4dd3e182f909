"""A model's construction tried out in a process that may take only so much memory and time.

What a config costs follows from nothing but building it: each architecture makes other things of its numbers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from opendiloco.errors import MachineError, first_line
from opendiloco.shared_memory import available_memory
from peers.errors import DilocoPeerError, ManifestError
from peers.network.signals import signals_held_back

MOST_BYTES = 1 << 30
"""For modules without values: of the largest models that are known they take a tenth of it."""
MOST_SECONDS = 10
"""Of the processor's time; whatever else runs on the machine makes no difference to it."""
STILLNESS = 10.0
"""Seconds without any of the processor's time after which a child hangs."""
ATTEMPTS = 3
"""A child hangs if another thread held a lock at the fork: nothing there lets go of it. The next one need not."""
PARENT_DEATH_SIGNAL = 1
NEARLY = 1 << 24
"""Bytes below the limit at which whatever goes wrong does so for want of memory: libraries say it in many ways."""


def rehearse(build: Callable[[], object], origin: str) -> None:
    """Call a function in a process of its own, forked so that what is imported here is there, too.

    Raises: ManifestError that begins with the field `origin` for one that fails, or takes more memory than this process
    may or `MOST_BYTES`, or more time than `MOST_SECONDS`; MachineError when all `ATTEMPTS` hang.
    """
    limit = min(MOST_BYTES, available_memory())
    for _ in range(ATTEMPTS):
        answer = _attempt(build, origin, limit)
        if answer is not None:
            break
    else:
        raise MachineError(
            f"{origin}: the process that lays out this model hangs.",
            "Build the model before this program starts threads that use torch.",
        )
    if not answer:
        raise ManifestError(
            f"{origin}: to lay out this model, without any values, takes more than {limit >> 20} MiB of memory or "
            f"{MOST_SECONDS} s.",
            "Lower its counts: of layers, experts or heads; where --max-memory leaves no more, raise that.",
        )
    error = json.loads(answer)
    if error is not None:
        raise ManifestError(*error)


def _attempt(build: Callable[[], object], origin: str, limit: int) -> bytes | None:
    """Return what the child writes: nothing when it hit a limit. None if it hangs."""
    reading, writing = os.pipe()
    with signals_held_back():
        child = os.fork()
        if child == 0:
            _build_and_end(build, origin, limit, writing)
    os.close(writing)
    try:
        return _answer_of(child, reading)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # in case that it is not about to end, or that we are interrupted
        os.waitpid(child, 0)


def _answer_of(child: int, reading: int) -> bytes | None:
    """Return what comes until the child ends. None if it hangs."""
    answer, used = b"", -1.0
    while True:
        if select.select([reading], [], [], STILLNESS)[0]:
            part = os.read(reading, 65536)
            if not part:
                return answer
            answer += part
            continue
        times = psutil.Process(child).cpu_times()
        before, used = used, times.user + times.system
        if used == before:
            return None


def _build_and_end(build: Callable[[], object], origin: str, limit: int, writing: int) -> NoReturn:
    """Never return: what is open here is the parent's."""
    try:
        gc.freeze()  # to look through what is the parent's would copy its memory
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        most = _bytes_of("VmSize") + limit
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        said = None
        try:
            build()
        except Exception as error:
            if isinstance(error, MemoryError) or _bytes_of("VmPeak") > most - NEARLY:
                os._exit(1)
            if isinstance(error, DilocoPeerError):
                said = [error.message, error.remedy]
            else:
                said = [f"{origin}: {first_line(error)}", "Correct it."]
        os.write(writing, json.dumps(said).encode())
    finally:
        os._exit(0)


def _bytes_of(name: str) -> int:
    """Return a figure of this process's memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
