"""`diloco-peer status`: who is there, and whether they agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import initial_peers_option, parse_run, reader, reader_option, run_option

if TYPE_CHECKING:
    from rich.console import Group

    from opendiloco.config.run_config import RunConfig
    from opendiloco.run import Run
    from opendiloco.view.run_view import Agreement, RunView
    from peers.network.transport import HivemindTransport
    from peers.presence.heartbeat import Heartbeat
    from peers.values.identity import Identity
    from peers.values.manifest import Invite
    from peers.values.signed_heads import SignedHeads

WATCH_SECONDS = 1.0
COMPARE_SECONDS = 15.0  # for which it looks until two peers have been seen at one outer step: they may be short
NOBODY = "no live peers: nobody trains in this run now"


@click.command()
@run_option
@initial_peers_option
@reader_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--watch", is_flag=True, help="Keep showing it until Ctrl-C.")
@click.pass_obj
def command(
    log: LogOptions, run: str, initial_peers: tuple[str, ...], identity: Path | None, as_json: bool, watch: bool
) -> None:
    """Show the live peers of a run."""
    import asyncio

    from opendiloco.volunteer.interrupts import run_interruptible

    log.start()
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other.")
    invite = parse_run(run, initial_peers)
    with reader(identity) as key:
        if watch:
            run_interruptible(lambda interrupts: show_status(invite, key, as_json, watch=True))
        else:
            asyncio.run(show_status(invite, key, as_json))


async def show_status(invite: Invite, key: Identity, as_json: bool, watch: bool = False) -> None:
    """Print how the run is, once or until cancelled. Raises: DilocoPeerError."""
    import json

    from rich.console import Console

    from opendiloco.run import find_run
    from opendiloco.view.screen import plain_signed
    from opendiloco.volunteer.admission import ask_for_signed_heads
    from opendiloco.volunteer.volunteer import connected

    async with connected(key, invite.addresses, client_mode=True) as transport:
        run = await find_run(transport, invite.run_id)
        await ask_for_signed_heads(transport, run, invite.addresses)
        if watch:
            await keep_showing(transport, run)
        view = await compare(transport, run)
        signed = transport.signed_heads_of(run.run_id)
    here = volunteers_here(run.run_id)
    if as_json:
        peers = [plain(beat, run.config) for beat in view.peers]
        agree, newest, outer = view.agreement.verdict, plain_signed(signed), view.amended.plain(run)
        shown: dict[str, object] = {"run": run.run_id, "agree": agree, "signed": newest, "outer_optimizer": outer}
        shown |= {"peers": peers, "here": here}
        click.echo(json.dumps(shown, indent=2))
    else:
        Console().print(picture(view, signed), *here_lines(here), sep="\n")


async def keep_showing(transport: HivemindTransport, run: Run) -> NoReturn:
    import asyncio

    from rich.console import Group
    from rich.live import Live

    from opendiloco.view.run_view import Agreement

    agreement = Agreement()
    with Live(auto_refresh=False) as live:
        while True:
            shown = picture(await look(transport, run, agreement), transport.signed_heads_of(run.run_id))
            live.update(Group(shown, *here_lines(volunteers_here(run.run_id))), refresh=True)
            await asyncio.sleep(WATCH_SECONDS)


async def look(transport: HivemindTransport, run: Run, agreement: Agreement) -> RunView:
    """Return how the run is now. What has expired is not in the DHT any more."""
    from opendiloco.view.run_view import RunView

    return RunView.of(run, await transport.heartbeats(run.run_id), agreement)


async def compare(transport: HivemindTransport, run: Run) -> RunView:
    """Return who is there, and whether they agree. Where outer steps are short, peers are seldom seen at the same one:
    looks again for a while before it finds nothing to compare."""
    import asyncio

    from opendiloco.view.run_view import Agreement

    agreement, now = Agreement(), asyncio.get_running_loop().time
    ends = now() + COMPARE_SECONDS
    while True:
        view = await look(transport, run, agreement)
        if agreement.verdict is not None or len(view.working) < 2 or now() >= ends:
            return view
        await asyncio.sleep(WATCH_SECONDS)


def picture(view: RunView, signed: SignedHeads) -> Group:
    from rich.console import Group

    from opendiloco.view.screen import held_out_lines, peers_table, reach_lines, row_of, signed_lines

    run = view.run
    if not view.peers:
        return Group(run.run_id, NOBODY, *signed_lines(signed))
    table = peers_table([row_of(beat, run.config) for beat in view.peers], run.run_id)
    told = *held_out_lines(view), *reach_lines(view.peers), *view.amended.lines(), *signed_lines(signed)
    return Group(table, *told, str(view.agreement))


def volunteers_here(run_id: str) -> list[dict[str, object]]:
    """Return what the volunteers of a run on this machine say of themselves, as JSON can say it."""
    from opendiloco.owner.controls import Request, ask, sockets
    from opendiloco.storage.run_folder import default_state_folder

    found: list[dict[str, object]] = []
    for path in sockets(default_state_folder(), run_id):
        if (answer := ask(path, Request(do="look"))) is not None:
            found.append({"peer": path.parent.name, "phase": answer.phase, "paused": list(answer.reasons)})
    return found


def here_lines(here: list[dict[str, object]]) -> list[str]:
    """The same for people."""
    lines = []
    for volunteer in here:
        reasons = ", ".join(map(str, cast("list[str]", volunteer["paused"])))
        doing = f"paused: {reasons}" if reasons else volunteer["phase"]
        lines.append(f"on this machine …{str(volunteer['peer'])[-8:]}: {doing}")
    return lines


def plain(beat: Heartbeat, config: RunConfig) -> dict[str, object]:
    """A heartbeat as JSON can say it: digests in hexadecimal, `seen` in seconds since the epoch on the peer's clock."""
    from opendiloco.view.run_view import plain_peer

    return plain_peer(beat, config) | {
        "held_out": None if beat.held_out is None else {"outer_step": beat.held_out.index, "loss": beat.held_out.loss},
        "lineage_tokens": beat.lineage_tokens,
        "roster_size": beat.roster_size,
        "log_digest": beat.head.hex(),
        "state_digest": beat.state_digest.hex(),
        "addresses": list(beat.addresses),
        "endpoints": list(beat.endpoints),
        "relays": list(beat.relays),
        "relayed": list(beat.relayed),
        "unreached": list(beat.unreached),
        "seen": beat.sequence / 1000,
    }
