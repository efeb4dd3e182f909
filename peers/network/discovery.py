"""Discovery of a run's peers: by gossip among them, and by the DHT, which has a few for a newcomer to begin with."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from peers import metrics
from peers.errors import AdmissionError, LocalProtocolError, RemoteProtocolError
from peers.metrics import HEALTH
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.presence.gossip import Gossip
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.life_signs import LifeSign
from peers.presence.meeting_place import MeetingPlace
from peers.presence.news import Request
from peers.presence.voice import Pace
from peers.values.system import cancel_and_wait, now

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

GOSSIP = "gossip"  # name of the call; payload: a Request, answer: News
LOOK = 0.125  # seconds between two looks at which exchanges are due
ANSWER_SHARE = 0.3  # of a heartbeat's expiry, that a partner has to answer
FIRST_LIMIT = 2.0  # seconds that a newcomer waits for the first answers
LOOK_LIMIT = 5.0  # seconds in which a node outside the run asks who is in it
LIFETIME = 20.0  # seconds; of heartbeats, while none is known
NO_NODE = "no node of the DHT takes this peer's heartbeats: newcomers do not find it"


class PeerDiscovery:
    """The peers of one run, as far as they are known, and the exchanges that make them known."""

    def __init__(self, run: str, network: HivemindTransport) -> None:
        self._network = network
        self.gossip = Gossip(network.peer_id, run, os.urandom(16), time.time())
        self.copies = self.gossip.copies
        self.meeting_place = MeetingPlace(self.gossip, LIFETIME)
        self._run = run
        self._published = 0
        self._exchanging: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Task[None] | None = None
        self._connected: set[str] = set()
        self._is_new = True

    @property
    def is_member(self) -> bool:
        """Whether we are a peer of the run, and not only looking."""
        return self.gossip.own is not None

    # What we say ----------------------------------------------------------------------------------------------
    def pace(self) -> Pace:
        """Return what the next thing that we say of ourselves depends on."""
        is_whole = self.meeting_place.is_to_be_stored(now(), time.time())
        return Pace(len(self.gossip.others(now())), is_whole, self.gossip.copies.highest)

    async def say(self, signed: bytes | None, sign: LifeSign | None) -> bool:
        """Send our heartbeat or sign of life to the peers that are due, and now and then to the DHT. A farewell has
        been sent when this returns. Returns whether a DHT node took it, if it was to.

        Raises: LocalProtocolError when the heartbeat is no newer than the one before.
        """
        said = None if signed is None else Heartbeat.verify(signed, self._run)
        if said is not None and said.sequence <= self._published:
            raise LocalProtocolError(f"heartbeat {said.sequence} does not follow {self._published}")
        reach = self._network.links.reach()
        self.gossip.partners.avoided = {peer for peer, way in reach.items() if not way.is_direct}
        self.gossip.say(signed, sign, now(), time.time())
        self._tell()
        if self._telling is None:
            self._telling = asyncio.create_task(self._keep_telling())
        if said is None or signed is None:
            return True
        self._published, self.meeting_place.lifetime = said.sequence, said.lifetime
        is_farewell = said.state is PeerState.LEAVING
        is_for_dht = is_farewell or self.meeting_place.is_to_be_stored(now(), time.time())
        is_stored = True
        if is_for_dht:
            self.meeting_place.stored(now())
            is_stored = await self._network.dht.store_heartbeat(said, signed)
            if is_stored:
                HEALTH.well(f"dht {self._run}")
            else:
                HEALTH.failing(f"dht {self._run}", NO_NODE)
        if is_farewell:
            await asyncio.gather(*self._exchanging)
            self._tell()  # those that were being told something else
            await asyncio.gather(*self._exchanging)
        return is_stored

    # Gossip ---------------------------------------------------------------------------------------------------
    async def _keep_telling(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(LOOK)

    def _tell(self) -> None:
        """Begin the exchanges that are due."""
        for peer in self.gossip.due(now()):
            task = asyncio.create_task(self._exchange(peer))
            self._exchanging.add(task)
            task.add_done_callback(self._exchanging.discard)

    async def _exchange(self, peer: str) -> None:
        try:
            request = self.gossip.request(peer, now())
            if self._network.links.port:  # it will be told something again and again
                self._network.links.prepare(peer)
            answer = await self._network.call(peer, GOSSIP, request, ANSWER_SHARE * self.meeting_place.lifetime / 2)
            self.gossip.answer_of(peer, answer, now(), time.time())
        except asyncio.CancelledError:
            self.gossip.failed(peer, now())  # else it would seem to be under way for ever
            raise
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self.gossip.failed(peer, now())
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.warning("dropped what a peer told us of others: %s", error)

    def answer(self, sender: str, request: Request) -> bytes:
        """Answer an exchange that another peer has begun. Raises: RemoteProtocolError, RefusalError."""
        try:
            return self.gossip.answer(sender, request, now(), time.time())
        except AdmissionError as error:
            raise RefusalError(str(error)) from error

    async def close(self) -> None:
        HEALTH.over(f"dht {self._run}")
        await cancel_and_wait(*self._exchanging, *([self._telling] if self._telling else []))

    # What is known --------------------------------------------------------------------------------------------
    async def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every peer of the run, ours included, by peer id."""
        if self.meeting_place.is_search_due(now()):
            await self._search()
        if not self.is_member:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_LIMIT):
                    await self._ask_around()
        elif self._is_new:
            await self._meet()
        self.gossip.see_out(time.time())
        return self.gossip.heartbeats(now())

    def silences(self) -> dict[str, float]:
        """Return for how many seconds nothing new was heard of each peer."""
        return self.gossip.silences(now())

    async def _search(self) -> None:
        """Take in what the DHT has of the run's peers."""
        self.meeting_place.searched(now())
        self.gossip.heard.forget(time.time())
        for signed in await self._network.dht.find_heartbeats(self._run):
            try:
                self.gossip.found(signed, now(), time.time())
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("heartbeat").inc()
                logger.warning("dropped a heartbeat: %s", error)

    async def _meet(self) -> None:
        """Wait for what the first partners know: whom the DHT has are few, and the first look decides who gives us the
        state."""
        self._tell()
        if self._exchanging:
            self._is_new = False
            await asyncio.wait(self._exchanging, timeout=FIRST_LIMIT)

    async def _ask_around(self) -> None:
        """Ask peers of the run for all that they know, page by page."""
        while due := self.gossip.due(now()):
            for peer in set(due) - self._connected:
                word = self.gossip.heard.get(peer)
                if word is not None and await self._network.connect(peer, word.heartbeat.addresses):
                    self._connected.add(peer)
            await asyncio.gather(*map(self._exchange, due))
