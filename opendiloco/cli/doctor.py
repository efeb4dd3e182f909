"""`diloco-peer doctor`: whether this machine can train, and if not, what to do about it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.exit_codes import INTERRUPTED, UNFIT
from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import (
    FOLDER,
    announce_option,
    data_option,
    data_port_option,
    initial_peers_option,
    listen_option,
    parse_run,
    reader,
    reader_option,
    ticket_option,
    worker_options,
)

if TYPE_CHECKING:
    from opendiloco.doctor.examination import Examination, Wishes
    from opendiloco.doctor.findings import Finding
    from opendiloco.workers.options import WorkerOptions


@click.command(short_help="Say whether this machine can train, and what keeps it from it.")
@click.option("--run", metavar="ID|INVITE", help="See whether this machine can take part in this run: a dry run.")
@initial_peers_option
@reader_option
@ticket_option
@listen_option(0)
@announce_option
@data_port_option(0, "Try this TCP port for bulk connections, as `join` would; 0 is any free one.")
@worker_options
@data_option("Train on the text in this folder.")
@click.option(
    "--state",
    type=FOLDER,
    metavar="FOLDER",
    help="Where `join` would keep checkpoints.  [default: ~/.local/state/diloco-peer]",
)
@click.option(
    "--trial/--no-trial",
    default=True,
    show_default=True,
    help="With --run: train for some seconds to measure the speed; else it is estimated, where it can be.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    log: LogOptions,
    run: str | None,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    ticket: str | None,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    data_port: int,
    workers: WorkerOptions,
    data: tuple[Path, ...],
    state: Path | None,
    trial: bool,
    as_json: bool,
) -> None:
    """Check this machine, and say what to do about what keeps it from training.

    With --run, look whether it can take part in that run, how fast, and at what price in traffic. Takes the options
    that `join` takes. Changes nothing, and trains nothing that counts.
    """
    from opendiloco.doctor.examination import Wishes
    from opendiloco.entrance import read_ticket

    log.start("error")
    invite = None if run is None else parse_run(run, initial_peers)
    with reader(identity) as key:
        wishes = Wishes(
            key=key,
            listen=listen,
            run_id=invite.run_id if invite else None,
            addresses=invite.addresses if invite else initial_peers,
            announce=announce,
            data_port=data_port,
            state=state,
            data=data,
            ticket=None if ticket is None else read_ticket(ticket),
            workers=workers,
            tries=trial,
        )
        raise SystemExit(examine(wishes, as_json))


def examine(wishes: Wishes, as_json: bool) -> int:
    """Make the checks, and show what they find. Returns the exit code."""
    from rich.console import Console

    from opendiloco.doctor import report
    from opendiloco.doctor.examination import Examination
    from opendiloco.doctor.findings import Verdict, worst
    from opendiloco.interrupts import run_interruptible

    console = Console()
    is_live = console.is_terminal and not as_json
    with ExitStack() as stack:
        status = stack.enter_context(console.status("")) if is_live else None

        def tell(finding: Finding) -> None:
            if not as_json:
                report.show(console, finding)

        def at(what: str) -> None:
            if status is not None:
                status.update(f"{what} …")

        examination = Examination(wishes, tell, at)
        is_done = run_interruptible(lambda interrupts: _to_the_end(examination))
    if not is_done:
        return INTERRUPTED
    if as_json:
        click.echo(report.as_json(examination.findings, wishes.run_id))
    else:
        click.echo(report.conclusion(examination.findings, wishes.run_id))
    return UNFIT if worst(examination.findings) is Verdict.FAIL else 0


async def _to_the_end(examination: Examination) -> bool:
    await examination.run()
    return True
