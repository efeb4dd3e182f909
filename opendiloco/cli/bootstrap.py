"""The command `diloco-peer bootstrap`, which runs a node with a fixed address. Through the node, peers find each other
and the runs that the node remembers."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.options import (
    FILE,
    FOLDER,
    JOIN,
    check_together,
    dashboard_option,
    is_typed,
    join_option,
    open_dashboard,
    show_dashboard,
    spelled_out,
    typed_option,
)
from opendiloco.settings.join_settings import LogSettings, settings_of, unread_variables
from peers.errors import ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peers.network.bootstrap import NodeTask
    from peers.network.transport import HivemindTransport
    from peers.values.manifest import SignedManifest

logger = logging.getLogger(__name__)

LIBP2P_PORT, DATA_PORT = 31337, 31338  # fixed ports, so that an operator configures the firewall once
RELAY_MEGABITS = 100.0
"""Default relay limit: a tenth of an ordinary server's link, and at most 32 TB a month in each direction."""


def _check_addresses(addresses: tuple[str, ...], are_own: bool = True) -> None:
    """Check the form of multiaddrs: the node's own addresses must have a TCP or QUIC port; other nodes' addresses
    (`are_own` is False) must have a peer id. Raises: ValueError for a malformed address."""
    if not addresses:
        return  # no addresses: saves the import of hivemind, which takes seconds
    from peers.network.daemon import own_addresses, parse_addresses

    try:
        if are_own:
            own_addresses(addresses)
        else:
            parse_addresses(spelled_out(addresses), needs_peer_id=True)
    except ManifestError as error:
        raise ValueError(str(error)) from error


