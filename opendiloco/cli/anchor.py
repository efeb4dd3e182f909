"""`diloco-peer anchor`: sign the newest head of a run's log as one of its anchors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import identity_option, initial_peers_option, parse_run, run_option, state_option

if TYPE_CHECKING:
    from opendiloco.run import Run
    from peers.log.folder import RunLog
    from peers.net.transport import HivemindTransport
    from peers.values.anchors import AnchoredHead, Anchors
    from peers.values.identity import Identity
    from peers.values.manifest import Invite


@click.command(short_help="Sign the run's log, as one of its anchors.")
@run_option
@initial_peers_option
@identity_option("The anchor's")
@state_option("Where to remember what was signed.")
@click.option("--peer", metavar="PEER_ID", help="Sign the log of this peer.  [default: that of all peers]")
@click.option(
    "--uncertified",
    is_flag=True,
    help="Sign also what too few have signed: you say that this log is the run's, whatever the others made of it.",
)
@click.pass_obj
def command(
    log: LogOptions,
    run: str,
    initial_peers: tuple[str, ...],
    identity: Path | None,
    state: Path | None,
    peer: str | None,
    uncertified: bool,
) -> None:
    """Say that the log which peers of the run have now is the run's: sign its newest head, and tell them.

    From then on peers, newcomers, `follow` and archives go by it. An archive whose key is an anchor does this by
    itself.
    """
    import asyncio

    from opendiloco.identity_file import load_identity

    log.start()
    invite, key = parse_run(run, initial_peers), load_identity(identity)
    signed, told = asyncio.run(anchor(invite, key, state, peer, uncertified))
    nodes = f"{told} {'node' if told == 1 else 'nodes'} told, which tell all others"
    click.echo(f"outer step {signed.index} is anchored: {signed.head.hex()[:8]}; {nodes}")


async def anchor(
    invite: Invite, key: Identity, state: Path | None, peer: str | None, uncertified: bool
) -> tuple[AnchoredHead, int]:
    """Sign the newest head of a log. Returns it, and how many nodes were told.

    Raises: DilocoPeerError.
    """
    from opendiloco.anchorage import ask_for_anchors
    from opendiloco.run import find_run
    from opendiloco.volunteer import connected
    from peers.errors import SwarmUnreachableError
    from peers.net.daemon import peer_id_of
    from peers.values.anchors import AnchoredHeads
    from peers.values.wire import pack

    async with connected(key, invite.addresses, client_mode=True) as transport:
        run = await find_run(transport, invite.run_id)
        check_key(run, key)
        await ask_for_anchors(transport, run, invite.addresses)
        nodes = dict.fromkeys(map(peer_id_of, invite.addresses))
        for beat in await transport.heartbeats(run.run_id):
            if await transport.connect(beat.peer, beat.addresses):
                nodes[beat.peer] = None
        if not await transport.anchorage.exchange_with(transport, run.run_id, nodes):
            raise SwarmUnreachableError(
                "nobody could be asked what this key has signed elsewhere.", "Anchor again when a node answers."
            )
        signed = await sign(run, transport, key, state, peer, uncertified)
        transport.anchorage.take(run.run_id, pack(AnchoredHeads(heads=(signed,))))
        told = await transport.anchorage.exchange_with(transport, run.run_id, nodes)
    if not told:
        raise SwarmUnreachableError(
            f"outer step {signed.index} is signed, and nobody could be told.", "Anchor again when a node answers."
        )
    return signed, told


def check_key(run: Run, key: Identity) -> None:
    """Raises: ManifestError unless this key is one of the run's anchors."""
    from peers.errors import ManifestError

    anchors = run.manifest.anchors
    if key.peer_id not in anchors:
        named = ", ".join(anchors) or "nobody's"
        raise ManifestError(
            f"the anchors of {run.run_id} are {named}; this key is {key.peer_id}'s.",
            "Name the key file of an anchor with --identity.",
        )


async def sign(
    run: Run, transport: HivemindTransport, key: Identity, state: Path | None, peer: str | None, uncertified: bool
) -> AnchoredHead:
    """Sign the newest head that may be signed, or find it signed already.

    Raises: SwarmUnreachableError when nobody shows a log; NotAnchoredError, AnchorFileError.
    """
    import asyncio

    from opendiloco.checkpoints.run_folder import RunFolder
    from opendiloco.errors import NotAnchoredError
    from peers.log.anchorer import Anchorer, CannotAnchorError
    from peers.values.signing import IdentityKeys

    folder = RunFolder.at(run.run_id, key.peer_id, state).path
    anchorer = Anchorer(run.run_id, key.peer_id, IdentityKeys(key), folder)
    known, signed = transport.anchors_of(run.run_id).up_to(key.peer_id), None
    shown = await show_log(run, transport, known, peer)
    try:
        while (head := await asyncio.to_thread(anchorer.sign, shown, known, uncertified)) is not None:
            signed, known = head, known.with_heads([head])
    except CannotAnchorError as error:
        if signed is None:
            remedy = "See with `diloco-peer status` who has which log; --peer and --uncertified choose."
            raise NotAnchoredError(f"the log of {run.run_id} is not signed: {error}.", remedy) from error
    signed = signed or anchorer.last
    if signed is None:
        raise NotAnchoredError(
            f"the newest outer step of {run.run_id} is anchored by another key.", "Try again after the next one."
        )
    return signed


async def show_log(run: Run, transport: HivemindTransport, known: Anchors, peer: str | None) -> RunLog:
    """The log of a peer, or the one that all peers show.

    Raises: SwarmUnreachableError when nobody shows any, NotAnchoredError when they show several.
    """
    from opendiloco.errors import NotAnchoredError
    from peers.errors import SwarmUnreachableError
    from peers.presence.membership import DONATING
    from peers.transfer.lineage_fetch import LineageError, best_branch

    beats = [beat for beat in await transport.heartbeats(run.run_id) if beat.state in DONATING]
    beats.sort(key=lambda beat: (beat.peer == peer, beat.lineage_tokens), reverse=True)
    if peer is not None and (not beats or beats[0].peer != peer):
        raise SwarmUnreachableError(f"{peer} is not there, or shows no log.", "`diloco-peer status` names who is.")
    looked_at = beats if peer is None else beats[:1]
    try:
        branch, shown = await best_branch(transport, looked_at, run.settings.empty_log, known)
    except LineageError as error:
        raise SwarmUnreachableError(
            f"nobody shows a log of {run.run_id}: {error}.", "Try again in a minute."
        ) from error
    end = branch.end.position.index
    others = [beat.peer for beat in looked_at if beat.index <= end and branch.heads.get(beat.index) != beat.head]
    if others:
        raise NotAnchoredError(
            f"the peers of {run.run_id} have several logs: that of {others[0]} is another one than the best.",
            "Find out with `diloco-peer status` whose log is the run's, and name the peer with --peer.",
        )
    return shown
