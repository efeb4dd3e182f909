"""Introductions: a node that two peers can dial helps them to connect if they cannot dial each other.

    A ── _Introduce(B, where I am seen) ──► node ── _MeetingRequest(A, where it is seen) ──► B
    A ◄──── _Introduced(where B is seen) ── node ◄── where I am seen ────────────────────── B

Each learns the endpoints at which the node sees the other. Then both dial at once, each from these ports of its own. So
each router takes the other peer's packets for answers (hole punching). If a router uses another port for each
connection, that fails; then the node joins two connections that the peers dial to it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.connection import greet, welcome
from peers.network.contacts import Contact, host_of, public_only
from peers.network.daemon import peer_id_of
from peers.network.data_port import (
    MEETING_CONNECTIONS,
    Hello,
    LinkInfo,
    Splice,
    Splicer,
    Token,
    pack_opening,
    probe,
    read_opening,
)
from peers.network.sockets import can_dial, closed_on_failure, dial, endpoint_of, parse_endpoint
from peers.presence.heartbeat import Endpoint
from peers.values.wire import Count, PeerId, Reach, Value, pack, unpack_from

if TYPE_CHECKING:
    from peers.network.links import Links

logger = logging.getLogger(__name__)

CONNECTIONS = 2  # connections made by one introduction: one for the streams of each side
PUNCH_TIMEOUT = 4.0  # seconds of hole punching, at most
ATTEMPT_TIMEOUT = 1.5  # seconds for one dial of hole punching; repeated, since a SYN that arrives too early is lost
SPLICE_TIMEOUT = 10.0  # seconds to connect to a relay, at most
HELLO_TIMEOUT = 10.0  # seconds to wait for the other peer's Hello, at most
REFUSED_PAUSE = 0.25  # seconds before a refused port is dialled again: the other peer may not have opened its port yet
# Error numbers of addresses that this machine cannot dial, such as an IPv6 address if it has only IPv4.
NO_ROUTE = (errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

Endpoints = Annotated[tuple[Endpoint, ...], Field(max_length=MEETING_CONNECTIONS)]

INTRODUCE, MEET = "introduce", "meet"  # names of the calls: from a peer to a node, and from the node to the other peer
CALL_TIMEOUT = 20.0  # seconds for a node to introduce us to a peer; the node waits half as long for that peer's answer
MEETING_TIMEOUT = 10.0  # seconds to wait for the other peer to request an introduction
LOOK_INTERVAL = 15.0  # seconds between two checks of the nodes that introduce us
MEETINGS = 32  # maximum number of peers to which we connect at the same time because they asked to be introduced to us
INTRODUCING = 3  # nodes that a heartbeat names as introducing its peer, at most
KNOWN = 64  # remembered nodes that introduce us or other peers, at most

AskInfo = Callable[[str, str], Awaitable[LinkInfo]]
"""(peer id, multiaddr) -> the node's LinkInfo, fetched over libp2p. Raises: PeerUnreachableError."""


class _Introduce(Value):
    """A request to a node to introduce the caller, which the node sees at `endpoints`, to the peer `to`."""

    to: PeerId
    endpoints: Endpoints
    connections: Count


class _MeetingRequest(Value):
    """A node's request to connect with `peer`, which the node sees at `endpoints`. The answer is `_Introduced`."""

    peer: PeerId
    endpoints: Endpoints
    connections: Count
    token: Token | None


class _Introduced(Value):
    """The answer to `_MeetingRequest`: the endpoints of the peer that answers. The node passes them on as its answer to
    `_Introduce`, and adds a token if it relays."""

    endpoints: Endpoints
    token: Token | None = None


@dataclass
class _Node:
    """A node that introduces peers to each other, at one of its addresses."""

    peer: str
    address: str
    endpoint: str  # host and port of the node's data port
    is_reached: bool = False  # True once this endpoint could be dialled, not only another endpoint of the node
    seen: tuple[str, ...] | None = None
    """Endpoints at which it could dial our data port; None before it has answered."""


