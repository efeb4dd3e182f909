"""This machine's node of hivemind's DHT, through which peers find runs: its records, searches, and place in the DHT.

Everything runs in the caller's asyncio loop. Only records that prove themselves are stored by this node, or accepted
from others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from peers.errors import LocalNetworkError, ManifestError
from peers.network.channel import PeerUnreachableError
from peers.network.daemon import HIVEMIND, NETWORK_ERRORS, Daemon, peer_id_of, to_peer_id, unreachable
from peers.network.dht_storage import RecordValidator, bounded, heartbeats_key, manifest_key
from peers.network.first_contact import endpoint, which_answer
from peers.network.known_runs import Admissions
from peers.presence.heartbeat import Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.system import cancel_and_wait, start_task

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

DHT_WAIT = 5.0  # seconds to wait for one DHT node's answer, at most
LOOK_INTERVAL = 3.0  # seconds between two checks whether this node is still in the DHT
GREETING_WAIT = 3.0  # seconds to wait for a ping's answer over an existing connection
DHT_OPTIONS = {
    "wait_timeout": DHT_WAIT,
    # No caches, since only the latest heartbeat of a peer is useful.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
}


class DhtNode:
    """A node of the DHT on this machine, created by `create` and ended by `close`."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.protocol = node.protocol
        self._storage = node.protocol.storage

    @classmethod
    async def create(cls, daemon: Daemon, contacts: Sequence[str], client_mode: bool, admissions: Admissions) -> Self:
        """Join the DHT through the nodes at `contacts`, or start a new DHT if there are none. Return this machine's
        node, which in `client_mode` stores no records of others.

        Raises: LocalNetworkError when the clocks differ or the contacts cannot reach us; SwarmUnreachableError.
        """
        try:
            node = await HIVEMIND.node.DHTNode.create(
                p2p=daemon,
                initial_peers=contacts,
                client_mode=client_mode,
                record_validator=RecordValidator(admissions),
                **DHT_OPTIONS,
            )
        except HIVEMIND.protocol.ValidationError as error:
            if "local time" in str(error):
                raise LocalNetworkError(
                    "the clocks of this machine and of another node are more than 3 seconds apart.",
                    "Switch on time synchronisation (NTP) here, or tell that node's operator if it is on.",
                ) from error
            raise LocalNetworkError(
                "the bootstrap node cannot reach this machine.", "Check the firewall, then try again."
            ) from error
        except RuntimeError as error:
            if "none of the initial_peers" in str(error):
                raise unreachable(contacts) from error
            raise
        node.protocol.storage, node.protocol.cache = bounded(node.protocol.storage), bounded(node.protocol.cache)
        created = cls(node)
        admissions.find = created.search_manifest
        return created

    async def close(self) -> None:
        """Shut down the DHT node. Give up after DHT_WAIT seconds, or if the daemon is dead."""
        try:
            async with asyncio.timeout(DHT_WAIT):
                await self._node.shutdown()
        except NETWORK_ERRORS as error:
            logger.debug("the DHT node did not shut down: %r", error)

    def expect_answers_within(self, seconds: float) -> None:
        """Set the number of seconds, at most DHT_WAIT, after which a silent DHT node is skipped for a while."""
        self.protocol.wait_timeout = min(seconds, DHT_WAIT)

    async def clock_of(self, peer_id: str) -> tuple[float, float]:
        """Ping a DHT node. Return by how many seconds its clock is ahead of ours, with an error of at most half a round
        trip, and the seconds of the round trip. Raises: PeerUnreachableError."""
        stub, request = self.protocol.get_stub(to_peer_id(peer_id)), HIVEMIND.protocol.dht_pb2.PingRequest()
        asked, began = time.time(), time.monotonic()
        try:
            answer = await stub.rpc_ping(request, timeout=self.protocol.wait_timeout)
        except NETWORK_ERRORS as error:
            raise PeerUnreachableError(peer_id, str(error) or type(error).__name__) from error
        took = time.monotonic() - began
        return answer.dht_time - asked - took / 2, took

    # Records in the DHT ---------------------------------------------------------------------------------------
    def keep_places(self, run_id: str, peers: Collection[str]) -> None:
        """Protect these peers' heartbeats in a run from replacement by other peers' heartbeats."""
        self._storage.protect(HIVEMIND.protocol.DHTID.generate(heartbeats_key(run_id)), peers)

    def forget(self, run_id: str) -> None:
        """End the protection of a run's records. From now on they share memory with the records of all other runs."""
        self.keep_places(run_id, ())
        for key in (manifest_key(run_id), heartbeats_key(run_id)):
            self._storage.disfavour(HIVEMIND.protocol.DHTID.generate(key))

    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None:
        """Store a manifest in the DHT, and on this node, for `ttl` seconds."""
        key, expiration = manifest_key(manifest.run_id), time.time() + ttl
        packed, place = self.protocol.serializer.dumps(manifest.pack()), HIVEMIND.protocol.DHTID.generate(key)
        self._storage.favour(place)
        self._storage.store(place, packed, expiration)
        await self._node.store(key, manifest.pack(), expiration)

    async def search_manifest(self, run_id: str) -> SignedManifest | None:
        """Return a run's manifest from the DHT, after checking its signature; None if there is no valid manifest."""
        found = await self._node.get(manifest_key(run_id))
        if found is None or not isinstance(found.value, bytes):
            return None
        try:
            return SignedManifest.unpack(found.value, run_id)
        except ManifestError as error:
            logger.info("dropped an invalid manifest of run %s: %s", run_id, error)
            return None

    async def store_heartbeat(self, heartbeat: Heartbeat, signed: bytes) -> bool:
        """Store a signed heartbeat in the DHT until it expires. Return True if any DHT node stored it."""
        key = heartbeats_key(heartbeat.run)
        self._storage.favour(HIVEMIND.protocol.DHTID.generate(key))
        stored: bool = await self._node.store(key, signed, heartbeat.expires, subkey=heartbeat.peer)
        return stored

    async def find_heartbeats(self, run_id: str) -> list[bytes]:
        """Return signed heartbeats of a run's peers from the DHT: of all peers, or of some peers if the run is large.

        The caller must verify their signatures.
        """
        found = await self._node.get(heartbeats_key(run_id), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return [entry.value for entry in entries.values() if isinstance(entry.value, bytes)]


class DhtMembership:
    """The task that reconnects this node when the DHT has dropped it, and makes it a DHT server if others can dial it.

    Unless it `may_serve`, the node stays a client or a server as it began.
    """

    def __init__(
        self,
        network: HivemindTransport,
        initial_peers: Sequence[str],
        remembered: Callable[[], Sequence[str]],
        may_serve: bool,
    ) -> None:
        self._network = network
        self._daemon = network.daemon
        self._protocol = network.dht.protocol
        self._initial_peers = initial_peers
        self._remembered = remembered
        self._may_serve = may_serve
        self._is_settled = not may_serve
        self._keeping = start_task(self._keep())

    async def close(self) -> None:
        await cancel_and_wait(self._keeping)

    def network_changed(self) -> None:
        """Drop all connections and join the DHT again, because this machine's network has changed."""
        self._network.links.drop_all()
        self._keeping.cancel()
        self._keeping = start_task(self._restart(self._keeping))

    async def _restart(self, before: asyncio.Task[None]) -> None:
        await asyncio.gather(before, return_exceptions=True)
        await asyncio.gather(*map(self._daemon.drop_connection, await self._daemon.connections()))
        if self._may_serve:
            self._is_settled = False
            await self._serve(False)
        await self._greet(self._initial_peers)
        await self._keep()

    async def _keep(self) -> None:
        """Reconnect to initial peers that are no longer in our routing table, and to remembered peers if it is empty.

        hivemind drops a node from the table at the node's first failure. So a restarted bootstrap node would
        stay alone with the newcomers that it welcomes.
        """
        table = self._protocol.routing_table
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            lost = {address for address in self._initial_peers if to_peer_id(peer_id_of(address)) not in table}
            others = set() if table.uid_to_peer_id else await which_answer(self._remembered())
            await self._greet(lost | others)
            # Serve the DHT only if others can dial this node, because requests to an unreachable server cost seconds.
            if not self._is_settled and (can_be_dialled := await self._network.can_be_dialled()) is not None:
                self._is_settled = True
                await self._serve(can_be_dialled)

    async def _greet(self, addresses: Iterable[str]) -> None:
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            by_peer.setdefault(peer_id_of(address), []).append(address)
        await asyncio.gather(*(self._greet_peer(peer, known) for peer, known in by_peer.items()))

    async def _greet_peer(self, peer: str, addresses: Sequence[str]) -> None:
        """Ping a peer over its existing connection, or else over a new one, so that the DHT knows the peer again."""
        peer_id = to_peer_id(peer)
        if peer in await self._daemon.connections():
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_WAIT):
                    if await self._protocol.call_ping(peer_id) is not None:
                        return
            await self._daemon.drop_connection(peer)
        # First test which addresses answer, because after a failed dial the daemon may not dial again for minutes.
        silent = {address for address in addresses if endpoint(address)} - await which_answer(addresses)
        answering = [address for address in addresses if address not in silent]
        if answering and await self._daemon.connect(peer, answering):
            await self._protocol.call_ping(peer_id)

    async def _serve(self, is_server: bool) -> None:
        """Make this node a DHT server, or a client, to which other nodes never send requests."""
        protocol = self._protocol
        if protocol.client_mode is not is_server:
            return
        logger.info("other peers can%s dial this machine", "" if is_server else "not")
        protocol.client_mode = not is_server
        service = HIVEMIND.protocol.AuthRPCWrapper(protocol, HIVEMIND.protocol.AuthRole.SERVICER, protocol.authorizer)
        if is_server:
            await protocol.add_p2p_handlers(self._daemon, service)
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
            await asyncio.gather(*map(protocol.call_ping, list(protocol.routing_table.peer_id_to_uid)))
        else:
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo()
            with suppress(*NETWORK_ERRORS):
                await protocol.remove_p2p_handlers(self._daemon)
