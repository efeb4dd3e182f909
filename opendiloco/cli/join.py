"""The commands `join`, which trains in a run, and `pause`, `resume` and `finish`, which control a running `join`."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from opendiloco.cli.logs import PLACE, LogOptions
from opendiloco.cli.options import (
    RunOptionCommand,
    SettingsCommand,
    all_of,
    is_typed,
    join_option,
    join_settings,
    open_dashboard,
    parse_run,
    refuse_torchrun,
    show_dashboard,
)
from opendiloco.errors import MachineError
from opendiloco.owner.conditions import parse_until
from opendiloco.settings.join_settings import JoinSettings, unknown_variables

if TYPE_CHECKING:
    import socket

    from opendiloco.dashboard.watching import Source
    from opendiloco.owner.conditions import Condition
    from opendiloco.owner.monthly import MonthlyTraffic
    from opendiloco.owner.watch import OwnersWatch
    from opendiloco.view.progress import JoinView
    from opendiloco.volunteer.interrupts import Interrupts
    from opendiloco.volunteer.volunteer import Volunteer
    from peers.network.transport import HivemindTransport
    from peers.values.identity import Identity
    from peers.values.manifest import Invite


logger = logging.getLogger(__name__)
ADDRESSES = 8  # most addresses in a volunteer's answer to its owner, because the answer's size is limited


@click.command(cls=SettingsCommand)
@join_settings()
@click.pass_obj
def join(log: LogOptions, settings: JoinSettings) -> None:
    """Train in a run with this machine until Ctrl-C.

    Give the run as INVITE or with --run. The first Ctrl-C leaves politely, the second at once. `doctor --run INVITE`
    checks beforehand that this machine can take part, and estimates the traffic. Each option is also an environment
    variable (DILOCO_HOURS) and a key of the configuration file; `config show` prints all values and their sources.
    """
    from opendiloco.owner.monthly import MonthlyTraffic
    from opendiloco.storage.run_folder import RunFolder
    from opendiloco.tools.doctor.machine import check_quickly
    from opendiloco.volunteer.identity import hold_identity
    from opendiloco.volunteer.interrupts import run_interruptible
    from peers.metrics import MetricsServer

    refuse_torchrun(os.environ)
    view = _view_for(log, is_plain=settings.plain)
    for warning in unknown_variables(os.environ):
        logger.warning("%s", warning)
    invite = parse_run(settings.run, settings.initial_peers, settings.state)
    PLACE.run = invite.run_id
    check_quickly(settings.state, settings.workers)
    port = settings.metrics_port
    metrics = None if port is None else MetricsServer(port, settings.metrics_host)
    page = open_dashboard(settings.dashboard)
    with hold_identity(settings.identity) as key:
        show_dashboard(page)
        if metrics is not None:
            metrics.log_address()
        PLACE.peer = key.peer_id
        folder = RunFolder.at(invite.run_id, key.peer_id, settings.state).path
        traffic = MonthlyTraffic(folder, settings.monthly_limits)
        watch = _owners_watch(settings, view, traffic.conditions())
        joining = _Joining(settings, invite, key, watch, traffic, view, page)
        try:
            run_interruptible(joining.live)
        finally:
            view.close()
            gc.freeze()  # Python 3.11 crashed at the process's end when it collected views of shared memory


def _owners_watch(settings: JoinSettings, view: JoinView, monthly: Sequence[Condition] = ()) -> OwnersWatch:
    """Return the watch, which pauses the volunteer while the owner's settings or the `monthly` traffic limits require
    it."""
    from opendiloco.owner.facts import Observer
    from opendiloco.owner.watch import OwnersWatch

    until = None if settings.until is None else parse_until(settings.until, datetime.now())
    conditions = (*settings.conditions(), *monthly)
    look = Observer(any(one.name == "hot" for one in conditions)).look if settings.pause_when else None
    return OwnersWatch(conditions, until, look, view.say, lambda: view.phase)


@dataclass(frozen=True)
class _Joining:
    """Runs one `join`: trains in the run, obeys the owner's commands, and shows the dashboard on the listening socket
    `page`, unless that is None."""

    settings: JoinSettings
    invite: Invite
    key: Identity
    watch: OwnersWatch
    traffic: MonthlyTraffic
    view: JoinView
    page: socket.socket | None

    async def live(self, interrupts: Interrupts) -> None:
        """Train until the owner ends the volunteer. After a long pause by the owner, take part in the run again."""
        from opendiloco.owner.controls import OwnerRequest, VolunteerStatus, serve_controls
        from opendiloco.storage.run_folder import RunFolder

        interrupts.heard = self.watch.stop
        folder = RunFolder.at(self.invite.run_id, self.key.peer_id, self.settings.state).path
        sources: list[Source] = []  # for the dashboard: this volunteer while it takes part in the run, else empty
        page: AbstractAsyncContextManager[None] = nullcontext()
        if self.page is not None:
            from opendiloco.dashboard.server import dashboard

            page = dashboard(self.page, lambda: sources)

        def answer(request: OwnerRequest) -> VolunteerStatus:
            facts = {"month": tuple(self.traffic.lines()), "initial_peers": self.invite.addresses[:ADDRESSES]}
            return self.watch.answer(request).model_copy(update=facts)

        farewell = "stopped before joining the run"  # what to show if the volunteer ends now
        async with page, serve_controls(folder, answer):
            try:
                while await self.watch.wait_until_wanted():
                    before, farewell = farewell, ""
                    farewell = await self._take_part(interrupts, sources, before)
                    if not self.watch.comes_back:
                        break
                    gc.collect()  # frees memory while the volunteer is paused
            finally:
                if farewell:
                    self.view.say(farewell)

    async def _take_part(self, interrupts: Interrupts, sources: list[Source], farewell: str) -> str:
        """Take part in the run once, until the volunteer leaves or pauses. Show `farewell` if it is stopped before it
        joins. Return the farewell to show if it then ends before it joins again. Raises: AdmissionError, MachineError.
        """
        from asyncio import CancelledError

        from opendiloco.dashboard.watching import volunteer_source
        from opendiloco.owner.watch import watching
        from opendiloco.storage.remote import check_url
        from opendiloco.storage.run_folder import Journal
        from opendiloco.volunteer.admission import read_ticket
        from opendiloco.volunteer.volunteer import Session

        settings = self.settings
        ticket = None if settings.ticket is None else read_ticket(settings.ticket)
        journal = None if settings.journal is None else Journal(settings.journal)
        if settings.remote is not None:
            check_url(settings.remote)
        session = Session(settings, self.invite, self.key, self.watch, self.traffic, ticket, journal)

        def when_ready(volunteer: Volunteer, transport: HivemindTransport) -> None:
            def leave() -> None:
                volunteer.leave()
                self.view.say("leaving the run after the current round (Ctrl-C again: leave at once)")

            PLACE.outer_step = lambda: volunteer.outer_step
            interrupts.polite = leave
            sources.append(volunteer_source(volunteer, transport))

        try:
            async with watching(self.watch):
                return await session.take_part(self.view, when_ready)
        except CancelledError:
            self.view.say(farewell if interrupts.polite is None else "stopped at once")
            raise
        finally:
            interrupts.polite, PLACE.outer_step = None, lambda: None
            sources.clear()


def _view_for(log: LogOptions, is_plain: bool) -> JoinView:
    """Begin to log, and return the view for `join`: a live screen, or log lines if stdout is no terminal or
    `is_plain`."""
    from opendiloco.view.progress import Lines, Screen

    if is_plain or (log.is_json and log.file is None) or not sys.stdout.isatty():
        log.start("info")
        return Lines(log.is_json)
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console()
    if log.file is None:
        # The live screen already shows each outer step, so only warnings are logged above it.
        log.send_to(RichHandler(console=console, show_path=False, show_level=False, show_time=False), "warning")
    else:
        log.start("info")
    return Screen(console)


# Control of a running volunteer ---------------------------------------------------------------------------------------
_volunteer_options = all_of(
    join_option("run", help="Choose the volunteers in this run, by its id or an invite.", required=False),
    join_option("state", help="Folder of the volunteers, as given to `join --state`."),
    click.option("--peer", metavar="ID", default="", help="Choose the volunteer with this peer id, or with this end."),
    click.option("--all", "all_of_them", is_flag=True, help="Choose all volunteers on this machine."),
)
"""Options that choose among the volunteers on this machine."""


def _find(run: str | None, state: Path | None, peer: str, all_of_them: bool) -> list[Path]:
    """Return the control sockets of the volunteers that the options choose. Raises: MachineError if there is none, or
    several without `--all`."""
    from opendiloco.owner.controls import volunteers
    from opendiloco.storage.run_folder import default_state_folder
    from peers.values.manifest import Invite

    run = run if is_typed(click.get_current_context(), "run") else None
    folder = state or default_state_folder()
    run_id = None if run is None else Invite.parse(run).run_id
    running = volunteers(folder)
    ours = [path for path in running if run_id in (None, path.parent.parent.name)]
    found = [path for path in ours if path.parent.name.endswith(peer.lstrip("…"))]
    if not found:
        which = " ".join(filter(None, (peer, run_id and f"of {run_id}", f"in {folder}")))
        remedy = "If `join` has --state, give the same folder here."
        if running:
            remedy = f"These are running: {', '.join(map(_name, running))}."
        raise MachineError(f"no volunteer {which} is running.", remedy)
    if len(found) > 1 and not all_of_them:
        each = ", ".join(map(_name, found))
        raise MachineError(
            f"{len(found)} volunteers are running: {each}.", "Choose with --run or --peer, or give --all."
        )
    return found


def _name(volunteer: Path) -> str:
    """Return the run id and the end of the peer id of the volunteer with this control socket, as text."""
    run, peer = volunteer.parent.parent.name, volunteer.parent.name
    return f"{run} (…{peer[-8:]})"


def _command(do: Literal["pause", "resume", "finish"], anyway: bool = False, **which: Any) -> None:
    """Send a request to each chosen volunteer and print its answer. Raises: MachineError if a volunteer does not
    answer."""
    from opendiloco.owner.controls import OwnerRequest, ask

    for path in _find(**which):
        answer = ask(path, OwnerRequest(do=do, anyway=anyway))
        if answer is None:
            raise MachineError(f"the volunteer of {path.parent} does not answer.", "It may have just ended: try again.")
        click.echo(f"{_name(path)}: {answer.says}")


@click.command(cls=RunOptionCommand, short_help="Pause this machine's volunteer.")
@_volunteer_options
def pause(**which: Any) -> None:
    """Pause the volunteer on this machine until `resume`.

    It stops between two inner steps. If the pause lasts longer than the other peers wait, the volunteer leaves the run
    politely, frees its memory, and joins again when the pause ends.
    """
    _command("pause", **which)


@click.command(cls=RunOptionCommand, short_help="Resume this machine's volunteer.")
@click.option(
    "--anyway",
    is_flag=True,
    help="Overrule --pause-when, --hours and monthly limits until these conditions end.",
)
@_volunteer_options
def resume(**which: Any) -> None:
    """Resume the volunteer on this machine after a pause."""
    _command("resume", **which)


@click.command(cls=RunOptionCommand, short_help="Stop this machine's volunteer after the current outer step.")
@_volunteer_options
def finish(**which: Any) -> None:
    """Let the volunteer on this machine complete the current outer step, and then leave the run."""
    _command("finish", **which)
