"""`diloco-peer run amend`: change the outer learning rate or momentum of a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import identity_option, initial_peers_option, parse_run, run_option

if TYPE_CHECKING:
    from opendiloco.run import Run
    from peers.presence.heartbeat import Heartbeat
    from peers.values.amendments import Amendment
    from peers.values.identity import Identity
    from peers.values.manifest import Invite

GIVEN_TO = 16
"""Peers, at most, that are given an amendment. They tell all others."""


@click.command(short_help="Change the outer learning rate or momentum from now on.")
@run_option
@initial_peers_option
@identity_option("The organiser's")
@click.option("--outer-lr", type=float, metavar="NUMBER", help="Outer learning rate.  [default: as it is]")
@click.option("--outer-momentum", type=float, metavar="NUMBER", help="Outer momentum.  [default: as it is]")
@click.pass_obj
def amend(
    log: LogOptions,
    run: str,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    outer_lr: float | None,
    outer_momentum: float | None,
) -> None:
    """Sign an amendment of the run's outer optimizer, and give it to the run's peers.

    The next entry of the log takes it in, and all peers step with its values from the outer step after that one on. A
    schedule of the outer learning rate goes on, below the new value. `status` shows what is in force.
    """
    import asyncio

    from opendiloco.volunteer.identity import load_identity

    log.start()
    if outer_lr is None and outer_momentum is None:
        raise click.UsageError("say what is to change with --outer-lr, --outer-momentum or both.")
    invite, key = parse_run(run, initial_peers), load_identity(identity)
    signed, told = asyncio.run(give_amendment(invite, key, outer_lr, outer_momentum))
    nodes = f"{told} {'peer has' if told == 1 else 'peers have'} it, and will tell all others"
    click.echo(f"{signed}; {nodes}. It is in force once `diloco-peer status` says so.")


async def give_amendment(
    invite: Invite, key: Identity, learning_rate: float | None, momentum: float | None
) -> tuple[Amendment, int]:
    """Sign the next amendment. Returns it, and how many peers were given it. Raises: DilocoPeerError."""
    from opendiloco.run import find_run
    from opendiloco.view.run_view import RunView
    from opendiloco.volunteer.volunteer import connected
    from peers.errors import SwarmUnreachableError
    from peers.network.amendments import give

    async with connected(key, invite.addresses, client_mode=True) as transport:
        run = await find_run(transport, invite.run_id)
        check_key(run, key)
        beats = await transport.heartbeats(run.run_id)
        signed = next_amendment(run, key, beats, learning_rate, momentum)
        at_work = sorted(RunView.of(run, beats).trainers, key=lambda beat: beat.lineage_tokens, reverse=True)
        there = [beat.peer for beat in at_work[:GIVEN_TO] if await transport.connect(beat.peer, beat.addresses)]
        told = await give(transport, run.run_id, signed, there)
    if not told:
        raise SwarmUnreachableError(
            f"nobody could be given {signed}.", "Amend again while a volunteer trains: nobody else keeps amendments."
        )
    return signed, told


def check_key(run: Run, key: Identity) -> None:
    """Raises: ManifestError unless this key is the organiser's."""
    from peers.errors import ManifestError

    organiser = run.manifest.organiser
    if key.peer_id != organiser:
        raise ManifestError(
            f"the organiser of {run.run_id} is {organiser}; this key is {key.peer_id}'s.",
            "Name the organiser's key file with --identity.",
        )


def next_amendment(
    run: Run, key: Identity, beats: list[Heartbeat], learning_rate: float | None, momentum: float | None
) -> Amendment:
    """Sign the amendment after the newest that peers know. What is not given stays as that one has it.

    Raises: ManifestError when run.toml could not have these values either.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.view.run_view import Amended
    from peers.errors import ManifestError
    from peers.values.amendments import Amendment

    if momentum is not None and run.config.outer_optimizer.momentum_every > 1:
        raise ManifestError(
            f"--outer-momentum = {momentum:g}: the momentum of {run.run_id} is delayed, and stays as it is.",
            "Amend --outer-lr alone.",
        )
    latest = Amended.seen_in(run, beats).newest
    source, content = latest or run.config.outer_optimizer, run.config.to_manifest_content()
    values = {
        "learning_rate": source.learning_rate if learning_rate is None else learning_rate,
        "momentum": source.momentum if momentum is None else momentum,
    }
    content["outer_optimizer"] |= values
    checked = RunConfig.from_manifest_content(content, "--outer-lr, --outer-momentum").outer_optimizer
    number = latest.number + 1 if latest else 1
    return Amendment.sign(run.run_id, number, checked.learning_rate, checked.momentum, key)
