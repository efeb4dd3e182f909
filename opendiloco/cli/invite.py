"""`diloco-peer invite …`: tickets to a run by invitation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, identity_option, initial_peers_option, spelled_out, state_option

if TYPE_CHECKING:
    from opendiloco.issued import Issued
    from peers.values.identity import Identity
    from peers.values.manifest import SignedManifest
    from peers.values.tickets import Revocations, Ticket

DAY = 86400
PLACES = 10_000

manifest_argument = click.argument("manifest", type=FILE)
organiser_option = identity_option("The organiser's")
issued_option = state_option("Where to remember what was given.")


@click.group()
def command() -> None:
    """Give tickets to a run by invitation, and take them back."""


@command.command(short_help="Print a ticket.")
@click.argument("manifest", type=FILE, required=False)
@click.option("--from", "given", metavar="TICKET|FILE", help="Give places of this ticket of yours, instead.")
@click.option("--for", "peer", metavar="PEER", help="Only for the peer with this id.  [default: for whoever has it]")
@click.option(
    "--places",
    type=click.IntRange(1, PLACES),
    metavar="N",
    default=1,
    show_default=True,
    help="For the first N peers that show it; with --for, of which that peer can give N - 1 to others.",
)
@click.option(
    "--days",
    type=click.FloatRange(0, 3650, min_open=True),
    metavar="N",
    default=30.0,
    show_default=True,
    help="Good for so many days.",
)
@organiser_option
@issued_option
@click.pass_obj
def create(
    log: LogOptions,
    manifest: Path | None,
    given: str | None,
    peer: str | None,
    places: int,
    days: float,
    identity: Path | None,
    state: Path | None,
) -> None:
    """Print a ticket to the run of a signed MANIFEST, for the organiser; or one out of a ticket that you were given."""
    import time

    from opendiloco.identity_file import load_identity
    from opendiloco.issued import Issued
    from peers.errors import quoted
    from peers.values.identity import is_peer_id
    from peers.values.tickets import Ticket

    log.start()
    if (manifest is None) == (given is None):
        raise click.UsageError("give the run's MANIFEST, or --from and your ticket.")
    if peer is not None and not is_peer_id(peer):
        raise click.BadParameter(f"{quoted(peer, 80)} is not a peer id.", param_hint="--for")
    expires = int(time.time() + days * DAY)
    if manifest is not None:
        run, key = organised(manifest, identity)
        issued, first = Issued(run.run_id, key.peer_id, state), 0
        ticket = Ticket.give(run.run_id, key, expires, places, peer)
    else:
        assert given is not None
        ours, key = held(given, load_identity(identity))
        issued = Issued(ours.run, key.peer_id, state)
        first = issued.next_place(ours)
        check_room(ours, first, places, peer)
        ticket = ours.give_on(key, expires, first, places, peer)
    issued.add(ticket, first)
    click.echo(f"{ticket}")
    click.echo(f"id: {ticket.id.hex()}; whoever has it types: diloco-peer join --run INVITE --ticket TICKET", err=True)


@command.command("list", short_help="Print the tickets that this machine has given.")
@click.argument("run", metavar="RUN|MANIFEST")
@organiser_option
@issued_option
@click.pass_obj
def list_(log: LogOptions, run: str, identity: Path | None, state: Path | None) -> None:
    """Print the tickets that this machine has given to a run: id, places, expiry, for whom, and whether revoked."""
    import time

    from opendiloco.checkpoints.run_folder import read_manifest
    from opendiloco.identity_file import load_identity
    from opendiloco.issued import Issued
    from peers.values.manifest import Invite

    log.start()
    run_id = read_manifest(Path(run)).run_id if Path(run).is_file() else Invite.parse(run).run_id
    issued = Issued(run_id, load_identity(identity).peer_id, state)
    revoked = {one.hex() for one in issued.revoked}
    for one in issued.tickets:
        expired = "expired" if one.expires < time.time() else "good"
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(one.expires))
        standing = "revoked" if one.id in revoked else expired
        click.echo(f"{one.id}  {one.places:>5} places  until {until} UTC  {standing:<8} {one.peer or 'anybody'}")


@command.command(short_help="Take tickets back.")
@manifest_argument
@click.argument("tickets", nargs=-1, required=True, metavar="ID...")
@initial_peers_option
@organiser_option
@issued_option
@click.pass_obj
def revoke(
    log: LogOptions,
    manifest: Path,
    tickets: tuple[str, ...],
    initial_peers: tuple[str, ...],
    identity: Path | None,
    state: Path | None,
) -> None:
    """Take tickets back, and all that was given on with them: tell the run's peers, and the nodes that remember it."""
    import asyncio

    from opendiloco.issued import Issued

    log.start()
    if not initial_peers:
        raise click.UsageError("the run has to hear of it: add --initial-peer.")
    run, key = organised(manifest, identity)
    issued = Issued(run.run_id, key.peer_id, state)
    told = asyncio.run(tell(run, key, issued, tickets, spelled_out(initial_peers)))
    click.echo(f"revoked; {told} {'node' if told == 1 else 'nodes'} told, which tell all others")


