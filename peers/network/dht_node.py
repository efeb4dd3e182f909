"""This machine's node of hivemind's DHT, in which runs are found: records searched and stored, and its place kept.

Everything runs in the caller's asyncio loop. The node keeps manifests and heartbeats in a bounded number of bytes, and
refuses every record that does not prove itself: a manifest under the key that its own digest gives it, a heartbeat
signed by the peer that its subkey names, under the key of the run that it is about. Where the node has the manifest of
a run by invitation, the peer must be admitted, too. Nothing else can be stored, and no node can overwrite another's
records.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from peers.errors import DilocoPeerError, LocalNetworkError, ManifestError
from peers.network.channel import PeerUnreachableError
from peers.network.daemon import HIVEMIND, NETWORK_ERRORS, Daemon, peer_id_of, to_peer_id, unreachable
from peers.network.first_contact import endpoint, which_answer
from peers.network.known_runs import Admissions
from peers.presence.heartbeat import SIZE_LIMIT, Heartbeat
from peers.values.manifest import SignedManifest
from peers.values.system import cancel_and_wait
from peers.values.wire import WireError, decode

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

MANIFEST_LIFETIME_LIMIT = 24 * 3600.0  # seconds
RECORD_OVERHEAD = 1000  # bytes that Python takes to keep any record, however small
SLACK = 64
"""Records that are not kept any more, and may wait until they would have expired: beside twice as many as are kept."""
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours


def manifest_key(run_id: str) -> bytes:
    """DHT key of a run's manifest; its value is the packed SignedManifest."""
    return f"diloco-peer/manifest/{run_id}".encode()


def heartbeats_key(run_id: str) -> bytes:
    """DHT key of a run's heartbeats; subkeys are peer ids, values signed heartbeats."""
    return f"diloco-peer/heartbeats/{run_id}".encode()


def _key_digest(key: bytes) -> bytes:
    """Where hivemind's DHT keeps a key: SHA-1 of the bytes, a place on the ring, not a proof of anything."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def _record_is_valid(
    key: bytes, subkey: bytes, value: bytes, expiration: float, now: float, admissions: Admissions
) -> bool:
    """Whether a node may keep a record.

    key: digest of the DHT key, 20 bytes; subkey, value: as hivemind packs them (msgpack; a record without subkey has
    None); times in seconds since the epoch.
    """
    try:
        owner, data = decode(subkey), decode(value)
        if not isinstance(data, bytes):
            return False
        if owner is None:
            manifest = SignedManifest.unpack(data)
            is_there = key == _key_digest(manifest_key(manifest.run_id))
            if is_there:
                admissions.learn(manifest, is_ours=False)
            return is_there and expiration <= now + MANIFEST_LIFETIME_LIMIT
        heartbeat = Heartbeat.verify(data)
    except (WireError, DilocoPeerError):
        return False
    # The DHT prefers what expires later: past the signed expiration, an old heartbeat could displace a newer one.
    timely = expiration <= heartbeat.expires <= now + CLOCK_TOLERANCE + heartbeat.lifetime
    is_its_own = key == _key_digest(heartbeats_key(heartbeat.run)) and owner == heartbeat.peer
    return is_its_own and timely and admissions.admits(heartbeat, now)


class _RecordBudget:
    """Memory for records: what is kept until it expires, and no more than `limit` bytes of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._kept: dict[Hashable, tuple[float, int]] = {}  # expiration, bytes
        self._order = count()
        self._expiring: list[tuple[float, int, Hashable]] = []

    def admit(
        self, record: Hashable, size: int, expiration: float, now: float, instead_of: Hashable | None = None
    ) -> bool:
        """Whether a record of `size` bytes may be kept; times in seconds since the epoch. Only what is newer may
        replace one of the same name. If it may, the record that it is kept `instead_of` is not any more."""
        while self._expiring and self._expiring[0][0] < now:
            expired, _, name = heapq.heappop(self._expiring)
            if name in self._kept and self._kept[name][0] == expired:
                self._total -= self._kept.pop(name)[1]
        before, freed = self._kept.get(record, (now, 0))
        _, given_up = self._kept.get(instead_of, (now, 0))
        size += RECORD_OVERHEAD
        if expiration <= before or self._total - freed - given_up + size > self._limit:
            return False
        self._kept.pop(instead_of, None)
        self._total += size - freed - given_up
        self._kept[record] = expiration, size
        heapq.heappush(self._expiring, (expiration, next(self._order), record))
        if len(self._expiring) > 2 * len(self._kept) + SLACK:
            self._expiring = [(expires, next(self._order), name) for name, (expires, _) in self._kept.items()]
            heapq.heapify(self._expiring)
        return True


