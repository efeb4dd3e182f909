"""The swarm's network on hivemind: its DHT for finding each other, its libp2p for messages and bulk data.

Failures of peers leave here as PeerUnreachableError or PeerRefusedError, and nothing that a peer sends can do more than
have its message or stream dropped and a line logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeAlias

from peers import metrics
from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.network.arranging import INTRODUCE, MEET
from peers.network.channel import (
    Channel,
    PeerRefusedError,
    PeerUnreachableError,
    RefusalError,
    Serve,
    pull,
    serve_pull,
)
from peers.network.contacts import contacts_of, host_of, open_volunteers
from peers.network.daemon import NETWORK_ERRORS, Daemon, peer_errors, to_peer_id
from peers.network.dialling import MORE
from peers.network.first_contact import endpoint
from peers.network.links import EAGER, Links
from peers.network.node import HivemindNode
from peers.network.opening import PROBED_PORTS
from peers.network.probing import probe
from peers.network.relays import LINK_INFO, LinkInfo
from peers.network.settings import LinkSettings
from peers.network.throttle import Caps, LinkTime, Throttle
from peers.network.whereabouts import GOSSIP, Whereabouts
from peers.presence.heartbeat import Heartbeat
from peers.presence.life_signs import LifeSign
from peers.presence.news import Request
from peers.presence.voice import Pace
from peers.values.identity import Identity
from peers.values.wire import MESSAGE_LIMIT, Reach, pack, printable, unpack_from

logger = logging.getLogger(__name__)

Conversation: TypeAlias = Callable[[Channel], Awaitable[None]]
CallHandler: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]
"""(sender, payload) -> answer; RefusalError refuses."""

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)
PROTOCOL_PREFIX = "/diloco-peer/1"
OPEN_TIMEOUT = 15.0  # seconds to reach a peer
CONVERSATION_TIMEOUT = 3600.0  # seconds that a peer may take for one stream; nobody reads a byte a minute for ever
CALL_TIMEOUT = 10.0  # seconds for messages of the transport's own
ANSWER, REFUSAL = b"\x01", b"\x00"


class HivemindTransport(HivemindNode):
    """One peer's connection to the swarm. Made by `create`; `close` ends it.

    Where there is a link with a peer, messages and streams go over it; else over libp2p.
    """

    def __init__(self, daemon: Daemon, node: Any, addresses: tuple[str, ...]) -> None:
        super().__init__(daemon, node, addresses)
        self._serving: set[asyncio.Task[None]] = set()
        self.cap(Caps())
        self._conversations: dict[str, Conversation] = {}
        self._answers: dict[str, CallHandler] = {}
        self._links: Links | None = None
        self._is_eager = False
        self._whereabouts: dict[str, Whereabouts] = {}
        self._unmet: dict[str, tuple[str, ...]] = {}  # addresses of peers of a large run, to be dialled when needed
        self.no_round = LinkTime()
        """Whether bulk data that is in no hurry may have the link to itself."""

    @classmethod
    async def create(
        cls,
        identity: Identity,
        initial_peers: Sequence[str] = (),
        listen: Sequence[str] = ANY_PORT,
        announce: Sequence[str] = (),
        client_mode: bool = False,
        local: bool | None = None,
        remembered: Callable[[], Sequence[str]] = tuple,
        public: bool | None = None,
        links: LinkSettings | None = None,
    ) -> Self:
        """See `HivemindNode.create`. `links` says where bulk connections are accepted; a client accepts none."""
        transport = await super().create(
            identity, initial_peers, listen, announce, client_mode, local, remembered, public
        )
        try:
            settings = None if client_mode else links or LinkSettings()
            await transport._open_links(identity, initial_peers, listen, settings)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _open_links(
        self, identity: Identity, initial_peers: Sequence[str], listen: Sequence[str], settings: LinkSettings | None
    ) -> None:
        """Have direct connections with other peers, and accept them at the hosts of `listen`. Without settings none are
        accepted, nor made before they are needed. Raises: LocalNetworkError when the port can't be used."""
        links = Links(
            identity,
            self._converse,
            self._answer,
            self._ask_link_info,
            self._is_there,
            lambda: (self.upload, self.download),
        )
        self._links = links
        if settings is not None:
            links.listen([host for address in listen if (host := host_of(address))], settings)
            self._is_eager = True
        answers: dict[str, CallHandler] = {LINK_INFO: self._tell_link_info, MORE: links.dialling.on_more}
        answers |= {INTRODUCE: links.arranging.on_introduce, MEET: links.arranging.on_meet}
        for name, answer in (answers | self.told | {GOSSIP: self._hear}).items():
            await self.on_call(name, answer)
        self.on_move = links.drop_all
        links.use_relays(initial_peers)

    def cap(self, caps: Caps) -> None:
        """Let all streams together use no more than this of the link."""
        self.caps, self.upload, self.download = caps, Throttle(caps.upload), Throttle(caps.download)

    async def close(self) -> None:
        for whereabouts in self._whereabouts.values():
            await whereabouts.close()
        if self._links:
            await self._links.close()
        for task in self._serving:
            task.cancel()
        try:
            await asyncio.gather(*self._serving, return_exceptions=True)
        finally:
            await super().close()

    # Links ----------------------------------------------------------------------------------------------------
    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where others may dial bulk connections to us."""
        return self._links.endpoints(self.addresses) if self._links else ()

    @property
    def relays(self) -> tuple[str, ...]:
        """Addresses of the nodes that introduce us to others."""
        return self._links.relay_addresses if self._links else ()

    def reach(self) -> dict[str, Reach]:
        """How we reach those peers of which that is known."""
        return self._links.reach() if self._links else {}

    def sought(self) -> frozenset[str]:
        """The peers to which a way is still looked for."""
        return self._links.sought() if self._links else frozenset()

    def reach_of(self, peer_id: str) -> Reach | None:
        return self._links.reach_of(peer_id) if self._links else None

    def hard_to_reach(self) -> set[str]:
        """Return the peers that are reached through a relay only, or not at all."""
        return {peer for peer, reach in self.reach().items() if not reach.is_direct}

    def prepare(self, peer_id: str) -> None:
        """Begin to make a link with a peer that will be told something again and again."""
        if self._links and self._is_eager:
            self._links.prepare(peer_id)

    def forget(self, run_id: str) -> None:
        """Forget a run that was learned, and its peers."""
        super().forget(run_id)
        if whereabouts := self._whereabouts.pop(run_id, None):
            task = asyncio.create_task(whereabouts.close())
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    # Who is there ---------------------------------------------------------------------------------------------
    def whereabouts_of(self, run_id: str) -> Whereabouts:
        if run_id not in self._whereabouts:
            self._whereabouts[run_id] = Whereabouts(run_id, self)
        self._whereabouts[run_id].gossip.admission = self.admissions.of(run_id)
        return self._whereabouts[run_id]

    def pace(self, run_id: str) -> Pace:
        """Return what the next thing that we say of ourselves in a run depends on."""
        return self.whereabouts_of(run_id).pace()

    async def publish(self, heartbeat: bytes | None, run_id: str, sign: LifeSign | None = None) -> bool:
        """Tell a run's peers our newest heartbeat or sign of life, and the DHT what newcomers need."""
        return await self.whereabouts_of(run_id).say(heartbeat, sign)

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        """Return the newest heartbeat of every peer of a run, ours included, by peer id."""
        found = await self.whereabouts_of(run_id).heartbeats()
        self.admissions.catch_up(self, run_id, found)
        self.head_store.hear(run_id, found)
        if self._links:
            self._links.observe(contacts_of(found), self._is_eager)
            self._links.arranging.volunteers = open_volunteers(found, self.peer_id)
        self._unmet = {one.peer: one.addresses for one in found} if self._is_eager and len(found) > EAGER else {}
        return found

    def silences(self, run_id: str) -> dict[str, float]:
        """Return for how many seconds nothing new was heard of each peer of a run."""
        return self.whereabouts_of(run_id).silences()

    async def _hear(self, sender: str, payload: bytes) -> bytes:
        request = Request.unpack(sender, payload)
        whereabouts = self._whereabouts.get(request.run)
        if whereabouts is None or not whereabouts.is_member:
            raise RefusalError(f"we are not in the run {request.run}")
        return whereabouts.answer(sender, request)

    async def _meet(self, peer_id: str, timeout: float) -> None:
        """Connect to a peer of a large run, in which nobody connects to all others beforehand."""
        if addresses := self._unmet.pop(peer_id, ()):
            await self.connect(peer_id, addresses, timeout)

    async def _ask_link_info(self, peer_id: str, address: str) -> LinkInfo:
        await self.connect(peer_id, [address])
        return unpack_from(peer_id, LinkInfo, await self._call_over_libp2p(peer_id, LINK_INFO, b"", CALL_TIMEOUT))

    async def can_be_dialled(self) -> bool | None:
        """Return whether a node that introduces us can dial our libp2p port; None while there is none to try."""
        ports = {port for address in self.addresses if (where := endpoint(address)) for port in where[1:]}
        nodes = self._links.arranging.nodes if self._links else ()
        for node in nodes:
            with suppress(OSError, RemoteProtocolError):
                return bool((await probe(node, tuple(ports)[:PROBED_PORTS])).open)
        return None

    async def _is_there(self, peer_id: str) -> bool:
        """Whether a peer answers over libp2p, which may have punched a hole or found a relay of its own."""
        try:
            await self._call_over_libp2p(peer_id, LINK_INFO, b"", CALL_TIMEOUT)
        except PeerUnreachableError:
            return False
        return True

    async def _tell_link_info(self, sender: str, payload: bytes) -> bytes:
        return pack(self._links.info if self._links else LinkInfo(port=0))

    async def _converse(self, protocol: str, channel: Channel) -> None:
        """Have the conversation that another peer has opened on a link. Raises what breaks it."""
        conversation = self._conversations.get(protocol)
        if conversation is None:
            raise RemoteProtocolError(channel.peer, f"there is no conversation {protocol!r:.40}")
        async with asyncio.timeout(CONVERSATION_TIMEOUT):
            await conversation(channel)

    # Messages -------------------------------------------------------------------------------------------------
    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        """Ask one peer; at most MESSAGE_LIMIT bytes there and back.

        Raises: PeerUnreachableError, PeerRefusedError; LocalProtocolError when the payload is too large.
        """
        if len(payload) > MESSAGE_LIMIT:
            raise LocalProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {MESSAGE_LIMIT}")
        if self._links and self._links.is_up(peer_id):
            try:
                return await self._links.link(peer_id).call(name, payload, timeout)
            except PeerRefusedError:
                raise
            except PeerUnreachableError as error:
                if self._links.is_up(peer_id):
                    raise
                logger.debug("%s; over libp2p, then", error)
        await self._meet(peer_id, min(CALL_TIMEOUT, timeout))
        return await self._call_over_libp2p(peer_id, name, payload, timeout)

    async def _call_over_libp2p(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        with peer_errors(peer_id):
            async with asyncio.timeout(timeout):
                answer: bytes = await self._daemon._client.call_unary_handler(
                    to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/call/{name}", payload
                )
        verdict, content = answer[:1], answer[1:]
        if verdict == REFUSAL:
            raise PeerRefusedError(peer_id, printable(content.decode(errors="replace")))
        if verdict != ANSWER or len(content) > MESSAGE_LIMIT:
            raise PeerUnreachableError(peer_id, "its answer is malformed")
        return content

    async def on_call(self, name: str, handler: CallHandler) -> None:
        """Answer `call`s of this name."""
        self._answers[name] = handler

        async def answer(payload: bytes, sender_id: Any) -> bytes:
            try:
                return ANSWER + await self._answer(str(sender_id), name, payload)
            except RefusalError as refusal:
                return REFUSAL + str(refusal).encode(errors="replace")

        await self._daemon._client.add_unary_handler(f"{PROTOCOL_PREFIX}/call/{name}", answer)

    async def _answer(self, sender: str, name: str, payload: bytes) -> bytes:
        """Whatever goes wrong is a refusal to the sender, and a line in our log. Raises: RefusalError."""
        try:
            if name not in self._answers:
                raise RemoteProtocolError(sender, f"there is no message {name!r:.40}")
            if len(payload) > MESSAGE_LIMIT:
                raise RemoteProtocolError(sender, f"its {name} message of {len(payload)} bytes is too large")
            return await self._answers[name](sender, payload)
        except RefusalError:
            raise
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("message").inc()
            logger.warning("dropped a %s message: %s", name, error)
            raise RefusalError(error.message) from error
        except DilocoPeerError as error:
            logger.error("cannot answer a %s message of %s: %s", name, sender, error)
        except Exception:
            logger.exception("the handler of %s failed", name)
        raise RefusalError("internal error")

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        """Fetch data from a peer: header and data of its answer.

        Raises: PeerUnreachableError, PeerRefusedError.
        """
        async with self.stream(peer_id, f"pull/{name}") as channel, asyncio.timeout(timeout):
            return await pull(channel, header, max_bytes)

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        """Answer `pull`s of this name; what `gives_way` is sent while no round is under way, or slowly."""

        async def answer(channel: Channel) -> None:
            if gives_way:
                channel.give_way(self.no_round)
            await serve_pull(channel, serve)

        await self.on_stream(f"pull/{name}", answer)

    @asynccontextmanager
    async def stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        """A byte stream to a peer that answers this protocol: a conversation on a link, or a stream of libp2p's.

        Raises: PeerUnreachableError, PeerRefusedError, also for what goes wrong inside.
        """
        link = await self._links.link_with(peer_id) if self._links else None
        if link is None:
            await self._meet(peer_id, CALL_TIMEOUT)
        with peer_errors(peer_id):
            async with link.conversation(protocol) if link else self._libp2p_stream(peer_id, protocol) as channel:
                yield channel

    @asynccontextmanager
    async def _libp2p_stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        async with asyncio.timeout(OPEN_TIMEOUT):
            _, reader, writer = await self._daemon.call_binary_stream_handler(
                to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/{protocol}"
            )
        channel = Channel(peer_id, reader, writer, self.upload, self.download)
        try:
            yield channel
        finally:
            channel.close()

    async def on_stream(self, protocol: str, conversation: Conversation) -> None:
        """Have this conversation with whoever opens a stream of this protocol."""
        self._conversations[protocol] = conversation

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            channel = Channel(str(info.peer_id), reader, writer, self.upload, self.download)
            try:
                async with asyncio.timeout(CONVERSATION_TIMEOUT):
                    await conversation(channel)
            except asyncio.CancelledError:  # by close(); asyncio 3.11 logs a traceback for cancelled stream handlers
                logger.debug("stopped serving a %s stream of %s", protocol, channel.peer)
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("stream").inc()
                logger.warning("dropped a %s stream: %s", protocol, error)
            except NETWORK_ERRORS as error:
                logger.debug("a %s stream of %s broke: %r", protocol, channel.peer, error)
            except Exception:
                logger.exception("the handler of %s failed", protocol)
            finally:
                channel.close()
                self._serving.discard(task)

        await self._daemon.add_binary_stream_handler(f"{PROTOCOL_PREFIX}/{protocol}", serve)
