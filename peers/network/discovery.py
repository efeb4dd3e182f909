"""Discovery of a run's peers: in the DHT, where a newcomer finds the first few, and then by beats among the peers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from peers import metrics
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.metrics import HEALTH
from peers.network.channel import PeerUnreachableError
from peers.presence.beats import Beats
from peers.presence.calls import PAGE, WHO
from peers.presence.copies import Copies
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.meeting_place import MeetingPlace
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.wire import pack

if TYPE_CHECKING:
    from peers.network.transport import HivemindTransport

logger = logging.getLogger(__name__)

ANSWER_SHARE = 0.3  # fraction of a heartbeat's expiry within which a peer must answer
FIRST_LIMIT = 2.0  # seconds that a newcomer waits for the first answers
LOOK_LIMIT = 5.0  # seconds that a node outside the run spends on asking for its peers
ASK_SHARE, LOOK_SHARE = 0.5, 0.1
"""Fraction of a heartbeat's lifetime between two requests for more peers: of a peer of the run, which also hears others
itself; and of a node outside it."""
ASKED_FIRST = 3  # peers asked by the first request
PAGES_LIMIT = 32  # pages from one peer in answer to one request
NO_NODE = "no node of the DHT takes this peer's heartbeats, so newcomers cannot find it; check its internet connection"


class PeerDiscovery:
    """The known peers of one run, and the calls by which they become known."""

    def __init__(self, run: str, network: HivemindTransport) -> None:
        self._network = network
        self.beats = Beats(network.peer_id, run)
        self.meeting_place = MeetingPlace(self.beats)
        self._run = run
        self._published = 0
        self._voters: Collection[str] = ()
        self._calling: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -float("inf")
        self._has_met = False
        self._connected: set[str] = set()

    @property
    def copies(self) -> Copies:
        """The heartbeats heard with our own key that are of other processes."""
        return self.beats.copies

    @property
    def is_member(self) -> bool:
        """True for a peer of the run, False for a node that only looks."""
        return self.beats.own is not None

    # Our own messages -----------------------------------------------------------------------------------------
    def is_news(self, heartbeat: Heartbeat) -> bool:
        """Return whether our new heartbeat must be signed and published, because a beat is not enough."""
        is_to_be_stored = self.meeting_place.is_to_be_stored(now(), time.time())
        return is_to_be_stored or self.beats.is_news(heartbeat, now())

    def beat(self, heartbeat: Heartbeat, voters: Collection[str] = ()) -> None:
        """Begin to send the others a beat; in a large swarm these voters first. Before our first published heartbeat
        nothing is sent."""
        self.beats.go_on(heartbeat, now())
        self._voters = voters
        self._call_due()

    async def publish(self, signed: bytes) -> bool:
        """Send our signed heartbeat to the others, and now and then to the DHT. A farewell has been sent when this
        returns. Return False if the DHT should have stored it, and no node of it did.

        Raises: LocalProtocolError when the heartbeat is no newer than the one before.
        """
        heartbeat = Heartbeat.verify(signed, self._run)
        if heartbeat.sequence <= self._published:
            raise LocalProtocolError(f"heartbeat {heartbeat.sequence} does not follow {self._published}")
        self._published = heartbeat.sequence
        is_farewell = heartbeat.state is PeerState.LEAVING
        is_for_dht = is_farewell or self.meeting_place.is_to_be_stored(now(), time.time())
        self.beats.say(signed, now())
        self._call_due()
        is_stored = True
        if is_for_dht:
            self.meeting_place.stored(now())
            is_stored = await self._network.dht.store_heartbeat(heartbeat, signed)
            if is_stored:
                HEALTH.well(f"dht {self._run}")
            else:
                HEALTH.failing(f"dht {self._run}", NO_NODE)
        if is_farewell:
            await asyncio.gather(*self._calling)
            self._call_due()  # peers that had another call under way
            await asyncio.gather(*self._calling)
        return is_stored

    def _call_due(self) -> None:
        """Begin to call the peers that are due."""
        self.beats.choose(self._voters, now())
        for peer in self.beats.audience.due(now()):
            task = start_task(self._call_one(peer))
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)

    async def _call_one(self, peer: str) -> None:
        if self._network.links.port:  # there will be many calls to this peer
            self._network.links.prepare(peer)
        timeout = ANSWER_SHARE * self.beats.lifetime / 2
        try:
            while call := self.beats.call_for(peer):
                answer = await self._network.call(peer, call.name, call.payload, timeout)
                if not self.beats.answered(peer, call, answer, now(), time.time()):
                    break
        except asyncio.CancelledError:
            self.beats.failed(peer, now())  # else a call would seem to be under way for ever
            raise
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self.beats.failed(peer, now())
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.info("dropped the answer to a beat: %s", error)

    async def close(self) -> None:
        HEALTH.over(f"dht {self._run}")
        await cancel_and_wait(*self._calling, *([self._asking] if self._asking else []))

    # Known peers ----------------------------------------------------------------------------------------------
    async def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every known peer, ours included, by peer id."""
        if self.meeting_place.is_search_due(now()):
            await self._search()
        if self.beats.others(now()):
            await self._ask_around()
        self.beats.see_out(time.time())
        return self.beats.heartbeats(now())

    def silences(self) -> dict[str, float]:
        """Return the seconds since each other peer was heard, for peers that were heard lately."""
        return self.beats.silences(now())

    async def _search(self) -> None:
        """Take in the heartbeats of the run's peers in the DHT."""
        self.meeting_place.searched(now())
        self.beats.store.forget(time.time())
        for signed in await self._network.dht.find_heartbeats(self._run):
            try:
                self.beats.found(signed, now(), time.time())
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("heartbeat").inc()
                logger.info("dropped a heartbeat: %s", error)

    # Requests for more peers ----------------------------------------------------------------------------------
    async def _ask_around(self) -> None:
        """Ask some of the known peers for more of them. The first answers are awaited, since the DHT has only a few
        peers, and a newcomer should choose the donor of its state from all."""
        if not self.is_member:
            await self._look(1 if self._asked_at > 0.0 else ASKED_FIRST)
        elif not self._has_met:
            self._has_met = True
            await self._meet()
        elif self._is_due(ASK_SHARE) and (self._asking is None or self._asking.done()):
            self._asking = start_task(self._ask(1))

    def _is_due(self, share: float) -> bool:
        return now() - self._asked_at >= share * self.beats.lifetime

    async def _look(self, count: int) -> None:
        """Ask as a node outside the run, which has to connect first."""
        if not self._is_due(LOOK_SHARE):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_LIMIT):
                for peer in self._sample(count):
                    kept = self.beats.store.get(peer)
                    is_new = peer not in self._connected
                    if kept and is_new and await self._network.connect(peer, kept.heartbeat.addresses):
                        self._connected.add(peer)
                await self._ask(count)

    async def _meet(self) -> None:
        """Call the first peers, ask them for all others, and call these."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LIMIT):
                self._call_due()
                await self._ask(ASKED_FIRST)
                self._call_due()
                if self._calling:
                    await asyncio.wait(self._calling)

    def _sample(self, count: int) -> list[str]:
        """Return so many of the others at random, of those that we hear, if there are any."""
        others, silences = self.beats.others(now()), self.silences()
        among = [peer for peer in others if peer in silences] or others
        return random.sample(among, min(count, len(among)))

    async def _ask(self, count: int) -> None:
        """Ask so many peers for the heartbeats that they have. A node outside the run asks for all of them again."""
        known = self.beats.others(now()) if self.is_member else ()
        answers = await asyncio.gather(*(self._ask_one(peer, {*known}) for peer in self._sample(count)))
        if any(answers):
            self._asked_at = now()

    async def _ask_one(self, peer: str, known: set[str]) -> bool:
        """Ask a peer for page after page. Return whether it has answered."""
        timeout = ANSWER_SHARE * self.beats.lifetime / 2
        try:
            for _ in range(PAGES_LIMIT):
                packed = await self._network.call(peer, WHO, pack(self.beats.request(known)), timeout)
                if not packed:
                    return False
                found = self.beats.take_page(peer, packed, now(), time.time())
                known |= found
                if len(found) < PAGE:
                    break
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            return False
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.info("dropped a peer's page of heartbeats: %s", error)
            return False
        return True