class Arranging:
    """The part of `Links` that finds introducing nodes, requests and accepts introductions, and introduces other peers.

    Any peer can claim a node of any id at any address, so a node's addresses are kept apart from each other.
    """

    def __init__(self, links: Links, ask_info: AskInfo) -> None:
        self._links = links
        self._ask_info = ask_info
        self.splicer: Splicer | None = None  # joins other peers' connections; None if this node does not relay
        self._known: dict[str, _Node] = {}  # nodes of the invite and of other peers' heartbeats, by address
        self._ours: dict[str, _Node] = {}  # nodes that introduce us, by address
        self.volunteers: tuple[str, ...] = ()
        """Multiaddrs of volunteers that can introduce us, too, since bootstrap nodes come and go."""
        self._changed = asyncio.Event()
        self._meetings: dict[str, asyncio.Future[None]] = {}
        self.left: set[str] = set()
        """Peers whose links we closed when our network changed. They do not know, so we must ask to be introduced."""

    # Nodes that introduce us ----------------------------------------------------------------------------------
    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self._ours.values() if self._links.is_up(node.peer))[:INTRODUCING]

    @property
    def introducers(self) -> tuple[str, ...]:
        """The endpoints (host and port) of the nodes that introduce us to other peers, and whose link is up."""
        return tuple(node.endpoint for node in self._ours.values() if self._links.is_up(node.peer))

    @property
    def seen(self) -> tuple[str, ...]:
        """The endpoints at which nodes have reached our own data port."""
        return tuple(dict.fromkeys(endpoint for node in self._ours.values() for endpoint in node.seen or ()))

    def look_again(self) -> None:
        """Make `keep` check again which nodes we reach, and which of our endpoints they reach, because our network
        has changed."""
        for node in (*self._known.values(), *self._ours.values()):
            node.is_reached, node.seen = False, None
        self._changed.set()

    async def keep(self, addresses: Sequence[str]) -> None:
        """Keep a link with the node at each of these addresses, and ask it to probe our data port, until cancelled."""
        while True:
            self._changed.clear()
            looks = (self._greet_node(address) for address in dict.fromkeys((*addresses, *self.volunteers)))
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("cannot check a node that introduces peers", exc_info=outcome)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._changed.wait()

    async def _greet_node(self, address: str) -> None:
        node, port = await self._find(address), self._links.port
        if node is None or node.peer == self._links.me:
            return
        was_up = self._links.is_up(node.peer)
        if not await self._is_linked(node):
            return
        if not was_up:
            node.seen = None
        self._ours[address] = node
        await self._links.way(node.peer).complete()
        if node.seen is not None or not port:
            return
        try:
            seen = await probe(node.endpoint, (port,))
        except (OSError, RemoteProtocolError) as error:
            logger.debug("%s does not answer a probe of our address: %s", address, error)
        else:
            node.seen = (endpoint_of(parse_endpoint(seen.endpoint)[0], port),) if port in seen.open else ()

    async def _find(self, address: str) -> _Node | None:
        """Return the node at a multiaddr; None if the node does not answer or has no data port."""
        if address in self._known:
            return self._known[address]
        host, peer = host_of(address), peer_id_of(address)
        try:
            info = await self._ask_info(peer, address)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s does not name its data port: %s", address, error)
            return None
        if not host or not 0 < info.port < 65536:
            return None
        if len(self._known) >= KNOWN:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(address, _Node(peer, address, endpoint_of(host, info.port)))

    async def _is_linked(self, node: _Node) -> bool:
        """Link with a node, unless a link is up. Return True if the link is up and the node's endpoint can be dialled.

        A node with IPv4 and IPv6 has two endpoints: its link may use one of them while the other is out of reach.
        """
        if not self._links.is_up(node.peer):
            await self._links.way(node.peer).dial_first(Contact(node.peer, (node.endpoint,)))
        if self._links.is_up(node.peer) and not node.is_reached:
            node.is_reached = await can_dial(node.endpoint)
        if self._links.is_up(node.peer) and node.is_reached:
            return True
        self._known.pop(node.address, None)  # forgotten, so that `_find` asks the node again
        self._ours.pop(node.address, None)
        return False

    # Introductions that we request ----------------------------------------------------------------------------
    async def meet(self, contact: Contact, connections: int = CONNECTIONS) -> None:
        """Connect to a peer through a node that introduces that peer or us. The peer with the smaller id requests the
        introduction; the other requests one only if it has waited in vain."""
        meeting = self._meetings.get(contact.peer)
        if meeting is not None:
            await asyncio.wait([meeting])
            return
        begins = self._links.me < contact.peer or contact.peer in self.left
        self.left.discard(contact.peer)
        if not begins and not self._links.is_up(contact.peer):
            link = self._links.link(contact.peer)
            await link.wait_for(lambda: link.is_up, MEETING_TIMEOUT)
            if link.is_up:
                return
        for address in dict.fromkeys((*contact.relays, *self.addresses)):
            node = await self._find(address)
            if node is None or not await self._is_linked(node):
                continue
            try:
                await self._meet_through(node, contact.peer, min(connections, MEETING_CONNECTIONS))
            except (PeerUnreachableError, RemoteProtocolError, OSError) as error:
                logger.debug("%s does not introduce us to %s: %s", address, contact.peer, error)
                continue
            if self._links.is_up(contact.peer):
                return

    async def _meet_through(self, node: _Node, peer: str, connections: int) -> None:
        """Connect to `peer` by one node's introduction. Raises: PeerUnreachableError, RemoteProtocolError, OSError."""
        is_relayed = self._links.is_up(peer) and self._links.reach_of(peer) is Reach.RELAYED
        # With a relayed link, hole punching has failed before and would cost seconds again, so no ports are opened.
        ports, seen = await _look(node.endpoint, 0 if is_relayed else connections)
        request = _Introduce(to=peer, endpoints=seen, connections=connections)
        answer = await self._links.link(node.peer).call(INTRODUCE, pack(request), CALL_TIMEOUT)
        introduced = unpack_from(node.peer, _Introduced, answer)
        await self._connect_both(peer, ports, introduced.endpoints, node.endpoint, introduced.token, connections)

    # Introductions that others request ------------------------------------------------------------------------
    async def on_meet(self, sender: str, payload: bytes) -> bytes:
        """Start connecting to the peer that a node introduces to us. Return our own endpoints. Raises: RefusalError."""
        meeting = unpack_from(sender, _MeetingRequest, payload)
        node = next((node for node in self._ours.values() if node.peer == sender), None)
        if node is None:
            raise RefusalError("we did not ask you to introduce us")
        if meeting.peer in self._meetings or len(self._meetings) >= MEETINGS:
            raise RefusalError("the peer is being met already, or too many are")
        connections = min(meeting.connections, MEETING_CONNECTIONS)
        is_met = asyncio.get_running_loop().create_future()
        is_met.add_done_callback(lambda _: self._meetings.pop(meeting.peer))
        self._meetings[meeting.peer] = is_met
        try:
            ports, seen = await _look(node.endpoint, connections if meeting.endpoints else 0)
        except BaseException as error:
            is_met.set_result(None)
            if isinstance(error, OSError | RemoteProtocolError):
                raise RefusalError(f"our own endpoints are not known: {error}") from error
            raise
        endpoints, token = meeting.endpoints, meeting.token
        connecting = self._connect_both(meeting.peer, ports, endpoints, node.endpoint, token, connections)
        self._links.start(connecting).add_done_callback(lambda _: is_met.set_result(None))
        return pack(_Introduced(endpoints=seen))

    # Introducing two other peers ------------------------------------------------------------------------------
    async def on_introduce(self, sender: str, payload: bytes) -> bytes:
        """Introduce the sender and another peer, both connected to this node: send the endpoints of each to the other.
        An endpoint is left out if its owner is not connected to this node from the endpoint's host."""
        request = unpack_from(sender, _Introduce, payload)
        for peer in (sender, request.to):
            if request.to == sender or not self._links.is_up(peer):
                raise RefusalError(f"{peer} is not connected here")
        token = self.splicer.expect(sender) if self.splicer else None
        endpoints = self._seen_here(sender, request.endpoints)
        meeting = _MeetingRequest(peer=sender, endpoints=endpoints, connections=request.connections, token=token)
        try:
            answer = await self._links.link(request.to).call(MEET, pack(meeting), CALL_TIMEOUT / 2)
            theirs = unpack_from(request.to, _Introduced, answer)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            if self.splicer and token:
                self.splicer.cancel(token)
            raise RefusalError(f"{request.to} does not answer the introduction: {error}") from error
        return pack(_Introduced(endpoints=self._seen_here(request.to, theirs.endpoints), token=token))

    def _seen_here(self, peer: str, endpoints: Sequence[str]) -> tuple[str, ...]:
        """Return those of the `endpoints` that are at hosts from which the peer is connected to this node."""
        hosts = {connection.host for connection in self._links.link(peer).connections}
        return tuple(endpoint for endpoint in endpoints if parse_endpoint(endpoint)[0] in hosts)

    # Simultaneous dialling ------------------------------------------------------------------------------------
    async def _connect_both(
        self, peer: str, ports: Sequence[int], theirs: Sequence[str], node: str, token: bytes | None, connections: int
    ) -> None:
        """Connect to a peer that dials us at the same time: by hole punching; if that fails, by the relay at `node`."""
        pairs = zip(ports, public_only(theirs, node), strict=False)
        attempts = (self._dial_at_once(peer, port, endpoint, number) for number, (port, endpoint) in enumerate(pairs))
        if not any(await asyncio.gather(*attempts)) and token is not None:
            numbers = range(connections)
            await asyncio.gather(*(self._splice(peer, node, Splice(token=token, number=number)) for number in numbers))

    async def _dial_at_once(self, peer: str, port: int, endpoint: str, number: int) -> bool:
        """Dial an endpoint from `port` until both routers let a connection through, for PUNCH_TIMEOUT seconds at most.
        Return True on success. The connection's `number` decides which end opens conversations on it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PUNCH_TIMEOUT
        while loop.time() < end:
            try:
                sock = await dial(endpoint, ATTEMPT_TIMEOUT, port)
            except OSError as error:
                logger.debug("no way yet from port %d to %s at %s: %s", port, peer, endpoint, error)
                if error.errno in NO_ROUTE:
                    return False
                if not isinstance(error, TimeoutError):  # refused at once: the other peer does not dial yet
                    await asyncio.sleep(REFUSED_PAUSE)
                continue
            return await self._begin(sock, peer, number, Reach.PUNCHED)
        return False

    async def _splice(self, peer: str, node: str, opening: Splice) -> None:
        try:
            sock = await dial(node, SPLICE_TIMEOUT)
            with closed_on_failure(sock):
                await asyncio.get_running_loop().sock_sendall(sock, pack_opening(opening))
        except OSError as error:
            logger.debug("no relay to %s at %s: %s", peer, node, error)
        else:
            await self._begin(sock, peer, opening.number, Reach.RELAYED)

    async def _begin(self, sock: socket.socket, peer: str, number: int, reach: Reach) -> bool:
        """Make a TLS connection to `peer` on a socket: both ends have dialled each other, or a relay. The end with the
        smaller peer id sends the Hello. It also opens the conversations if the connection's `number` is even; if it is
        odd, the other end opens them. Return True on success."""
        try:
            if self._links.me < peer:
                connection = await greet(sock, self._links.credentials, peer, is_ours=number % 2 == 0, reach=reach)
            else:
                with closed_on_failure(sock):
                    async with asyncio.timeout(HELLO_TIMEOUT):
                        opening = await read_opening(sock, peer)
                    if not isinstance(opening, Hello):
                        raise RemoteProtocolError(peer, "its connection does not begin with a greeting")
                connection = await welcome(sock, self._links.credentials, opening, reach)
            if connection.peer != peer:
                connection.close()
                raise RemoteProtocolError(connection.peer, f"it answered instead of {peer}")
        except (OSError, RemoteProtocolError) as error:
            logger.debug("no %s connection with %s: %r", reach, peer, error)
            return False
        self._links.add(connection)
        return True


async def _look(node: str, count: int) -> tuple[Sequence[int], tuple[str, ...]]:
    """Return `count` free local ports, and the endpoints at which a node sees connections from these ports.

    Raises: OSError, RemoteProtocolError.
    """
    with ExitStack() as stack:  # all ports are bound at the same time, so that they differ
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("", 0))
        ports = [sock.getsockname()[1] for sock in socks]
    seen = await asyncio.gather(*(probe(node, local_port=port) for port in ports))
    return ports, tuple(one.endpoint for one in seen)
