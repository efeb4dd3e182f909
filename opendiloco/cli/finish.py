"""`diloco-peer finish`: leave after this outer step."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.controls import tell, volunteer_options


@click.command(short_help="Have this machine's volunteer leave after this outer step.")
@volunteer_options
def command(volunteers: list[Path]) -> None:
    """Have the volunteer on this machine complete the outer step that is under way, and then leave the run."""
    tell(volunteers, "finish")