DHTLocalStorage: Any = HIVEMIND.protocol.DHTLocalStorage
RECORDS = 256  # under one key: all are sent to each node that asks. Of a run's peers a sample is enough
OWN_BYTES = RECORDS * (SIZE_LIMIT + RECORD_OVERHEAD)  # for each key that this node has a part in
OTHERS_BYTES = 64 << 20  # for everything else together


class RecordValidator(HIVEMIND.validation.RecordValidatorBase):  # type: ignore[misc,name-defined]  # no types
    """A check that keeps records without a proof out of this node's part of the DHT."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions

    def validate(self, record: Any) -> bool:
        return _record_is_valid(
            record.key, record.subkey, record.value, record.expiration_time, time.time(), self._admissions
        )


class _BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """Refuses new records when they would take more memory than there is for them.

    What lies under a favoured key has room of its own, which strangers with made-up runs can't fill. Where one key
    has all the records that it may, a new one replaces another, so that the first to come cannot keep all others out:
    one of the half that was there for the shorter time, drawn by chance. The other half stays, as do those of the peers
    that the run's manifest names, for as long as they are renewed in time: a flood came later.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()
        self._favoured: dict[Any, _RecordBudget] = {}
        self._others = _RecordBudget(OTHERS_BYTES)
        self._named: dict[Any, frozenset[Any]] = {}

    def favour(self, key: Any) -> None:
        self._favoured.setdefault(key, _RecordBudget(OWN_BYTES))

    def disfavour(self, key: Any) -> None:
        """Give a key no more room than all others: what lies there stays until it expires."""
        self._favoured.pop(key, None)

    def name(self, key: Any, subkeys: Collection[Any]) -> None:
        """Never replace the records of these subkeys under a key. Those named before are no longer kept."""
        if subkeys:
            self._named[key] = frozenset(subkeys)
        else:
            self._named.pop(key, None)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        budget = self._favoured.get(key, self._others)
        is_admitted = budget.admit((key, None), len(value), expiration_time, time.time())
        return is_admitted and super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        held, budget = self.get(key), self._favoured.get(key, self._others)
        is_dictionary = held is not None and isinstance(held.value, HIVEMIND.protocol.DictionaryDHTValue)
        under: Any = held.value if is_dictionary else {}
        leaving = self._leaving(key, under) if subkey not in under and len(under) >= RECORDS else None
        instead_of = None if leaving is None else (key, leaving)
        if not budget.admit((key, subkey), len(value), expiration_time, time.time(), instead_of):
            return False
        if leaving is not None:
            del under[leaving]
            # hivemind would keep a heap entry of each record until it had expired.
            if len(under.expiration_heap) > 2 * len(under.key_to_heap) + SLACK:
                under.expiration_heap[:] = under.key_to_heap.values()
                heapq.heapify(under.expiration_heap)
        is_stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return is_stored

    def _leaving(self, key: Any, under: Any) -> Any:
        """Return whose record a new one replaces. hivemind keeps them in the order in which they came."""
        newer = [subkey for subkey, _ in under.items()][RECORDS // 2 :]
        return self._chance.choice([one for one in newer if one not in self._named.get(key, ())])


def bounded(storage: Any) -> _BoundedStorage:
    """A bounded storage with the same records, as far as there is room."""
    copy = _BoundedStorage()
    for key, (value, expiration) in list(storage.items()):
        if isinstance(value, HIVEMIND.protocol.DictionaryDHTValue):
            for subkey, (inner, inner_expiration) in list(value.items()):
                copy.store_subkey(key, subkey, inner, inner_expiration)
        else:
            copy.store(key, value, expiration)
    return copy


DHT_WAIT = 5.0  # seconds for one request to one DHT node
LOOK_INTERVAL = 3.0  # seconds between two looks at whether the DHT still has us
GREETING_WAIT = 3.0  # seconds
DHT_OPTIONS = {
    "wait_timeout": DHT_WAIT,
    # No caches: a heartbeat is worth something only while it is the latest one.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
}


class DhtNode:
    """One node of the DHT. Made by `create`; `close` ends it."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.protocol = node.protocol
        self._storage = node.protocol.storage

    @classmethod
    async def create(cls, daemon: Daemon, contacts: Sequence[str], client_mode: bool, admissions: Admissions) -> Self:
        """Join the DHT of `contacts`, or begin one. A client stores nothing for others.

        Raises: LocalNetworkError when the clock is wrong or the contacts can't reach us; SwarmUnreachableError.
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
                    "this machine's clock is more than 3 seconds off.", "Switch on time synchronisation (NTP)."
                ) from error
            raise LocalNetworkError(
                "the bootstrap node cannot reach this machine.", "Check the firewall, then try again."
            ) from error
        except RuntimeError as error:
            if "none of the initial_peers" in str(error):
                raise unreachable(contacts) from error
            raise
        node.protocol.storage, node.protocol.cache = bounded(node.protocol.storage), bounded(node.protocol.cache)
        made = cls(node)
        admissions.find = made.search_manifest
        return made

    async def close(self) -> None:
        """Leave the DHT. When it takes too long, or the daemon is dead, leave without a word."""
        try:
            async with asyncio.timeout(DHT_WAIT):
                await self._node.shutdown()
        except NETWORK_ERRORS as error:
            logger.debug("the DHT node did not shut down: %r", error)

    def expect_answers_within(self, seconds: float) -> None:
        """Do without a DHT node, for a while, that takes longer to answer. Never waits longer than by default."""
        self.protocol.wait_timeout = min(seconds, DHT_WAIT)

    async def clock_of(self, peer_id: str) -> tuple[float, float]:
        """Return by how many seconds a node's clock is ahead of ours, and those of the round trip that told: the answer
        was written somewhere within it. Raises: PeerUnreachableError."""
        stub, request = self.protocol.get_stub(to_peer_id(peer_id)), HIVEMIND.protocol.dht_pb2.PingRequest()
        asked, began = time.time(), time.monotonic()
        try:
            answer = await stub.rpc_ping(request, timeout=self.protocol.wait_timeout)
        except NETWORK_ERRORS as error:
            raise PeerUnreachableError(peer_id, str(error) or type(error).__name__) from error
        took = time.monotonic() - began
        return answer.dht_time - asked - took / 2, took

    # Records --------------------------------------------------------------------------------------------------
    def keep_places(self, run_id: str, peers: Collection[str]) -> None:
        """Never replace the heartbeats of these peers of a run by those of others."""
        self._storage.name(HIVEMIND.protocol.DHTID.generate(heartbeats_key(run_id)), peers)

    def forget(self, run_id: str) -> None:
        """Give the records of a run no more room than those of any other."""
        self.keep_places(run_id, ())
        for key in (manifest_key(run_id), heartbeats_key(run_id)):
            self._storage.disfavour(HIVEMIND.protocol.DHTID.generate(key))

    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None:
        """Keep a manifest in the DHT, and on this node, for `ttl` seconds."""
        key, expiration = manifest_key(manifest.run_id), time.time() + ttl
        packed, place = self.protocol.serializer.dumps(manifest.pack()), HIVEMIND.protocol.DHTID.generate(key)
        self._storage.favour(place)
        self._storage.store(place, packed, expiration)
        await self._node.store(key, manifest.pack(), expiration)

    async def search_manifest(self, run_id: str) -> SignedManifest | None:
        """Return the run's manifest, all checks done; None when it is not found."""
        found = await self._node.get(manifest_key(run_id))
        if found is None or not isinstance(found.value, bytes):
            return None
        try:
            return SignedManifest.unpack(found.value, run_id)
        except ManifestError as error:
            logger.warning("dropped a manifest for %s: %s", run_id, error)
            return None

    async def store_heartbeat(self, heartbeat: Heartbeat, signed: bytes) -> bool:
        """Keep a signed heartbeat in the DHT until it expires. Returns whether any node took it."""
        key = heartbeats_key(heartbeat.run)
        self._storage.favour(HIVEMIND.protocol.DHTID.generate(key))
        stored: bool = await self._node.store(key, signed, heartbeat.expires, subkey=heartbeat.peer)
        return stored

    async def find_heartbeats(self, run_id: str) -> list[bytes]:
        """Search the DHT for heartbeats of a run's peers: of all of them, or in a large run of some.

        Their signatures are still to be verified.
        """
        found = await self._node.get(heartbeats_key(run_id), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return [entry.value for entry in entries.values() if isinstance(entry.value, bytes)]


class DhtMembership:
    """A node's place in the DHT: found again when it is lost, and served once others can dial us.

    Unless it `may_serve`, the node stays what it is.
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
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        await cancel_and_wait(self._keeping)

    def network_changed(self) -> None:
        """Begin anew: what was connected is not any more, and what is being waited for does not come."""
        self._network.links.drop_all()
        self._keeping.cancel()
        self._keeping = asyncio.create_task(self._keep_anew(self._keeping))

    async def _keep_anew(self, before: asyncio.Task[None]) -> None:
        await asyncio.gather(before, return_exceptions=True)
        await asyncio.gather(*map(self._daemon.drop_connection, await self._daemon.connections()))
        if self._may_serve:
            self._is_settled = False
            await self._serve(False)
        await self._greet(self._initial_peers)
        await self._keep()

    async def _keep(self) -> None:
        """Greet initial peers that we have lost whenever they are back, and others when we are alone in the DHT.

        The DHT forgets a node at its first failure; a bootstrap node that restarts would stay alone with the newcomers
        that it welcomes.
        """
        table = self._protocol.routing_table
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            lost = {address for address in self._initial_peers if to_peer_id(peer_id_of(address)) not in table}
            others = set() if table.uid_to_peer_id else await which_answer(self._remembered())
            await self._greet(lost | others)
            # Serve the DHT if others can dial us. A server that they can't would cost each of them seconds.
            if not self._is_settled and (can_be_dialled := await self._network.can_be_dialled()) is not None:
                self._is_settled = True
                await self._serve(can_be_dialled)

    async def _greet(self, addresses: Iterable[str]) -> None:
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            by_peer.setdefault(peer_id_of(address), []).append(address)
        await asyncio.gather(*(self._greet_peer(peer, known) for peer, known in by_peer.items()))

    async def _greet_peer(self, peer: str, addresses: Sequence[str]) -> None:
        """Ask for an answer over the connection that there is, else over a new one."""
        peer_id = to_peer_id(peer)
        if peer in await self._daemon.connections():
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_WAIT):
                    if await self._protocol.call_ping(peer_id) is not None:
                        return
            await self._daemon.drop_connection(peer)
        # After each failure the daemon waits longer, minutes in the end: it dials once we know that the peer answers.
        silent = {address for address in addresses if endpoint(address)} - await which_answer(addresses)
        answering = [address for address in addresses if address not in silent]
        if answering and await self._daemon.connect(peer, answering):
            await self._protocol.call_ping(peer_id)

    async def _serve(self, serves: bool) -> None:
        """Become a server of the DHT, or a client, which no node asks for anything."""
        protocol = self._protocol
        if protocol.client_mode is not serves:
            return
        logger.info("others can%s dial this machine", "" if serves else "not")
        protocol.client_mode = not serves
        service = HIVEMIND.protocol.AuthRPCWrapper(protocol, HIVEMIND.protocol.AuthRole.SERVICER, protocol.authorizer)
        if serves:
            await protocol.add_p2p_handlers(self._daemon, service)
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo(node_id=protocol.node_id.to_bytes())
            await asyncio.gather(*map(protocol.call_ping, list(protocol.routing_table.peer_id_to_uid)))
        else:
            protocol.node_info = HIVEMIND.protocol.dht_pb2.NodeInfo()
            with suppress(*NETWORK_ERRORS):
                await protocol.remove_p2p_handlers(self._daemon)
