"""All links of this peer: making them by dialling or introduction, accepting them, and renewing broken ones."""

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

HEAD_START = 0.5  # seconds that the peer with the larger id waits to be dialled, before it dials the other peer
EAGER = 128  # number of known peers up to which links with all of them are made in advance
RETRY_FIRST, RETRY_LAST = 5.0, 60.0  # seconds between attempts to make a link: after the first failure, and at most
LINK_TIMEOUT = 15.0  # seconds that a stream waits for a link, before it is opened over libp2p
DIAL_TIMEOUT = 4.0  # seconds to connect to an endpoint, at most
CALLERS = 4
"""Conversations for calls that one peer may have open with us at once. A peer uses only one of them, but connections of
earlier ones may have broken, and we have not noticed it yet."""
UNKNOWN = 8  # connections, at most, of a peer whose heartbeat we do not know, since identities cost nothing
MORE = "more"  # name of the call that asks a peer to dial more connections, on which the caller opens conversations


@dataclass(frozen=True)
class LinkSettings:
    """The operator's settings for the links of this node."""

    port: int = 0  # TCP port at which links are accepted; 0: any free port
    relay_limit: float | None = None  # megabits a second that this node relays for others; None: it relays for no peer


class _More(Value):
    connections: int


class Links:
    """All links of this peer, and the TCP port at which other peers connect to it.

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
        self._room = raise_file_limit() // 2  # connections, at most: half of the files that the process may open
        most = max(UNKNOWN_OF_ONE_NETWORK, self._room // 2 // UNKNOWN)
        self.strangers = Strangers(most, lambda peer: self.link(peer).close())
        self._tasks: set[asyncio.Future[None]] = set()
        self._listener: Listener | None = None
        self._mapper: PortMapper | None = None
        self.arranging = Arranging(self, ask_info)

    # Starting and closing -------------------------------------------------------------------------------------
    def listen(self, hosts: Sequence[str], settings: LinkSettings) -> None:
        """Start accepting connections at these addresses. Raises: LocalNetworkError if the port cannot be used."""
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
        """Start and return a task for `work`; `close` cancels the task if it still runs."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def port(self) -> int:
        """The TCP port at which we accept connections; 0 if we accept none."""
        return self._listener.port if self._listener else 0

    def endpoints(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return our endpoints (IP address, TCP port), given our multiaddrs; none if we accept no links."""
        if not self.port:
            return ()
        mapped = [self._mapper.endpoint] if self._mapper and self._mapper.endpoint else []
        return own_endpoints(addresses, self.port, [*self.arranging.seen, *mapped])

    @property
    def handlers(self) -> dict[str, Callable[[str, bytes], Awaitable[bytes]]]:
        """The handlers of the calls by which other peers make links with us, by the call's name."""
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
        await way.dial_for_peer(way.answered, count)
        return b""

    # Links with known peers -----------------------------------------------------------------------------------
    def observe(self, contacts: Mapping[str, Contact], eagerly: bool) -> None:
        """Store the contacts of all known peers, and forget other peers. With `eagerly`, start making missing links."""
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
        return {peer: way for peer, way in self._ways.items() if way.contact}

    def tidy(self, peer: str) -> None:
        """Drop a peer's `_Way` (our data about it), unless its heartbeat is known, or it is connected or dialled."""
        way = self._ways.get(peer)
        if way and not (way.contact or way.link.is_up or way.is_busy or way.dials):
            del self._ways[peer]

    def way(self, peer: str) -> _Way:
        """Return the `_Way` of a peer (our data about it); create one without connections if there is none."""
        if peer not in self._ways:
            self._ways[peer] = _Way(self, peer)
        return self._ways[peer]

    def link(self, peer: str) -> Link:
        """Return the link with a peer, which may have no connections."""
        return self.way(peer).link

    def is_up(self, peer: str) -> bool:
        return peer in self._ways and self._ways[peer].link.is_up

    def reach_of(self, peer: str) -> Reach | None:
        """Return a peer's reach (open, relayed or none); None if no attempt to make a link has ended yet."""
        return self._ways[peer].reach if peer in self._ways else None

    def reach(self) -> dict[str, Reach]:
        """Return the reach of each known peer by peer id, without peers whose reach is not known yet."""
        return {peer: reach for peer, way in self._known.items() if (reach := way.reach) is not None}

    def sought(self) -> frozenset[str]:
        """Return the ids of known peers whose reach is unknown, because no attempt to link with them has ended."""
        known = self._known
        if len(known) > EAGER:  # in so large a swarm, links are made only when needed
            return frozenset()
        return frozenset(peer for peer, way in known.items() if way.reach is None)

    async def link_with(self, peer: str) -> Link | None:
        """Return the link with a peer; None if it is down, after trying to make it for LINK_TIMEOUT seconds at most."""
        way = self._ways.get(peer)
        if way and way.contact and not way.link.is_up and (way.is_busy or way.is_due):
            await asyncio.wait([way.make()], timeout=LINK_TIMEOUT)
        return self.link(peer) if self.is_up(peer) else None

    def prepare(self, peer: str) -> None:
        """Start making the link with a peer for later use, if the swarm is too large for links with all peers."""
        known = self._known
        if len(known) <= EAGER or peer not in known or self.is_up(peer):
            return
        is_room = sum(way.link.is_up for way in self._ways.values()) < EAGER
        if is_room and known[peer].is_due:
            known[peer].make()

    def drop_all(self) -> None:
        """Close all links and let them be made again, after this machine's network has changed."""
        self.credentials = Credentials(self._identity)  # new credentials show peers that older connections are dead
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
        """Handle a change of the connections in a peer's link: if none is left, allow a new attempt at once."""
        if not self.is_up(peer):
            self.strangers.went(peer)
            if peer in self._ways:
                self._ways[peer].forget_failures()  # the peer was reachable a moment ago, so retry at once
        self.tidy(peer)

    # Incoming connections -------------------------------------------------------------------------------------
    async def _accept(self, sock: socket.socket, hello: Hello) -> None:
        self.add(await welcome(sock, self.credentials, hello, Reach.OPEN))

    def add(self, connection: Connection) -> None:
        """Add a connection with another peer to the peer's link; close the connection if there are too many."""
        if connection.is_open and self._has_room_for(connection):
            self.link(connection.peer).add(connection)
        else:
            metrics.DROPPED.labels("connection").inc()
            connection.close()

    def _has_room_for(self, connection: Connection) -> bool:
        """Return True if a connection may be added, given the number of connections with all peers. A peer whose
        heartbeat is unknown is refused at half of the limit, or if it has UNKNOWN connections itself."""
        peer, count = connection.peer, sum(len(way.link.connections) for way in self._ways.values())
        if peer in self._known:
            return count < self._room
        if count >= self._room // 2:
            return False
        if self.is_up(peer):
            return len(self.link(peer).connections) < UNKNOWN
        return self.strangers.come(peer, network_of(connection.host), self.clock())

    async def answer(self, sender: str, name: str, payload: bytes) -> bytes:
        """Return the answer to the call `name` that `sender` has made over a link."""
        self.strangers.spoke(sender)
        return await self._answer(sender, name, payload)


class _Way:
    """State of the connection to one other peer: its contact, the link with it, and the attempts to make that link."""

    def __init__(self, links: Links, peer: str) -> None:
        self._links = links
        self.contact: Contact | None = None
        self.link = Link(peer, self.serve, self.dial_more, links.start, links.caps, lambda: links.changed(peer))
        self.answered: str | None = None  # the endpoint at which the peer last answered
        self._is_dialling_for_peer = False  # True while we dial connections on which the peer opens conversations
        self.dials = 0  # number of connections being dialled
        self._making: asyncio.Future[None] | None = None
        self._callers = 0
        self.forget_failures()

    def forget_failures(self) -> None:
        """Allow the next attempt to make the link at once, unless an attempt is running."""
        if not self.is_busy:
            self._failures, self._retry_at = 0, 0.0
            self._has_detour = False  # True if the peer answered over libp2p when no link could be made

    @property
    def reach(self) -> Reach | None:
        """The peer's reach (open, relayed or none); None if no attempt to make the link has ended yet."""
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
        """True if the pause after the last attempt to make the link is over."""
        return self._links.clock() >= self._retry_at

    async def serve(self, protocol: str, channel: Channel) -> None:
        """Handle a conversation that the peer has opened: answer its calls, or run the handler of `protocol`."""
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

    # Attempts to make the link---------------------------------------------------------------------------------
    def make(self) -> asyncio.Future[None]:
        """Start an attempt to make the link, unless one is running. Return the running attempt's future."""
        if self._making is None or self._making.done():
            self._making = self._links.start(self._try_all())
            self._making.add_done_callback(lambda _: self._links.tidy(self.link.peer))
        return self._making

    async def _try_all(self) -> None:
        """Make the link by dialling, else by an introduction; if both fail, test whether the peer answers by libp2p."""
        if self._links.me > self.link.peer:
            await self.link.wait_for(lambda: self.link.is_up, HEAD_START)  # the peer with the smaller id dials first
        contact = self.contact
        if self.link.reach is not Reach.OPEN and contact is not None:
            await self.dial_first(contact)
        if not self.link.is_up and contact is not None:
            await self._links.arranging.meet(contact)
        if self.link.is_up:
            self._failures = 0
            self._retry_at = self._links.clock() + RETRY_LAST  # at this time, a better connection is looked for
        else:
            pause = min(RETRY_LAST, RETRY_FIRST * 2**self._failures)
            self._has_detour = await self._links.is_there(self.link.peer)
            self._failures += 1
            self._retry_at = self._links.clock() + pause

    async def dial_first(self, contact: Contact) -> None:
        """Dial all of the peer's endpoints at once. If one answers, also dial a second connection, on which the peer
        opens conversations, unless there is one."""
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
        """Dial a connection for conversations that the peer opens, if the link is up without a direct one, and we have
        reached the peer by dialling before."""
        has_one = any(one.reach is Reach.OPEN and not one.is_ours for one in self.link.connections)
        if self.answered and not self._is_dialling_for_peer and self.link.is_up and not has_one:
            await self.dial_for_peer(self.answered, 1)

    async def dial_more(self, count: int) -> None:
        """Make `count` more connections on which we open conversations. Raises: PeerUnreachableError."""
        if self.link.reach is not Reach.OPEN:
            if self.contact:
                await self._links.arranging.meet(self.contact, 2 * count)
            return
        # Dial the endpoint that answered before; only if that fails, ask the peer to dial us.
        if self.answered and any(
            await asyncio.gather(*(self._connect(self.answered, is_ours=True) for _ in range(count)))
        ):
            return
        if not self.link.ours:
            raise PeerUnreachableError(self.link.peer, "it opens no connection to us, and we cannot dial it")
        await self.link.call(MORE, pack(_More(connections=count)), DIAL_TIMEOUT + HANDSHAKE_TIMEOUT)

    async def dial_for_peer(self, endpoint: str, count: int) -> None:
        """Dial up to `count` connections on which the peer opens conversations, and we do not.

        Raises: RefusalError if an earlier call of this method still runs.
        """
        if self._is_dialling_for_peer:
            raise RefusalError("connections for you are being dialled already")
        self._is_dialling_for_peer = True
        try:
            most = min(count, CONNECTIONS - len(self.link.connections) + self.link.ours)
            await asyncio.gather(*(self._connect(endpoint, is_ours=False) for _ in range(most)))
        finally:
            self._is_dialling_for_peer = False

    async def _connect(self, endpoint: str, is_ours: bool) -> bool:
        """Dial an endpoint of the peer, and add the connection to the link. Return False if the peer did not answer.
        With `is_ours`, only this side opens conversations on the connection; otherwise only the peer does."""
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
