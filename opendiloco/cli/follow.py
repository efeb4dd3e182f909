"""The command `diloco-peer follow`, which tracks a live run without training in it."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import (
    FOLDER,
    RunCommand,
    dashboard_option,
    data_option,
    initial_peers_option,
    open_dashboard,
    own_files_options,
    own_words,
    parse_run,
    reader_option,
    run_option,
    show_dashboard,
)
from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import MachineError, RemoteError

if TYPE_CHECKING:
    import socket

    from opendiloco.run import Run
    from opendiloco.volunteer.local_workload import LocalWorkload
    from opendiloco.volunteer.states import History
    from opendiloco.volunteer.tracking import Audit, Disagreement, Reached
    from opendiloco.workers.options import WorkerOptions
    from peers.log.state import LogState
    from peers.network.transport import HivemindTransport
    from peers.transfer.following import Following
    from peers.values.manifest import Amendment, Invite
    from peers.values.workload import ReplicatedState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _FollowPlan:
    """The options of `follow`. `every` is the number of outer steps between two states to evaluate or export, besides
    the last; `page` is the dashboard's socket, or None."""

    every: int
    evaluate: bool
    export: Path | None
    push_to: str | None
    until: int | None
    as_json: bool
    data: tuple[Path, ...]
    model: Path | None
    tokenizer: Path | None
    page: socket.socket | None

    @property
    def own(self) -> OwnFiles:
        return OwnFiles(self.model, self.tokenizer)

    @property
    def needs_model(self) -> bool:
        return self.evaluate or self.exports

    @property
    def exports(self) -> bool:
        return self.export is not None or self.push_to is not None


@click.command(cls=RunCommand, short_help="Check and print a run's entries as they are made, without training.")
@run_option
@initial_peers_option
@reader_option
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="Evaluate and export after the outer steps that are multiples of N, and after the last.",
)
@click.option("--evaluate", is_flag=True, help="Print the loss on the run's held-out text.")
@data_option("Folder or file with text for the held-out loss.")
@own_files_options
@click.option("--export", type=FOLDER, help="Write models to FOLDER/outer-step-…, as transformers models.")
@click.option(
    "--push-to", metavar="URL", help="Copy the newest model to this URL, such as hf://me/model, over the one before."
)
@click.option(
    "--until", type=click.IntRange(min=0), metavar="N", help="End after outer step N.  [default: the run's last]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with whole digests.")
@dashboard_option
def follow(
    run: str, initial_peers: tuple[str, ...], identity: Path | None, dashboard: str | None, **chosen: Any
) -> None:
    """Follow a run without training in it: check and print its entries as they are made.

    The command computes all states again, from a snapshot on, and compares them with the digests that peers publish. It
    names each peer with another state, and then ends with exit code 12. Ctrl-C ends it.
    """
    from opendiloco.storage.remote import Remote
    from opendiloco.volunteer.interrupts import run_interruptible
    from opendiloco.volunteer.tracking import Audit

    invite = parse_run(run, initial_peers)
    plan, audit = _FollowPlan(page=open_dashboard(dashboard), **chosen), Audit()
    if plan.push_to is not None:
        Remote(plan.push_to)  # raises an error for a wrong URL now, before minutes of work
    with _staging(plan) as folder:
        show_dashboard(plan.page)
        run_interruptible(lambda interrupts: _follow(invite, identity, plan, folder, audit))
    audit.check()


@contextmanager
def _staging(plan: _FollowPlan) -> Iterator[Path | None]:
    """Yield a temporary folder in which models are written before they are moved, so that no unfinished model is
    visible.

    Yields None when no model is exported. Raises: MachineError.
    """
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
            f"cannot write to {plan.export or 'the folder for temporary files'}: {error.strerror}.",
            "Give a writable folder with --export.",
        ) from error
    with temporary as name:
        yield Path(name)


async def _follow(invite: Invite, identity: Path | None, plan: _FollowPlan, folder: Path | None, audit: Audit) -> None:
    from opendiloco.volunteer.admission import ask_for_signed_heads
    from opendiloco.volunteer.local_workload import NO_TRAINING
    from opendiloco.volunteer.states import with_text
    from opendiloco.volunteer.tracking import unless_failed
    from opendiloco.volunteer.volunteer import reading

    async with reading(invite, identity) as (run, transport):
        options = NO_TRAINING
        if plan.evaluate:
            run = run.with_data(plan.data).with_own(plan.own)
        elif plan.exports:
            run, options = with_text(run.with_own(plan.own), plan.data)
        await ask_for_signed_heads(transport, run, invite.addresses)
        tracking = _track(run, transport, plan, options, folder, audit)
        await unless_failed(tracking, transport.daemon.failure())


