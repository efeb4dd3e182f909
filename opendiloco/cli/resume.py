"""`diloco-peer resume`: go on after a pause."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.controls import tell, volunteer_options


@click.command(short_help="Have this machine's volunteer go on.")
@click.option("--anyway", is_flag=True, help="Also against --pause-when and --hours, until what holds now has ended.")
@volunteer_options
def command(volunteers: list[Path], anyway: bool) -> None:
    """Have the volunteer on this machine go on after a pause."""
    tell(volunteers, "resume", anyway)
