"""Introductions of peers that can't dial each other: a node that both can dial tells each where the other is seen.

    A ── _Introduce(B, where I am seen) ──► node ── _Meeting(A, where it is seen) ──► B
    A ◄──── _Introduced(where B is seen) ── node ◄── where I am seen ─────────────── B

Then both dial at once, each from the ports at which the node saw it: to their routers it looks as if they had asked for
what comes in. Where a router gives every connection another port, that fails, and the node joins two connections that
they dial out to it.
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

CONNECTIONS = 2  # that two peers make when they meet, one for either; more by meeting again
PUNCH_TIMEOUT = 4.0  # seconds
ATTEMPT_TIMEOUT = 1.5  # seconds of one dial of those: a SYN that came too early is lost
SPLICE_TIMEOUT = 10.0  # seconds
HELLO_TIMEOUT = 10.0  # seconds
REFUSED_PAUSE = 0.25  # seconds before a port that nobody opens yet is dialled again
NO_ROUTE = (errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as IPv6 where there is none

Places = Annotated[tuple[Endpoint, ...], Field(max_length=MEETING_CONNECTIONS)]

INTRODUCE, MEET = "introduce", "meet"  # names of the calls
CALL_TIMEOUT = 20.0  # seconds; the other one probes meanwhile
MEETING_TIMEOUT = 10.0  # seconds that the other one has to begin
LOOK_INTERVAL = 15.0  # seconds between two looks at our relays
MEETINGS = 32  # that we take part in at once because others want them
INTRODUCING = 3  # nodes that introduce us
KNOWN = 64  # nodes at most, ours and others

AskInfo = Callable[[str, str], Awaitable[LinkInfo]]
"""(peer id, multiaddr) -> what that node says of itself, over libp2p. Raises: PeerUnreachableError."""


class _Introduce(Value):
    """Asked of a node: bring me together with this peer."""

    to: PeerId
    endpoints: Places
    connections: Count


class _Meeting(Value):
    """Told by a node: this peer wants to meet you, and is seen there. The answer is `_Introduced`."""

    peer: PeerId
    endpoints: Places
    connections: Count
    token: Token | None


class _Introduced(Value):
    """The answer to either: where the other one is seen, and from a node that relays the token to be spliced with."""

    endpoints: Places
    token: Token | None = None


@dataclass
class _Node:
    """A node that introduces peers."""

    peer: str
    address: str
    endpoint: str  # its data port
    is_reached: bool = False  # whether we have had a connection to that port, and not to another one of the node's
    seen: tuple[str, ...] | None = None
    """Endpoints at which it could dial our data port; None: it has not been asked, or has not answered."""


class Arranging:
    """The part of `Links` that goes through third parties: our nodes, both ends of an introduction, and our own.

    Anybody can name a node of any id at any address, so a node's addresses have nothing to do with each other.
    """

    def __init__(self, links: Links, ask_info: AskInfo) -> None:
        self._links = links
        self._ask_info = ask_info
        self.splicer: Splicer | None = None  # relays for others, if this node does
        self._known: dict[str, _Node] = {}  # by address: those of the invite, and others that peers are introduced by
        self._ours: dict[str, _Node] = {}  # by address
        self.volunteers: tuple[str, ...] = ()
        """Multiaddrs of volunteers that can introduce us, too: bootstrap nodes come and go."""
        self._changed = asyncio.Event()
        self._meetings: dict[str, asyncio.Future[None]] = {}
        self.left: set[str] = set()
        """Peers whose links we have closed because of a new network: they don't know, and begin nothing."""

    # Nodes that introduce us ----------------------------------------------------------------------------------
    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self._ours.values() if self._links.is_up(node.peer))[:INTRODUCING]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Data ports of the nodes that introduce us."""
        return tuple(node.endpoint for node in self._ours.values() if self._links.is_up(node.peer))

    @property
    def seen(self) -> tuple[str, ...]:
        """Endpoints at which a node has reached our data port."""
        return tuple(dict.fromkeys(endpoint for node in self._ours.values() for endpoint in node.seen or ()))

    def look_again(self) -> None:
        """Find out anew which nodes we reach, and how they see us: our network has changed."""
        for node in (*self._known.values(), *self._ours.values()):
            node.is_reached, node.seen = False, None
        self._changed.set()

    async def keep(self, addresses: Sequence[str]) -> None:
        """Keep a link with each of these nodes, and know how they see us."""
        while True:
            self._changed.clear()
            looks = (self._greet_node(address) for address in dict.fromkeys((*addresses, *self.volunteers)))
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a look at a relay failed", exc_info=outcome)
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
            logger.debug("%s does not say how it sees us: %s", address, error)
        else:
            node.seen = (endpoint_of(parse_endpoint(seen.endpoint)[0], port),) if port in seen.open else ()

    async def _find(self, address: str) -> _Node | None:
        """Return the node at a multiaddr; None when it does not answer, or has no data port."""
        if address in self._known:
            return self._known[address]
        host, peer = host_of(address), peer_id_of(address)
        try:
            info = await self._ask_info(peer, address)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            logger.debug("%s says nothing of its data port: %s", address, error)
            return None
        if not host or not 0 < info.port < 65536:
            return None
        if len(self._known) >= KNOWN:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(address, _Node(peer, address, endpoint_of(host, info.port)))

    async def _is_linked(self, node: _Node) -> bool:
        """Return whether a link with the node is up, made now if it was not, and its endpoint is one that we can dial.

        A node with IPv4 and IPv6 has two endpoints: its link may be up by one of them while the other is out of reach.
        """
        if not self._links.is_up(node.peer):
            await self._links.way(node.peer).dial_first(Contact(node.peer, (node.endpoint,)))
        if self._links.is_up(node.peer) and not node.is_reached:
            node.is_reached = await can_dial(node.endpoint)
        if self._links.is_up(node.peer) and node.is_reached:
            return True
        self._known.pop(node.address, None)  # it is asked again next time
        self._ours.pop(node.address, None)
        return False

    # Who wants to meet ----------------------------------------------------------------------------------------
    async def meet(self, contact: Contact, connections: int = CONNECTIONS) -> None:
        """Meet a peer through a node that introduces it, or us. One of the two begins: the one with the smaller id."""
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
                logger.debug("%s does not bring us together with %s: %s", address, contact.peer, error)
                continue
            if self._links.is_up(contact.peer):
                return

    async def _meet_through(self, node: _Node, peer: str, connections: int) -> None:
        """Raises: PeerUnreachableError, RemoteProtocolError, OSError."""
        is_relayed = self._links.is_up(peer) and self._links.reach_of(peer) is Reach.RELAYED
        # Where dialling at once has failed before, it would cost each widening of the link seconds.
        ports, seen = await _look(node.endpoint, 0 if is_relayed else connections)
        asked = _Introduce(to=peer, endpoints=seen, connections=connections)
        answer = await self._links.link(node.peer).call(INTRODUCE, pack(asked), CALL_TIMEOUT)
        introduced = unpack_from(node.peer, _Introduced, answer)
        await self._go(peer, ports, introduced.endpoints, node.endpoint, introduced.token, connections)

    # Who is asked to meet -------------------------------------------------------------------------------------
    async def on_meet(self, sender: str, payload: bytes) -> bytes:
        """Meet the peer that a node brings together with us."""
        meeting = unpack_from(sender, _Meeting, payload)
        node = next((node for node in self._ours.values() if node.peer == sender), None)
        if node is None:
            raise RefusalError("we did not ask you to introduce us")
        if meeting.peer in self._meetings or len(self._meetings) >= MEETINGS:
            raise RefusalError("it is being met already")
        connections = min(meeting.connections, MEETING_CONNECTIONS)
        is_met = asyncio.get_running_loop().create_future()
        is_met.add_done_callback(lambda _: self._meetings.pop(meeting.peer))
        self._meetings[meeting.peer] = is_met
        try:
            ports, seen = await _look(node.endpoint, connections if meeting.endpoints else 0)
        except BaseException as error:
            is_met.set_result(None)
            if isinstance(error, OSError | RemoteProtocolError):
                raise RefusalError(f"we do not know where we are seen: {error}") from error
            raise
        going = self._go(meeting.peer, ports, meeting.endpoints, node.endpoint, meeting.token, connections)
        self._links.start(going).add_done_callback(lambda _: is_met.set_result(None))
        return pack(_Introduced(endpoints=seen))

    # The node that brings two together ------------------------------------------------------------------------
    async def on_introduce(self, sender: str, payload: bytes) -> bytes:
        """Bring two peers together that are connected here, and only at addresses where we see them."""
        asked = unpack_from(sender, _Introduce, payload)
        for peer in (sender, asked.to):
            if asked.to == sender or not self._links.is_up(peer):
                raise RefusalError(f"{peer} is not connected here")
        token = self.splicer.expect(sender) if self.splicer else None
        places = self._seen_here(sender, asked.endpoints)
        meeting = _Meeting(peer=sender, endpoints=places, connections=asked.connections, token=token)
        try:
            answer = await self._links.link(asked.to).call(MEET, pack(meeting), CALL_TIMEOUT / 2)
            theirs = unpack_from(asked.to, _Introduced, answer)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            if self.splicer and token:
                self.splicer.cancel(token)
            raise RefusalError(f"{asked.to} does not come: {error}") from error
        return pack(_Introduced(endpoints=self._seen_here(asked.to, theirs.endpoints), token=token))

    def _seen_here(self, peer: str, endpoints: Sequence[str]) -> tuple[str, ...]:
        """Return those of the endpoints that are at an address from which the peer is connected here."""
        hosts = {connection.host for connection in self._links.link(peer).connections}
        return tuple(endpoint for endpoint in endpoints if parse_endpoint(endpoint)[0] in hosts)

    # Both dial ------------------------------------------------------------------------------------------------
    async def _go(
        self, peer: str, ports: Sequence[int], theirs: Sequence[str], node: str, token: bytes | None, connections: int
    ) -> None:
        """Make connections with a peer that does the same now. `node` is the endpoint of the one that introduced us."""
        pairs = zip(ports, public_only(theirs, node), strict=False)
        tries = (self._dial_at_once(peer, port, endpoint, place) for place, (port, endpoint) in enumerate(pairs))
        if not any(await asyncio.gather(*tries)) and token is not None:
            numbers = range(connections)
            await asyncio.gather(*(self._splice(peer, node, Splice(token=token, number=number)) for number in numbers))

    async def _dial_at_once(self, peer: str, port: int, endpoint: str, place: int) -> bool:
        """Dial from a port that the other side dials at the same time, again and again until both are let through."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PUNCH_TIMEOUT
        while loop.time() < end:
            try:
                sock = await dial(endpoint, ATTEMPT_TIMEOUT, port)
            except OSError as error:
                logger.debug("no way yet from port %d to %s at %s: %s", port, peer, endpoint, error)
                if error.errno in NO_ROUTE:
                    return False
                if not isinstance(error, TimeoutError):  # refused at once: not before the other side dials, too
                    await asyncio.sleep(REFUSED_PAUSE)
                continue
            return await self._begin(sock, peer, place, Reach.PUNCHED)
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

    async def _begin(self, sock: socket.socket, peer: str, place: int, reach: Reach) -> bool:
        """Begin a connection of which neither end is the one that dialled: the smaller id speaks first."""
        try:
            if self._links.me < peer:
                connection = await greet(sock, self._links.credentials, peer, is_ours=place % 2 == 0, reach=reach)
            else:
                with closed_on_failure(sock):
                    async with asyncio.timeout(HELLO_TIMEOUT):
                        opening = await read_opening(sock, peer)
                    if not isinstance(opening, Hello):
                        raise RemoteProtocolError(peer, "its connection does not begin with a greeting")
                connection = await welcome(sock, self._links.credentials, opening, reach)
            if connection.peer != peer:
                connection.close()
                raise RemoteProtocolError(connection.peer, f"it came in the place of {peer}")
        except (OSError, RemoteProtocolError) as error:
            logger.debug("no %s connection with %s: %r", reach, peer, error)
            return False
        self._links.add(connection)
        return True


async def _look(node: str, count: int) -> tuple[Sequence[int], tuple[str, ...]]:
    """Return `count` new ports of ours, and where the node at this endpoint sees them.

    Raises: OSError, RemoteProtocolError.
    """
    with ExitStack() as stack:  # all are bound at once, so that they differ
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("", 0))
        ports = [sock.getsockname()[1] for sock in socks]
    seen = await asyncio.gather(*(probe(node, local_port=port) for port in ports))
    return ports, tuple(one.endpoint for one in seen)
