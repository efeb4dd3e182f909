"""`diloco-peer join`: train in a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, announce_option, initial_peers_option, listen_option, parse_run, run_option

if TYPE_CHECKING:
    from rich.console import Console

    from opendiloco.interrupts import Interrupts
    from opendiloco.run import Run
    from opendiloco.volunteer import Volunteer
    from peers.identity import Identity
    from peers.manifest import Invite

SCREEN_SECONDS = 0.5
LOG_SECONDS = 10.0


@click.command()
@run_option
@initial_peers_option
@click.option("--identity", type=FILE, help="Key file; made if it does not exist.  [default: this user's own]")
@listen_option("/ip4/0.0.0.0/tcp/0")
@announce_option
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads for training.")
@click.option("--plain", is_flag=True, help="Log lines instead of a live screen.")
@click.pass_obj
def command(
    log: LogOptions,
    run: str,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    device: str,
    threads: int,
    plain: bool,
) -> None:
    """Train in a run with this machine until Ctrl-C."""
    from opendiloco.identity_file import hold_identity
    from opendiloco.interrupts import Interrupts, run_interruptible
    from opendiloco.run import find_run
    from opendiloco.volunteer import connected, volunteering

    console = None if plain or not sys.stdout.isatty() else start_console()
    start_logging(log, console)
    invite = parse_run(run, initial_peers)

    async def main(interrupts: Interrupts) -> None:
        async with connected(key, invite.addresses, listen, announce) as transport:
            found = await find_run(transport, invite.run_id)
            say(f"found run {found.run_id}; starting a worker (some seconds)", console)
            async with volunteering(found, key, transport, device, threads) as volunteer:
                say(f"joining as {key.peer_id} on {volunteer.device}; Ctrl-C to leave", console)
                interrupts.polite = lambda: leave(volunteer, console)
                await train_in_view(volunteer, console)
        say("left the run", console)

    with hold_identity(identity) as key:
        run_interruptible(main)
