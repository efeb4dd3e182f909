"""The commands `runs`, which lists the runs that bootstrap nodes remember, and `status`, which shows one run."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.options import (
    RunCommand,
    initial_peers_option,
    known_addresses,
    parse_run,
    reader,
    reader_option,
    run_option,
)
from opendiloco.data.own_files import NONE
from opendiloco.errors import fit_for_terminal
from peers.errors import DilocoPeerError

if TYPE_CHECKING:
    from rich.console import Group

    from opendiloco.config.run_config import RunConfig
    from opendiloco.owner.controls import VolunteerStatus
    from opendiloco.run import Run
    from opendiloco.view.run_view import RunView
    from opendiloco.workers.needs import Needs
    from peers.network.transport import HivemindTransport
    from peers.presence.heartbeat import Heartbeat
    from peers.values.identity import Identity
    from peers.values.manifest import Invite
    from peers.values.signed_heads import SignedHeads


NOT_MEASURED = "needs are not computed: the runs before took too long"
MOST_SECONDS = 30.0
"""Most processor seconds for computing the needs of all runs: strangers' models may be slow to lay out, and many."""
WATCH_SECONDS = 1.0  # seconds between two updates of the table: half the time between a peer's heartbeats
COMPARE_SECONDS = 15.0
"""Most seconds that `status` waits until it sees two peers at the same outer step."""


# Runs -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _ListedRun:
    """A run in the list that the command `runs` prints.

    `problem` is the reason why `view` or `needs` is missing; empty if both are known. `needs` is the memory, disk and
    traffic that the run needs on a machine.
    """

    run_id: str
    problem: str = ""
    view: RunView | None = None
    needs: Needs | None = None

    def plain(self) -> dict[str, Any]:
        """Return the listed run as JSON types."""
        view = self.view
        if view is None:
            return {"run": self.run_id, "problem": self.problem}
        return {
            "run": self.run_id,
            "problem": self.problem or None,
            "organiser": view.run.manifest.organiser,
            "about": view.run.config.about.model_dump(),
            "peers": [beat.peer for beat in view.trainers],
            "minimum_peers": view.run.config.rounds.minimum_peers,
            "outer_step": view.outer_step,
            "outer_steps": view.outer_steps,
            "finished": view.is_finished,
            "tokens_per_second": round(view.tokens_per_second, 1),
            "model": view.model,
            "sources": view.sources,
            "needs": None if self.needs is None else self.needs.plain(),
        }

    def lines(self) -> Iterator[str]:
        """Yield lines of text about the run. Control characters are replaced, because a stranger may have written the
        run's texts."""
        from opendiloco.quantities import in_words
        from opendiloco.run import join_options
        from peers.values.wire import printable

        yield self.run_id
        problem = f"  {fit_for_terminal(self.problem)}"
        view, needs = self.view, self.needs
        if view is None:
            yield problem
            return
        state = "finished" if view.is_finished else f"outer step {view.outer_step}/{view.outer_steps}"
        here, minimum = len(view.trainers), view.run.config.rounds.minimum_peers
        peers = f"{here} of at least {minimum} peers" if here < minimum else f"{here} peer{'s' * (here != 1)}"
        yield f"  {state} · {peers} · {view.tokens_per_second:,.0f} tokens/s"
        parameters = "" if needs is None else f", {needs.host.values:,} parameters"
        yield from (f"  {line}" for line in view.run.config.about.lines())
        yield f"  {printable(view.model)}{parameters} · data: {printable(', '.join(view.sources))}"
        if options := join_options(view.run):
            yield f"  to join, add{options}"
        if self.problem:
            yield problem
        if needs is not None:
            yield (
                f"  needs a GPU with {in_words(needs.device_memory)} and room for activations, or a CPU with "
                f"{in_words(needs.main_memory_on_cpu)} of memory; {in_words(needs.disk)} of disk; "
                f"{in_words(2 * needs.host.payload)} of traffic each way per outer step"
            )


