"""`diloco-peer runs`: which runs a bootstrap node remembers, what they take of a machine, and who is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import initial_peers_option, known_addresses

if TYPE_CHECKING:
    from opendiloco.run import Run
    from opendiloco.view.run_view import RunView
    from opendiloco.workers.needs import Needs
    from peers.network.transport import HivemindTransport

NOTHING = "No runs that are open to everybody. Ask an organiser for an invite, or begin one: diloco-peer run create"

NOT_MEASURED = "not measured: other runs took too long"
MOST_SECONDS = 30.0
"""For what all runs take of a machine: a stranger's model may take long to lay out, and there may be many."""


@dataclass(frozen=True)
class ListedRun:
    """One run. `problem` says why this machine cannot know more of it, or what it takes; empty: it knows all.

    `needs` is what it takes of a machine; None where that is not known."""

    run_id: str
    problem: str = ""
    view: RunView | None = None
    needs: Needs | None = None

    def plain(self) -> dict[str, Any]:
        """Return the run as JSON can say it."""
        view = self.view
        if view is None:
            return {"run": self.run_id, "problem": self.problem}
        return {
            "run": self.run_id,
            "problem": self.problem or None,
            "organiser": view.run.manifest.organiser,
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
        """Yield the run's lines for people."""
        from opendiloco.errors import fit_for_terminal

        yield from map(fit_for_terminal, self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield them with a stranger's words as they are."""
        from opendiloco.quantities import in_words
        from peers.values.wire import printable

        yield self.run_id
        view, needs = self.view, self.needs
        if view is None:
            yield f"  {self.problem}"
            return
        state = "finished" if view.is_finished else f"outer step {view.outer_step}/{view.outer_steps}"
        here, minimum = len(view.trainers), view.run.config.rounds.minimum_peers
        least = f" of at least {minimum}" if here < minimum else ""
        yield f"  {state} · {here}{least} peers · {view.tokens_per_second:,.0f} tokens/s"
        parameters = "" if needs is None else f", {needs.host.values:,} parameters"
        yield f"  {printable(view.model)}{parameters} · data: {printable(', '.join(view.sources))}"
        if self.problem:
            yield f"  {self.problem}"
        if needs is not None:
            yield (
                f"  takes {in_words(needs.device_memory)} of a GPU and activations, or the CPU with "
                f"{in_words(needs.main_memory_on_cpu)} of memory; {in_words(needs.disk)} of disk; "
                f"{in_words(2 * needs.payload)} each way in an outer step"
            )


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
    whole = all_with_needs(found) if needs else found
    if as_json:
        click.echo(json.dumps([each.plain() for each in whole], indent=2))
        return
    for each in whole:
        click.echo("\n".join(each.lines()) + "\n")
    there = "".join(f" --initial-peer {address}" for address in initial_peers)
    click.echo(f"To train in one of them: diloco-peer join --run ID{there}" if found else NOTHING)


async def look(addresses: tuple[str, ...], limit: int) -> list[ListedRun]:
    """Return the runs that the nodes at these addresses list. Raises: SwarmUnreachableError, LocalNetworkError."""
    import asyncio

    from opendiloco.volunteer.volunteer import connected
    from peers.network.bootstrap import listed_runs
    from peers.values.identity import Identity

    async with connected(Identity.generate(), addresses, client_mode=True) as transport:
        run_ids = await listed_runs(transport, addresses, limit)
        return await asyncio.gather(*(look_at(transport, run_id) for run_id in run_ids))


async def look_at(transport: HivemindTransport, run_id: str) -> ListedRun:
    """Return one run, as far as it can be known here."""
    from opendiloco.run import find_run
    from opendiloco.view.run_view import RunView
    from peers.errors import DilocoPeerError

    try:
        run = await find_run(transport, run_id)
        return ListedRun(run_id, view=RunView.of(run, await transport.heartbeats(run_id)))
    except DilocoPeerError as error:
        return ListedRun(run_id, problem=error.message)


def all_with_needs(found: Iterable[ListedRun], clock: Callable[[], float] = time.monotonic) -> Iterator[ListedRun]:
    """Yield the runs with what they take of a machine, as far as that is known within `MOST_SECONDS`."""
    ends = clock() + MOST_SECONDS
    for each in found:
        if each.view is None or clock() < ends:
            yield with_needs(each)
        else:
            yield replace(each, problem=NOT_MEASURED)


def with_needs(listed: ListedRun) -> ListedRun:
    """Return the run with what it takes of a machine, or why that is not known."""
    from peers.errors import DilocoPeerError

    if listed.view is None:
        return listed
    try:
        return replace(listed, needs=needs_here(listed.view.run))
    except DilocoPeerError as error:
        return replace(listed, problem=error.message)


def needs_here(run: Run) -> Needs:
    """Return what a run takes of a machine. Imports torch.

    Raises: DataError for a model that each volunteer names; ManifestError for one that cannot be built.
    """
    from opendiloco.data.own_files import NONE
    from opendiloco.model.build import sized_skeleton
    from opendiloco.workers.needs import needs_of

    config = run.with_own(NONE).config
    return needs_of(config, sized_skeleton(config))
