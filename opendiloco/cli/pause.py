"""`diloco-peer pause`: stop training for now."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.controls import tell, volunteer_options


@click.command(short_help="Have this machine's volunteer pause.")
@volunteer_options
def command(volunteers: list[Path]) -> None:
    """Have the volunteer on this machine pause, until `resume`.

    It stops between two inner steps. If the pause lasts for longer than others wait, it leaves the run politely and
    frees its memory, and joins again when the pause is over.
    """
    tell(volunteers, "pause")
