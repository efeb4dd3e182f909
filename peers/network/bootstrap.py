"""The bootstrap node: a node with a fixed address that remembers manifests.

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
from peers.errors import LocalNetworkError, ManifestError, SwarmUnreachableError
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

LIST_RUNS = "list-runs"  # name of the call; payload: how many runs to leave out, in decimals; answer: a run id a line
PAGE = 200  # runs in one answer
RUNS_LIMIT = 1000
"""Runs that a caller asks for, at most."""
ASK_TIMEOUT = 20.0  # seconds for a call to a bootstrap node, which may be busy with many
NUMBER = re.compile(rb"[0-9]{1,6}")
ANNOUNCE_MANIFEST = "announce-manifest"  # name of the call; payload: a packed SignedManifest, answer: its run id
MANIFEST_LIFETIME = 3600.0  # seconds that the DHT keeps a manifest
REPUBLISH_INTERVAL = 300.0  # seconds; several chances within a lifetime
ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE = 30.0, 0.1  # announcements of one peer, or network: at once, and a second
NETWORKS_TOGETHER = 20  # factor for all networks together
MANY = 10**6  # factor for all peers together: in effect no limit, since keys cost nothing
LIFE_SIGN_INTERVAL = 5.0  # seconds
LIFE_SIGN_LIMIT = 30.0  # seconds without one, after which the node counts as hanging
LOOK_INTERVAL = 10.0  # seconds between two checks whether an announcement is due
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
    """Run a bootstrap node until `stop` is set.

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
    """The runs that are announced to a node, kept in its store and in the DHT."""

    def __init__(self, transport: HivemindTransport, store: ManifestStore, shown: Mapping[str, bytes]) -> None:
        """`shown` has our tickets to runs by invitation, by run."""
        self.transport = transport
        self.store = store
        self._shown = shown
        self._failures = RunFailures("publishing")
        # Announcements are limited for each peer and for each network.
        self._of_peers = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, MANY)
        self._of_networks = Allowances(ANNOUNCEMENTS_BURST, ANNOUNCEMENTS_RATE, NETWORKS_TOGETHER)

    async def begin(self) -> None:
        """Learn all runs in the store, answer peers, and put the manifests into the DHT."""
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
        """Learn a run's admission, our own ticket to it, and the heads that its archives have signed."""
        run, runs = manifest.run_id, self.transport.runs
        self.transport.learn(manifest)
        try:
            if packed := self.store.kept(SIGNED_SUFFIX, run):
                runs.take_heads(run, unpack_heads(packed))
        except SignedHeadsError as error:
            logger.warning("the kept heads signed by the archives of %s are ignored: %s", run, error)
        admission = runs.admissions.of(run)
        if admission is None:
            return
        admission.ticket = self._shown.get(run, b"")
        if revoked := self.store.kept(REVOKED_SUFFIX, run):
            try:
                admission.revoke(revoked)
            except TicketError as error:
                logger.warning("the kept list of revoked tickets of %s is ignored: %s", run, error)

    async def on_announcement(self, sender: str, payload: bytes) -> bytes:
        """Remember an announced run. Raises: RefusalError."""
        _spend(self._of_peers, sender, "you have")
        network = await self.transport.daemon.network_of(sender)
        _spend(self._of_networks, network, f"your network, {network}, has")
        try:
            manifest = SignedManifest.unpack(payload)
            if self.store.knows(manifest.run_id):
                return manifest.run_id.encode()
            for run in self.store.add(manifest, network):
                self.transport.forget(run)
                self._failures.forget(run)
        except ManifestError as error:
            raise RefusalError(printable(error.message)) from error
        except LocalNetworkError as error:
            logger.error("run %s is not kept: %s", manifest.run_id, error)
            raise RefusalError("the node's disk takes no manifest now; its operator can see why") from error
        self._learn(manifest)
        metrics.KNOWN_RUNS.set(len(self.store.run_ids()))
        await self._publish_one(manifest)
        logger.info("run %s was announced by %s, from %s", manifest.run_id, sender, network)
        return manifest.run_id.encode()

    async def on_list(self, sender: str, payload: bytes) -> bytes:
        """Return a page of the open runs, the newest first. Those by invitation are not listed."""
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
        """Put every manifest into the DHT again, and find out which of the runs are in use."""
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


def _spend(allowances: Allowances, name: str, who: str) -> None:
    """Count an announcement. Raises: RefusalError if there were too many."""
    if not allowances.has_some(name, now()):
        raise RefusalError(f"{who} announced many runs lately; try again in {1 / ANNOUNCEMENTS_RATE:.0f} seconds")
    allowances.spend(name, 1.0)


def _is_publishing() -> None:
    """Give a sign of life after each run, since publishing a thousand takes longer than the limit."""
    HEALTH.expect("publishing", 3 * REPUBLISH_INTERVAL, "no manifest was put into the DHT again")


async def _work_until_stopped(node: _BootstrapNode, beside: Sequence[NodeTask], stop: asyncio.Event) -> None:
    """Publish the runs, and do the work beside that, until `stop` is set. Raises: LocalNetworkError."""
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
        HEALTH.over("publishing")


def _report_failure(task: asyncio.Task[None]) -> None:
    """Report work that has ended, although it should last as long as the node."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of this node has failed: restart it", exc_info=error)
        HEALTH.failing("bootstrap", f"a part of this node has failed: {error}")


async def _give_life_signs() -> None:
    """Show that this process still comes to its work."""
    try:
        while True:
            HEALTH.expect("bootstrap", LIFE_SIGN_LIMIT, "this node has not come to its work")
            await asyncio.sleep(LIFE_SIGN_INTERVAL)
    finally:
        HEALTH.over("bootstrap")


# Calls to bootstrap nodes -------------------------------------------------------------------------------------
async def announce_manifest(
    transport: HivemindTransport, manifest: SignedManifest, bootstrap_addresses: Sequence[str]
) -> tuple[str, ...]:
    """Put a manifest into the DHT, and ask bootstrap nodes to remember it. Return the addresses of those that do."""
    await transport.store_manifest(manifest, MANIFEST_LIFETIME)
    kept = []
    for address in bootstrap_addresses:
        try:
            answer = await transport.call(peer_id_of(address), ANNOUNCE_MANIFEST, manifest.pack(), ASK_TIMEOUT)
            if answer == manifest.run_id.encode():
                kept.append(address)
        except PeerUnreachableError as error:
            logger.warning("the manifest is not kept at %s: %s", address, error)
    return tuple(kept)


async def listed_runs(transport: HivemindTransport, addresses: Sequence[str], limit: int = RUNS_LIMIT) -> list[str]:
    """Return the ids of at most `limit` runs that the nodes at these addresses remember, each once.

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
    """Return the runs that one node lists. Raises: PeerUnreachableError, also for a malformed answer."""
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
    """Put the manifest into the DHT repeatedly, and remember the addresses of the `others`, until cancelled.

    So a run is found without its bootstrap nodes.
    """
    repeated_at = -float("inf")
    while True:
        if time.monotonic() - repeated_at >= REPUBLISH_INTERVAL:
            repeated_at = time.monotonic()
            try:
                await network.store_manifest(manifest, MANIFEST_LIFETIME)
            except NETWORK_ERRORS as error:  # other code reports a broken network to the user
                logger.debug("the manifest is not in the DHT: %r", error)
        if remembered is not None:
            wall = time.time()
            remembered.observe(others(), wall)
            await asyncio.to_thread(remembered.save_when_due, wall)
        await asyncio.sleep(LOOK_INTERVAL)
