"""All links of one peer, the ways to make them, and the remaking of broken ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, PeerUnreachableError, RefusalError
from peers.network.connection import HANDSHAKE_TIMEOUT, Connection, Credentials, greet, welcome
from peers.network.contacts import Contact, is_local, is_loopback, may_be_dialled, own_endpoints
from peers.network.data_port import LINK_INFO, UNKNOWN_OF_ONE_NETWORK, Hello, LinkInfo, Listener, Splicer, Strangers
from peers.network.introductions import INTRODUCE, MEET, Arranging, AskInfo
from peers.network.link import CALLS, CONNECTIONS, Answer, Link, Serve, answer_calls
from peers.network.own_network import network_of
from peers.network.port_mapping import PortMapper
from peers.network.sockets import dial, raise_file_limit
from peers.network.throttle import Throttle
from peers.values.identity import Identity
from peers.values.system import cancel_and_wait, start_task
from peers.values.wire import Reach, Value, pack, unpack_from

logger = logging.getLogger(__name__)

HEAD_START = 0.5  # seconds before the peer with the larger id dials, too
EAGER = 128  # peers up to which links are made before they are needed
RETRY_FIRST, RETRY_LAST = 5.0, 60.0  # seconds between attempts: after the first failure, and at most
LINK_TIMEOUT = 15.0  # seconds that a stream waits for a link, before it goes over libp2p
DIAL_TIMEOUT = 4.0  # seconds
CALLERS = 4  # conversations for calls that one peer may open to us at once: the older ones may be dead
UNKNOWN = 8  # connections of a peer without a known heartbeat, since identities cost nothing
MORE = "more"  # name of the call that asks a peer to dial so many connections on which the caller opens conversations


@dataclass(frozen=True)
class LinkSettings:
    """An operator's choices about links."""

    port: int = 0  # at which bulk connections are accepted; 0: any free one
    relay_limit: float | None = None  # megabits a second that this node relays for others; None: it relays for no peer


class _More(Value):
    connections: int


