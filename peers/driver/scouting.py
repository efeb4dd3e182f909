"""What the protocol should know of the network before it plans with it: who reaches whom, and what our link carries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from peers.driver.host import Host
from peers.driver.traffic import Traffic
from peers.network.channel import Channel, PeerUnreachableError
from peers.network.rating import RATING, Rater
from peers.network.throttle import LinkTime
from peers.protocol.events import RateMeasured, ReachSeen
from peers.values.reach import Reach

logger = logging.getLogger(__name__)

AGAIN = 1800.0  # seconds after which the link is measured once more, when it is free
TRIES = 3  # peers that are asked for a measurement before the next heartbeat


class ScoutTransport(Protocol):
    no_round: LinkTime

    def reach(self) -> dict[str, Reach]: ...
    def sought(self) -> frozenset[str]: ...
    def stream(self, peer_id: str, protocol: str) -> AbstractAsyncContextManager[Channel]: ...
    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None: ...


class Scout:
    """Looks around once in a heartbeat, and measures our link, before any round and now and then between two.

    What rounds show of a link is what they ask of it: whoever reduces little sends little, and would seem to have a
    slow link.
    """

    def __init__(self, transport: ScoutTransport, traffic: Traffic, host: Host) -> None:
        self._transport = transport
        self._traffic = traffic
        self._host = host
        self._rater = Rater(transport.no_round)
        self._measuring: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self._transport.on_stream(RATING, self._rater.answer)

    def look(self) -> None:
        """Tell the protocol how we reach others, and what our link carries."""
        reach = self._transport.reach()
        self._host.handle(ReachSeen(reach, self._traffic.rates, self._transport.sought()))
        direct = [peer for peer, way in reach.items() if way.is_direct]
        if self._traffic.rate:
            self._host.handle(RateMeasured(self._traffic.rate))
        is_measuring = self._measuring is not None and not self._measuring.done()
        is_time = self._traffic.known_for > AGAIN and self._rater.is_idle and not is_measuring
        if direct and is_time:
            self._measuring = self._host.start(self._measure(direct))

    async def _measure(self, peers: list[str]) -> None:
        """Measure with one of these peers; the others are asked if it is busy."""
        for peer in random.sample(peers, min(len(peers), TRIES)):
            try:
                async with self._transport.stream(peer, RATING) as channel:
                    upload, download = await self._rater.ask(channel)
            except PeerUnreachableError as error:
                logger.debug("no measurement: %s", error)
                continue
            logger.info("our link carries %.0f Mbit/s up, %.0f down", 8e-6 * upload, 8e-6 * download)
            self._traffic.knows(upload, download)
            return
