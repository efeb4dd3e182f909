"""`diloco-peer` commands as processes of their own, for the demo: started, watched, and ended without remains."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import deque
from contextlib import suppress
from pathlib import Path

from opendiloco.child_processes import child_environment, module_command
from opendiloco.errors import DemoError
from opendiloco.settings.file import without_settings

LINES_KEPT = 10
STOP_SECONDS = 20.0  # a polite leave may finish a round first


class Child:
    """One command; its output goes to a file. Made by `start`; `ask_to_stop` or `kill`, then `ended`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = process
        self._news = asyncio.Condition()
        self._silent = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, arguments: list[str], folder: Path) -> Child:
        """In a session of its own, so that Ctrl-C reaches only the demo, which ends it politely."""
        process = await asyncio.create_subprocess_exec(
            *module_command("opendiloco.cli", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=without_settings(child_environment(PYTHONUNBUFFERED="1")),
            start_new_session=True,
        )
        return cls(name, process, folder / f"{name.replace(' ', '-')}.log")

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def line(self, pattern: str, seconds: float) -> str:
        """The first match of a pattern in what it prints. Raises: DemoError when none comes in time, or it ends."""
        match: re.Match[str] | None = None

        def seen() -> bool:
            nonlocal match
            match = next(filter(None, (re.search(pattern, line) for line in self.last_lines)), None)
            return match is not None or self._silent

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(seen)
        if match is None:
            raise DemoError(f"{self.name} did not start: {self.last_words()}", f"{self.log} says more.")
        return match[0]

    def last_words(self) -> str:
        return " | ".join(self.last_lines) or "it said nothing"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def ask_to_stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    async def ended(self) -> None:
        """Wait until the process is gone; it is killed if it takes too long."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("wb", buffering=0) as file:
            while line := await self._process.stdout.readline():
                file.write(line)
                self.last_lines.append(line.decode(errors="replace").strip())
                async with self._news:
                    self._news.notify_all()
        async with self._news:
            self._silent = True
            self._news.notify_all()
