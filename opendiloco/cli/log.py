"""The commands `diloco-peer log …`, which print and verify a run's log on this machine."""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.options import EXISTING_FOLDER, FILE, RunOptionCommand, all_of, own_files_options, run_here
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import DamagedLogError
from peers.errors import ManifestError

if TYPE_CHECKING:
    from opendiloco.run import Run
    from peers.log.chain import Entry
    from peers.log.header import Header

logger = logging.getLogger(__name__)

HEADINGS = ("entry", "peers", "tokens", "in all", "payload", "header", "state", "in force")
"""Columns of the table. `in all` is the run's number of tokens up to the entry; `payload`, `header` and `state` are the
first digits of digests; `in force` is the amendment from the next outer step on, or "-" for the manifest's values."""
NUMBERS = HEADINGS[:4]


_which_log = all_of(
    click.option("--run", metavar="ID|INVITE", help="Run whose log on this machine to read."),
    click.option(
        "--folder",
        type=EXISTING_FOLDER,
        help="Folder with a log, instead of --run: the one that `join` names, or an archive's.",
    ),
)


@click.group(short_help="Print and verify the log on this machine.")
def log_group() -> None:
    """Print and verify the log of a run on this machine."""


@log_group.command("show", cls=RunOptionCommand)
@_which_log
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Print only the last N entries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, with whole digests.")
def _show(run: str | None, folder: Path | None, last: int | None, as_json: bool) -> None:
    """Print the entries of a log, one a line."""
    from peers.log.folder import ENTRIES, read_chain

    entries: deque[tuple[Entry, Header]] = deque(maxlen=last)
    path = _find_log(run, folder) / ENTRIES
    _, problem = read_chain(path, see=lambda entry, header, before: entries.append((entry, header)))
    if problem:
        logger.warning("%s. Later entries are not shown", problem)
    if as_json:
        click.echo(json.dumps([_plain(*each) for each in entries], indent=2))
    elif sys.stdout.isatty():
        _print_table(_cells(*each) for each in entries)
    else:
        for each in entries:
            cells = zip(HEADINGS, _cells(*each), strict=True)
            click.echo(", ".join(f"{heading} {cell}" for heading, cell in cells))


@log_group.command("verify", cls=RunOptionCommand)
@_which_log
@click.option("--manifest", type=FILE, help="The run's signed manifest.  [default: the one in the run's folder]")
@click.option(
    "--checkpoint",
    type=FILE,
    help="Compute states from this checkpoint on, which needs no model.  "
    "[default: the initial model, or a checkpoint in the run's folder if the first payload is gone]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@own_files_options
def _verify(
    run: str | None,
    folder: Path | None,
    manifest: Path | None,
    checkpoint: Path | None,
    as_json: bool,
    model: Path | None,
    tokenizer: Path | None,
) -> None:
    """Compare a log's recorded digests with newly computed digests. Nothing is changed.

    The command checks all headers, the payloads that are kept, and the states that follow from these payloads and from
    a checkpoint or the run's initial model.
    """
    from opendiloco.storage.audit import audit
    from opendiloco.storage.loading import load_checkpoint

    path = _find_log(run, folder)
    found = _find_manifest(path, manifest)
    kept = None if checkpoint is None else load_checkpoint(checkpoint, found.run_id)
    findings = audit(path, found, kept, OwnFiles(model, tokenizer))
    if as_json:
        click.echo(json.dumps({"run": found.run_id} | findings.facts(), indent=2))
    else:
        for line in findings.lines():
            click.echo(line)
    if findings.wrong:
        index, what = min(findings.wrong)
        raise DamagedLogError(
            f"the log in {path} does not match its digests from entry {index} on: {what}.",
            "`diloco-peer join` drops the damaged entries and fetches them from other peers, if there are any.",
        )
    if findings.unreadable_amendment is not None:
        raise findings.unreadable_amendment


def _find_log(run: str | None, folder: Path | None) -> Path:
    """Return the folder of the log that the options choose. Raises: UsageError if there is no log or several;
    ManifestError for a malformed invite."""
    from opendiloco.storage.run_folder import RunFolder, default_state_folder
    from peers.log.folder import ENTRIES
    from peers.values.manifest import Invite

    if run is None and folder is None:
        run = run_here()
    if run is not None and folder is not None:
        raise click.UsageError("both --run and --folder are given; give one of them.")
    where = folder or default_state_folder() / (Invite.parse(run).run_id if run else "")
    below = [RunFolder(path).log for pattern in ("*", "*/*") for path in sorted(where.glob(pattern))]
    logs = [path for path in (where, RunFolder(where).log, *below) if (path / ENTRIES).is_file()]
    if not logs:
        raise click.UsageError(
            f"there is no log in {where}: no volunteer on this machine has trained in that run. For the log of an "
            "archive, give --folder ARCHIVE/RUN."
        )
    if len(logs) > 1:
        folders = ", ".join(str(path.parent) for path in logs)
        raise click.UsageError(f"there are several logs: choose one with --folder FOLDER: {folders}")
    return logs[0]


def _find_manifest(log: Path, manifest: Path | None) -> Run:
    """Return the run to which a log belongs, from the file `manifest` or from the manifest beside the log. Raises:
    ManifestError."""
    from opendiloco.storage.run_folder import RunFolder, read_manifest

    if manifest is not None:
        return read_manifest(manifest)
    beside = [RunFolder(folder).manifest for folder in (log.absolute().parent, log)]
    for path in filter(Path.exists, beside):
        return read_manifest(path)
    raise ManifestError(
        f"{beside[0]} does not exist.",
        "Give the run's signed manifest with --manifest; `diloco-peer run create` wrote one.",
    )


def _cells(entry: Entry, header: Header) -> tuple[str, ...]:
    """Return the cells of an entry's row in the table that `log show` prints."""
    from opendiloco.view.amended import amendment_in_words

    digests = (header.payload, header.digest, entry.state_digest)
    fragment, amended = f"/{header.fragment}" if header.fragment else "", header.amendment
    in_all = f"{header.lineage_tokens:,}" if header.lineage_tokens else "-"  # only a cycle's last entry has a token sum
    return (
        f"{header.index:,}{fragment}",
        f"{len(header.roster):,}",
        f"{sum(member.tokens for member in header.roster):,}",
        in_all,
        *("-" if digest is None else digest.hex()[:8] for digest in digests),
        amendment_in_words(amended) if amended else "-",
    )


def _plain(entry: Entry, header: Header) -> dict[str, object]:
    """Return an entry of the log as JSON types, with digests in hexadecimal."""
    from opendiloco.view.amended import plain_amendment

    return {
        "index": header.index,
        "fragment": header.fragment,
        "peers": [{"peer": member.peer, "tokens": member.tokens} for member in header.roster],
        "leader": header.leader,
        "tokens": sum(member.tokens for member in header.roster),
        "lineage_tokens": header.lineage_tokens,
        "previous": header.previous.hex(),
        "payload": header.payload.hex(),
        "header": header.digest.hex(),
        "state": None if entry.state_digest is None else entry.state_digest.hex(),
        "amendment": plain_amendment(header.amendment),
    }


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
