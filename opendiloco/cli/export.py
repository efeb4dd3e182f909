"""The commands `export`, which writes a run's model as a folder, and `sample`, which prints text that the model
writes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import (
    FILE,
    FOLDER,
    RunOptionCommand,
    all_of,
    data_option,
    initial_peers_option,
    is_typed,
    join_option,
    own_files_options,
    own_words,
    parse_run,
    reader_option,
    run_here,
)
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import fit_for_terminal
from opendiloco.workers.options import TEMPERATURE
from peers.errors import SwarmUnreachableError

if TYPE_CHECKING:
    from opendiloco.model.export import Dtype, RunFacts
    from opendiloco.run import Run
    from opendiloco.volunteer.local_workload import LocalWorkload
    from opendiloco.volunteer.states import History
    from peers.values.manifest import Invite


@dataclass(frozen=True)
class _Place:
    """The source from which `export` or `sample` reads a model: the peers of a run (`invite`) or a checkpoint
    (`source`). `own` names the user's own model and tokenizer.

    With `data` = None none of the run's text is read.
    """

    invite: Invite | None
    identity: Path | None
    source: Path | None
    at: int | None
    manifest: Path | None
    own: OwnFiles
    data: tuple[Path, ...] | None = None

    @asynccontextmanager
    async def state(self) -> AsyncIterator[tuple[Run, History, LocalWorkload]]:
        """Fetch or load the model's state. Yield the run, the run's history, and a `LocalWorkload` that has the state.
        Raises: DilocoPeerError."""
        from opendiloco.storage.run_folder import kept_folder
        from opendiloco.volunteer.states import find_origin, newest_state, state_of

        if self.source is not None:
            origin = find_origin(self.source, self.at, self.manifest, self.own)
            async with state_of(origin, self.data) as found:
                yield found
        elif self.invite is not None:
            try:
                async with newest_state(self.invite, self.identity, self.data, self.own) as found:
                    yield found
            except SwarmUnreachableError as error:
                if (kept := kept_folder(self.invite.run_id)) is not None:
                    error.remedy += f" This machine has a checkpoint of the run: {_typed_line(kept)}"
                raise


def _typed_line(kept: Path) -> str:
    """Return the command line that the user has typed, with the folder `kept` of a checkpoint instead of the run."""
    from opendiloco.storage.remote import without_secrets
    from opendiloco.volunteer.states import command_line

    context, options, arguments = click.get_current_context(), ["--from", str(kept)], list[str]()
    for each in context.command.params:
        if is_typed(context, str(each.name)) and each.name not in ("run", "initial_peers"):
            value = context.params[str(each.name)]
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(each, click.Option):
                    options += [each.opts[0], without_secrets(str(one))]
                else:
                    arguments.append(str(one))
    end = ["--"] if any(each.startswith("-") for each in arguments) else []
    return command_line(str(context.info_name), options, end, arguments)


def _place_of(
    run: str | None, initial_peers: tuple[str, ...], model: Path | None, tokenizer: Path | None, **chosen: Any
) -> _Place:
    """Return the source of the model that the command's options name. Raises: UsageError if the options contradict each
    other."""
    source = chosen["source"]
    if source is not None and not is_typed(click.get_current_context(), "run"):
        run = None  # --from on the command line prevails over a run id from the configuration file or the environment
    if run is None and source is None:
        run = run_here()
    if (run is None) == (source is None):
        raise click.UsageError("name the source of the model: give either --run or --from.")
    if source is None and (chosen["at"] is not None or chosen["manifest"] is not None):
        raise click.UsageError("--at and --manifest choose a checkpoint: also give its folder with --from.")
    invite = None if run is None else parse_run(run, initial_peers)
    return _Place(invite, own=OwnFiles(model, tokenizer), **chosen)


_place_options = all_of(
    join_option("run", help="Id of the run, or an invite: take the newest state of its peers.", required=False),
    initial_peers_option,
    reader_option,
    click.option(
        "--from",
        "source",
        type=click.Path(path_type=Path),
        help="Take this checkpoint file, or the newest state in this folder.",
    ),
    click.option("--at", type=click.IntRange(min=0), metavar="N", help="With --from: the model after N outer steps."),
    click.option(
        "--manifest",
        type=FILE,
        help="With --from: the run's signed manifest.  [default: the one beside the checkpoint]",
    ),
    own_files_options,
)


@click.command(cls=RunOptionCommand, short_help="Write a run's model as a transformers model.")
@_place_options
@data_option("Folder or file with text for the held-out loss.")
@click.option("--out", type=FOLDER, help="Folder to write to, new or empty.")
@click.option("--push-to", metavar="URL", help="Copy the model to this URL, such as hf://me/model.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Type of the stored weights; bfloat16 needs half the space.",
)
def export(out: Path | None, push_to: str | None, dtype: Dtype, **where: Any) -> None:
    """Write a run's model, from its peers or from a checkpoint, as a transformers model."""
    import asyncio

    from opendiloco.evaluation_turns import loss_in_words
    from opendiloco.storage.remote import Remote, push_folder, without_secrets
    from opendiloco.volunteer.states import export_state, new_folder

    place = _place_of(**where)
    if out is None and push_to is None:
        raise click.UsageError("name where to write the model: give --out, --push-to or both.")
    if push_to is not None:
        Remote(push_to)  # raises an error for a wrong URL now, before minutes of work
    with tempfile.TemporaryDirectory(prefix="diloco-peer-") as temporary:
        folder = Path(temporary) / "model" if out is None else out

        async def write() -> RunFacts:
            with new_folder(folder):
                async with place.state() as (run, past, workload):
                    again = _commands(place, run, past, dtype)
                    return await export_state(run, past, workload, folder, again, dtype)

        facts = asyncio.run(write())
        if push_to is not None:
            push_folder(folder, push_to)
    places = " and ".join(str(each) for each in (out, push_to and without_secrets(push_to)) if each is not None)
    click.echo(f"wrote the model after {facts.outer_steps} outer steps and {facts.tokens:,} tokens to {places}")
    if facts.held_out_loss is not None:
        click.echo(f"held-out loss: {loss_in_words(facts.held_out_loss, facts.bits_per_byte)}")


