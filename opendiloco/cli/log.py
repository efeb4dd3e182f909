"""`diloco-peer log …`: the entries of a run that this machine has, printed and verified."""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.options import EXISTING_FOLDER, FILE, all_of, own_files_options, run_here
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import DamagedLogError
from peers.errors import ManifestError

if TYPE_CHECKING:
    from opendiloco.run import Run
    from peers.log.chain import Entry
    from peers.log.header import Header

logger = logging.getLogger(__name__)

HEADINGS = ("entry", "peers", "tokens", "in all", "payload", "header", "state", "in force")
"""Of the columns: `in all` are the tokens of the lineage, and the three after it are beginnings of digests. `in
force` is the amendment from the next outer step on; "-": the manifest's values are."""
NUMBERS = HEADINGS[:4]


_which_log = all_of(
    click.option("--run", metavar="ID|INVITE", help="The run whose log to take from this machine's own folders."),
    click.option(
        "--folder",
        type=EXISTING_FOLDER,
        help="A folder with a log, instead: the one that `join` has named, or any other.",
    ),
)


@click.group(short_help="Look at the log that this machine has, and verify it.")
def log_group() -> None:
    """Look at the entries of a run that this machine has, and verify them."""


@log_group.command("show")
@_which_log
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N entries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, with whole digests.")
def _show(run: str | None, folder: Path | None, last: int | None, as_json: bool) -> None:
    """Print the entries of a log, one a line."""
    from peers.log.folder import ENTRIES, read_chain

    entries: deque[tuple[Entry, Header]] = deque(maxlen=last)
    path = _find_log(run, folder) / ENTRIES
    _, problem = read_chain(path, see=lambda entry, header, before: entries.append((entry, header)))
    if problem:
        logger.warning("%s. What comes after it is not shown", problem)
    if as_json:
        click.echo(json.dumps([_plain(*each) for each in entries], indent=2))
    elif sys.stdout.isatty():
        _print_table(_cells(*each) for each in entries)
    else:
        for each in entries:
            said = zip(HEADINGS, _cells(*each), strict=True)
            click.echo(", ".join(f"{heading} {cell}" for heading, cell in said))


@log_group.command("verify")
@_which_log
@click.option("--manifest", type=FILE, help="The run's signed manifest.  [default: the one in the run's folder]")
@click.option(
    "--checkpoint",
    type=FILE,
    help="Compute the states from this checkpoint on, which needs no model.  "
    "[default: where the first payload is gone, one in the run's folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the entries' numbers.")
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
    """Compute the digests of a log again, and compare.

    These are the headers', from the manifest or the first entry that is here; those of the payloads that are here; and
    with these those of the states, from a checkpoint or from the run's initial model. Nothing is changed.
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
            f"the log in {path} is not what its digests say, from entry {index} on: {what}.",
            "`diloco-peer join` leaves out what is damaged, and gets it from other peers if there are any.",
        )
    if findings.not_understood is not None:
        raise findings.not_understood


def _find_log(run: str | None, folder: Path | None) -> Path:
    """Return the log's own folder. Raises: UsageError unless there is one, and only one; ManifestError."""
    from opendiloco.storage.run_folder import RunFolder, default_state_folder
    from peers.log.folder import ENTRIES
    from peers.values.manifest import Invite

    if run is None and folder is None:
        run = run_here()
    if run is not None and folder is not None:
        raise click.UsageError("say which log with either --run or --folder.")
    where = folder or default_state_folder() / (Invite.parse(run).run_id if run else "")
    below = [RunFolder(path).log for pattern in ("*", "*/*") for path in sorted(where.glob(pattern))]
    logs = [path for path in (where, RunFolder(where).log, *below) if (path / ENTRIES).is_file()]
    if not logs:
        raise click.UsageError(
            f"there is no log in {where}: no volunteer of this machine has trained in that run. An archive's "
            "lies elsewhere: --folder ARCHIVE/RUN."
        )
    if len(logs) > 1:
        raise click.UsageError(f"there are several: choose one with --folder FOLDER: {', '.join(map(str, logs))}")
    return logs[0]


def _find_manifest(log: Path, manifest: Path | None) -> Run:
    """Return the run of a log: by the given manifest, or the one in the run's folder. Raises: ManifestError."""
    from opendiloco.storage.run_folder import RunFolder, read_manifest

    if manifest is not None:
        return read_manifest(manifest)
    beside = [RunFolder(folder).manifest for folder in (log.absolute().parent, log)]
    for path in filter(Path.exists, beside):
        return read_manifest(path)
    raise ManifestError(
        f"there is no {beside[0]}.",
        "Give the run's signed manifest with --manifest; `diloco-peer run create` has written one.",
    )


def _cells(entry: Entry, header: Header) -> tuple[str, ...]:
    """Return an entry as the table shows it."""
    from opendiloco.view.amended import amendment_in_words

    digests = (header.payload, header.digest, entry.state_digest)
    fragment, amended = f"/{header.fragment}" if header.fragment else "", header.amendment
    in_all = f"{header.lineage_tokens:,}" if header.lineage_tokens else "-"  # said where a cycle is closed
    return (
        f"{header.index:,}{fragment}",
        f"{len(header.roster):,}",
        f"{sum(member.tokens for member in header.roster):,}",
        in_all,
        *("-" if digest is None else digest.hex()[:8] for digest in digests),
        amendment_in_words(amended) if amended else "-",
    )


def _plain(entry: Entry, header: Header) -> dict[str, object]:
    """Return an entry as JSON can say it, digests in hexadecimal."""
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
