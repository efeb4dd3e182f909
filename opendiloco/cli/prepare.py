"""What an organiser may do with a run.toml before the run: `plan` what it comes to, and `tokenize` what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import FILE, FOLDER, writing
from opendiloco.errors import DataError

if TYPE_CHECKING:
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import Piece
    from opendiloco.data.tokenizer import Tokenizer


@click.command()
@click.argument("run_toml", type=FILE)
@click.option("--peers", "links_toml", type=FILE, required=True, help="The machines and their links: a TOML file.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
def plan(run_toml: Path, links_toml: Path, json_file: Path | None) -> None:
    """Say what RUN_TOML would come to with given peers and links.

    Nobody needs to rent a machine for it: how much of their time peers compute, what they send, how long joining
    takes, memory, tokens a day, cost, and the bandwidth that computing for more of the time would need.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.tools.plan import TARGETS, Links, forecast, least_bandwidth, plain, plan_of, show

    config, links = RunConfig.from_toml(run_toml), Links.from_toml(links_toml)

    from rich.console import Console

    from opendiloco.model.build import sized_skeleton

    planned = plan_of(config, sized_skeleton(config), links)
    found = forecast(planned)
    needed = {target: least_bandwidth(planned, target) for target in TARGETS}
    show(Console(), planned, found, needed)
    if json_file:
        text = json.dumps(plain(planned, found, needed), indent=2) + "\n"
        with writing(json_file, "Name another file."):
            json_file.write_text(text, encoding="utf-8")


READ_AT_ONCE = 1 << 22
"""Tokens."""


@click.command(short_help="Turn what a run reads into a folder of token ids, once.")
@click.argument("run_toml", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="A folder that is new or empty.")
@click.option("--source", type=click.IntRange(min=1), metavar="N", help="Of several [[data.sources]], the N-th.")
@click.option("--tokens", type=FILE, help="Not the run's text, but this file of token ids, one after another.")
@click.option("--held-out", type=FILE, help="With --tokens: the same of the documents that are held out.")
@click.option(
    "--dtype",
    type=click.Choice(["uint16", "uint32"]),
    default="uint16",
    help="With --tokens: the type of the ids in the files, little-endian.",
)
def tokenize(
    run_toml: Path,
    out: Path,
    source: int | None,
    tokens: Path | None,
    held_out: Path | None,
    dtype: str,
) -> None:
    """Write what RUN_TOML reads into a folder of token ids, which is a source itself, and costs no time later.

    With --tokens and --held-out, ids that were made elsewhere are checked and put there.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import write_token_folder
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.stages import StageLog, watched_by
    from opendiloco.volunteer.states import new_folder

    if (tokens is None) != (held_out is None):
        raise click.UsageError("--tokens and --held-out go together: what is held out is never trained on.")
    config = RunConfig.from_toml(run_toml)
    tokenizer = build_tokenizer(config.tokenizer)
    with new_folder(out), watched_by(StageLog()):
        if tokens is None or held_out is None:
            pieces, split = _pieces_of(config, source, tokenizer), config.data.held_out
            about = write_token_folder(out, pieces, tokenizer, split)
        else:
            about = write_token_folder(out, _read_pieces(tokens, held_out, dtype), tokenizer)
    click.echo(f"{about.training.tokens:,} tokens for training and {about.held_out.tokens:,} held out are in {out}")
    click.echo(f"data.digest: {about.digest}")


def _pieces_of(config: RunConfig, place: int | None, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Return the documents of a run's source. Raises: DataError when it cannot be read whole."""
    from opendiloco.data.token_files import TokenCache
    from opendiloco.data.training_data import TokenizedSource

    sources = config.data.all_sources
    if place is None and len(sources) > 1:
        raise click.UsageError(f"the run has {len(sources)} sources: choose one with --source.")
    if place is not None and place > len(sources):
        raise click.UsageError(f"--source {place}: the run has {len(sources)}.")
    section = sources[(place or 1) - 1]
    whole = section.model_copy(update={"shards": None, "windows_per_shard": None})
    return TokenizedSource(whole, config.data.held_out, tokenizer, TokenCache()).pieces()


def _read_pieces(training: Path, held_out: Path, dtype: str) -> Iterator[Piece]:
    """Read files of token ids, a piece at a time. Raises: DataError."""
    import numpy as np

    kind: Any = np.dtype(dtype).newbyteorder("<")
    for path, is_held_out in ((training, False), (held_out, True)):
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.", "Give a file of token ids.") from error
        if size % kind.itemsize:
            raise DataError(
                f"{path} has {size} bytes, which are no whole ids of {kind.itemsize} bytes.",
                "Give the type of its ids with --dtype.",
            )
        with path.open("rb") as file:
            while data := file.read(READ_AT_ONCE * kind.itemsize):
                yield is_held_out, np.frombuffer(data, kind)
