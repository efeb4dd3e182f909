"""The bootstrap node: a public node with a fixed address, which keeps the manifests of runs.

A DHT forgets. The node keeps every announced manifest in a directory, and puts all of them into the DHT when it starts
and repeatedly afterwards. So runs can be found while none of their peers is there, and after the node's own restarts.
It lists the ids of its runs to any caller, except those by invitation. Peers repeat the manifest as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from peers import metrics
from peers.errors import FolderError, ManifestError, SwarmUnreachableError
from peers.metrics import HEALTH
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.daemon import NETWORK_ERRORS, peer_id_of
from peers.network.first_contact import RememberedPeers
from peers.network.links import LinkSettings
from peers.network.manifest_store import REVOKED_SUFFIX, SIGNED_SUFFIX, ManifestStore
from peers.network.rating import RATING, Rater
from peers.network.run_failures import RunFailures
from peers.network.transport import HivemindTransport
from peers.presence.allowances import Allowances
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import RUN_ID, SignedManifest
from peers.values.signed_heads import SignedHeadsError, unpack_heads
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.tickets import Ticket, TicketError
from peers.values.wire import printable

logger = logging.getLogger(__name__)

LIST_RUNS = "list-runs"  # name of a call; request: count of run ids to skip, decimal; answer: run ids, one per line
PAGE = 200  # run ids in one answer to the call `list-runs`, at most
RUNS_LIMIT = 1000
"""Runs that a caller asks for, at most."""
ASK_TIMEOUT = 20.0  # seconds until a call to a bootstrap node times out; a busy node answers slowly
NUMBER = re.compile(rb"[0-9]{1,6}")
ANNOUNCE_MANIFEST = "announce-manifest"  # name of a call; request: a packed SignedManifest; answer: the run's id
MANIFEST_LIFETIME = 3600.0  # seconds for which the DHT keeps a manifest
REPUBLISH_INTERVAL = 300.0  # seconds between two stores of each manifest in the DHT
# Announcements that a node accepts from one peer, and from one network: at once, and per second.
ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE = 30.0, 0.1
NETWORKS_TOGETHER = 20  # all IP networks together may announce this many times as many runs as one network
MANY = 10**6  # all peers together may announce this many times as many runs as one peer: in effect no limit
LIFE_SIGN_INTERVAL = 5.0  # seconds between two reports that this process still runs its event loop
LIFE_SIGN_LIMIT = 30.0  # seconds without a report from the event loop after which the node counts as hanging
LOOK_INTERVAL = 10.0  # seconds between two checks whether a run's manifest is due to be stored in the DHT again
NodeTask: TypeAlias = Callable[[HivemindTransport, Iterable[SignedManifest]], Coroutine[None, None, None]]
"""Work with the runs that a node remembers, until cancelled. The manifests may be iterated over repeatedly."""


async def run_bootstrap(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    initial_peers: Sequence[str],
    manifest_directory: Path,
    on_ready: Callable[[tuple[str, ...]], None],
    stop: asyncio.Event,
    check: Callable[[SignedManifest], object] = lambda manifest: None,
    beside: Sequence[NodeTask] = (),
    links: LinkSettings | None = None,
    tickets: Sequence[Ticket] = (),
) -> None:
    """Run a bootstrap node until the event `stop` is set.

    `on_ready` is called with its multiaddrs when it can be used. `check` raises ManifestError for a manifest of no
    usable run. `beside` is further work with the announced runs; the `tickets` admit the node to those by invitation.
    `links` has the settings for bringing volunteers together that cannot dial each other.

    Raises: ManifestError, LocalNetworkError when it cannot start; LocalNetworkError when libp2p's daemon dies.
    """
    store = ManifestStore(manifest_directory, check)
    tickets_shown = {ticket.run: ticket.shown_by(identity.peer_id) for ticket in tickets}
    transport = await HivemindTransport.create(identity, initial_peers, listen, announce, public=True, links=links)
    try:
        node = _BootstrapNode(transport, store, tickets_shown)
        await node.begin()
        on_ready(transport.addresses)
        await _work_until_stopped(node, beside, stop)
    finally:
        await transport.close()


class _BootstrapNode:
    def __init__(self, transport: HivemindTransport, store: ManifestStore, shown: Mapping[str, bytes]) -> None:
        """Create a bootstrap node; `shown` maps the id of each run by invitation to the node's packed ticket."""
        self.transport = transport
        self.store = store
        self._shown = shown
        self._failures = RunFailures("publishing")
        # Each peer, and each network, may announce only a limited number of runs.
        self._of_peers = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, MANY)
        self._of_networks = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, NETWORKS_TOGETHER)

    async def begin(self) -> None:
        """Register the stored runs and the handlers of calls. Then put the manifests of these runs into the DHT."""
        self.transport.runs.admissions.on_revoked = partial(self.store.keep, REVOKED_SUFFIX)
        self.transport.runs.on_heads = partial(self.store.keep, SIGNED_SUFFIX)
        for manifest in self.store:
            with self._failures.caught(manifest.run_id):
                self._learn(manifest)
        await self.transport.on_call(ANNOUNCE_MANIFEST, self.on_announcement)
        await self.transport.on_call(LIST_RUNS, self.on_list)
        await self.transport.on_stream(RATING, Rater(self.transport.no_round).answer)
        await self.publish()

    def _learn(self, manifest: SignedManifest) -> None:
        """Register a run with the transport: its manifest, stored signed heads and revoked tickets, and our ticket."""
        run, runs = manifest.run_id, self.transport.runs
        self.transport.learn(manifest)
        try:
            if packed := self.store.kept(SIGNED_SUFFIX, run):
                runs.take_heads(run, unpack_heads(packed))
        except SignedHeadsError as error:
            logger.warning("the stored heads that the archives of run %s signed are ignored: %s", run, error)
        admission = runs.admissions.of(run)
        if admission is None:
            return
        admission.ticket = self._shown.get(run, b"")
        if revoked := self.store.kept(REVOKED_SUFFIX, run):
            try:
                admission.revoke(revoked)
            except TicketError as error:
                logger.warning("the stored list of revoked tickets of run %s is ignored: %s", run, error)

    async def on_announcement(self, sender: str, payload: bytes) -> bytes:
        """Store an announced manifest on disk and in the DHT. Return the run's id. Raises: RefusalError."""
        _count_announcement(self._of_peers, sender, "you have")
        network = await self.transport.daemon.network_of(sender)
        _count_announcement(self._of_networks, network, f"your network, {network}, has")
        try:
            manifest = SignedManifest.unpack(payload)
            if self.store.knows(manifest.run_id):
                return manifest.run_id.encode()
            for run in self.store.add(manifest, network):
                self.transport.forget(run)
                self._failures.forget(run)
        except ManifestError as error:
            raise RefusalError(printable(error.message)) from error
        except FolderError as error:
            logger.error("the manifest of run %s cannot be stored on disk: %s", manifest.run_id, error)
            raise RefusalError("the node's disk takes no manifest now; its operator can see why") from error
        self._learn(manifest)
        metrics.KNOWN_RUNS.set(len(self.store.run_ids()))
        await self._publish_one(manifest)
        logger.info("run %s was announced by peer %s, from network %s", manifest.run_id, sender, network)
        return manifest.run_id.encode()

    async def on_list(self, sender: str, payload: bytes) -> bytes:
        """Return up to PAGE run ids, the newest first, one per line, after skipping the number of ids in `payload`.
        Runs by invitation are left out."""
        if not NUMBER.fullmatch(payload):
            raise RefusalError("the number of runs to leave out is malformed")
        first, admissions = int(payload), self.transport.runs.admissions
        run_ids = [run_id for run_id in self.store.run_ids() if admissions.of(run_id) is None]
        return "\n".join(run_ids[first : first + PAGE]).encode()

    async def keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(REPUBLISH_INTERVAL)
            await self.publish()

    async def publish(self) -> None:
        """Store every manifest in the DHT, and count the live peers of each run."""
        manifests = list(self.store)
        metrics.KNOWN_RUNS.set(len(manifests))
        _is_publishing()
        for manifest in manifests:
            if self._failures.is_due(manifest.run_id):
                with self._failures.caught(manifest.run_id):
                    await self._publish_one(manifest)
            _is_publishing()

    async def _publish_one(self, manifest: SignedManifest) -> None:
        await self.transport.store_manifest(manifest, MANIFEST_LIFETIME)
        heartbeats = await self.transport.heartbeats(manifest.run_id)
        live = sum(beat.state not in (PeerState.LEAVING, PeerState.ARCHIVING) for beat in heartbeats)
        if live:
            self.store.touch(manifest.run_id)
        metrics.RUN_LIVE_PEERS.labels(manifest.run_id).set(live)