def organised(path: Path, identity: Path | None) -> tuple[SignedManifest, Identity]:
    """The run of a manifest, and its organiser's key. Raises: ManifestError, AdmissionError, LocalNetworkError."""
    from opendiloco.checkpoints.run_folder import read_manifest
    from opendiloco.identity_file import load_identity
    from peers.errors import AdmissionError

    run, key = read_manifest(path).manifest, load_identity(identity)
    if run.organiser != key.peer_id:
        raise AdmissionError(
            f"the run's organiser is {run.organiser}, this key is {key.peer_id}'s.",
            "Name the organiser's key file with --identity.",
        )
    if not run.is_by_invitation:
        raise AdmissionError(
            f'the run {run.run_id} is open: admission.mode is not "invite".', "Nobody needs a ticket to join it."
        )
    return run, key


def held(given: str, key: Identity) -> tuple[Ticket, Identity]:
    """A ticket, and the key that it is for. Raises: AdmissionError."""
    from opendiloco.entrance import read_ticket
    from peers.errors import AdmissionError

    ticket = read_ticket(given)
    if ticket.is_for_anybody or ticket.is_for != key.peer_id:
        raise AdmissionError(
            "the ticket was not given to this key in particular, and its places can't be signed on.",
            "Hand on the ticket itself; or name with --identity the key file that it is for.",
        )
    return ticket, key


def check_room(ticket: Ticket, first: int, places: int, peer: str | None) -> None:
    """Raises: AdmissionError when a ticket has not so many places left, or was signed on too often."""
    from peers.errors import AdmissionError
    from peers.values.tickets import GRANTS_LIMIT

    if len(ticket.chain.grants) + 1 + (peer is None) > GRANTS_LIMIT:
        raise AdmissionError(
            "the ticket has been signed on as often as it can be.", "Ask the organiser for a ticket with more places."
        )

    left = max(0, ticket.count - first)
    if places > left:
        raise AdmissionError(
            f"--places {places}: of the ticket's {ticket.count} places, {left} can still be given on.",
            "One is your own. Ask the organiser for a ticket with more places.",
        )


async def tell(
    run: SignedManifest, key: Identity, issued: Issued, ids: tuple[str, ...], initial_peers: tuple[str, ...]
) -> int:
    """Sign the next list of revoked tickets. Returns how many nodes took it.

    Raises: SwarmUnreachableError when none did; it is signed and kept all the same, to be told with the next.
    """
    from contextlib import suppress

    from opendiloco.volunteer import connected
    from peers.errors import RemoteProtocolError, SwarmUnreachableError
    from peers.net.daemon import peer_id_of
    from peers.streams.channel import PeerUnreachableError
    from peers.values.identity import Identity as AnyIdentity
    from peers.values.tickets import Revocations
    from peers.values.wire import pack

    def signed(newest: Revocations | None) -> Revocations:
        number = max(issued.revocations.number if issued.revocations else 0, newest.number if newest else 0) + 1
        revoked = issued.all_revoked(ids, newest.revoked if newest else ())
        return Revocations.sign(run.run_id, number, revoked, key)

    async with connected(AnyIdentity.generate(), initial_peers, client_mode=True) as transport:
        transport.learn(run)
        guests = transport.doors.of(run.run_id)
        assert guests is not None
        nodes = dict.fromkeys(peer_id_of(address) for address in initial_peers)
        for beat in await transport.heartbeats(run.run_id):
            if await transport.connect(beat.peer, beat.addresses):
                nodes[beat.peer] = None
        for node in nodes:  # what another machine of the organiser's may have signed
            with suppress(PeerUnreachableError, RemoteProtocolError):
                await transport.doors.exchange(transport, run.run_id, node)
        newest = signed(guests.revocations)
        issued.save(newest)
        guests.revoke(pack(newest))
        told = 0
        for node in nodes:
            with suppress(PeerUnreachableError, RemoteProtocolError):
                await transport.doors.exchange(transport, run.run_id, node)
                told += 1
    if not told:
        raise SwarmUnreachableError(
            "nobody could be told which tickets are revoked.", "The list is kept: revoke again when a node answers."
        )
    return told
