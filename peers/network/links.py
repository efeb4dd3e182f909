"""All links of one peer: with whom, by which way, and what to do when one breaks."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.arranging import Arranging
from peers.network.calls import CALLS, Answer, answer_calls
from peers.network.channel import Channel
from peers.network.connection import Connection, welcome
from peers.network.contacts import Contact, is_loopback, may_be_dialled, own_endpoints
from peers.network.credentials import Credentials
from peers.network.dialling import Dialling
from peers.network.link import Link, Serve
from peers.network.listener import UNKNOWN_OF_ONE_NETWORK, Listener, Strangers, network_of
from peers.network.opening import Hello, Opening, Splice
from peers.network.port_mapping import PortMapper
from peers.network.probing import answer_probe
from peers.network.relays import AskInfo, LinkInfo, Relays
from peers.network.settings import LinkSettings
from peers.network.sockets import raise_file_limit
from peers.network.splicing import Splicer
from peers.network.throttle import Throttle
from peers.values.identity import Identity
from peers.values.wire import Reach

logger = logging.getLogger(__name__)

HEAD_START = 0.5  # seconds that the peer with the smaller id has to dial first
EAGER = 128  # peers with which links are made before they are needed
RETRY_FIRST, RETRY_LAST = 5.0, 60.0  # seconds
LINK_TIMEOUT = 15.0  # seconds that somebody waits for a link; without one there are other ways
CALLERS = 4  # conversations in which one peer asks us things: the older ones may be dead
UNKNOWN = 8  # connections of a peer that we know no heartbeat of. Anybody can make an identity


@dataclass
class _Attempts:
    """What became of trying to reach one peer."""

    failures: int = 0
    has_detour: bool = False
    """Whether it could be reached without a link."""
    retry_at: float = 0.0
    task: asyncio.Future[None] | None = None


class Links:
    """`serve` has a conversation that another peer opens; `answer` answers its messages.

    `is_there` says whether a peer answers on another way (libp2p's), where there is no link.
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
        self.me = identity.peer_id
        self._identity = identity
        self.credentials = Credentials(identity)
        self.relays = Relays(ask_info)
        self.on_change: Callable[[], None] = lambda: None
        self.clock = time.monotonic
        self._serve_conversation = serve
        self._is_there = is_there
        self._answer = answer
        self._caps = caps
        self._links: dict[str, Link] = {}
        self._contacts: dict[str, Contact] = {}
        self._attempts: dict[str, _Attempts] = {}
        self._callers: Counter[str] = Counter()
        self._room = raise_file_limit() // 2  # connections at most: other things are files, too
        most = max(UNKNOWN_OF_ONE_NETWORK, self._room // 2 // UNKNOWN)
        self._strangers = Strangers(most, lambda peer: self._links[peer].close())
        self._tasks: set[asyncio.Future[None]] = set()
        self._listener: Listener | None = None
        self.arranging = Arranging(self)
        self.dialling = Dialling(self)
        self.splicer: Splicer | None = None
        self._mapper: PortMapper | None = None

    # Life -----------------------------------------------------------------------------------------------------
    def listen(self, hosts: Sequence[str], settings: LinkSettings) -> None:
        """Accept connections from now on. Raises: LocalNetworkError when the port can't be used."""
        self._listener = Listener(hosts, settings.port, self._accept)
        if settings.relay_limit is not None:
            self.splicer = Splicer(settings.relay_limit, self._room // 4)
        if not all(map(is_loopback, hosts)):
            self._mapper = PortMapper(self._listener.port, lambda endpoint: self.on_change())
            self.start(self._mapper.run())

    async def close(self) -> None:
        if self._listener:
            await self._listener.close()
        if self.splicer:
            await self.splicer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()

    def start(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a task of the links failed", exc_info=error)

    @property
    def info(self) -> LinkInfo:
        return LinkInfo(port=self._listener.port if self._listener else 0)

    def endpoints(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return where others may dial us, given our multiaddrs."""
        if self._listener is None:
            return ()
        mapped = [self._mapper.endpoint] if self._mapper and self._mapper.endpoint else []
        return own_endpoints(addresses, self._listener.port, [*self.arranging.seen, *mapped])

    @property
    def relay_addresses(self) -> tuple[str, ...]:
        """Multiaddrs of the nodes that introduce us."""
        return self.arranging.addresses

    def use_relays(self, addresses: Sequence[str]) -> None:
        """Keep a link with these nodes from now on, so that they can introduce us."""
        self.start(self.arranging.keep(addresses))

    # Who there is ---------------------------------------------------------------------------------------------
    def observe(self, contacts: Mapping[str, Contact], eagerly: bool) -> None:
        """Know these peers, and `eagerly` make links with them."""
        now = self.clock()
        for peer, contact in contacts.items():
            self._strangers.went(peer)
            if peer != self.me and contact != self._contacts.get(peer):
                self._contacts[peer] = contact
                if not self._is_busy(peer):
                    self._attempts.pop(peer, None)
        for peer in self._contacts.keys() - contacts.keys():
            del self._contacts[peer]
            self._tidy(peer)
        if eagerly and len(self._contacts) <= EAGER:
            for peer in self._contacts:
                if self.way_to(peer) is Reach.OPEN or (self.is_up(peer) and not may_be_dialled(contacts[peer])):
                    self.start(self.dialling.complete(peer))
                elif now >= self._attempts.setdefault(peer, _Attempts()).retry_at:
                    self._try(peer)

    def _tidy(self, peer: str) -> None:
        """Keep nothing of a peer that nobody speaks of any more and that is not connected."""
        if peer not in self._contacts and not self.is_up(peer) and not self._is_busy(peer):
            self._attempts.pop(peer, None)
            self._links.pop(peer, None)
            self.dialling.forget(peer)

    def is_up(self, peer: str) -> bool:
        return peer in self._links and self._links[peer].is_up

    def way_to(self, peer: str) -> Reach:
        """Return the way that the link with a peer takes; none, if it is down."""
        return self._links[peer].reach if peer in self._links else Reach.NONE

    def reach_of(self, peer: str) -> Reach | None:
        """Return how we reach a peer; None: nothing is known yet."""
        if self.is_up(peer):
            return self._links[peer].reach
        attempts = self._attempts.get(peer)
        if attempts is None or not attempts.failures:
            return None
        return Reach.RELAYED if attempts.has_detour else Reach.NONE

    def reach(self) -> dict[str, Reach]:
        """Return how we reach those that we know of, as far as that was found out."""
        found = {peer: self.reach_of(peer) for peer in self._contacts}
        return {peer: reach for peer, reach in found.items() if reach is not None}

    def sought(self) -> frozenset[str]:
        """Return those of whom it is not found out yet."""
        if len(self._contacts) > EAGER:  # then links are made as they are needed
            return frozenset()
        return frozenset(self._contacts) - self.reach().keys() - {self.me}

    async def link_with(self, peer: str) -> Link | None:
        """Return the link with a peer, made now if it is not there; None where there is no way."""
        if not self.is_up(peer) and peer in self._contacts:
            attempts = self._attempts.setdefault(peer, _Attempts())
            if self._is_busy(peer) or self.clock() >= attempts.retry_at:
                await asyncio.wait([self._try(peer)], timeout=LINK_TIMEOUT)
        return self._links[peer] if self.is_up(peer) else None

    def prepare(self, peer: str) -> None:
        """Begin to make the link with a peer for what is to come, where links are not made with everybody."""
        if len(self._contacts) <= EAGER or peer not in self._contacts or self.is_up(peer):
            return
        is_room = sum(link.is_up for link in self._links.values()) < EAGER
        if is_room and self.clock() >= self._attempts.setdefault(peer, _Attempts()).retry_at:
            self._try(peer)

    def drop_all(self) -> None:
        """Our network has changed: whatever was connected is not any more, and is dialled anew."""
        self.credentials = Credentials(self._identity)  # by which the others see it, too
        self.arranging.left |= {peer for peer in self._links if self.is_up(peer)}
        for link in list(self._links.values()):
            link.close()
        self._attempts = {peer: attempts for peer, attempts in self._attempts.items() if self._is_busy(peer)}
        self.dialling.forget()
        self.arranging.look_again()
        if self._mapper:
            self._mapper.look_again()

    # Making links ---------------------------------------------------------------------------------------------
    def _is_busy(self, peer: str) -> bool:
        attempts = self._attempts.get(peer)
        return attempts is not None and attempts.task is not None and not attempts.task.done()

    def _try(self, peer: str) -> asyncio.Future[None]:
        attempts = self._attempts.setdefault(peer, _Attempts())
        if attempts.task is None or attempts.task.done():
            attempts.task = self.start(self._reach_out(peer, attempts))
            attempts.task.add_done_callback(lambda _: self._tidy(peer))
        return attempts.task

    async def _reach_out(self, peer: str, attempts: _Attempts) -> None:
        """Every way to a peer, from best to worst."""
        if self.me > peer:
            await self.link(peer).wait_until_up(HEAD_START)  # the other side makes it
        contact = self._contacts.get(peer)
        if self.way_to(peer) is not Reach.OPEN and contact is not None:
            await self.dialling.dial_first(contact)
        if not self.is_up(peer) and contact is not None:
            await self.arranging.meet(contact)
        if self.is_up(peer):
            attempts.failures = 0
            attempts.retry_at = self.clock() + RETRY_LAST  # until a better way is looked for
        else:
            pause = min(RETRY_LAST, RETRY_FIRST * 2**attempts.failures)
            attempts.has_detour = await self._is_there(peer)
            attempts.failures += 1
            attempts.retry_at = self.clock() + pause
            self.on_change()

    def link(self, peer: str) -> Link:
        """Return the link with a peer, which may be down."""
        if peer not in self._links:
            dial_more = lambda count: self._dial_more(peer, count)  # noqa: E731
            self._links[peer] = Link(peer, self._serve, dial_more, self.start, self._caps, lambda: self._changed(peer))
        return self._links[peer]

    async def _dial_more(self, peer: str, count: int) -> None:
        """Raises: PeerUnreachableError."""
        contact = self._contacts.get(peer)
        if self.link(peer).reach is Reach.OPEN:
            await self.dialling.dial_more(peer, count)
        elif contact is not None:
            await self.arranging.meet(contact, 2 * count)

    def _changed(self, peer: str) -> None:
        if not self.is_up(peer):
            self._strangers.went(peer)
        if not self.is_up(peer) and peer in self._contacts and not self._is_busy(peer):
            self._attempts.pop(peer, None)  # it was there a moment ago: try at once
        self._tidy(peer)
        self.on_change()

    # What comes in --------------------------------------------------------------------------------------------
    async def _accept(self, sock: socket.socket, opening: Opening) -> None:
        match opening:
            case Hello():
                connection = await welcome(sock, self.credentials, opening, Reach.OPEN)
                self.add(connection)
            case Splice() if self.splicer:
                self.splicer.arrived(sock, opening)
            case Splice():
                sock.close()
            case _:
                await answer_probe(sock, opening)

    def add(self, connection: Connection) -> None:
        """Use a connection that others wanted, if there is room."""
        peer = connection.peer
        if connection.is_open and self._has_room_for(peer) and self._may_come(connection):
            self.link(peer).add(connection)
        else:
            metrics.DROPPED.labels("connection").inc()
            connection.close()

    def _may_come(self, connection: Connection) -> bool:
        """Return whether a peer is known, or one of not too many that nothing is known of."""
        peer = connection.peer
        if peer in self._contacts or self.is_up(peer):
            return True
        return self._strangers.come(peer, network_of(connection.host), self.clock())

    def _has_room_for(self, peer: str) -> bool:
        """Whether one more connection of a peer is let in. Those that we know nothing of get half of all room."""
        count = sum(link.connections for link in self._links.values())
        if peer in self._contacts:
            return count < self._room
        return count < self._room // 2 and (not self.is_up(peer) or self.link(peer).connections < UNKNOWN)

    async def _answer_call(self, sender: str, name: str, payload: bytes) -> bytes:
        self._strangers.spoke(sender)
        return await self._answer(sender, name, payload)

    async def _serve(self, protocol: str, channel: Channel) -> None:
        self._strangers.spoke(channel.peer)
        if protocol != CALLS:
            await self._serve_conversation(protocol, channel)
            return
        if self._callers[channel.peer] >= CALLERS:
            raise RemoteProtocolError(channel.peer, "it asks on too many connections")
        self._callers[channel.peer] += 1
        try:
            await answer_calls(channel, self._answer_call)
        finally:
            self._callers[channel.peer] -= 1
            if not self._callers[channel.peer]:
                del self._callers[channel.peer]
