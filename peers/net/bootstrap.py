"""The bootstrap node: an address that stays, and a memory for manifests.

A DHT forgets. The node keeps every manifest announced to it in a directory, puts them all into the DHT when it starts
and again and again while it runs, and so keeps runs findable while none of their peers is there, through its own
restarts, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from peers import metrics
from peers.errors import LocalNetworkError, ManifestError
from peers.health import HEALTH
from peers.links.rating import RATING, Rater
from peers.links.settings import LinkSettings
from peers.net.catalogue import serve_catalogue
from peers.net.daemon import peer_id_of
from peers.net.transport import HivemindTransport
from peers.presence.heartbeat import PeerState
from peers.streams.channel import PeerUnreachableError, RefusalError
from peers.values.anchors import AnchorError
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.private_folders import make_private_folder
from peers.values.tickets import Ticket, TicketError
from peers.values.whole_files import write_whole

logger = logging.getLogger(__name__)

ANNOUNCE_MANIFEST = "announce-manifest"  # name of the call; payload: a packed SignedManifest, answer: its run id
MANIFEST_LIFETIME = 3600.0  # seconds that the DHT keeps a manifest
REPUBLISH_INTERVAL = 300.0  # seconds; several chances within a lifetime
MANIFEST_LIMIT = 1000  # runs that one node remembers: 64 MB at most
QUIET_LIMIT = 24 * 3600.0  # seconds without a peer after which a run may be forgotten for another's sake
LIFE_SIGN_INTERVAL = 5.0  # seconds
LIFE_SIGN_LIMIT = 30.0  # seconds without one, after which the node hangs
SUFFIX = ".manifest"
REVOKED_SUFFIX = ".revocations"
ANCHORS_SUFFIX = ".anchors"


class ManifestStore:
    """The manifests in a directory, one file each."""

    def __init__(self, directory: Path) -> None:
        """Raises: LocalNetworkError when the directory cannot be made."""
        self._directory = directory
        self._read = dict[str, SignedManifest]()
        try:
            make_private_folder(directory)
        except OSError as error:
            raise self._unusable(error) from error

    def __iter__(self) -> Iterator[SignedManifest]:
        """Every manifest that is whole and belongs to the run that its file name says; others are logged.

        Each file is read once, since a run's id says what its manifest is: to check a thousand signatures takes long.
        """
        paths = {path.name.removesuffix(SUFFIX): path for path in sorted(self._paths())}
        self._read = {run_id: manifest for run_id, manifest in self._read.items() if run_id in paths}
        for run_id, path in paths.items():
            try:
                if run_id not in self._read:
                    self._read[run_id] = SignedManifest.unpack(path.read_bytes(), run_id)
            except (OSError, ManifestError) as error:
                logger.warning("skipped %s: %s", path, error)
            else:
                yield self._read[run_id]

    def run_ids(self) -> list[str]:
        """Return the ids of all runs, the last that was announced or in use first."""
        by_age = sorted(((path.stat().st_mtime, path.name) for path in self._paths()), reverse=True)
        return [name.removesuffix(SUFFIX) for _, name in by_age]

    def _paths(self) -> Iterator[Path]:
        return self._directory.glob(f"*{SUFFIX}")

    def add(self, manifest: SignedManifest) -> list[str]:
        """Write its file, whole or not at all. Return the runs that were forgotten for it.

        Raises: RefusalError when there is no room; LocalNetworkError.
        """
        path = self._directory / f"{manifest.run_id}{SUFFIX}"
        try:
            forgotten = [] if path.exists() else self._make_room()
            write_whole(path, [manifest.pack()], is_durable=True)
        except OSError as error:
            raise self._unusable(error) from error
        return forgotten

    def keep_revocations(self, run_id: str, packed: bytes) -> None:
        """Remember the tickets of a run that its organiser has revoked."""
        self._keep(run_id, REVOKED_SUFFIX, packed)

    def revocations(self, run_id: str) -> bytes:
        """Return the list of a run's revoked tickets; empty: there is none."""
        return self._kept(run_id, REVOKED_SUFFIX)

    def keep_anchors(self, run_id: str, packed: bytes) -> None:
        """Remember what a run's anchors have signed."""
        self._keep(run_id, ANCHORS_SUFFIX, packed)

    def anchors(self, run_id: str) -> bytes:
        """Return what a run's anchors have signed; empty: nothing is known."""
        return self._kept(run_id, ANCHORS_SUFFIX)

    def _keep(self, run_id: str, suffix: str, packed: bytes) -> None:
        try:
            write_whole(self._directory / f"{run_id}{suffix}", [packed], is_durable=True)
        except OSError as error:
            logger.error("%s", self._unusable(error))

    def _kept(self, run_id: str, suffix: str) -> bytes:
        try:
            return (self._directory / f"{run_id}{suffix}").read_bytes()
        except OSError:
            return b""

    def touch(self, run_id: str) -> None:
        """The run is in use: it is not forgotten for another while."""
        with suppress(OSError):
            os.utime(self._directory / f"{run_id}{SUFFIX}")

    def _make_room(self) -> list[str]:
        """Forget runs that nobody has announced or trained in for long, if their place is needed, and return them.

        Raises: RefusalError when there are none, OSError.
        """
        forgotten = []
        by_age = sorted((path.stat().st_mtime, path) for path in self._paths())
        for used, path in by_age[: len(by_age) - MANIFEST_LIMIT + 1]:
            if time.time() - used < QUIET_LIMIT:
                raise RefusalError("this node remembers as many runs as it can; ask again tomorrow")
            path.unlink()
            for suffix in (REVOKED_SUFFIX, ANCHORS_SUFFIX):
                path.with_suffix(suffix).unlink(missing_ok=True)
            forgotten.append(path.name.removesuffix(SUFFIX))
            with suppress(KeyError):
                metrics.RUN_LIVE_PEERS.remove(forgotten[-1])
            logger.info("forgot the run %s: nobody uses it", forgotten[-1])
        return forgotten

    def _unusable(self, error: OSError) -> LocalNetworkError:
        return LocalNetworkError(
            f"cannot keep manifests in {self._directory}: {error.strerror or error}.",
            "Name a directory that this user may write to, with some space left.",
        )


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
    beside: Sequence[Beside] = (),
    links: LinkSettings | None = None,
    tickets: Sequence[Ticket] = (),
) -> None:
    """Run a bootstrap node until `stop` is set. `on_ready` gets its multiaddrs once it can be used. `beside` is
    what it does with the runs that are announced to it; the `tickets` admit it to those by invitation. `links` says how
    the node brings volunteers together that can't dial each other.

    Raises: ManifestError, LocalNetworkError, SwarmUnreachableError when it cannot start; LocalNetworkError when
    libp2p's daemon dies.
    """
    store = ManifestStore(manifest_directory)
    chains = {ticket.run: ticket.chain_for(identity.peer_id) for ticket in tickets}
    transport = await HivemindTransport.create(identity, initial_peers, listen, announce, public=True, links=links)
    try:

        async def announced(sender: str, payload: bytes) -> bytes:
            try:
                manifest = SignedManifest.unpack(payload)
            except ManifestError as error:
                raise RefusalError(error.message) from error
            try:
                for run in store.add(manifest):
                    transport.forget(run)
            except LocalNetworkError as error:
                logger.error("run %s is not kept: %s", manifest.run_id, error)
                raise RefusalError("the node's disk takes no manifest now; its operator can see why") from error
            _open_door(transport, store, manifest, chains)
            await transport.store_manifest(manifest, MANIFEST_LIFETIME)
            logger.info("run %s was announced by %s", manifest.run_id, sender)
            return manifest.run_id.encode()

        transport.doors.on_revoked = store.keep_revocations
        transport.anchorage.on_news = store.keep_anchors
        for manifest in store:
            _open_door(transport, store, manifest, chains)
        await transport.on_call(ANNOUNCE_MANIFEST, announced)
        await serve_catalogue(
            transport, lambda: (run_id for run_id in store.run_ids() if transport.doors.of(run_id) is None)
        )
        await transport.on_stream(RATING, Rater(transport.no_round).answer)
        await _publish(transport, store)
        on_ready(transport.addresses)
        keeping = [asyncio.create_task(one.keep(transport, store)) for one in beside]
        for task in keeping:
            task.add_done_callback(_report_failure)
        try:
            await _until_stopped(transport, store, stop)
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


