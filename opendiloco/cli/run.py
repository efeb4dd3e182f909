"""What an organiser does: `plan` and `tokenize` before a run, and `run …` to create, show and amend one."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import (
    FILE,
    FOLDER,
    INITIAL_PEERS,
    initial_peers_option,
    join_option,
    own_files_options,
    parse_run,
    run_option,
    spelled_out,
    writing,
)
from opendiloco.data.own_files import OwnFiles, local_sources
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

READ_AT_ONCE = 1 << 22  # tokens of a file
GIVEN_TO = 16
"""Peers, at most, that are given an amendment. They tell all others."""


# Before the run -------------------------------------------------------------------------------------------------------
@click.command()
@click.argument("run_toml", type=FILE)
@click.option("--peers", "links_toml", type=FILE, required=True, help="The machines and their links: a TOML file.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
def plan(run_toml: Path, links_toml: Path, json_file: Path | None) -> None:
    """Say what RUN_TOML would come to with given peers and links.

    Nobody needs to rent a machine for it: how much of their time peers compute, what they send, how long joining
    takes, memory, tokens a day, cost, and the bandwidth that computing for more of the time would need.
    """
    from rich.console import Console

    from opendiloco.config.run_config import RunConfig
    from opendiloco.tools.plan import TARGETS, LinksFile, forecast, least_bandwidth, plain, plan_of, show

    config, links = RunConfig.from_toml(run_toml), LinksFile.from_toml(links_toml)

    from opendiloco.model.build import sized_skeleton  # takes seconds to load: not before a mistake is found

    planned = plan_of(config, sized_skeleton(config), links)
    found = forecast(planned)
    needed = {target: least_bandwidth(planned, target) for target in TARGETS}
    show(Console(), planned, found, needed)
    if json_file:
        text = json.dumps(plain(planned, found, needed), indent=2) + "\n"
        with writing(json_file, "Name another file."):
            json_file.write_text(text, encoding="utf-8")


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
    run_toml: Path, out: Path, source: int | None, tokens: Path | None, held_out: Path | None, dtype: str
) -> None:
    """Write what RUN_TOML reads into a folder of token ids, which is a source itself, and costs no time later.

    With --tokens and --held-out, ids that were made elsewhere are checked and put there.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.data.token_files import TokenCache, write_token_folder
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import TokenizedSource, check_share
    from opendiloco.stages import StageLog, watched_by
    from opendiloco.volunteer.states import new_folder

    if (tokens is None) != (held_out is None):
        raise click.UsageError("--tokens and --held-out go together: what is held out is never trained on.")
    config = RunConfig.from_toml(run_toml)
    tokenizer = build_tokenizer(config.tokenizer)
    with new_folder(out), watched_by(StageLog()):
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
    """Return the source of a run that is to be read, whole. Raises: UsageError."""
    sources = config.data.all_sources
    if place is None and len(sources) > 1:
        raise click.UsageError(f"the run has {len(sources)} sources: choose one with --source.")
    if place is not None and place > len(sources):
        raise click.UsageError(f"--source {place}: the run has {len(sources)}.")
    return sources[(place or 1) - 1].model_copy(update={"shards": None, "windows_per_shard": None})


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


# A run ----------------------------------------------------------------------------------------------------------------
@click.group()
def run_group() -> None:
    """Create runs, look at them, and amend them."""


