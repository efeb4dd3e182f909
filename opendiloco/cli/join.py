"""`diloco-peer join`: train in a run."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import PLACE, LogOptions
from opendiloco.cli.options import open_dashboard, parse_run, refuse_torchrun
from opendiloco.cli.setting_options import SettingsCommand, join_settings

if TYPE_CHECKING:
    import socket

    from opendiloco.cli.views import JoinView
    from opendiloco.dashboard.sources import Source
    from opendiloco.interrupts import Interrupts
    from opendiloco.owner.watch import OwnersWatch
    from opendiloco.settings.join_settings import JoinSettings
    from opendiloco.stay import Stay
    from opendiloco.volunteer import Volunteer
    from peers.net.transport import HivemindTransport
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
    from opendiloco.owner.again import toggles_held_back

    with toggles_held_back():
        join(log, settings)


def join(log: LogOptions, settings: JoinSettings) -> None:
    """Train in a run until asked to leave; after a long pause, as a new process. Raises: DilocoPeerError."""
    from opendiloco.cli.views import view_for
    from opendiloco.doctor.quick import check_quickly
    from opendiloco.identity_file import hold_identity
    from opendiloco.interrupts import run_interruptible
    from opendiloco.owner.again import begin_again
    from opendiloco.settings.file import unknown_variables
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
    if watch.comes_back:
        begin_again(watch.wishes, watch.until)


def owners_watch(settings: JoinSettings, view: JoinView) -> OwnersWatch:
    """What looks at this machine for its owner."""
    from datetime import datetime

    from opendiloco.owner.again import remembered_until, remembered_wishes
    from opendiloco.owner.conditions import Hot, parse_until
    from opendiloco.owner.facts import Observer
    from opendiloco.owner.watch import OwnersWatch

    until = None
    if settings.until is not None:
        until = remembered_until(os.environ) or parse_until(settings.until, datetime.now())
    conditions = settings.conditions()
    look = Observer(any(isinstance(one, Hot) for one in conditions)).look if settings.pause_when else None
    watch = OwnersWatch(remembered_wishes(os.environ), conditions, until, look, view.say)
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
        """Wait until the owner wants this machine to train, and train until asked to leave."""
        from opendiloco.checkpoints.run_folder import RunFolder
        from opendiloco.owner.power import set_limits_back
        from opendiloco.owner.watch import watching

        interrupts.heard = self.watch.stop
        set_limits_back(self._state)
        folder = RunFolder.at(self.invite.run_id, self.key.peer_id, self._state).path
        sources: list[Source] = []
        async with shown(self.page, sources), watching(self.watch, folder) as is_wanted:
            if not is_wanted:
                return
            await self._take_part(interrupts, sources)
        self.view.say("left the run")

    @property
    def _state(self) -> Path:
        from opendiloco.checkpoints.run_folder import default_state_folder

        return self.settings.state or default_state_folder()

    async def _take_part(self, interrupts: Interrupts, sources: list[Source]) -> None:
        from opendiloco.dashboard.sources import volunteer_source
        from opendiloco.owner.power import power_limit

        stay, settings = self._stay(), self.settings

        def when_ready(volunteer: Volunteer, transport: HivemindTransport) -> None:
            PLACE.outer_step = lambda: volunteer.outer_step
            interrupts.polite = lambda: leave(volunteer, self.view)
            sources.append(volunteer_source(volunteer, transport))

        with power_limit(settings.gpu_power_limit, settings.device, settings.gpus, self._state):
            await stay.take_part(self.view, when_ready)

    def _stay(self) -> Stay:
        """Return the stay that the settings ask for. Raises: AdmissionError, MachineError."""
        from opendiloco.checkpoints.journal import Journal
        from opendiloco.checkpoints.remote import check_url
        from opendiloco.entrance import read_ticket
        from opendiloco.stay import Stay

        settings = self.settings
        ticket = None if settings.ticket is None else read_ticket(settings.ticket)
        journal = None if settings.journal is None else Journal.open(settings.journal)
        if settings.remote is not None:
            check_url(settings.remote)
        return Stay(settings, self.invite, self.key, self.watch, ticket, journal)


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
