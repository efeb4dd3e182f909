"""`diloco-peer identity show`: the key that makes this machine the same peer again."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.options import identity_option


@click.group()
def command() -> None:
    """Show the key of this machine."""


@command.command(short_help="Print the peer id, and where the key is.")
@identity_option("This machine's")
def show(identity: Path | None) -> None:
    """Print the peer id of this machine's key, and the key's file. Makes no key."""
    from opendiloco.volunteer.identity import usable_path
    from peers.values.identity import Identity

    path = usable_path(identity)
    click.echo(f"peer id:   {Identity.load(path).peer_id}")
    click.echo(f"key file:  {path}")
