"""`diloco-peer follow`: track a live run without training in it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import (
    FOLDER,
    dashboard_option,
    data_option,
    initial_peers_option,
    open_dashboard,
    own_files_options,
    parse_run,
    reader,
    reader_option,
    run_option,
)
from opendiloco.data.own_files import NONE, OwnFiles

if TYPE_CHECKING:
    import socket

    from opendiloco.run import Run
    from opendiloco.volunteer.local_workload import LocalWorkload
    from opendiloco.volunteer.tracking import Audit, Disagreement, Reached, Retrying
    from peers.network.transport import HivemindTransport
    from peers.transfer.following import Following
    from peers.values.amendments import Amendment
    from peers.values.identity import Identity
    from peers.values.manifest import Invite
    from peers.values.workload import ReplicatedState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowPlan:
    """What to do with every n-th state, and until which."""

    every: int
    evaluate: bool
    export: Path | None
    push_to: str | None
    until: int | None
    as_json: bool
    data: tuple[Path, ...] = ()
    own: OwnFiles = NONE
    dashboard: socket.socket | None = None

    @property
    def needs_model(self) -> bool:
        return self.evaluate or self.exports

    @property
    def exports(self) -> bool:
        return self.export is not None or self.push_to is not None


@click.command(short_help="Print a run's entries as they come, without training.")
@run_option
@initial_peers_option
@reader_option
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Evaluate and export after the outer steps that are multiples of N.",
)
@click.option("--evaluate", is_flag=True, help="Print the loss on the run's held-out text.")
@data_option("Compute that loss on the text in this folder.")
@own_files_options
@click.option("--export", type=FOLDER, help="Write the model to FOLDER/outer-step-…, as a transformers model.")
@click.option(
    "--push-to", metavar="URL", help="Copy the model to this URL, any that fsspec knows, over the one before."
)
@click.option(
    "--until", type=click.IntRange(min=0), metavar="N", help="End after outer step N.  [default: the run's last]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line, with whole digests.")
@dashboard_option
@click.pass_obj
def command(
    log: LogOptions,
    run: str,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    every: int,
    evaluate: bool,
    data: tuple[Path, ...],
    model: Path | None,
    tokenizer: Path | None,
    export: Path | None,
    push_to: str | None,
    until: int | None,
    as_json: bool,
    dashboard: tuple[str, int] | None,
) -> None:
    """Follow a run without training in it: print its entries as they come, and whether its peers agree with them.

    All states are computed again, from a snapshot on, and compared with what peers say of theirs; who has another state
    is named, and the exit code is 12 in the end. Ctrl-C ends it.
    """
    from opendiloco.storage.remote import Remote
    from opendiloco.volunteer.interrupts import run_interruptible
    from opendiloco.volunteer.tracking import Audit

    log.start("info")
    invite = parse_run(run, initial_peers)
    if push_to is not None:
        Remote(push_to)  # what cannot be used should not be found out after minutes of work
    shown = open_dashboard(dashboard)
    own = OwnFiles(model, tokenizer)
    plan, audit = FollowPlan(every, evaluate, export, push_to, until, as_json, data, own, shown), Audit()
    with reader(identity) as key, staging(plan) as folder:
        run_interruptible(lambda interrupts: follow(invite, key, plan, folder, audit))
    audit.check()


@contextmanager
def staging(plan: FollowPlan) -> Iterator[Path | None]:
    """Where models are made, so that no half of one is seen; None when there is no need. It outlives the worker.

    Raises: MachineError when nothing can be written there.
    """
    import tempfile

    from opendiloco.errors import MachineError

    if not plan.exports:
        yield None
        return
    try:
        if plan.export is not None:
            plan.export.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(
            dir=plan.export, prefix="diloco-peer-", suffix=".partial", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise MachineError(
            f"{plan.export or 'the folder for temporary files'} cannot be used: {error.strerror}.",
            "Give a folder that can be written to with --export.",
        ) from error
    with temporary as name:
        yield Path(name)


async def follow(invite: Invite, key: Identity, plan: FollowPlan, folder: Path | None, audit: Audit) -> None:
    from opendiloco.run import find_run
    from opendiloco.volunteer.admission import ask_for_signed_heads
    from opendiloco.volunteer.tracking import unless_failed
    from opendiloco.volunteer.volunteer import connected

    async with connected(key, invite.addresses) as transport:
        run = await find_run(transport, invite.run_id)
        if plan.needs_model:
            run = run.with_data(plan.data).with_own(plan.own)
        await ask_for_signed_heads(transport, run, invite.addresses)
        await unless_failed(track(run, transport, plan, folder, audit), transport.failure())


async def track(run: Run, transport: HivemindTransport, plan: FollowPlan, folder: Path | None, audit: Audit) -> None:
    from opendiloco.dashboard.server import dashboard
    from opendiloco.dashboard.sources import follower_source
    from opendiloco.volunteer.tracking import Disagreement, Retrying, StateTracker
    from peers.transfer.following import Following
    from peers.transfer.storage import MemoryStorage

    poll = run.settings.timing.heartbeat
    total = run.config.total_outer_steps
    last = total if plan.until is None else min(plan.until, total)
    following: Following | None = None
    in_force: Amendment | None = None
    source = follower_source(run, transport, lambda: following.past if following else None)
    async with (
        dashboard(plan.dashboard, lambda: [source]),
        following_state(run, transport, plan, Retrying(poll)) as (state, model),
    ):
        following = Following(transport, state, run.settings, MemoryStorage())
        tracker = StateTracker(following, audit, poll)
        async for news in tracker.until(last):
            if isinstance(news, Disagreement):
                show_disagreement(news, plan.as_json)
                continue
            show_reached(news, plan.as_json)
            if news.log.amendment != in_force:
                show_change(run, news, in_force, plan.as_json)
                in_force = news.log.amendment
            if model is not None and news.index % plan.every == 0:
                await use_model(run, news, following, model, plan, folder)


@asynccontextmanager
async def following_state(
    run: Run, transport: HivemindTransport, plan: FollowPlan, retry: Retrying
) -> AsyncIterator[tuple[ReplicatedState, LocalWorkload | None]]:
    """The state, and what can evaluate and export it: a worker, which is started only for that."""
    from opendiloco.volunteer.local_workload import working
    from opendiloco.volunteer.tracking import state_for

    if plan.needs_model:
        async with working(run) as workload:
            yield workload, workload
    else:
        yield await retry(partial(state_for, run, transport)), None


async def use_model(
    run: Run, reached: Reached, following: Following, model: LocalWorkload, plan: FollowPlan, folder: Path | None
) -> None:
    """Evaluate and export a state, as far as it is wanted."""
    import asyncio

    from opendiloco.evaluation_turns import bits_per_byte
    from opendiloco.volunteer.states import command_line, export_state, past_of, warn_of_other_text

    if folder is None:
        found = await model.trainer.held_out(run.config.evaluation)
        bits = bits_per_byte(found.loss, model.trainer.bytes_per_token)
        show_model(reached, found.loss, bits, None, plan.as_json)
        warn_of_other_text(found)
        return
    made = folder / f"outer-step-{reached.index:06}"
    place = ("--run", run.run_id, "--initial-peer", "ADDRESS")
    again = command_line("follow", place, "--export", "models", "--until", str(reached.index))
    facts = await export_state(run, past_of(run, following), model, made, again)
    where = await asyncio.to_thread(deliver, made, plan)
    show_model(reached, facts.held_out_loss, facts.bits_per_byte, where, plan.as_json)


def deliver(made: Path, plan: FollowPlan) -> str | None:
    """Bring a model to where it is wanted; returns where that is. What is in the way, or out of reach, is logged."""
    import shutil

    from opendiloco.errors import RemoteError
    from opendiloco.storage.remote import push_folder, without_secrets

    places = []
    if plan.push_to is not None:
        try:
            push_folder(made, plan.push_to)
            places.append(without_secrets(plan.push_to))
        except RemoteError as error:
            logger.warning("%s The next model is tried again.", error)
    if plan.export is None:
        shutil.rmtree(made)
    else:
        try:
            made.rename(plan.export / made.name)
            places.insert(0, str(plan.export / made.name))
        except OSError as error:
            logger.warning("%s is left as it is: %s", plan.export / made.name, error.strerror)
            shutil.rmtree(made)
    return " and ".join(places) or None


# What is printed ----------------------------------------------------------------------------------------------
def show_reached(reached: Reached, as_json: bool) -> None:
    last, state = reached.log.last, reached.state_digest.hex()
    roster = last.roster if last else ()
    tokens = sum(member.tokens for member in roster)
    if as_json:
        show_json(
            event="snapshot" if reached.is_snapshot else "entry",
            outer_step=reached.index,
            peers=len(roster),
            tokens=tokens,
            lineage_tokens=reached.log.lineage_tokens,
            log_digest=reached.log.position.head.hex(),
            state_digest=state,
            agreeing=reached.agreeing,
        )
        return
    agreeing = f"{reached.agreeing} peer{'s agree' if reached.agreeing > 1 else ' agrees'}"
    click.echo(
        f"outer step {reached.index}{' (snapshot)' if reached.is_snapshot else ''}: peers {len(roster)}, "
        f"tokens {tokens:,}, in all {reached.log.lineage_tokens:,}, "
        f"state {state[:8]}, {agreeing if reached.agreeing else 'which no peer has named yet'}"
    )


def show_change(run: Run, reached: Reached, before: Amendment | None, as_json: bool) -> None:
    """Print how the outer optimizer goes on from here, where that is not as before (None: as the manifest says)."""
    amendment, manifest = reached.log.amendment, run.config.outer_optimizer
    new, old = amendment or manifest, before or manifest
    if as_json:
        show_json(
            event="amendment",
            outer_step=reached.index,
            number=amendment.number if amendment else None,
            learning_rate=new.learning_rate,
            momentum=new.momentum,
        )
        return
    source = f"amendment {amendment.number}" if amendment else "the run's manifest"
    rate, momentum = (
        f"{value:g}, as before" if value == was else f"{value:g} instead of {was:g}"
        for value, was in ((new.learning_rate, old.learning_rate), (new.momentum, old.momentum))
    )
    click.echo(
        f"outer step {reached.index}: from the next one on, by {source}, the outer learning rate is {rate}; "
        f"the outer momentum is {momentum}"
    )


def show_disagreement(found: Disagreement, as_json: bool) -> None:
    said, expected = found.said.hex(), found.expected.hex()
    if as_json:
        show_json(event="disagreement", outer_step=found.index, peer=found.peer, said=said, state_digest=expected)
        return
    click.echo(
        f"outer step {found.index}: peer {found.peer} DISAGREES: "
        f"it has the state {said[:8]}, the log leads to {expected[:8]}"
    )


def show_model(reached: Reached, loss: float, bits: float | None, place: str | None, as_json: bool) -> None:
    if as_json:
        show_json(event="model", outer_step=reached.index, held_out_loss=loss, bits_per_byte=bits, place=place)
        return
    said = f"held-out loss {loss:.4f} nats per token" + ("" if bits is None else f", {bits:.4f} bits per byte")
    click.echo(f"outer step {reached.index}: {said}" + ("" if place is None else f", the model is in {place}"))


def show_json(**values: object) -> None:
    import json

    click.echo(json.dumps(values))
