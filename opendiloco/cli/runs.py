"""`diloco-peer runs`: which runs a bootstrap node remembers, what they take of a machine, and who is there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import initial_peers_option, known_addresses

if TYPE_CHECKING:
    from opendiloco.view.listed_run import ListedRun
    from peers.net.transport import HivemindTransport

NOTHING = "No runs that are open to everybody. Ask an organiser for an invite, or begin one: diloco-peer run create"


@click.command(short_help="List the runs that a bootstrap node remembers.")
@initial_peers_option
@click.option(
    "--limit", type=click.IntRange(1, 1000), metavar="N", default=20, show_default=True, help="At most N runs."
)
@click.option("--needs/--no-needs", default=True, help="Say what each takes of a machine, too: that takes seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@click.pass_obj
def command(log: LogOptions, initial_peers: tuple[str, ...], limit: int, needs: bool, as_json: bool) -> None:
    """List the runs that a bootstrap node remembers, the last used first. Runs by invitation are not listed."""
    import asyncio
    import json

    log.start()
    found = asyncio.run(look(known_addresses(initial_peers), limit))
    if needs:
        found = [with_needs(each) for each in found]
    if as_json:
        click.echo(json.dumps([each.plain() for each in found], indent=2))
        return
    for each in found:
        click.echo("\n".join(each.lines()) + "\n")
    there = "".join(f" --initial-peer {address}" for address in initial_peers)
    click.echo(f"To train in one of them: diloco-peer join --run ID{there}" if found else NOTHING)


async def look(addresses: tuple[str, ...], limit: int) -> list[ListedRun]:
    """Return the runs that the nodes at these addresses list. Raises: SwarmUnreachableError, LocalNetworkError."""
    import asyncio

    from opendiloco.volunteer import connected
    from peers.net.catalogue import listed_runs
    from peers.values.identity import Identity

    async with connected(Identity.generate(), addresses, client_mode=True) as transport:
        run_ids = await listed_runs(transport, addresses, limit)
        return await asyncio.gather(*(look_at(transport, run_id) for run_id in run_ids))


async def look_at(transport: HivemindTransport, run_id: str) -> ListedRun:
    """Return one run, as far as it can be known here."""
    from opendiloco.run import find_run
    from opendiloco.view.listed_run import ListedRun
    from peers.errors import DilocoPeerError

    try:
        run = await find_run(transport, run_id)
        return ListedRun(run_id, run=run, heartbeats=await transport.heartbeats(run_id))
    except DilocoPeerError as error:
        return ListedRun(run_id, problem=error.message)


def with_needs(listed: ListedRun) -> ListedRun:
    """Return the run with what it takes of a machine."""
    from opendiloco.view.listed_run import taken_by

    return listed if listed.run is None else replace(listed, taken=taken_by(listed.run.config))
