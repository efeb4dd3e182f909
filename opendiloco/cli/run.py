"""The organiser's commands: `plan` and `tokenize` before a run; `run …` creates, shows and amends runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import (
    FILE,
    FOLDER,
    RunOptionCommand,
    initial_peers_option,
    join_option,
    known_addresses,
    own_files_options,
    parse_run,
    run_option,
    writing,
)
from opendiloco.data.own_files import OwnFiles, is_here, local_sources, with_paths_marked
from opendiloco.errors import DataError
from opendiloco.quantities import OptimizerState
from peers.errors import ManifestError, SwarmUnreachableError

if TYPE_CHECKING:
    from opendiloco.config.data import DataSection, SourceSection
    from opendiloco.config.overrides import Overrides
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import Piece
    from opendiloco.run import Run
    from opendiloco.view.run_view import RunView
    from peers.values.identity import Identity
    from peers.values.manifest import Amendment, Invite


logger = logging.getLogger(__name__)

READ_AT_ONCE = 1 << 22  # most tokens read from a file at once
GIVEN_TO = 16
"""Most peers to which an amendment is sent. They pass it on to the others."""


# Before the run -------------------------------------------------------------------------------------------------------
@click.command(short_help="Estimate the speed, traffic and cost of a run.")
@click.argument("run_toml", type=FILE)
@click.option("--peers", "links_toml", type=FILE, required=True, help="TOML file with the machines and their links.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
def plan(run_toml: Path, links_toml: Path, json_file: Path | None) -> None:
    """Estimate the speed, traffic and cost of RUN_TOML with given peers and links.

    The command prints the share of time that peers compute, their traffic, the time to join, memory, tokens a day,
    cost, and the bandwidth that a higher share would need. It needs none of the machines.
    """
    from rich.console import Console

    from opendiloco.config.run_config import RunConfig
    from opendiloco.tools.plan import TARGETS, LinksFile, forecast, least_bandwidth, plain, plan_of, show

    config, links = RunConfig.from_toml(run_toml), LinksFile.from_toml(links_toml)

    from opendiloco.model.build import (
        sized_skeleton,
    )  # slow import, so errors in RUN_TOML and LINKS_TOML are reported first

    with chdir(run_toml.parent):  # relative paths start at run.toml's folder
        planned = plan_of(config, sized_skeleton(config), links)
    found = forecast(planned)
    needed = {target: least_bandwidth(planned, target) for target in TARGETS}
    show(Console(), planned, found, needed)
    if json_file:
        text = json.dumps(plain(planned, found, needed), indent=2) + "\n"
        with writing(json_file, "Name another file."):
            json_file.write_text(text, encoding="utf-8")


@click.command(short_help="Write the text of a run as a folder of token ids.")
@click.argument("run_toml", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="Folder to write to, new or empty.")
@click.option("--source", type=click.IntRange(min=1), metavar="N", help="Read the N-th of [[data.sources]].")
@click.option("--tokens", type=FILE, help="Read token ids from this file instead of the run's text.")
@click.option("--held-out", type=FILE, help="With --tokens: file with the token ids of the held-out documents.")
@click.option(
    "--dtype",
    type=click.Choice(["uint16", "uint32"]),
    default="uint16",
    help="With --tokens: type of the ids in the files, little-endian.",
)
def tokenize(
    run_toml: Path, out: Path, source: int | None, tokens: Path | None, held_out: Path | None, dtype: str
) -> None:
    """Tokenize a source of RUN_TOML, and write the token ids to a folder. Runs can use this folder as a source.

    With --tokens and --held-out, the command checks and copies token ids that were made elsewhere.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import TokenCache, write_token_folder
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import TokenizedSource, check_share
    from opendiloco.stages import StageLog, watched_by
    from opendiloco.volunteer.states import new_folder

    if (tokens is None) != (held_out is None):
        raise click.UsageError("--tokens and --held-out need each other: give both or neither.")
    config = RunConfig.from_toml(run_toml)
    out, tokens, held_out = out.absolute(), tokens and tokens.absolute(), held_out and held_out.absolute()
    with chdir(run_toml.parent), new_folder(out), watched_by(StageLog()):  # relative paths start at run.toml's folder
        tokenizer = build_tokenizer(config.tokenizer)
        if tokens is None or held_out is None:
            section, split = _section_of(config, source), config.data.held_out
            pieces = TokenizedSource(section, split, tokenizer, TokenCache()).pieces()
            about = write_token_folder(out, pieces, tokenizer, split)
            check_share(section.source, split, about.training.tokens, about.held_out.tokens)
        else:
            about = write_token_folder(out, _read_pieces(tokens, held_out, dtype), tokenizer)
    click.echo(f"{about.training.tokens:,} tokens for training and {about.held_out.tokens:,} held out are in {out}")
    click.echo(f"data.digest: {about.digest}")