class Links:
    """All links of one peer, and the port at which others make them.

    `serve` handles a conversation that another peer opens; `answer` answers its messages. `is_there` returns whether a
    peer without a link answers over libp2p.
    """

    def __init__(
        self,
        identity: Identity,
        serve: Serve,
        answer: Answer,
        ask_info: AskInfo,
        is_there: Callable[[str], Awaitable[bool]],
        caps: Callable[[], tuple[Throttle, Throttle]],
    ) -> None:
        self._identity = identity
        self.me = identity.peer_id
        self.credentials = Credentials(identity)
        self.clock = time.monotonic
        self.serve = serve
        self._answer = answer
        self.is_there = is_there
        self.caps = caps
        self._ways: dict[str, _Way] = {}
        self._room = raise_file_limit() // 2  # connections, at most; the other half is for other files
        most = max(UNKNOWN_OF_ONE_NETWORK, self._room // 2 // UNKNOWN)
        self.strangers = Strangers(most, lambda peer: self.link(peer).close())
        self._tasks: set[asyncio.Future[None]] = set()
        self._listener: Listener | None = None
        self._mapper: PortMapper | None = None
        self.arranging = Arranging(self, ask_info)

    # Life -----------------------------------------------------------------------------------------------------
    def listen(self, hosts: Sequence[str], settings: LinkSettings) -> None:
        """Accept connections from now on. Raises: LocalNetworkError when the port cannot be used."""
        if settings.relay_limit is not None:
            self.arranging.splicer = Splicer(settings.relay_limit * 1e6 / 8, self._room // 4)
        self._listener = Listener(hosts, settings.port, self._accept, self.arranging.splicer)
        if not all(map(is_loopback, hosts)):
            self._mapper = PortMapper(self._listener.port)
            self.start(self._mapper.run())

    async def close(self) -> None:
        if self._listener:
            await self._listener.close()
        await cancel_and_wait(*self._tasks)
        for way in list(self._ways.values()):
            way.link.close()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that is cancelled when the links are closed, if it has not ended by then."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def port(self) -> int:
        """The port at which we accept connections; 0 if we accept none."""
        return self._listener.port if self._listener else 0

    def endpoints(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return the endpoints at which others may dial us, given our multiaddrs."""
        if not self.port:
            return ()
        mapped = [self._mapper.endpoint] if self._mapper and self._mapper.endpoint else []
        return own_endpoints(addresses, self.port, [*self.arranging.seen, *mapped])

    @property
    def handlers(self) -> dict[str, Callable[[str, bytes], Awaitable[bytes]]]:
        """The handlers of the calls by which links are made, by name."""
        return {
            LINK_INFO: self._tell_info,
            MORE: self._on_more,
            INTRODUCE: self.arranging.on_introduce,
            MEET: self.arranging.on_meet,
        }

    async def _tell_info(self, sender: str, payload: bytes) -> bytes:
        return pack(LinkInfo(port=self.port))

    async def _on_more(self, sender: str, payload: bytes) -> bytes:
        count, way = unpack_from(sender, _More, payload).connections, self._ways.get(sender)
        if way is None or way.answered is None or count < 1:
            raise RefusalError("no endpoint of yours has answered here; dial the connections yourself")
        await way.give(way.answered, count)
        return b""

    # Peers ----------------------------------------------------------------------------------------------------
    def observe(self, contacts: Mapping[str, Contact], eagerly: bool) -> None:
        """Take in the contacts of the known peers, and `eagerly` make links with them."""
        for peer, contact in contacts.items():
            self.strangers.went(peer)
            if peer != self.me and self.way(peer).contact != contact:
                self.way(peer).contact = contact
                self.way(peer).forget_failures()
        known = self._known
        for peer in known.keys() - contacts.keys():
            known.pop(peer).contact = None
            self.tidy(peer)
        if eagerly and len(known) <= EAGER:
            for peer, way in known.items():
                if way.link.reach is Reach.OPEN or (way.link.is_up and not may_be_dialled(contacts[peer])):
                    self.start(way.complete())
                elif way.is_due:
                    way.make()

    @property
    def _known(self) -> dict[str, _Way]:
        """The ways to peers with a known heartbeat."""
        return {peer: way for peer, way in self._ways.items() if way.contact}

    def tidy(self, peer: str) -> None:
        """Forget a peer, unless its heartbeat is known or it is connected."""
        way = self._ways.get(peer)
        if way and not (way.contact or way.link.is_up or way.is_busy or way.dials):
            del self._ways[peer]

    def way(self, peer: str) -> _Way:
        """Return the way to a peer, which may have no link yet."""
        if peer not in self._ways:
            self._ways[peer] = _Way(self, peer)
        return self._ways[peer]

    def link(self, peer: str) -> Link:
        """Return the link with a peer, which may be down."""
        return self.way(peer).link

    def is_up(self, peer: str) -> bool:
        return peer in self._ways and self._ways[peer].link.is_up

    def reach_of(self, peer: str) -> Reach | None:
        """Return the reach of a peer; None if it is not known yet."""
        return self._ways[peer].reach if peer in self._ways else None

    def reach(self) -> dict[str, Reach]:
        """Return the reach of the known peers, as far as it was found out."""
        return {peer: reach for peer, way in self._known.items() if (reach := way.reach) is not None}

    def sought(self) -> frozenset[str]:
        """Return the known peers whose reach is not found out yet."""
        known = self._known
        if len(known) > EAGER:  # links are then made only when needed
            return frozenset()
        return frozenset(peer for peer, way in known.items() if way.reach is None)

    async def link_with(self, peer: str) -> Link | None:
        """Return the link with a peer, and make it first if it is down; None if there is no way."""
        way = self._ways.get(peer)
        if way and way.contact and not way.link.is_up and (way.is_busy or way.is_due):
            await asyncio.wait([way.make()], timeout=LINK_TIMEOUT)
        return self.link(peer) if self.is_up(peer) else None

    def prepare(self, peer: str) -> None:
        """Begin to make the link with a peer for later use, in a swarm too large for links with all peers."""
        known = self._known
        if len(known) <= EAGER or peer not in known or self.is_up(peer):
            return
        is_room = sum(way.link.is_up for way in self._ways.values()) < EAGER
        if is_room and known[peer].is_due:
            known[peer].make()

    def drop_all(self) -> None:
        """Close all links and dial anew, since our network has changed."""
        self.credentials = Credentials(self._identity)  # the others see the change by the new certificate
        for peer, way in list(self._ways.items()):
            if way.link.is_up:
                self.arranging.left.add(peer)
            way.answered = None
            way.link.close()
            way.forget_failures()
        self.arranging.look_again()
        if self._mapper:
            self._mapper.look_again()

    def changed(self, peer: str) -> None:
        """Take in that the link with a peer has gained or lost connections."""
        if not self.is_up(peer):
            self.strangers.went(peer)
            if peer in self._ways:
                self._ways[peer].forget_failures()  # the peer was there a moment ago, so try at once
        self.tidy(peer)

    # Incoming connections -------------------------------------------------------------------------------------
    async def _accept(self, sock: socket.socket, hello: Hello) -> None:
        self.add(await welcome(sock, self.credentials, hello, Reach.OPEN))

    def add(self, connection: Connection) -> None:
        """Use a connection that another peer has made or asked for, if there is room."""
        if connection.is_open and self._has_room_for(connection):
            self.link(connection.peer).add(connection)
        else:
            metrics.DROPPED.labels("connection").inc()
            connection.close()

    def _has_room_for(self, connection: Connection) -> bool:
        """Return whether there is room for one more connection. Peers without a known heartbeat get half of it."""
        peer, count = connection.peer, sum(len(way.link.connections) for way in self._ways.values())
        if peer in self._known:
            return count < self._room
        if count >= self._room // 2:
            return False
        if self.is_up(peer):
            return len(self.link(peer).connections) < UNKNOWN
        return self.strangers.come(peer, network_of(connection.host), self.clock())

    async def answer(self, sender: str, name: str, payload: bytes) -> bytes:
        """Answer a message that has come over a link."""
        self.strangers.spoke(sender)
        return await self._answer(sender, name, payload)


class _Way:
    """The way to one other peer: its contact, the link with it, and the attempts to make one."""

    def __init__(self, links: Links, peer: str) -> None:
        self._links = links
        self.contact: Contact | None = None
        self.link = Link(peer, self.serve, self.dial_more, links.start, links.caps, lambda: links.changed(peer))
        self.answered: str | None = None  # the endpoint at which the peer has answered
        self._is_giving = False  # whether connections for the peer are being dialled
        self.dials = 0  # under way
        self._making: asyncio.Future[None] | None = None
        self._callers = 0
        self.forget_failures()

    def forget_failures(self) -> None:
        """Allow the next attempt at once."""
        if not self.is_busy:
            self._failures, self._retry_at = 0, 0.0
            self._has_detour = False  # whether the peer answered over libp2p

    @property
    def reach(self) -> Reach | None:
        """The reach of the peer; None if it is not known yet."""
        if self.link.is_up:
            return self.link.reach
        if not self._failures:
            return None
        return Reach.RELAYED if self._has_detour else Reach.NONE

    @property
    def is_busy(self) -> bool:
        return self._making is not None and not self._making.done()

    @property
    def is_due(self) -> bool:
        """True when the pause after the last attempt is over."""
        return self._links.clock() >= self._retry_at

    async def serve(self, protocol: str, channel: Channel) -> None:
        """Handle a conversation that the peer has opened."""
        self._links.strangers.spoke(channel.peer)
        if protocol != CALLS:
            await self._links.serve(protocol, channel)
            return
        if self._callers >= CALLERS:
            raise RemoteProtocolError(channel.peer, f"it has opened more than {CALLERS} conversations for calls")
        self._callers += 1
        try:
            await answer_calls(channel, self._links.answer)
        finally:
            self._callers -= 1

    # Making the link ------------------------------------------------------------------------------------------
    def make(self) -> asyncio.Future[None]:
        """Start making the link, unless that is under way. Return the attempt."""
        if self._making is None or self._making.done():
            self._making = self._links.start(self._try_all())
            self._making.add_done_callback(lambda _: self._links.tidy(self.link.peer))
        return self._making

    async def _try_all(self) -> None:
        """Try every way to the peer, from best to worst."""
        if self._links.me > self.link.peer:
            await self.link.wait_for(lambda: self.link.is_up, HEAD_START)  # the other side dials first
        contact = self.contact
        if self.link.reach is not Reach.OPEN and contact is not None:
            await self.dial_first(contact)
        if not self.link.is_up and contact is not None:
            await self._links.arranging.meet(contact)
        if self.link.is_up:
            self._failures = 0
            self._retry_at = self._links.clock() + RETRY_LAST  # then a better way is looked for
        else:
            pause = min(RETRY_LAST, RETRY_FIRST * 2**self._failures)
            self._has_detour = await self._links.is_there(self.link.peer)
            self._failures += 1
            self._retry_at = self._links.clock() + pause

    async def dial_first(self, contact: Contact) -> None:
        """Dial all of the peer's endpoints at once. At the first that answers, make a connection for either side."""
        local = not self._links.port or all(map(is_local, contact.endpoints))
        endpoints = [one for one in contact.endpoints if local or not is_local(one)]
        pending = {start_task(self._connect(one, is_ours=True)) for one in endpoints}
        has_answered = False
        try:
            while pending and self.link.reach is not Reach.OPEN:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                has_answered = has_answered or any(attempt.result() for attempt in done)
        finally:
            await cancel_and_wait(*pending)
        if has_answered:
            await self.complete()

    async def complete(self) -> None:
        """Open a connection on which the peer can start conversations, unless it has one or its endpoint is unknown."""
        has_one = any(one.reach is Reach.OPEN and not one.is_ours for one in self.link.connections)
        if self.answered and not self._is_giving and self.link.is_up and not has_one:
            await self.give(self.answered, 1)

    async def dial_more(self, count: int) -> None:
        """Make so many more connections on which we open conversations. Raises: PeerUnreachableError."""
        if self.link.reach is not Reach.OPEN:
            if self.contact:
                await self._links.arranging.meet(self.contact, 2 * count)
            return
        # A network that was down for a moment breaks no connection, so the endpoint may answer again.
        if self.answered and any(
            await asyncio.gather(*(self._connect(self.answered, is_ours=True) for _ in range(count)))
        ):
            return
        if not self.link.ours:
            raise PeerUnreachableError(self.link.peer, "it opens no connection to us, and we cannot dial it")
        await self.link.call(MORE, pack(_More(connections=count)), DIAL_TIMEOUT + HANDSHAKE_TIMEOUT)

    async def give(self, endpoint: str, count: int) -> None:
        """Dial connections on which the peer opens conversations. Raises: RefusalError when some are being dialled."""
        if self._is_giving:
            raise RefusalError("connections for you are being dialled already")
        self._is_giving = True
        try:
            most = min(count, CONNECTIONS - len(self.link.connections) + self.link.ours)
            await asyncio.gather(*(self._connect(endpoint, is_ours=False) for _ in range(most)))
        finally:
            self._is_giving = False

    async def _connect(self, endpoint: str, is_ours: bool) -> bool:
        """Add a connection to the link. Return whether the peer answers at this endpoint."""
        self.dials += 1
        try:
            sock = await dial(endpoint, DIAL_TIMEOUT)
            connection = await greet(sock, self._links.credentials, self.link.peer, is_ours, Reach.OPEN)
            self.answered = endpoint
            self.link.add(connection)
        except (OSError, RemoteProtocolError) as error:
            logger.debug("no connection to %s at %s: %s", self.link.peer, endpoint, error)
            return False
        finally:
            self.dials -= 1
            self._links.tidy(self.link.peer)
        return True
