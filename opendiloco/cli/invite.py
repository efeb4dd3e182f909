"""The commands `diloco-peer invite …`, which issue, list and revoke tickets to a run by invitation."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.options import FILE, initial_peers_option, join_option, spelled_out
from peers.errors import AdmissionError, RemoteProtocolError, SwarmUnreachableError, quoted

if TYPE_CHECKING:
    from opendiloco.volunteer.admission import IssuedTickets
    from peers.values.identity import Identity
    from peers.values.manifest import SignedManifest

manifest_argument = click.argument("manifest", type=FILE)
organiser_option = join_option("identity", help="The organiser's key file.")
given_option = join_option("state", help="Folder that keeps the list of issued tickets.")


@click.group()
def invite_group() -> None:
    """Issue, list and revoke tickets to a run by invitation."""


@invite_group.command("create", short_help="Print a new ticket.")
@manifest_argument
@click.option(
    "--for", "peer", metavar="PEER", help="Admit only the peer with this id.  [default: any peer with the ticket]"
)
@click.option(
    "--days",
    type=click.FloatRange(0, 3650, min_open=True),
    metavar="N",
    default=30.0,
    help="Days until the ticket expires.",
)
@organiser_option
@given_option
def _create(manifest: Path, peer: str | None, days: float, identity: Path | None, state: Path | None) -> None:
    """Print a new ticket to the run of a signed MANIFEST. Only the run's organiser can do this.

    Without --for the ticket admits every machine that has its text, until it expires or is revoked.
    """
    from opendiloco.volunteer.admission import IssuedTickets
    from peers.values.identity import is_peer_id
    from peers.values.tickets import Ticket

    if peer is not None and not is_peer_id(peer):
        raise click.BadParameter(f"{quoted(peer, 80)} is not a peer id.", param_hint="--for")
    run, key = _organised(manifest, identity)
    ticket = Ticket.give(run.run_id, key, int(time.time() + days * 86400), peer)
    IssuedTickets(run.run_id, key.peer_id, state).add(ticket)
    click.echo(f"{ticket}")
    click.echo(f"id: {ticket.id.hex()}; to use the ticket: diloco-peer join --run INVITE --ticket TICKET", err=True)


@invite_group.command("list", short_help="Print the tickets that this machine has issued.")
@click.argument("run", metavar="RUN|MANIFEST")
@organiser_option
@given_option
def _show(run: str, identity: Path | None, state: Path | None) -> None:
    """Print the tickets to a run that this machine has issued, with id, expiry, state and the admitted peer."""
    from opendiloco.storage.run_folder import read_manifest
    from opendiloco.volunteer.admission import IssuedTickets
    from opendiloco.volunteer.identity import load_identity
    from peers.values.manifest import Invite

    run_id = read_manifest(Path(run)).run_id if Path(run).is_file() else Invite.parse(run).run_id
    given = IssuedTickets(run_id, load_identity(identity).peer_id, state)
    revoked = given.revocations.revoked if given.revocations else ()
    for ticket in given.tickets:
        expired = "expired" if ticket.expires < time.time() else "good"
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(ticket.expires))
        standing = "revoked" if ticket.id in revoked else expired
        click.echo(f"{ticket.id.hex()}  until {until} UTC  {standing:<8} {ticket.peer or 'any peer'}")


@invite_group.command("revoke", short_help="Revoke tickets.")
@manifest_argument
@click.argument("tickets", nargs=-1, required=True, metavar="ID...")
@initial_peers_option
@organiser_option
@given_option
def _revoke(
    manifest: Path, tickets: tuple[str, ...], initial_peers: tuple[str, ...], identity: Path | None, state: Path | None
) -> None:
    """Revoke tickets. The run's peers and bootstrap nodes no longer admit the machines that used them."""
    import asyncio

    from opendiloco.volunteer.admission import IssuedTickets

    if not initial_peers:
        raise click.UsageError("a revocation is sent to the run's nodes: add --initial-peer.")
    run, key = _organised(manifest, identity)
    given = IssuedTickets(run.run_id, key.peer_id, state)
    reached = asyncio.run(_publish_revocations(run, key, given, tickets, spelled_out(initial_peers)))
    click.echo(f"revoked; {reached} {'node has' if reached == 1 else 'nodes have'} the list and will pass it on")


def _organised(path: Path, identity: Path | None) -> tuple[SignedManifest, Identity]:
    """Return the manifest in the file `path` and its organiser's key. Raises: ManifestError; LocalNetworkError;
    AdmissionError if the key is not the organiser's, or the run is not by invitation."""
    from opendiloco.storage.run_folder import read_manifest
    from opendiloco.volunteer.identity import load_identity

    run, key = read_manifest(path).manifest, load_identity(identity)
    if run.organiser != key.peer_id:
        raise AdmissionError(
            f"the run's organiser is {run.organiser}, but this key belongs to {key.peer_id}.",
            "Name the organiser's key file with --identity.",
        )
    if not run.is_by_invitation:
        raise AdmissionError(
            f'the run {run.run_id} is open: admission.mode is not "invite".', "Volunteers join it without a ticket."
        )
    return run, key


async def _publish_revocations(
    run: SignedManifest, key: Identity, given: IssuedTickets, ids: tuple[str, ...], initial_peers: tuple[str, ...]
) -> int:
    """Sign the run's next list of revoked tickets and send it to the run's nodes. Return the number of nodes reached.

    Raises: SwarmUnreachableError when no node is reached; the list is kept and sent with the next revocation.
    """
    from opendiloco.volunteer.volunteer import connected
    from peers.network.channel import PeerUnreachableError
    from peers.network.daemon import peer_id_of
    from peers.values.identity import Identity
    from peers.values.wire import pack

    async with connected(Identity.generate(), initial_peers, client_mode=True) as transport:
        transport.learn(run)
        admission = transport.runs.admissions.of(run.run_id)
        assert admission is not None
        nodes = dict.fromkeys(peer_id_of(address) for address in initial_peers)
        beats = await transport.heartbeats(run.run_id)
        for beat in beats:
            if await transport.connect(beat.peer, beat.addresses):
                nodes[beat.peer] = None

        async def exchange(node: str) -> bool:
            with suppress(PeerUnreachableError, RemoteProtocolError):
                await transport.runs.admissions.exchange(transport.call, run.run_id, node)
                return True
            return False

        for node in nodes:  # first fetch lists of revoked tickets that were signed on other machines
            await exchange(node)
        admission.revoke(pack(given.revoke(ids, key, admission.revocations)))
        used = sum(bool(admission.refusal(beat.peer, beat.ticket, time.time())) for beat in beats)
        if used:
            click.echo(f"warning: live peers that are shut out by this: {used}", err=True)
        reached = sum([await exchange(node) for node in nodes])
    if not reached:
        raise SwarmUnreachableError(
            "no node took the list of revoked tickets.", "The list is kept: revoke again when a node answers."
        )
    return reached
