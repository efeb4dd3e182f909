"""`diloco-peer export`: the run's model as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import NEW_FOLDER, Place, data_option, place_options, state_at

if TYPE_CHECKING:
    from opendiloco.model.card import RunFacts
    from opendiloco.model.export import Dtype


@click.command(short_help="Write the run's model as a transformers model.")
@place_options
@data_option("Compute the held-out loss on the text in this folder.")
@click.option("--out", type=NEW_FOLDER, help="A folder that is new or empty.")
@click.option("--push-to", metavar="URL", help="Copy the model to this URL, any that fsspec knows, e.g. hf://me/model.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Store the weights as this; bfloat16 takes half the space.",
)
@click.pass_obj
def command(
    log: LogOptions, place: Place, data: tuple[Path, ...], out: Path | None, push_to: str | None, dtype: Dtype
) -> None:
    """Write the run's model, as its peers or a checkpoint have it, as a transformers model."""
    import tempfile

    from opendiloco.storage.remote import Remote, push_folder, without_secrets

    place.check()
    if out is None and push_to is None:
        raise click.UsageError("say where the model is to go to, with --out, --push-to or both.")
    log.start()
    if push_to is not None:
        Remote(push_to)  # what cannot be used should not be found out after minutes of work
    with tempfile.TemporaryDirectory(prefix="diloco-peer-") as temporary:
        folder = Path(temporary) / "model" if out is None else out
        facts = export(place, folder, dtype, data)
        if push_to is not None:
            push_folder(folder, push_to)
    places = " and ".join(str(each) for each in (out, push_to and without_secrets(push_to)) if each is not None)
    click.echo(f"the model after {facts.outer_steps} outer steps and {facts.tokens:,} tokens is in {places}")
    bits = "" if facts.bits_per_byte is None else f", {facts.bits_per_byte:.4f} bits per byte"
    click.echo(f"held-out loss: {facts.held_out_loss:.4f} nats per token{bits}")


def export(place: Place, folder: Path, dtype: Dtype, data: tuple[Path, ...] = ()) -> RunFacts:
    """Write the model from there. Its card names the commands that do so again, without this machine's paths.

    Raises: MachineError when the folder is not new, and as `state_at`.
    """
    import asyncio

    from opendiloco.volunteer.states import command_line, export_state, new_folder

    options = [] if dtype == "float32" else ["--dtype", dtype]

    def again(outer_steps: int) -> str:
        kept = command_line("export", "--from", "FOLDER", "--at", str(outer_steps), options, "--out", "model")
        if place.source is not None:
            return kept
        run = ("--run", place.invite().run_id, "--initial-peer", "ADDRESS")
        newest = command_line("export", run, options, "--out", "model")
        return f"{newest}  # while outer step {outer_steps} is the newest\n{kept}"

    async def write() -> RunFacts:
        with new_folder(folder):
            async with state_at(place, data) as (run, past, workload):
                return await export_state(run, past, workload, folder, again(past.outer_steps), dtype)

    return asyncio.run(write())
