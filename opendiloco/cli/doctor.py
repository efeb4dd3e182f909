"""`diloco-peer doctor`: whether this machine can train, and if not, what to do about it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from opendiloco.cli.exit_codes import INTERRUPTED, UNFIT
from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import parse_run, reader, refuse_torchrun
from opendiloco.cli.setting_options import SettingsCommand, is_typed, join_settings
from peers.network.own_network import everywhere

if TYPE_CHECKING:
    from opendiloco.settings.join_settings import JoinSettings
    from opendiloco.tools.doctor.examination import Examination, Wishes
    from opendiloco.tools.doctor.findings import Finding


@click.command(cls=SettingsCommand, short_help="Say whether this machine can train, and what keeps it from it.")
@join_settings(needs_run=False)
@click.option(
    "--trial/--no-trial",
    default=True,
    show_default=True,
    help="With --run: train for some seconds to measure the speed; else it is estimated, where it can be.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(log: LogOptions, settings: JoinSettings, trial: bool, as_json: bool) -> None:
    """Check this machine, and say what to do about what keeps it from training.

    With --run, look whether it can take part in that run, how fast, and at what price in traffic. Takes the options
    that `join` takes. Changes nothing, and trains nothing that counts.
    """
    from opendiloco.tools.doctor.examination import Wishes
    from opendiloco.volunteer.admission import read_ticket

    refuse_torchrun(os.environ)
    log.start("error")
    invite = parse_run(settings.run, settings.initial_peers, settings.state) if settings.run else None
    is_named = is_typed(click.get_current_context(), "identity")  # else it may be in use by a volunteer
    with reader(settings.identity if is_named else None) as key:
        wishes = Wishes(
            key=key,
            listen=settings.listen or everywhere(0),
            run_id=invite.run_id if invite else None,
            addresses=invite.addresses if invite else settings.initial_peers,
            announce=settings.announce,
            data_port=settings.data_port,
            state=settings.state,
            data=settings.data,
            own=settings.own_files,
            ticket=None if settings.ticket is None else read_ticket(settings.ticket),
            workers=settings.workers,
            tries=trial,
        )
        raise SystemExit(examine(wishes, as_json))


def examine(wishes: Wishes, as_json: bool) -> int:
    """Make the checks, and show what they find. Returns the exit code."""
    from rich.console import Console

    from opendiloco.tools.doctor import findings
    from opendiloco.tools.doctor.examination import Examination
    from opendiloco.volunteer.interrupts import run_interruptible

    console = Console()
    is_live = console.is_terminal and not as_json
    with ExitStack() as stack:
        status = stack.enter_context(console.status("")) if is_live else None

        def tell(finding: Finding) -> None:
            if not as_json:
                findings.show(console, finding)

        def at(what: str) -> None:
            if status is not None:
                status.update(f"{what} …")

        examination = Examination(wishes, tell, at)
        is_done = run_interruptible(lambda interrupts: _to_the_end(examination))
    if not is_done:
        return INTERRUPTED
    if as_json:
        click.echo(findings.as_json(examination.findings, wishes.run_id))
    else:
        click.echo(findings.conclusion(examination.findings, wishes.run_id))
    return UNFIT if findings.worst(examination.findings) is findings.Verdict.FAIL else 0


async def _to_the_end(examination: Examination) -> bool:
    await examination.run()
    return True
