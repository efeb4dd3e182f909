"""Dialling peers at their endpoints: for ourselves, and for those that can't dial us."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.network.connection import HANDSHAKE_TIMEOUT, greet
from peers.network.contacts import Contact, is_local
from peers.network.link import CONNECTIONS
from peers.network.sockets import dial
from peers.values.wire import Reach, Value, pack, unpack_from

if TYPE_CHECKING:
    from peers.network.links import Links

logger = logging.getLogger(__name__)

DIAL_TIMEOUT = 4.0  # seconds
MORE = "more"  # name of the call: dial me so many connections that are mine


class More(Value):
    connections: int


class Dialling:
    """The part of `Links` that dials."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._answered: dict[str, str] = {}  # the endpoint at which a peer did
        self._giving: set[str] = set()  # peers for which connections are on their way

    def forget(self, peer: str | None = None) -> None:
        """Forget where a peer answered, or where any did."""
        if peer is None:
            self._answered.clear()
        else:
            self._answered.pop(peer, None)

    async def dial_first(self, contact: Contact) -> None:
        """Try all of a peer's endpoints at once. At the first that answers we make a connection for either side."""
        local = not self._links.info.port or all(map(is_local, contact.endpoints))
        endpoints = [one for one in contact.endpoints if local or not is_local(one)]
        pending = {asyncio.ensure_future(self._connect(contact.peer, one, is_ours=True)) for one in endpoints}
        has_answered = False
        try:
            while pending and self._links.way_to(contact.peer) is not Reach.OPEN:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                has_answered = has_answered or any(attempt.result() for attempt in done)
        finally:
            for attempt in pending:
                attempt.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if has_answered:
            await self.complete(contact.peer)

    async def complete(self, peer: str) -> None:
        """Give a peer a connection to open conversations on, if it has none and we know where it is dialled."""
        endpoint = self._answered.get(peer)
        if (
            endpoint
            and peer not in self._giving
            and self._links.is_up(peer)
            and not self._links.link(peer).gives(Reach.OPEN)
        ):
            await self._give(peer, endpoint, 1)

    async def dial_more(self, peer: str, count: int) -> None:
        """Get so many more connections that are ours. Raises: PeerUnreachableError."""
        link, endpoint = self._links.link(peer), self._answered.get(peer)
        if endpoint is None and not link.ours:
            raise PeerUnreachableError(peer, "it gives us no connection")
        if endpoint is None:
            await link.call(MORE, pack(More(connections=count)), DIAL_TIMEOUT + HANDSHAKE_TIMEOUT)
        elif not any(await asyncio.gather(*(self._connect(peer, endpoint, is_ours=True) for _ in range(count)))):
            self.forget(peer)  # it is not there any more

    async def on_more(self, peer: str, payload: bytes) -> bytes:
        """Answer to `More`: connections for the other side, which can't dial us."""
        count, endpoint = unpack_from(peer, More, payload).connections, self._answered.get(peer)
        if endpoint is None or count < 1:
            raise RefusalError("there is no endpoint of yours that answers")
        if peer in self._giving:
            raise RefusalError("they are on their way")
        await self._give(peer, endpoint, min(count, CONNECTIONS - self._links.link(peer).theirs))
        return b""

    async def _give(self, peer: str, endpoint: str, count: int) -> None:
        self._giving.add(peer)
        try:
            await asyncio.gather(*(self._connect(peer, endpoint, is_ours=False) for _ in range(count)))
        finally:
            self._giving.discard(peer)

    async def _connect(self, peer: str, endpoint: str, is_ours: bool) -> bool:
        """Add a connection to the link with a peer. Returns whether the peer answers there."""
        try:
            sock = await dial(endpoint, DIAL_TIMEOUT)
            connection = await greet(sock, self._links.credentials, peer, is_ours, Reach.OPEN)
        except (OSError, RemoteProtocolError) as error:
            logger.debug("no connection to %s at %s: %s", peer, endpoint, error)
            return False
        self._answered[peer] = endpoint
        self._links.link(peer).add(connection)
        return True
