"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from peers.manifest import Invite

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.Path(file_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


def initial_peers_option(command: Command) -> Command:
    return click.option(
        "--initial-peer",
        "initial_peers",
        multiple=True,
        metavar="MULTIADDR",
        help="Address of a bootstrap node, or of any peer. May be repeated.",
    )(command)


def run_option(command: Command) -> Command:
    return click.option("--run", required=True, metavar="ID|INVITE", help="The run's id, or an invite to it.")(command)


def listen_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--listen",
        multiple=True,
        metavar="MULTIADDR",
        default=(default,),
        show_default=True,
        help="Where to listen; port 0 is any free one. May be repeated.",
    )


def announce_option(command: Command) -> Command:
    return click.option(
        "--announce",
        multiple=True,
        metavar="MULTIADDR",
        help="Tell others these addresses instead of those found. May be repeated.",
    )(command)


def limit_option(direction: str, verb: str) -> Callable[[Command], Command]:
    return click.option(
        f"--{direction}-limit",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MBIT",
        help=f"{verb} model data at no more than so many megabits a second.",
    )


def parse_run(run: str, initial_peers: tuple[str, ...]) -> Invite:
    """The run and all addresses we have for it. Raises: ManifestError; UsageError when there are no addresses."""
    from peers.manifest import Invite

    invite = Invite.parse(run)
    addresses = tuple(dict.fromkeys((*invite.addresses, *initial_peers)))
    if not addresses:
        raise click.UsageError("a run id does not say where the swarm is: add --initial-peer, or give the invite.")
    return Invite(invite.run_id, addresses)
