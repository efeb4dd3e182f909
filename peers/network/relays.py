"""The nodes that introduce this peer to others: where their data ports are, and how they see us."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerUnreachableError
from peers.network.contacts import host_of
from peers.network.probing import probe
from peers.network.sockets import endpoint_of, parse_endpoint
from peers.values.wire import Count, Value

logger = logging.getLogger(__name__)

LINK_INFO = "links"  # name of the call
KNOWN = 64  # nodes at most


class LinkInfo(Value):
    """Where a node accepts connections; 0: nowhere."""

    port: Count


@dataclass
class Relay:
    """`endpoint` is its data port, None until it has told us or if it has none.

    `is_reached`: we have had a connection to that port, and not to another one of the node's.
    """

    peer: str
    address: str
    endpoint: str | None = None
    is_reached: bool = False
    seen: tuple[str, ...] | None = None
    """Endpoints at which it could dial our data port; None: it has not been asked, or has not answered."""


AskInfo = Callable[[str, str], Awaitable[LinkInfo]]
"""(peer id, multiaddr) -> what that node says of itself, over libp2p. Raises: PeerUnreachableError."""


class Relays:
    """Nodes by multiaddr: those of the invite, and others that peers are introduced by.

    Anybody can name a node of any id at any address, so a node's addresses have nothing to do with each other.
    """

    def __init__(self, ask: AskInfo) -> None:
        self._ask = ask
        self._known: dict[str, Relay] = {}

    async def find(self, address: str) -> Relay | None:
        """Return the node at a multiaddr, with its data port; None when it does not answer, or has none."""
        relay = self._known.get(address)
        if relay is None:
            if len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]
            relay = self._known[address] = Relay(address.rstrip("/").rpartition("/")[2], address)
        if relay.endpoint is None:
            try:
                info = await self._ask(relay.peer, address)
            except (PeerUnreachableError, RemoteProtocolError) as error:
                logger.debug("%s says nothing of its data port: %s", address, error)
                return None
            host = host_of(address)
            if host and 0 < info.port < 65536:
                relay.endpoint = endpoint_of(host, info.port)
        return relay if relay.endpoint else None

    def forget(self, relay: Relay) -> None:
        """Ask it again next time: it was not there."""
        self._known.pop(relay.address, None)

    def forget_reach(self) -> None:
        """Our network has changed: which endpoints we reach is to be found out anew."""
        for relay in self._known.values():
            relay.is_reached = False

    async def look_at_us(self, relay: Relay, port: int) -> None:
        """Find out whether the node can dial our data port."""
        assert relay.endpoint is not None
        try:
            seen = await probe(relay.endpoint, (port,))
        except (OSError, RemoteProtocolError) as error:
            logger.debug("%s does not say how it sees us: %s", relay.address, error)
            return
        host, _ = parse_endpoint(seen.endpoint)
        relay.seen = (endpoint_of(host, port),) if port in seen.open else ()