def _open_door(
    transport: HivemindTransport, store: ManifestStore, manifest: SignedManifest, chains: Mapping[str, bytes]
) -> None:
    """Learn who may come into a run, what admits ourselves, should we keep it, and what its anchors have signed."""
    transport.learn(manifest)
    try:
        transport.anchorage.take(manifest.run_id, store.anchors(manifest.run_id))
    except AnchorError as error:
        logger.warning("what the anchors of %s have signed: %s", manifest.run_id, error)
    guests = transport.doors.of(manifest.run_id)
    if guests is None:
        return
    guests.show(transport.peer_id, chains.get(manifest.run_id, b""))
    if revoked := store.revocations(manifest.run_id):
        try:
            guests.revoke(revoked)
        except TicketError as error:
            logger.warning("a list of revoked tickets of %s: %s", manifest.run_id, error)


async def _publish(transport: HivemindTransport, store: ManifestStore) -> None:
    """Put every manifest into the DHT again, and see which of the runs are in use."""
    manifests = list(store)
    metrics.KNOWN_RUNS.set(len(manifests))
    _is_publishing()
    for manifest in manifests:
        await transport.store_manifest(manifest, MANIFEST_LIFETIME)
        heartbeats = await transport.heartbeats(manifest.run_id)
        if heartbeats:
            store.touch(manifest.run_id)
        live = sum(beat.state not in (PeerState.LEAVING, PeerState.ARCHIVING) for beat in heartbeats)
        metrics.RUN_LIVE_PEERS.labels(manifest.run_id).set(live)
        _is_publishing()


def _is_publishing() -> None:
    """Give a sign of life after each run: all of a thousand take longer than they may keep us waiting."""
    HEALTH.expect("publishing", 3 * REPUBLISH_INTERVAL, "no manifest was put into the DHT again")


async def _until_stopped(transport: HivemindTransport, store: ManifestStore, stop: asyncio.Event) -> None:
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.create_task(transport.failure())
    living = asyncio.create_task(_give_life_signs())
    try:
        while not stopped.done():
            await asyncio.wait({stopped, failed}, timeout=REPUBLISH_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            await _publish(transport, store)
    finally:
        for task in (stopped, failed, living):
            task.cancel()
        await asyncio.gather(stopped, failed, living, return_exceptions=True)
        HEALTH.over("publishing")


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
