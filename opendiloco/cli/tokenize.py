"""`diloco-peer tokenize`: a run's text as token ids, in files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, NEW_FOLDER

if TYPE_CHECKING:
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import Piece
    from opendiloco.data.tokenizer import Tokenizer

READ_AT_ONCE = 1 << 22
"""Tokens."""


@click.command(short_help="Turn what a run reads into a folder of token ids, once.")
@click.argument("run_toml", type=FILE)
@click.option("--out", type=NEW_FOLDER, required=True, help="A folder that is new or empty.")
@click.option(
    "--source",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of several [[data.sources]], the N-th.",
)
@click.option("--tokens", type=FILE, help="Not the run's text, but this file of token ids, one after another.")
@click.option("--held-out", type=FILE, help="With --tokens: the same of the documents that are held out.")
@click.option(
    "--dtype",
    type=click.Choice(["uint16", "uint32"]),
    default="uint16",
    show_default=True,
    help="With --tokens: the type of the ids in the files, little-endian.",
)
@click.pass_obj
def command(
    log: LogOptions,
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
    from opendiloco.data.token_folder import write_token_folder
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.stages import StageLog, watched_by
    from opendiloco.volunteer.states import new_folder

    if (tokens is None) != (held_out is None):
        raise click.UsageError("--tokens and --held-out go together: what is held out is never trained on.")
    log.start("info")
    config = RunConfig.from_toml(run_toml)
    tokenizer = build_tokenizer(config.tokenizer)
    with new_folder(out), watched_by(StageLog()):
        if tokens is None or held_out is None:
            pieces, split = pieces_of(config, source, tokenizer), config.data.held_out
            about = write_token_folder(out, pieces, tokenizer, split)
        else:
            about = write_token_folder(out, read_pieces(tokens, held_out, dtype), tokenizer)
    click.echo(f"{about.training.tokens:,} tokens for training and {about.held_out.tokens:,} held out are in {out}")
    click.echo(f"data.digest: {about.digest}")


def pieces_of(config: RunConfig, place: int | None, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Return the documents of a run's source. Raises: DataError when it cannot be read whole."""
    from opendiloco.data.token_cache import TokenCache
    from opendiloco.data.tokenized import TokenizedSource

    sources = config.data.all_sources
    if place is None and len(sources) > 1:
        raise click.UsageError(f"the run has {len(sources)} sources: choose one with --source.")
    if place is not None and place > len(sources):
        raise click.UsageError(f"--source {place}: the run has {len(sources)}.")
    section = sources[(place or 1) - 1]
    whole = section.model_copy(update={"shards": None, "windows_per_shard": None})
    return TokenizedSource(whole, config.data.held_out, tokenizer, TokenCache()).pieces()


def read_pieces(training: Path, held_out: Path, dtype: str) -> Iterator[Piece]:
    """Read files of token ids, a piece at a time. Raises: DataError."""
    import numpy as np

    from opendiloco.errors import DataError

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