def _section_of(config: RunConfig, place: int | None) -> SourceSection:
    """Return the section of the run's data source at `place` (counted from 1; None: the only source), with its shard
    settings removed. Raises: UsageError."""
    sources = config.data.all_sources
    if place is None and len(sources) > 1:
        raise click.UsageError(f"the run has {len(sources)} sources: choose one with --source.")
    if place is not None and place > len(sources):
        raise click.UsageError(f"--source {place}: the run has only {len(sources)} sources.")
    return sources[(place or 1) - 1].model_copy(update={"shards": None, "windows_per_shard": None})


def _read_pieces(training: Path, held_out: Path, dtype: str) -> Iterator[Piece]:
    """Yield token ids from the training and the held-out file, piece by piece. Raises: DataError for a broken file."""
    import numpy as np

    kind: Any = np.dtype(dtype).newbyteorder("<")
    for path, is_held_out in ((training, False), (held_out, True)):
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.", "Give a file of token ids.") from error
        if size % kind.itemsize:
            raise DataError(
                f"{path} has {size} bytes, which is not a multiple of an id's {kind.itemsize} bytes.",
                "Give the type of its ids with --dtype.",
            )
        with path.open("rb") as file:
            while data := file.read(READ_AT_ONCE * kind.itemsize):
                yield is_held_out, np.frombuffer(data, kind)


# A run ----------------------------------------------------------------------------------------------------------------
@click.group()
def run_group() -> None:
    """Create, show and amend runs."""


@run_group.command("create")
@click.argument("run_toml", type=FILE)
@initial_peers_option
@join_option("identity", help="The organiser's key file.")
@click.option("--out", type=FOLDER, default=".", help="Folder for the signed manifest.")
@click.option("--without-text", is_flag=True, help="Create the run though its local text is not on this machine.")
def _create(
    run_toml: Path, initial_peers: tuple[str, ...], identity: Path | None, out: Path, without_text: bool
) -> None:
    """Sign RUN_TOML as a new run, and announce it to the bootstrap nodes.

    Relative paths in RUN_TOML start at its folder.
    """
    import asyncio

    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import Run
    from opendiloco.stages import StageLog, at_stage, watched_by
    from opendiloco.volunteer.identity import load_identity
    from peers.values.manifest import Invite

    addresses = known_addresses(initial_peers, "a new run is announced to a bootstrap node")
    key = load_identity(identity)
    config = RunConfig.from_toml(run_toml)
    remedy = "Name a folder with --out."
    with writing(out, remedy):
        out.mkdir(parents=True, exist_ok=True)  # if this folder cannot be created, fail before the slow steps
    with _warnings_last(), watched_by(StageLog()):
        at_stage("checking the model")
        with chdir(run_toml.parent):
            config = config.model_copy(update={"data": with_paths_marked(config.data)})
            config = _with_tokens_named(_with_tokenizer_named(config))
            _check(config, without_text)
            from opendiloco.model.build import with_sizes_named  # imports transformers; the checks above do not need it

            config = _with_weights_named(with_sizes_named(config))
            at_stage("reading the text")
            run = Run.sign(_with_held_out_text_named(config), key)
        path = out / f"{run.run_id}.manifest"
        with writing(path, remedy):
            path.write_bytes(run.manifest.pack())
        at_stage("announcing the run")
        kept = asyncio.run(_announce(run, addresses))
        invite = Invite(run.run_id, kept)
        click.echo(f"run id:    {run.run_id}\ninvite:    {invite}\nmanifest:  {path}")
        with chdir(run_toml.parent):
            lines = list(_next_lines(run, invite, path, identity))
        click.echo("\n".join(lines))