@run_group.command("create")
@click.argument("run_toml", type=FILE)
@initial_peers_option
@join_option("identity", help="The organiser's key file.")
@click.option("--out", type=FOLDER, default=".", help="Folder for the manifest's file.")
def _create(run_toml: Path, initial_peers: tuple[str, ...], identity: Path | None, out: Path) -> None:
    """Sign RUN_TOML as a new run, and announce it."""
    import asyncio

    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import Run
    from opendiloco.volunteer.identity import load_identity
    from peers.values.manifest import Invite

    if not initial_peers:
        raise click.UsageError(
            f"a run needs a bootstrap node that remembers it: add --initial-peer, or set {INITIAL_PEERS}."
        )
    key = load_identity(identity)
    config = RunConfig.from_toml(run_toml)
    remedy = "Name a folder with --out."
    with writing(out, remedy):
        out.mkdir(parents=True, exist_ok=True)  # what takes seconds comes afterwards
    config = _with_tokens_named(_with_tokenizer_named(config))
    _check(config)
    from opendiloco.model.build import with_sizes_named  # now that transformers is here

    config = with_sizes_named(config)
    run = Run.sign(_with_held_out_text_named(_with_weights_named(config)), key)
    path = out / f"{run.run_id}.manifest"
    with writing(path, remedy):
        path.write_bytes(run.manifest.pack())
    kept = asyncio.run(_announce(run, spelled_out(initial_peers)))
    invite = Invite(run.run_id, kept)
    click.echo(f"run id:    {run.run_id}\ninvite:    {invite}\nmanifest:  {path}")
    click.echo("\n".join(_next_lines(run, invite, path, identity)))


def _next_lines(run: Run, invite: Invite, manifest: Path, identity: Path | None) -> Iterator[str]:
    """Yield what to type next: on volunteers' machines, and on the organiser's."""
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


@run_group.command("example")
def _example() -> None:
    """Print a small run.toml to begin with.

    diloco-peer run example > run.toml
    """
    from importlib.resources import files

    click.echo(files("opendiloco").joinpath("demo.toml").read_text(encoding="utf-8"), nl=False)


