"""How `join` shows what it does: a live screen on a terminal, or plain lines."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from opendiloco.view.progress import (
    ROUTINE,
    Progress,
    ProgressReader,
    Work,
    healthy_line,
    phase_of_stage,
    progress_lines,
    stage_line,
)
from opendiloco.view.screen import peers_table, reach_lines, row_of

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

logger = logging.getLogger(__name__)

SCREEN_SECONDS = 0.5
HEALTHY_SECONDS = 60.0
MACHINE_SECONDS = 10.0
THIS_MACHINE = "this machine"
LEAST_ROWS, LINES_BESIDE = 3, 4
"""Peers that the picture of a volunteer has at least, and its lines beside those of progress and peers."""


class JoinView(ABC):
    """Shows a person how it goes. `phase` is what the volunteer is doing."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._stage, self._since = "", time.monotonic()
        self._share: float | None = None
        self._is_training = False

    @abstractmethod
    def say(self, text: str) -> None:
        """Show one line."""

    @abstractmethod
    def show_stage(self, is_new: bool) -> None:
        """Show what comes before training: the same phase as before, or a new one."""

    @abstractmethod
    async def show(self, reader: ProgressReader) -> None:
        """Show how training goes, until cancelled."""

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.phase = "ended"

    def stage(self, stage: str, share: float | None) -> None:
        """Hear what comes before training, and how much of it is done. Workers that start again say so in the log."""
        if self._is_training:
            return
        if stage != self._stage:
            self._stage, self._since = stage, time.monotonic()
        self._share, before, self.phase = share, self.phase, phase_of_stage(stage)
        self.show_stage(is_new=self.phase != before)

    def stage_line(self) -> str:
        """Return what comes before training, and how far it has come."""
        return stage_line(self._stage, Work(self._share, time.monotonic() - self._since))

    @asynccontextmanager
    async def showing(self, reader: ProgressReader) -> AsyncIterator[None]:
        """Show how training goes, for as long as the context lasts."""
        self._is_training = True
        beside = [asyncio.create_task(self.show(reader)), asyncio.create_task(read_machine(reader))]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            self.phase, self._is_training = "starting", False

    def note(self, progress: Progress) -> bool:
        """Remember the phase; return whether it is a new one."""
        is_new, self.phase = progress.phase != self.phase, progress.phase
        return is_new


class Lines(JoinView):
    """Log lines: one that says how it goes each minute, and each phase but those of every outer step.

    What is said to a person is printed, or a line of the log like all others where programs read it: `is_json`.
    """

    def __init__(self, is_json: bool = False) -> None:
        super().__init__()
        self._is_json = is_json

    def say(self, text: str) -> None:
        if self._is_json:
            logger.info("%s", text)
            return
        with suppress(OSError):  # nobody may be there to read it, and what we are about to do is done all the same
            print(text, flush=True)

    def show_stage(self, is_new: bool) -> None:
        if is_new:
            logger.info("phase: %s", self.phase)

    async def show(self, reader: ProgressReader) -> None:
        due, has_trained = time.monotonic() + HEALTHY_SECONDS, False
        while True:
            progress = reader.read()
            if self.note(progress):
                is_routine = has_trained and progress.phase in ROUTINE
                logger.log(logging.DEBUG if is_routine else logging.INFO, "phase: %s", progress.phase)
                has_trained |= progress.phase in ROUTINE
            if time.monotonic() >= due:
                due += HEALTHY_SECONDS
                logger.info("%s", healthy_line(progress), extra={"details": {"progress": progress.plain()}})
            await asyncio.sleep(SCREEN_SECONDS)


class Screen(JoinView):
    """A picture on a terminal, above which lines scroll past."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._starting: Live | None = None
        self._drawn = ""  # the stage of the start that was shown last

    def say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show_stage(self, is_new: bool) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._starting is not None:
            if self._stage != self._drawn:  # however short it is
                self._drawn = self._stage
                with suppress(OSError):
                    self._starting.refresh()
            return
        self._drawn = self._stage
        self._starting = Live(
            console=self._console,
            get_renderable=lambda: Text(self.stage_line()),
            refresh_per_second=2,
            transient=True,
        )
        with suppress(OSError):
            self._starting.start(refresh=True)

    def close(self) -> None:
        self._stop_starting()
        super().close()

    def _stop_starting(self) -> None:
        """Take the line away that shows the start."""
        live, self._starting = self._starting, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    async def show(self, reader: ProgressReader) -> None:
        from rich.live import Live

        self._stop_starting()
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                progress = reader.read()
                self.note(progress)
                live.update(volunteer_picture(progress, self._console.height), refresh=True)
                await asyncio.sleep(SCREEN_SECONDS)


async def read_machine(reader: ProgressReader) -> None:
    """Read the machine's temperature and power now and then, until cancelled."""
    from opendiloco.owner.facts import machine_line

    while True:
        reader.machine = await asyncio.to_thread(machine_line)
        await asyncio.sleep(MACHINE_SECONDS)


def volunteer_picture(progress: Progress, height: int) -> Group:
    """Return what `join` shows on a terminal of so many lines: this machine's progress, and the peers that fit."""
    from rich.console import Group
    from rich.text import Text

    own, run = progress.own, progress.view.run
    lines = [*progress_lines(progress), *reach_lines([own])]
    room = max(LEAST_ROWS, height - len(lines) - LINES_BESIDE)
    rows = [row_of(own, run.config, THIS_MACHINE), *(row_of(beat, run.config) for beat in progress.others)]
    more = [f"… and {len(rows) - room} more"] if len(rows) > room else []
    return Group(peers_table(rows[:room], run.run_id), *map(Text, [*more, *lines]))