@contextmanager
def _warnings_last() -> Iterator[None]:
    """Hold the log's warnings back until the context ends, so that no later line moves them out of sight."""
    held, handlers = dict[int, logging.LogRecord](), list(logging.getLogger().handlers)

    def is_shown(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            held[id(record)] = record
        return record.levelno != logging.WARNING

    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)
            for record in held.values():
                handler.handle(record)


def _next_lines(run: Run, invite: Invite, manifest: Path, identity: Path | None) -> Iterator[str]:
    """Yield lines with the next commands to type, on volunteers' machines and on the organiser's."""
    from opendiloco.run import join_options, local_tables
    from peers.network.contacts import host_of, is_loopback

    folders, is_by_invitation = local_sources(run.config.data), run.manifest.is_by_invitation
    is_here = all(map(is_loopback, map(host_of, invite.addresses)))
    where = "this" if is_here else "any"
    yield f"To train in it, type on {where} machine:"
    yield f"  diloco-peer join --run {invite}{join_options(run)}"
    if local_tables(run.config):
        yield "Each PATH is a copy, on that machine, of this machine's model or tokenizer."
    if folders:
        each = "Each FOLDER" if len(folders) > 1 else "FOLDER"
        yield f"{each} is a folder or file, on that machine, with a copy of the text in {', '.join(folders)}."
    if is_here:
        yield "For other machines, create the run with an --initial-peer address that they can reach."
    if is_by_invitation:
        yield "To create tickets, type on this machine:"
        yield f"  diloco-peer invite create {manifest}" + (f" --identity {identity}" if identity else "")
    yield f"To see its peers, type on {where} machine:"
    yield f"  diloco-peer status --run {invite} --watch"


@run_group.command("example")
def _example() -> None:
    """Print a small run.toml to start from.

    diloco-peer run example > run.toml
    """
    from importlib.resources import files

    click.echo(files("opendiloco").joinpath("demo.toml").read_text(encoding="utf-8"), nl=False)


