"""One peer's network: hivemind's DHT to find other peers, links with them, and libp2p to peers without a link.

Failures of peers leave here as PeerUnreachableError or PeerRefusedError. Invalid bytes from a peer cause no more than a
dropped message or stream and a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, TypeAlias

from peers import metrics
from peers.errors import (
    AdmissionError,
    DilocoPeerError,
    LocalNetworkError,
    LocalProtocolError,
    RemoteProtocolError,
    SwarmUnreachableError,
)
from peers.network.channel import Channel, PeerRefusedError, PeerUnreachableError, RefusalError, Serve, pull, serve_pull
from peers.network.contacts import contacts_of, host_of, is_loopback, open_volunteers
from peers.network.daemon import (
    NETWORK_ERRORS,
    Daemon,
    Exposure,
    own_addresses,
    parse_addresses,
    peer_errors,
    start_daemon,
    stop_daemon,
    to_peer_id,
)
from peers.network.data_port import LINK_INFO, PROBED_PORTS, LinkInfo, probe
from peers.network.dht_node import DhtMembership, DhtNode
from peers.network.discovery import PeerDiscovery
from peers.network.first_contact import endpoint, first_contacts, reach
from peers.network.known_runs import KnownRuns
from peers.network.links import EAGER, Links, LinkSettings
from peers.network.own_network import is_behind_nat, watch_clock, watch_network
from peers.network.throttle import Caps, LinkTime, Throttle
from peers.presence.beats import Beats
from peers.presence.calls import BEAT, BEAT_BYTES, HEARTBEAT, SHORT, WHO, Beat, Request, tag_of
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHeads
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.wire import MESSAGE_LIMIT, Reach, printable, unpack_from

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Callable[[Channel], Awaitable[None]]
CallHandler: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]
"""(sender, payload) -> answer; RefusalError refuses."""

PROTOCOL_PREFIX = "/diloco-peer/1"
OPEN_TIMEOUT = 15.0  # seconds to open a libp2p stream to a peer
CONVERSATION_TIMEOUT = 3600.0  # seconds after which a stream that a peer has opened is ended, however slow the peer is
CALL_TIMEOUT = 10.0  # seconds to wait for the answer to one of the transport's own messages
ANSWER, REFUSAL = b"\x01", b"\x00"


class HivemindTransport:
    """One peer's connection to the swarm, made by `create` and ended by `close`.

    Messages and streams go over a link if there is one with the peer, else over libp2p.
    """

    def __init__(self, identity: Identity, daemon: Daemon, dht: DhtNode, runs: KnownRuns) -> None:
        self.peer_id = identity.peer_id
        self.dht = dht
        self.runs = runs
        """The runs whose manifests are known here."""
        self.cap(Caps())
        self.no_round = LinkTime()
        """Set while no round is under way, so that less urgent data may use the whole link."""
        self.daemon = daemon
        self._serving: set[asyncio.Task[None]] = set()
        self._conversations: dict[str, Conversation] = {}
        self._answers: dict[str, CallHandler] = {}
        self.links = Links(
            identity,
            self._converse,
            self._answer,
            self._ask_link_info,
            self._is_there,
            lambda: (self.upload, self.download),
        )
        self._membership: DhtMembership | None = None
        self._discoveries: dict[str, PeerDiscovery] = {}
        self._unmet: dict[str, tuple[str, ...]] = {}  # addresses of a large run's peers, by peer id; dialled if needed

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
        links: LinkSettings | None = None,
    ) -> Self:
        """Return a transport that has joined the swarm of `initial_peers`; without them, the first node of a new swarm.

        If none of them is in the swarm any more, it is looked for at the `remembered` addresses, now and later.

        Addresses are multiaddrs; port 0 is any free one. `announce` replaces the addresses that others are given. A
        client stores nothing for others, and accepts no links. `links` has the port at which others are accepted.
        `local`: no NAT traversal. By default it is on when all initial peers, or without any all listening addresses,
        are on the loopback interface.

        `public`: others can dial us, which a bootstrap node assumes. It starts even if no initial peer answers, with a
        warning. A node that is not public is a client at first, and is reached through the initial peers. By default
        the node finds out by itself.

        Raises: ManifestError, LocalNetworkError, SwarmUnreachableError (see start_daemon).
        """
        listen, announce = (own_addresses(addresses, identity.peer_id) for addresses in (listen, announce))
        if local is None:
            local = all(is_loopback(host_of(address)) for address in initial_peers or listen)
        parse_addresses(initial_peers, needs_peer_id=True)
        contacts = await first_contacts(initial_peers, remembered())
        exposure = Exposure.PUBLIC if public else Exposure.PRIVATE
        if local:
            exposure = Exposure.LOCAL
        elif public is None and not is_behind_nat():
            exposure = Exposure.UNKNOWN
        waits = bool(initial_peers) and exposure in (Exposure.PRIVATE, Exposure.UNKNOWN)

        async def begin(contacts: Sequence[str]) -> tuple[Daemon, KnownRuns, DhtNode]:
            start = partial(start_daemon, identity, contacts, listen, announce, client_mode, exposure)
            daemon = await reach(start, contacts)
            try:
                runs = KnownRuns()
                dht = await DhtNode.create(daemon, contacts, client_mode or waits, runs.admissions)
                await daemon.refresh_addresses()
            except BaseException:
                await stop_daemon(daemon)
                raise
            return daemon, runs, dht

        try:
            daemon, runs, dht = await begin(contacts)
        except SwarmUnreachableError as error:
            if not public:
                raise
            logger.warning("%s This node serves without other nodes, and tries again while it runs.", error.message)
            daemon, runs, dht = await begin(())
        transport = cls(identity, daemon, dht, runs)
        try:
            if not client_mode:
                hosts = [host for address in listen if (host := host_of(address))]
                transport.links.listen(hosts, links or LinkSettings())
            beats = {BEAT: transport._hear_beat, HEARTBEAT: transport._hear_heartbeat, WHO: transport._hand_out}
            for name, answer in (transport.links.handlers | runs.answers | beats).items():
                await transport.on_call(name, answer)
        except BaseException:
            await transport.close()
            raise
        transport.links.start(transport.links.arranging.keep(initial_peers))
        transport._membership = DhtMembership(transport, initial_peers, remembered, waits and not client_mode)
        transport.links.start(watch_clock())
        if exposure is not Exposure.LOCAL:
            transport.links.start(watch_network(transport._membership.network_changed))
        return transport

    def cap(self, caps: Caps) -> None:
        """Limit the bandwidth of all streams together to `caps`."""
        self.caps, self.upload, self.download = caps, Throttle(caps.upload), Throttle(caps.download)

    async def close(self) -> None:
        """Close the links, leave the DHT and stop the libp2p daemon. When cancelled, at least stop the daemon."""
        for discovery in self._discoveries.values():
            await discovery.close()
        await self.links.close()
        try:
            await cancel_and_wait(*self._serving)
            await self.runs.admissions.close()
            if self._membership is not None:
                await self._membership.close()
            if self.daemon.is_running:  # a dead daemon would leave the DHT node waiting for answers
                await self.dht.close()
        finally:
            await stop_daemon(self.daemon)

    # Addresses and links --------------------------------------------------------------------------------------
    @property
    def addresses(self) -> tuple[str, ...]:
        """The multiaddrs at which others can reach us over libp2p."""
        return self.daemon.addresses

    async def refresh_addresses(self) -> None:
        """Update our addresses from the libp2p daemon, which finds relays and port mappings some time after its start.

        If it does not answer, the earlier addresses stay.
        """
        try:
            await self.daemon.refresh_addresses()
        except (*NETWORK_ERRORS, LocalNetworkError) as error:
            logger.debug("addresses not refreshed: %r", error)

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> bool:
        return await self.daemon.connect(peer_id, addresses)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints (IP address and TCP port) at which others may dial our data port."""
        return self.links.endpoints(self.addresses)

    def reach_of(self, peer_id: str) -> Reach | None:
        return self.links.reach_of(peer_id)

    # Runs -----------------------------------------------------------------------------------------------------
    def learn(self, manifest: SignedManifest) -> None:
        """Store a run's manifest, and check the admission of its peers from now on. On this node, other peers' DHT
        records never displace the records of the peers that the manifest names."""
        self.runs.learn(manifest)
        self.dht.keep_places(manifest.run_id, {manifest.organiser, *manifest.archives})

    def forget(self, run_id: str) -> None:
        """Delete all data about a run and its peers from memory."""
        self.runs.forget(run_id)
        self.dht.forget(run_id)
        if discovery := self._discoveries.pop(run_id, None):
            task = start_task(discovery.close())
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def store_manifest(self, manifest: SignedManifest, ttl: float) -> None:
        self.learn(manifest)
        await self.dht.store_manifest(manifest, ttl)

    async def find_manifest(self, run_id: str) -> SignedManifest | None:
        manifest = await self.dht.search_manifest(run_id)
        if manifest is not None:
            self.learn(manifest)
        return manifest

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Raise RefusalError unless the peer may take part in the run, as far as we know."""
        self.runs.admissions.check(run_id, peer_id)

    def credentials(self, run_id: str) -> tuple[bytes, int]:
        """Return our ticket to a run, and our revocation list's version number; b"" and 0 for an open run."""
        admission = self.runs.admissions.of(run_id)
        return (admission.ticket, admission.number) if admission else (b"", 0)

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return self.runs.signed_heads_of(run_id)

    # Discovery ------------------------------------------------------------------------------------------------
    def discovery_of(self, run_id: str) -> PeerDiscovery:
        """Return the PeerDiscovery of a run, after creating it if there is none, and updating its admission."""
        if run_id not in self._discoveries:
            self._discoveries[run_id] = PeerDiscovery(run_id, self)
        self._discoveries[run_id].beats.admission = self.runs.admissions.of(run_id)
        return self._discoveries[run_id]

    async def publish(self, heartbeat: bytes, run_id: str) -> bool:
        """Send our signed heartbeat to a run's peers, and store it in the DHT if newcomers need it. Return False if the
        DHT should have stored it, but no DHT node did."""
        return await self.discovery_of(run_id).publish(heartbeat)

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        """Return the newest heartbeat of each peer of a run, ours included, sorted by peer id."""
        found = await self.discovery_of(run_id).heartbeats()
        self.runs.admissions.catch_up(self.call, run_id, found)
        self.runs.hear_heads(run_id, found)
        is_eager = self.links.port > 0  # a peer that accepts no connections makes links only when needed
        self.links.observe(contacts_of(found), is_eager)
        self.links.arranging.volunteers = open_volunteers(found, self.peer_id)
        self._unmet = {one.peer: one.addresses for one in found} if is_eager and len(found) > EAGER else {}
        return found

    async def _hear_beat(self, sender: str, payload: bytes) -> bytes:
        beat = unpack_from(sender, Beat, payload, BEAT_BYTES)
        return self._beats_of(beat.run).hear_beat(sender, beat, now(), time.time())

    async def _hear_heartbeat(self, sender: str, payload: bytes) -> bytes:
        return self._beats_of(payload[:SHORT]).hear_heartbeat(sender, payload[SHORT:], now(), time.time())

    async def _hand_out(self, sender: str, payload: bytes) -> bytes:
        request = Request.unpack(sender, payload)
        return self._beats_of(tag_of(request.run)).hand_out(sender, request, now(), time.time())

    def _beats_of(self, tag: bytes) -> Beats:
        """Return our Beats in the run with this tag. Raises: RefusalError if this peer is not in that run."""
        for run, discovery in self._discoveries.items():
            if tag_of(run) == tag and discovery.is_member:
                return discovery.beats
        raise RefusalError("this peer is not in that run")

    async def _meet(self, peer_id: str, timeout: float) -> None:
        """Connect over libp2p to a peer of a large run, because in large runs peers connect only when needed."""
        if addresses := self._unmet.pop(peer_id, ()):
            await self.daemon.connect(peer_id, addresses, timeout)

    async def _ask_link_info(self, peer_id: str, address: str) -> LinkInfo:
        await self.daemon.connect(peer_id, [address])
        return unpack_from(peer_id, LinkInfo, await self._call_over_libp2p(peer_id, LINK_INFO, b"", CALL_TIMEOUT))

    async def can_be_dialled(self) -> bool | None:
        """Return True if a node that introduces us can dial our libp2p port, False if not, None if no node answers."""
        ports = {port for address in self.addresses if (where := endpoint(address)) for port in where[1:]}
        for node in self.links.arranging.introducers:
            with suppress(OSError, RemoteProtocolError):
                return bool((await probe(node, tuple(ports)[:PROBED_PORTS])).open)
        return None

    async def _is_there(self, peer_id: str) -> bool:
        """Return True if a peer answers over libp2p, which can find a relay or pass a NAT where no link can be made."""
        with suppress(PeerUnreachableError):
            await self._call_over_libp2p(peer_id, LINK_INFO, b"", CALL_TIMEOUT)
            return True
        return False

    async def _converse(self, protocol: str, channel: Channel) -> None:
        """Run the handler of `protocol` on a stream that another peer has opened. Raises: the stream's error."""
        conversation = self._conversations.get(protocol)
        if conversation is None:
            raise ConnectionRefusedError(f"this peer does not serve {protocol!r:.40}, or not yet")
        async with asyncio.timeout(CONVERSATION_TIMEOUT):
            await conversation(channel)

    # Messages -------------------------------------------------------------------------------------------------
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        """Send a peer a message, and return its answer, which must arrive within `timeout` seconds. Both are
        limited to MESSAGE_LIMIT bytes.

        Raises: PeerUnreachableError, PeerRefusedError; LocalProtocolError when the payload is too large.
        """
        if len(payload) > MESSAGE_LIMIT:
            raise LocalProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {MESSAGE_LIMIT}")
        if self.links.is_up(peer_id):
            try:
                return await self.links.link(peer_id).call(name, payload, timeout)
            except PeerUnreachableError as error:
                if isinstance(error, PeerRefusedError) or self.links.is_up(peer_id):
                    raise
                logger.debug("%s; trying over libp2p", error)
        await self._meet(peer_id, min(CALL_TIMEOUT, timeout))
        return await self._call_over_libp2p(peer_id, name, payload, timeout)

    async def _call_over_libp2p(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        with peer_errors(peer_id):
            async with asyncio.timeout(timeout):
                answer: bytes = await self.daemon._client.call_unary_handler(
                    to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/call/{name}", payload
                )
        verdict, content = answer[:1], answer[1:]
        if verdict == REFUSAL:
            raise PeerRefusedError(peer_id, printable(content.decode(errors="replace")))
        if verdict != ANSWER or len(content) > MESSAGE_LIMIT:
            raise PeerUnreachableError(peer_id, "its answer is malformed")
        return content

    async def on_call(self, name: str, handler: CallHandler) -> None:
        """Let `handler` answer each `call` with this name that another peer makes. Raises: LocalNetworkError."""
        self._answers[name] = handler

        async def answer(payload: bytes, sender_id: Any) -> bytes:
            try:
                return ANSWER + await self._answer(str(sender_id), name, payload)
            except RefusalError as refusal:
                return REFUSAL + str(refusal).encode(errors="replace")

        await self.daemon.register(self.daemon._client.add_unary_handler(f"{PROTOCOL_PREFIX}/call/{name}", answer))

    async def _answer(self, sender: str, name: str, payload: bytes) -> bytes:
        """Return the handler's answer to a call. Raises: RefusalError, also in place of any other error."""
        if name not in self._answers:  # after a restart, calls may arrive before `on_call` registers their handlers
            raise RefusalError(f"this peer does not handle {name!r:.40}, or not yet")
        try:
            if len(payload) > MESSAGE_LIMIT:
                raise RemoteProtocolError(sender, f"its {name} message of {len(payload)} bytes is too large")
            return await self._answers[name](sender, payload)
        except RefusalError:
            raise
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("message").inc()
            logger.info("dropped a %s message: %s", name, error)
            raise RefusalError(error.message) from error
        except AdmissionError as error:
            raise RefusalError(str(error)) from error
        except DilocoPeerError as error:
            logger.error("cannot answer a %s message of %s: %s", name, sender, error)
        except Exception:
            logger.exception("the handler of %s failed", name)
        raise RefusalError("internal error")

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        """Ask a peer for the data of the pull `name`. Return the answer's header, and its data of at most `max_bytes`.

        Raises: PeerUnreachableError, PeerRefusedError.
        """
        async with self.stream(peer_id, f"pull/{name}") as channel, asyncio.timeout(timeout):
            return await pull(channel, header, max_bytes)

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        """Let `serve` answer each `pull` with this name that another peer makes. With `gives_way`, data is sent at full
        rate only while no round is under way."""

        async def answer(channel: Channel) -> None:
            if gives_way:
                channel.give_way(self.no_round)
            await serve_pull(channel, serve)

        await self.on_stream(f"pull/{name}", answer)

    @asynccontextmanager
    async def stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        """Open a byte stream of `protocol` to a peer, on its link or else over libp2p, and yield the stream's channel.

        Raises: PeerUnreachableError, PeerRefusedError, also for errors inside the body.
        """
        link = await self.links.link_with(peer_id)
        if link is None:
            await self._meet(peer_id, CALL_TIMEOUT)
        with peer_errors(peer_id):
            async with link.conversation(protocol) if link else self._libp2p_stream(peer_id, protocol) as channel:
                yield channel

    @asynccontextmanager
    async def _libp2p_stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        async with asyncio.timeout(OPEN_TIMEOUT):
            _, reader, writer = await self.daemon.call_binary_stream_handler(
                to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/{protocol}"
            )
        channel = Channel(peer_id, reader, writer, self.upload, self.download)
        try:
            yield channel
        finally:
            channel.close()

    async def on_stream(self, protocol: str, conversation: Conversation) -> None:
        """Let `conversation` handle each stream that other peers open with this protocol. Raises: LocalNetworkError."""
        self._conversations[protocol] = conversation

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            channel = Channel(str(info.peer_id), reader, writer, self.upload, self.download)
            try:
                await self._converse(protocol, channel)
            except asyncio.CancelledError:  # cancelled by `close`; asyncio 3.11 would log a traceback
                logger.debug("stopped serving a %s stream of %s", protocol, channel.peer)
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("stream").inc()
                logger.info("dropped a %s stream: %s", protocol, error)
            except NETWORK_ERRORS as error:
                logger.debug("a %s stream of %s broke: %r", protocol, channel.peer, error)
            except Exception:
                logger.exception("the handler of %s failed", protocol)
            finally:
                channel.close()
                self._serving.discard(task)

        await self.daemon.register(self.daemon.add_binary_stream_handler(f"{PROTOCOL_PREFIX}/{protocol}", serve))
