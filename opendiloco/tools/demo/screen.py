"""What the demo shows while it runs: the table of peers, and below it what has happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from opendiloco.view.run_view import Row, peers_table, plain_line

EVENTS_SHOWN = 8
PLAIN_SECONDS = 10.0


class DemoScreen:
    """A live picture on a terminal; otherwise, or when `plain`, lines. A context manager."""

    def __init__(self, seconds: float, plain: bool) -> None:
        self.console = Console()
        self._seconds = seconds
        self._started = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._rows: Sequence[Row] = ()
        self._live = None if plain or not self.console.is_terminal else Live(console=self.console, auto_refresh=False)
        self._next_lines = self._started

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._started

    def event(self, text: str) -> None:
        """Something happened."""
        line = f"{_clock(self.elapsed)}  {text}"
        self._events.append(line)
        if self._live is None:
            self.say(line)
        else:
            self._draw()

    def show(self, rows: Sequence[Row]) -> None:
        """This is how the peers are now."""
        self._rows = rows
        if self._live is not None:
            self._draw()
        elif time.monotonic() >= self._next_lines:
            self._next_lines = time.monotonic() + PLAIN_SECONDS
            for row in rows:
                self.say(f"{_clock(self.elapsed)}  {plain_line(row)}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text), soft_wrap=True)

    def _draw(self) -> None:
        assert self._live is not None
        title = f"{_clock(self.elapsed)} of {_clock(self._seconds)}"
        events = [Text(line, style="dim") for line in self._events]
        self._live.update(Group(peers_table(self._rows, title), *events), refresh=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