class _BootstrapCommand(click.Command):
    """The command, which refuses options that contradict each other; `service install` parses them, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # the shell completes an unfinished command line
            return rest
        check_together(ctx, (f"/ip4/0.0.0.0/tcp/{LIBP2P_PORT}",))
        if ctx.params["max_disk"] is not None and ctx.params["archive"] is None:
            raise click.UsageError("--max-disk limits an archive: give --archive FOLDER, too.", ctx)
        if ctx.params["no_relay"] and is_typed(ctx, "relay_limit"):
            raise click.UsageError("--no-relay relays no data: leave out --relay-limit, or --no-relay.", ctx)
        return rest


@click.command(cls=_BootstrapCommand)
@click.option(
    "--identity", required=True, type=FILE, help="Key file; created if it is missing. It fixes the node's address."
)
@typed_option(
    "listen", check=_check_addresses, default=(), shown=f"/ip4/0.0.0.0/tcp/{LIBP2P_PORT} and /ip6/::/tcp/{LIBP2P_PORT}"
)
@typed_option("announce", check=_check_addresses)
@typed_option(
    "initial_peers",
    check=partial(_check_addresses, are_own=False),
    help="Address of another bootstrap node or of any peer. May be repeated.",
)
@typed_option(
    "data_port",
    default=DATA_PORT,
    help="TCP port on which volunteers are introduced to each other. Volunteers must be able to reach it.",
)
@typed_option(
    "relay_limit",
    default=RELAY_MEGABITS,
    shown=None,
    help="Relay at most N megabits a second in total between volunteers that cannot reach each other.",
)
@join_option("local_network")
@click.option("--no-relay", is_flag=True, help="Introduce volunteers to each other, but relay no data.")
@typed_option("metrics_port")
@typed_option("metrics_host")
@dashboard_option
@click.option(
    "--directory",
    type=FOLDER,
    help="Folder for the runs that the node remembers.  [default: the path of --identity, ending in .runs]",
)
@click.option(
    "--archive", type=FOLDER, help="Keep the log and the newest snapshots of all announced runs in this folder."
)
@typed_option(
    "max_disk",
    shown="nine tenths of the free disk plus the archive's own",
    help="With --archive: use at most N gigabytes for all runs, and a quarter of that for one run.",
)
@click.option(
    "--ticket",
    "tickets",
    multiple=True,
    metavar="TICKET|FILE",
    help="With --archive: ticket to a run by invitation that does not name this archive. May be repeated.",
)
def bootstrap(
    identity: Path,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    initial_peers: tuple[str, ...],
    data_port: int,
    relay_limit: float,
    local_network: bool,
    no_relay: bool,
    metrics_port: int | None,
    metrics_host: str,
    dashboard: str | None,
    directory: Path | None,
    archive: Path | None,
    max_disk: float | None,
    tickets: tuple[str, ...],
) -> None:
    """Run a node through which the peers of any run find each other.

    It needs no GPU and little memory.
    """
    import asyncio

    from opendiloco.quantities import in_words
    from opendiloco.run import Run
    from opendiloco.volunteer.admission import read_ticket
    from opendiloco.volunteer.identity import hold_identity, lock
    from opendiloco.volunteer.interrupts import Interrupts, run_interruptible
    from peers.metrics import NODE_METRICS, MetricsServer
    from peers.network.bootstrap import run_bootstrap
    from peers.network.links import LinkSettings
    from peers.network.own_network import everywhere

    # The volunteer image sets the port of its volunteer's metrics, also where it runs this command.
    read = (*settings_of(LogSettings), JOIN["local_network"], JOIN["metrics_port"])
    if unread := unread_variables(os.environ, read):
        logger.warning("a bootstrap node does not read %s: give options instead", ", ".join(unread))
    links = LinkSettings(data_port, None if no_relay else relay_limit)
    server = None if metrics_port is None else MetricsServer(metrics_port, metrics_host, NODE_METRICS)
    shown = [read_ticket(ticket) for ticket in tickets]
    listening = open_dashboard(dashboard)
    others = spelled_out(initial_peers)
    runs = directory or identity.with_suffix(".runs")

    async def main(interrupts: Interrupts) -> None:
        stop = asyncio.Event()
        interrupts.polite = stop.set
        beside: list[NodeTask] = []
        kept = None
        if archive is not None:
            from opendiloco.storage.archive import Archive

            kept = Archive(key, archive, None if max_disk is None else int(max_disk * 1e9))
            file = locks.enter_context(kept.lock_file)
            with suppress(OSError):  # some file systems have no locks
                lock(file, f"the archive {archive} is in use", "Each node needs its own --archive FOLDER.")
            beside.append(kept.keep)
        if local_network and not _are_here((*listen, *announce)):
            beside.append(_tell_local_network)
        if listening is not None:
            from opendiloco.dashboard.server import serve_all_runs

            beside.append(partial(serve_all_runs, listening, kept))

        def on_ready(addresses: tuple[str, ...]) -> None:
            if server is not None:
                server.log_address()
            show_dashboard(listening)
            if archive is not None and kept is not None:
                click.echo(f"The archive is in {archive.absolute()} and may use {in_words(kept.usable)}")
            _show_addresses(addresses, bool(announce))

        place = (listen or everywhere(LIBP2P_PORT), announce, others, runs)
        await run_bootstrap(key, *place, on_ready, stop, Run.from_manifest, beside, links, shown)

    with hold_identity(identity, is_node=True) as key, ExitStack() as locks:
        run_interruptible(main)


async def _tell_local_network(transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
    """Announce the bootstrap node to peers of any run in the local network, until the task is cancelled."""
    import asyncio

    from peers.network.neighbours import announced

    async with announced(transport.peer_id, "", transport.addresses):
        await asyncio.Event().wait()


def _are_here(addresses: tuple[str, ...]) -> bool:
    """Return True if `addresses` is not empty and has only loopback addresses of this machine."""
    from peers.network.contacts import host_of, is_loopback

    return bool(addresses) and all(map(is_loopback, map(host_of, addresses)))


def _show_addresses(addresses: tuple[str, ...], are_announced: bool = False) -> None:
    from peers.network.contacts import host_of, is_numeric, is_public

    click.echo("\n".join(("This node can be reached at", *(f"  {address}" for address in addresses))))
    where = "this" if _are_here(addresses) else "any"
    # A router may hide the IPv4 addresses alone, and many peers have no IPv6.
    over_ipv4 = [address for address in addresses if address.startswith("/ip4/") and not _are_here((address,))]
    hosts = [host_of(address) or "" for address in over_ipv4 or addresses]
    if where == "any" and not are_announced and all(is_numeric(host) and not is_public(host) for host in hosts):
        click.echo(
            "It has no public IPv4 address. For peers in other networks, start this node again with its public one:"
        )
        port = "/".join((over_ipv4 or addresses)[0].partition("/p2p/")[0].split("/")[3:])  # such as tcp/31337
        click.echo(f"  --announce /ip4/PUBLIC-ADDRESS/{port}")
    click.echo(f"To start a run, type on {where} machine, in an environment with torch")
    click.echo("(the first command writes a small run.toml):")
    click.echo("  diloco-peer run example > run.toml")
    click.echo(f"  diloco-peer run create run.toml --initial-peer {addresses[0]}")