@run_group.command("show")
@click.argument("manifest", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def _show(manifest: Path, as_json: bool) -> None:
    """Check the file of a signed MANIFEST, and print what it says."""
    from opendiloco.storage.run_folder import read_manifest

    run = read_manifest(manifest)
    if as_json:
        signed = run.manifest
        facts = {"run": run.run_id, "organiser": signed.organiser, "protocol_version": signed.version}
        click.echo(json.dumps(facts | {"manifest": signed.digest.hex(), "content": signed.values}, indent=2))
        return
    click.echo(f"run id:     {run.run_id}\norganiser:  {run.manifest.organiser}")
    click.echo(json.dumps(run.manifest.values, indent=2))


@run_group.command("needs", short_help="Say what a run takes of each peer: memory, disk, time.")
@click.argument("run_toml", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
@join_option("optimizer_state")
@own_files_options
def _needs(
    run_toml: Path, as_json: bool, optimizer_state: OptimizerState, model: Path | None, tokenizer: Path | None
) -> None:
    """Say what RUN_TOML takes of each peer: memory, disk, bandwidth and days. Asks the hub for nothing but a model."""
    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import with_own_files

    config = with_own_files(RunConfig.from_toml(run_toml), OwnFiles(model, tokenizer))
    from opendiloco.model.build import sized_skeleton  # what follows takes seconds to import
    from opendiloco.workers.needs import needs_lines, needs_of
    from opendiloco.workers.options import WorkerOptions

    skeleton, options = sized_skeleton(config), WorkerOptions(optimizer_state=optimizer_state)
    if as_json:
        click.echo(json.dumps(needs_of(config, skeleton, options=options).plain(), indent=2))
        return
    click.echo("\n".join(needs_lines(lambda gpus: needs_of(config, skeleton, gpus, options))))


async def _announce(run: Run, initial_peers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of the nodes that remember the run now. Raises: SwarmUnreachableError if none does."""
    from opendiloco.volunteer.volunteer import connected
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


def _check(config: RunConfig) -> None:
    """Raise ManifestError when the model or the inner optimizer of a run cannot be built. What only others need to have
    is worth no more than a warning. Takes seconds, mostly to import transformers."""
    from opendiloco.config.overrides import NO_OVERRIDES
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.model.build import build_skeleton
    from opendiloco.training.optimizers import check_inner_optimizer

    check_inner_optimizer(config.inner_optimizer)
    momentum = config.outer_optimizer.momentum
    if config.codec.kind == "sparse" and momentum > 0:
        logger.warning("outer_optimizer.momentum = %g overshoots beside codec.kind = 'sparse'; make it 0", momentum)
    for part in _beyond_schedules(config, NO_OVERRIDES):
        logger.warning("%s; nothing is learned from there on. Lengthen the schedule, or shorten the run", part)
    for source in local_sources(config.data):
        if source.startswith("~"):
            raise DataError(f"data.source = {source!r} has a tilde.", "Write the path out: it is part of the manifest.")
        if not _is_here(source):
            logger.warning("data.source = %r is not on this machine; each volunteer names its own with --data", source)
    if config.model.path is not None:
        return
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except DataError as error:
        logger.warning("the model is not checked: %s", error)
        return
    build_skeleton(config, tokenizer)


def _is_here(source: str) -> bool:
    """Return whether a local source is on this machine: a folder, a file, or files that match a pattern."""
    return Path(source).exists() or any(glob.iglob(source, recursive=True))


def _beyond_schedules(config: RunConfig, overrides: Overrides) -> Iterator[str]:
    """Yield where a learning rate is 0 long before the run ends: its schedule is over."""
    steps, inner_steps = overrides.total_outer_steps(config), config.training.inner_steps
    inner, outer, decay = config.schedule, config.outer_optimizer.schedule, overrides.decay
    end = inner.total_steps if decay is None else decay.end * inner_steps
    if end is not None and inner.final_fraction == 0 and (steps - 1) * inner_steps >= end:
        yield f"schedule ends after {end:,} inner steps, and the run after {steps * inner_steps:,}"
    if outer and outer.total_steps is not None and outer.final_fraction == 0 and steps > outer.total_steps:
        yield f"outer_optimizer.schedule ends after {outer.total_steps:,} outer steps, and the run after {steps:,}"


def _with_digest(config: RunConfig, table: str, digest: str) -> RunConfig:
    """Return the run with a digest in one of its tables."""
    return config.model_copy(update={table: getattr(config, table).model_copy(update={"digest": digest})})


def _with_tokenizer_named(config: RunConfig) -> RunConfig:
    """Return the run with the digest of the tokenizer, if that comes from elsewhere and is to be had on this machine.
    Raises: MachineError when the run names another digest."""
    from opendiloco.data.tokenizer import build_tokenizer, digest_of_tokenizer

    section = config.tokenizer
    if section.path is None:
        return config
    try:
        digest = digest_of_tokenizer(build_tokenizer(section))
    except DataError as error:
        lacking = "is not held against its digest" if section.digest else "gets no digest to hold volunteers' against"
        logger.warning("the tokenizer %s: %s", lacking, error)
        return config
    return _with_digest(config, "tokenizer", digest)


def _with_tokens_named(config: RunConfig) -> RunConfig:
    """Return the run with the digest of each source that is a folder of tokens, so that all peers read the same.
    Raises: DataError when the run names another digest, or a folder cannot be read."""
    from opendiloco.data.token_files import is_token_folder, read_about

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


def _with_weights_named(config: RunConfig) -> RunConfig:
    """Return the run with the digest of the weights that it begins with, if these come from elsewhere. Takes the memory
    that the model does.

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
    """Return the run with the digest of what evaluation reads, if each volunteer names its folder and it is here.

    A peer whose folder has other text keeps the losses that it finds to itself. Raises: DataError when the run names
    another digest, or the text that is here is of no use; MachineError without memory for the tokens.
    """
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import load_data

    section, folders = config.evaluation, local_sources(config.data)
    if not folders:
        return config
    if not all(map(_is_here, folders)):
        if section.every and section.digest is None and any(one.digest is None for one in config.data.all_sources):
            logger.warning(
                "nothing says which text is held out, since it is not on this machine: volunteers keep their held-out "
                "losses to themselves. Create the run where the text is, or give evaluation.digest."
            )
        return config
    tokenizer = None
    try:
        tokenizer = build_tokenizer(config.tokenizer)
        held_out = load_data(config, tokenizer).held_out
    except DataError as error:
        if tokenizer is not None and len(folders) == len(config.data.all_sources):
            raise
        logger.warning("the held-out text gets no digest to hold volunteers' against: %s", error)
        return config
    if not section.every:
        return config
    digest = held_out.digest(section.windows)
    if section.digest not in (None, digest):
        raise DataError(
            f"the run's held-out text has the digest {section.digest}; that of {', '.join(folders)} has {digest}.",
            "Get the text that the run means, or leave out evaluation.digest.",
        )
    return _with_digest(config, "evaluation", digest)


# Amending -------------------------------------------------------------------------------------------------------------
@run_group.command("amend", short_help="Change some values of a run that goes on.")
@run_option
@initial_peers_option
@join_option("identity", help="The organiser's key file.")
@click.option("--outer-lr", type=float, metavar="NUMBER", help="Outer learning rate.  [default: as it is]")
@click.option("--outer-momentum", type=float, metavar="NUMBER", help="Outer momentum.  [default: as it is]")
@click.option(
    "--inner-lr-factor",
    type=float,
    metavar="NUMBER",
    help="Factor of run.toml's inner learning rate, at most 1.  [default: as it is]",
)
@click.option(
    "--decay-steps",
    type=int,
    metavar="N",
    help="Have the inner learning rate decay over N outer steps, after which the run ends.  [default: as it is]",
)
@click.option(
    "--decay-from", type=int, metavar="N", help="Begin that decay after N outer steps of the run.  [default: at once]"
)
@click.option("--outer-steps", type=int, metavar="N", help="Outer steps of the whole run.  [default: as it is]")
@click.option(
    "--mixture",
    multiple=True,
    metavar="SOURCE=WEIGHT",
    help="Weight of a source that run.toml lists, by its name or as #1, #2 …; repeatable.  [default: as it is]",
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
    """Sign an amendment of the run, and give it to the run's peers.

    The next entry of the log takes it in, and it is in force from the outer step after that one on. What is not given
    stays as it is. A schedule of the outer learning rate goes on, below the new value. `status` shows what is in force.
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
        raise click.UsageError("say what is to change, with one option or several.")
    if decay_from is not None and decay_steps is None:
        raise click.UsageError("say with --decay-steps how long the decay takes.")
    invite, key = parse_run(run, initial_peers), load_identity(identity)
    signed, told = asyncio.run(_give_amendment(invite, key, changes))
    nodes = f"{told} {'peer has' if told == 1 else 'peers have'} it, and will tell all others"
    click.echo(f"{amendment_in_words(signed)}; {nodes}. It is in force once `diloco-peer status` says so.")


async def _give_amendment(invite: Invite, key: Identity, changes: Mapping[str, Any]) -> tuple[Amendment, int]:
    """Sign the next amendment. Return it, and how many peers were given it. Raises: DilocoPeerError."""
    from opendiloco.run import find_run
    from opendiloco.view.run_view import RunView
    from opendiloco.volunteer.volunteer import connected
    from peers.network.known_runs import send_amendment

    async with connected(key, invite.addresses, client_mode=True) as transport:
        run = await find_run(transport, invite.run_id)
        _check_key(run, key)
        view = RunView(run, await transport.heartbeats(run.run_id))
        signed = _next_amendment(view, key, changes)
        if rise := _rise(view, signed):
            click.echo(f"warning: {rise}", err=True)
        at_work = sorted(view.trainers, key=lambda beat: beat.lineage_tokens, reverse=True)
        there = [beat.peer for beat in at_work[:GIVEN_TO] if await transport.connect(beat.peer, beat.addresses)]
        told = await send_amendment(transport.call, run.run_id, signed, there)
    if not told:
        raise SwarmUnreachableError(
            f"nobody could be given amendment {signed.number}.",
            "Amend again while a volunteer trains: nobody else keeps amendments.",
        )
    return signed, told


def _check_key(run: Run, key: Identity) -> None:
    """Raise ManifestError unless this key is the organiser's."""
    organiser = run.manifest.organiser
    if key.peer_id != organiser:
        raise ManifestError(
            f"the organiser of {run.run_id} is {organiser}; this key is {key.peer_id}'s.",
            "Name the organiser's key file with --identity.",
        )


def _next_amendment(view: RunView, key: Identity, changes: Mapping[str, Any]) -> Amendment:
    """Sign the amendment after the newest that peers know; what does not change stays as that one has it. A decay
    without a beginning begins with the next outer step. Raises: ManifestError when the run cannot have these values."""
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
        raise ManifestError(f"the run was amended {AMENDMENTS_LIMIT} times, and can't be again.", "Create another run.")
    try:
        overrides = Overrides.model_validate(before.model_dump(exclude_none=True) | values)
    except ValidationError as error:
        raise ManifestError(describe_validation_error("the amendment", error, Overrides)) from None
    if problem := overrides.problem(run.config) or _objection(view, overrides, changes):
        raise ManifestError(f"the amendment: {problem}")
    return Amendment.sign(run.run_id, number, overrides.content, key)


def _weight(text: str) -> tuple[str, float]:
    """Return a source and its weight. Raises: UsageError."""
    source, _, weight = text.rpartition("=")
    try:
        return source, float(weight)
    except ValueError:
        raise click.UsageError(f"--mixture {text}: write SOURCE=WEIGHT, such as stdlib=0.5.") from None


def _with_weights(
    data: DataSection, before: tuple[float, ...] | None, changes: Iterable[tuple[str, float]]
) -> tuple[float, ...]:
    """Return the weights of a run's sources, in their order, with some changed. Raises: ManifestError."""
    weights = list(data.weights if before is None else before)
    names = [source.source for source in data.all_sources]
    for named, weight in changes:
        places = [place for place, name in enumerate(names) if named in (name, f"#{place + 1}")]
        if len(places) != 1:
            listed = ", ".join(f"#{place} {name}" for place, name in enumerate(names, 1))
            raise ManifestError(
                f"--mixture: {len(places) or 'no'} sources of the run have the name {named!r}.",
                f"Name one of: {listed}.",
            )
        weights[places[0]] = weight
    return tuple(weights)


def _rise(view: RunView, amendment: Amendment) -> str:
    """Return a warning where an amendment raises the inner learning rate, as a decay that begins anew does; else
    nothing."""
    from opendiloco.config.overrides import Overrides
    from opendiloco.training.outer import inner_learning_rate_factor

    config, step = view.run.config, (view.outer_step + 1) * view.run.config.training.inner_steps
    if config.schedule.unit == "tokens":
        return ""  # they are not known here
    before, after = (
        inner_learning_rate_factor(config, Overrides.of(each, config), step, 0)
        for each in (view.amended.latest, amendment)
    )
    if after <= before:
        return ""
    return f"the inner learning rate rises from {before:.3g} to {after:.3g} of its peak; --inner-lr-factor lowers it."


def _objection(view: RunView, overrides: Overrides, changes: Mapping[str, Any]) -> str:
    """Return why it is too late for these changes, or nothing would be learned by them; empty: neither."""
    taken, first = view.outer_step, view.outer_step + 1
    if view.is_finished:
        return f"{view.run.run_id} has taken its last outer step, and no entry follows. Create another run."
    if changes.keys().isdisjoint({"decay", "outer_steps"}):
        return ""
    if "decay" in changes and overrides.decay is not None and overrides.decay.after < first:
        return f"decay.after = {overrides.decay.after}: the run has taken {taken} outer steps. Use {first} or more."
    streams = not view.run.config.streaming.is_plain  # its last cycle is another one from the beginning
    least = first + streams
    if overrides.total_outer_steps(view.run.config) < least:
        return f"outer_steps = {overrides.outer_steps}: the run has taken {taken} outer steps. Use {least} or more."
    if beyond := next(_beyond_schedules(view.run.config, overrides), None):
        return f"{beyond}; nothing is learned from there on. Give fewer --outer-steps, or --decay-steps, too."
    return ""
