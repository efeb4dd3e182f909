"""`diloco-peer run …`: what an organiser does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.amend import amend
from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, INITIAL_PEERS, identity_option, initial_peers_option, spelled_out

if TYPE_CHECKING:
    from opendiloco.config.run_config import RunConfig
    from opendiloco.errors import MachineError
    from opendiloco.run import Run
    from peers.values.manifest import Invite

logger = logging.getLogger(__name__)


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
@click.option(
    "--anchor",
    "anchors",
    multiple=True,
    metavar="PEER_ID",
    help="Let this key decide between branches of the log, too, after those of run.toml or the organiser's: the peer id"
    " of a `bootstrap --archive`, for instance. May be repeated.",
)
@click.pass_obj
def create(
    log: LogOptions,
    run_toml: Path,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    out: Path,
    anchors: tuple[str, ...],
) -> None:
    """Sign RUN_TOML as a new run, and announce it."""
    import asyncio

    from opendiloco.config.run_config import RunConfig
    from opendiloco.identity_file import load_identity
    from opendiloco.run import Run
    from peers.values.manifest import Invite

    log.start()
    if not initial_peers:
        raise click.UsageError(
            f"a run needs a bootstrap node that remembers it: add --initial-peer, or set {INITIAL_PEERS}."
        )
    key = load_identity(identity)
    config = with_anchors(RunConfig.from_toml(run_toml), key.peer_id, anchors)
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

    folders, is_by_invitation = local_sources(run.config.data), run.manifest.is_by_invitation
    yield "To train in it, type on any machine:"
    ticket = " --ticket TICKET" if is_by_invitation else ""
    yield f"  diloco-peer join --run {invite}{ticket}{' --data FOLDER' * len(folders)}"
    if folders:
        each = "Each FOLDER" if len(folders) > 1 else "FOLDER"
        yield f"{each} is that machine's own, with the text that is here in {', '.join(folders)}."
    if is_by_invitation:
        yield "Give out such tickets with"
        yield f"  diloco-peer invite create {manifest}" + (f" --identity {identity}" if identity else "")


@command.command()
@click.argument("manifest", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(log: LogOptions, manifest: Path, as_json: bool) -> None:
    """Check the file of a signed MANIFEST, and print what it says."""
    import json

    from opendiloco.checkpoints.run_folder import read_manifest

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
@click.pass_obj
def needs(log: LogOptions, run_toml: Path, as_json: bool) -> None:
    """Say what RUN_TOML takes of each peer: memory, disk, bandwidth and days. Asks the hub for nothing but a model."""
    import json
    from dataclasses import asdict

    from opendiloco.config.run_config import RunConfig

    log.start()
    config = RunConfig.from_toml(run_toml)
    from opendiloco.listed_run import Taken  # what follows takes seconds to import
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_lines, needs_of

    skeleton = sized_skeleton(config)
    if as_json:
        click.echo(json.dumps(asdict(Taken.of(needs_of(config, skeleton))), indent=2))
        return
    for line in needs_lines(lambda gpus: needs_of(config, skeleton, gpus)):
        click.echo(line)


def with_anchors(config: RunConfig, organiser: str, anchors: tuple[str, ...]) -> RunConfig:
    """Name these anchors after those of run.toml; if it names none, after the organiser's. Raises: ManifestError."""
    from opendiloco.config.run_config import RunConfig

    if not anchors:
        return config
    named = (organiser,) if config.anchors is None else config.anchors
    content = config.to_manifest_content() | {"anchors": [*named, *anchors]}
    return RunConfig.from_manifest_content(content, "--anchor")


def check(config: RunConfig) -> None:
    """Whether others can train in it, as far as this machine can tell. Takes seconds, mostly to import transformers.

    Raises: ManifestError when the model or the inner optimizer cannot be built. What only others need to have is worth
    no more than a warning.
    """
    from opendiloco.data.local_sources import local_sources
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.errors import DataError
    from opendiloco.inner.optimizers import check_inner_optimizer
    from opendiloco.model.build import build_skeleton

    check_inner_optimizer(config.inner_optimizer)
    momentum = config.outer_optimizer.momentum
    if config.codec.kind == "sparse" and momentum > 0:
        logger.warning("outer_optimizer.momentum = %g overshoots beside codec.kind = 'sparse'; make it 0", momentum)
    for source in local_sources(config.data):
        if not Path(source).exists():
            logger.warning("data.source = %r is not on this machine; each volunteer names a folder with --data", source)
    if config.model.path is not None:
        return
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        logger.warning("the model is not checked: %s", error)
        return
    build_skeleton(config, tokenizer)