def _count_announcement(allowances: Allowances, announcer: str, you_have: str) -> None:
    """Count an announcement by a peer or an IP network. Raises: RefusalError if its allowance is used up; the error's
    message begins with `you_have`."""
    if not allowances.has_some(announcer, now()):
        raise RefusalError(f"{you_have} announced many runs lately; try again in {1 / ANNOUNCEMENTS_RATE:.0f} seconds")
    allowances.spend(announcer, 1.0)


def _is_publishing() -> None:
    """Report to the health check that this node is storing manifests in the DHT."""
    HEALTH.expect("publishing", 3 * REPUBLISH_INTERVAL, "no manifest was put into the DHT again")


async def _work_until_stopped(node: _BootstrapNode, beside: Sequence[NodeTask], stop: asyncio.Event) -> None:
    """Store the manifests in the DHT repeatedly, and run the work in `beside`, until `stop` is set. Raises:
    LocalNetworkError if libp2p's daemon dies."""
    stopped, failed = start_task(stop.wait()), start_task(node.transport.daemon.failure())
    publishing, living = start_task(node.keep_publishing()), start_task(_give_life_signs())
    others = [start_task(work(node.transport, node.store)) for work in beside]
    for task in others:
        task.add_done_callback(_report_failure)
    try:
        await asyncio.wait({stopped, failed, publishing}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            logger.info("a signal asked this node to stop: it leaves the swarm now")
        if failed.done():
            raise failed.result()
        if publishing.done():
            publishing.result()
    finally:
        await cancel_and_wait(stopped, failed, publishing, living, *others)
        HEALTH.forget("publishing")


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of this node has failed: restart it", exc_info=error)
        HEALTH.failing("bootstrap", f"a part of this node has failed: {error}")


async def _give_life_signs() -> None:
    try:
        while True:
            HEALTH.expect("bootstrap", LIFE_SIGN_LIMIT, "this node has not come to its work")
            await asyncio.sleep(LIFE_SIGN_INTERVAL)
    finally:
        HEALTH.forget("bootstrap")


# Calls to bootstrap nodes -------------------------------------------------------------------------------------
async def announce_manifest(
    transport: HivemindTransport, manifest: SignedManifest, bootstrap_addresses: Sequence[str]
) -> tuple[str, ...]:
    """Store a manifest in the DHT, and send it to bootstrap nodes. Return the addresses of the nodes that keep it."""
    await transport.store_manifest(manifest, MANIFEST_LIFETIME)
    kept = []
    for address in bootstrap_addresses:
        try:
            answer = await transport.call(peer_id_of(address), ANNOUNCE_MANIFEST, manifest.pack(), ASK_TIMEOUT)
            if answer == manifest.run_id.encode():
                kept.append(address)
        except PeerUnreachableError as error:
            logger.warning("the bootstrap node at %s does not keep the manifest: %s", address, error)
    return tuple(kept)


async def listed_runs(transport: HivemindTransport, addresses: Sequence[str], limit: int = RUNS_LIMIT) -> list[str]:
    """Return the ids, without duplicates, of at most `limit` runs that the bootstrap nodes at these addresses keep.

    Raises: SwarmUnreachableError when none of the nodes lists any runs.
    """
    found: dict[str, None] = {}
    failures = []
    for address in addresses:
        try:
            for run_id in await _list_of(transport, peer_id_of(address), limit):
                found.setdefault(run_id)
        except PeerUnreachableError as error:
            failures.append(str(error).rstrip("."))
    if len(failures) == len(addresses):
        raise SwarmUnreachableError(
            f"no node at the given addresses lists runs: {'; '.join(failures)}.",
            "Name a bootstrap node of this version; other peers remember no runs but their own.",
        )
    return list(found)[:limit]


async def _list_of(transport: HivemindTransport, peer_id: str, limit: int) -> list[str]:
    """Return the ids of one bootstrap node's runs. Raises: PeerUnreachableError, also for a malformed answer."""
    run_ids: list[str] = []
    while len(run_ids) < limit:
        answer = await transport.call(peer_id, LIST_RUNS, str(len(run_ids)).encode(), ASK_TIMEOUT)
        page = answer.decode("ascii", errors="replace").split()
        if len(page) > PAGE or not all(map(RUN_ID.fullmatch, page)):
            raise PeerUnreachableError(peer_id, "its list of runs is malformed")
        run_ids += page
        if len(page) < PAGE:
            break
    return run_ids


async def keep_announced(
    network: HivemindTransport,
    manifest: SignedManifest,
    others: Callable[[], Iterable[Heartbeat]],
    remembered: RememberedPeers | None = None,
) -> None:
    """Store a run's manifest in the DHT every few minutes, and remember other peers' addresses, until cancelled.

    So a run is found without its bootstrap nodes.
    """
    repeated_at = -float("inf")
    while True:
        if time.monotonic() - repeated_at >= REPUBLISH_INTERVAL:
            repeated_at = time.monotonic()
            try:
                await network.store_manifest(manifest, MANIFEST_LIFETIME)
            except NETWORK_ERRORS as error:  # logged at debug level, since the health check reports a broken network
                logger.debug("the manifest is not in the DHT: %r", error)
        if remembered is not None:
            wall = time.time()
            remembered.observe(others(), wall)
            await asyncio.to_thread(remembered.save_when_due, wall)
        await asyncio.sleep(LOOK_INTERVAL)