def _commands(place: _Place, run: Run, past: History, dtype: Dtype) -> str:
    """Return the text of `export` commands that write the same model again, with words such as FOLDER in place of
    paths."""
    from opendiloco.volunteer.states import command_line, run_options

    options = own_words(place.data or (), place.own) + ([] if dtype == "float32" else ["--dtype", dtype])
    kept = command_line("export", "--from", "FOLDER", "--at", str(past.outer_steps), options, "--out", "model")
    if place.source is not None:
        return kept
    newest = command_line("export", run_options(run), options, "--out", "model")
    return f"{newest}  # while outer step {past.outer_steps} is the newest\n{kept}"


@click.command(cls=RunOptionCommand, short_help="Print text that a run's model writes after a prompt.")
@_place_options
@click.option("--tokens", type=click.IntRange(1, 100_000), metavar="N", default=100, help="Write at most N tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    metavar="T",
    default=TEMPERATURE,
    help="Randomness of the text; 0 always takes the likeliest token.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    default=0,
    help="Seed of the first sample; each further sample adds 1.",
)
@click.option("--samples", type=click.IntRange(1, 1000), metavar="N", default=1, help="Write N samples.")
@click.argument("prompt")
def sample(tokens: int, temperature: float, seed: int, samples: int, prompt: str, **where: Any) -> None:
    """Print text that a run's model writes after PROMPT. The model is fetched from the run's peers or loaded from a
    checkpoint.

    On one machine the same state, prompt and seed give the same text.
    """
    import asyncio

    place = _place_of(**where)

    async def write() -> None:
        async with place.state() as (_, past, workload):
            click.echo(f"after {past.outer_steps} outer steps:", err=True)
            for number in range(samples):
                written = await workload.trainer.generate(prompt, tokens, seed + number, temperature)
                click.echo(prompt + (fit_for_terminal(written.expandtabs()) if sys.stdout.isatty() else written))

    asyncio.run(write())
