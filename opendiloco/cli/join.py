"""`diloco-peer join`: train in a run."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import parse_run, relay_settings
from opendiloco.cli.setting_options import join_settings

if TYPE_CHECKING:
    from rich.console import Console

    from opendiloco.interrupts import Interrupts
    from opendiloco.island.environment import Placement
    from opendiloco.settings.join_settings import JoinSettings
    from opendiloco.volunteer import Volunteer
    from opendiloco.workers.nodes import Nodes

logger = logging.getLogger(__name__)

SCREEN_SECONDS = 0.5
LOG_SECONDS = 10.0
THIS_MACHINE = "this machine"


@click.command()
@join_settings()
@click.pass_obj
def command(log: LogOptions, settings: JoinSettings) -> None:
    """Train in a run with this machine until Ctrl-C."""
    from opendiloco.anchorage import ask_for_anchors
    from opendiloco.checkpoints.checkpointer import Checkpointer, KeepingPlan
    from opendiloco.checkpoints.journal import Journal
    from opendiloco.checkpoints.remote import check_url
    from opendiloco.checkpoints.run_folder import RunFolder
    from opendiloco.entrance import enter, read_ticket
    from opendiloco.identity_file import hold_identity
    from opendiloco.interrupts import run_interruptible
    from opendiloco.island.environment import Placement
    from opendiloco.run import find_run
    from opendiloco.sole import listening
    from opendiloco.volunteer import connected, volunteering
    from opendiloco.workers.trackers import tracking
    from peers.links.own_network import everywhere
    from peers.metrics import serve_metrics
    from peers.streams.throttle import Caps

    console = None if settings.plain or not sys.stdout.isatty() else start_console(log)
    if console is None:
        log.start("info")
    invite = parse_run(settings.run, settings.initial_peers)
    placement = Placement.read(os.environ)
    if placement is not None and not placement.is_first:
        run_interruptible(lambda interrupts: serve_as_node(placement, invite.run_id, settings.state, interrupts))
        return
    shown = None if settings.ticket is None else read_ticket(settings.ticket)
    record = None if settings.journal is None else Journal.open(settings.journal)
    if settings.remote is not None:
        check_url(settings.remote)
    if settings.metrics_port is not None:
        serve_metrics(settings.metrics_port)
    caps, rate = Caps.of_megabits(settings.upload_limit, settings.download_limit), settings.checkpoint_rate

    async def main(interrupts: Interrupts) -> None:
        before = RunFolder.at(invite.run_id, key.peer_id, settings.state)
        remembered = before.remembered_peers()
        listen = settings.listen or everywhere(0)
        links = relay_settings(settings.data_port, settings.relay_limit)
        async with (
            other_machines(placement, invite.run_id, key.peer_id, interrupts) as nodes,
            connected(
                key, invite.addresses, listen, settings.announce, links=links, remembered=remembered.addresses
            ) as transport,
        ):
            transport.cap(caps)
            found = (await find_run(transport, invite.run_id, before.remembered_manifest())).with_data(settings.data)
            found = replace(found, goes_on_alone=settings.on_partition == "continue")
            folder = RunFolder.open(found, key.peer_id, settings.state)
            await ask_for_anchors(transport, found, invite.addresses, folder)
            entrance = await enter(transport, found, key, invite.addresses, folder, shown)
            keeping = settings.keep, settings.keep_every, rate, settings.remote
            plan = KeepingPlan(folder, *keeping, min(rate, caps.upload or rate), settings.moments)
            say(f"found run {found.run_id}; starting a worker (some seconds)", console)
            kept = folder if settings.keeps_anything else None
            async with (
                listening(transport, found.run_id) as sole,
                volunteering(found, key, transport, settings.workers, kept, trackers, nodes) as volunteer,
                Checkpointer(plan) as checkpointer,
            ):
                await sole
                say(f"what outlives this process is in {folder.path}", console)
                say(f"joining as {key.peer_id} on {volunteer.device}; Ctrl-C to leave", console)
                volunteer.admitted_by(entrance)
                volunteer.checkpoint_with(checkpointer)
                volunteer.remember_with(remembered)
                if record is not None:
                    volunteer.record(record)
                interrupts.polite = lambda: leave(volunteer, console)
                await train_in_view(volunteer, console)
        say("left the run", console)

    with hold_identity(settings.identity) as key, tracking(settings.trackers, invite.run_id, key.peer_id) as trackers:
        try:
            run_interruptible(main)
        finally:  # ends with the process: Python 3.11 crashed when it took cycles of views of shared memory apart
            gc.freeze()


@asynccontextmanager
async def other_machines(
    placement: Placement | None, run_id: str, peer_id: str, interrupts: Interrupts
) -> AsyncIterator[Nodes]:
    """The other machines of this volunteer, if torchrun has started any. Raises: IslandError."""
    from opendiloco.island.first import gathered
    from opendiloco.workers.nodes import Nodes

    def leave() -> None:
        if interrupts.count == 0:
            interrupts(signal.SIGTERM)

    if placement is None:
        yield Nodes()
        return
    say(f"waiting for the other machines of this volunteer: {placement.size} in all", None)
    async with gathered(placement, run_id, leave, peer_id) as nodes:
        yield nodes


async def serve_as_node(placement: Placement, run_id: str, state: Path | None, interrupts: Interrupts) -> None:
    """Lend this machine to the volunteer whose peer process is on the first one. Raises: IslandError."""
    from opendiloco.checkpoints.loading import newest_by_peer
    from opendiloco.checkpoints.run_folder import default_state_folder
    from opendiloco.island.agent import NodeAgent
    from opendiloco.island.arrival import VolunteerLeftError, connect

    say(f"waiting for the first machine of this volunteer, {placement.host}; this is node {placement.rank}", None)
    try:
        kept = newest_by_peer((state or default_state_folder()) / run_id, run_id)
        agent = NodeAgent(await connect(placement, run_id, kept))
    except VolunteerLeftError as left:
        return say(f"left the run: {left}", None)
    say("this machine trains for the peer on the first one; Ctrl-C to leave with it", None)
    interrupts.polite = agent.ask_to_leave
    await agent.serve()
    say("left the run", None)


def start_console(log: LogOptions) -> Console:
    """A terminal to draw on; log lines that go to no file scroll past above the picture."""
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console()
    if log.file is None:
        log.send_to(RichHandler(console=console, show_path=False, show_level=False, show_time=False), "info")
    else:
        log.start("info")
    return console


def say(text: str, console: Console | None) -> None:
    """To a terminal that has been closed nothing is said, and what we were about to do is done all the same."""
    with suppress(OSError):
        if console is None:
            click.echo(text)
        else:
            console.print(text, highlight=False, soft_wrap=True)


def leave(volunteer: Volunteer, console: Console | None) -> None:
    volunteer.leave()
    say("leaving the run; a round under way is finished first (Ctrl-C again: leave at once)", console)


async def train_in_view(volunteer: Volunteer, console: Console | None) -> None:
    """Train until the end, and show how it goes meanwhile."""
    import asyncio

    view = asyncio.create_task(show_lines(volunteer) if console is None else show_screen(volunteer, console))
    try:
        await volunteer.train()
    finally:
        view.cancel()
        await asyncio.gather(view, return_exceptions=True)


async def show_lines(volunteer: Volunteer) -> None:
    import asyncio

    from opendiloco.screen import plain_line, row_of

    while True:
        await asyncio.sleep(LOG_SECONDS)
        own, *others = volunteer.heartbeats()
        logger.info("%s; %d other peers", plain_line(row_of(own, volunteer.run.config, THIS_MACHINE)), len(others))


async def show_screen(volunteer: Volunteer, console: Console) -> None:
    import asyncio

    from rich.console import Group
    from rich.live import Live

    from opendiloco.screen import held_out_lines, peers_table, reach_lines, row_of

    config = volunteer.run.config
    with Live(console=console, auto_refresh=False) as live:
        while True:
            own, *others = volunteer.heartbeats()
            rows = [row_of(own, config, THIS_MACHINE), *(row_of(beat, config) for beat in others)]
            table = peers_table(rows, volunteer.run.run_id)
            held_out = held_out_lines([own, *others], volunteer.bytes_per_token)
            live.update(Group(table, *held_out, *reach_lines([own])), refresh=True)
            await asyncio.sleep(SCREEN_SECONDS)
