"""`diloco-peer export`: the run's model as a folder."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import NEW_FOLDER, initial_peers_option, parse_run, run_option


@click.command()
@run_option
@initial_peers_option
@click.option("--out", required=True, type=NEW_FOLDER, help="A folder that is new or empty.")
@click.pass_obj
def command(log: LogOptions, run: str, initial_peers: tuple[str, ...], out: Path) -> None:
    """Fetch the newest state from the run's peers, and write it as a transformers model."""
    import asyncio

    from opendiloco.follower import export_run

    log.start()
    facts = asyncio.run(export_run(parse_run(run, initial_peers), out))
    click.echo(f"the model after {facts.outer_steps} outer steps and {facts.tokens:,} tokens is in {out}")
    click.echo(f"held-out loss: {facts.held_out_loss:.4f} nats per token")
