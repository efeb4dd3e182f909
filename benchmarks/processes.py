"""A benchmark's peers as separate processes, which receive commands as lines and answer with one JSON object a line.

`say` is a peer's side. A peer ends when its standard input closes, so that it does not outlive the process that started
it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

Event = dict[str, Any]
END_SECONDS = 15.0
LOOK_SECONDS = 0.1
LOG_LINES = 5
# Indices of fields in `/proc/PID/stat`, counted from the process's state. Four times begin at USER_TIME: the user and
# the system time of the process, and both times of its ended children.
STATE, PARENT, USER_TIME = 0, 1, 11
MEMORY_FILE = b"/memfd:diloco-peer"


def say(event: str, **fields: object) -> None:
    """Print an event as a line of JSON for the process that started this one. `time` is in seconds of the clock that
    all processes of a machine share."""
    print(json.dumps({"event": event, "time": time.monotonic(), **fields}), flush=True)


async def read_lines(lines: asyncio.Queue[str], leave: Callable[[], None]) -> None:
    """Put each line of standard input into the queue `lines`, and call `leave` when the input closes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        lines.put_nowait(line.decode().strip())
    leave()


def cpu_seconds() -> float:
    """Return the processor seconds, user and system, of this process and all its descendants."""
    stats, children = _stats(), dict[int, list[int]]()
    for process, stat in stats.items():
        children.setdefault(int(stat[PARENT]), []).append(process)
    ours, ticks = [os.getpid()], 0
    for process in ours:
        ours += children.get(process, [])
        ticks += sum(map(int, stats[process][USER_TIME : USER_TIME + 4])) if process in stats else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_of(process: int | str = "self") -> int:
    """Return the bytes of a process's private memory and of its proportional share of shared memory. Mapped files on a
    disk do not count."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    wanted = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def memory_taken(*processes: int) -> int:
    """Return the bytes of main memory that these processes take together. Mapped files on a disk do not count.

    Shared memory files count once, with their full size, because all of it was reserved.
    """
    anonymous, shared = 0, dict[bytes, int]()
    for process in processes:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        anonymous += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
        for mapping in Path(f"/proc/{process}/maps").read_bytes().splitlines():
            if MEMORY_FILE in mapping:
                bounds, _, _, _, inode, _ = mapping.split(maxsplit=5)
                start, end = (int(bound, 16) for bound in bounds.split(b"-"))
                shared[inode] = max(shared.get(inode, 0), end - start)
    return anonymous + sum(shared.values())


class PeerProcessError(click.ClickException):
    """An error of a peer process that has ended, or has not answered in time."""


class PeerProcess:
    """One peer in a process of its own. `start` creates the process, and `end` ends it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, arguments: Sequence[object], log: Path, prefix: Sequence[str] = ()) -> PeerProcess:
        """Start `python -m ARGUMENTS…`, and return its `PeerProcess`. `prefix` is a command that runs python, such as
        `ip netns exec a`; `log` receives python's stderr.

        The process leads a process group, so that its descendants can be ended with it. Its temporary files lie beside
        the log, so that they are removed with it after a kill.
        """
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(log.parent)}
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *[*prefix, sys.executable, "-P", "-m", *map(str, arguments)],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def next_event(self) -> Event | None:
        """Wait for the peer's next event and return it, or return None once the peer has ended."""
        return await self._events.get()

    async def event(self, kind: str, seconds: float) -> Event:
        """Return the peer's next event of this kind, and drop the events before it. Raises: PeerProcessError if the
        peer ends, or after `seconds` seconds."""
        try:
            async with asyncio.timeout(seconds):
                while event := await self.next_event():
                    if event["event"] == kind:
                        return event
        except TimeoutError:
            raise PeerProcessError(f"no {kind!r} in {seconds:.0f} s: {self.last_words()}") from None
        raise PeerProcessError(f"it ended before {kind!r}: {self.last_words()}")

    def last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{self._log.name}: " + (" | ".join(lines[-LOG_LINES:]) or "it printed nothing")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the peer's process alone, not to its descendants."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def children(self) -> set[int]:
        """Return the process ids of the peer's direct children."""
        return {process for process, parent in _parents() if parent == self.process_id}

    async def ended(self) -> None:
        await self._process.wait()

    async def end(self) -> None:
        """Close the peer's standard input, wait at most END_SECONDS for its end, and kill the rest of its process
        group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.ended()
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        await self.ended()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with suppress(ValueError):  # skips a library's output, and a killed peer's incomplete line
                self._events.put_nowait(json.loads(line))
        self._events.put_nowait(None)


async def gone(processes: set[int], seconds: float) -> set[int]:
    """Wait until these processes have ended, at most `seconds` seconds, and return the ids of those still running."""
    deadline = time.monotonic() + seconds
    while (left := processes & {process for process, _ in _parents()}) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_SECONDS)
    return left


def _parents() -> list[tuple[int, int]]:
    """Return pairs of each live process's id and its parent's id."""
    return [(process, int(stat[PARENT])) for process, stat in _stats().items() if stat[STATE] != b"Z"]


def _stats() -> dict[int, list[bytes]]:
    """Return the fields of `/proc/PID/stat`, from the process's state on, by process id. The function must be fast,
    because peers in a round wait for it."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                found[int(name)] = file.read().rpartition(b")")[2].split()
    return found
