"""The bootstrap node: an address that stays, and a memory for manifests.

A DHT forgets. The node keeps every manifest announced to it in a directory, puts them all into the DHT when it starts
and again and again while it runs, and so keeps runs findable while none of their peers is there, through its own
restarts, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from peers import metrics
from peers.errors import LocalNetworkError, ManifestError
from peers.health import HEALTH
from peers.network.catalogue import serve_catalogue
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.daemon import peer_id_of
from peers.network.manifest_store import ManifestStore
from peers.network.rating import RATING, Rater
from peers.network.run_failures import RunFailures
from peers.network.settings import LinkSettings
from peers.network.transport import HivemindTransport
from peers.presence.allowances import Allowances
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHeadsError, unpack_heads
from peers.values.system import now
from peers.values.tickets import Ticket, TicketError
from peers.values.wire import printable

logger = logging.getLogger(__name__)

ANNOUNCE_MANIFEST = "announce-manifest"  # name of the call; payload: a packed SignedManifest, answer: its run id
MANIFEST_LIFETIME = 3600.0  # seconds that the DHT keeps a manifest
REPUBLISH_INTERVAL = 300.0  # seconds; several chances within a lifetime
ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE = 30.0, 0.1  # that one peer, and one network, may make: at once, and a second
NETWORKS_TOGETHER = 20  # times that, for all networks together
MANY = 10**6  # peers are not limited together: keys cost nothing
LIFE_SIGN_INTERVAL = 5.0  # seconds
LIFE_SIGN_LIMIT = 30.0  # seconds without one, after which the node hangs


class Announcements:
    """Limits for those that announce runs: one peer, and one network, may do so now and then only."""

    def __init__(self, transport: HivemindTransport) -> None:
        self._transport = transport
        self._peers = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, MANY)
        self._networks = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, NETWORKS_TOGETHER)

    async def network_of(self, sender: str) -> str:
        """Return the network from which a peer may announce a run now. Raises: RefusalError when it may not."""
        _spend(self._peers, sender, "you have")
        network = await self._transport.network_of(sender)
        _spend(self._networks, network, f"your network, {network}, has")
        return network


def _spend(allowances: Allowances, name: str, who: str) -> None:
    """Raises: RefusalError."""
    if not allowances.has_some(name, now()):
        raise RefusalError(f"{who} announced many runs lately; try again in {1 / ANNOUNCEMENTS_RATE:.0f} seconds")
    allowances.spend(name, 1.0)


class Beside(Protocol):
    """What a bootstrap node does besides with the runs that it remembers."""

    async def keep(self, transport: HivemindTransport, manifests: Iterable[SignedManifest]) -> None:
        """Do it until cancelled. `manifests` may be gone through again and again."""


async def run_bootstrap(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    initial_peers: Sequence[str],
    manifest_directory: Path,
    on_ready: Callable[[tuple[str, ...]], None],
    stop: asyncio.Event,
    check: Callable[[SignedManifest], object] = lambda manifest: None,
    beside: Sequence[Beside] = (),
    links: LinkSettings | None = None,
    tickets: Sequence[Ticket] = (),
) -> None:
    """Run a bootstrap node until `stop` is set. `on_ready` gets its multiaddrs once it can be used. `check` raises
    ManifestError for a manifest that defines no usable run. `beside` is what the node does with the runs that are
    announced to it; the `tickets` admit it to those by invitation. `links` says how the node brings volunteers together
    that can't dial each other.

    Raises: ManifestError, LocalNetworkError, SwarmUnreachableError when it cannot start; LocalNetworkError when
    libp2p's daemon dies.
    """
    store = ManifestStore(manifest_directory, check)
    publishing = RunFailures("publishing")
    shown = {ticket.run: ticket.shown_by(identity.peer_id) for ticket in tickets}
    transport = await HivemindTransport.create(identity, initial_peers, listen, announce, public=True, links=links)
    announcements = Announcements(transport)
    try:

        async def announced(sender: str, payload: bytes) -> bytes:
            network = await announcements.network_of(sender)
            try:
                manifest = SignedManifest.unpack(payload)
                if store.knows(manifest.run_id):
                    return manifest.run_id.encode()
                for run in store.add(manifest, network):
                    transport.forget(run)
                    publishing.forget(run)
            except ManifestError as error:
                raise RefusalError(printable(error.message)) from error
            except LocalNetworkError as error:
                logger.error("run %s is not kept: %s", manifest.run_id, error)
                raise RefusalError("the node's disk takes no manifest now; its operator can see why") from error
            _learn(transport, store, manifest, shown)
            await transport.store_manifest(manifest, MANIFEST_LIFETIME)
            logger.info("run %s was announced by %s, from %s", manifest.run_id, sender, network)
            return manifest.run_id.encode()

        transport.admissions.on_revoked = store.keep_revocations
        transport.head_store.on_news = store.keep_signed_heads
        for manifest in store:
            with publishing.caught(manifest.run_id):
                _learn(transport, store, manifest, shown)
        await transport.on_call(ANNOUNCE_MANIFEST, announced)
        await serve_catalogue(
            transport, lambda: (run_id for run_id in store.run_ids() if transport.admissions.of(run_id) is None)
        )
        await transport.on_stream(RATING, Rater(transport.no_round).answer)
        await _publish(transport, store, publishing)
        on_ready(transport.addresses)
        keeping = [asyncio.create_task(one.keep(transport, store)) for one in beside]
        for task in keeping:
            task.add_done_callback(_report_failure)
        try:
            await _until_stopped(transport, store, stop, publishing)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
    finally:
        await transport.close()


async def announce_manifest(
    transport: HivemindTransport, manifest: SignedManifest, bootstrap_addresses: Sequence[str], timeout: float = 20.0
) -> tuple[str, ...]:
    """Put a manifest into the DHT and have bootstrap nodes remember it. Returns the addresses of those that do."""
    await transport.store_manifest(manifest, MANIFEST_LIFETIME)
    kept = []
    for address in bootstrap_addresses:
        try:
            answer = await transport.call(peer_id_of(address), ANNOUNCE_MANIFEST, manifest.pack(), timeout)
            if answer == manifest.run_id.encode():
                kept.append(address)
        except PeerUnreachableError as error:
            logger.warning("the manifest is not kept at %s: %s", address, error)
    return tuple(kept)


def _learn(
    transport: HivemindTransport, store: ManifestStore, manifest: SignedManifest, shown: Mapping[str, bytes]
) -> None:
    """Learn who may come into a run, what admits ourselves, should we keep it, and what its archives have signed."""
    transport.learn(manifest)
    try:
        if packed := store.signed_heads(manifest.run_id):
            transport.head_store.take(manifest.run_id, unpack_heads(packed))
    except SignedHeadsError as error:
        logger.warning("what the archives of %s have signed: %s", manifest.run_id, error)
    admission = transport.admissions.of(manifest.run_id)
    if admission is None:
        return
    admission.ticket = shown.get(manifest.run_id, b"")
    if revoked := store.revocations(manifest.run_id):
        try:
            admission.revoke(revoked)
        except TicketError as error:
            logger.warning("a list of revoked tickets of %s: %s", manifest.run_id, error)


async def _publish(transport: HivemindTransport, store: ManifestStore, failures: RunFailures) -> None:
    """Put every manifest into the DHT again, and see which of the runs are in use."""
    manifests = list(store)
    metrics.KNOWN_RUNS.set(len(manifests))
    _is_publishing()
    for manifest in manifests:
        if failures.is_due(manifest.run_id):
            with failures.caught(manifest.run_id):
                await _publish_one(transport, store, manifest)
        _is_publishing()


async def _publish_one(transport: HivemindTransport, store: ManifestStore, manifest: SignedManifest) -> None:
    await transport.store_manifest(manifest, MANIFEST_LIFETIME)
    heartbeats = await transport.heartbeats(manifest.run_id)
    live = sum(beat.state not in (PeerState.LEAVING, PeerState.ARCHIVING) for beat in heartbeats)
    if live:
        store.touch(manifest.run_id)
    metrics.RUN_LIVE_PEERS.labels(manifest.run_id).set(live)


def _is_publishing() -> None:
    """Give a sign of life after each run: all of a thousand take longer than they may keep us waiting."""
    HEALTH.expect("publishing", 3 * REPUBLISH_INTERVAL, "no manifest was put into the DHT again")


async def _until_stopped(
    transport: HivemindTransport, store: ManifestStore, stop: asyncio.Event, failures: RunFailures
) -> None:
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.create_task(transport.failure())
    publishing = asyncio.create_task(_keep_publishing(transport, store, failures))
    living = asyncio.create_task(_give_life_signs())
    try:
        await asyncio.wait({stopped, failed, publishing}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        if publishing.done():
            publishing.result()
    finally:
        for task in (stopped, failed, publishing, living):
            task.cancel()
        await asyncio.gather(stopped, failed, publishing, living, return_exceptions=True)
        HEALTH.over("publishing")


async def _keep_publishing(transport: HivemindTransport, store: ManifestStore, failures: RunFailures) -> None:
    while True:
        await asyncio.sleep(REPUBLISH_INTERVAL)
        await _publish(transport, store, failures)


def _report_failure(task: asyncio.Task[None]) -> None:
    """Tell of what ended although it should go on for as long as the node does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of this node has failed: restart it", exc_info=error)
        HEALTH.failing("bootstrap", f"a part of this node has failed: {error}")


async def _give_life_signs() -> None:
    """Show that this process still turns to its work."""
    try:
        while True:
            HEALTH.expect("bootstrap", LIFE_SIGN_LIMIT, "this node has not come to its work")
            await asyncio.sleep(LIFE_SIGN_INTERVAL)
    finally:
        HEALTH.over("bootstrap")
