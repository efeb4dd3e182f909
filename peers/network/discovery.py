"""Discovery of a run's peers: in the DHT, which has a few for a newcomer to begin with, and by beats among them."""

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

ANSWER_SHARE = 0.3  # of a heartbeat's expiry, that a peer has to answer
FIRST_LIMIT = 2.0  # seconds that a newcomer waits for the first answers
LOOK_LIMIT = 5.0  # seconds in which a node outside the run asks who is in it
ASK_SHARE, LOOK_SHARE = 0.5, 0.1
"""Of a heartbeat's lifetime, from one question who else is there to the next: of a peer of the run, which hears them
itself, and of a node outside it."""
ASKED_FIRST = 3  # peers that are asked at the first look
PAGES_LIMIT = 32  # that one peer hands out in answer to a question
NO_NODE = "no node of the DHT takes this peer's heartbeats: newcomers do not find it"


class PeerDiscovery:
    """The peers of one run, as far as they are known here, and the calls that make them known."""

    def __init__(self, run: str, network: HivemindTransport) -> None:
        self._network = network
        self.beats = Beats(network.peer_id, run)
        self.meeting_place = MeetingPlace(self.beats)
        self._run = run
        self._published = 0
        self._voters: Collection[str] = ()
        self._telling: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -float("inf")
        self._has_met = False
        self._connected: set[str] = set()

    @property
    def copies(self) -> Copies:
        """What was heard of our own key in incarnations that are not ours."""
        return self.beats.copies

    @property
    def is_member(self) -> bool:
        """Whether we are a peer of the run, and not only looking."""
        return self.beats.own is not None

    # What we say ----------------------------------------------------------------------------------------------
    def is_news(self, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat of ours is to be signed and published, and a beat not enough."""
        is_to_be_stored = self.meeting_place.is_to_be_stored(now(), time.time())
        return is_to_be_stored or self.beats.is_news(heartbeat, now())

    def beat(self, heartbeat: Heartbeat, voters: Collection[str] = ()) -> None:
        """Begin to tell the others that we go on: in a large swarm these voters first. Before we have published a
        heartbeat it does nothing."""
        self.beats.go_on(heartbeat, now())
        self._voters = voters
        self._tell()

    async def publish(self, signed: bytes) -> bool:
        """Tell the others our signed heartbeat, and now and then the DHT. A farewell has been told when this returns.
        Returns whether a DHT node took it, if it was to.

        Raises: LocalProtocolError when the heartbeat is no newer than the one before.
        """
        said = Heartbeat.verify(signed, self._run)
        if said.sequence <= self._published:
            raise LocalProtocolError(f"heartbeat {said.sequence} does not follow {self._published}")
        self._published = said.sequence
        is_farewell = said.state is PeerState.LEAVING
        is_for_dht = is_farewell or self.meeting_place.is_to_be_stored(now(), time.time())
        self.beats.say(signed, now())
        self._tell()
        is_stored = True
        if is_for_dht:
            self.meeting_place.stored(now())
            is_stored = await self._network.dht.store_heartbeat(said, signed)
            if is_stored:
                HEALTH.well(f"dht {self._run}")
            else:
                HEALTH.failing(f"dht {self._run}", NO_NODE)
        if is_farewell:
            await asyncio.gather(*self._telling)
            self._tell()  # those that were being told something else
            await asyncio.gather(*self._telling)
        return is_stored

    def _tell(self) -> None:
        """Begin to tell those who are due."""
        self.beats.choose(self._voters, now())
        for peer in self.beats.audience.due(now()):
            task = start_task(self._tell_one(peer))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_one(self, peer: str) -> None:
        if self._network.links.port:  # it will be told something again and again
            self._network.links.prepare(peer)
        timeout = ANSWER_SHARE * self.beats.lifetime / 2
        try:
            while word := self.beats.word_for(peer):
                answer = await self._network.call(peer, word.call, word.payload, timeout)
                if not self.beats.answered(peer, word, answer, now(), time.time()):
                    break
        except asyncio.CancelledError:
            self.beats.failed(peer, now())  # else it would seem to be told something for ever
            raise
        except PeerUnreachableError as error:
            logger.debug("%s", error)
            self.beats.failed(peer, now())
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("heartbeat").inc()
            logger.info("dropped the answer to a beat: %s", error)

    async def close(self) -> None:
        HEALTH.over(f"dht {self._run}")
        await cancel_and_wait(*self._telling, *([self._asking] if self._asking else []))

    # What is known --------------------------------------------------------------------------------------------
    async def heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every peer that is known, ours included, by peer id."""
        if self.meeting_place.is_search_due(now()):
            await self._search()
        if self.beats.others(now()):
            await self._ask_around()
        self.beats.see_out(time.time())
        return self.beats.heartbeats(now())

    def silences(self) -> dict[str, float]:
        """Return for how many seconds each peer was silent, of those that we heard lately."""
        return self.beats.silences(now())

    async def _search(self) -> None:
        """Take in what the DHT has of the run's peers."""
        self.meeting_place.searched(now())
        self.beats.store.forget(time.time())
        for signed in await self._network.dht.find_heartbeats(self._run):
            try:
                self.beats.found(signed, now(), time.time())
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("heartbeat").inc()
                logger.info("dropped a heartbeat: %s", error)

    # Who else is there ----------------------------------------------------------------------------------------
    async def _ask_around(self) -> None:
        """Ask some of the peers that are known who else is there. The first look is waited for: whom the DHT has are
        few, and it decides who gives a newcomer the state."""
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
                for peer in self._some(count):
                    kept = self.beats.store.get(peer)
                    is_new = peer not in self._connected
                    if kept and is_new and await self._network.connect(peer, kept.heartbeat.addresses):
                        self._connected.add(peer)
                await self._ask(count)

    async def _meet(self) -> None:
        """Tell the first peers that we are here, ask them for all others, and tell these."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LIMIT):
                self._tell()
                await self._ask(ASKED_FIRST)
                self._tell()
                if self._telling:
                    await asyncio.wait(self._telling)

    def _some(self, count: int) -> list[str]:
        """Return so many of the others by chance: those that we hear, if we hear any."""
        others, silences = self.beats.others(now()), self.silences()
        among = [peer for peer in others if peer in silences] or others
        return random.sample(among, min(count, len(among)))

    async def _ask(self, count: int) -> None:
        """Ask so many peers for the heartbeats that they have. A node outside the run is told all of them anew."""
        known = self.beats.others(now()) if self.is_member else ()
        answers = await asyncio.gather(*(self._ask_one(peer, {*known}) for peer in self._some(count)))
        if any(answers):
            self._asked_at = now()

    async def _ask_one(self, peer: str, known: set[str]) -> bool:
        """Ask a peer page by page. Returns whether it has answered."""
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
            logger.info("dropped what a peer told us of others: %s", error)
            return False
        return True