@run_group.command("show")
@click.argument("manifest", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def _show(manifest: Path, as_json: bool) -> None:
    """Check a signed MANIFEST file, and print its content."""
    from opendiloco.storage.run_folder import read_manifest

    run = read_manifest(manifest)
    if as_json:
        signed = run.manifest
        facts = {"run": run.run_id, "organiser": signed.organiser, "protocol_version": signed.version}
        click.echo(json.dumps(facts | {"manifest": signed.digest.hex(), "content": signed.values}, indent=2))
        return
    click.echo(f"run id:     {run.run_id}\norganiser:  {run.manifest.organiser}")
    click.echo(json.dumps(run.manifest.values, indent=2))


@run_group.command("needs", short_help="Print the memory, disk, bandwidth and time that a run needs.")
@click.argument("run_toml", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
@join_option("optimizer_state")
@own_files_options
def _needs(
    run_toml: Path, as_json: bool, optimizer_state: OptimizerState, model: Path | None, tokenizer: Path | None
) -> None:
    """Print the memory, disk, bandwidth and days that RUN_TOML needs on each peer.

    The command downloads nothing but a model's files from the hub.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import with_own_files

    config = with_own_files(RunConfig.from_toml(run_toml), OwnFiles(model, tokenizer))
    _warn_of_schedules(config)
    logger.info("building the model")
    from opendiloco.model.build import sized_skeleton  # slow import, so errors in run.toml are reported first
    from opendiloco.workers.needs import needs_lines, needs_of
    from opendiloco.workers.options import WorkerOptions

    with chdir(run_toml.parent):  # relative paths start at run.toml's folder
        skeleton, options = sized_skeleton(config), WorkerOptions(optimizer_state=optimizer_state)
    if as_json:
        click.echo(json.dumps(needs_of(config, skeleton, options=options).plain(), indent=2))
        return
    click.echo("\n".join(needs_lines(lambda gpus: needs_of(config, skeleton, gpus, options))))


async def _announce(run: Run, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
    """Announce a run. Return the addresses of the bootstrap nodes that keep it. Raises: SwarmUnreachableError if no
    node keeps it."""
    from opendiloco.volunteer.volunteer import connected
    from peers.network.bootstrap import announce_manifest
    from peers.values.identity import Identity

    async with connected(Identity.generate(), initial_peers, client_mode=True) as transport:
        kept = await announce_manifest(transport, run.manifest, initial_peers)
    if not kept:
        raise SwarmUnreachableError(
            f"none of the nodes at {', '.join(initial_peers)} accepted the run.",
            "Give the address of a `diloco-peer bootstrap` node; its log shows why it refused.",
        )
    return kept


def _check(config: RunConfig, without_text: bool = False) -> None:
    """Check that a run's model and inner optimizer can be built. The check imports transformers, which takes seconds.

    Raises: ManifestError; DataError, also for local text that is not here, unless it is known to be elsewhere: the run
    has its digest, or is created `without_text`.
    """
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.model.build import build_skeleton
    from opendiloco.training.optimizers import check_inner_optimizer

    check_inner_optimizer(config.inner_optimizer)
    momentum = config.outer_optimizer.momentum
    if config.codec.kind == "sparse" and momentum > 0:
        logger.warning("outer_optimizer.momentum = %g overshoots with codec.kind = 'sparse'; set it to 0", momentum)
    _warn_of_schedules(config)
    for source in local_sources(config.data):
        if source.startswith("~"):
            raise DataError(f"data.source = {source!r} has a tilde.", "Write the full path into the manifest.")
        if is_here(source):
            continue
        if not (without_text or config.evaluation.digest or all(one.digest for one in config.data.all_sources)):
            raise DataError(
                f"data.source = {source!r} is not on this machine: there is no {Path(source).absolute()}.",
                "Correct the path, or create the run with --without-text if only volunteers have the text.",
            )
        logger.warning("data.source = %r is not on this machine; each volunteer names its own with --data", source)
    if config.model.path is not None:
        return
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        logger.warning("the model is not checked: %s", error)
        return
    build_skeleton(config, tokenizer)


def _warn_of_schedules(config: RunConfig) -> None:
    """Log a warning for each learning-rate schedule that ends before the run, or decays only after the run."""
    from opendiloco.config.overrides import NO_OVERRIDES

    for part in NO_OVERRIDES.beyond_schedules(config):
        logger.warning(
            "%s; the learning rate is then 0. Lengthen the schedule, or shorten the run, here or later with "
            "`run amend --outer-steps`",
            part,
        )
    for part in config.undecayed_schedules():
        logger.warning("%s. Lengthen the run or shorten the schedule, unless you steer the run with `run amend`", part)


def _with_digest(config: RunConfig, table: str, digest: str) -> RunConfig:
    return config.model_copy(update={table: getattr(config, table).model_copy(update={"digest": digest})})


def _with_tokenizer_named(config: RunConfig) -> RunConfig:
    """Return `config` with the digest of its tokenizer. Return it unchanged if the tokenizer is "bytes" or is not on
    this machine.

    Raises: MachineError when the run names another digest.
    """
    from opendiloco.data.tokenizer import build_tokenizer, digest_of_tokenizer

    section = config.tokenizer
    if section.path is None:
        return config
    try:
        digest = digest_of_tokenizer(build_tokenizer(section))
    except DataError as error:
        undone = "checked" if section.digest else "added to the run"
        logger.warning("the tokenizer's digest is not %s, because %s", undone, error)
        return config
    return _with_digest(config, "tokenizer", digest)


def _with_tokens_named(config: RunConfig) -> RunConfig:
    """Return `config` with the digest of each source that is a folder of tokens, because all peers must read the same
    tokens.

    Raises: DataError when the run names another digest, or when a folder cannot be read.
    """
    from opendiloco.data.token_files import is_token_folder, read_about

    sources = []
    for section in config.data.all_sources:
        if is_token_folder(section.source):
            digest = read_about(Path(section.source)).digest
            if section.digest not in (None, digest):
                raise DataError(
                    f"data.digest = {section.digest}: the tokens of {section.source!r} have the digest {digest}.",
                    "Use the tokens with the first digest, or remove data.digest.",
                )
            section = section.model_copy(update={"digest": digest})
        sources.append(section)
    if all(section.digest is None for section in sources):
        return config
    return config.model_copy(update={"data": config.data.with_sources(tuple(sources))})


def _with_weights_named(config: RunConfig) -> RunConfig:
    """Return `config` with the digest of its initial weights, if they are pretrained. To compute the digest, the model
    is loaded into memory.

    Raises: MachineError when the run names another digest; ManifestError and DataError: see `initial_theta`.
    """
    section = config.model
    if section.path is None and section.digest is None:
        return config
    from opendiloco.config.model import check_initial_weights, digest_of_weights
    from opendiloco.model.build import initial_theta

    theta = initial_theta(config)
    if section.digest is None:
        config = _with_digest(config, "model", digest_of_weights(theta))
    check_initial_weights(theta, config.model)
    return config


def _with_held_out_text_named(config: RunConfig) -> RunConfig:
    """Return `config` with the digest of its held-out text, if its local sources exist on this machine.

    A peer whose text has another digest does not publish its losses. Raises: DataError when the run names another
    digest, or when the text cannot be used; MachineError without memory for the tokens.
    """
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import load_data

    section, folders = config.evaluation, local_sources(config.data)
    if not folders:
        return config
    if not all(map(is_here, folders)):
        if section.every and section.digest is None and any(one.digest is None for one in config.data.all_sources):
            logger.warning(
                "the run gets no evaluation.digest, since its text is not on this machine: volunteers will not publish "
                "held-out losses. Create the run on a machine with the text, or give evaluation.digest."
            )
        return config
    tokenizer = None
    try:
        tokenizer = build_tokenizer(config.tokenizer)
        held_out = load_data(config, tokenizer).held_out
    except DataError as error:
        if tokenizer is not None and len(folders) == len(config.data.all_sources):
            raise
        logger.warning("the held-out text gets no digest: %s", error)
        return config
    if not section.every:
        return config
    digest = held_out.digest(section.windows)
    if section.digest not in (None, digest):
        raise DataError(
            f"evaluation.digest = {section.digest}: the text in {', '.join(folders)} has the digest {digest}.",
            "Use the text with the first digest, or remove evaluation.digest.",
        )
    return _with_digest(config, "evaluation", digest)


# Amendments -----------------------------------------------------------------------------------------------------------
@run_group.command("amend", cls=RunOptionCommand, short_help="Change some values of a live run.")
@run_option
@initial_peers_option
@join_option("identity", help="The organiser's key file.")
@click.option("--outer-lr", type=float, metavar="NUMBER", help="Outer learning rate.  [default: unchanged]")
@click.option("--outer-momentum", type=float, metavar="NUMBER", help="Outer momentum.  [default: unchanged]")
@click.option(
    "--inner-lr-factor",
    type=float,
    metavar="NUMBER",
    help="Factor of run.toml's inner learning rate, at most 1.  [default: unchanged]",
)
@click.option(
    "--decay-steps",
    type=int,
    metavar="N",
    help="Decay the inner learning rate over N outer steps, and then end the run.  [default: unchanged]",
)
@click.option(
    "--decay-from", type=int, metavar="N", help="Start this decay after N outer steps of the run.  [default: at once]"
)
@click.option("--outer-steps", type=int, metavar="N", help="Length of the run in outer steps.  [default: unchanged]")
@click.option(
    "--mixture",
    multiple=True,
    metavar="SOURCE=WEIGHT",
    help="Weight of a data source, given by name or as #1, #2 …. May be repeated.  [default: unchanged]",
)
def _amend(
    run: str,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    outer_lr: float | None,
    outer_momentum: float | None,
    inner_lr_factor: float | None,
    decay_steps: int | None,
    decay_from: int | None,
    outer_steps: int | None,
    mixture: tuple[str, ...],
) -> None:
    """Sign an amendment of the run, and send it to the run's peers.

    The next entry of the log includes the amendment, which is in force from the outer step after that entry on. Values
    that are not given stay unchanged. A schedule of the outer learning rate goes on from the new value. `status` shows
    the values in force.
    """
    import asyncio

    from opendiloco.view.amended import amendment_in_words
    from opendiloco.volunteer.identity import load_identity

    given = {
        "outer_learning_rate": outer_lr,
        "outer_momentum": outer_momentum,
        "inner_learning_rate_factor": inner_lr_factor,
        "decay": None if decay_steps is None else {"after": decay_from, "outer_steps": decay_steps},
        "outer_steps": outer_steps,
        "weights": [_weight(text) for text in mixture] or None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError("no change is given: add at least one option, such as --outer-lr.")
    if decay_from is not None and decay_steps is None:
        raise click.UsageError("--decay-from needs --decay-steps, the length of the decay.")
    invite, key = parse_run(run, initial_peers), load_identity(identity)
    signed, reached = asyncio.run(_send_amendment(invite, key, changes))
    peers = f"{reached} {'peer has' if reached == 1 else 'peers have'} it and will pass it on"
    click.echo(f"{amendment_in_words(signed)}; {peers}. It is in force once `diloco-peer status` shows it.")


async def _send_amendment(invite: Invite, key: Identity, changes: Mapping[str, Any]) -> tuple[Amendment, int]:
    """Sign the run's next amendment and send it to peers. Return the amendment and the number of peers that accept it.
    Raises: DilocoPeerError."""
    from opendiloco.run import find_run
    from opendiloco.view.run_view import RunView
    from opendiloco.volunteer.volunteer import connected
    from peers.network.known_runs import send_amendment
    from peers.values.identity import Identity

    async with AsyncExitStack() as stack:
        # No node talks to itself, so a new key also reaches a volunteer or bootstrap node with the organiser's key.
        transport = await stack.enter_async_context(connected(Identity.generate(), invite.addresses, client_mode=True))
        run = await find_run(transport, invite.run_id)
        _check_key(run, key)
        beats = await transport.heartbeats(run.run_id)
        if run.manifest.is_by_invitation:  # its peers name other peers only to the organiser and to admitted peers
            with suppress(SwarmUnreachableError):  # the only bootstrap node may have the organiser's key
                asking = await stack.enter_async_context(connected(key, invite.addresses, client_mode=True))
                asking.learn(run.manifest)
                beats += await asking.heartbeats(run.run_id)
        view = RunView(run, list({beat.peer: beat for beat in beats}.values()))
        signed = _next_amendment(view, key, changes)
        if rise := _rise(view, signed):
            click.echo(f"warning: {rise}", err=True)
        trainers = sorted(view.trainers, key=lambda beat: beat.lineage_tokens, reverse=True)
        there = [beat.peer for beat in trainers[:GIVEN_TO] if await transport.connect(beat.peer, beat.addresses)]
        reached = await send_amendment(transport.call, run.run_id, signed, there)
    if not reached:
        raise SwarmUnreachableError(
            f"no peer took amendment {signed.number}.", "Amend again while a volunteer trains: only volunteers keep it."
        )
    return signed, reached


def _check_key(run: Run, key: Identity) -> None:
    organiser = run.manifest.organiser
    if key.peer_id != organiser:
        raise ManifestError(
            f"the organiser of {run.run_id} is {organiser}, but this key belongs to {key.peer_id}.",
            "Name the organiser's key file with --identity.",
        )


def _next_amendment(view: RunView, key: Identity, changes: Mapping[str, Any]) -> Amendment:
    """Return a signed amendment that applies `changes` to the newest amendment that the run's peers report.

    A decay without a start begins with the next outer step. Raises: ManifestError when the run cannot use the values.
    """
    from pydantic import ValidationError

    from opendiloco.config.overrides import Overrides
    from opendiloco.config.section import describe_validation_error
    from peers.values.manifest import AMENDMENTS_LIMIT, Amendment

    run, latest, values = view.run, view.amended.latest, dict(changes)
    before = Overrides.of(latest, run.config)
    if (decay := changes.get("decay")) is not None and decay["after"] is None:
        values["decay"] = decay | {"after": view.outer_step + 1}
    if decay is not None:
        values.setdefault("outer_steps", values["decay"]["after"] + decay["outer_steps"])
    if "weights" in changes:
        values["weights"] = _with_weights(run.config.data, before.weights, changes["weights"])
    number = latest.number + 1 if latest else 1
    if number > AMENDMENTS_LIMIT:
        raise ManifestError(f"the run was amended {AMENDMENTS_LIMIT} times, the most allowed.", "Create another run.")
    try:
        overrides = Overrides.model_validate(before.model_dump(exclude_none=True) | values)
    except ValidationError as error:
        raise ManifestError(describe_validation_error("the amendment", error, Overrides)) from None
    if problem := overrides.problem(run.config) or _objection(view, overrides, changes):
        raise ManifestError(f"the amendment: {problem}")
    return Amendment.sign(run.run_id, number, overrides.content, key)


def _weight(text: str) -> tuple[str, float]:
    """Return the source and the weight that `text` contains as SOURCE=WEIGHT. Raises: UsageError for another form."""
    source, _, weight = text.rpartition("=")
    try:
        return source, float(weight)
    except ValueError:
        raise click.UsageError(f"--mixture {text}: write SOURCE=WEIGHT, such as stdlib=0.5.") from None


def _with_weights(
    data: DataSection, before: tuple[float, ...] | None, changes: Iterable[tuple[str, float]]
) -> tuple[float, ...]:
    """Return the weights of a run's sources, in the sources' order, after `changes`. Raises: ManifestError."""
    weights = list(data.weights if before is None else before)
    names = [source.source.removeprefix("./") for source in data.all_sources]  # `run create` adds it to some
    for named, weight in changes:
        places = [place for place, name in enumerate(names) if named.removeprefix("./") in (name, f"#{place + 1}")]
        if len(places) != 1:
            listed = ", ".join(f"#{place} {name}" for place, name in enumerate(names, 1))
            raise ManifestError(
                f"--mixture: {len(places) or 'no'} sources of the run have the name {named!r}.",
                f"Name one of: {listed}.",
            )
        weights[places[0]] = weight
    return tuple(weights)


def _rise(view: RunView, amendment: Amendment) -> str:
    """Return a warning if an amendment raises the inner learning rate; otherwise return an empty text."""
    from opendiloco.config.overrides import Overrides
    from opendiloco.training.outer import inner_learning_rate_factor

    config, step = view.run.config, (view.outer_step + 1) * view.run.config.training.inner_steps
    if config.schedule.unit == "tokens":
        return ""  # the learning rate after `step` inner steps is unknown, because the schedule counts tokens
    before, after = (
        inner_learning_rate_factor(config, Overrides.of(each, config), step, 0)
        for each in (view.amended.latest, amendment)
    )
    if after <= before:
        return ""
    return f"the inner learning rate rises from {before:.3g} to {after:.3g} of its peak; --inner-lr-factor lowers it."


def _objection(view: RunView, overrides: Overrides, changes: Mapping[str, Any]) -> str:
    """Return the reason why `changes` are too late or lead to a learning rate of 0, or an empty text without one."""
    taken, first = view.outer_step, view.outer_step + 1
    if view.is_finished:
        return (
            f"{view.run.run_id} has taken its last outer step, so no amendment can enter its log. Create another run."
        )
    if changes.keys().isdisjoint({"decay", "outer_steps"}):
        return ""
    if "decay" in changes and overrides.decay is not None and overrides.decay.after < first:
        return f"decay.after = {overrides.decay.after}: the run has taken {taken} outer steps. Use {first} or more."
    # A streaming run cannot end with its present cycle: peers must know the last cycle when that cycle begins.
    streams = not view.run.config.streaming.is_plain
    least = first + streams
    if overrides.total_outer_steps(view.run.config) < least:
        return f"outer_steps = {overrides.outer_steps}: the run has taken {taken} outer steps. Use {least} or more."
    if beyond := next(overrides.beyond_schedules(view.run.config), None):
        return f"{beyond}; the learning rate is then 0. Give fewer --outer-steps, or add --decay-steps."
    return ""