async def _track(
    run: Run,
    transport: HivemindTransport,
    plan: _FollowPlan,
    options: WorkerOptions,
    folder: Path | None,
    audit: Audit,
) -> None:
    """Print each outer step of the run until the last, and evaluate and export the models that `plan` asks for."""
    from opendiloco.config.overrides import Overrides
    from opendiloco.dashboard.server import dashboard
    from opendiloco.dashboard.watching import follower_source
    from opendiloco.storage.run_folder import kept_losses
    from opendiloco.view.run_view import RunView
    from opendiloco.volunteer.local_workload import working
    from opendiloco.volunteer.states import history_of
    from opendiloco.volunteer.tracking import Disagreement, retrying, state_for, states_until
    from peers.transfer.following import Following

    poll = run.settings.timing.heartbeat

    def last(log: LogState) -> int:
        total = Overrides.of(log.amendment, run.config).total_outer_steps(run.config)
        return total if plan.until is None else min(plan.until, total)

    following: Following | None = None
    losses = kept_losses(run.run_id)
    in_force: Amendment | None = None
    source = follower_source(run, transport, lambda: following.past if following else None)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(dashboard(plan.page, lambda: [source]))
        # Only a plan that evaluates or exports models needs a worker, with torch and the corpus.
        model = await stack.enter_async_context(working(run, options)) if plan.needs_model else None
        state: ReplicatedState
        state = await retrying(partial(state_for, run, transport), poll) if model is None else model
        following = Following(transport, state, run.settings)
        async for news in states_until(last, following, audit, poll):
            if isinstance(news, Disagreement):
                _show_disagreement(news, plan.as_json)
                continue
            _show_reached(news, plan.as_json)
            if news.log.amendment != in_force:
                _show_change(run, news, in_force, plan.as_json)
                in_force = news.log.amendment
            for found in RunView(run, following.donors.heartbeats).held_out:
                losses.setdefault(found.index, found.loss)
            if model is not None and (news.index % plan.every == 0 or news.index >= last(news.log)):
                past = partial(history_of, run, following, losses)
                loss = await _use_model(run, news, past, model, plan, folder)
                if loss is not None:
                    losses[news.index] = loss


async def _use_model(
    run: Run,
    reached: Reached,
    past: Callable[[], History],
    model: LocalWorkload,
    plan: _FollowPlan,
    folder: Path | None,
) -> float | None:
    """Evaluate a state's model, and print and return its held-out loss in nats per token. With a `folder`, also export
    the model; an export without --evaluate has no loss, so return None."""
    import asyncio

    from opendiloco.evaluation_turns import bits_per_byte, loss_in_words
    from opendiloco.volunteer.states import command_line, export_state, run_options, warn_of_other_text

    loss: float | None
    bits: float | None
    place = None
    if folder is None:
        held_out = await model.trainer.held_out(run.config.evaluation)
        loss, bits = held_out.loss, bits_per_byte(held_out.loss, model.trainer.bytes_per_token)
        warn_of_other_text(held_out)
    else:
        made, words = folder / f"outer-step-{reached.index:06}", own_words(plan.data, plan.own)
        again = command_line("follow", run_options(run), words, "--export", "models", "--until", str(reached.index))
        facts = await export_state(run, past(), model, made, again)
        loss, bits, place = facts.held_out_loss, facts.bits_per_byte, await asyncio.to_thread(_deliver, made, plan)
    found = [] if loss is None else [f"held-out loss {loss_in_words(loss, bits)}"]
    found += [] if place is None else [f"the model is in {place}"]
    text = f": {', '.join(found)}"
    _show(plan.as_json, reached.index, text, event="model", held_out_loss=loss, bits_per_byte=bits, place=place)
    return loss


def _deliver(made: Path, plan: _FollowPlan) -> str | None:
    """Copy or move the model in the folder `made` to the plan's destinations, and log failures. Return the destinations
    that have the model, as text, or None."""
    from opendiloco.storage.remote import push_folder, without_secrets

    places = []
    if plan.push_to is not None:
        try:
            push_folder(made, plan.push_to)
            places.append(without_secrets(plan.push_to))
        except RemoteError as error:
            logger.warning("%s This model is not pushed; the next model will be.", error)
    if plan.export is None:
        shutil.rmtree(made)
    else:
        try:
            made.rename(plan.export / made.name)
            places.insert(0, str(plan.export / made.name))
        except OSError as error:
            logger.warning("cannot write the model to %s: %s", plan.export / made.name, error.strerror)
            shutil.rmtree(made)
    return " and ".join(places) or None


# Output ---------------------------------------------------------------------------------------------------------------
def _show(as_json: bool, index: int, text: str, event: str, **values: object) -> None:
    click.echo(json.dumps({"event": event, "outer_step": index} | values) if as_json else f"outer step {index}{text}")


def _show_reached(reached: Reached, as_json: bool) -> None:
    last, state = reached.log.last, reached.state_digest.hex()
    roster, in_all, agreeing = last.roster if last else (), reached.log.lineage_tokens, reached.agreeing
    tokens = sum(member.tokens for member in roster)
    agreement = f"{agreeing} peer{'s agree' if agreeing > 1 else ' agrees'}"
    _show(
        as_json,
        reached.index,
        f"{' (snapshot)' if reached.is_snapshot else ''}: peers {len(roster)}, tokens {tokens:,}, in all {in_all:,}, "
        f"state {state[:8]}, {agreement if agreeing else 'not confirmed by a peer yet'}",
        event="snapshot" if reached.is_snapshot else "entry",
        peers=len(roster),
        tokens=tokens,
        lineage_tokens=in_all,
        log_digest=reached.log.position.head.hex(),
        state_digest=state,
        agreeing=agreeing,
    )


def _show_change(run: Run, reached: Reached, before: Amendment | None, as_json: bool) -> None:
    """Print the run's values that change after the outer step `reached`, because another amendment is in force.
    `before` is the amendment in force until then (None: the manifest's values)."""
    from opendiloco.view.amended import changed_values, changes_in_words, values_in_force

    amendment, config = reached.log.amendment, run.config
    source = f"amendment {amendment.number}" if amendment else "the run's manifest"
    changes = changes_in_words(changed_values(config, before, amendment))
    _show(
        as_json,
        reached.index,
        f": from the next one on, by {source}: {changes}",
        event="amendment",
        number=amendment.number if amendment else None,
        **values_in_force(config, amendment),
    )


def _show_disagreement(found: Disagreement, as_json: bool) -> None:
    stated, expected = found.said.hex(), found.expected.hex()
    text = f": peer {found.peer} DISAGREES: its state is {stated[:8]}, but the log leads to {expected[:8]}"
    _show(as_json, found.index, text, event="disagreement", peer=found.peer, said=stated, state_digest=expected)
