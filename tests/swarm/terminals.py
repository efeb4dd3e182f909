"""A `diloco-peer` command on a terminal of its own, which can be closed under it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.swarm.cli_processes import SECONDS, Site


class Terminal:
    """A context manager that leaves neither the command nor the terminal."""

    def __init__(self, site: Site, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "opendiloco.cli", *arguments],
            cwd=site.folder,
            env=site.environment | {"TERM": "xterm", "COLUMNS": "80"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
        )
        os.close(inside)
        self.shown = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.close()

    def wait_for(self, text: bytes, why: str) -> None:
        """Read the screen up to `text`; `why` and all that it shows are reported if that does not come in time."""
        deadline = time.monotonic() + SECONDS
        while text not in self.shown:
            readable, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{why}; the screen shows:\n{self.shown.decode(errors='replace')}"
            try:
                self.shown += os.read(self._screen, 65536)
            except OSError:  # the command has ended
                raise AssertionError(f"{why}; the screen shows:\n{self.shown.decode(errors='replace')}") from None

    def close(self) -> None:
        """Hang up: the command gets SIGHUP, and can write no more."""
        with suppress(OSError):  # closed before
            os.close(self._screen)
            self._screen = -1

    def finish(self) -> int:
        """Wait for the command's end; its exit code."""
        return self._process.wait(SECONDS)