@click.command(short_help="List the open runs that a bootstrap node remembers.")
@initial_peers_option
@click.option("--limit", type=click.IntRange(1, 1000), metavar="N", default=20, help="List at most N runs.")
@click.option("--needs/--no-needs", default=True, help="Print the needs of each run, which takes seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def runs(initial_peers: tuple[str, ...], limit: int, needs: bool, as_json: bool) -> None:
    """List the runs that a bootstrap node remembers, the last used first. Runs by invitation are left out."""
    import asyncio

    found = asyncio.run(_look(known_addresses(initial_peers), limit))
    whole = _with_needs(found) if needs else found
    if as_json:
        click.echo(json.dumps([each.plain() for each in whole], indent=2))
        return
    for each in whole:
        click.echo("\n".join(each.lines()) + "\n")
    if found:
        there = "".join(f" --initial-peer {address}" for address in initial_peers)
        click.echo(f"To train in one of them: diloco-peer join --run ID{there}")
    else:
        click.echo("No open runs. Ask an organiser for an invite, or create a run: diloco-peer run create")


async def _look(addresses: tuple[str, ...], limit: int) -> list[_ListedRun]:
    """Return the runs that the bootstrap nodes at these addresses list, each with a view of its peers or the reason why
    there is none. Raises: SwarmUnreachableError, LocalNetworkError."""
    import asyncio

    from opendiloco.run import find_run
    from opendiloco.view.run_view import RunView
    from opendiloco.volunteer.volunteer import connected
    from peers.network.bootstrap import listed_runs
    from peers.values.identity import Identity

    async with connected(Identity.generate(), addresses, client_mode=True) as transport:

        async def look_at(run_id: str) -> _ListedRun:
            try:
                run = await find_run(transport, run_id)
                return _ListedRun(run_id, view=RunView(run, await transport.heartbeats(run_id)))
            except DilocoPeerError as error:
                return _ListedRun(run_id, problem=error.message)

        return await asyncio.gather(*map(look_at, await listed_runs(transport, addresses, limit)))


def _processor_time() -> float:
    """Return the processor time in seconds that this process and its ended children have used."""
    return sum(os.times()[:4])


def _with_needs(found: Iterable[_ListedRun], clock: Callable[[], float] = _processor_time) -> Iterator[_ListedRun]:
    """Yield the runs with their needs of memory, disk and traffic. Once `clock` has advanced by `MOST_SECONDS`, yield
    each further run with a reason why its needs are unknown."""
    ends = clock() + MOST_SECONDS
    for each in found:
        if each.view is None:
            yield each
        elif clock() >= ends:
            yield replace(each, problem=NOT_MEASURED)
        else:
            try:
                yield replace(each, needs=_needs_here(each.view.run))
            except DilocoPeerError as error:
                yield replace(each, problem=error.message)
            except ModuleNotFoundError as error:  # for example torch, which a bootstrap node may not have
                yield replace(each, problem=f"needs are not computed: the Python package {error.name} is missing here")


def _needs_here(run: Run) -> Needs:
    """Return the memory, disk and traffic that a run needs on a machine. The function imports torch.

    Raises: DataError for a model that each volunteer must name; ManifestError for a model that cannot be built.
    """
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    config = run.with_own(NONE).config
    return needs_of(config, sized_skeleton(config))


# One run --------------------------------------------------------------------------------------------------------------
@click.command(cls=RunCommand)
@run_option
@initial_peers_option
@reader_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--watch", is_flag=True, help="Update the table until Ctrl-C.")
def status(run: str, initial_peers: tuple[str, ...], identity: Path | None, as_json: bool, watch: bool) -> None:
    """Show the live peers of a run and their state."""
    import asyncio

    from opendiloco.volunteer.interrupts import run_interruptible

    if as_json and watch:
        raise click.UsageError("--json and --watch are both given; give one of them.")
    invite = parse_run(run, initial_peers)
    with reader(identity) as key:
        if watch:
            run_interruptible(lambda interrupts: _show_status(invite, key, as_json, watch))
        else:
            asyncio.run(_show_status(invite, key, as_json, watch))


async def _show_status(invite: Invite, key: Identity, as_json: bool, watch: bool) -> None:
    """Print the state of the run, once or, with `watch`, again and again until cancelled. Raises: DilocoPeerError."""
    from rich.console import Console

    from opendiloco.run import find_run
    from opendiloco.view.run_view import plain_signed
    from opendiloco.volunteer.admission import ask_for_signed_heads
    from opendiloco.volunteer.volunteer import connected

    console = Console()
    async with connected(key, invite.addresses, client_mode=True) as transport:
        run = await find_run(transport, invite.run_id)
        await ask_for_signed_heads(transport, run, invite.addresses)
        if watch:
            async for view in _views(transport, run):
                console.clear()  # does nothing where the output is no terminal
                console.print(_picture(view, transport.signed_heads_of(run.run_id), _volunteers_here(run.run_id)))
        view = await _compare(transport, run)
        signed = transport.signed_heads_of(run.run_id)
    here = _volunteers_here(run.run_id)
    if not as_json:
        console.print(_picture(view, signed, here))
        if view.agreement.verdict is None and len(view.working) > 1:
            click.echo(f"outer steps are too short to compare in {COMPARE_SECONDS:.0f} s: add --watch to look longer")
        return
    shown = {
        "run": run.run_id,
        "agree": view.agreement.verdict,
        "signed": plain_signed(signed),
        "in_force": view.amended.plain(run.config),
        "peers": [_plain(beat, run.config) for beat in view.peers],
        "here": [
            {"peer": peer, "phase": one.phase, "paused": list(one.reasons), "month": list(one.month)}
            for peer, one in here.items()
        ],
    }
    click.echo(json.dumps(shown, indent=2))


async def _views(transport: HivemindTransport, run: Run) -> AsyncIterator[RunView]:
    """Yield a new view of the run's live peers every `WATCH_SECONDS`."""
    import asyncio

    from opendiloco.view.run_view import Agreement, RunView

    agreement = Agreement()
    while True:
        yield RunView(run, await transport.heartbeats(run.run_id), agreement)
        await asyncio.sleep(WATCH_SECONDS)


async def _compare(transport: HivemindTransport, run: Run) -> RunView:
    """Return a view of the run once two peers have been seen at the same outer step, at once if fewer than two are at
    work, and after `COMPARE_SECONDS` in any case.

    Digests can be compared only at the same outer step. With short outer steps, two peers are rarely seen at one.
    """
    import asyncio

    now = asyncio.get_running_loop().time
    ends = now() + COMPARE_SECONDS
    async for view in _views(transport, run):
        if view.agreement.verdict is not None or len(view.working) < 2 or now() >= ends:
            break
    return view


def _picture(view: RunView, signed: SignedHeads, here: Mapping[str, VolunteerStatus]) -> Group:
    """Return the text that `status` prints: a table of the peers, and below it lines about the run and this machine's
    volunteers."""
    from rich.console import Group
    from rich.text import Text

    from opendiloco.view.run_view import held_out_lines, peers_table, reach_lines, row_of, signed_lines

    run = view.run
    paused = {peer: f"paused: {', '.join(one.reasons)}" for peer, one in here.items() if one.reasons}
    own = list[str]()
    for peer, one in here.items():
        own += [f"on this machine …{peer[-8:]}: {paused.get(peer, one.phase)}", *one.month]
    if not view.peers:
        return Group(run.run_id, "no live peers: this run is not training now", *signed_lines(signed), *own)
    rows = [row_of(beat, run.config, is_paused=beat.peer in paused) for beat in view.peers]
    table = peers_table(rows, run.run_id)
    lines = *held_out_lines(view), *reach_lines(view.peers), *view.amended.lines(), *signed_lines(signed)
    return Group(table, *map(Text, [*lines, str(view.agreement), *own]))  # as Text, in which rich reads no markup


def _volunteers_here(run_id: str) -> dict[str, VolunteerStatus]:
    """Ask this machine's volunteers in a run for their status. Return the answers by peer id."""
    from opendiloco.owner.controls import volunteers
    from opendiloco.storage.run_folder import default_state_folder

    return {path.parent.name: answer for path, answer in volunteers(default_state_folder(), run_id).items()}


def _plain(beat: Heartbeat, config: RunConfig) -> dict[str, object]:
    """Return a heartbeat as JSON types, with digests in hexadecimal. `seen` is the heartbeat's time by the peer's
    clock, in seconds since 1970."""
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
