"""A node of hivemind's DHT, with libp2p's daemon below it: finding the swarm, manifests and first heartbeats.

Everything runs in the caller's asyncio loop; the only other process is the daemon. Only records that prove themselves
get into this node's part of the DHT, or out of what others answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from peers import metrics
from peers.errors import DilocoPeerError, LocalNetworkError, ManifestError, RemoteProtocolError
from peers.network.admissions import REVOCATIONS, Admissions
from peers.network.amendments import AMENDMENTS, Amendments
from peers.network.channel import PeerUnreachableError
from peers.network.daemon import (
    HIVEMIND,
    NETWORK_ERRORS,
    Daemon,
    Exposure,
    is_loopback,
    parse_addresses,
    start_daemon,
    stop_daemon,
    to_peer_id,
    unreachable,
)
from peers.network.dht_storage import bounded
from peers.network.first_contact import first_contacts, reach
from peers.network.foothold import Foothold
from peers.network.head_store import SIGNED_HEADS, HeadStore
from peers.network.network_watch import NetworkWatch
from peers.network.own_network import is_behind_nat, network_at
from peers.network.records import heartbeats_key, manifest_key, record_is_valid
from peers.presence.heartbeat import ADDRESS_LENGTH, Heartbeat
from peers.values.identity import Identity
from peers.values.manifest import Amendment, SignedManifest
from peers.values.signed_heads import SignedHeads

logger = logging.getLogger(__name__)

RecordValidatorBase: Any = HIVEMIND.validation.RecordValidatorBase
ADDRESS_LIMIT = 8
UNKNOWN_NETWORK = "unknown"
DHT_WAIT = 5.0  # seconds for one request to one DHT node
DHT_OPTIONS = {
    "wait_timeout": DHT_WAIT,
    # No caches: a heartbeat is worth something only while it is the latest one.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
}


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Keeps from this node's part of the DHT what does not prove itself."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions

    def validate(self, record: Any) -> bool:
        return record_is_valid(
            record.key, record.subkey, record.value, record.expiration_time, time.time(), self._admissions
        )


class EncodedAddress(bytes):
    """A multiaddr as p2pd reads it: hivemind encodes peer ids inside (those of relays) as CIDs, p2pd wants hashes."""

    AS_CID, AS_HASH = bytes.fromhex("a503280172 00240801"), bytes.fromhex("a50326 00240801")

    @classmethod
    def of(cls, address: Any) -> Self:
        return cls(address.to_bytes().replace(cls.AS_CID, cls.AS_HASH))

    def to_bytes(self) -> bytes:  # which hivemind calls
        return self


class HivemindNode:
    """One node of the DHT. Made by `create`; `close` ends it."""

    def __init__(self, daemon: Daemon, node: Any, addresses: tuple[str, ...]) -> None:
        self.admissions = Admissions()
        """Admission to the runs that are known here."""
        self.head_store = HeadStore()
        """What the archives of runs have signed."""
        self.amendments = Amendments()
        """What organisers have given us to put into the logs of their runs."""
        self._daemon = daemon
        self._node = node
        self._foothold: Foothold | None = None
        self._watching: asyncio.Task[None] | None = None
        self.peer_id = str(daemon.peer_id)
        self.addresses = addresses
        self.on_move: Callable[[], None] = lambda: None
        """Called when this machine is in another network: whatever was connected is not any more."""

    @classmethod
    async def create(
        cls,
        identity: Identity,
        initial_peers: Sequence[str] = (),
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        client_mode: bool = False,
        local: bool | None = None,
        remembered: Callable[[], Sequence[str]] = tuple,
        public: bool | None = None,
    ) -> Self:
        """Join the swarm of `initial_peers` (or be its first node).

        Where none of them is in the swarm any more, it is looked for at the `remembered` addresses, now and later.

        Addresses are multiaddrs; port 0 is any free one. `announce` replaces the addresses that others are told. A
        client stores nothing for others. `local`: no NAT traversal; by default when all initial peers, or without any
        all listening addresses, are on the loopback interface.

        `public`: whether others can dial us, as a bootstrap node takes for granted. A node that is not public is a
        client at first, and reached through the initial peers. By default, that is found out.

        Raises: ManifestError, LocalNetworkError, SwarmUnreachableError (see start_daemon).
        """
        if local is None:
            local = all(is_loopback(address) for address in initial_peers or listen)
        parse_addresses(initial_peers, needs_peer_id=True)
        contacts = await first_contacts(initial_peers, remembered())
        exposure = _exposure(local, public)
        waits = bool(initial_peers) and exposure in (Exposure.PRIVATE, Exposure.UNKNOWN)
        admissions = Admissions()
        start = partial(start_daemon, identity, contacts, listen, announce, client_mode, exposure)
        daemon = await reach(start, contacts)
        try:
            node = await HIVEMIND.node.DHTNode.create(
                p2p=daemon,
                initial_peers=contacts,
                client_mode=client_mode or waits,
                record_validator=RecordValidator(admissions),
                **DHT_OPTIONS,
            )
            node.protocol.storage, node.protocol.cache = bounded(node.protocol.storage), bounded(node.protocol.cache)
            transport = cls(daemon, node, await _visible_addresses(daemon))
            transport.admissions = admissions
            admissions.find = transport._search_manifest
        except BaseException as error:
            await stop_daemon(daemon)
            if isinstance(error, RuntimeError) and "none of the initial_peers" in str(error):
                raise unreachable(contacts) from error
            if isinstance(error, HIVEMIND.protocol.ValidationError):
                raise _not_admitted(str(error)) from error
            raise
        foothold = Foothold(transport, daemon, node, initial_peers, remembered, may_serve=waits and not client_mode)
        foothold.start()
        transport._foothold = foothold
        if exposure is not Exposure.LOCAL:
            transport._watching = asyncio.create_task(NetworkWatch(foothold.network_changed).run())
        return transport

    async def close(self) -> None:
        """Leave the DHT and end the daemon; nothing of it is left. When cancelled, it leaves without a word."""
        try:
            await self.admissions.close()
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
            if self._foothold is not None:
                await self._foothold.close()
            if self._daemon._child.returncode is None:  # a dead daemon would leave the DHT node waiting for answers
                async with asyncio.timeout(DHT_WAIT):
                    await self._node.shutdown()
        except NETWORK_ERRORS as error:
            logger.debug("the DHT node did not shut down: %r", error)
        finally:
            await stop_daemon(self._daemon)

    async def failure(self) -> LocalNetworkError:
        """Wait for as long as the daemon lives; returns the error to end with once it has died."""
        status = await self._daemon._child.wait()
        return LocalNetworkError(f"libp2p's daemon ended unexpectedly (status {status}).", "Start the peer again.")

    def expect_answers_within(self, seconds: float) -> None:
        """Do without a DHT node, for a while, that takes longer to answer. Never waits longer than by default."""
        self._node.protocol.wait_timeout = min(seconds, DHT_WAIT)

    async def refresh_addresses(self) -> tuple[str, ...]:
        """Ask the daemon where others can reach us now (relays and port mappings come with time).

        When it does not say, we keep to what it said before.
        """
        try:
            self.addresses = await _visible_addresses(self._daemon)
        except (*NETWORK_ERRORS, LocalNetworkError) as error:
            logger.debug("addresses not refreshed: %r", error)
        return self.addresses

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout: float = 10.0) -> bool:
        """Connect to a peer at one of its addresses. Best effort: False when it is malformed or nobody answers."""
        try:
            parsed = parse_addresses(addresses, needs_peer_id=False)
            suffix = HIVEMIND.multiaddr.Multiaddr(f"/p2p/{peer_id}")
            encoded = [EncodedAddress.of(item.decapsulate(suffix)) for item in parsed]
            async with asyncio.timeout(timeout):
                await self._daemon._client.connect(to_peer_id(peer_id), encoded)
        except (*NETWORK_ERRORS, ManifestError, PeerUnreachableError, ValueError) as error:
            logger.debug("no connection to %s: %r", peer_id, error)
            return False
        return True

    async def drop_connection(self, peer_id: str) -> None:
        """End the connection to a peer that does not answer, so that the next request dials anew.

        The daemon itself notices only after half a minute that this machine, or the peer, is in another network now.
        """
        with suppress(*NETWORK_ERRORS, PeerUnreachableError):
            async with asyncio.timeout(DHT_WAIT):
                await self._daemon._client.disconnect(to_peer_id(peer_id))

    async def network_of(self, peer_id: str) -> str:
        """Return the network from which a peer has connected with us; UNKNOWN_NETWORK where it came through a relay."""
        try:
            async with asyncio.timeout(DHT_WAIT):
                known = await self._daemon.list_peers()
        except NETWORK_ERRORS as error:
            logger.debug("no list of connections: %r", error)
            return UNKNOWN_NETWORK
        addresses = [str(one) for peer in known if str(peer.peer_id) == peer_id for one in peer.addrs]
        return min(filter(None, map(network_at, addresses)), default=UNKNOWN_NETWORK)

    async def clock_of(self, peer_id: str) -> tuple[float, float]:
        """Return by how many seconds a node's clock is ahead of ours, and those of the round trip that told: the answer
        was written somewhere within it. Raises: PeerUnreachableError."""
        protocol, request = self._node.protocol, HIVEMIND.protocol.dht_pb2.PingRequest()
        asked, began = time.time(), time.monotonic()
        try:
            answer = await protocol.get_stub(to_peer_id(peer_id)).rpc_ping(request, timeout=protocol.wait_timeout)
        except NETWORK_ERRORS as error:
            raise PeerUnreachableError(peer_id, str(error) or type(error).__name__) from error
        took = time.monotonic() - began
        return answer.dht_time - asked - took / 2, took

    async def can_be_dialled(self) -> bool | None:
        """Return whether others can dial our libp2p port; None while nobody has tried."""
        return None

    def learn(self, manifest: SignedManifest) -> None:
        """Take in who may join this run: only they are heard from now on. Those that the manifest names keep their
        places under the run's key."""
        self.admissions.learn(manifest)
        self.head_store.learn(manifest)
        self.amendments.learn(manifest)
        self._name(manifest.run_id, {manifest.organiser, *manifest.archives})

    def forget(self, run_id: str) -> None:
        """Forget a run that was learned."""
        self.admissions.forget(run_id)
        self.head_store.forget(run_id)
        self.amendments.forget(run_id)
        self._name(run_id, ())
        for key in (manifest_key(run_id), heartbeats_key(run_id)):
            self._node.protocol.storage.disfavour(HIVEMIND.protocol.DHTID.generate(key))

    def _name(self, run_id: str, peers: Collection[str]) -> None:
        self._node.protocol.storage.name(HIVEMIND.protocol.DHTID.generate(heartbeats_key(run_id)), peers)

    @property
    def told(self) -> dict[str, Callable[[str, bytes], Coroutine[None, None, bytes]]]:
        """What answers those that ask for what organisers and archives have signed, or tell it, by the call's name."""
        return {
            REVOCATIONS: self.admissions.answer,
            SIGNED_HEADS: self.head_store.answer,
            AMENDMENTS: self.amendments.answer,
        }

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        """Return what is known of what a run's archives have signed."""
        return self.head_store.of(run_id)

    def amendment_of(self, run_id: str) -> Amendment | None:
        """Return the newest amendment that a run's organiser has given us."""
        return self.amendments.of(run_id)

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Raises: RefusalError unless the peer may take part in the run, as far as we know."""
        self.admissions.check(run_id, peer_id)

    def credentials(self, run_id: str) -> tuple[bytes, int]:
        """Return what our heartbeats show where a ticket is needed: our own, and the number of our list of revoked
        ones."""
        admission = self.admissions.of(run_id)
        return (admission.ticket, admission.number) if admission else (b"", 0)

    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None:
        """Keep a manifest in the DHT, and on this node, for `ttl` seconds."""
        self.learn(manifest)
        key, expiration = manifest_key(manifest.run_id), time.time() + ttl
        packed, place = self._node.protocol.serializer.dumps(manifest.pack()), HIVEMIND.protocol.DHTID.generate(key)
        self._node.protocol.storage.favour(place)
        self._node.protocol.storage.store(place, packed, expiration)
        await self._node.store(key, manifest.pack(), expiration)

    async def find_manifest(self, run_id: str) -> SignedManifest | None:
        """The run's manifest, all checks done; None when nobody here knows it."""
        manifest = await self._search_manifest(run_id)
        if manifest is not None:
            self.learn(manifest)
        return manifest

    async def _search_manifest(self, run_id: str) -> SignedManifest | None:
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
        self._node.protocol.storage.favour(HIVEMIND.protocol.DHTID.generate(key))
        stored: bool = await self._node.store(key, signed, heartbeat.expires, subkey=heartbeat.peer)
        return stored

    async def find_heartbeats(self, run_id: str) -> list[bytes]:
        """Search the DHT for signed heartbeats of a run's peers: of all of them, or in a large run of some."""
        found = await self._node.get(heartbeats_key(run_id), latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        proven = []
        for subkey, entry in entries.items():
            try:
                heartbeat = Heartbeat.verify(entry.value, run_id)
                if heartbeat.peer != subkey:
                    raise RemoteProtocolError(heartbeat.peer, f"its heartbeat lies under {subkey!r:.80}")
                proven.append(entry.value)
            except (RemoteProtocolError, TypeError) as error:
                metrics.DROPPED.labels("heartbeat").inc()
                logger.warning("dropped a heartbeat: %s", error)
        return proven


def _exposure(local: bool, public: bool | None) -> Exposure:
    if local:
        return Exposure.LOCAL
    if public is None:
        return Exposure.PRIVATE if is_behind_nat() else Exposure.UNKNOWN
    return Exposure.PUBLIC if public else Exposure.PRIVATE


async def _visible_addresses(daemon: Daemon) -> tuple[str, ...]:
    """Where others can reach us, loopback last."""
    try:
        visible = [str(address) for address in await daemon.get_visible_maddrs(latest=True)]
    except ValueError as error:
        raise LocalNetworkError(
            "libp2p's daemon listens nowhere.", "Check the listening addresses and the firewall."
        ) from error
    speakable = [address for address in visible if len(address) <= ADDRESS_LENGTH]  # a relay's may be too long
    return tuple(sorted(speakable, key=is_loopback)[:ADDRESS_LIMIT])


def _not_admitted(reason: str) -> DilocoPeerError:
    """A bootstrap node answered, and hivemind found something wrong with us."""
    if "local time" in reason:
        return LocalNetworkError(
            "this machine's clock is more than 3 seconds off.", "Switch on time synchronisation (NTP)."
        )
    return LocalNetworkError("the bootstrap node cannot reach this machine.", "Check the firewall, then try again.")