def with_tokenizer_named(config: RunConfig) -> RunConfig:
    """With the digest of the tokenizer, if that comes from elsewhere and is to be had on this machine.

    Raises: MachineError when the run names another digest.
    """
    from opendiloco.data.tokenizer import build_tokenizer, digest_of_tokenizer
    from opendiloco.errors import DataError

    section = config.tokenizer
    if section.path is None:
        return config
    try:
        digest = digest_of_tokenizer(build_tokenizer(section))
    except DataError as error:
        lacking = "is not held against its digest" if section.digest else "gets no digest to hold volunteers' against"
        logger.warning("the tokenizer %s: %s", lacking, error)
        return config
    return config.model_copy(update={"tokenizer": section.model_copy(update={"digest": digest})})


def with_tokens_named(config: RunConfig) -> RunConfig:
    """With the digest of each source that is a folder of tokens, so that all peers read the same.

    Raises: DataError when the run names another digest, or a folder cannot be read.
    """
    from opendiloco.data.token_folder import is_token_folder, read_about
    from opendiloco.errors import DataError

    sources = []
    for section in config.data.all_sources:
        if is_token_folder(section.source):
            digest = read_about(Path(section.source)).digest
            if section.digest not in (None, digest):
                raise DataError(
                    f"the run's data.digest is {section.digest}; the tokens of {section.source!r} have {digest}.",
                    "Get the tokens that the run means, or leave out data.digest.",
                )
            section = section.model_copy(update={"digest": digest})
        sources.append(section)
    if all(section.digest is None for section in sources):
        return config
    return config.model_copy(update={"data": config.data.with_sources(tuple(sources))})


def with_weights_named(config: RunConfig) -> RunConfig:
    """With the digest of the weights that a run begins with, if these come from elsewhere. Takes the memory that the
    model does.

    Raises: MachineError when the run names another digest; ManifestError and DataError: see `initial_theta`.
    """
    section = config.model
    if section.path is None and section.digest is None:
        return config
    from opendiloco.model.build import initial_theta
    from opendiloco.model.initial_weights import check_initial_weights, digest_of_weights

    theta = initial_theta(config)
    if section.digest is None:
        section = section.model_copy(update={"digest": digest_of_weights(theta)})
    check_initial_weights(theta, section)
    return config.model_copy(update={"model": section})


def with_held_out_text_named(config: RunConfig) -> RunConfig:
    """With the digest of what evaluation reads, if it is in folders that each volunteer names, and on this machine.

    A peer whose folder has other text keeps the losses that it finds to itself. Raises: DataError when the run names
    another digest; MachineError without memory for the tokens.
    """
    from opendiloco.data.local_sources import local_sources
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import load_data
    from opendiloco.errors import DataError

    section, folders = config.evaluation, local_sources(config.data)
    if not section.every or not folders:
        return config
    if not all(Path(folder).exists() for folder in folders):
        if section.digest is None and any(source.digest is None for source in config.data.all_sources):
            logger.warning(
                "nothing says which text is held out, since it is not on this machine: volunteers keep their held-out "
                "losses to themselves. Create the run where the text is, or give evaluation.digest."
            )
        return config
    try:
        held_out = load_data(config, build_tokenizer(config.tokenizer)).held_out
    except DataError as error:
        logger.warning("the held-out text gets no digest to hold volunteers' against: %s", error)
        return config
    digest = held_out.digest(section.windows)
    if section.digest not in (None, digest):
        raise DataError(
            f"the run's held-out text has the digest {section.digest}; that of {', '.join(folders)} has {digest}.",
            "Get the text that the run means, or leave out evaluation.digest.",
        )
    return config.model_copy(update={"evaluation": section.model_copy(update={"digest": digest})})


async def announce(run: Run, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses of the bootstrap nodes that remember the run now. Raises: SwarmUnreachableError if none does."""
    from opendiloco.volunteer import connected
    from peers.errors import SwarmUnreachableError
    from peers.net.bootstrap import announce_manifest
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
