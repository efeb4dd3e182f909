"""`diloco-peer run …`: what an organiser does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.amend import amend
from opendiloco.cli.logs import LogOptions
from opendiloco.cli.new_run import (
    check,
    with_held_out_text_named,
    with_tokenizer_named,
    with_tokens_named,
    with_weights_named,
)
from opendiloco.cli.options import (
    FILE,
    INITIAL_PEERS,
    identity_option,
    initial_peers_option,
    own_files_options,
    spelled_out,
)
from opendiloco.data.own_files import OwnFiles

if TYPE_CHECKING:
    from opendiloco.errors import MachineError
    from opendiloco.run import Run
    from peers.values.manifest import Invite


@click.group()
def command() -> None:
    """Create runs, look at them, and amend them."""


command.add_command(amend)


@command.command()
@click.argument("run_toml", type=FILE)
@initial_peers_option
@identity_option("The organiser's")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    help="Folder for the manifest's file.  [default: the present one]",
)
@click.pass_obj
def create(
    log: LogOptions,
    run_toml: Path,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    out: Path,
) -> None:
    """Sign RUN_TOML as a new run, and announce it."""
    import asyncio

    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import Run
    from opendiloco.volunteer.identity import load_identity
    from peers.values.manifest import Invite

    log.start()
    if not initial_peers:
        raise click.UsageError(
            f"a run needs a bootstrap node that remembers it: add --initial-peer, or set {INITIAL_PEERS}."
        )
    key = load_identity(identity)
    config = RunConfig.from_toml(run_toml)
    make_folder(out)  # what takes seconds comes afterwards
    config = with_tokens_named(with_tokenizer_named(config))
    check(config)
    from opendiloco.model.build import with_sizes_named  # now that transformers is here

    config = with_sizes_named(config)
    run = Run.sign(with_held_out_text_named(with_weights_named(config)), key)
    path = save(run, out)
    kept = asyncio.run(announce(run, spelled_out(initial_peers)))
    invite = Invite(run.run_id, kept)
    click.echo(f"run id:    {run.run_id}\ninvite:    {invite}\nmanifest:  {path}")
    for line in next_lines(run, invite, path, identity):
        click.echo(line)


def next_lines(run: Run, invite: Invite, manifest: Path, identity: Path | None) -> Iterator[str]:
    """Yield what to type next: on volunteers' machines, and on the organiser's."""
    from opendiloco.data.local_sources import local_sources
    from opendiloco.run import local_tables
    from peers.network.contacts import host_of, is_loopback

    folders, is_by_invitation = local_sources(run.config.data), run.manifest.is_by_invitation
    is_here = all(map(is_loopback, map(host_of, invite.addresses)))
    yield "To train in it, type on this machine:" if is_here else "To train in it, type on any machine:"
    ticket = " --ticket TICKET" if is_by_invitation else ""
    own = "".join(f" --{table} PATH" for table in local_tables(run.config))
    yield f"  diloco-peer join --run {invite}{ticket}{' --data FOLDER' * len(folders)}{own}"
    if own:
        yield "Each PATH is that machine's own, with what this one has there."
    if folders:
        each = "Each FOLDER" if len(folders) > 1 else "FOLDER"
        yield f"{each} is that machine's own, with the text that is here in {', '.join(folders)}."
    if is_here:
        yield "Other machines need an invite with an address of the node that they can reach: create it with that one."
    if is_by_invitation:
        yield "Give out such tickets with"
        yield f"  diloco-peer invite create {manifest}" + (f" --identity {identity}" if identity else "")


@command.command()
def example() -> None:
    """Print a small run.toml to begin with.

    diloco-peer run example > run.toml
    """
    from importlib.resources import files

    click.echo(files("opendiloco").joinpath("demo.toml").read_text(encoding="utf-8"), nl=False)


@command.command()
@click.argument("manifest", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(log: LogOptions, manifest: Path, as_json: bool) -> None:
    """Check the file of a signed MANIFEST, and print what it says."""
    import json

    from opendiloco.storage.run_folder import read_manifest

    log.start()
    run = read_manifest(manifest)
    if as_json:
        signed = run.manifest
        facts = {"run": run.run_id, "organiser": signed.organiser, "protocol_version": signed.version}
        click.echo(json.dumps(facts | {"manifest": signed.digest.hex(), "content": signed.values}, indent=2))
        return
    click.echo(f"run id:     {run.run_id}\norganiser:  {run.manifest.organiser}")
    click.echo(json.dumps(run.manifest.values, indent=2))


@command.command(short_help="Say what a run takes of each peer: memory, disk, time.")
@click.argument("run_toml", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
@own_files_options
@click.pass_obj
def needs(log: LogOptions, run_toml: Path, as_json: bool, model: Path | None, tokenizer: Path | None) -> None:
    """Say what RUN_TOML takes of each peer: memory, disk, bandwidth and days. Asks the hub for nothing but a model."""
    import json

    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import with_own_files

    log.start()
    config = with_own_files(RunConfig.from_toml(run_toml), OwnFiles(model, tokenizer))
    from opendiloco.model.build import sized_skeleton  # what follows takes seconds to import
    from opendiloco.workers.needs import needs_lines, needs_of

    skeleton = sized_skeleton(config)
    if as_json:
        click.echo(json.dumps(needs_of(config, skeleton).plain(), indent=2))
        return
    for line in needs_lines(lambda gpus: needs_of(config, skeleton, gpus)):
        click.echo(line)


async def announce(run: Run, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses of the bootstrap nodes that remember the run now. Raises: SwarmUnreachableError if none does."""
    from opendiloco.volunteer.volunteer import connected
    from peers.errors import SwarmUnreachableError
    from peers.network.bootstrap import announce_manifest
    from peers.values.identity import Identity

    async with connected(Identity.generate(), initial_peers, client_mode=True) as transport:
        kept = await announce_manifest(transport, run.manifest, initial_peers)
    if not kept:
        raise SwarmUnreachableError(
            f"none of the nodes at {', '.join(initial_peers)} remembers the run.",
            "Give the address of a `diloco-peer bootstrap`; what it logs says why it refused.",
        )
    return kept


def make_folder(folder: Path) -> None:
    """Raises: MachineError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def save(run: Run, folder: Path) -> Path:
    """Write the signed manifest to `folder`. Raises: MachineError."""
    path = folder / f"{run.run_id}.manifest"
    try:
        path.write_bytes(run.manifest.pack())
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def cannot_write(path: Path, error: OSError) -> MachineError:
    from opendiloco.errors import MachineError

    return MachineError(f"cannot write {path}: {error.strerror}.", "Name a folder with --out.")
