"""Meeting peers through nodes that both can dial: our links with such nodes, and both ends of an introduction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.contacts import Contact, public_only
from peers.network.introductions import (
    CONNECTIONS,
    MOST,
    NOWHERE,
    Introduce,
    Introduced,
    Meeting,
    Ports,
    Seats,
    look,
    meet,
)
from peers.network.relays import Relay
from peers.network.sockets import can_dial, parse_endpoint
from peers.values.wire import Reach, pack, unpack_from

if TYPE_CHECKING:
    from peers.network.links import Links

logger = logging.getLogger(__name__)

INTRODUCE, MEET = "introduce", "meet"  # names of the calls
CALL_TIMEOUT = 20.0  # seconds; the other one probes meanwhile
MEETING_TIMEOUT = 10.0  # seconds that the other one has to begin
LOOK_INTERVAL = 15.0  # seconds between two looks at our relays
MEETINGS = 32  # that we take part in at once because others want them
INTRODUCING = 3  # nodes that introduce us


class Arranging:
    """The part of `Links` that goes through third parties."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._ours: dict[str, Relay] = {}  # by address: a node may have several
        self.volunteers: tuple[str, ...] = ()
        """Multiaddrs of volunteers that can introduce us, too: bootstrap nodes come and go."""
        self._changed = asyncio.Event()
        self._meetings: dict[str, asyncio.Future[None]] = {}
        self.left: set[str] = set()
        """Peers whose links we have closed because of a new network: they don't know, and begin nothing."""

    # Nodes that introduce us ----------------------------------------------------------------------------------
    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(relay.address for relay in self._ours.values() if self._links.is_up(relay.peer))[:INTRODUCING]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Data ports of the nodes that introduce us."""
        ours = self._ours.values()
        return tuple(relay.endpoint for relay in ours if relay.endpoint and self._links.is_up(relay.peer))

    @property
    def seen(self) -> tuple[str, ...]:
        """Endpoints at which a node has reached our data port."""
        return tuple(dict.fromkeys(endpoint for relay in self._ours.values() for endpoint in relay.seen or ()))

    def look_again(self) -> None:
        self._links.relays.forget_reach()
        for relay in self._ours.values():
            relay.seen = None
        self._changed.set()

    async def keep(self, addresses: Sequence[str]) -> None:
        """Keep a link with each of these nodes, and know how they see us."""
        while True:
            self._changed.clear()
            looks = (self._greet_node(address) for address in dict.fromkeys((*addresses, *self.volunteers)))
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a look at a relay failed", exc_info=outcome)
            try:
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _greet_node(self, address: str) -> None:
        relay = await self._links.relays.find(address)
        if relay is None or relay.peer == self._links.me:
            return
        was_up = self._links.is_up(relay.peer)
        if not await self._is_linked(relay):
            return
        if not was_up:
            relay.seen = None
        self._ours[relay.address] = relay
        await self._links.dialling.complete(relay.peer)
        if relay.seen is None and self._links.info.port:
            await self._links.relays.look_at_us(relay, self._links.info.port)
            self._links.on_change()

    async def _is_linked(self, relay: Relay) -> bool:
        """Whether a link with the node is up, made now if it was not, and its endpoint is one that we can dial.

        A node with IPv4 and IPv6 has two endpoints: its link may be up by one of them while the other is out of reach.
        """
        assert relay.endpoint is not None
        if not self._links.is_up(relay.peer):
            await self._links.dialling.dial_first(Contact(relay.peer, (relay.endpoint,)))
        if self._links.is_up(relay.peer) and not relay.is_reached:
            relay.is_reached = await can_dial(relay.endpoint)
        if not self._links.is_up(relay.peer) or not relay.is_reached:
            self._links.relays.forget(relay)
            self._ours.pop(relay.address, None)
            return False
        return True

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
            await self._links.link(contact.peer).wait_until_up(MEETING_TIMEOUT)
            if self._links.is_up(contact.peer):
                return
        for address in dict.fromkeys((*contact.relays, *self.addresses)):
            relay = await self._links.relays.find(address)
            if relay is None or not await self._is_linked(relay):
                continue
            try:
                await self._meet_through(relay, contact.peer, min(connections, MOST))
            except (PeerUnreachableError, RemoteProtocolError, OSError) as error:
                logger.debug("%s does not bring us together with %s: %s", relay.address, contact.peer, error)
                continue
            if self._links.is_up(contact.peer):
                return

    async def _meet_through(self, relay: Relay, peer: str, connections: int) -> None:
        """Raises: PeerUnreachableError, RemoteProtocolError, OSError."""
        assert relay.endpoint is not None
        is_relayed = self._links.is_up(peer) and self._links.reach_of(peer) is Reach.RELAYED
        # Where dialling at once has failed before, it would cost each widening of the link seconds.
        ports = NOWHERE if is_relayed else await look(relay.endpoint, connections)
        asked = Introduce(to=peer, endpoints=ports.seen, connections=connections)
        answer = await self._links.link(relay.peer).call(INTRODUCE, pack(asked), CALL_TIMEOUT)
        introduced = unpack_from(relay.peer, Introduced, answer)
        await self._go(peer, ports, introduced.endpoints, relay.endpoint, introduced.token, connections)

    async def _go(
        self, peer: str, ports: Ports, theirs: Sequence[str], node: str, token: bytes | None, connections: int
    ) -> None:
        places = public_only(theirs, node)
        await meet(self._links.credentials, self._links.add, peer, ports, places, node, token, connections)

    # Who is asked to meet -------------------------------------------------------------------------------------
    async def on_meet(self, sender: str, payload: bytes) -> bytes:
        """A node brings somebody together with us."""
        meeting = unpack_from(sender, Meeting, payload)
        relay = next((relay for relay in self._ours.values() if relay.peer == sender), None)
        if relay is None or relay.endpoint is None:
            raise RefusalError("we did not ask you to introduce us")
        if meeting.peer in self._meetings or len(self._meetings) >= MEETINGS:
            raise RefusalError("it is being met already")
        connections = min(meeting.connections, MOST)
        is_met = asyncio.get_running_loop().create_future()
        is_met.add_done_callback(lambda _: self._meetings.pop(meeting.peer))
        self._meetings[meeting.peer] = is_met
        try:
            ports = await look(relay.endpoint, connections) if meeting.endpoints else NOWHERE
        except BaseException as error:
            is_met.set_result(None)
            if isinstance(error, OSError | RemoteProtocolError):
                raise RefusalError(f"we do not know where we are seen: {error}") from error
            raise
        going = self._go(meeting.peer, ports, meeting.endpoints, relay.endpoint, meeting.token, connections)
        self._links.start(going).add_done_callback(lambda _: is_met.set_result(None))
        return pack(Seats(endpoints=ports.seen))

    # The node that brings two together ------------------------------------------------------------------------
    async def on_introduce(self, sender: str, payload: bytes) -> bytes:
        """Only whoever is connected here is brought together, and only where we see them: nobody has others dial."""
        asked = unpack_from(sender, Introduce, payload)
        for peer in (sender, asked.to):
            if asked.to == sender or not self._links.is_up(peer):
                raise RefusalError(f"{peer} is not connected here")
        token = self._links.splicer.expect(sender) if self._links.splicer else None
        places = self._seen_here(sender, asked.endpoints)
        meeting = Meeting(peer=sender, endpoints=places, connections=asked.connections, token=token)
        try:
            answer = await self._links.link(asked.to).call(MEET, pack(meeting), CALL_TIMEOUT / 2)
            seats = unpack_from(asked.to, Seats, answer)
        except (PeerUnreachableError, RemoteProtocolError) as error:
            if self._links.splicer and token:
                self._links.splicer.cancel(token)
            raise RefusalError(f"{asked.to} does not come: {error}") from error
        return pack(Introduced(endpoints=self._seen_here(asked.to, seats.endpoints), token=token))

    def _seen_here(self, peer: str, endpoints: Sequence[str]) -> tuple[str, ...]:
        """Return those of the endpoints that are at an address from which the peer is connected here."""
        hosts = self._links.link(peer).hosts
        return tuple(endpoint for endpoint in endpoints if parse_endpoint(endpoint)[0] in hosts)
