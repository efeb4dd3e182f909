"""`diloco-peer join`: train in a run."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import PLACE, LogOptions
from opendiloco.cli.options import open_dashboard, parse_run, refuse_torchrun
from opendiloco.cli.setting_options import SettingsCommand, join_settings

if TYPE_CHECKING:
    import socket

    from opendiloco.dashboard.sources import Source
    from opendiloco.owner.watch import OwnersWatch
    from opendiloco.settings.join_settings import JoinSettings
    from opendiloco.view.join_view import JoinView
    from opendiloco.volunteer.interrupts import Interrupts
    from opendiloco.volunteer.volunteer import Session, Volunteer
    from peers.network.transport import HivemindTransport
    from peers.values.identity import Identity
    from peers.values.manifest import Invite

logger = logging.getLogger(__name__)


@click.command(cls=SettingsCommand)
@join_settings()
@click.pass_obj
def command(log: LogOptions, settings: JoinSettings) -> None:
    """Train in a run with this machine until Ctrl-C.

    The first Ctrl-C leaves politely, the second at once. `doctor --run INVITE` says beforehand whether this machine can
    take part, and what it costs. Each option is also an environment variable (DILOCO_HOURS) and a key of the
    configuration file; `config show` prints all values, and where they come from.
    """
    join(log, settings)


def join(log: LogOptions, settings: JoinSettings) -> None:
    """Train in a run until asked to leave. Raises: DilocoPeerError."""
    from opendiloco.settings.file import unknown_variables
    from opendiloco.tools.doctor.machine import check_quickly
    from opendiloco.volunteer.identity import hold_identity
    from opendiloco.volunteer.interrupts import run_interruptible
    from peers.metrics import serve_metrics

    refuse_torchrun(os.environ)
    view = view_for(log, is_plain=settings.plain)
    for warning in unknown_variables(os.environ):
        logger.warning("%s", warning)
    invite = parse_run(settings.run, settings.initial_peers, settings.state)
    PLACE.run = invite.run_id
    check_quickly(settings.state, settings.workers)
    watch = owners_watch(settings, view)
    if settings.metrics_port is not None:
        serve_metrics(settings.metrics_port, settings.metrics_host)
    page = open_dashboard(settings.dashboard_address)
    with hold_identity(settings.identity) as key:
        PLACE.peer = key.peer_id
        joining = Joining(settings, invite, key, watch, view, page)
        try:
            run_interruptible(joining.live)
        finally:
            view.close()
            gc.freeze()  # ends with the process: Python 3.11 crashed when it took cycles of shared memory's views apart


def owners_watch(settings: JoinSettings, view: JoinView) -> OwnersWatch:
    """What looks at this machine for its owner."""
    from datetime import datetime

    from opendiloco.owner.conditions import Hot, parse_until
    from opendiloco.owner.facts import Observer
    from opendiloco.owner.watch import OwnersWatch

    until = None if settings.until is None else parse_until(settings.until, datetime.now())
    conditions = settings.conditions()
    look = Observer(any(isinstance(one, Hot) for one in conditions)).look if settings.pause_when else None
    watch = OwnersWatch(conditions, until, look, view.say)
    watch.phase = lambda: view.phase
    return watch


@dataclass(frozen=True)
class Joining:
    """One `join`. `page` is the socket of its dashboard, if it has one."""

    settings: JoinSettings
    invite: Invite
    key: Identity
    watch: OwnersWatch
    view: JoinView
    page: socket.socket | None

    async def live(self, interrupts: Interrupts) -> None:
        """Train until asked to leave, whenever the owner wants this machine to: again after each long pause."""
        from opendiloco.owner.controls import serve_controls
        from opendiloco.storage.run_folder import RunFolder

        interrupts.heard = self.watch.stop
        folder = RunFolder.at(self.invite.run_id, self.key.peer_id, self.settings.state).path
        sources: list[Source] = []
        async with shown(self.page, sources), serve_controls(folder, self.watch.answer):
            while await self.watch.wait_until_wanted():
                await self._take_part(interrupts, sources)
                self.view.say("left the run")
                if not self.watch.comes_back:
                    break
                gc.collect()  # so that the machine has its memory back while it is paused

    async def _take_part(self, interrupts: Interrupts, sources: list[Source]) -> None:
        """Take part once, and keep nothing of it."""
        from opendiloco.dashboard.sources import volunteer_source
        from opendiloco.owner.watch import watching

        session = self._session()

        def when_ready(volunteer: Volunteer, transport: HivemindTransport) -> None:
            PLACE.outer_step = lambda: volunteer.outer_step
            interrupts.polite = lambda: leave(volunteer, self.view)
            sources.append(volunteer_source(volunteer, transport))

        try:
            async with watching(self.watch):
                await session.take_part(self.view, when_ready)
        finally:
            interrupts.polite, PLACE.outer_step = None, lambda: None
            sources.clear()

    def _session(self) -> Session:
        """Return the session that the settings ask for. Raises: AdmissionError, MachineError."""
        from opendiloco.storage.journal import Journal
        from opendiloco.storage.remote import check_url
        from opendiloco.volunteer.admission import read_ticket
        from opendiloco.volunteer.volunteer import Session

        settings = self.settings
        ticket = None if settings.ticket is None else read_ticket(settings.ticket)
        journal = None if settings.journal is None else Journal.open(settings.journal)
        if settings.remote is not None:
            check_url(settings.remote)
        return Session(settings, self.invite, self.key, self.watch, ticket, journal)


@asynccontextmanager
async def shown(page: socket.socket | None, sources: list[Source]) -> AsyncIterator[None]:
    """Serve the dashboard, if anybody wants it. While this machine is paused it has no run yet."""
    if page is None:
        yield
        return
    from opendiloco.dashboard.server import dashboard

    async with dashboard(page, lambda: sources):
        yield


def leave(volunteer: Volunteer, view: JoinView) -> None:
    volunteer.leave()
    view.say("leaving the run; a round under way is finished first (Ctrl-C again: leave at once)")


def view_for(log: LogOptions, is_plain: bool) -> JoinView:
    """Begin to log, and return how to show what goes on."""
    from opendiloco.view.join_view import Lines, Screen

    if is_plain or (log.is_json and log.file is None) or not sys.stdout.isatty():
        log.start("info")
        return Lines(log.is_json)
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console()
    if log.file is None:
        # Beside a picture that shows what goes on, lines of every outer step are in the way.
        log.send_to(RichHandler(console=console, show_path=False, show_level=False, show_time=False), "warning")
    else:
        log.start("info")
    return Screen(console)
