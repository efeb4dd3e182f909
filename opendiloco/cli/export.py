"""`diloco-peer export`: the run's model as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, NEW_FOLDER, initial_peers_option, parse_run, reader, reader_option

if TYPE_CHECKING:
    from opendiloco.model.export import RunFacts

ANY_PATH = click.Path(path_type=Path)


@click.command()
@click.option(
    "--run", metavar="ID|INVITE", help="The run's id, or an invite to it: take the newest state of its peers."
)
@initial_peers_option
@reader_option
@click.option("--from", "source", type=ANY_PATH, help="Take a checkpoint: its file, or the newest in a folder.")
@click.option("--at", type=click.IntRange(min=0), metavar="N", help="With --from: the model after N outer steps.")
@click.option("--manifest", type=FILE, help="With --from: the run's signed manifest.  [default: the one beside it]")
@click.option("--out", type=NEW_FOLDER, help="A folder that is new or empty.")
@click.option("--push-to", metavar="URL", help="Copy the model to this URL, any that fsspec knows, e.g. hf://me/model.")
@click.pass_obj
def command(
    log: LogOptions,
    run: str | None,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    source: Path | None,
    at: int | None,
    manifest: Path | None,
    out: Path | None,
    push_to: str | None,
) -> None:
    """Write the run's model, as its peers or a checkpoint have it, as a transformers model."""
    import tempfile

    from opendiloco.checkpoints.remote import Remote, push_folder, without_secrets

    if (run is None) == (source is None):
        raise click.UsageError("say where the model is to come from, with either --run or --from.")
    if source is None and (at is not None or manifest is not None):
        raise click.UsageError("--at and --manifest choose a checkpoint: give its folder, too, with --from.")
    if out is None and push_to is None:
        raise click.UsageError("say where the model is to go to, with --out, --push-to or both.")
    log.start()
    if push_to is not None:
        Remote(push_to)  # what cannot be used should not be found out after minutes of work
    with tempfile.TemporaryDirectory(prefix="diloco-peer-") as temporary:
        folder = Path(temporary) / "model" if out is None else out
        if run:
            facts = export_from_peers(run, initial_peers, identity, folder)
        else:
            facts = export_from_disk(source, at, manifest, folder)
        if push_to is not None:
            push_folder(folder, push_to)
    places = " and ".join(str(place) for place in (out, push_to and without_secrets(push_to)) if place is not None)
    click.echo(f"the model after {facts.outer_steps} outer steps and {facts.tokens:,} tokens is in {places}")
    click.echo(f"held-out loss: {facts.held_out_loss:.4f} nats per token")


def export_from_peers(run: str, initial_peers: tuple[str, ...], identity: Path | None, folder: Path) -> RunFacts:
    import asyncio

    from opendiloco.follower import export_run

    with reader(identity) as key:
        return asyncio.run(export_run(parse_run(run, initial_peers), folder, key))


def export_from_disk(source: Path | None, at: int | None, manifest: Path | None, folder: Path) -> RunFacts:
    import asyncio

    from opendiloco.checkpoints.export import export_origin, find_origin

    assert source is not None
    return asyncio.run(export_origin(find_origin(source, at, manifest), folder))
