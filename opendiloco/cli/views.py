"""How `join` shows what it does: a live screen on a terminal, or plain lines."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from opendiloco.lookout import Lookout
    from opendiloco.outlook import Outlook
    from opendiloco.owner.watch import OwnersWatch
    from opendiloco.volunteer import Volunteer

logger = logging.getLogger(__name__)

SCREEN_SECONDS = 0.5
HEALTHY_SECONDS = 60.0
MACHINE_SECONDS = 10.0
THIS_MACHINE = "this machine"


class JoinView(ABC):
    """Shows a person how it goes."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._stage, self._since = "", time.monotonic()
        self._share: float | None = None

    @abstractmethod
    def say(self, text: str) -> None:
        """Show one line."""

    @abstractmethod
    def show_stage(self, is_new: bool) -> None:
        """Show what comes before training: the same phase as before, or a new one."""

    @abstractmethod
    async def show(self, volunteer: Volunteer, lookout: Lookout) -> None:
        """Show how training goes, until cancelled."""

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.phase = "ended"

    def stage(self, stage: str, share: float | None) -> None:
        """Hear what comes before training, and how much of it is done."""
        from opendiloco.outlook import phase_of_stage

        if stage != self._stage:
            self._stage, self._since = stage, time.monotonic()
        self._share, before, self.phase = share, self.phase, phase_of_stage(stage)
        self.show_stage(is_new=self.phase != before)

    def stage_line(self) -> str:
        """Return what comes before training, and how far it has come."""
        from opendiloco.outlook import Work, stage_line

        return stage_line(self._stage, Work(self._share, time.monotonic() - self._since))

    async def train(self, volunteer: Volunteer, watch: OwnersWatch) -> None:
        """Have the volunteer train until its end, and show how it goes meanwhile."""
        from opendiloco.lookout import Lookout

        lookout = Lookout(volunteer, lambda: watch.wishes.reasons)
        beside = [asyncio.create_task(self.show(volunteer, lookout)), asyncio.create_task(read_machine(lookout))]
        try:
            await volunteer.train()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def note(self, outlook: Outlook) -> bool:
        """Remember what the volunteer is doing; return whether that is something else than before."""
        is_new, self.phase = outlook.phase != self.phase, outlook.phase
        return is_new


class Lines(JoinView):
    """Log lines: one that says how it goes each minute, and each phase but those of every outer step."""

    def say(self, text: str) -> None:
        with suppress(OSError):  # nobody may be there to read it, and what we are about to do is done all the same
            click.echo(text)

    def show_stage(self, is_new: bool) -> None:
        if is_new:
            logger.info("phase: %s", self.phase)

    async def show(self, volunteer: Volunteer, lookout: Lookout) -> None:
        from opendiloco.outlook import ROUTINE, healthy_line

        due, has_trained = time.monotonic() + HEALTHY_SECONDS, False
        while True:
            outlook = lookout.look()
            if self.note(outlook):
                is_routine = has_trained and outlook.phase in ROUTINE
                logger.log(logging.DEBUG if is_routine else logging.INFO, "phase: %s", outlook.phase)
                has_trained |= outlook.phase in ROUTINE
            if time.monotonic() >= due:
                due += HEALTHY_SECONDS
                logger.info("%s", healthy_line(outlook))
            await asyncio.sleep(SCREEN_SECONDS)


class Screen(JoinView):
    """A picture on a terminal, above which lines scroll past."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._starting: Live | None = None
        self._has_started = False

    def say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._console.print(text, highlight=False, soft_wrap=True)

    def show_stage(self, is_new: bool) -> None:
        from rich.live import Live

        if self._has_started or self._starting is not None:
            return  # workers that start again say so in the log
        self._starting = Live(
            console=self._console, get_renderable=self.stage_line, refresh_per_second=2, transient=True
        )
        with suppress(OSError):
            self._starting.start()

    def close(self) -> None:
        """Take the line away that shows the start."""
        self._has_started = True
        live, self._starting = self._starting, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    async def show(self, volunteer: Volunteer, lookout: Lookout) -> None:
        from rich.console import Group
        from rich.live import Live

        from opendiloco.outlook import outlook_lines
        from opendiloco.screen import peers_table, reach_lines, row_of

        self.close()
        config = volunteer.run.config
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                own, *others = volunteer.heartbeats()
                rows = [row_of(own, config, THIS_MACHINE), *(row_of(beat, config) for beat in others)]
                outlook = lookout.look()
                self.note(outlook)
                held_out = [] if outlook.held_out is None else [outlook.held_out]
                table = peers_table(rows, volunteer.run.run_id)
                live.update(Group(table, *outlook_lines(outlook), *held_out, *reach_lines([own])), refresh=True)
                await asyncio.sleep(SCREEN_SECONDS)


async def read_machine(lookout: Lookout) -> None:
    """Read the machine's temperature and power now and then, until cancelled."""
    from opendiloco.owner.facts import machine_line

    while True:
        lookout.machine = await asyncio.to_thread(machine_line)
        await asyncio.sleep(MACHINE_SECONDS)


def view_for(log: LogOptions, is_plain: bool) -> JoinView:
    """Begin to log, and return how to show what goes on."""
    if is_plain or (log.is_json and log.file is None) or not sys.stdout.isatty():
        log.start("info")
        return Lines()
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console()
    if log.file is None:
        log.send_to(RichHandler(console=console, show_path=False, show_level=False, show_time=False), "info")
    else:
        log.start("info")
    return Screen(console)
