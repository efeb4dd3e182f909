"""How `join` shows what it does: a live screen on a terminal, or plain lines."""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions

if TYPE_CHECKING:
    from rich.console import Console

    from opendiloco.volunteer import Volunteer

logger = logging.getLogger(__name__)

SCREEN_SECONDS = 0.5
LOG_SECONDS = 10.0
THIS_MACHINE = "this machine"


class JoinView(ABC):
    """Shows a person how it goes."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show one line."""

    @abstractmethod
    async def show(self, volunteer: Volunteer) -> None:
        """Show how training goes, until cancelled."""

    async def train(self, volunteer: Volunteer) -> None:
        """Have the volunteer train until its end, and show how it goes meanwhile."""
        showing = asyncio.create_task(self.show(volunteer))
        try:
            await volunteer.train()
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)


class Lines(JoinView):
    """Log lines."""

    def say(self, text: str) -> None:
        with suppress(OSError):  # nobody may be there to read it, and what we are about to do is done all the same
            click.echo(text)

    async def show(self, volunteer: Volunteer) -> None:
        from opendiloco.screen import plain_line, row_of

        while True:
            await asyncio.sleep(LOG_SECONDS)
            own, *others = volunteer.heartbeats()
            logger.info("%s; %d other peers", plain_line(row_of(own, volunteer.run.config, THIS_MACHINE)), len(others))


class Screen(JoinView):
    """A picture on a terminal, above which lines scroll past."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._console.print(text, highlight=False, soft_wrap=True)

    async def show(self, volunteer: Volunteer) -> None:
        from rich.console import Group
        from rich.live import Live

        from opendiloco.screen import held_out_lines, peers_table, reach_lines, row_of

        config = volunteer.run.config
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                own, *others = volunteer.heartbeats()
                rows = [row_of(own, config, THIS_MACHINE), *(row_of(beat, config) for beat in others)]
                table = peers_table(rows, volunteer.run.run_id)
                held_out = held_out_lines([own, *others], volunteer.bytes_per_token)
                live.update(Group(table, *held_out, *reach_lines([own])), refresh=True)
                await asyncio.sleep(SCREEN_SECONDS)


def view_for(log: LogOptions, is_plain: bool) -> JoinView:
    """Begin to log, and return how to show what goes on."""
    if is_plain or not sys.stdout.isatty():
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
